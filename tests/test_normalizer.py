import pytest
import torch
from tensors import draw, option_with

from nexus_ablate.axes.modules import Geometry
from nexus_ablate.axes.normalizer import NORMALIZER
from nexus_ablate.config.compose import compose

H, T = 2, 6
GEOMETRY = Geometry(n_layers=2, d_model=8, n_heads=H, n_kv_heads=H, head_dim=4, d_ff=16, context=T, vocab_size=11)
CAUSAL = torch.ones(T, T).tril().bool()


def build(name, **keys):
    return NORMALIZER.build(option_with("normalizer", name, **keys), GEOMETRY)


@pytest.fixture
def scores():
    z = draw(3, H, T, T) * 3
    return z.masked_fill(~CAUSAL, -torch.inf)


def exp_over(scores, extra):
    e = scores.double().exp()
    return (e / (e.sum(-1, keepdim=True) + extra)).float()


def test_softmax_is_exponentials_over_their_sum(scores):
    torch.testing.assert_close(build("softmax")(scores), exp_over(scores, 0))


def test_softmax1_adds_one_to_the_sum(scores):
    torch.testing.assert_close(build("softmax1")(scores), exp_over(scores, 1))


def test_softmax1_stays_finite_and_right_where_exponentials_overflow_or_vanish():
    normalize = build("softmax1")
    torch.testing.assert_close(normalize(torch.tensor([[[[1000.0, 1000.0]]]])), torch.full((1, 1, 1, 2), 0.5))
    torch.testing.assert_close(normalize(torch.full((1, 1, 1, 2), -1000.0)), torch.zeros(1, 1, 1, 2))
    assert torch.isfinite(normalize(torch.tensor([[[[1e4, -torch.inf]]]]))).all()


def test_sink_adds_the_exponential_of_its_head_s_score(scores):
    normalize = build("sink")
    with torch.no_grad():
        normalize.logit_H.copy_(torch.tensor([-1.0, 2.0]))
    expected = torch.cat([exp_over(scores[:, h : h + 1], normalize.logit_H[h].double().exp()) for h in range(H)], 1)
    torch.testing.assert_close(normalize(scores), expected)


def test_sink_at_zero_is_softmax1_and_far_below_is_softmax(scores):
    torch.testing.assert_close(build("sink", start=0.0)(scores), build("softmax1")(scores))
    torch.testing.assert_close(build("sink", start=-100.0)(scores), build("softmax")(scores))


@pytest.mark.parametrize(("zeta", "gamma"), [(1.0, -0.1), (1.1, 0.0), (1.2, -0.3)])
def test_clipped_is_stretched_and_cut(scores, zeta, gamma):
    p = exp_over(scores, 0)
    expected = torch.clip((zeta - gamma) * p + gamma, 0, 1)
    torch.testing.assert_close(build("clipped", zeta=zeta, gamma=gamma)(scores), expected)


def test_clipped_gives_exact_zeros_below_the_published_threshold_and_no_gradient_there(scores):
    normalize = build("clipped", alpha=2.0)
    assert normalize.gamma == -2.0 / T
    scores.requires_grad_()
    weights, p = normalize(scores), exp_over(scores, 0)
    threshold = -normalize.gamma / (1 - normalize.gamma)
    assert torch.equal(weights == 0, p <= threshold)
    assert (weights > 0).any()
    (grad,) = torch.autograd.grad(weights[0, 0, -1].sum(), scores)
    if (p[0, 0, -1] <= threshold).all():
        assert not grad.any()


def test_clipped_says_that_short_rows_are_barely_clipped():
    notes = compose(["normalizer=clipped"]).resolved.notes
    assert [n for n in notes if n.startswith("normalizer=clipped: ") and "first queries" in n]


@pytest.mark.parametrize("normalized", [False, True])
def test_sigmoid_is_the_authors_masked_sigmoid(scores, normalized):
    weights = torch.sigmoid(scores.masked_fill(~CAUSAL, 0)) * CAUSAL  # they mask by multiplication
    if normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-8)
    torch.testing.assert_close(build("sigmoid", normalized=normalized)(scores), weights)


@pytest.mark.parametrize("name", NORMALIZER.names())
def test_weights_are_float32_between_0_and_1_and_0_where_masked(scores, name):
    weights = build(name)(scores.bfloat16())
    assert weights.dtype == torch.float32
    assert ((weights >= 0) & (weights <= 1)).all()
    assert (weights.masked_select(~CAUSAL) == 0).all()


@pytest.mark.parametrize("name", NORMALIZER.names())
def test_shift_invariance_is_reported_correctly(scores, name):
    normalize = build(name)
    same = torch.allclose(normalize(scores + 1), normalize(scores), rtol=0, atol=1e-5)
    assert same is normalize.shift_invariant

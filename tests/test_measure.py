import copy

import pytest
import torch

from nexus_ablate.measure.probe import due, evaluation_mode, outlier_figures, probe, weight_rms
from nexus_ablate.measure.statistics import kurtosis_token, max_abs, max_over_median, rms
from nexus_ablate.model import build_model

TOKENS = torch.randint(0, 11, (2, 8), generator=torch.Generator().manual_seed(0))


def test_statistics_of_a_hand_made_tensor():
    x = torch.tensor([[[1.0, -1.0, 2.0, -2.0]]])
    assert rms(x).item() == pytest.approx(2.5**0.5)
    assert max_abs(x).item() == 2.0
    assert max_over_median(x).item() == 2.0  # the lower of the two middle magnitudes, as torch.median takes it
    assert kurtosis_token(x).item() == pytest.approx((2 * 1 + 2 * 16) / 4 / 2.5**2)


def test_kurtosis_is_pearson_s_3_for_a_gaussian_token_and_is_not_excess():
    x = torch.randn(1, 4000, 64, generator=torch.Generator().manual_seed(0))
    assert kurtosis_token(x).item() == pytest.approx(3 * 63 / 65, rel=0.01)


def test_kurtosis_ignores_shift_and_scale_of_a_token():
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(kurtosis_token(7 * x + 5), kurtosis_token(x), rtol=1e-3, atol=0)


def test_max_over_median_finds_one_planted_entry():
    x = torch.ones(3, 5, 8)
    x[1, 2, 3] = -1000.0
    assert max_over_median(x).item() == pytest.approx((1 + 1000 + 1) / 3)


def test_a_probe_reports_every_block_site_and_statistic(tiny):
    model = build_model(tiny(), 11)
    found = probe(model, TOKENS)
    assert len(found) == 2 * 3 * 4
    x = model.embedding(TOKENS)
    attn = model.blocks[0].attn(model.blocks[0].norm_attn(x), model.position)
    assert found["act/block_000/attn/rms"] == pytest.approx(rms(attn).item(), rel=1e-5)
    assert found["act/block_000/resid/max_abs"] == pytest.approx(
        max_abs(model.blocks[0](x, model.position)).item(), rel=1e-5
    )
    assert outlier_figures(found)["act/resid/rms"] == max(found[f"act/block_00{i}/resid/rms"] for i in (0, 1))


@pytest.mark.parametrize("overrides", [(), ("norm=batch",), ("model.dropout=0.3",)], ids=str)
def test_a_probe_leaves_no_trace(tiny, overrides):
    """Parameters, buffers, gradients, mode, hooks, random state and the next loss, bit by bit."""
    model = build_model(tiny(*overrides), 11).train()
    twin = copy.deepcopy(model)

    def next_loss(m):
        torch.manual_seed(5)
        loss = torch.nn.functional.cross_entropy(m(TOKENS[:, :-1]).flatten(0, 1), TOKENS[:, 1:].flatten())
        loss.backward()
        return loss

    before = torch.get_rng_state()
    probe(model, TOKENS)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert not [m for m in model.modules() if m._forward_hooks]
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(next_loss(model), next_loss(twin))
    for ours, theirs in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_a_probe_outside_evaluation_mode_would_leave_a_trace(tiny):
    """The control of the test above: a forward pass in training mode does move BatchNorm's running statistics."""
    model = build_model(tiny("norm=batch"), 11).train()
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model(TOKENS)
    assert any(not torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_hooks_are_gone_even_when_the_pass_fails(tiny):
    model = build_model(tiny("position=learned"), 11)
    with pytest.raises(ValueError, match="8 positions"):
        probe(model, torch.zeros(1, 9, dtype=torch.long))
    assert not [m for m in model.modules() if m._forward_hooks]


def test_evaluation_mode_gives_back_the_mode_that_was_there(tiny):
    model = build_model(tiny(), 11)
    for mode in (True, False):
        model.train(mode)
        with evaluation_mode(model):
            assert not model.training
        assert model.training is mode


def test_probes_fall_on_powers_of_two_and_every_so_often():
    assert [s for s in range(130) if due(s, 50)] == [1, 2, 4, 8, 16, 32, 50, 64, 100, 128]


def test_weight_rms_is_over_all_matrix_entries_of_a_block(tiny):
    model = build_model(tiny("bias=on"), 11)
    entries = torch.cat([p.flatten() for p in model.blocks[1].parameters() if p.ndim > 1])
    assert weight_rms(model)["weight_rms/block_001"] == pytest.approx(rms(entries).item(), rel=1e-5)

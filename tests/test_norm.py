import pytest
import torch
from tensors import draw, option_with, randomise
from torch import nn
from torch.nn import functional

from nexus_ablate.axes.norm import NORM
from nexus_ablate.model import build_model


def build(name, width=8, bias=False, site="ffn", **keys):
    return NORM.build(option_with("norm", name, **keys), width, bias, site)


@pytest.fixture
def x():
    return draw(2, 5, 8) * 3 + 1


def layer_norm(x, gain=None, bias=None):
    return functional.layer_norm(x, (8,), gain, bias, 1e-5)


def rms_norm(x, gain):
    return functional.rms_norm(x, (8,), gain, 1e-6)


DEFINITIONS = {
    "layer": lambda n, x: layer_norm(x, n.gain, n.bias),
    "layer_zero": lambda n, x: layer_norm(x, 1 + n.excess, n.bias),
    "layer_nonparam": lambda n, x: layer_norm(x),
    "rms": lambda n, x: rms_norm(x, n.gain) + n.bias,
    "rms_zero": lambda n, x: rms_norm(x, 1 + n.excess) + n.bias,
    "rms_nonparam": lambda n, x: rms_norm(x, None),
    "none": lambda n, x: x,
    "t5": lambda n, x: rms_norm(x, n.gain),
    "rms_outside": lambda n, x: n.gain * x / (x.norm(2, dim=-1, keepdim=True) * 8**-0.5 + 1e-8) + n.bias,
    "scale": lambda n, x: n.gain * functional.normalize(x, dim=-1, eps=1e-5) + n.bias,
    "dyt": lambda n, x: n.gain * torch.tanh(n.alpha * x) + n.bias,
    "derf": lambda n, x: n.gain * torch.erf(n.alpha * x + n.shift) + n.bias,
}
"""Norms as torch or their authors define them."""


WITHOUT_PARAMETERS = ("none", "layer_nonparam", "rms_nonparam")


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_norm_is_its_definition(name, x):
    norm = randomise(build(name, bias=name not in ("t5", *WITHOUT_PARAMETERS)))
    torch.testing.assert_close(norm(x), DEFINITIONS[name](norm, x), rtol=0, atol=2e-6)
    assert any(True for _ in norm.parameters()) is (name not in WITHOUT_PARAMETERS)


STARTS = {
    "scale": {"gain": 8**0.5},
    "derf": {"alpha": 1, "shift": 0},
    "rms_zero": {"excess": 0},
    "layer_zero": {"excess": 0},
}


@pytest.mark.parametrize("name", STARTS)
def test_a_norm_starts_as_its_authors_say(name):
    parameters = dict(build(name).named_parameters())
    for key, value in STARTS[name].items():
        torch.testing.assert_close(parameters[key], torch.full_like(parameters[key], value))


def test_batch_is_torch_s_batch_norm_in_both_modes_and_keeps_its_running_statistics(x):
    actual, expected = randomise(build("batch", bias=True)), nn.BatchNorm1d(8, eps=1e-5, momentum=0.1)
    expected.weight, expected.bias = actual.gain, actual.bias
    for _ in range(3):
        torch.testing.assert_close(actual(x), expected(x.flatten(0, 1)).view_as(x), rtol=0, atol=1e-5)
    torch.testing.assert_close(actual.running_mean, expected.running_mean)
    torch.testing.assert_close(actual.running_var, expected.running_var)
    actual.eval(), expected.eval()
    torch.testing.assert_close(actual(x), expected(x.flatten(0, 1)).view_as(x), rtol=0, atol=1e-5)


def test_dyt_has_no_bias_as_in_the_authors_language_model_unless_one_is_asked_for(tiny):
    """Its parameters are those of LLaMA's DynamicTanh: a scalar alpha and a gain of the width."""
    for overrides, names in (
        (["norm=dyt"], {"alpha", "gain"}),
        (["norm=dyt", "norm_bias=on"], {"alpha", "gain", "bias"}),
    ):
        norm = build_model(tiny(*overrides), 11).blocks[0].norm_attn
        assert {name for name, _ in norm.named_parameters()} == names


@pytest.mark.parametrize(
    ("keys", "attn", "other"),
    [
        ({"width": 128}, 1.0, 1.0),
        ({"width": 512}, 1.0, 1.0),
        ({"width": 2048}, 1.0, 0.5),
        ({"width": 4096}, 0.8, 0.2),
        ({"width": 5120}, 0.6, 0.15),
        ({"width": 8192}, 0.2, 0.05),
        ({"width": 128, "alpha_attn": 0.3}, 0.3, 1.0),
        ({"width": 128, "alpha_other": 0.7}, 1.0, 0.7),
    ],
)
def test_dyt_starts_at_the_published_alpha_of_its_width_and_site_or_at_what_is_asked_for(keys, attn, other):
    for site, alpha in (("attn", attn), ("ffn", other), ("final", other)):
        assert build("dyt", site=site, **keys).alpha.item() == pytest.approx(alpha)


def test_t5_computes_in_float32_and_keeps_the_input_s_precision(x):
    norm, low = randomise(build("t5")), x.bfloat16()
    mean_square = low.float().square().mean(-1, keepdim=True)
    expected = norm.gain.bfloat16() * (low * torch.rsqrt(mean_square + 1e-6)).bfloat16()
    assert torch.equal(norm(low), expected)
    assert norm(low).dtype == torch.bfloat16


@pytest.mark.parametrize("name", [n for n in NORM.names() if "gain_init" in NORM.keys_of(n)])
def test_gain_init_multiplies_what_a_norm_starts_with(name, x):
    torch.testing.assert_close(build(name, gain_init=0.25)(x), 0.25 * build(name)(x))
    assert torch.equal(build(name, gain_init=0.0)(x), torch.zeros_like(x))


@pytest.mark.parametrize(
    ("sites", "scaled"),
    [
        (None, {"attn", "ffn", "attn_out", "ffn_out"}),
        ("[ffn_out]", {"ffn_out"}),
        ("[attn,ffn_out]", {"attn", "ffn_out"}),
        ("[attn_out,final]", {"attn_out", "final"}),
    ],
)
def test_gain_init_reaches_the_sites_that_are_named_by_default_all_in_the_blocks(tiny, sites, scaled):
    chosen = [] if sites is None else [f"norm_gain_sites={sites}"]
    model = build_model(tiny("placement=sandwich", "qk_norm=rms", "norm.gain_init=0.25", *chosen), 11)
    block = model.blocks[1]
    norms = {"attn": block.norm_attn, "ffn": block.norm_ffn, "attn_out": block.norm_attn_out}
    norms |= {"ffn_out": block.norm_ffn_out, "final": model.final_norm, "query": block.attn.qk_norm.query}
    assert {site for site, norm in norms.items() if norm.gain.eq(0.25).all()} == scaled
    assert all(norm.gain.eq(1).all() for site, norm in norms.items() if site not in scaled)


@pytest.mark.parametrize("name", ["layer", "rms", "rms_zero", "rms_outside", "scale", "batch", "dyt", "derf"])
def test_bias_adds_a_vector_of_zeros_and_nothing_else(name, x):
    without, with_bias = build(name, bias=False), build(name, bias=True)
    assert {n for n, _ in with_bias.named_parameters()} - {n for n, _ in without.named_parameters()} == {"bias"}
    assert torch.equal(without(x), with_bias(x))


# -------------------------------------------------------------------------------------------------- low precision

LOW = [torch.bfloat16, torch.float16]


def low_input(dtype, offset, width=96):
    x = draw(64, width, seed=1) + offset
    grad = draw(64, width, seed=2)
    return x.to(dtype), grad.to(dtype)


def rounded_by_hand(name, x, grad, gain, eps):
    """Output, input gradient and gain gradient, every operation exact in float64 and then rounded to the precision."""

    def r(value):
        return value.to(x.dtype).double()

    def mean(value):
        return r(value.mean(-1, keepdim=True))

    x64, grad, gain = x.double(), grad.double(), gain.double()
    centred = r(x64 - mean(x64)) if name == "layer" else x64
    inverse = r(1 / r(mean(r(centred.square())) + eps).sqrt())
    normed = r(centred * inverse)
    h = r(grad * gain)
    along = r(normed * mean(r(h * normed)))
    h = r(h - mean(h)) if name == "layer" else h
    return r(normed * gain), r(r(h - along) * inverse), r(r(grad * normed).sum(0))


def computed(name, x, grad, eps):
    norm = build(name, width=x.shape[-1], eps=eps, fp32=False)
    with torch.no_grad():
        norm.gain.copy_(torch.linspace(0.5, 2, x.shape[-1]))
    x = x.clone().requires_grad_()
    y = norm(x)
    assert y.dtype == x.dtype
    return y.detach(), *torch.autograd.grad(y, (x, norm.gain), grad), norm.gain.detach().to(x.dtype)


@pytest.mark.parametrize("name", ["layer", "rms"])
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("offset", [0, 30])
@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-7, 1e-8])
def test_fp32_off_rounds_every_intermediate_of_both_passes(name, dtype, offset, eps):
    x, grad = low_input(dtype, offset)
    *result, gain = computed(name, x, grad, eps)
    for actual, expected in zip(result, rounded_by_hand(name, x, grad, gain, eps), strict=True):
        same = (actual.double() == expected).double().mean().item()
        assert same > 0.98  # sums in another order, and float32 in between, now and then fall to the other neighbour


def test_in_float16_a_small_eps_underflows_and_a_token_of_zeros_is_not_a_number():
    zeros = torch.zeros(1, 8, dtype=torch.float16)
    for name in ("layer", "rms"):
        assert torch.isnan(build(name, eps=1e-8, fp32=False)(zeros)).all()
        assert torch.equal(build(name, eps=1e-6, fp32=False)(zeros), zeros)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["layer", "rms"])
def test_a_compiled_norm_rounds_as_an_eager_one(name):
    """The control: a compiled chain of bfloat16 operations keeps what is between them in float32."""
    x, grad = low_input(torch.bfloat16, 30)
    norm = build(name, width=96, fp32=False)

    def both_passes(call):
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        return y, torch.autograd.grad(y, leaf, grad)[0]

    eager, compiled = both_passes(norm), both_passes(torch.compile(lambda x: norm(x), fullgraph=True))
    assert all(torch.equal(*pair) for pair in zip(eager, compiled, strict=True))

    def chain(x):
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)

    assert not torch.equal(torch.compile(chain)(x), chain(x))


@pytest.mark.parametrize("name", [n for n in NORM.names() if "fp32" in NORM.keys_of(n)])
def test_fp32_off_takes_statistics_in_the_low_precision(name):
    x = (draw(4, 64, seed=1) * 3).bfloat16().float()
    exact = build(name, width=64)(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kept, lowered = build(name, width=64, fp32=True)(x), build(name, width=64, fp32=False)(x)
    assert torch.equal(kept.float(), exact)
    assert lowered.dtype == torch.bfloat16
    assert 0 < (lowered.float() - exact).abs().max() < 0.2

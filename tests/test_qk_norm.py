import math

import pytest
import torch
from tensors import draw
from torch import nn
from torch.nn import functional as F

from nexus_ablate.axes.modules import Geometry
from nexus_ablate.axes.qk_norm import QK_NORM
from nexus_ablate.config.options import default_option
from nexus_ablate.model import build_model

H, G, D, T = 4, 2, 6, 5
GEOMETRY = Geometry(n_layers=2, d_model=24, n_heads=H, n_kv_heads=G, head_dim=D, d_ff=16, context=T, vocab_size=11)


def build(name, ones=False, **keys):
    option = default_option("qk_norm", name)
    option.keys |= ({"eps": 1e-6} if option.keys.get("eps") == "auto" else {}) | keys
    norm = QK_NORM.build(option, GEOMETRY)
    with torch.no_grad():
        for i, p in enumerate(norm.parameters()):
            if p.ndim and not ones:
                p.copy_(draw(*p.shape, seed=i))
    return norm


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(9)
    return tuple(3 * torch.randn(2, T, heads, D, generator=generator) + 1 for heads in (H, G, G))


def rms(x, module, eps=1e-6):
    return F.rms_norm(x, (x.shape[-1],), module.gain, eps)


def test_every_option_is_torch_s_own_norm_over_its_width(qkv):
    q, k, v = qkv
    for name, expected in {
        "none": lambda n: (q, k, v),
        "rms": lambda n: (rms(q, n.query), rms(k, n.key), v),
        "q_only": lambda n: (rms(q, n.query), k, v),
        "k_only": lambda n: (q, rms(k, n.key), v),
        "qkv": lambda n: (rms(q, n.query), rms(k, n.key), rms(v, n.value)),
        "rms_full": lambda n: (
            rms(q.reshape(2, T, H * D), n.query).reshape(2, T, H, D),
            rms(k.reshape(2, T, G * D), n.key).reshape(2, T, G, D),
            v,
        ),
        "layer": lambda n: (
            F.layer_norm(q, (D,), n.query.gain, None, 1e-6),
            F.layer_norm(k, (D,), n.key.gain, None, 1e-6),
            v,
        ),
        "l2": lambda n: (n.g * q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True), v),
    }.items():
        norm = build(name)
        torch.testing.assert_close(norm(*qkv), expected(norm), rtol=0, atol=1e-5, msg=name)


def test_the_expected_options_are_all_there_are():
    assert QK_NORM.names() == ["k_only", "l2", "layer", "ngpt", "none", "q_only", "qkv", "rms", "rms_full"]


def test_l2_replaces_the_scale_by_a_learned_scalar_of_the_published_start():
    for context, start in ((256, 16.0), (512, 18.0), (1024, 20.0)):
        geometry = Geometry(2, 24, H, G, D, 16, context, 11)
        norm = QK_NORM.build(default_option("qk_norm", "l2"), geometry)
        assert norm.g.item() == pytest.approx(math.log2(context**2 - context))
        assert norm.g.item() == pytest.approx(start, abs=0.01)
    assert norm.scale == 1.0


def test_the_norm_comes_before_rotation(tiny):
    """With a gain for each channel the order matters: rotation mixes channels."""
    model = build_model(tiny("qk_norm=rms", "position=rope"), 11)
    attn, seen = model.blocks[0].attn, []
    with torch.no_grad():
        attn.qk_norm.query.gain.copy_(torch.arange(1.0, 9))
    attn.core.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    x = torch.randn(1, 8, 16)
    attn(x, model.context(x))
    q = attn.query(x).unflatten(-1, (2, 8))
    expected = nn.RMSNorm(8, eps=1e-6)
    expected.weight = attn.qk_norm.query.gain
    normed = expected(q).transpose(1, 2)
    torch.testing.assert_close(seen[0], model.position.rotate(normed, normed, 0)[0], rtol=0, atol=1e-5)


def test_statistics_are_float32_under_autocast(tiny):
    model = build_model(tiny("qk_norm=rms"), 11)
    seen = []
    model.blocks[0].attn.core.register_forward_pre_hook(lambda m, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.isfinite(model(torch.randint(0, 11, (2, 8)))).all()
    assert seen == [torch.float32]


def test_a_gain_of_each_head_is_torch_s_norm_times_it(qkv):
    for name, plain in (
        ("rms", lambda x: F.rms_norm(x, (D,), None, 1e-6)),
        ("layer", lambda x: F.layer_norm(x, (D,), None, None, 1e-6)),
    ):
        norm = build(name, gain="per_head")
        q, k, _ = norm(*qkv)
        assert (norm.query.gain.shape, norm.key.gain.shape) == ((H, D), (G, D))
        torch.testing.assert_close(q, plain(qkv[0]) * norm.query.gain)
        torch.testing.assert_close(k, plain(qkv[1]) * norm.key.gain)


@pytest.mark.parametrize("gain", ["shared", "per_head"])
def test_the_bias_of_the_layer_norm_is_added_last(qkv, gain):
    norm = build("layer", gain=gain, bias=True)
    expected = F.layer_norm(qkv[0], (D,), None, None, 1e-6) * norm.query.gain + norm.query.bias
    torch.testing.assert_close(norm(*qkv)[0], expected)


@pytest.mark.parametrize("gain", ["shared", "per_head"])
def test_a_zero_centred_gain_is_one_more_than_what_is_learned(qkv, gain):
    norm = build("rms", gain=gain, zero_centred=True)
    (learned,) = norm.query.parameters()
    torch.testing.assert_close(norm(*qkv)[0], F.rms_norm(qkv[0], (D,), None, 1e-6) * (1 + learned))
    assert all(
        torch.equal(p, torch.zeros_like(p)) for p in build("rms", True, gain=gain, zero_centred=True).parameters()
    )


def test_without_a_gain_nothing_is_learned(qkv):
    assert not list(build("rms", gain="off").parameters())
    torch.testing.assert_close(build("rms", gain="off")(*qkv)[1], F.rms_norm(qkv[1], (D,), None, 1e-6))


def test_after_rotation_the_norm_is_of_what_the_position_scheme_makes_of_q_and_k(tiny):
    model = build_model(tiny("qk_norm=rms", "qk_norm.after_rotation=on", "n_kv_heads=1"), 11)
    attention = model.blocks[0].attn
    with torch.no_grad():
        for p in attention.qk_norm.parameters():
            p.copy_(draw(*p.shape, seed=len(p)))
    q, k = torch.randn(1, 2, 8, 8), torch.randn(1, 1, 8, 8)
    turned = model.position.rotate(q, k, 0)
    placed_q, placed_k, _ = attention.core.place(q, k, model.position)
    torch.testing.assert_close(placed_q, rms(turned[0], attention.qk_norm.query))
    torch.testing.assert_close(placed_k, rms(turned[1], attention.qk_norm.key))


@pytest.mark.parametrize("name", ["rms", "rms_full", "layer", "q_only", "k_only", "qkv"])
def test_eps_follows_the_block_norm_unless_set(tiny, name):
    def eps(*overrides):
        return tiny(f"qk_norm={name}", *overrides).resolved.qk_norm.keys["eps"]

    assert eps() == 1e-6
    assert eps("norm=layer") == eps("norm.eps=1e-5") == 1e-5
    assert eps("norm=dyt") == 1e-6
    assert eps("norm=layer", "qk_norm.eps=1e-3") == 1e-3
    assert tiny("placement=hybridnorm", "norm.eps=1e-4").resolved.qk_norm.keys["eps"] == 1e-4

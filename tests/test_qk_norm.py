import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nexus_ablate.axes.qk_norm import QK_NORM
from nexus_ablate.axes.roles import Geometry
from nexus_ablate.config.options import default_option
from nexus_ablate.model import build_model

H, G, D, T = 4, 2, 6, 5
GEOMETRY = Geometry(n_layers=2, d_model=24, n_heads=H, n_kv_heads=G, head_dim=D, d_ff=16, context=T, vocab_size=11)


def build(name, **keys):
    option = default_option("qk_norm", name)
    option.keys |= keys
    norm = QK_NORM.build(option, GEOMETRY)
    with torch.no_grad():
        for i, p in enumerate(norm.parameters()):
            if p.ndim:
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
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
        "qkv": lambda n: (rms(q, n.query, 1e-5), rms(k, n.key, 1e-5), rms(v, n.value, 1e-5)),
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
    assert QK_NORM.names() == ["k_only", "l2", "layer", "none", "q_only", "qkv", "rms", "rms_full"]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("none", []),
        ("rms", [D, D]),
        ("layer", [D, D]),
        ("rms_full", [H * D, G * D]),
        ("q_only", [D]),
        ("k_only", [D]),
        ("qkv", [D, D, D]),
        ("l2", [1]),
    ],
)
def test_gains_have_the_width_that_is_normed_and_no_bias(name, sizes):
    assert [p.numel() for p in build(name).parameters()] == sizes


def test_gains_start_at_one_whatever_the_block_norms_start_at(tiny):
    model = build_model(tiny("qk_norm=rms", "norm.gain_init=0.5"), 11)
    assert torch.equal(model.blocks[0].attn.qk_norm.key.gain, torch.ones(8))
    assert torch.equal(model.blocks[0].norm_attn.gain, torch.full((16,), 0.5))


def test_over_all_heads_is_not_by_head(qkv):
    full, by_head = QK_NORM.build(default_option("qk_norm", "rms_full"), GEOMETRY), build("none")
    q, _, _ = full(*qkv)
    torch.testing.assert_close(q.square().mean((2, 3)), torch.ones(2, T), rtol=0, atol=1e-4)
    assert (q.square().mean(3) - 1).abs().max() > 0.1
    assert by_head(*qkv)[0] is qkv[0]


def test_l2_replaces_the_scale_by_a_learned_scalar_of_the_published_start():
    for context, start in ((256, 16.0), (512, 18.0), (1024, 20.0)):
        geometry = Geometry(2, 24, H, G, D, 16, context, 11)
        norm = QK_NORM.build(default_option("qk_norm", "l2"), geometry)
        assert norm.g.item() == pytest.approx(math.log2(context**2 - context))
        assert norm.g.item() == pytest.approx(start, abs=0.01)
    assert norm.scale == 1.0


def test_scores_under_l2_lie_between_minus_g_and_g(tiny):
    model = build_model(tiny("qk_norm=l2", "position=rope", "init=xavier"), 11)
    attn, seen = model.blocks[0].attn, []
    attn.core.register_forward_pre_hook(lambda m, args: seen.append(m.scale * m.score(*args[:2])))
    model(torch.randint(0, 11, (2, 8)))
    assert attn.core.scale == 1
    assert seen[0].abs().max() <= attn.qk_norm.g * (1 + 1e-5)
    diagonal = torch.arange(8)
    assert seen[0][..., diagonal, diagonal].abs().max() > 1e-3


@pytest.mark.parametrize("name", QK_NORM.names())
def test_whether_keys_are_normed_is_told_truly(name, qkv):
    norm = build(name)
    q, k, v = qkv
    bias = torch.linspace(-2, 2, D)
    moved = norm(q, k + bias, v)[1] - norm(q, k, v)[1]
    same_for_all_keys = torch.allclose(moved, moved[:1, :1, :1].expand_as(moved), rtol=0, atol=1e-5)
    assert same_for_all_keys is not norm.norms_keys


def test_the_norm_comes_before_rotation(tiny):
    """With a gain for each channel the order matters: rotation mixes channels."""
    model = build_model(tiny("qk_norm=rms", "position=rope"), 11)
    attn, seen = model.blocks[0].attn, []
    with torch.no_grad():
        attn.qk_norm.query.gain.copy_(torch.arange(1.0, 9))
    attn.core.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    x = torch.randn(1, 8, 16)
    attn(x, model.position)
    q = attn.query(x).unflatten(-1, (2, 8))
    theirs = nn.RMSNorm(8, eps=1e-6)
    theirs.weight = attn.qk_norm.query.gain
    normed = theirs(q).transpose(1, 2)
    torch.testing.assert_close(seen[0], model.position.rotate(normed, normed, 0)[0], rtol=0, atol=1e-5)


def test_statistics_are_float32_under_autocast(tiny):
    model = build_model(tiny("qk_norm=rms"), 11)
    seen = []
    model.blocks[0].attn.core.register_forward_pre_hook(lambda m, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.isfinite(model(torch.randint(0, 11, (2, 8)))).all()
    assert seen == [torch.float32]

import math

import pytest
import torch
from tensors import draw, randomise
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


@pytest.mark.parametrize("after", ["off", "on"])
def test_the_norm_is_before_the_rotation_or_after_it(tiny, after):
    """With a gain for each channel the order matters: rotation mixes channels."""
    model = build_model(tiny("qk_norm=rms", f"qk_norm.after_rotation={after}", "n_kv_heads=1"), 11)
    attn, seen = model.blocks[0].attn, []
    randomise(attn.qk_norm)
    attn.core.register_forward_pre_hook(lambda m, args: seen.extend(args[:2]))
    x = draw(1, 8, 16)
    attn(x, model.context(x))

    def normed(q, k):
        return rms(q, attn.qk_norm.query), rms(k, attn.qk_norm.key)

    def rotated(q, k):
        return model.position.rotate(q, k, 0)

    q, k = (project(x).unflatten(-1, (-1, 8)).transpose(1, 2) for project in (attn.query, attn.key))
    expected = normed(*rotated(q, k)) if after == "on" else rotated(*normed(q, k))
    torch.testing.assert_close(seen, [*expected])


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        ("position=rope", True),
        ("position=transformer_xl", True),
        ("position=alibi", False),
        ("position=t5 gate=none", False),
        ("position=alibi conv=canon", True),
        ("position=alibi gate=elementwise gate.site=key", True),
        ("position=alibi attention=luong_general", True),
    ],
)
def test_a_norm_after_a_rotation_that_is_not_there_is_one_before_it(tiny, overrides, kept):
    """With nothing else between the two places; proved with random gains."""
    after = tiny("qk_norm=rms", "qk_norm.after_rotation=on", *overrides.split())
    before = tiny("qk_norm=rms", *overrides.split())
    assert (after.science() != before.science()) is kept
    before.resolved.qk_norm.keys["after_rotation"] = True  # as it was typed
    models = [build_model(config, 11) for config in (before, tiny("qk_norm=rms", *overrides.split()))]
    for model in models:
        for block in model.blocks:
            randomise(block)
    tokens = torch.arange(16).view(2, 8) % 11
    assert torch.equal(models[0](tokens), models[1](tokens)) is not kept


def test_statistics_are_float32_under_autocast(tiny):
    model = build_model(tiny("qk_norm=rms"), 11)
    seen = []
    model.blocks[0].attn.core.register_forward_pre_hook(lambda m, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.isfinite(model(torch.randint(0, 11, (2, 8)))).all()
    assert seen == [torch.float32]


@pytest.mark.parametrize(("name", "keys"), [
    ("rms", {"gain": "per_head"}), ("layer", {"gain": "per_head"}), ("rms", {"gain": "off"}),
    ("layer", {"bias": True}), ("layer", {"gain": "per_head", "bias": True}),
    ("rms", {"zero_centred": True}), ("rms", {"gain": "per_head", "zero_centred": True}),
])  # fmt: skip
def test_gain_and_bias_of_a_norm_are_what_their_keys_say(qkv, name, keys):
    """A zero-centred gain is one more than what is learned, and starts at 0."""
    norm = build(name, **keys)
    q, k, _ = norm(*qkv)
    for actual, x, part, heads in ((q, qkv[0], norm.query, H), (k, qkv[1], norm.key, G)):
        learned = [*part.parameters()]
        shape = (heads, D) if keys.get("gain") == "per_head" else (D,)
        assert [p.shape for p in learned] == [shape] * ((keys.get("gain") != "off") + ("bias" in keys))
        plain = F.rms_norm(x, (D,), None, 1e-6) if name == "rms" else F.layer_norm(x, (D,), None, None, 1e-6)
        gain = learned[0] + ("zero_centred" in keys) if learned else 1
        torch.testing.assert_close(actual, plain * gain + (learned[1] if "bias" in keys else 0))
    if "zero_centred" in keys:
        assert not any(p.any() for p in build(name, True, **keys).parameters())


@pytest.mark.parametrize("name", ["rms", "rms_full", "layer", "q_only", "k_only", "qkv"])
def test_eps_follows_the_block_norm_unless_set(tiny, name):
    def eps(*overrides):
        return tiny(f"qk_norm={name}", *overrides).resolved.qk_norm.keys["eps"]

    assert eps() == 1e-6
    assert eps("norm=layer") == eps("norm.eps=1e-5") == 1e-5
    assert eps("norm=dyt") == 1e-6
    assert eps("norm=layer", "qk_norm.eps=1e-3") == 1e-3
    assert tiny("placement=hybridnorm", "norm.eps=1e-4").resolved.qk_norm.keys["eps"] == 1e-4

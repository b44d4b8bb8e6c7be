import functools
import itertools

import pytest
import torch
from conftest import TINY
from equivalences import declared
from options import ALL, EVERY_OPTION, NEEDS, option_pairs
from tensors import TOKENS, next_token_loss, randomise

from nexus_ablate.attention_core import AttentionCore
from nexus_ablate.axes.modules import parameter_roles
from nexus_ablate.config.compose import compose
from nexus_ablate.config.grammar import show
from nexus_ablate.config.options import COMMON_KEYS, option_files
from nexus_ablate.errors import UserError
from nexus_ablate.measure.counts import flops_per_token, parameters
from nexus_ablate.model import build_model, countable_model

PAIRS = [pytest.param(pair, marks=[pytest.mark.slow] * (i % 6 > 0)) for i, pair in enumerate(option_pairs())]


def build(tiny, *overrides):
    return build_model(tiny(*overrides), vocab_size=11)


def buildable(tiny, overrides):
    """The model, or None where the options refuse each other."""
    try:
        return build(tiny, *overrides)
    except UserError:
        return None


def after_a_step(model):
    """Logits after one step of gradient descent: which distinguishes options that start equal."""
    loss = next_token_loss(model)
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.5 * p.grad
    return model(TOKENS)


@functools.cache
def learned(overrides):
    """The logits of a tiny model after a step, once for all the options that it is compared with."""
    return after_a_step(build_model(compose([*TINY, *overrides]), vocab_size=11)).detach()


SWITCHES = {
    "bias": "off on",
    "norm_bias": "off on",
    "d_ff_ratio": "2 4 8/3",
    "final_norm": "off on",
    "embed_scale": "off sqrt_d learned 3",
    "embed_norm": "off on",
    "d_embed": "auto 8",
    "head_bias": "off on",
    "logit_scale": "off 0.5",
    "nope_every": "off 2",
    "clip_qkv": "off 0.01",
    "tie_embeddings": "off on",
    "model.n_layers": "1 2",
    "model.n_heads": "2 4",
    "model.head_dim": "auto 4",
    "norm.gain_init=0.5 norm_gain_sites": "blocks [attn] [ffn] [attn,final]",
    "seed": "0 1",
    "qkv_bias": "off on",
    "attn_out_bias": "off on",
    "ffn_bias": "off on",
    "n_kv_heads": "1 2",
    "window": "off 2 [2,0]",
    "attn_scale": "auto 1",
    "attn_softcap": "off 0.1",
    "final_softcap": "off 0.1",
    "kv_bias": "off key key_value",
    "sink_token": "off on",
    **{
        f"model.n_layers=3 {option} {option.partition('=')[0]}.layers": "all [0,1] [1,2]"
        for option in ("mixer=gated_delta", "ffn=gelu", "gate=headwise", "value=residual", "qk_norm=rms", "conv=canon")
    },
}
"""Values that each key which belongs to no option may take in turn; what is before the key is set for all of them."""
BEFORE = {
    "norm=scale norm.eps": "init=gpt2",
    "placement=mixln placement.post_fraction": "model.n_layers=4",
    "position=irope position.temperature": "nope_every=2 position.floor_scale=2",
    "position=irope position.floor_scale": "nope_every=2",
    "position=rope_yarn position.beta_fast": "position.beta_slow=0.01",
    "position=rope_yarn position.truncate": "position.beta_slow=0.01",
    "position=t5 position.max_distance": "position.buckets=4",
    "gate=bondarenko gate.hidden": "gate.form=mlp",
}
"""What a key of an option needs in order to act in so small a model."""
VALUES = {
    "norm=scale norm.eps": "1e-5 1e-1",
    "placement=mixln placement.post_fraction": "0.25 0.5",
    "position=irope position.floor_scale": "2 8192",
    "position=rope_yarn position.beta_fast": "0.1 32",
    "position=rope_yarn position.beta_slow": "0.01 1",
    "position=rope_yarn position.original_context": "auto 64",
    "position=t5 position.max_distance": "4 128",
    "normalizer=clipped normalizer.zeta": "1 1.1",
    "normalizer=clipped normalizer.gamma": "auto -0.1",
    "ffn=swiglu_clamped ffn.limit": "0.001 7",
    "ffn=xielu ffn.alpha_n": "0.8 1",
}
"""Of keys whose values by rule are refused, or change nothing in so small a model."""
ELSEWHERE = {
    "norm.fp32": "acts in low precision alone: test_norm.py",
    "norm.momentum": "acts on running statistics: test_norm.py",
    "qk_norm.zero_centred": "acts on what weight decay draws the gain to: test_qk_norm.py",
    "ffn.balance": "acts on the training loss alone: test_recent_options.py",
    "placement.iterations": "acts once the mixtures differ: test_recent_options.py",
    "init.run": "weights from a run: test_import.py",
}
"""Keys whose effect is tested in another way."""


def option_keys():
    """Every key of every option that is tested here, with its specification, by its name behind its option's."""
    keys = {}
    for axis in ALL:
        for name in ALL[axis]:
            for key, spec in option_files(axis)[name].keys.items():
                if key not in COMMON_KEYS.get(axis, {}) and f"{axis}.{key}" not in ELSEWHERE:
                    keys[f"{axis}={name} {axis}.{key}"] = spec
    return keys


OPTION_KEYS = option_keys()


def values_of(key):
    """Values that must differ in effect: all words that a key may be, or its default and another number."""
    if key in VALUES:
        return VALUES[key].split()
    spec = OPTION_KEYS[key]
    if not spec.constraint.intervals:
        return spec.constraint.words
    if spec.constraint.words:
        return [*spec.constraint.words, "3" if spec.constraint.intervals[0].kind == "int" else "0.3"]
    other = spec.default + 1 if isinstance(spec.default, int) else spec.default / 2 or 0.3
    return [show(spec.default), show(other)]


@pytest.mark.parametrize("axis", ALL)
def test_every_option_changes_the_model(axis):
    """Every two of an axis, but those that test_equivalences.py proves equal."""
    large = [] if axis in ("init", "param") else ["init=xavier"]  # GPT-2's small values hide differences in curvature
    large += ["position=alibi"] if axis == "attention" else []  # additive scores refuse rotary positions
    logits = {name: learned((*large, f"{axis}={name}")) for name in ALL[axis]}
    for a, b in itertools.combinations(ALL[axis], 2):
        assert (logits[a] - logits[b]).abs().max() > 1e-5 or declared(f"{axis}={a}", f"{axis}={b}"), (a, b)


def check_values_differ(before, key, values):
    logits = {value: learned((*before, f"{key}={value}")) for value in values}
    assert len(logits) > 1
    for a, b in itertools.combinations(logits, 2):
        assert not torch.equal(logits[a], logits[b]), (a, b)


@pytest.mark.parametrize("key", SWITCHES)
def test_every_switch_changes_the_model(key):
    *before, name = key.split()
    check_values_differ(before, name, SWITCHES[key].split())


@pytest.mark.parametrize("key", OPTION_KEYS)
def test_every_key_of_an_option_changes_the_model(key):
    option, name = key.split()
    large = [] if option.startswith(("init", "param")) else ["init=xavier"]
    before = [*large, option, *NEEDS.get(option, "").split(), *BEFORE.get(key, "").split()]
    check_values_differ(before, name, values_of(key))


@pytest.mark.parametrize("overrides", PAIRS, ids=",".join)
def test_no_logit_sees_a_later_token(tiny, overrides):
    """By gradients: exactly 0 after t, not 0 at t. In evaluation mode; the leak of BatchNorm in training is below."""
    model = build(tiny, *overrides)
    model.eval()
    grads = token_gradients(model, t=4)
    assert torch.equal(grads[:, 5:], torch.zeros_like(grads[:, 5:]))
    assert (grads[:, 4] != 0).any()


def token_gradients(model, t):
    """d(sum of logits at t) / d(embedding of each token): (B, T)."""
    outputs = []

    def keep(module, inputs, output):
        output.retain_grad()
        outputs.append(output)

    handle = model.embedding.register_forward_hook(keep)
    (model(TOKENS)[:, t] ** 2).sum().backward()
    handle.remove()
    return outputs[0].grad.abs().sum(-1)


def test_batch_norm_leaks_the_future_in_training_and_only_there(tiny):
    model = build(tiny, "norm=batch")
    assert (token_gradients(model.train(), t=4)[:, 5:] != 0).any()
    assert torch.equal(token_gradients(model.eval(), t=4)[:, 5:], torch.zeros(2, 3))


@pytest.mark.parametrize("overrides", PAIRS, ids=",".join)
def test_fused_attention_equals_the_plain_path(tiny, overrides):
    cancels = {"mixer=exclusive", "gate=norm"} <= {*overrides}  # the norm multiplies rounding errors by 1 / sqrt(eps)
    model = build(tiny, *overrides, *(["gate.eps=0.1"] if cancels else []))
    model.eval()
    fused = model(TOKENS)
    for module in model.modules():
        if isinstance(module, AttentionCore):
            module.fused = False
    scale = max(1.0, float(fused.detach().abs().max()))
    torch.testing.assert_close(model(TOKENS), fused, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("overrides", PAIRS, ids=",".join)
def test_every_parameter_learns_and_every_option_pair_stays_finite(tiny, overrides):
    model = build(tiny, *overrides)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    moved = dict.fromkeys(dict(model.named_parameters()), False)
    for _ in range(5):
        loss = next_token_loss(model)
        optimizer.zero_grad()
        loss.backward()
        moved |= {n: True for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
        optimizer.step()
    assert torch.isfinite(loss)
    assert not [name for name, did in moved.items() if not did]


@pytest.mark.parametrize("overrides", PAIRS, ids=",".join)
def test_weights_read_back_give_the_same_logits(tiny, overrides):
    model = build(tiny, *overrides)
    randomise(model, 0.1)
    model(TOKENS)  # which changes running statistics
    other = build(tiny, *overrides, "seed=7")
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.eval()(TOKENS), model.eval()(TOKENS))


def test_arms_share_z_wherever_name_and_shape_agree(tiny):
    base = build(tiny)
    for option in EVERY_OPTION:
        arm = buildable(tiny, option.split())
        if arm is None:
            continue
        shared = base.z_hashes.keys() & arm.z_hashes.keys()
        shapes = {n: p.shape for n, p in base.named_parameters()}
        agree = [n for n in shared if shapes[n] == dict(arm.named_parameters())[n].shape]
        assert agree
        assert all(base.z_hashes[n] == arm.z_hashes[n] for n in agree), option


def test_another_seed_is_another_z_everywhere(tiny):
    first, second = build(tiny).z_hashes, build(tiny, "seed=1").z_hashes
    assert all(first[name] != second[name] for name in first)
    assert len(set(first.values())) == len(first)  # and no two parameters share one


def test_initial_values_are_gain_times_z(tiny):
    plain, wide = build(tiny, "init=gpt2"), build(tiny, "init=gpt2", "init.std=0.04")
    for (name, a), (_, b) in zip(plain.named_parameters(), wide.named_parameters(), strict=True):
        if a.ndim > 1:
            torch.testing.assert_close(b, 2 * a, msg=name)


def test_tied_embeddings_are_one_parameter(tiny):
    tied, untied = build(tiny, "tie_embeddings=on"), build(tiny, "tie_embeddings=off")
    assert parameters(untied)[0] - parameters(tied)[0] == 11 * 16
    assert parameter_roles(untied)["head.weight"] == "head"


def test_the_sizes_have_the_parameters_that_the_list_shows_and_grow_in_its_order():
    from nexus_ablate.cli.list import catalogue
    from nexus_ablate.config.compose import compose

    shown = {
        name: float(option["summary"].partition("M ")[0].split()[-1]) for name, option in catalogue()["model"].items()
    }
    sizes = {name: countable_model(compose([f"model={name}", "ffn=gelu", "position=learned"]), 50257) for name in shown}
    assert list(shown) == ["femto", "pico", "nano", "micro", "mini", "tiny", "small", "base"]
    assert list(shown.values()) == sorted(shown.values())
    for name, model in sizes.items():
        assert parameters(model)[1] / 1e6 == pytest.approx(shown[name], rel=0.02), name
    assert parameters(sizes["base"])[0] == pytest.approx(124e6, rel=0.01), "GPT-2"


def test_what_a_batch_computes_once_is_shared_among_its_tokens(tiny):
    def counted(rows, *overrides):
        return flops_per_token(tiny(f"train.batch_size={rows}", *overrides), 11)

    assert counted(1) == counted(16)
    alone, shared = (counted(rows, "position=fire") for rows in (1, 16))
    without = counted(1, "position=none")
    assert shared - without == pytest.approx((alone - without) / 16)


def test_dropout_acts_in_training_only(tiny):
    model = build(tiny, "model.dropout=0.5")
    torch.manual_seed(0)
    first = model.train()(TOKENS)
    assert not torch.equal(first, model(TOKENS))
    assert torch.equal(model.eval()(TOKENS), build(tiny).eval()(TOKENS))

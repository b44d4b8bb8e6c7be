"""Scores, and the core of attention against a reference that goes through queries and keys one by one."""

import itertools
import math

import pytest
import torch
from tensors import draw, option_with, randomise

from nexus_ablate.axes import attention as scores
from nexus_ablate.axes.attention import ATTENTION
from nexus_ablate.axes.modules import Geometry
from nexus_ablate.axes.position import square
from nexus_ablate.model import build_model

H, T, D = 2, 6, 4
GEOMETRY = Geometry(n_layers=2, d_model=H * D, n_heads=H, n_kv_heads=H, head_dim=D, d_ff=16, context=T, vocab_size=11)
TOKENS = torch.randint(0, 11, (2, T), generator=torch.Generator().manual_seed(0))


def build_score(name, **keys):
    return randomise(ATTENTION.build(option_with("attention", name, **keys), GEOMETRY))


def build(tiny, *overrides):
    """A model whose attention is not nearly uniform."""
    return randomise(build_model(tiny(f"model.context={T}", *overrides), vocab_size=11)).eval()


def core_of(tiny, *overrides, layer=0):
    return build(tiny, *overrides).blocks[layer].attn.core


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, H, T, 8, generator=generator) for _ in range(3)]


# --------------------------------------------------------------------------------------------------------- scores


def pairwise_score(name, score, q, k):
    """The published definition for one query and key of head h."""

    def weight(heads, h):
        return heads.maps[h].weight

    return {
        "dot": lambda h: q @ k / math.sqrt(D),
        "luong_dot": lambda h: q @ k,
        "luong_general": lambda h: (weight(score.map, h) @ q) @ k,
        "luong_concat": lambda h: weight(score.vector, h)[0] @ torch.tanh(weight(score.map, h) @ torch.cat((q, k))),
        "additive": lambda h: (
            weight(score.vector, h)[0]
            @ torch.tanh(weight(score.query_map, h) @ q + weight(score.key_map, h) @ k + score.key_map.maps[h].bias)
        ),
    }[name]


@pytest.mark.parametrize("name", ["dot", "luong_dot", "luong_general", "luong_concat", "additive"])
def test_a_score_is_its_published_definition_for_every_query_and_key(name):
    score = build_score(name)
    q, k = (draw(2, H, T, D, seed=i) for i in range(2))
    actual = score.scale * score(score.query(q), k)
    for b, h, i, j in itertools.product(range(2), range(H), range(T), range(T)):
        expected = pairwise_score(name, score, q[b, h, i], k[b, h, j])(h)
        torch.testing.assert_close(actual[b, h, i, j], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["luong_concat", "additive"])
@pytest.mark.parametrize("queries", [1, 2, 4])
def test_additive_scores_in_parts_are_those_at_once_in_both_passes_and_keep_to_the_bound(monkeypatch, name, queries):
    score = build_score(name)
    q, k = torch.randn(2, 2, H, T, D, requires_grad=True).unbind()
    one_query = 2 * H * T * D * 4

    def results():
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel() * 4) or t, lambda t: t):
            out = score(q, k)
        grads = torch.autograd.grad((out**2).sum(), [q, k, *score.parameters()])
        return out, grads, max(sizes)

    whole, whole_grads, unbounded = results()
    assert unbounded == T * one_query
    monkeypatch.setattr(scores, "HIDDEN_BYTES", queries * one_query)
    parts, grads, kept = results()
    assert torch.equal(parts, whole)
    torch.testing.assert_close(grads, whole_grads, rtol=0, atol=1e-4)
    assert kept <= queries * one_query


def hidden_leaves(T=6, S=7, w=4):
    """q, k and v of an additive score of two heads."""
    draw = torch.Generator().manual_seed(0)
    shapes = (2, 2, T, w), (2, 2, S, w), (2, 1, w)
    return [torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True) for shape in shapes]


def test_the_form_of_an_additive_score_that_a_compiler_fuses_is_the_plain_one():
    leaves, results = hidden_leaves(), []
    for form in (scores._FusedScores.apply, scores._additive_scores):
        out = form(*leaves)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


# ----------------------------------------------------------------------------------------------------------- core

COMBINATIONS = [
    "",
    "window=3 kv_bias=key_value position=alibi",
    "sink_token=on position=t5",
    "attention=luong_general normalizer=softmax1 kv_bias=key_value sink_token=on",
    "attention=luong_general normalizer=softmax1 window=3 position=t5",
    "attention=luong_general normalizer=softmax1 position=alibi",
    "attention=luong_dot normalizer=sink window=3 sink_token=on position=alibi",
    "attention=luong_dot normalizer=sink kv_bias=key_value position=t5",
    "attention=luong_dot normalizer=sink window=3",
    "attention=additive normalizer=clipped window=3 kv_bias=key_value sink_token=on position=alibi",
    "attention=additive normalizer=clipped sink_token=on position=t5",
    "attention=additive normalizer=clipped kv_bias=key_value window=3",
    "attn_softcap=0.5 window=3 kv_bias=key position=alibi",
]
"""Every two of a score with a normalizer, a window, a learned key, a sink token and a bias."""


def reference(core, attn, q, k, v, bias, sinks):
    """Attention of one sequence by its definition. q, k, v are (H, T, d); `bias` is (H, t, t), of the text, or None."""
    out = torch.zeros_like(q)
    for h, i in itertools.product(range(H), range(q.shape[1])):
        seen = [j for j in range(i + 1) if j < sinks or not core.window or i - core.window < j]
        keys = [(k[h, j], v[h, j], 0.0 if bias is None or j < sinks else bias[h, i - sinks, j - sinks]) for j in seen]
        if attn.learned_key_Gd is not None:
            value = torch.zeros(q.shape[-1]) if attn.learned_value_Gd is None else attn.learned_value_Gd[h]
            keys.append((attn.learned_key_Gd[h], value, 0.0))
        z = [core.scale * core.score(q[None, :, i : i + 1], key.expand(1, H, 1, -1))[0, h, 0, 0] for key, _, _ in keys]
        z = [score + added for score, (_, _, added) in zip(z, keys, strict=True)]
        z = [core.softcap * torch.tanh(score / core.softcap) for score in z] if core.softcap else z
        weights = core.normalizer(torch.stack(z).expand(1, H, 1, -1))[0, h, 0]
        out[h, i] = sum(w * value for w, (_, value, _) in zip(weights, keys, strict=True))
    return out


@pytest.mark.parametrize("overrides", COMBINATIONS)
def test_the_core_is_its_definition(tiny, qkv, overrides):
    model = build(tiny, "position=none", *overrides.split())
    attn, sinks = model.blocks[0].attn, attn_sinks(model)
    q, k, v = qkv
    bias = model.position.score_bias(T - sinks, 0)
    actual = attn.core(q, attn._keys(k, attn.learned_key_Gd), attn._keys(v, attn.learned_value_Gd), bias)
    bias = None if bias is None else square(bias, T - sinks)
    expected = torch.stack([reference(attn.core, attn, *each, bias, sinks) for each in zip(q, k, v, strict=True)])
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def attn_sinks(model):
    return 0 if model.sink is None else 1


def test_a_window_is_the_last_keys_with_the_query_s_own(tiny):
    """Layer by layer: window=[2,0] is 2 keys in the first layer and all in the second."""
    cores = [core_of(tiny, "window=[2,0]", layer=layer) for layer in range(2)]
    assert [core.seen(4, torch.device("cpu")).sum(1).tolist() for core in cores] == [[1, 2, 2, 2], [1, 2, 3, 4]]


# ------------------------------------------------------------------------------------------- heads of keys, sinks


@pytest.mark.parametrize("groups", [1, 2])
def test_grouped_queries_are_repeated_key_heads(tiny, groups):
    full = build(tiny, "model.n_heads=4", "kv_bias=key_value", "bias=on", "qk_norm=rms_full")
    grouped = build(tiny, "model.n_heads=4", f"n_kv_heads={groups}", "kv_bias=key_value", "bias=on", "qk_norm=rms_full")
    d, repeat = 4, 4 // groups
    state = {}
    for name, value in grouped.state_dict().items():
        heads = any(part in name for part in ("attn.key.", "attn.value.", "qk_norm.key", "learned_"))
        wide = value.unflatten(0, (groups, -1)).repeat_interleave(repeat, 0).flatten(0, 1) if heads else value
        state[name] = wide
    full.load_state_dict(state)
    assert grouped.blocks[0].attn.key.weight.shape == (groups * d, 16)
    torch.testing.assert_close(grouped(TOKENS), full(TOKENS), rtol=1e-4, atol=1e-4)


def test_a_learned_key_is_not_rotated_normed_or_biased_by_position(tiny):
    for position in ("rope", "alibi"):
        model = build(tiny, "kv_bias=key", f"position={position}", "qk_norm=rms")
        attn, seen = model.blocks[0].attn, []
        attn.core.register_forward_pre_hook(lambda m, args, kept=seen: kept.append(args))
        attn(torch.randn(1, T, 16), model.context(TOKENS))
        assert torch.equal(seen[0][1][0, :, 0], attn.learned_key_Gd)


@pytest.mark.parametrize("position", ["none", "learned", "rope", "alibi", "t5", "transformer_xl"])
def test_a_sink_token_changes_no_shape_and_no_position_of_the_text(tiny, position):
    """With the sink's key out of sight, the text attends as if it were not there."""
    with_sink, without = (build(tiny, "sink_token=" + on, f"position={position}") for on in ("on", "off"))
    without.load_state_dict({n: p for n, p in with_sink.state_dict().items() if n != "sink.weight"})
    assert with_sink(TOKENS).shape == without(TOKENS).shape == (2, T, 11)
    assert not torch.allclose(with_sink(TOKENS), without(TOKENS), atol=1e-3)
    for block in with_sink.blocks:
        core = block.attn.core
        plain = core.seen
        core.seen = lambda t, device, plain=plain: (
            plain(t, device) & ~((torch.arange(t) == 0) & (torch.arange(t)[:, None] > 0))
        )
        core.fused = False
    torch.testing.assert_close(with_sink(TOKENS), without(TOKENS), rtol=1e-4, atol=1e-4)


def test_sinks_start_and_decay_by_the_role_of_what_they_stand_for(tiny):
    from nexus_ablate.axes.modules import parameter_roles

    roles = parameter_roles(build(tiny, "kv_bias=key_value", "sink_token=on"))
    assert roles["blocks.0.attn.learned_key_Gd"] == "key"
    assert roles["blocks.0.attn.learned_value_Gd"] == "value"
    assert roles["sink.weight"] == "embedding"


# ------------------------------------------------------------------------------------------------------- key bias


@pytest.mark.parametrize(
    ("overrides", "acts"),
    [
        ((), False),
        (("position=alibi",), False),
        (("position=t5",), False),
        (("position=transformer_xl",), False),
        (("attention=luong_general",), False),
        (("normalizer=clipped",), False),
        (("qk_norm=q_only",), False),
        (("window=2",), False),
        (("sink_token=on",), False),
        (("gate=elementwise",), False),
        (("gate=elementwise", "gate.site=query"), False),
        (("position=rope",), True),
        (("attention=additive",), True),
        (("attention=luong_concat",), True),
        (("normalizer=softmax1",), True),
        (("normalizer=sink",), True),
        (("normalizer=sigmoid",), True),
        (("qk_norm=k_only",), True),
        (("qk_norm=l2",), True),
        (("attn_softcap=1",), True),
        (("kv_bias=key",), True),
        (("gate=elementwise", "gate.site=key"), True),
        (("conv=canon",), True),
        (("conv=canon", "conv.qkv=off"), False),
    ],
)
def test_a_key_bias_is_left_out_exactly_where_it_could_not_act(tiny, overrides, acts):
    """Proved by adding one by hand."""
    model = build(tiny, "position=none", *overrides)
    with_bias = build(tiny, "position=none", *overrides, "qkv_bias=on").blocks[0].attn
    assert (with_bias.key.bias is not None) is acts
    assert with_bias.query.bias is not None
    before = model(TOKENS)
    for block in model.blocks:
        block.attn.key.bias = torch.nn.Parameter(draw(16, seed=3))
    assert torch.allclose(model(TOKENS), before, rtol=1e-3, atol=1e-3) is not acts


# ---------------------------------------------------------------------------------------------------- plain keys


def test_attn_scale_is_the_factor_on_the_scores_and_auto_the_published_one(tiny):
    assert core_of(tiny).scale == 8**-0.5
    assert core_of(tiny, "attention=luong_dot").scale == 1
    assert core_of(tiny, "qk_norm=l2").scale == 1
    assert core_of(tiny, "attn_scale=0.5").scale == 0.5
    a = build(tiny, "attention=luong_dot", f"attn_scale={8**-0.5!r}")
    torch.testing.assert_close(a(TOKENS), build(tiny)(TOKENS))


def test_final_softcap_bounds_the_logits(tiny):
    capped, free = build(tiny, "final_softcap=2"), build(tiny)
    torch.testing.assert_close(capped(TOKENS), 2 * torch.tanh(free(TOKENS) / 2))


def test_biases_can_be_chosen_by_site(tiny):
    def biases(*overrides):
        model = build(tiny, "ffn=gelu", *overrides)
        return {n.removeprefix("blocks.0.") for n, _ in model.blocks[0].named_parameters() if n.endswith(".bias")}

    qkv, out, ffn = {"attn.query.bias", "attn.key.bias", "attn.value.bias"}, {"attn.out.bias"}, {"ffn.up.bias"}
    assert biases("qkv_bias=on") == qkv
    assert biases("attn_out_bias=on") == out
    assert biases("ffn_bias=on") >= ffn
    assert not biases("ffn_bias=on") & (qkv | out)
    assert biases("bias=on", "qkv_bias=off") >= out | ffn
    assert not biases("bias=on", "qkv_bias=off") & qkv


# ------------------------------------------------------------------------------------------------- FlexAttention

FLEXED = [
    "attn_softcap=0.5",
    "window=7",
    "window=7 sink_token=on",
    "position=alibi",
    "position=alibi sink_token=on kv_bias=key",
    "normalizer=sink",
    "normalizer=softmax1 window=7 n_kv_heads=2",
    "attn_softcap=0.8 position=alibi normalizer=sink window=7 kv_bias=key_value sink_token=on n_kv_heads=2 "
    "attention=luong_general",
]
"""What a GPU computes by FlexAttention in a compiled step; the last is all of it together."""


def flex_case(tiny, overrides, T=40):
    """A core, its inputs and its bias, in float64 so far as it keeps to it."""
    shape = f"model.context={T}", "model.d_model=64", "model.n_heads=4"
    model = randomise(build_model(tiny(*shape, *overrides.split()), 11)).double()
    attn = model.blocks[0].attn
    groups, front = model.geometry.n_kv_heads, attn.learned_key_Gd is not None
    draw = torch.Generator().manual_seed(0)
    shapes = (2, 4, T, 16), *[(2, groups, T + front, 16)] * 2
    qkv = [torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True) for shape in shapes]
    bias = model.position.score_bias(T - attn_sinks(model), 0)
    return attn.core, qkv, None if bias is None else bias.double()


@pytest.mark.filterwarnings("ignore")  # of the compiler's own import
@pytest.mark.slow
@pytest.mark.parametrize("overrides", FLEXED)
def test_flex_attention_is_the_plain_path_in_outputs_and_gradients(tiny, monkeypatch, overrides):
    flex_attention = pytest.importorskip("torch.nn.attention.flex_attention")
    # It refuses gradients on a CPU, for which it has no fused kernel. Unfused they are there, from the same functions.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    core, qkv, bias = flex_case(tiny, overrides)
    leaves, results = [*qkv, *core.parameters()], []
    weight = torch.randn(2, 4, 40, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch._dynamo.reset()
    for compute in (
        torch.compile(core.flex, backend="eager", fullgraph=True),
        lambda q, k, v, bias: core.mixed(core.weights(q, k, bias), v),
    ):
        out = compute(*qkv, bias)
        # The map of a score acts before, on the query.
        gradients = torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True, materialize_grads=True)
        results.append((out, *gradients))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)  # the plain path's softmax is in float32


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("overrides", ["attn_softcap=0.5 window=7 position=alibi", "window=7 sink_token=on"])
def test_the_fused_kernel_that_the_compiler_makes_of_flex_attention_is_the_plain_path(tiny, overrides):
    core, qkv, bias = flex_case(tiny, overrides, T=256)
    bias = None if bias is None else bias.float()
    torch._dynamo.reset()
    with torch.no_grad():
        q, k, v = (x.float() for x in qkv)
        result = torch.compile(core.float().flex, fullgraph=True)(q, k, v, bias)
        torch.testing.assert_close(result, core.mixed(core.weights(q, k, bias), v), rtol=1e-5, atol=1e-5)


def test_flex_attention_takes_the_place_of_masks_of_all_pairs_and_of_nothing_else(tiny):
    def flexes(*overrides, T=128):
        model = build_model(tiny(f"model.context={T}", "model.d_model=64", "model.n_heads=4", *overrides), 11)
        bias = model.position.score_bias(T, 0)
        return model.blocks[0].attn.core.flexes(T, bias)

    assert all(flexes(o) for o in ("window=64", "position=alibi", "normalizer=sink", "attn_softcap=5"))
    assert not flexes()  # flash attention
    assert not flexes("window=128") and not flexes("normalizer=softmax1")
    with torch.no_grad():  # as in an evaluation
        assert not flexes("position=t5") and not flexes("position=fire", "window=64")  # a table, or of all pairs itself
    assert not flexes("normalizer=clipped", "window=64") and not flexes(
        "attention=additive", "position=alibi", "window=64"
    )
    assert not flexes("window=64", "model.dropout=0.1") and not flexes("window=64", "train.attention=sdpa")
    assert not flexes("window=64", T=127) and not flexes("window=64", "model.n_heads=8")  # its kernels need 16 channels

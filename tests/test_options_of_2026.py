"""Attention residuals, exclusive attention, embedding skips and gated value embeddings against their equations.

Each reference is the publication's equation written out from the weights of a model in float64, and compared in logits
and gradients. Each option also has a control: where it is the baseline.
"""

from __future__ import annotations

import pytest
import torch
from tensors import TOKENS, draw, randomise
from torch.nn import functional as F

from nexus_ablate.measure.counts import flops_per_token, parameters
from nexus_ablate.model import build_model

L, H, D, FIRST = 3, 4, 16, ("init=xavier", "norm.eps=1e-12")
SIZE = (f"model.n_layers={L}", f"model.n_heads={H}", "position=none", "ffn=relu2", "norm.fp32=off")


def built(tiny, *overrides):
    """A model in float64."""
    return build_model(tiny(*SIZE, *overrides), 11).double().eval()


def gradients(logits, model):
    """d(sum of squares of the logits) / d(each parameter)."""
    model.zero_grad()
    logits.square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def check(model, expected):
    """Hold the logits of a model with random weights, and their gradients, against those of a reference."""
    actual = model(TOKENS)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    reference = gradients(expected, model)
    for name, gradient in gradients(actual, model).items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(gradient, reference[name], rtol=1e-10, atol=1e-10)


class Reference:
    """The equations of a block, from the weights of a model."""

    def __init__(self, model):
        self.weights = dict(model.named_parameters())
        self.embedding = self.weights["embedding.weight"]
        self.x = self.embedding[TOKENS]

    def rms(self, x, gain, eps=1e-6):
        return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps) * self.weights[gain]

    def norm(self, x, name):
        return self.rms(x, f"{name}.gain")

    def heads(self, x, block, role):
        """(B, heads, T, d) from a projection."""
        return torch.stack((x @ self.weights[f"blocks.{block}.attn.{role}.weight"].T).split(D // H, -1), 1)

    def attention(self, x, block, added=None, exclusive=False):
        q, k, v = (self.heads(x, block, role) for role in ("query", "key", "value"))
        v = v if added is None else v + added
        k, v = (y.repeat_interleave(H // y.shape[1], 1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if exclusive:
            y = y - (y * v).sum(-1, keepdim=True) / (v * v).sum(-1, keepdim=True) * v
        return torch.cat(y.unbind(1), -1) @ self.weights[f"blocks.{block}.attn.out.weight"].T

    def ffn(self, x, block):
        hidden = F.relu(x @ self.weights[f"blocks.{block}.ffn.up.weight"].T) ** 2
        return hidden @ self.weights[f"blocks.{block}.ffn.down.weight"].T

    def logits(self, x):
        return self.norm(x, "final_norm") @ self.embedding.T

    def pre_norm(self, x, block, **attention):
        x = x + self.attention(self.norm(x, f"blocks.{block}.norm_attn"), block, **attention)
        return x + self.ffn(self.norm(x, f"blocks.{block}.norm_ffn"), block)


# ------------------------------------------------------------------------------------------------ attention residuals


def attention_residuals(model, size):
    """Eq. 1 to 6 of arXiv:2603.15031, layer by layer: a layer is attention or an FFN, l = 1 .. 2 L."""
    reference, outputs = Reference(model), []

    def read(layer):
        """h_l, from the embedding b_0, the blocks b_n before the layer's, and the partial sum of its own."""
        starts = range(0, len(outputs), size)
        values = torch.stack([reference.x, *(sum(outputs[start : start + size]) for start in starts)])
        name = f"blocks.{(layer - 2) // 2}.{'read_ffn' if layer % 2 == 0 else 'read_next'}"
        keys = reference.rms(values, f"{name}.gain")
        weights = torch.einsum("d,nbtd->nbt", reference.weights[f"{name}.query"], keys).softmax(0)
        return torch.einsum("nbt,nbtd->btd", weights, values)

    for layer in range(1, 2 * L + 1):
        h, block = reference.x if layer == 1 else read(layer), (layer - 1) // 2
        attends = layer % 2 == 1
        h = reference.norm(h, f"blocks.{block}.norm_{'attn' if attends else 'ffn'}")
        outputs.append(reference.attention(h, block) if attends else reference.ffn(h, block))
    return reference.logits(read(2 * L + 1))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_attention_residuals_are_their_equations(tiny, size):
    model = randomise(built(tiny, "placement=attnres", f"placement.block={size}"), 0.3)
    check(model, attention_residuals(model, size))


def test_attention_residuals_over_one_source_start_as_pre_norm(tiny):
    model = built(tiny, *FIRST, "placement=attnres", f"placement.block={2 * L}")
    torch.testing.assert_close(model(TOKENS), built(tiny, *FIRST)(TOKENS), rtol=0, atol=1e-6)


def test_attention_residuals_start_as_the_mean_of_all_sources(tiny):
    read = built(tiny, "placement=attnres").blocks[0].read_next
    sources = [draw(2, 5, D, seed=seed).double() for seed in range(4)]
    torch.testing.assert_close(read(sources), sum(sources) / 4)


def test_attention_residuals_sum_branches_in_the_precision_of_the_stream(tiny):
    model = build_model(tiny(*SIZE, "placement=attnres", "placement.block=2"), 11)
    with torch.autocast("cpu", torch.bfloat16):
        stream = model.blocks[0](model.blocks[0].enter(draw(2, 8, D)), model.context(TOKENS))
    assert [source.dtype for source in stream[1:]] == [torch.float32] * 2


# ---------------------------------------------------------------------------------------------- exclusive attention


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_exclusive_attention_is_its_equation(tiny, groups):
    model = randomise(built(tiny, "mixer=exclusive", f"n_kv_heads={groups}"), 0.3)
    reference = Reference(model)
    x = reference.x
    for block in range(L):
        x = reference.pre_norm(x, block, exclusive=True)
    check(model, reference.logits(x))


@pytest.mark.parametrize(
    "extra", [[], ["sink_token=on"], ["kv_bias=key_value"], ["normalizer=sink"], ["value=residual"]]
)
def test_the_heads_of_exclusive_attention_have_nothing_along_their_own_values(tiny, extra):
    model = randomise(built(tiny, "mixer=exclusive", "n_kv_heads=2", *extra), 0.3)
    seen = {}
    attention = model.blocks[1].attn
    attention.core.register_forward_hook(lambda module, inputs, output: seen.update(values=inputs[2]))
    attention.out.register_forward_pre_hook(lambda module, inputs: seen.update(out=inputs[0]))
    model(TOKENS)
    T = seen["out"].shape[1]
    own = seen["values"][:, :, -T:].repeat_interleave(2, 1).transpose(1, 2)
    out = seen["out"].unflatten(-1, (H, -1))
    assert (out * own).sum(-1).abs().max() < 1e-12
    assert out.abs().max() > 1e-3


@pytest.mark.parametrize("gate", ["norm", "elementwise"])
def test_exclusive_attention_warns_of_a_norm_that_magnifies_rounding_errors(tiny, gate):
    def first_token(*overrides):
        """The input of the output projection at the first token, whose only value is its own, and the notes."""
        config = tiny("mixer=exclusive", *overrides)
        model, seen = build_model(config, 11), []
        model.blocks[1].attn.out.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0][:, 0]))
        model(TOKENS)
        return float(seen[0].detach().abs().max()), config.resolved.notes

    (plain, quiet), (gated, notes) = first_token(), first_token(f"gate={gate}")
    assert 0 < plain < 1e-6 and not quiet
    warned = any(note.startswith("mixer=exclusive with gate=norm: the first token's heads are 0") for note in notes)
    assert warned == (gate == "norm") == (gated > 100 * plain)


# ------------------------------------------------------------------------------------------------- embedding skips


def test_embedding_skips_are_their_equation(tiny):
    model = randomise(built(tiny, "placement=x0"), 0.3)
    reference = Reference(model)
    x = reference.x
    for block in range(L):
        scales = [reference.weights[f"blocks.{block}.{name}_scale"] for name in ("residual", "skip")]
        x = reference.pre_norm(scales[0] * x + scales[1] * reference.x, block)
    check(model, reference.logits(x))


def test_embedding_skips_start_as_pre_norm(tiny):
    model, plain = built(tiny, *FIRST, "placement=x0"), built(tiny, *FIRST)
    assert torch.equal(model(TOKENS), plain(TOKENS))
    actual, expected = gradients(model(TOKENS), model), gradients(plain(TOKENS), plain)
    assert all(torch.equal(actual[name], expected[name]) for name in expected if name != "embedding.weight")
    torch.testing.assert_close(actual["embedding.weight"], expected["embedding.weight"])


# ------------------------------------------------------------------------------------------- gated value embeddings


def with_value_embeddings(tiny, groups=2):
    return randomise(built(tiny, "value=gated_embedding", f"n_kv_heads={groups}"), 0.3)


@pytest.mark.parametrize("groups", [2, 4])
def test_gated_value_embeddings_are_their_equation(tiny, groups):
    model = with_value_embeddings(tiny, groups)
    reference = Reference(model)
    x = reference.x
    for block in range(L):
        added = None
        if block % 2 == (L - 1) % 2:
            parts = f"blocks.{block}.attn.values"
            read = reference.norm(x, f"blocks.{block}.norm_attn")[..., :12]
            gate = 2 / (1 + torch.exp(-read @ reference.weights[f"{parts}.gate"].T))
            table = reference.weights[f"{parts}.table.weight"][TOKENS].unflatten(-1, (groups, D // H))
            added = (gate[..., None] * table).transpose(1, 2)
        x = reference.pre_norm(x, block, added=added)
    check(model, reference.logits(x))


@pytest.mark.parametrize(("n_layers", "layers"), [(1, [0]), (2, [1]), (3, [0, 2]), (4, [1, 3])])
def test_every_other_layer_has_a_value_embedding_and_the_last_one_has(tiny, n_layers, layers):
    model = build_model(tiny("value=gated_embedding", f"model.n_layers={n_layers}"), 11)
    assert [layer for layer, block in enumerate(model.blocks) if [*block.attn.values.parameters()]] == layers


def test_the_gate_of_a_value_embedding_starts_half_open(tiny):
    model = built(tiny, "value=gated_embedding")
    values = model.blocks[-1].attn.values
    assert torch.equal(values.gate, torch.zeros_like(values.gate))
    v, x = torch.zeros(2, 8, H, D // H).double(), draw(2, 8, D).double()
    expected = values.table.weight[TOKENS].view_as(v)
    torch.testing.assert_close(values(v, x, model.context(TOKENS)), expected)


def test_a_gate_that_cannot_open_is_no_value_embedding(tiny):
    model, plain = built(tiny, *FIRST, "value=gated_embedding", "value.scale=0"), built(tiny, *FIRST)
    assert torch.equal(model(TOKENS), plain(TOKENS))
    expected = gradients(plain(TOKENS), plain)
    assert all(
        torch.equal(g, expected[name]) for name, g in gradients(model(TOKENS), model).items() if name in expected
    )


def test_the_sink_token_has_no_value_embedding(tiny):
    model = randomise(built(tiny, "value=gated_embedding", "sink_token=on"), 0.3)
    values, added = model.blocks[-1].attn.values, []
    values.register_forward_hook(lambda module, inputs, output: added.append(output - inputs[0]))
    model(TOKENS)
    assert torch.equal(added[0][:, 0], torch.zeros_like(added[0][:, 0])) and added[0][:, 1:].abs().min() > 0


# ----------------------------------------------------------------------------------------------------- what they cost

V = 256
SOURCES = sum(range(2, 2 * L + 2))
"""Of all reads of attention residuals together: 2 of the first, with 2 L branches 2 L + 1 of the last."""
COSTS = {
    "placement=attnres": (L * 4 * D, SOURCES * 4 * D),
    "placement=x0": (2 * L, 0),
    "mixer=exclusive": (0, 0),
    "value=gated_embedding": (2 * (V * D + 12 * H), 2 * 2 * 12 * H),
}
"""Parameters, and FLOPs of a token in the forward pass, besides those of the baseline."""


@pytest.mark.parametrize("option", COSTS)
def test_parameters_and_flops_are_counted(tiny, option):
    config, plain = tiny(*SIZE, option), tiny(*SIZE)
    weights, flops = COSTS[option]
    assert parameters(build_model(config, V))[0] - parameters(build_model(plain, V))[0] == weights
    assert flops_per_token(config, V) - flops_per_token(plain, V) == pytest.approx(3 * flops)

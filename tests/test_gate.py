import pytest
import torch
from tensors import draw, option_with
from torch.nn import functional as F

from nexus_ablate.axes.gate import GATE
from nexus_ablate.axes.modules import Geometry, parameter_roles
from nexus_ablate.measure.probe import probe
from nexus_ablate.model import build_model

B, T, H, G, D, M = 2, 5, 4, 2, 3, 14
GEOMETRY = Geometry(n_layers=2, d_model=M, n_heads=H, n_kv_heads=G, head_dim=D, d_ff=16, context=T, vocab_size=11)
SHAPES = {"sdpa": (H, D), "query": (H, D), "key": (G, D), "value": (G, D), "output": (M,)}
SITES = {
    "elementwise": SHAPES,
    **{name: {s: w for s, w in SHAPES.items() if s != "output"} for name in ("headwise", "head_shared")},
}
EVERYWHERE = [(name, site) for name, sites in SITES.items() for site in sites]
FUNCTIONS = {
    "sigmoid": torch.sigmoid,
    "ns_sigmoid": lambda z: 0.5 + 0.5 * torch.sigmoid(z),
    "silu": lambda z: z * torch.sigmoid(z),
    "identity": lambda z: z,
}
KEYS = ({}, {"bias": 2.0}, {"input": False}, {"input": False, "bias": 2.0})
ACTIVATED = [*zip(FUNCTIONS, KEYS, strict=True)]
"""Every activation once: a gate calls it at one place, whatever its keys are."""


def build(name, **keys):
    gate = GATE.build(option_with("gate", name, **keys), GEOMETRY)
    with torch.no_grad():
        for i, p in enumerate(gate.parameters()):
            if p.ndim > 1:
                p.copy_(draw(*p.shape, seed=i))
    return gate


@pytest.fixture
def x():
    return draw(B, T, M, seed=5)


def y_at(site):
    return draw(B, T, *SHAPES[site], seed=6)


def spread(name, site, logit):
    """Each gate's logits of one token, from a flat list, to the shape of what it gates."""
    heads = SHAPES[site][0]
    if name == "headwise":
        return logit[..., None].expand(*logit.shape[:-1], heads, D)
    if name == "head_shared":
        return logit[..., None, :].expand(*logit.shape[:-1], heads, D)
    return logit.reshape(*logit.shape[:-1], *SHAPES[site])


@pytest.mark.parametrize(("name", "site"), EVERYWHERE)
@pytest.mark.parametrize(("activation", "keys"), ACTIVATED)
def test_a_gate_multiplies_by_its_activated_logit_a_projection_of_the_input_or_a_constant(
    x, name, site, activation, keys
):
    gate, y = build(name, site=site, activation=activation, **keys), y_at(site)
    vectors = [p for p in gate.parameters() if p.ndim == 1]
    assert len(vectors) == bool(keys) and len([*gate.parameters()]) == bool(keys) + ("input" not in keys)
    for vector in vectors:
        assert vector.eq(keys.get("bias", 0.0)).all()
        vector.data = torch.linspace(-1, 1, len(vector))
    logit = F.linear(x, gate.map.weight, gate.map.bias) if "input" not in keys else vectors[0].expand(B, T, -1)
    torch.testing.assert_close(gate(site, y, x), y * FUNCTIONS[activation](spread(name, site, logit)))


@pytest.mark.parametrize("site", SHAPES)
@pytest.mark.parametrize(("activation", "bias"), [*zip(FUNCTIONS, ("off", 0.5, 0.5, "off"), strict=True)])
def test_an_additive_gate_adds_what_a_gate_would_multiply_by(x, site, activation, bias):
    gate, y = build("additive", site=site, activation=activation, bias=bias), y_at(site)
    logit = F.linear(x, gate.map.weight) + (0 if bias == "off" else bias)
    torch.testing.assert_close(gate(site, y, x), y + FUNCTIONS[activation](logit.reshape(B, T, *SHAPES[site])))


def test_the_norm_of_head_outputs_is_torch_s_rms_norm_of_each_head_with_gains_of_its_own(x):
    gate, y = build("norm", eps=1e-3), y_at("sdpa")
    assert gate.gain.eq(1).all() and len(list(gate.parameters())) == 1
    with torch.no_grad():
        gate.gain.copy_(torch.linspace(0.5, 2, H * D))
    result = gate("sdpa", y, x)
    for h in range(H):
        torch.testing.assert_close(result[:, :, h], F.rms_norm(y[:, :, h], (D,), gate.gain[h * D : (h + 1) * D], 1e-3))


def test_silu_of_head_outputs_has_no_parameters_and_does_not_see_the_input(x):
    gate, y = build("silu"), y_at("sdpa")
    torch.testing.assert_close(gate("sdpa", y, x), y / (1 + torch.exp(-y)))
    assert torch.equal(gate("sdpa", y, x), gate("sdpa", y, 7 * x))
    assert not list(gate.parameters())


@pytest.mark.parametrize("name", ["additive", "norm", "silu"])
def test_what_multiplies_nothing_has_no_gate_scores(tiny, name):
    probed = probe(build_model(tiny(f"gate={name}"), 11), torch.randint(0, 11, (2, 8)))
    assert not [figure for figure in probed if figure.startswith("gate/")]


# ----------------------------------------------------------------------------------------------------- bondarenko


def head_function(gate, form, x_slice, x, h):
    if form == "all_heads":
        (only,) = gate.maps
        return F.linear(x, only.maps[h].weight, only.maps[h].bias)
    y = F.linear(x_slice, gate.maps[0].maps[h].weight, gate.maps[0].maps[h].bias)
    if form == "mlp":
        y = F.linear(F.relu(y), gate.maps[1].maps[h].weight, gate.maps[1].maps[h].bias)
    return y


@pytest.mark.parametrize("form", ["linear", "mlp", "all_heads"])
def test_bondarenko_gates_each_head_by_its_slice_of_the_input(x, form):
    gate, y = build("bondarenko", form=form, hidden=7), y_at("sdpa")
    result, width = gate("sdpa", y, x), M // H
    for h in range(H):
        factor = torch.sigmoid(head_function(gate, form, x[..., h * width : (h + 1) * width], x, h))
        torch.testing.assert_close(result[:, :, h], y[:, :, h] * factor)


@pytest.mark.parametrize("form", ["linear", "mlp", "all_heads"])
def test_bondarenko_starts_at_its_start_where_the_input_is_0(form):
    gate = build("bondarenko", form=form, start=0.25)
    torch.testing.assert_close(gate.factor(torch.zeros(B, T, M)), torch.full((B, T, H, 1), 0.25))


@pytest.mark.parametrize(("hidden", "width"), [("auto", 1), (7, 7)])
def test_bondarenko_s_hidden_layer_is_a_quarter_head_unless_said_otherwise(hidden, width):
    assert build("bondarenko", form="mlp", hidden=hidden).maps[0].maps[0].weight.shape == (width, M // H)


# ------------------------------------------------------------------------------------------------- in the model


def test_the_gate_s_input_is_what_the_queries_are_made_from(tiny):
    """Under pre-norm the normed residual stream, not the residual stream."""
    model = build_model(tiny("gate=elementwise"), 11)
    attn, seen = model.blocks[0].attn, {}
    attn.query.register_forward_pre_hook(lambda m, args: seen.update(query=args[0]))
    attn.gate.map.register_forward_pre_hook(lambda m, args: seen.update(gate=args[0]))
    model(torch.randint(0, 11, (2, 8)))
    assert seen["gate"] is seen["query"]


@pytest.mark.parametrize(("name", "site"), EVERYWHERE)
def test_attention_is_gated_at_the_site_as_published(tiny, name, site):
    """Against attention written out, with grouped queries; q, k and v are gated before rotation."""
    model = build_model(tiny(f"gate={name}", f"gate.site={site}", "n_kv_heads=1", "init=xavier"), 11)
    attn, x = model.blocks[0].attn, torch.randn(1, 6, 16)
    q, k, v = (m(x).unflatten(-1, (-1, 8)) for m in (attn.query, attn.key, attn.value))
    factor = attn.gate.factor(x)
    q, k, v = (y * factor if site == s else y for s, y in (("query", q), ("key", k), ("value", v)))
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    q, k = model.position.rotate(q, k, 0)
    out = F.scaled_dot_product_attention(q, k.expand(-1, 2, -1, -1), v.expand(-1, 2, -1, -1), is_causal=True)
    out = out.transpose(1, 2)
    out = attn.out((out * factor if site == "sdpa" else out).flatten(2))
    expected = out * factor if site == "output" else out
    torch.testing.assert_close(attn(x, model.context(x)), expected, rtol=0, atol=1e-6)


def test_gate_projections_are_matrices_with_a_role_of_their_own_and_constants_are_vectors(tiny):
    roles = parameter_roles(build_model(tiny("gate=elementwise"), 11))
    assert roles["blocks.0.attn.gate.map.weight"] == "gate"
    roles = parameter_roles(build_model(tiny("gate=elementwise", "gate.input=off"), 11))
    assert roles["blocks.0.attn.gate.constant"] == "vector"

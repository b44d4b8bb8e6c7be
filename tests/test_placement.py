import itertools
import math

import pytest
import torch
from tensors import TOKENS, draw, next_token_loss
from torch import nn

from nexus_ablate.axes.modules import Geometry
from nexus_ablate.axes.norm import NORM
from nexus_ablate.axes.placement import PLACEMENT, Parts
from nexus_ablate.config.options import default_option, option_files
from nexus_ablate.errors import ConfigError
from nexus_ablate.measure.probe import probe
from nexus_ablate.model import build_model

HYBRIDNORM = ("hybridnorm", "hybridnorm_star")


class Times(nn.Module):
    """A branch that is not linear, so that the order of things shows in the result."""

    def __init__(self, seed):
        super().__init__()
        self.weight = draw(6, 6, seed=seed)

    def forward(self, x, context=None):
        return torch.tanh(x @ self.weight)


def norm(x):
    return x / x.square().mean(-1, keepdim=True).sqrt()


class Norm(nn.Module):
    def forward(self, x):
        return norm(x)


def block(name, layer=0, n_layers=4, **keys):
    option = default_option("placement", name)
    option.keys |= keys
    geometry = Geometry(n_layers, 6, 2, 2, 3, 8, 8, 11, layer=layer)
    parts = Parts(lambda inner: Times(1), lambda inner: Times(2), lambda site: Norm(), geometry, layer)
    return PLACEMENT.build(option, parts)


@pytest.fixture
def x():
    return draw(2, 3, 6)


def run(placement, x):
    """The residual stream after one block and a final norm."""
    stream = placement.enter(x)
    return placement.leave(placement(stream, nn.Identity()), Norm(), nn.Identity())


A, F = Times(1), Times(2)
S, T = torch.linspace(0.1, 0.6, 6), torch.linspace(0.7, 0.2, 6)
"""Scales by channel, of the two branches."""


def pre(x):
    return (h := x + A(norm(x))) + F(norm(h))


def post(x):
    return norm((h := norm(x + A(x))) + F(h))


def dual(x):
    """Both residual streams written out: what the blocks read, and the plain sum."""
    first = A(x)
    second = F(h := norm(x + first))
    return norm(h + second) + norm(x + first + second)


REFERENCES = {  # the residual stream after block `layer` of 4; `dual` with its final norm
    "pre": lambda x, layer: pre(x),
    "post": lambda x, layer: post(x),
    "hybrid": lambda x, layer: norm((h := x + A(norm(x))) + F(h)),
    "hybridnorm": lambda x, layer: (z := norm(x + A(x))) + F(z),
    "hybridnorm_star": lambda x, layer: pre(x) if layer == 0 else (z := norm(x + A(x))) + F(z),
    "deepnorm": lambda x, layer: norm(8**0.25 * (h := norm(8**0.25 * x + A(x))) + F(h)),
    "sandwich": lambda x, layer: (h := x + norm(A(norm(x)))) + norm(F(norm(h))),
    "output": lambda x, layer: (h := x + norm(A(x))) + norm(F(h)),
    "subln": lambda x, layer: pre(x),  # its inner norms are inside the branches: tested below
    "mixln": lambda x, layer: post(x) if layer == 0 else pre(x),
    "lns": lambda x, layer: (h := x + A(norm(x) / math.sqrt(layer + 1))) + F(norm(h) / math.sqrt(layer + 1)),
    "residual_scale": lambda x, layer: (h := x + A(norm(x)) / math.sqrt(8)) + F(norm(h)) / math.sqrt(8),
    "layerscale": lambda x, layer: (h := x + S * A(norm(x))) + T * F(norm(h)),
    "rezero": lambda x, layer: (h := x + 0.7 * A(x)) + 0.7 * F(h),
    "dual": lambda x, layer: dual(x),
    "parallel": lambda x, layer: x + A(norm(x)) + F(norm(x)),
}


@pytest.mark.parametrize("layer", [0, 1, 3])
@pytest.mark.parametrize("name", REFERENCES)  # test_recent_options.py has the others
def test_a_placement_is_its_published_equation(name, layer, x):
    placement = block(name, layer)
    if name == "rezero":
        nn.init.constant_(placement.scale, 0.7)
    if name == "layerscale":
        placement.scale_attn.data, placement.scale_ffn.data = S, T
    reference = REFERENCES[name](x, layer)
    torch.testing.assert_close(run(placement, x), reference if name == "dual" else norm(reference))
    if name != "dual":
        torch.testing.assert_close(placement(x, nn.Identity()), reference)


def test_rezero_can_have_a_norm_in_front_of_its_branches(x):
    placement = block("rezero", norm=True)
    nn.init.constant_(placement.scale, 0.7)
    torch.testing.assert_close(placement(x, nn.Identity()), (h := x + 0.7 * A(norm(x))) + 0.7 * F(norm(h)))


def test_parallel_with_two_norms_gives_each_branch_its_own():
    assert block("parallel", norms=1).norm_ffn is None
    placement = block("parallel", norms=2)
    placement.norm_ffn = nn.Tanh()
    x = torch.randn(2, 3, 6)
    torch.testing.assert_close(placement(x, nn.Identity()), x + A(norm(x)) + F(torch.tanh(x)))


@pytest.mark.parametrize(
    ("fraction", "n_layers", "count"), [(0.25, 12, 3), (0.25, 24, 6), (0.29, 100, 29), (0.25, 2, 1)]
)
def test_mixln_is_post_norm_in_the_published_number_of_first_blocks(fraction, n_layers, count):
    post = [block("mixln", layer, n_layers, post_fraction=fraction).post for layer in range(n_layers)]
    assert post == [layer < count for layer in range(n_layers)]


@pytest.mark.parametrize(("n_layers", "scale"), [(2, 0.5), (8, 0.25), (50, 0.1)])
def test_residual_scale_is_one_over_the_root_of_the_additions_or_what_is_asked_for(n_layers, scale):
    assert block("residual_scale", n_layers=n_layers).branch_scale == pytest.approx(scale)
    assert block("residual_scale", branch_scale=0.3).branch_scale == 0.3


@pytest.mark.parametrize(("n_layers", "start"), [(1, 0.1), (18, 0.1), (19, 1e-5), (24, 1e-5), (25, 1e-6), (36, 1e-6)])
def test_layerscale_starts_at_the_published_value_of_its_depth_or_what_is_asked_for(n_layers, start):
    placement = block("layerscale", n_layers=n_layers)
    torch.testing.assert_close(placement.scale_attn.detach(), torch.full((6,), start))
    assert placement.scale_attn is not placement.scale_ffn
    assert block("layerscale", start=0.5).scale_ffn.eq(0.5).all()


# ------------------------------------------------------------------------------------------------- gains and init


@pytest.mark.parametrize("n_layers", [2, 12, 24, 100, 1000])
def test_deepnorm_scales_residual_and_init_as_published(n_layers):
    assert block("deepnorm", n_layers=n_layers).residual_scale == pytest.approx((2 * n_layers) ** 0.25)
    gains = block("deepnorm", n_layers=n_layers).init_gains
    assert gains == dict.fromkeys(("value", "attn_out", "ffn_in", "ffn_out"), pytest.approx((8 * n_layers) ** -0.25))


@pytest.mark.parametrize(("n_layers", "gain"), [(2, 1.17741), (12, 1.78271), (1000, 2.75697)])
def test_subln_scales_init_up_by_the_root_of_ln_2l(n_layers, gain):
    gains = block("subln", n_layers=n_layers).init_gains
    assert gains == dict.fromkeys(("value", "attn_out", "ffn_in", "ffn_out"), pytest.approx(gain, abs=1e-5))


def test_no_other_placement_scales_the_init():
    scaling = {name for name in PLACEMENT.names() if block(name).init_gains}
    assert scaling == {"deepnorm", "subln"}


@pytest.mark.parametrize(("name", "gain"), [("deepnorm", 16**-0.25), ("subln", math.sqrt(math.log(4)))])
def test_a_gain_reaches_exactly_the_four_weight_groups(tiny, name, gain):
    """Against post-norm with the same init and no gain: q and k equal, the others scaled."""
    scaled = dict(build_model(tiny(f"placement={name}", "init=xavier", "ffn=gelu")).named_parameters())
    plain = dict(build_model(tiny("placement=post", "init=xavier", "ffn=gelu")).named_parameters())
    other = {n for n in plain if not torch.equal(scaled[n], plain[n])}
    assert {n.removeprefix("blocks.0.") for n in other if n.startswith("blocks.0.")} == {
        "attn.value.weight",
        "attn.out.weight",
        "ffn.up.weight",
        "ffn.down.weight",
    }
    assert all(n.startswith("blocks.") for n in other)
    for n in other:
        torch.testing.assert_close(scaled[n], plain[n] * gain)


WIDE = ("model.d_model=128", "model.n_layers=4", "ffn=gelu")


def first_values(tiny, *overrides):
    """The matrices of the third block, by role."""
    named = dict(build_model(tiny(*WIDE, *overrides)).blocks[2].named_parameters())
    maps = {"query": "attn.query", "value": "attn.value", "attn_out": "attn.out"}
    maps |= {"ffn_in": "ffn.up", "ffn_out": "ffn.down"}
    return {role: named[f"{name}.weight"] for role, name in maps.items()}


def test_mixln_starts_every_matrix_of_its_blocks_at_two_hundredths_as_in_the_authors_code(tiny):
    for role, weight in first_values(tiny, "placement=mixln").items():
        assert weight.std().item() == pytest.approx(0.02, rel=0.03), role
    notes = tiny("placement=mixln").resolved.notes
    assert "placement=mixln also changes init.branch_scale to off" in notes


def test_residual_scale_starts_as_pre_norm_and_scales_its_branches_once(tiny):
    scaled = build_model(tiny("placement=residual_scale"), 11)
    plain = build_model(tiny("placement=pre"), 11)
    torch.testing.assert_close(scaled(TOKENS), plain(TOKENS))
    assert not torch.equal(scaled.blocks[0].attn.out.weight, plain.blocks[0].attn.out.weight)


DIVIDING = ("init=gpt2", "init=megatron", "init=mitchell")
WARNED = [
    ("placement=deepnorm init=gpt2", "derived for Xavier"),
    ("placement=hybridnorm init=gpt2", "Megatron init"),
    ("placement=output", "bounds its scores"),
    *((f"placement=subln {init}", "sqrt(2") for init in DIVIDING),
    *((f"placement=mixln {init}", "sqrt(2") for init in DIVIDING),
    *((f"placement=residual_scale {init}", "sqrt(2") for init in DIVIDING),
]


@pytest.mark.parametrize(("overrides", "said"), WARNED)
def test_what_a_placement_was_not_derived_with_is_allowed_with_a_warning(tiny, overrides, said):
    assert any(said in note for note in tiny(*overrides.split()).resolved.notes)
    without = overrides.partition(" ")[0] if " " in overrides else "placement=pre"
    assert not any(said in note for note in tiny(without).resolved.notes)


def test_an_init_that_is_asked_for_is_taken_as_it_is_written(tiny):
    assert tiny("placement=mixln", "init=gpt2").resolved.init.keys["branch_scale"] is True
    same = tiny("placement=mixln", "init=gpt2", "init.branch_scale=off")
    assert same.science() == tiny("placement=mixln").science()


def test_deepnorm_s_residual_scale_and_its_init_can_each_be_removed(tiny):
    """The pitfall: the scale without its init. Each removal is said."""
    scale_alone = tiny(*WIDE, "placement=deepnorm", "placement.init_gain=1", "init=gpt2", "init.branch_scale=off")
    model = build_model(scale_alone)
    assert model.blocks[0].residual_scale == pytest.approx(8**0.25)
    assert model.blocks[0].attn.value.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert any("residual scale without the init" in note for note in scale_alone.resolved.notes)
    init_alone = tiny("placement=deepnorm", "placement.residual_scale=1")
    assert build_model(init_alone).blocks[0].residual_scale == 1
    assert any("init without the residual scale" in note for note in init_alone.resolved.notes)


# ---------------------------------------------------------------------------------------- norms and where they stand


def test_subln_norms_the_concatenated_heads_and_the_hidden_layer(tiny):
    model = build_model(tiny("placement=subln", "model.head_dim=4", "d_ff_ratio=2"))
    attn, ffn = model.blocks[0].attn, model.blocks[0].ffn
    assert attn.inner_norm.gain.shape == (2 * 4,)
    assert ffn.inner_norm.gain.shape == (32,)
    seen = {}
    for name, module in (("heads", attn.inner_norm), ("out", attn.out), ("down", ffn.down)):
        module.register_forward_hook(lambda m, inputs, output, name=name: seen.update({name: (inputs[0], output)}))
    model(TOKENS)
    torch.testing.assert_close(seen["out"][0], seen["heads"][1])
    for name in ("out", "down"):
        torch.testing.assert_close(seen[name][0].square().mean(-1), torch.ones(2, 8), rtol=0.1, atol=0)


FINAL = dict.fromkeys(PLACEMENT.names(), True) | dict.fromkeys(("post", "hybrid", "deepnorm", "rezero", "ngpt"), False)


@pytest.mark.parametrize(("name", "final"), FINAL.items())
def test_the_final_norm_belongs_to_the_placement_and_can_be_overruled(tiny, name, final):
    assert isinstance(build_model(tiny(f"placement={name}")).final_norm, nn.Identity) is not final
    assert isinstance(build_model(tiny(f"placement={name}", "final_norm=off")).final_norm, nn.Identity)
    assert not isinstance(build_model(tiny(f"placement={name}", "final_norm=on")).final_norm, nn.Identity)


# ------------------------------------------------------------------------------------------------ claims of a model


def streams(model):
    """The embedding as the first block gets it, and the residual stream after each block."""
    results = []
    model.blocks[0].register_forward_pre_hook(lambda m, inputs: results.append(inputs[0]))
    for b in model.blocks:
        b.register_forward_hook(lambda m, inputs, output: results.append(output))
    model.eval()(TOKENS)
    return results


STARTS_AS_IDENTITY = [
    ["placement=rezero"],
    ["placement=output", "norm.gain_init=0"],
    ["placement=sandwich", "norm.gain_init=0", "norm_gain_sites=[attn_out,ffn_out]"],
    ["placement=subln", "norm.gain_init=0", "norm_gain_sites=[attn_inner,ffn_inner]"],
]


@pytest.mark.parametrize("overrides", STARTS_AS_IDENTITY, ids=",".join)
@pytest.mark.parametrize("norm", ["rms", "layer", "scale", "t5"])
def test_these_blocks_start_as_the_identity(tiny, overrides, norm):
    first, *later = streams(build_model(tiny(*overrides, f"norm={norm}"), 11))
    assert all(torch.equal(first, stream) for stream in later)


EVERY_NORM = {"parallel": ["placement.norms=2"], "rezero": ["placement.norm=on"]}
"""Keys with which a placement has all the norms that it can have."""


def built_sites(monkeypatch, config):
    """The sites at which the model asks for a norm in its blocks."""
    requests, build = [], NORM.build
    monkeypatch.setattr(
        NORM, "build", lambda option, width, bias, site: requests.append(site) or build(option, width, bias, site)
    )
    build_model(config, 11)
    return set(requests) - {"final"}


@pytest.mark.parametrize(("name", "keys"), [*((n, []) for n in PLACEMENT.names()), *EVERY_NORM.items()])
def test_a_placement_s_file_says_where_its_norms_are(tiny, monkeypatch, name, keys):
    """What is refused below is decided before the model is built."""
    said = option_files("placement")[name].norm_sites
    built = built_sites(monkeypatch, tiny(f"placement={name}", *keys))
    assert built == {site for site, needs in said.items() if not needs or needs in keys}


def subsets(name):
    sites = list(option_files("placement")[name].norm_sites)
    groups = [s for k in range(1, len(sites) + 2) for s in itertools.combinations([*sites, "final"], k)]
    return [None, *groups]


DEAD_OR_ALIVE = [
    pytest.param(name, sites, ffn, marks=[] if sites is None else pytest.mark.slow)
    for name in PLACEMENT.names()
    for sites in subsets(name)
    for ffn in ("swiglu", "gelu")
]


@pytest.mark.parametrize(("name", "sites", "ffn"), DEAD_OR_ALIVE)
def test_no_placement_is_dead_at_gain_0_without_a_word(tiny, name, sites, ffn):
    """Either it refuses norm.gain_init=0 at these sites, or it warns, or every parameter learns."""
    chosen = [] if sites is None else [f"norm_gain_sites=[{','.join(sites)}]", *EVERY_NORM.get(name, [])]
    try:
        config = tiny(f"placement={name}", "norm.gain_init=0", f"ffn={ffn}", *chosen)
    except ConfigError as refused:
        assert "norm.gain_init=0 at" in str(refused) or "no norm at this site" in str(refused)
        return
    if any("norm.gain_init=0" in note for note in config.resolved.notes):
        return
    model = build_model(config, 11)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    learned = set()
    for _ in range(6):
        loss = next_token_loss(model)
        optimizer.zero_grad()
        loss.backward()
        learned |= {n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
        optimizer.step()
    assert learned == dict(model.named_parameters()).keys()


def test_a_probe_of_dual_sees_the_stream_that_its_branches_read(tiny):
    """Post-norm: its RMS is 1, where the plain sum's is that of the embedding and of the branches."""
    model = build_model(tiny("placement=dual", "init=xavier"), 11)
    seen = probe(model, TOKENS)
    assert [seen[f"act/block_{layer:03d}/resid/rms"] for layer in (0, 1)] == pytest.approx([1, 1], abs=1e-2)


# --------------------------------------------------------------------------------------------- prescribed and refused


@pytest.mark.parametrize("name", HYBRIDNORM)
def test_hybridnorm_brings_its_norm_of_queries_keys_and_values_and_its_init_and_says_so(tiny, name):
    resolved = tiny(f"placement={name}").resolved
    assert (resolved.qk_norm.name, resolved.init.name) == ("qkv", "megatron")
    assert any("also changes init to megatron" in note for note in resolved.notes)
    assert any("also changes qk_norm to qkv" in note for note in resolved.notes)


def test_lns_takes_the_authors_init_without_depth_scaling(tiny):
    init = tiny("placement=lns").resolved.init
    assert init.flat() == {"name": "fan_in", "branch_scale": False}


def test_rezero_says_that_the_norm_axis_has_no_effect(tiny):
    assert any("no norm at all" in note for note in tiny("placement=rezero").resolved.notes)
    for norm in ("placement.norm=on", "final_norm=on", "embed_norm=on"):
        assert not any("no norm at all" in note for note in tiny("placement=rezero", norm).resolved.notes)

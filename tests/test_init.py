import math

import pytest
import torch
from scipy import stats

from nexus_ablate.axes.init import INIT, Weight, layer_of, standard_normal, truncated
from nexus_ablate.axes.modules import Geometry
from nexus_ablate.config.options import default_option
from nexus_ablate.config.roles import EMBEDDINGS, MATRICES
from nexus_ablate.model import build_model

L, D, F = 6, 20, 80
GEOMETRY = Geometry(L, D, 4, 4, 5, F, 8, 11)
SHAPES = dict.fromkeys(MATRICES, (D, D)) | {"ffn_in": (F, D), "ffn_out": (D, F)}
SHAPES |= dict.fromkeys(("head", "embedding", "position"), (11, D))


def std(name, role, layer=3, **keys):
    option = default_option("init", name)
    option.keys |= keys
    inside = role not in (*EMBEDDINGS, "head")
    return INIT.build(option, GEOMETRY).std(Weight(role, torch.Size(SHAPES[role]), layer if inside else None))


def scaled(base, output):
    """The table of an init with one std but for the outputs of branches."""
    return dict.fromkeys((*MATRICES, *EMBEDDINGS), base) | dict.fromkeys(("attn_out", "ffn_out"), output)


SMALL = math.sqrt(2 / (5 * D))
PUBLISHED = {
    "gpt2": scaled(0.02, 0.02 / math.sqrt(2 * L)),
    "fan_in": {r: 1 / math.sqrt(SHAPES[r][1]) for r in MATRICES}
    | dict.fromkeys(EMBEDDINGS, 1 / math.sqrt(D))
    | {r: 1 / math.sqrt(2 * L * SHAPES[r][1]) for r in ("attn_out", "ffn_out")},
    "small": scaled(SMALL, SMALL),
    "megatron": scaled(SMALL, SMALL / math.sqrt(2 * L)) | {"head": 1 / math.sqrt(D)},
    "mitchell": scaled(1 / math.sqrt(D), 1 / math.sqrt(2 * D * 4)) | {"ffn_out": 1 / math.sqrt(2 * F * 4)},
    "xavier": {r: math.sqrt(2 / sum(SHAPES[r])) for r in MATRICES} | dict.fromkeys(EMBEDDINGS, 1 / math.sqrt(D)),
}


@pytest.mark.parametrize("role", SHAPES)
@pytest.mark.parametrize("name", sorted({*INIT.names()} - {"checkpoint"}))
def test_an_init_has_the_published_standard_deviation_for_each_role(name, role):
    assert std(name, role) == pytest.approx(PUBLISHED[name][role])


@pytest.mark.parametrize("name", ["gpt2", "small", "fan_in"])
def test_branch_scale_divides_the_outputs_by_sqrt_2l_and_nothing_else(name):
    for role in SHAPES:
        divided = math.sqrt(2 * L) if role in ("attn_out", "ffn_out") else 1
        assert std(name, role, branch_scale=True) == pytest.approx(std(name, role, branch_scale=False) / divided)


def test_megatron_is_hybridnorm_s_std_at_its_width():
    """init_std of the authors' 1.2B configuration, d_model 2048."""
    megatron = INIT.build(default_option("init", "megatron"), Geometry(16, 2048, 32, 32, 64, 8192, 8, 11))
    assert megatron.std(Weight("query", torch.Size((2048, 2048)), 0)) == pytest.approx(0.013975424859373685)


def test_the_layer_of_a_parameter_is_in_its_name():
    assert layer_of("blocks.12.attn.out.weight") == 12
    assert layer_of("embedding.weight") is None


def test_truncation_keeps_each_z_s_quantile_and_its_sign():
    z = standard_normal(0, "x", torch.Size((100, 100)))
    cut = truncated(z, 3.0)
    expected = stats.truncnorm.ppf(stats.norm.cdf(z.double()), -3, 3)
    torch.testing.assert_close(cut, torch.from_numpy(expected).float(), rtol=1e-5, atol=1e-6)
    assert cut.abs().max() <= 3 < z.abs().max()
    assert torch.equal(cut.flatten().argsort(), z.flatten().argsort())
    assert stats.kstest(cut.flatten().numpy(), stats.truncnorm(-3, 3).cdf).pvalue > 0.01


@pytest.mark.parametrize("z", [-40.0, -8.0, 0.0, 8.0, 40.0])
def test_truncation_of_any_z_is_finite_and_inside(z):
    assert abs(truncated(torch.tensor(z), 3.0).item()) <= 3.0


@pytest.mark.parametrize("name", ["megatron", "mitchell"])
def test_a_truncated_init_is_cut_off_at_three_std_and_shares_z_with_the_others(tiny, name):
    cut, plain = build_model(tiny(f"init={name}")), build_model(tiny("init=gpt2"))
    assert cut.z_hashes == plain.z_hashes
    weight, z = cut.blocks[1].attn.query.weight, plain.blocks[1].attn.query.weight / 0.02
    first = INIT.build(default_option("init", name), cut.geometry).std(Weight("query", weight.shape, 1))
    torch.testing.assert_close(weight.detach(), first * truncated(z.detach(), 3.0), rtol=1e-4, atol=1e-7)


def test_a_model_has_each_block_s_own_std(tiny):
    blocks = build_model(tiny("init=mitchell", "model.d_model=128", "model.n_layers=3")).blocks
    cut = 0.98658  # the std of a standard normal cut off at 3
    for layer, block in enumerate(blocks):
        assert block.attn.out.weight.std().item() == pytest.approx(cut * (2 * 128 * (layer + 1)) ** -0.5, rel=0.02)

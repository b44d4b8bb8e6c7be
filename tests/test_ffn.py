import math

import pytest
import torch
from tensors import draw, option_with, randomise
from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts

from nexus_ablate.axes.ffn import FFN, FFNParts
from nexus_ablate.axes.modules import Geometry
from nexus_ablate.config.grammar import ratio
from nexus_ablate.config.options import option_files

D, F = 6, 10
MLPS = [name for name in FFN.names() if name != "moe"]
"""The FFNs with one hidden layer; test_recent_options.py has the rest, xIELU and PolyNorm."""


def build(name, bias=True, inner_norm=None, **keys):
    ffn = FFN.build(
        option_with("ffn", name, **keys),
        FFNParts(Geometry(2, D, 2, 2, 3, F, 8, 11), bias, 0.0, inner_norm or nn.Identity()),
    )
    return randomise(ffn)


def phi(z):
    """The standard normal distribution function, by its series of erf."""
    return torch.tensor([0.5 * (1 + math.erf(v / math.sqrt(2))) for v in z.flatten().tolist()]).view_as(z)


def sigmoid(z):
    return 1 / (1 + torch.exp(-z))


def gelu_tanh(z):
    return 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


PLAIN = {
    "relu": lambda z: z * (z > 0),
    "relu2": lambda z: z * z * (z > 0),
    "gelu": lambda z: z * phi(z),
    "gelu_tanh": gelu_tanh,
    "silu": lambda z: z * sigmoid(z),
}
GATED = {
    "bilinear": lambda z: z,
    "glu": sigmoid,
    "reglu": PLAIN["relu"],
    "geglu": PLAIN["gelu"],
    "swiglu": PLAIN["silu"],
    "reglu2": PLAIN["relu2"],
}


@pytest.fixture
def x():
    return draw(2, 5, D, seed=9)


def test_every_ffn_is_plain_or_gated_and_has_a_reference_here():
    assert {n for n in MLPS if not FFN.get(n).gated} == {*PLAIN, "xielu", "polynorm"}
    assert {n for n in MLPS if FFN.get(n).gated} == {*GATED, "swiglu_clamped", "ngpt"}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", [*PLAIN, *GATED])
def test_an_ffn_is_two_projections_around_its_nonlinearity_or_a_product_of_two_of_which_one_goes_through_it(
    name, bias, x
):
    ffn = build(name, bias)
    up = nn.functional.linear(x, ffn.up.weight, ffn.up.bias)
    hidden = (
        PLAIN[name](up) if name in PLAIN else up * GATED[name](nn.functional.linear(x, ffn.gate.weight, ffn.gate.bias))
    )
    torch.testing.assert_close(ffn(x, None), nn.functional.linear(hidden, ffn.down.weight, ffn.down.bias))


def test_clamped_swiglu_is_the_expert_of_gpt_oss(x):
    actual = build("swiglu_clamped", limit=0.8)
    expected = GptOssExperts(GptOssConfig(hidden_size=D, intermediate_size=F, num_local_experts=1, swiglu_limit=0.8))
    maps = [nn.functional.linear(x, m.weight, m.bias) for m in (actual.gate, actual.up)]
    hidden = expected._apply_gate(torch.stack(maps, -1).flatten(-2))
    assert (maps[0] > 0.8).any() and (maps[1] < -0.8).any()
    torch.testing.assert_close(actual(x, None), nn.functional.linear(hidden, actual.down.weight, actual.down.bias))


def test_geglu_takes_the_tanh_form_when_asked(x):
    ffn = build("geglu", bias=False, tanh=True)
    torch.testing.assert_close(
        ffn(x, None), (gelu_tanh(x @ ffn.gate.weight.T) * (x @ ffn.up.weight.T)) @ ffn.down.weight.T
    )
    assert not torch.equal(ffn(x, None), build("geglu", bias=False)(x, None))


@pytest.mark.parametrize("name", MLPS)
def test_the_inner_norm_is_before_the_output_projection(name, x):
    ffn = build(name, bias=False, inner_norm=nn.Hardtanh(-0.1, 0.1))
    torch.testing.assert_close(ffn(x, None), ffn.hidden(x).clamp(-0.1, 0.1) @ ffn.down.weight.T)


@pytest.mark.parametrize("name", MLPS)
def test_at_its_own_ratio_every_ffn_has_the_parameters_of_a_4_d_one(name):
    maps = 3 if FFN.get(name).gated else 2
    assert maps * ratio(option_files("ffn")[name].prescribes["d_ff_ratio"]) == pytest.approx(8)

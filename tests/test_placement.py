import pytest
import torch
from torch import nn

from nexus_ablate.axes.placement import PLACEMENTS, Parts
from nexus_ablate.config import default_option
from nexus_ablate.model import build_model


class Times(nn.Module):
    """A branch that multiplies by a matrix, so that the order of things can be told from the result."""

    def __init__(self, seed):
        super().__init__()
        self.weight = torch.randn(6, 6, generator=torch.Generator().manual_seed(seed))

    def forward(self, x, position=None):
        return x @ self.weight


def norm(x):
    return x / x.square().mean(-1, keepdim=True).sqrt()


class Norm(nn.Module):
    def forward(self, x):
        return norm(x)


def block(name, n_layers=4):
    parts = Parts(Times(1), Times(2), lambda site: Norm(), 0, n_layers)
    return PLACEMENTS.build(default_option("placement", name), parts)


A, F = Times(1), Times(2)
REFERENCES = {
    "pre": lambda x: (h := x + A(norm(x))) + F(norm(h)),
    "post": lambda x: norm((h := norm(x + A(x))) + F(h)),
    "hybrid": lambda x: norm((h := x + A(norm(x))) + F(h)),
    "deepnorm": lambda x: norm(8**0.25 * (h := norm(8**0.25 * x + A(x))) + F(h)),
}


@pytest.mark.parametrize("name", PLACEMENTS.names())
def test_a_placement_is_its_published_equation(name):
    x = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(block(name)(x, nn.Identity()), REFERENCES[name](x))


def test_placements_of_the_same_parts_differ():
    x = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))
    outputs = [block(name)(x, nn.Identity()) for name in PLACEMENTS.names()]
    for i, first in enumerate(outputs):
        assert all((first - other).abs().max() > 1e-3 for other in outputs[i + 1 :])


@pytest.mark.parametrize("n_layers", [2, 12, 24, 100, 1000])
def test_deepnorm_scales_residual_and_init_as_published(n_layers):
    assert block("deepnorm", n_layers).residual_scale == pytest.approx((2 * n_layers) ** 0.25)
    gains = PLACEMENTS.get("deepnorm").init_gains(n_layers)
    assert gains == dict.fromkeys(("value", "attn_out", "ffn_in", "ffn_out"), pytest.approx((8 * n_layers) ** -0.25))


def test_deepnorm_gain_reaches_exactly_the_four_weight_groups(tiny):
    """Against the same model with Xavier init and no gain: q and k equal, the others scaled by (8L)^(-1/4)."""
    deep = dict(build_model(tiny("placement=deepnorm", "ffn=gelu")).named_parameters())
    post = dict(build_model(tiny("placement=post", "init=xavier", "ffn=gelu")).named_parameters())
    scaled = {n for n in deep if not torch.equal(deep[n], post[n])}
    block_scaled = {n.removeprefix("blocks.0.") for n in scaled if n.startswith("blocks.0.")}
    assert block_scaled == {"attn.value.weight", "attn.out.weight", "ffn.up.weight", "ffn.down.weight"}
    assert all(n.startswith("blocks.") for n in scaled)
    for name in scaled:
        torch.testing.assert_close(deep[name], post[name] * 16**-0.25)


@pytest.mark.parametrize(("name", "final"), [("pre", True), ("post", False), ("hybrid", False), ("deepnorm", False)])
def test_the_final_norm_belongs_to_the_placement_and_can_be_overruled(tiny, name, final):
    assert isinstance(build_model(tiny(f"placement={name}")).final_norm, nn.Identity) is not final
    assert isinstance(build_model(tiny(f"placement={name}", "final_norm=off")).final_norm, nn.Identity)
    assert not isinstance(build_model(tiny(f"placement={name}", "final_norm=on")).final_norm, nn.Identity)

import math

import pytest
import torch

from nexus_ablate.axes.position import POSITIONS, slopes
from nexus_ablate.axes.roles import Geometry
from nexus_ablate.config import default_option

GEOMETRY = Geometry(n_layers=2, d_model=16, n_heads=2, head_dim=8, d_ff=32, context=12, vocab_size=11)


def build(name, **keys):
    option = default_option("position", name)
    option.keys |= keys
    return POSITIONS.build(option, GEOMETRY)


def vectors(T=12, width=8, seed=0):
    return torch.randn(1, 2, T, width, generator=torch.Generator().manual_seed(seed))


def rotate(position, x):
    return position.rotate(x, x, 0)[0]


def same_vector_everywhere(T=12, seed=0):
    return vectors(1, seed=seed).expand(1, 2, T, 8)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("form", ["real", "complex"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_rope_scores_depend_on_distance_alone(pairing, form, fraction):
    rope = build("rope", pairing=pairing, form=form, fraction=fraction)
    q, k = rope.rotate(same_vector_everywhere(seed=1), same_vector_everywhere(seed=2), 0)
    score = q @ k.transpose(-1, -2)
    for shift in range(1, 6):
        torch.testing.assert_close(score[..., shift:, shift:], score[..., :-shift, :-shift], rtol=0, atol=1e-4)
    assert score.std() > 0.01  # and they do depend on it


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_rope_keeps_lengths_and_leaves_position_0(pairing):
    x = vectors()
    turned = rotate(build("rope", pairing=pairing), x)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned[:, :, 0], x[:, :, 0])
    assert (turned[:, :, 1:] - x[:, :, 1:]).abs().max() > 0.1


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_rope_real_and_complex_forms_are_one_function(pairing, fraction):
    real, imaginary = (build("rope", pairing=pairing, fraction=fraction, form=form) for form in ("real", "complex"))
    torch.testing.assert_close(rotate(real, vectors()), rotate(imaginary, vectors()), rtol=0, atol=1e-5)


def test_rope_pairings_are_one_function_up_to_a_permutation_of_channels():
    x = vectors()
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # (i, i + d/2) side by side
    half, interleaved = rotate(build("rope"), x), rotate(build("rope", pairing="interleaved"), x[..., order])
    torch.testing.assert_close(half[..., order], interleaved)


def test_rope_is_the_papers_rotation():
    x = vectors()
    turned = rotate(build("rope", pairing="interleaved", theta=100.0), x)
    for p in (1, 5):
        for i in range(4):
            angle = p * 100.0 ** (-2 * i / 8)
            a, b = x[0, 0, p, 2 * i], x[0, 0, p, 2 * i + 1]
            torch.testing.assert_close(turned[0, 0, p, 2 * i], a * math.cos(angle) - b * math.sin(angle))
            torch.testing.assert_close(turned[0, 0, p, 2 * i + 1], a * math.sin(angle) + b * math.cos(angle))


def test_rope_rotates_only_its_fraction_with_the_rotated_width_as_denominator():
    x = vectors()
    turned = rotate(build("rope", fraction=0.5), x)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    torch.testing.assert_close(turned[..., :4], rotate(build_narrow(), x[..., :4]))


def build_narrow():
    from dataclasses import replace

    return POSITIONS.build(default_option("position", "rope"), replace(GEOMETRY, head_dim=4))


@pytest.mark.parametrize("name", ["rope", "sinusoidal", "alibi"])
def test_formula_schemes_go_on_beyond_the_training_context(name):
    position = build(name)
    longer = build(name)
    x = torch.zeros(1, 30, 16)
    assert position.embed(x).shape == x.shape
    torch.testing.assert_close(rotate(position, vectors(30))[:, :, :12], rotate(longer, vectors(30)[:, :, :12]))
    if name == "alibi":
        assert torch.equal(position.score_bias(30, 0)[:, :12, :12], position.score_bias(12, 0))


def test_learned_positions_are_not_defined_beyond_their_table():
    with pytest.raises(ValueError, match="12 positions, not for 13"):
        build("learned").embed(torch.zeros(1, 13, 16))


def test_learned_positions_add_the_row_of_each_position():
    learned = build("learned")
    with torch.no_grad():
        learned.table.weight.copy_(torch.arange(12)[:, None].expand(12, 16))
    assert learned.embed(torch.zeros(2, 5, 16))[1, :, 3].tolist() == [0, 1, 2, 3, 4]


def test_sinusoids_are_the_papers_formula():
    wave = build("sinusoidal").embed(torch.zeros(1, 12, 16))[0]
    for p in (0, 3, 11):
        for i in range(8):
            assert float(wave[p, 2 * i]) == pytest.approx(math.sin(p / 10000 ** (2 * i / 16)), abs=1e-6)
            assert float(wave[p, 2 * i + 1]) == pytest.approx(math.cos(p / 10000 ** (2 * i / 16)), abs=1e-6)


def test_alibi_is_minus_the_slope_times_the_distance():
    bias = build("alibi").score_bias(12, 0)
    assert bias.shape == (2, 12, 12)
    assert float(bias[0, 7, 4]) == -3 * 2**-4
    assert float(bias[1, 7, 4]) == -3 * 2**-8
    assert torch.equal(bias.diagonal(dim1=1, dim2=2), torch.zeros(2, 12))


def test_alibi_slopes_are_the_authors_for_any_number_of_heads():
    assert slopes(8) == [2**-h for h in range(1, 9)]
    assert slopes(6) == [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    assert slopes(12)[8:] == pytest.approx([0.7071, 0.3536, 0.1768, 0.0884], abs=1e-4)
    assert all(len(slopes(n)) == n == len(set(slopes(n))) for n in range(1, 40))


def test_only_what_rotates_says_so():
    assert {name for name in POSITIONS.names() if build(name).rotates} == {
        name for name in POSITIONS.names() if not torch.equal(rotate(build(name), vectors()), vectors())
    }

import math
from dataclasses import replace

import pytest
import torch
from tensors import draw, option_with
from torch.nn import functional as F
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama import LlamaConfig
from transformers.models.t5 import modeling_t5
from transformers.models.xglm.modeling_xglm import XGLMSinusoidalPositionalEmbedding

from nexus_ablate.axes.modules import Geometry
from nexus_ablate.axes.position import POSITION, slopes, square
from nexus_ablate.model import build_model

GEOMETRY = Geometry(n_layers=2, d_model=16, n_heads=2, n_kv_heads=2, head_dim=8, d_ff=32, context=12, vocab_size=11)


def build(name, geometry=GEOMETRY, **keys):
    """The scheme with random values in its matrices and tables."""
    position = POSITION.build(option_with("position", name, **keys), geometry)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in position.parameters():
            if parameter.ndim > 1:
                parameter.normal_(generator=generator)
    return position


def vectors(T=12, width=8, seed=0):
    return draw(1, 2, T, width, seed=seed)


def rotate(position, x):
    return position.rotate(x, x, 0)[0]


def test_rope_pairings_are_one_function_up_to_a_permutation_of_channels():
    x = vectors()
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # (i, i + d/2) side by side
    half, interleaved = rotate(build("rope"), x), rotate(build("rope", pairing="interleaved"), x[..., order])
    torch.testing.assert_close(half[..., order], interleaved)


def test_rope_is_the_papers_rotation():
    x = vectors()
    angle = torch.arange(12)[:, None] * 100.0 ** (-torch.arange(0, 8, 2) / 8)
    pairs = torch.view_as_complex(x.unflatten(-1, (4, 2))) * torch.polar(torch.ones(12, 4), angle)
    expected = torch.view_as_real(pairs).flatten(-2)
    torch.testing.assert_close(rotate(build("rope", pairing="interleaved", theta=100.0), x), expected)


def test_rope_rotates_only_its_fraction_with_the_rotated_width_as_denominator():
    x = vectors()
    turned = rotate(build("rope", fraction=0.5), x)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    torch.testing.assert_close(turned[..., :4], rotate(build("rope", replace(GEOMETRY, head_dim=4)), x[..., :4]))


def sites(position, T, layer):
    """All that a scheme does to a sequence of T positions: the embedding, q, k, and what is added to the scores."""
    q, k = vectors(30, seed=1)[:, :, :T], vectors(30, seed=2)[:, :, :T]
    added = position.query_bias(q, layer, 0.5)
    if added is None:
        added = position.score_bias(T, layer)
    scores = torch.zeros(1, 2, T, T) if added is None else square(added, T).expand(1, 2, T, T)
    return position.embed(torch.zeros(1, T, 16)), *position.rotate(q, k, layer), scores.tril()


@pytest.mark.parametrize("name", sorted(set(POSITION.names()) - {"learned"}))
def test_schemes_without_a_table_of_positions_go_on_beyond_the_training_context(name):
    position = build(name)
    for layer in range(2):
        longer, shorter = sites(position, 30, layer), sites(position, 12, layer)
        for wide, narrow in zip(longer, shorter, strict=True):
            cut = wide[..., :12, :12] if wide.shape[-1] == 30 else wide[..., :12, :]
            torch.testing.assert_close(cut, narrow)
            assert torch.isfinite(wide).all()


def test_learned_positions_are_not_defined_beyond_their_table():
    with pytest.raises(ValueError, match="12 positions, not for 13"):
        build("learned").embed(torch.zeros(1, 13, 16))


def test_learned_positions_add_the_row_of_each_position():
    learned = build("learned")
    with torch.no_grad():
        learned.table.weight.copy_(torch.arange(12)[:, None].expand(12, 16))
    assert learned.embed(torch.zeros(2, 5, 16))[1, :, 3].tolist() == [0, 1, 2, 3, 4]


def test_sinusoids_are_added_to_the_embedding_times_the_root_of_the_width_as_in_the_paper(tiny):
    config = tiny("position=sinusoidal")
    assert config.resolved.embed_scale == "sqrt_d"
    assert "position=sinusoidal also changes embed_scale to sqrt_d" in config.resolved.notes
    model, entered = build_model(config, 11), []
    model.blocks[0].register_forward_pre_hook(lambda module, inputs: entered.append(inputs[0][0]))
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        model(tokens)
    angle = torch.arange(5)[:, None] / 10000 ** (torch.arange(0, 16, 2) / 16)
    wave = torch.stack((angle.sin(), angle.cos()), -1).flatten(1)
    torch.testing.assert_close(entered[0], 4 * model.embedding.weight[tokens[0]] + wave)


def test_sinusoids_without_the_published_embedding_scale_are_allowed_with_a_warning(tiny):
    resolved = tiny("position=sinusoidal", "embed_scale=off").resolved
    assert resolved.embed_scale == "off"
    assert any("drown" in note for note in resolved.notes)


def test_a_scale_that_starts_as_the_prescribed_one_and_learns_satisfies_both_options(tiny):
    resolved = tiny("position=sinusoidal", "norm=dyt").resolved
    assert (resolved.embed_scale, resolved.prescribed["embed_scale"]) == ("learned", "norm=dyt")


def test_alibi_is_minus_the_slope_times_the_distance():
    pairs = square(build("alibi").score_bias(12, 0), 12)
    assert float(pairs[0, 7, 4]) == -3 * 2**-4
    assert float(pairs[1, 7, 4]) == -3 * 2**-8
    assert torch.equal(pairs.diagonal(dim1=1, dim2=2), torch.zeros(2, 12))


def test_alibi_slopes_are_the_authors_for_any_number_of_heads():
    assert slopes(8) == [2**-h for h in range(1, 9)]
    assert slopes(6) == [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    assert slopes(12)[8:] == pytest.approx([0.7071, 0.3536, 0.1768, 0.0884], abs=1e-4)
    assert all(len(slopes(n)) == n == len(set(slopes(n))) for n in range(1, 40))


@pytest.mark.parametrize("name", POSITION.names())
@pytest.mark.parametrize("layer", [0, 3])
def test_a_key_bias_acts_under_softmax_only_where_the_scheme_says_that_it_rotates_keys(name, layer):
    position = build(name, replace(GEOMETRY, n_layers=4))
    q, k = vectors(seed=1), vectors(seed=2)

    def weights(k):
        turned_q, turned_k = position.rotate(q, k, layer)
        return (turned_q @ turned_k.transpose(-1, -2)).softmax(-1)

    change = (weights(k + vectors(1, seed=3)) - weights(k)).abs().max()
    assert (change > 1e-3) == position.turns_keys(layer)


@pytest.mark.parametrize("name", sorted(set(POSITION.names()) - {"none", "learned", "sinusoidal"}))
def test_a_layer_of_nope_every_is_a_layer_without_positions(tiny, name):
    """Of each scheme that acts in the layers: the second block attends as without positions, the first does not."""
    actual = build_model(tiny(f"position={name}", "nope_every=2", "init=xavier"), 11)
    plain = build_model(tiny("position=none", "init=xavier"), 11)
    x = draw(1, 8, 16)
    same = [
        torch.equal(model.attn(x, actual.context(x)), other.attn(x, plain.context(x)))
        for model, other in zip(actual.blocks, plain.blocks, strict=True)
    ]
    assert same == [False, True]


def test_irope_has_positions_but_in_every_fourth_layer(tiny):
    model = build_model(tiny("position=irope", "model.n_layers=8"), 11)
    assert [model.position_at(layer) is model.position for layer in range(8)] == [True, True, True, False] * 2
    assert tiny("position=irope", "nope_every=2").resolved.nope_every == 2


def test_a_model_too_shallow_for_a_layer_without_positions_says_so(tiny):
    said = "with 3 layers all have positions"
    assert any(said in note for note in tiny("position=irope", "model.n_layers=3").resolved.notes)
    assert not any("have positions" in n for n in tiny("position=irope", "model.n_layers=4").resolved.notes)


def library_frequencies(rope_type, **parameters):
    """Frequencies and length as the library computes them, for a head of 16 channels and a context of 12."""
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "original_max_position_embeddings": 12} | parameters
    config = LlamaConfig(hidden_size=32, num_attention_heads=2, max_position_embeddings=48, rope_parameters=rope)
    return ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))


LLAMA3 = {"low_freq_factor": 0.5, "high_freq_factor": 1.5}
YARN = {"beta_fast": 1.5, "beta_slow": 0.01}


@pytest.mark.parametrize(
    ("name", "keys", "rope_type", "parameters"),
    [
        ("rope_interpolated", {"factor": 4.0}, "linear", {"factor": 4.0}),
        ("rope_llama3", {"factor": 4.0, "theta": 10000.0, **LLAMA3}, "llama3", {"factor": 4.0, **LLAMA3}),
        ("rope_yarn", {"factor": 4.0, **YARN}, "yarn", {"factor": 4.0, **YARN}),
        ("rope_yarn", {**YARN, "truncate": False}, "yarn", {"factor": 4.0, **YARN, "truncate": False}),
        ("rope_yarn", {"attention_factor": 1.3}, "yarn", {"factor": 4.0, "attention_factor": 1.3}),
    ],
)
def test_scaled_frequencies_are_those_of_another_library(name, keys, rope_type, parameters):
    (rotation,) = build(name, replace(GEOMETRY, head_dim=16), **keys).rotations
    frequency, length = library_frequencies(rope_type, **parameters)
    torch.testing.assert_close(rotation.frequency_w, frequency, rtol=1e-6, atol=0)
    assert rotation.length == pytest.approx(length)
    turned, _ = rotation(vectors(width=16), vectors(width=16))
    torch.testing.assert_close(turned.norm(dim=-1), length * vectors(width=16).norm(dim=-1))


def test_a_layer_that_scales_no_frequency_lengthens_no_vector():
    for given in ("auto", 1.5):
        rotations = build("rope_yarn", factor=[1.0, 4.0], attention_factor=given).rotations
        assert [r.length for r in rotations] == pytest.approx([1.0, 1.5 if given != "auto" else 0.1 * math.log(4) + 1])


def test_ntk_divides_the_lowest_frequency_by_the_factor_and_leaves_the_highest():
    (rotation,) = build("rope_interpolated", method="ntk", factor=3.0).rotations
    (plain,) = build("rope").rotations
    ratio = (plain.frequency_w / rotation.frequency_w).tolist()
    assert ratio == pytest.approx([3 ** (c / 3) for c in range(4)], rel=1e-5)


def test_factors_and_thetas_by_layer_go_around_by_themselves():
    rope = build("rope_interpolated", theta=[100.0, 10000.0], factor=[1.0, 1.0, 8.0])
    for layer in range(6):
        expected = build("rope_interpolated", theta=(100.0, 10000.0)[layer % 2], factor=(1.0, 1.0, 8.0)[layer % 3])
        assert torch.equal(rope.rotate(vectors(), vectors(), layer)[0], rotate(expected, vectors()))


@pytest.mark.parametrize("width", [16, 12])
def test_sinusoids_as_in_fairseq_are_those_of_another_library(width):
    wave = build("sinusoidal", replace(GEOMETRY, d_model=width), layout="fairseq").embed(torch.zeros(1, 12, width))
    expected = XGLMSinusoidalPositionalEmbedding(20, width, padding_idx=None)
    torch.testing.assert_close(wave[0], expected.weights[2:14])


def test_alibi_slopes_take_a_factor_and_other_exponents():
    assert build("alibi", slope_factor=0.5).slope_H.tolist() == [2**-5, 2**-9]
    assert build("alibi", bias_max=4.0).slope_H.tolist() == [2**-2, 2**-4]


def test_irope_sharpens_the_queries_without_positions_as_llama_4_does():
    q, k = vectors(seed=1), vectors(seed=2)
    irope = build("irope", replace(GEOMETRY, n_layers=4), floor_scale=3).without(GEOMETRY)
    sharpened, same = irope.rotate(q, k, 3)
    factor = 1 + 0.1 * (1 + (torch.arange(1, 13) // 3)).log()
    torch.testing.assert_close(sharpened, factor[:, None] * q)
    assert torch.equal(same, k) and torch.equal(sharpened[:, :, :2], q[:, :, :2])


@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (16, 40), (7, 100)])
def test_t5_buckets_are_those_of_another_implementation(buckets, max_distance):
    expected = modeling_t5.T5Attention._relative_position_bucket(-torch.arange(300), False, buckets, max_distance)
    assert build("t5", buckets=buckets, max_distance=max_distance).bucket(300).tolist() == expected.tolist()


def test_t5_adds_the_table_entry_of_the_bucket_of_the_distance_in_every_layer():
    t5 = build("t5")
    bias, bucket = t5.score_bias(40, 0), t5.bucket(40)
    for i, j in ((0, 0), (39, 0), (25, 4), (30, 29)):
        assert torch.equal(square(bias, 40)[:, i, j], t5.table.weight[bucket[i - j]])
    assert torch.equal(bias, t5.score_bias(40, 1))


@pytest.mark.parametrize("form", ["log", "power"])
def test_kerple_is_the_papers_kernel(form):
    kerple = build("kerple", form=form)
    with torch.no_grad():
        kerple.log_r1_H.copy_(torch.tensor([0.3, 1.7]).log())
        kerple.raw_r2_H.copy_(torch.tensor([0.4, 0.9]).log() if form == "log" else torch.tensor([0.2, 0.45]).logit())
    bias = square(kerple.score_bias(12, 0).detach(), 12)
    for h, (r1, r2) in enumerate(((0.3, 0.4), (1.7, 0.9))):
        for n in (0, 1, 5, 11):
            expected = -r1 * math.log(1 + r2 * n) if form == "log" else -r1 * n**r2
            assert float(bias[h, 11, 11 - n]) == pytest.approx(expected, rel=1e-5)


def test_kerple_starts_in_the_range_that_the_authors_draw_from():
    log, power = (build("kerple", replace(GEOMETRY, n_heads=4), form=form) for form in ("log", "power"))
    assert log.log_r1_H.exp().tolist() == pytest.approx([0.25, 0.75, 1.25, 1.75])
    assert power.log_r1_H.exp().tolist() == pytest.approx([0.125, 0.375, 0.625, 0.875])
    assert (2 * power.raw_r2_H.sigmoid()).tolist() == pytest.approx([1.0] * 4)  # a line, as ALiBi's
    assert log.raw_r2_H.exp().tolist() == pytest.approx([0.5] * 4)


@pytest.mark.parametrize("threshold", [512.0, 5.0])
def test_fire_is_the_papers_function_of_the_normed_distance(threshold):
    fire = build("fire", threshold=threshold)
    distance = (torch.arange(12)[:, None] - torch.arange(12)).clamp(min=0)
    longest = torch.arange(12).clamp(min=threshold)[:, None]
    share = (0.1 * distance + 1).log() / (0.1 * longest + 1).log()
    for layer, function in enumerate(fire.functions):
        hidden = F.relu(F.linear(share[..., None], function.hidden.weight, function.hidden.bias))
        expected = F.linear(hidden, function.out.weight).movedim(-1, 0)
        torch.testing.assert_close(fire.score_bias(12, layer).tril(), expected.tril(), rtol=1e-4, atol=1e-5)


def test_transformer_xl_scores_are_the_papers_four_terms():
    position = build("transformer_xl")
    q, k, scale = vectors(seed=1), vectors(seed=2), 8**-0.5
    angle = torch.arange(12)[:, None] / 10000 ** (torch.arange(0, 16, 2) / 16)
    wave = torch.cat((angle.sin(), angle.cos()), 1)
    distance = (torch.arange(12)[:, None] - torch.arange(12)).clamp(min=0)
    for layer in range(2):
        turned_q, turned_k = position.rotate(q, k, layer)
        score = scale * turned_q @ turned_k.mT + position.query_bias(q, layer, scale)
        places = (wave @ position.key[layer].weight.T)[distance].unflatten(-1, (2, 8))  # (query, key, head, channel)
        u, v = position.u.weight[:, None], position.v.weight[:, None]
        to_place = torch.einsum("bhic,ijhc->bhij", q + v, places)
        expected = scale * ((q + u) @ k.mT + to_place)
        torch.testing.assert_close(score.tril(), expected.tril(), rtol=1e-4, atol=1e-4)

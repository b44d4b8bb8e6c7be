import itertools
import math

import numpy as np
import pytest
import torch
from options import EVERY_OPTION, option_pairs
from tensors import draw
from torch.nn import functional as F

from nexus_ablate import errors
from nexus_ablate.cli import main
from nexus_ablate.config.compose import compose
from nexus_ablate.config.evaluations import evaluation_name, evaluation_of
from nexus_ablate.config.options import default_option, option_files
from nexus_ablate.data import TokenizedData, eval_places
from nexus_ablate.data.corpus import StdlibCorpus
from nexus_ablate.data.tokenizer import CharTokenizer
from nexus_ablate.errors import ConfigError
from nexus_ablate.measure.evaluation import EVALUATION, NotDefined, Subject
from nexus_ablate.measure.evaluation.extrapolation import by_position
from nexus_ablate.measure.evaluation.intervention import massive_set, massive_threshold, sink_set
from nexus_ablate.measure.evaluation.quantization import (
    SCALES,
    SCHEMES,
    calibrate,
    linear_maps,
    quantized,
    round_asymmetric,
    round_symmetric,
)
from nexus_ablate.measure.evaluation.streaming import streamed
from nexus_ablate.model import build_model
from nexus_ablate.runs import read_run
from nexus_ablate.training.evaluation import evaluate
from nexus_ablate.training.session import train
from nexus_ablate.training.start import initial_model

EVALUATIONS = {name: EVALUATION.build(default_option("evaluation", name)) for name in option_files("evaluation")}
extrapolation, streaming = EVALUATIONS["extrapolation"], EVALUATIONS["streaming"]
quantization, intervention = EVALUATIONS["quantization"], EVALUATIONS["intervention"]
TEXT = np.random.default_rng(0).integers(0, 11, 400)


def subject(config, model=None, val=TEXT, eval_tokens=64):
    model = build_model(config, 11).eval() if model is None else model
    data = TokenizedData("text", "", TEXT, {"val": val}, CharTokenizer("abcdefghijk"), 1.0, StdlibCorpus())
    return Subject(model, data, context=8, eval_tokens=eval_tokens)


def spread(model, factor=3.0):
    """Larger weights, so that attention is far from uniform and a mistake in it shows."""
    with torch.no_grad():
        for block in model.blocks:
            for parameter in block.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(factor)
    return model


# --------------------------------------------------------------------------------------------------- extrapolation


def test_at_1x_it_is_the_validation_loss_under_the_same_protocol(tiny_run):
    out = train(compose(tiny_run("train.steps=3", "train.eval_tokens=60")), quiet=True)
    summary = evaluate(out.path, ["extrapolation"])
    assert summary["extrapolation"]["non_overlapping"]["1"] == pytest.approx(summary["val_loss"], rel=1e-6)
    extrapolation = summary["extrapolation"]
    assert set(extrapolation["sliding"]) == {"1", "2", "4", "8"}
    for way in ("sliding", "non_overlapping"):
        losses, gaps = extrapolation[way], extrapolation[f"{way}_gap"]
        assert gaps == {factor: losses[factor] - losses["1"] for factor in ("2", "4", "8")}


def test_longer_windows_begin_where_the_validation_windows_do(tiny):
    made = subject(tiny())
    actual, (starts, _) = extrapolation(made)["non_overlapping"], eval_places(len(TEXT), 8, 64)
    for factor in (1, 2, 4):
        windows = np.stack([TEXT[start : start + 8 * factor + 1] for start in starts if start + 8 * factor < len(TEXT)])
        logits, targets = made.model(torch.from_numpy(windows[:, :-1])), torch.from_numpy(windows[:, 1:])
        expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
        assert len(windows) == 8 - (factor > 1) and actual[str(factor)] == pytest.approx(expected, rel=1e-5)


def test_sliding_predicts_the_same_targets_at_every_length_with_nearly_all_of_it_before_them(tiny):
    made = subject(tiny())
    losses = extrapolation(made)["sliding"]
    pairs = (0, 44, 92, 140, 184, 232, 280, 328)  # eight blocks of two windows of four targets, to the end of the text
    targets = [64 + pair + i for pair in pairs for i in range(8)]  # after the longest window
    assert len(TEXT) == targets[-1] + 1
    for factor in (1, 2, 4, 8):
        length, nats = 8 * factor, []
        for index in targets:
            end = 64 + 4 * ((index - 64) // 4) + 3  # the last of the four targets of its window
            window = torch.from_numpy(TEXT[end - length : end])[None]
            place = length - 1 - (end - index)
            assert length - 4 <= place < length
            nats.append(F.cross_entropy(made.model(window)[0, place], torch.tensor(TEXT[index])).item())
        assert losses[str(factor)] == pytest.approx(np.mean(nats), rel=1e-5)


def test_the_loss_by_position_is_in_powers_of_two_and_leaves_no_position_out():
    losses = torch.arange(1.0, 9.0).repeat(2, 1)
    counted = torch.ones_like(losses, dtype=torch.bool)
    assert by_position(losses, counted) == {"1": 1.0, "2": 2.0, "3-4": 3.5, "5-8": 6.5}
    assert by_position(losses[:, :6], counted[:, :6])["5-6"] == 5.5
    few = torch.zeros_like(counted)
    few[0, 2], few[1, 4:6] = True, True
    assert by_position(losses, few) == {"3-4": 3.0, "5-8": 5.5}, "of the targets that count"


def test_windows_longer_than_a_batch_are_read_one_by_one(tiny, monkeypatch):
    made = subject(tiny())
    windows = np.stack([TEXT[:21], TEXT[40:61], TEXT[80:101]])
    together = made.losses(windows)
    monkeypatch.setattr("nexus_ablate.measure.evaluation.subject._BATCH_TOKENS", 8)
    assert torch.allclose(made.losses(windows), together, atol=1e-6)


def test_massive_activations_cannot_be_set_where_the_stream_is_a_sum_of_several(tiny):
    with pytest.raises(NotDefined, match="the sum of several"):
        intervention(subject(tiny("placement=hyper")))


def test_a_table_of_positions_is_not_defined_beyond_itself(tiny):
    losses = extrapolation(subject(tiny("position=learned")))
    assert set(losses["non_overlapping"]) == set(losses["sliding"]) == {"1"}
    assert losses["not_defined"].keys() == {"2", "4", "8"}
    assert "table of 8 positions, but 16 are needed" in losses["not_defined"]["2"]


def test_a_text_that_is_too_short_is_said_to_be():
    config = compose(["model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.context=8"])
    losses = extrapolation(subject(config, val=TEXT[:30]))
    assert set(losses["non_overlapping"]) == {"1", "2"}
    assert "30 tokens, but 33 are needed" in losses["not_defined"]["4"]


# ------------------------------------------------------------------------------------------------------- streaming


@torch.no_grad()
def read_with_a_cache(model, tokens_T, window, kept):
    """Logits (T, V) of a reader whose cache holds the first `kept` tokens and the last ones, `window` in all.

    Each query attends to what its cache holds, placed as if these were the whole text.
    """
    front = int(model.sink is not None)

    def with_cache(attn):
        def forward(x_BTD, context):
            q, k, v = (m(x_BTD).unflatten(-1, (-1, attn.head_dim)) for m in (attn.query, attn.key, attn.value))
            q, k, v = (q, k, v) if attn.qk_norm.after_rotation else attn.qk_norm(q, k, v)
            q, k, v = (
                attn.gate(site, y, x_BTD).transpose(1, 2)
                for site, y in zip(("query", "key", "value"), (q, k, v), strict=True)
            )
            outputs = []
            for t in range(x_BTD.shape[1]):
                held = [i for i in range(t + 1) if i < front + kept or i > t - (window - kept)]
                placed = q[:, :, held], k[:, :, held], None
                if len(held) > front:  # a sink token alone has no position
                    placed = attn.core.place(*placed[:2], context.positions[attn.layer])
                keys = attn._keys(placed[1], attn.learned_key_Gd)
                values = attn._keys(v[:, :, held], attn.learned_value_Gd)
                outputs.append((attn.core.weights(placed[0], keys, placed[2]) @ values)[:, :, -1])
            out = attn.gate("sdpa", torch.stack(outputs, 1), x_BTD)
            return attn.gate("output", attn.out(attn.inner_norm(out.flatten(2))), x_BTD)

        return forward

    for block in model.blocks:
        block.attn.forward = with_cache(block.attn)
    logits = model(tokens_T[None])[0]
    for block in model.blocks:
        del block.attn.forward
    return logits


STREAMED = [
    (),
    ("position=none",),
    ("position=alibi",),
    ("position=t5", "position.buckets=4", "position.max_distance=6"),
    ("position=kerple",),
    ("position=fire",),
    ("position=transformer_xl",),
    ("position=irope", "nope_every=2", "position.floor_scale=3"),
    ("position=alibi", "nope_every=2"),
    ("qk_norm=rms", "qk_norm.after_rotation=on", "sink_token=on"),
    ("normalizer=softmax1", "qk_norm=rms"),
    ("normalizer=sigmoid", "placement=dual"),
    ("normalizer=sink", "gate=elementwise"),
    ("kv_bias=key_value", "n_kv_heads=1"),
    ("sink_token=on", "position=alibi"),
    ("window=3",),
    ("window=[3,0]", "sink_token=on", "kv_bias=key"),
    ("attention=additive", "position=alibi", "attn_softcap=5"),
    ("placement=hybridnorm", "gate=headwise", "gate.site=value"),
]


@pytest.mark.parametrize("kept", [0, 2])
@pytest.mark.parametrize("overrides", STREAMED, ids=str)
def test_one_pass_reads_as_a_cache_would(tiny, overrides, kept):
    model = spread(build_model(tiny(*overrides), 11)).eval()
    tokens = torch.from_numpy(TEXT[:20])
    expected = read_with_a_cache(model, tokens, window=6, kept=kept)
    with streamed(model, 6, kept), torch.no_grad():
        seen = model(tokens[None])[0]
    torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        ordinary = model(tokens[None])[0]
    torch.testing.assert_close(seen[:6], ordinary[:6], rtol=1e-4, atol=1e-4)
    if overrides != ("window=3",):
        assert not torch.allclose(seen[6:], ordinary[6:], atol=1e-3)  # the control: eviction changes what is read


def test_values_that_are_wider_than_queries_stream_as_passes_over_the_last_window(tiny):
    """In one layer, whose keys and values have seen nothing but their own token."""
    model = spread(build_model(tiny("mixer=differential", "model.n_layers=1"), 11)).eval()
    tokens = torch.from_numpy(TEXT[:20])
    with torch.no_grad():
        with streamed(model, 6, 0):
            seen = model(tokens[None])[0]
        for end in range(6, 21):
            torch.testing.assert_close(seen[end - 1], model(tokens[None, end - 6 : end])[0, -1], rtol=1e-4, atol=1e-4)


def test_streaming_reports_both_losses_behind_the_filled_cache(tiny):
    made = subject(tiny(), model=spread(build_model(tiny(), 11)).eval())
    result = streaming(made)
    assert result["difference"] == pytest.approx(result["loss_dropped"] - result["loss_kept"])
    nats = []
    for start in (0, 64, 192, 320):  # four of the six texts that the validation text holds, the first and the last
        tokens = torch.from_numpy(TEXT[start : start + 65])
        logits = read_with_a_cache(made.model, tokens[:-1], window=8, kept=4)
        nats.append(F.cross_entropy(logits[8:], tokens[9:], reduction="none"))
    assert result["loss_kept"] == pytest.approx(torch.stack(nats).mean().item(), rel=1e-4)


@pytest.mark.parametrize("position", ["learned", "sinusoidal"])
def test_positions_on_the_embedding_cannot_stream(tiny, position):
    with pytest.raises(NotDefined, match="part of the embedding"):
        streaming(subject(tiny(f"position={position}")))


# ---------------------------------------------------------------------------------------------------- quantization


@pytest.mark.parametrize(("bits", "levels"), [(8, 127), (4, 7)])
def test_symmetric_rounding_is_torch_s_own_with_the_scale_absmax_over_the_largest_level(bits, levels):
    x = draw(5, 7)
    expected = torch.fake_quantize_per_tensor_affine(x, x.abs().max().item() / levels, 0, -levels - 1, levels)
    torch.testing.assert_close(round_symmetric(x, bits, "tensor", 32), expected)
    scales, zeros = x.abs().amax(1) / levels, torch.zeros(5, dtype=torch.int32)
    expected = torch.fake_quantize_per_channel_affine(x, scales, zeros, 0, -levels - 1, levels)
    torch.testing.assert_close(round_symmetric(x, bits, "channel", 32), expected)
    for scale_of in SCALES:
        assert round_symmetric(torch.zeros(2, 3), bits, scale_of, 32).tolist() == torch.zeros(2, 3).tolist()


def test_experts_are_not_reported_as_robust_because_nothing_rounds_them(tiny):
    with pytest.raises(NotDefined, match="stacked weights, such as those of experts"):
        quantization(subject(tiny("ffn=moe")))


def test_groups_of_32_input_channels_have_scales_of_their_own_and_the_last_may_be_shorter():
    x = draw(2, 5, 70)
    result = round_symmetric(x, 4, "group", 32)
    for start in (0, 32, 64):
        part = x[..., start : start + 32]
        torch.testing.assert_close(result[..., start : start + 32], round_symmetric(part, 4, "channel", 32))
    assert len(round_symmetric(x, 4, "tensor", 32).unique()) <= 15


def test_asymmetric_rounding_is_torch_s_own_and_holds_zero():
    x = draw(50) + 1
    step = (3.0 + 0.5) / 255
    expected = torch.fake_quantize_per_tensor_affine(x, step, round(0.5 / step), 0, 255)
    torch.testing.assert_close(round_asymmetric(x, -0.5, 3.0), expected)
    assert round_asymmetric(torch.tensor([0.0, 9.0]), 0.2, 3.0).tolist() == pytest.approx([0.0, 3.0])
    assert round_asymmetric(torch.zeros(2), 0.0, 0.0).tolist() == [0.0, 0.0]


def test_a_block_computes_with_rounded_weights_and_inputs_while_it_is_quantized_and_is_itself_afterwards(tiny):
    made = subject(tiny())
    m = made.model.blocks[0].ffn
    maps = linear_maps(m)
    ranges = calibrate(made, 16)
    x = draw(2, 3, 16)
    before, weights = m(x, None), [a.weight.clone() for a in maps]
    for name, scheme in SCHEMES.items():
        first = maps[0]
        with quantized(maps, scheme, ranges, 32):
            inside = first(x)
            assert not torch.equal(m(x, None), before)
        entered = (
            round_asymmetric(x, *ranges[first])
            if scheme.static
            else round_symmetric(x, scheme.bits, scheme.scale_of, 32)
        )
        entered = x if scheme.weights_only else entered
        expected = entered @ round_symmetric(first.weight, scheme.bits, scheme.scale_of, 32).T
        torch.testing.assert_close(inside, expected, msg=name)
        assert torch.equal(m(x, None), before)
        assert all(torch.equal(a.weight, w) for a, w in zip(maps, weights, strict=True))


def test_calibration_is_a_running_minimum_and_maximum_over_sequences(tiny):
    made = subject(tiny())
    first = made.model.blocks[0].attn.query
    seen = []
    handle = first.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].aminmax()))
    ranges = calibrate(made, 16)
    handle.remove()
    assert len(seen) == 16
    low, high = seen[0]
    for a, b in seen[1:]:
        low, high = 0.9 * low + 0.1 * a, 0.9 * high + 0.1 * b
    assert ranges[first] == pytest.approx((low.item(), high.item()), rel=1e-5)


def test_the_gap_of_a_block_is_that_of_rounding_it_alone(tiny):
    made = subject(tiny())
    spread(made.model)
    result, gaps = quantization(made), []
    for block in made.model.blocks:
        with quantized(linear_maps(block), SCHEMES["dynamic_tensor"], {}, 32):
            gaps.append(made.loss(made.windows(10**6)) - result["loss"])
    assert result["gap_by_block"] == pytest.approx(gaps) and gaps[0] != gaps[1]
    assert result["worst_block"] == gaps.index(max(gaps))


# ---------------------------------------------------------------------------------------------------- intervention


def planted(config, size=5000.0):
    """A model whose second block puts `size` into channel 3 of every token 10."""
    model = build_model(config, 11).eval()
    state = {}

    def read(module, inputs):
        state["tokens"] = inputs[0]

    def plant(module, inputs, output):
        return output + size * F.one_hot(torch.tensor(3), 16) * (state["tokens"] == 10)[..., None]

    model.register_forward_pre_hook(read)
    model.blocks[1].register_forward_hook(plant)
    return model


def test_massive_activations_that_were_planted_are_found_and_removed(tiny):
    config = tiny()
    made = subject(config, model=planted(config))
    result = intervention(made)
    calibration = made.calibration(32)
    assert (result["threshold"], result["massive"]) == (1000.0, True)
    assert result["entries_per_sequence"] == pytest.approx((calibration == 10).sum() / 32)
    assert result["before"]["act/resid/max_over_median"] > 1000
    assert result["massive_zero"]["act/resid/max_over_median"] < 100
    assert result["massive_mean"]["act/resid/max_over_median"] > 1000
    assert result["massive_zero"]["gap"] == result["massive_zero"]["loss"] - result["before"]["loss"] != 0
    assert abs(result["massive_mean"]["loss"] - result["before"]["loss"]) < abs(
        result["massive_zero"]["loss"] - result["before"]["loss"]
    )


def test_without_massive_activations_the_largest_thousandth_is_removed(tiny):
    config = tiny()
    made = subject(config)
    tokens = made.on_device(made.calibration(4))
    threshold = massive_threshold(made.model, tokens)
    assert 1 < threshold < 1000
    result = intervention(subject(config))
    assert not result["massive"]
    assert 0 < result["entries_per_sequence"] <= 2


def test_massive_entries_become_zero_and_nothing_else_changes(tiny):
    model = planted(tiny())
    tokens = torch.from_numpy(TEXT[None, :8].copy())
    tokens[0, 4] = 10
    streams = []
    with massive_set(model, 1000.0, None):
        model.blocks[1].register_forward_hook(lambda module, inputs, output: streams.append(output.clone()))
        model(tokens)
    model(tokens)
    changed = streams[0] != streams[1]
    assert changed.nonzero().tolist() == [[0, int(t), 3] for t in (tokens[0] == 10).nonzero()[:, 0]]
    assert (streams[0][changed] == 0).all()


def test_attention_to_the_first_token_takes_the_requested_share_and_the_first_query_keeps_its_only_key(tiny):
    model = spread(build_model(tiny("position=none"), 11)).eval()
    core = model.blocks[0].attn.core
    q, k, v = (draw(2, 2, 8, 8, seed=s) for s in range(3))
    with torch.no_grad():
        weight = core.weights(q, k, None)
        with sink_set(model, lambda block, sink: torch.zeros_like(sink)):
            removed = core(q, k, v, None)
        with sink_set(model, lambda block, sink: sink):
            kept = core(q, k, v, None)
        with sink_set(model, None):
            renormalized = core(q, k, v, None)
    without = weight.clone()
    without[:, :, 1:, 0] = 0
    torch.testing.assert_close(removed, without @ v)
    torch.testing.assert_close(kept, weight @ v)
    torch.testing.assert_close(renormalized, F.normalize(without, p=1.0, dim=-1) @ v)
    torch.testing.assert_close(core(q, k, v, None), weight @ v)  # the fused path is back


def test_an_intervention_leaves_the_model_as_it_was(tiny):
    made = subject(tiny("norm=batch"))
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    for evaluation in (extrapolation, streaming, quantization, intervention):
        evaluation(made)
    assert all(torch.equal(before[name], value) for name, value in made.model.state_dict().items())
    for module in made.model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert "forward" not in vars(module) and "place" not in vars(module)


# ------------------------------------------------------------------------------------------------- in every option


def finite(value):
    if isinstance(value, dict):
        return all(finite(v) for v in value.values())
    if isinstance(value, list):
        return all(finite(v) for v in value)
    return not isinstance(value, float) or math.isfinite(value)


def answers(config):
    made = subject(config)
    for name, evaluation in EVALUATIONS.items():
        try:
            result = evaluation(made)
        except NotDefined as reason:
            assert str(reason) and "\n" not in str(reason)
            continue
        assert finite(result), (name, result)


def settled(tiny, overrides):
    """The configuration, or nothing where the options refuse each other."""
    try:
        return tiny(*overrides)
    except ConfigError:
        return None


@pytest.mark.parametrize("overrides", [tuple(o.split()) for o in EVERY_OPTION[::10]], ids=str)
def test_every_evaluation_answers_or_says_why_not(tiny, overrides):
    if config := settled(tiny, overrides):
        answers(config)


@pytest.mark.slow
@pytest.mark.long
def test_every_evaluation_answers_or_says_why_not_in_every_pair_of_options(tiny):
    done = 0
    for row in itertools.chain([tuple(o.split()) for o in EVERY_OPTION], option_pairs()):
        if config := settled(tiny, row):
            answers(config)
            done += 1
    assert done > 100


# ----------------------------------------------------------------------------------------------- runs and the verb


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("streaming", "streaming"),
        ("streaming:kept=4", "streaming"),
        ("streaming:texts:2:kept:8", "streaming:kept:8:texts:2"),
        ("extrapolation:factors:1+16", "extrapolation:factors:1+16"),
        ("minimal_pairs:file:@a+b.jsonl", "minimal_pairs:file:@a+b.jsonl"),
    ],
)
def test_the_name_of_a_result_has_the_keys_that_are_not_at_their_defaults(text, name):
    assert evaluation_name(evaluation_of(text)) == name
    assert evaluation_of(name) == evaluation_of(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("streaming:keep:8", "streaming:kept:8"),
        ("streaming:kept:0", "try: streaming:kept:4"),
        ("streaming:kept", "try: streaming:kept:4"),
        ("'streaming:kept:8+16'", "try: streaming:kept:4"),
        ("'streaming:kept:['", "try: streaming:kept:4"),
        ("extrapolation:factors:2+x", r"try: extrapolation:factors:1\+2\+4\+8"),
        ("streeming", "no evaluation of this name"),
    ],
)
def test_a_wrong_name_or_key_of_an_evaluation_is_refused_before_anything_is_trained(text, words):
    with pytest.raises(ConfigError, match=words):
        compose([f"evals=[{text}]"])


def test_results_with_other_keys_stand_beside_those_with_the_defaults(tiny_run, capsys):
    wanted = "evals=[quantization,quantization:group:4]"
    path = train(compose(tiny_run("train.steps=2", wanted)), quiet=True).path
    assert main(["evaluate", str(path), "--evals", "extrapolation:factors:1+2"]) == 0
    summary = read_run(path).summary or {}
    four, usual = summary["quantization:group:4"]["schemes"], summary["quantization"]["schemes"]
    assert four["int4_tensor"] == usual["int4_tensor"] and four["int4_group"] != usual["int4_group"]
    assert set(summary["extrapolation:factors:1+2"]["non_overlapping"]) == {"1", "2"}
    assert "extrapolation" not in summary
    assert main(["show", str(path)]) == 0
    tables = capsys.readouterr().out.partition("\nquantization:group:4 ")[2]
    assert f"schemes int4_group {four['int4_group']['loss']:.4f}" in " ".join(tables.split())


@pytest.fixture
def finished(finished_run):
    return finished_run("train.steps=2")


def test_evaluate_writes_each_answer_under_its_name_and_does_none_twice(finished, capsys, monkeypatch):
    before = read_run(finished).summary
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["evaluate", str(finished), "--evals", "quantization,streaming"]) == 0
    summary = read_run(finished).summary
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["quantization", "loss", "worst_block", "gap"] in rows
    int4 = summary["quantization"]["schemes"]["int4_channel"]
    assert ["schemes", "int4_channel", f"{int4['loss']:.4f}", f"{int4['gap']:.4f}"] in rows, (
        "no name without its number"
    )
    assert before is not None and summary is not None
    assert summary.keys() - before.keys() == {"quantization", "streaming"}
    assert {name: summary[name] for name in before} == before
    monkeypatch.setattr(EVALUATION, "build", lambda option: pytest.fail("done a second time"))
    assert main(["evaluate", str(finished), "--evals", "quantization"]) == 0


def test_a_run_is_evaluated_on_its_own_device_and_elsewhere_if_this_machine_has_none(finished, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # `auto` would choose the GPU
    assert set(evaluate(finished, ["quantization"])["quantization"]["schemes"])
    config = finished / "config.yaml"
    config.write_text(config.read_text().replace("device: cpu", "device: cuda:7"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "loss_kept" in evaluate(finished, ["streaming"])["streaming"]


def test_a_finished_run_asked_for_again_with_evaluations_gets_them_from_its_checkpoint(tiny_run, finished):
    again = train(compose(tiny_run("train.steps=2", "evals=[extrapolation]")), quiet=True)
    assert again.path == finished
    assert again.already_finished
    assert "1" in again.summary["extrapolation"]["non_overlapping"]
    assert read_run(finished).summary == again.summary


def test_a_run_whose_text_has_changed_is_not_evaluated(tiny_run, text_file):
    finished = train(compose(tiny_run("train.steps=2")), quiet=True).path
    with text_file.open("a", encoding="utf-8") as file:
        file.write("something else altogether. " * 100)
    with pytest.raises(ConfigError, match="not the one that this run was validated on"):
        evaluate(finished, ["quantization"])


def test_weights_are_not_trained_on_with_the_tokens_of_another_tokenizer(tiny_run, capsys):
    path = train(compose(tiny_run("train.steps=2", "position.theta=500")), quiet=True).path
    start = tiny_run("train.steps=3", "init=checkpoint", f'init.run="{path}"')
    assert main([*start, "data.tokenizer=char", "vocab_size=256"]) == errors.CONFIG
    assert "read the tokens of another tokenizer" in capsys.readouterr().err
    assert main(start) == errors.OK
    said = " ".join("".join(capsys.readouterr()).split())
    assert said.count("were trained with another position.theta than 10000") == 1, said


def test_weights_to_start_from_are_constrained_before_they_are_measured(tiny_run):
    path = train(compose(tiny_run("train.steps=2")), quiet=True).path
    model = initial_model(compose(tiny_run("init=checkpoint", f'init.run="{path}"', "param=ngpt")), 256)
    torch.testing.assert_close(model.embedding.weight.norm(dim=-1), torch.ones(256))


def test_a_run_that_is_not_finished_is_not_evaluated_and_the_others_have_their_turn(finished, capsys):
    other = finished.parent / "s9-00000000"
    other.mkdir()
    status = (finished / "status.json").read_text().replace('"finished"', '"failed"')
    (other / "status.json").write_text(status)
    assert main(["evaluate", str(finished.parent), "--evals", "quantization"]) == 2
    printed = capsys.readouterr()
    assert "only a finished run" in printed.err
    assert "dynamic_tensor" in printed.out

"""Evaluation text is a sample: windows over all of it, their losses kept, their error beside the one over seeds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from faults.bench import only
from written_runs import Writer

from nexus_ablate.cli import main
from nexus_ablate.comparison.compare import compare
from nexus_ablate.comparison.read import read_windows
from nexus_ablate.comparison.statistics import FEWEST_BLOCKS
from nexus_ablate.config.compose import compose
from nexus_ablate.data import batches, corpus, eval_places, hash_tokens, prepare
from nexus_ablate.errors import UserError
from nexus_ablate.model import build_model
from nexus_ablate.plain_data import strict_loads
from nexus_ablate.runs import read_run
from nexus_ablate.training import trainer
from nexus_ablate.training.step import Step

BASE = [2.00, 2.02, 1.98, 2.01, 1.99]
HIGHER = [2.11, 2.12, 2.09, 2.11, 2.08]
UNEVEN = (0.05, -0.05)  # what two halves of the text add to a difference


def rows_of(path: Path) -> list[dict]:
    """evaluation.jsonl of a run, each row as strict JSON."""
    return [strict_loads(line) for line in (path / "evaluation.jsonl").read_text().splitlines()]


# ------------------------------------------------------------------------------------- a run and its evaluation.jsonl


def assert_spread(path: Path, overrides: list[str]) -> None:
    """The windows of a run reach from its first validation token into the last context of its validation text."""
    config = compose(overrides)
    data, context = prepare(config.data, context=config.model.context), config.model.context
    rows, length = rows_of(path), len(data.val["val"])
    assert rows[0]["offset"] == 0 and length - (rows[-1]["offset"] + context) <= max(context, data.period)
    starts = np.array([row["offset"] for row in rows])
    eighths = np.unique(starts * 8 // length)
    assert eighths.tolist() == list(range(8)), "each eighth of the text has windows"
    assert {row["tokens"] for row in rows} == {context}
    assert hash_tokens(data.val["val"][starts[:, None] + np.arange(context + 1)]) == read_run(path).summary["eval_hash"]


def hub_folder(text: str, folder: Path, monkeypatch) -> list[str]:
    """Overrides of a hub data set that lies in a folder."""
    import datasets.config
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder.parent / "hf")

    folder.mkdir()
    for split, part in (("train", text[:-2000]), ("validation", text[-2000:])):
        pq.write_table(pa.table({"text": part.split("\n")}), folder / f"{split}.parquet")
    return ["data=hub", f"data.path={folder}", "data.val_split=validation", "data.streaming=off"]


@pytest.mark.parametrize("option", ["files", "char", "bigram_backcopy", "stdlib", "hub"])
def test_the_windows_of_a_run_reach_the_end_of_its_validation_text(option, tiny_run, tmp_path, text_file, monkeypatch):
    monkeypatch.setattr(corpus.StdlibCorpus, "_paths", corpus.StdlibCorpus()._paths[::12])
    data = {
        "files": [],
        "char": ["data.tokenizer=char"],
        "bigram_backcopy": ["data=bigram_backcopy", "data.length=10", "data.sequences=256"],
        "stdlib": ["data=stdlib"],
        "hub": hub_folder(text_file.read_text(), tmp_path / "hub", monkeypatch) if option == "hub" else [],
    }[option]
    kept = tiny_run("train.steps=2", "train.eval_every=2", "probe=off")
    overrides = [o for o in kept if not (o.startswith("data") and any(d.startswith("data=") for d in data))] + data
    assert main(overrides) == 0
    path = only(tmp_path / "runs")
    assert_spread(path, overrides)
    summary = read_run(path).summary
    assert np.mean([row["loss"] for row in rows_of(path)]) == pytest.approx(summary["val_loss"], rel=1e-12)
    assert ("prose/loss" in summary) == (option == "stdlib")  # the rows are of the first validation set


def test_control_windows_of_the_head_of_the_text_are_seen(tiny_run, tmp_path, monkeypatch):
    def head(length, context, n_tokens, period=1):
        starts, block = eval_places(length, context, n_tokens, period)
        return np.arange(len(starts)) * context, block

    for place in (batches, trainer):
        monkeypatch.setattr(place, "eval_places", head)
    assert main(tiny_run("train.steps=2")) == 0
    with pytest.raises(AssertionError):
        assert_spread(only(tmp_path / "runs"), tiny_run())


def test_each_row_is_the_loss_of_the_trained_model_on_that_window(tiny_run, tmp_path):
    from nexus_ablate.training.evaluation import restore

    assert main(tiny_run("train.eval_tokens=300")) == 0
    path = only(tmp_path / "runs")
    rows = rows_of(path)
    assert list(rows[0]) == ["block", "offset", "tokens", "loss"]
    assert [row["block"] for row in rows] == sorted(row["block"] for row in rows) and rows[-1]["block"] == 7
    _, data, model = restore(read_run(path))
    with torch.no_grad():
        for row in rows:
            window = torch.from_numpy(data.val["val"][row["offset"] :][: row["tokens"] + 1].astype(np.int64))
            loss = torch.nn.functional.cross_entropy(model(window[None, :-1])[0], window[1:]).item()
            assert row["loss"] == pytest.approx(loss, rel=1e-5)


def test_a_whole_validation_set_is_covered_without_a_gap(tiny_run, tmp_path):
    assert main(tiny_run("train.steps=2", "train.eval_tokens=1000000")) == 0
    windows = read_windows(only(tmp_path / "runs") / "evaluation.jsonl")
    assert windows is not None and windows.tokens == 8 * 112  # of 900 tokens
    assert set(np.diff(windows.places[:, 1])) <= {8, 9}, "windows that leave out a token at most"
    assert np.bincount(windows.places[:, 0]).tolist() == [14] * 8


def test_evaluation_batches_have_one_shape_whatever_the_validation_set(tiny_run, monkeypatch):
    monkeypatch.setattr(corpus.StdlibCorpus, "_paths", corpus.StdlibCorpus()._paths[::12])
    monkeypatch.setattr(trainer, "EVAL_TOKENS", 80)
    shapes, losses = set(), Step.window_losses

    def watched(self, rows):
        shapes.add(rows.shape)
        return losses(self, rows)

    monkeypatch.setattr(Step, "window_losses", watched)
    kept = [o for o in tiny_run("train.steps=2", "train.eval_tokens=170") if not o.startswith("data")]
    assert main([*kept, "data=stdlib"]) == 0
    assert shapes == {(8, 9)}  # 22 windows of at most 10 at a time: 8, 8, and 6 with two that are not counted


@pytest.mark.parametrize("overrides", [["train.loss=whole"], ["train.loss=chunked"], ["norm=batch"]])
def test_losses_by_window_are_the_parts_of_the_loss_whichever_way_it_is_formed(tiny, monkeypatch, overrides):
    monkeypatch.setattr("nexus_ablate.kernels.loss.LOGIT_BYTES", 4 * 256 * 5)  # chunks of five rows
    config = tiny("train.batch_size=2", "z_loss=0.1", *overrides)
    tokens = np.random.default_rng(0).integers(0, 256, (6, 9))
    step = Step(config, build_model(config, 256).eval(), 3, lambda number: tokens)
    assert step.chunked == ("train.loss=chunked" in overrides)
    each = step.window_losses(tokens)
    assert each.shape == (6,) and not each.requires_grad
    with torch.no_grad():
        for number, window in enumerate(tokens):
            torch.testing.assert_close(each[number], step.loss(window[None])[0])
        torch.testing.assert_close(each.mean(), step.loss(tokens)[0])


# --------------------------------------------------------------------------------------------------- means of blocks


def test_a_block_s_mean_and_share_count_windows_by_their_tokens(tmp_path):
    path = tmp_path / "evaluation.jsonl"
    rows = [(0, 0, 2, 1.0), (0, 2, 1, 4.0), (3, 9, 1, 5.0)]
    names = ("block", "offset", "tokens", "loss")
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    windows = read_windows(path)
    assert windows is not None
    assert windows.by_block.tolist() == [2.0, 5.0] and windows.shares.tolist() == [0.75, 0.25]


# ------------------------------------------------------------------------------------------------ the fast reader


@pytest.fixture
def study(tmp_path):
    """A baseline and a worse arm, five seeds each, that differ alike on all text."""
    writer = Writer(tmp_path / "runs")
    writer.arm(losses=BASE)
    writer.arm("norm=layer", losses=HIGHER)
    return writer


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"block": 0, "offset": 8, "tokens": 8}', "line 2"),
        ('{"block": 0, "offset": 8, "tokens": 8, "loss": NaN}', "line 2"),
        ('{"block": 0, "offset": 8, "tokens": 8, "loss": 1e999}', "line 2"),
        ('{"block": 0, "offset": 8, "tokens": 8, "loss": true}', "line 2"),
        ('{"block": 0, "offset": -8, "tokens": 8, "loss": 1.0}', "line 2"),
        ('{"block": 0, "offset": 8.5, "tokens": 8, "loss": 1.0}', "line 2"),
        ('{"block": 0, "offset": 99999999999999999999, "tokens": 8, "loss": 1.0}', "line 2"),
        ("[" * 50_000, "line 2"),
        ("[]", "line 2"),
        ("", "line 2"),
        ('{"block": 0, "offset": 0, "tokens": 8, "loss": 1.0}', "not in order"),
        ('{"block": 0, "offset": 8, "tokens": 0, "loss": 1.0}', "not in order"),
        ('{"block": 9, "offset": 8, "tokens": 8, "loss": 1.0}', "not in order"),
    ],
)
def test_a_damaged_row_takes_the_run_out_of_the_table_and_is_named(study, line, reason):
    path = study.paths[5] / "evaluation.jsonl"
    lines = path.read_text().split("\n")
    lines[1] = line
    path.write_text("\n".join(lines))
    with pytest.raises(UserError, match=reason):
        read_windows(path)
    (left_out,) = compare(study.root / "study").tables[0].left_out
    assert left_out.path == path.parent and "evaluation.jsonl" in left_out.reason


def test_an_empty_file_is_damaged(study):
    path = study.paths[5] / "evaluation.jsonl"
    path.write_text("")
    with pytest.raises(UserError, match="damaged"):
        read_windows(path)


def test_a_loss_that_was_not_finite_is_null_and_read_as_nan(study):
    path = study.paths[0] / "evaluation.jsonl"
    lines = path.read_text().split("\n")
    lines[1] = '{"block": 0, "offset": 8, "tokens": 8, "loss": null, "nonfinite": ["loss"]}'
    path.write_text("\n".join(lines))
    windows = read_windows(path)
    assert windows is not None and np.isnan(windows.by_block).tolist() == [True, *[False] * 7]


# ----------------------------------------------------------------------------------------- two arms, held against


ENOUGH = {"windows": 64, "blocks": 32}


def uneven(writer: Writer, **options) -> None:
    writer.arm("norm=layer", losses=HIGHER, text=UNEVEN, **options)


def compared(folder: Path):
    """The worse arm's effect and word, and the condition on the text."""
    (table,) = compare(folder / "study").tables
    check = next((check for check in table.checks if check.name == "text"), None)
    return table.rows[1].effect, table.rows[1].word, check


def test_a_default_run_has_text_enough_for_its_error_to_count():
    for size in ("femto", "pico"):
        config = compose([f"model={size}"])
        windows = config.train.eval_tokens // config.model.context
        assert windows // batches.BLOCK_WINDOWS >= FEWEST_BLOCKS


def test_a_difference_that_rests_on_part_of_the_text_is_no_word(tmp_path):
    """Seeds agree to a thousandth, and half of the blocks say the opposite."""
    losses = [2.03 + seed / 1000 for seed in range(5)]
    for blocks, word in ((32, "INCONCLUSIVE"), (8, "WORSE")):
        writer = Writer(tmp_path / str(blocks))
        writer.arm(losses=[2.0, 2.002, 2.001, 2.003, 2.004], windows=64, blocks=blocks)
        writer.arm("norm=layer", losses=losses, windows=64, blocks=blocks, text=(0.5, -0.5))
        _, found, check = compared(writer.root)
        assert found == word
    assert check.status == "WARN" and "8 blocks; train.eval_tokens=4096 suffices" in check.text


def test_where_text_is_the_larger_error_more_of_it_is_asked_for(tmp_path):
    writer = Writer(tmp_path)
    writer.arm(losses=BASE, **ENOUGH)
    uneven(writer, **ENOUGH)
    _, _, check = compared(tmp_path)
    assert "more validation text than these 512 tokens" in check.text and check.status == "WARN"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"windows": 0}, "losses by window of text not recorded (seed 0)"),
        ({"windows": 24, "blocks": 24}, "other windows of text (seed 0)"),
    ],
)
def test_without_the_same_windows_the_error_is_that_over_seeds_and_the_reason_is_said(tmp_path, options, reason):
    writer = Writer(tmp_path)
    writer.arm(losses=BASE, **ENOUGH)
    writer.arm("norm=layer", losses=HIGHER, **options)
    effect, word, check = compared(tmp_path)
    assert effect.text_se is None and word == "WORSE"
    assert check.status == "WARN" and reason in check.text


def test_in_bits_per_byte_the_error_is_in_bits_per_byte_and_of_other_endpoints_there_is_none(tmp_path):
    writer = Writer(tmp_path)
    writer.arm(losses=BASE, **ENOUGH)
    uneven(writer, **ENOUGH)
    nats = compared(tmp_path)[0].text_se
    writer.plan(("norm=layer",), endpoints=["val_bpb"])
    assert compared(tmp_path)[0].text_se == pytest.approx(nats / 0.7)
    writer.plan(("norm=layer",), endpoints=["act/resid/kurtosis_token"])
    effect, _, check = compared(tmp_path)
    assert effect.text_se is None and "act/resid/kurtosis_token is not recorded by window of text" in check.text


def test_a_seed_that_diverged_is_no_pair(tmp_path):
    writer = Writer(tmp_path)
    writer.arm(losses=BASE, **ENOUGH)
    writer.run("norm=layer", seed=0, state="diverged", steps=100, windows=0)
    for seed in range(1, 5):
        writer.run("norm=layer", seed=seed, loss=HIGHER[seed], **ENOUGH)
    effect, _, check = compared(tmp_path)
    assert effect.n == 4 and check.status == "PASS"

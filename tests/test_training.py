import functools
import json
import math
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from faults.bench import at_step, logged, only, result, run, weights

from nexus_ablate import errors
from nexus_ablate.cli import main
from nexus_ablate.config.compose import compose
from nexus_ablate.config.options import option_files
from nexus_ablate.data import Batches, prepare
from nexus_ablate.errors import Diverged
from nexus_ablate.kernels.loss import losses
from nexus_ablate.model import build_model
from nexus_ablate.runs import find_runs, read_jsonl, read_run
from nexus_ablate.track import mirror
from nexus_ablate.training import session
from nexus_ablate.training.session import train
from nexus_ablate.training.signals import StopRequest
from nexus_ablate.training.step import Step
from nexus_ablate.training.trainer import Trainer

CONTRACT = """val_loss val_bpb best_val_loss params params_non_embedding flops_per_token tokens seconds
tokens_per_second peak_memory_bytes arm_hash batch_hash init_hash eval_hash""".split()
FILES = """config.yaml overrides.txt env.json status.json metrics.jsonl probes.jsonl evaluation.jsonl summary.json
log.txt checkpoints""".split()
OPTIMIZERS = sorted(option_files("optim"))


def crashing(overrides, step):
    """Let training crash before a step, between two checkpoints."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        at_step(patch, lambda number: 1 / (number != step))
        run(overrides)


def test_a_run_ends_finished_with_every_key_of_the_contract(tiny_run):
    outcome = run(tiny_run())
    record = read_run(outcome.path)
    assert record.state == "finished"
    assert not [key for key in CONTRACT if record.summary.get(key) is None]
    names = {p.name for p in outcome.path.iterdir()}
    assert names >= set(FILES)
    assert outcome.path.relative_to(outcome.path.parents[2]).parts[0] == "scratch"
    assert all(list(row)[:4] == ["step", "tokens", "flops", "seconds"] for row in record.metrics() + record.probes())
    assert math.isclose(record.summary["val_loss"], record.metrics()[-1]["val/loss"])
    assert record.summary["device"] == "cpu" and record.summary["processor"]


def test_a_run_learns(tiny_run):
    losses = [
        row["val/loss"] for row in logged(run(tiny_run("train.steps=60", "optim.lr=1e-2")).path) if "val/loss" in row
    ]
    assert losses[-1] < losses[0] - 0.5


def test_the_z_loss_is_trained_on_and_logged_beside_a_loss_that_stays_cross_entropy(tiny_run):
    with_z, without = (
        logged(run(tiny_run("train.steps=3", f"z_loss={z}", "optim.warmup=0", "init=gpt2")).path) for z in (0.5, 0)
    )
    assert with_z[1]["train/loss"] == without[1]["train/loss"]  # of the same model: the first step's
    assert with_z[0]["val/loss"] == without[0]["val/loss"]
    assert with_z[1]["grad_norm/global"] != without[1]["grad_norm/global"]
    z = [row["train/z_loss"] for row in with_z[1:]]
    assert z[-1] < z[0]
    vocabulary = 256
    assert math.isclose(z[0], 0.5 * math.log(vocabulary) ** 2, rel_tol=0.05)  # logits near 0 at the start
    assert not [row for row in without if "train/z_loss" in row]


def test_another_seed_is_another_run(tiny_run):
    first, second = run(tiny_run("train.steps=2")), run(tiny_run("train.steps=2", "seed=1"))
    assert first.summary["batch_hash"] != second.summary["batch_hash"]
    assert first.summary["init_hash"] != second.summary["init_hash"]
    assert first.summary["arm_hash"] == second.summary["arm_hash"]
    assert first.summary["eval_hash"] == second.summary["eval_hash"]


def test_all_arms_see_the_same_batches_and_validate_on_the_same_tokens(tiny_run):
    base = run(tiny_run("train.steps=4")).path
    for arm in (
        ["norm=layer", "bias=on"],
        ["placement=deepnorm"],
        ["position=alibi", "ffn=gelu"],
        ["train.grad_accum=2", "train.batch_size=2"],
    ):
        other = run(tiny_run("train.steps=4", *arm))
        assert [r.get("batch_hash") for r in logged(base)] == [r.get("batch_hash") for r in logged(other.path)], arm
        assert other.summary["eval_hash"] == read_run(base).summary["eval_hash"]


@pytest.mark.parametrize(
    ("step", "option"),
    [
        (7, "optim=adamw"),
        *(pytest.param(7, f"optim={name}", marks=pytest.mark.slow) for name in OPTIMIZERS if name != "adamw"),
        (7, "train.precision=fp16"),
        *(pytest.param(step, "optim=adamw", marks=pytest.mark.slow) for step in (0, 1, 5, 10, 19)),
        pytest.param(7, "train.compile=on", marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
def test_resume_equals_uninterrupted_bit_by_bit(tiny_run, tmp_path, monkeypatch, step, option):
    # the loss scale of float16 doubles before and after the stop
    scaler = functools.partial(torch.amp.GradScaler, growth_interval=4)
    monkeypatch.setattr("torch.amp.GradScaler", scaler)
    science = ("model.dropout=0.1", option)
    whole = run(tiny_run(*science))
    overrides = tiny_run(*science, f"runs_dir={tmp_path / 'other'}")
    crashing(overrides, step)
    resumed = run(overrides)
    assert resumed.path.name == whole.path.name
    assert result(resumed.path) == result(whole.path)


def test_gradient_accumulation_is_the_same_step(tiny_run):
    whole = logged(run(tiny_run("train.steps=5")).path)
    parts = logged(run(tiny_run("train.steps=5", "train.grad_accum=2", "train.batch_size=2")).path)
    for name in ("train/loss", "val/loss", "grad_norm/global"):
        expected = [row[name] for row in whole if name in row]
        assert [row[name] for row in parts if name in row] == pytest.approx(expected, rel=1e-4), name


def test_answers_that_are_unequally_many_in_the_parts_of_a_step_are_averaged_over_the_step(tiny_run):
    """Rows of `copy` have 2 to 8 answers."""
    task = ["data=copy", "data.length=16", "data.least=1", "data.most=8", "model.context=16", "train.steps=5"]
    plain = [word for word in tiny_run(*task) if not word.startswith("data.files") and word != "data=files"]
    whole = run(plain)
    parts = run([*plain, "train.grad_accum=4", "train.batch_size=1"])
    assert parts.summary["val_loss"] == pytest.approx(whole.summary["val_loss"], abs=1e-5)
    assert parts.summary["train_loss"] == pytest.approx(whole.summary["train_loss"], abs=1e-5)


def test_the_z_loss_is_over_the_targets_that_count_and_averaged_over_the_step_as_the_loss_is(tiny_run):
    task = ["data=copy", "data.length=16", "data.least=1", "data.most=8", "model.context=16", "z_loss=0.5"]
    words = [word for word in tiny_run(*task, "train.steps=2") if not word.startswith(("data.files", "data=files"))]
    config = compose(words)
    data = prepare(config.data, context=16)
    rows = Batches(data.train, 0, 4, 16, data.period).batch(0)
    model = build_model(config, data.vocab_size)
    _, _, figures, _ = Step(config, model, 2, lambda number: rows, answers=data.answers).loss(rows)
    with torch.no_grad():
        log_sum = model(torch.from_numpy(rows[:, :-1])).logsumexp(-1)[torch.from_numpy(data.answers(rows))]
    assert float(figures["train/z_loss"]) == pytest.approx(0.5 * float(log_sum.square().mean()))
    whole, parts = (logged(run([*words, *split]).path) for split in ([], ["train.grad_accum=4", "train.batch_size=1"]))
    for name in ("train/z_loss", "grad_norm/global"):
        assert parts[-1][name] == pytest.approx(whole[-1][name], rel=1e-5)


def test_a_z_loss_over_all_targets_is_the_plain_mean_to_the_last_bit():
    logits, targets = torch.randn(49, 7), torch.randint(7, (49,))
    assert losses(logits, targets, 0.3)[1] == 0.3 * logits.logsumexp(-1).square().mean()


def test_a_finished_run_asked_for_again_prints_its_result_and_is_not_touched(tiny_run):
    first = run(tiny_run("train.steps=2"))
    before = {p: p.stat().st_mtime_ns for p in first.path.rglob("*")}
    again = run(tiny_run("train.steps=2"))
    assert again.already_finished
    assert again.summary == read_run(first.path).summary
    assert {p: p.stat().st_mtime_ns for p in first.path.rglob("*")} == before


def test_a_finished_run_asked_for_with_another_probe_says_so_and_keeps_its_result(tiny_run, capsys):
    first = train(compose(tiny_run("train.steps=2", "probe=off")), [])
    capsys.readouterr()
    again = train(compose(tiny_run("train.steps=2", "probe=standard")), [])
    assert again.path == first.path
    assert "other probe settings" in capsys.readouterr().err


def test_rerun_trains_a_sibling_and_leaves_the_first(tiny_run):
    first = run(tiny_run())
    again = run(tiny_run("rerun=on"))
    assert again.path.name == first.path.name + "-r2"
    assert again.summary["val_loss"] == first.summary["val_loss"]


def test_a_failed_run_is_retried_when_asked_for_again(tiny_run, tmp_path):
    crashing(tiny_run(), 3)
    record = read_run(only(tmp_path / "runs"))
    assert record.state == "failed" and "ZeroDivisionError" in record.status["reason"] + record.status["traceback"]
    assert run(tiny_run()).status == errors.OK


def test_a_diverged_run_asked_for_again_says_so_and_is_not_trained(tiny_run):
    overrides = tiny_run("optim.lr=1e30", "optim.clip=off", "norm=none", "train.steps=40")
    with pytest.raises(Diverged):
        run(overrides)
    with pytest.raises(Diverged, match="rerun=on"):
        run(overrides)


def test_a_signal_that_is_ignored_stays_ignored(monkeypatch):
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.signal_name == ""
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_mirror_does_not_change_a_run(tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr(mirror, "INIT_TIMEOUT", 120)  # W&B's own process starts slowly beside other tests
    monkeypatch.setattr(session, "start_tracker", functools.partial(mirror.start_tracker, patience=240))
    plain = run(tiny_run())
    mirrored = run(
        [*(o for o in tiny_run(f"runs_dir={tmp_path / 'other'}") if o != "tracker=files"), "tracker=wandb_offline"]
    )
    assert logged(mirrored.path) == logged(plain.path)
    assert list(mirrored.path.glob("wandb/offline-run-*/*.wandb")), (mirrored.path / "log.txt").read_text()


def test_the_number_of_validations_follows_the_length_of_the_run(tiny_run):
    for steps, expected in ((176, [*range(26, 176, 26), 176]), (30, [15, 30])):
        outcome = train(compose(tiny_run(f"train.steps={steps}", "train.eval_every=auto", "probe=off")))
        rows = read_jsonl(outcome.path / "metrics.jsonl")
        assert [row["step"] for row in rows if "val/loss" in row and row["step"]] == expected
    assert [compose([]).validates_every(steps) for steps in (0, 480, 1920, 100_000)] == [1, 240, 384, 12_500]


def test_budget_in_tokens_or_flops_is_the_same_run_length(tiny_run):
    steps = lambda *o: run([x for x in tiny_run(*o) if x != "train.steps=20"]).summary  # noqa: E731
    by_tokens = steps("train.tokens=300")  # 4 x 8 tokens a step
    assert by_tokens["steps"] == 10
    by_flops = steps(f"train.flops={10 * 32 * by_tokens['flops_per_token']}")
    assert by_flops["steps"] == 10
    assert by_flops["val_loss"] == by_tokens["val_loss"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_trains_close_to_float32_with_weights_in_float32(tiny_run, precision):
    exact, low = run(tiny_run()).summary, run(tiny_run(f"train.precision={precision}"))
    assert low.summary["val_loss"] == pytest.approx(exact["val_loss"], abs=0.05)
    assert low.summary["val_loss"] != exact["val_loss"]
    assert {t.dtype for t in weights(low.path).values()} == {torch.float32}


def test_a_run_whose_standard_error_is_closed_trains(tiny_run, monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    assert main(tiny_run("train.steps=2")) == 0


def test_training_loss_is_the_mean_since_the_row_before(tiny_run, tmp_path):
    every = [row["train/loss"] for row in logged(run(tiny_run()).path) if "train/loss" in row]
    by_five = logged(run(tiny_run("train.log_every=5", f"runs_dir={tmp_path / 'other'}")).path)
    assert [r["train/loss"] for r in by_five if "train/loss" in r] == pytest.approx(
        [sum(every[i : i + 5]) / 5 for i in (0, 5, 10, 15)]
    )


def test_the_training_loss_of_the_summary_is_over_the_last_tenth_however_often_a_row_is_written(tiny_run, tmp_path):
    overrides = tiny_run("train.steps=25", "train.eval_every=25")
    losses = [row["train/loss"] for row in logged(run(overrides).path) if "train/loss" in row]
    rarely = run([*overrides, "train.log_every=25", f"runs_dir={tmp_path / 'other'}"]).summary
    assert rarely["train_loss"] == pytest.approx(sum(losses[-3:]) / 3)
    assert rarely["generalization_gap"] == rarely["val_loss"] - rarely["train_loss"]


def test_a_validation_loss_of_exactly_0_stays_the_best(tiny_run, monkeypatch):
    losses = iter((1.0, 0.0, 0.5))
    monkeypatch.setattr(Trainer, "_window_losses", lambda self, tokens: np.full(len(tokens), next(losses)))
    assert run(tiny_run()).summary["best_val_loss"] == 0


def test_init_is_recorded_parameter_by_parameter(tiny_run):
    outcome = run(tiny_run("train.steps=2"))
    recorded = json.loads((outcome.path / "init.json").read_text())
    assert set(recorded) == {n for n, t in weights(outcome.path).items() if t.ndim > 1}


def test_peak_memory_is_this_process_s_and_not_its_parent_s():
    code = "from nexus_ablate.training.memory import resident_peak_bytes; print(resident_peak_bytes())"
    held = b"x" * 2**28  # which the other process has not
    peak = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 2**20 < peak < len(held)


# ---------------------------------------------------------------- carried out otherwise than a finished run


def made_as(path, **facts):
    """Let a finished run say that it was carried out otherwise."""
    summary = path / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | facts))


@pytest.mark.parametrize(
    ("made", "asked", "said", "trains"),
    [
        ({"compiled": True}, "train.compile=off", "another train.compile (on) than requested", True),
        pytest.param(
            {"device": "cuda:0"},
            "train.device=cpu",
            "another device (cuda) than requested",
            True,
            marks=pytest.mark.slow,
        ),
        ({}, "train.threads=2", "already finished", False),
        pytest.param({"compiled": True}, "train.compile=auto", "already finished", False, marks=pytest.mark.slow),
        pytest.param({}, "train.compile=off", "already finished", False, marks=pytest.mark.slow),
    ],
)
def test_a_run_whose_numbers_would_differ_as_requested_is_trained_beside_the_finished_one(
    made, asked, said, trains, tiny_run, tmp_path, capsys
):
    base = tiny_run("train.steps=2")
    assert main(base) == 0
    (first,) = find_runs([tmp_path / "runs"])
    made_as(first, **made)
    before = (first / "summary.json").read_text()
    for expected in (said, said if not trains else "already finished"):  # the second time it finds what it made
        capsys.readouterr()
        assert main([*base, asked]) == 0
        assert expected in " ".join(capsys.readouterr().err.split())
    names = [first.name, f"{first.name}-r2"] if trains else [first.name]
    assert [path.name for path in find_runs([tmp_path / "runs"])] == names
    assert (first / "summary.json").read_text() == before


def test_a_study_keeps_what_was_carried_out_otherwise_and_says_so(tiny_run, forked_workers, tmp_path, capsys):
    study = ["study", "mine", "vary.norm=layer", "seeds=0,1", "--workers", "1", *tiny_run("train.steps=2")]
    assert main(study) == 0
    for path in find_runs([tmp_path / "runs"]):
        made_as(path, compiled=True)
    capsys.readouterr()
    assert main([*study, "train.compile=off"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "4 finished runs trained with another train.compile (on) than requested, and kept" in said
    assert len(find_runs([tmp_path / "runs"])) == 4

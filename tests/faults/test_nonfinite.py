"""NaN or Inf anywhere: caught in its step, before the optimizer; nothing of it is saved (R6)."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch
from torch.nn import functional as F

import nexus_ablate.model
from faults.bench import at_step, fresh, only, result, run, sizes
from nexus_ablate.cli import main
from nexus_ablate.errors import Diverged
from nexus_ablate.runs import read_run
from nexus_ablate.training import step as training_step
from nexus_ablate.training import trainer
from nexus_ablate.training.checkpoint import load_newest
from nexus_ablate.training.progress import Progress

STEPS = 20
SHORT = (f"train.steps={STEPS}", "train.checkpoint_every=2", "train.eval_every=50", "train.log_every=7", "probe=off")
KINDS = ("loss", "gradient", "activation", "weight")


class Poison:
    """Puts a non-finite number into a run at one step.

    Attributes:
        before: The weights as they were when the poisoned step began.
    """

    def __init__(self, kind: str, at: int, value: float, draw: random.Random, patch: pytest.MonkeyPatch) -> None:
        self.kind, self.at, self.value, self.draw = kind, at, value, draw
        self.before: dict[str, torch.Tensor] = {}
        self.where = ""
        self.armed = False
        build, cross_entropy = nexus_ablate.model.build_model, F.cross_entropy

        def built(*arguments, **options):
            self.model = build(*arguments, **options)
            return self.model

        def poisoned(*arguments, **options):
            loss = cross_entropy(*arguments, **options)
            return loss * self.value if self.armed and kind == "loss" else loss

        patch.setattr(nexus_ablate.model, "build_model", built)
        patch.setattr(F, "cross_entropy", poisoned)
        at_step(patch, self.begin)

    def begin(self, step: int) -> None:
        self.armed = step == self.at
        if not self.armed or self.before:  # drawn once more to say where it began
            return
        parameters = dict(self.model.named_parameters())
        self.where = self.draw.choice(sorted(parameters))
        if self.kind == "weight":
            with torch.no_grad():
                parameters[self.where].view(-1)[0] = self.value
        elif self.kind == "gradient":
            parameters[self.where].register_hook(lambda gradient: gradient * self.value)
        elif self.kind == "activation":
            names = [n for n, m in self.model.named_modules() if n.endswith(("attn", "ffn", "final_norm", "embedding"))]
            self.where = self.draw.choice(names)
            self.model.get_submodule(self.where).register_forward_hook(lambda m, i, output: output * self.value)
        self.before = {name: p.detach().clone() for name, p in parameters.items()}

    def touched(self) -> list[str]:
        """Parameters that are no longer what they were when the step began."""
        pairs = ((name, p, self.before[name]) for name, p in self.model.named_parameters())
        return [name for name, now, then in pairs if not torch.equal(now.nan_to_num(7), then.nan_to_num(7))]


@sizes(8, 200, fast=True)
def test_a_nonfinite_number_is_caught_in_its_step_and_changes_nothing(tiny_run, tmp_path, monkeypatch, counted, count):
    draw = random.Random(count)
    for number in range(count):
        kind, at, value = KINDS[number % 4], draw.randrange(STEPS), draw.choice((math.nan, math.inf, -math.inf))
        with fresh(tmp_path) as runs_dir, monkeypatch.context() as patch:
            poison = Poison(kind, at, value, draw, patch)
            case = (kind, poison.where, at, value)
            with pytest.raises(Diverged) as caught:
                run(tiny_run(*SHORT, f"runs_dir={runs_dir}"))
            assert f"at step {at + 1}" in caught.value.problem, case
            assert caught.value.status == 3
            assert poison.touched() == [], case
            record = read_run(only(runs_dir))
            assert (record.state, record.summary) == ("diverged", None)
            assert record.status["reason"] == caught.value.problem
            assert named(poison, caught.value.problem), (case, poison.where, caught.value.problem)
            for file in record.path.glob("*.json*"):
                for line in file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]:
                    json.loads(line, parse_constant=pytest.fail)
            saved = load_newest(record.path / "checkpoints")
            tensors = [] if saved is None else [t for group in saved.tensors.values() for t in group.values()]
            assert all(bool(torch.isfinite(t).all()) for t in tensors), case
    counted(f"{count} of {count} caught in the same step, before the optimizer, with the place named")


def named(poison: Poison, said: str) -> bool:
    """Whether the message says where it began."""
    if poison.kind == "loss":
        return "the loss is" in said
    if poison.kind == "gradient":
        return "gradient" in said and (poison.where.split(".")[0] in said or "block_" in said)
    return poison.where in said


@pytest.mark.parametrize("kind", KINDS)
def test_control_without_the_check_the_weights_become_non_finite(tiny_run, monkeypatch, kind):
    monkeypatch.setattr(training_step.Step, "_check", lambda self, step, row: None)
    poison = Poison(kind, 3, math.nan, random.Random(0), monkeypatch)
    with pytest.raises(ValueError, match="JSON"):  # nor would its losses go into a checkpoint
        run(tiny_run(*SHORT))
    assert poison.touched() != []


@pytest.mark.parametrize("kind", ["activation", "weight"])
def test_control_without_the_search_for_its_beginning_the_place_is_not_named(tiny_run, monkeypatch, kind):
    monkeypatch.setattr(training_step, "first_nonfinite", lambda model, forward: "")
    poison = Poison(kind, 3, math.nan, random.Random(0), monkeypatch)
    with pytest.raises(Diverged) as caught:
        run(tiny_run(*SHORT))
    assert not named(poison, caught.value.problem)


INFINITE = {"act/resid/max_over_median": math.inf, "act/resid/growth": math.nan}


@pytest.fixture
def ratios_to_nothing(monkeypatch):
    """Every probe finds a median and a first stream of 0."""
    figures = trainer.model_figures
    monkeypatch.setattr(trainer, "model_figures", lambda probed: figures(probed) | INFINITE)


@pytest.mark.slow
@pytest.mark.usefixtures("ratios_to_nothing")
def test_a_figure_that_is_not_finite_is_no_divergence_and_a_resumed_run_still_knows_it(tiny_run, tmp_path):
    """The loss is finite and the model trains; a checkpoint falls between the probe and the end."""
    whole = run(tiny_run())
    overrides = tiny_run(f"runs_dir={tmp_path / 'other'}")
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, lambda step: 1 / (step != 18))
        with pytest.raises(ZeroDivisionError):
            run(overrides)
    assert result(run(overrides).path) == result(whole.path)
    assert set((read_run(whole.path).summary or {})["nonfinite"]) == INFINITE.keys()
    assert main(["show", str(whole.path)]) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("ratios_to_nothing")
def test_control_unless_stored_as_null_such_a_figure_ends_the_run(tiny_run, monkeypatch):
    monkeypatch.setattr(Progress, "saved", lambda self: vars(self))
    with pytest.raises(ValueError, match="JSON"):
        run(tiny_run())

"""A study whose runs end at once, without training, and whose verdicts the test chooses: only who runs when is real."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from nexus_ablate import errors
from nexus_ablate.comparison.verdict import IDENTICAL, INCONCLUSIVE, WORSE, Verdict
from nexus_ablate.execution.worker import JobResult
from nexus_ablate.runs import SETTLED

NOW = "2020-01-01T00:00:00+00:00"


@dataclass
class Instant:
    """Takes the place of the workers and of the comparison.

    Attributes:
        decided: The look after which each arm is decided; others never are.
        word: What is said of a decided arm.
        failing: (folder, seed) of runs that fail.
        exploding: Folders of arms whose training loss explodes on the way to their final loss.
        stop_after: Runs until a signal stops the study.
        losses: The final loss by folder of the arm, 1 where it is not named.
        trained: (folder, seed) of every run that was trained, in order.
    """

    decided: dict[str, int] = field(default_factory=dict)
    word: str = WORSE
    failing: set[tuple[str, int]] = field(default_factory=set)
    exploding: set[str] = field(default_factory=set)
    stop_after: float = float("inf")
    losses: dict[str, float] = field(default_factory=dict)
    trained: list[tuple[str, int]] = field(default_factory=list)

    def run(self, jobs, progress) -> str:
        progress.queued(len(jobs), "at once")
        for job in jobs:
            if self.stop_after <= 0:
                return "SIGTERM"
            self.stop_after -= 1
            self.trained.append((job.arm, job.seed))
            failed = (job.arm, job.seed) in self.failing
            progress.began(job)
            self.end(job, "failed" if failed else "finished")
            progress.ended(job, JobResult(errors.BUG, "made to fail") if failed else JobResult(errors.OK))
        return ""

    def end(self, job, state: str) -> None:
        """Write what a run that ended leaves for the study to read."""
        job.path.mkdir(parents=True, exist_ok=True)
        status = {"state": state, "reason": "" if state == "finished" else "made to fail", "step": 20, "updated": NOW}
        (job.path / "status.json").write_text(json.dumps(status | {"host": "h", "pid": 1, "heartbeat": NOW}))
        summary = {"val_loss": self.losses.get(job.arm, 1.0), "tokens_per_second": 1000.0}
        (job.path / "summary.json").write_text(json.dumps(summary))
        losses = [3.0, 2.0, 90.0, 1.0] if job.arm in self.exploding else [3.0, 2.0, 1.5, 1.0]
        rows = [
            {"step": step, "tokens": step, "flops": step, "seconds": step, "train/loss": loss}
            for step, loss in enumerate(losses, 1)
        ]
        (job.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def compare(self, directory: Path) -> Any:
        """What a comparison says of the study: its complete looks, who is undecided, and a word for each arm."""
        record = yaml.safe_load((directory / "study.yaml").read_text())
        arms = [arm["name"] for arm in record["arms"]]
        looks = record.get("looks") or [len(record["seeds"])]
        undecided, number = arms, 0
        while number < len(looks) and self.complete(directory, record["seeds"][: looks[number]], undecided):
            number += 1
            undecided = [arm for arm in arms if self.decided.get(arm, 99) > number]
        words = {arm: INCONCLUSIVE if arm in undecided else self.word for arm in arms}
        rows = [SimpleNamespace(name="baseline", verdict=None)]
        rows += [SimpleNamespace(name=arm, verdict=Verdict(words[arm], "")) for arm in arms]
        for entry in record.get("equal", []):
            rows.append(SimpleNamespace(name=entry["arm"], verdict=Verdict(IDENTICAL, "")))
        undecided = undecided if number < len(looks) else []
        return SimpleNamespace(look=number, undecided=undecided, rows=rows)

    def complete(self, directory: Path, wanted: list[int], undecided: list[str]) -> bool:
        """Whether the baseline and these arms, at one rate or another, have a result at every wanted seed."""

        def seeds(arm: str) -> set[int]:
            folders = [*directory.glob(arm), *directory.glob(f"{arm},optim.lr=*")]
            folders += directory.glob("optim.lr=*") if arm == "baseline" else []
            paths = [path for folder in folders for path in folder.glob("s*-*")]
            done = [path for path in paths if json.loads((path / "status.json").read_text())["state"] in SETTLED]
            return {int(path.name[1:].partition("-")[0]) for path in done}

        return all({*wanted} <= seeds(arm) for arm in ("baseline", *undecided))

"""A study whose runs end at once, without training: only who runs when is real."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from nexus_ablate import errors
from nexus_ablate.launch.jobs import JobResult
from nexus_ablate.training.session import code_for

NOW = "2020-01-01T00:00:00+00:00"


@dataclass
class Instant:
    """Takes the place of the workers.

    Attributes:
        failing: (folder, seed) of runs that fail.
        late: (folder, seed) of runs that are saved at their time limit.
        stop_after: Runs until a signal stops the study.
        trained: (folder, seed) of every run that was trained, in order.
        jobs: The jobs of these runs.
    """

    failing: set[tuple[str, int]] = field(default_factory=set)
    late: set[tuple[str, int]] = field(default_factory=set)
    stop_after: float = float("inf")
    trained: list[tuple[str, int]] = field(default_factory=list)
    jobs: list = field(default_factory=list)

    def run(self, jobs, progress) -> str:
        progress.queued(len(jobs), "at once")
        for job in jobs:
            if self.stop_after <= 0:
                return "SIGTERM"
            self.stop_after -= 1
            self.trained.append((job.folder, job.seed))
            self.jobs.append(job)
            if (job.folder, job.seed) in self.late:
                self.end(job, "preempted")
                progress.ended(job, JobResult(errors.PREEMPTED, "its time limit was reached"))
                continue
            failed = (job.folder, job.seed) in self.failing
            self.end(job, "failed" if failed else "finished")
            progress.ended(job, JobResult(errors.BUG, "made to fail") if failed else JobResult(errors.OK))
        return ""

    def end(self, job, state: str) -> None:
        """Write what a run that ended leaves for the study to read."""
        job.path.mkdir(parents=True, exist_ok=True)
        status = {"state": state, "reason": "" if state == "finished" else "made to fail", "step": 20, "updated": NOW}
        (job.path / "status.json").write_text(json.dumps(status | {"host": "h", "pid": 1, "heartbeat": NOW}))
        (job.path / "env.json").write_text(json.dumps(code_for(job.config)))
        (job.path / "summary.json").write_text(json.dumps({"val_loss": 1.0, "tokens_per_second": 1000.0}))
        rows = [{"step": n, "tokens": n, "flops": n, "seconds": n, "val/loss": 3.0 - n} for n in (1, 2)]
        (job.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

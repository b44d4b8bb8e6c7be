"""The state of every run of some directories: progress, loss, age and errors. Reads files, imports no torch."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Any

from nexus_ablate.comparison.curves import read_curves
from nexus_ablate.comparison.differences import departure
from nexus_ablate.comparison.learning_rates import RATES
from nexus_ablate.errors import UserError
from nexus_ablate.execution.slurm_queue import FOLDER, Entry, entries_of, submitted_jobs
from nexus_ablate.provenance import source_hash
from nexus_ablate.runs import SETTLED, effective_state, find_runs, read_rows, read_status, read_summary
from nexus_ablate.runs.lookup import id_of, seed_of
from nexus_ablate.runs.naming import BASELINE
from nexus_ablate.runs.ownership import LIVE
from nexus_ablate.runs.record import last_row, read_config, read_env, with_strata
from nexus_ablate.study.decoding import read_study
from nexus_ablate.study.schema import Study

QUEUE_SECONDS = 10.0
"""Shortest time between two queries to SLURM."""
LOSS = "val/loss"
TROUBLED = ("failed", "damaged", "diverged", "lost", "preempted", "unknown")
"""States of runs that did not succeed."""
COMING = (*LIVE, "queued", "starting", "waiting", "unknown")
"""States of runs that have not ended."""
LATER = "not needed so far"
"""The state of a run that is only trained if its arm is undecided after a look, or if the baseline has what the claim
requires."""
REPLACED = "replaced"
"""The state of a run of a configuration, or of code, with which its study is no longer trained: it does not count."""


@dataclass(frozen=True)
class Line:
    """One run as `status` shows it; unknown values are None.

    Attributes:
        state: The effective state, or `waiting`: part of a study and not started; `queued`: in SLURM's queue;
            `starting`: SLURM has started its job; `damaged`: unreadable; `unknown`: SLURM doesn't answer;
            `not needed so far`: part of a look that this arm has not reached, or after the baseline's runs;
            `replaced`: of a configuration, or of code, with which its study is no longer trained.
        loss: The last validation loss, in nats per token.
        against_baseline: `loss` minus the baseline's, with the same seed at the same number of tokens.
        age_seconds: Since the last heartbeat, or since the end.
        left_seconds: Until the end, at the pace so far.
        log: The file with details.
        job: Its job number on a cluster.
        path: The run directory.
    """

    study: str
    arm: str
    seed: int | None
    state: str
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    against_baseline: float | None = None
    age_seconds: float | None = None
    left_seconds: float | None = None
    reason: str = ""
    log: Path | None = None
    job: str = ""
    path: Path | None = None

    @property
    def id(self) -> str:
        return id_of(self.path) if self.path else ""

    @property
    def steps_text(self) -> str:
        """`120/400`; '' before the first step."""
        if self.step is None:
            return ""
        return f"{self.step}/{self.steps}" if self.steps else str(self.step)

    @property
    def text(self) -> str:
        """What `--filter` searches."""
        return f"{self.id} {self.study}/{self.arm} seed {self.seed} {self.state}"

    def bytes(self) -> int:
        """The bytes of all files in the run directory; links are not followed."""
        folders = os.walk(self.path) if self.path else ()
        return sum(os.lstat(os.path.join(folder, name)).st_size for folder, _, files in folders for name in files)


class Watcher:
    """Reads run directories repeatedly, and reads what no longer changes only once."""

    def __init__(self) -> None:
        self._steps: dict[Path, int | None] = {}
        self._whole: set[tuple[Path, str]] = set()
        self._queues: dict[Path, tuple[float, dict[str, Entry]]] = {}

    def lines(self, dirs: Iterable[Path]) -> list[Line]:
        """One line per run in the directories, and per run that a study.yaml there still expects.

        Args:
            dirs: As for `find_runs`.

        Raises:
            UserError: A directory does not exist.
        """
        dirs = list(chain.from_iterable(map(with_strata, dirs)))
        runs = {path: self.line(path) for path in find_runs(dirs)}
        inside = {child for parent in dirs for child in parent.glob("*") if not child.is_symlink()}
        directories = sorted(Path(os.path.abspath(path)) for path in {*dirs, *inside})  # `..` has no name of its own
        for directory in directories:
            if (directory / FOLDER).is_dir():
                runs |= self._of_jobs(directory, runs)
        lines = [*runs.values()]
        for directory in directories:
            lines = _of_study(directory, lines)
        return sorted(lines, key=lambda line: (line.study, line.arm != BASELINE, line.arm, line.seed or 0))

    def line(self, path: Path) -> Line:
        """One run."""
        study, arm, seed, log = path.parent.parent.name, path.parent.name, seed_of(path), path / "log.txt"
        try:
            status = read_status(path)
            state = effective_state(status, path)
            if state not in LIVE and (path, state) not in self._whole:
                read_curves(path / "metrics.jsonl")  # a damaged line anywhere hides data, and excludes the run
                self._whole.add((path, state))
            row = last_row(path / "metrics.jsonl")
            measured = row if LOSS in row else last_row(path / "metrics.jsonl", LOSS)
            if self._steps.get(path) is None:
                resolved = (read_config(path) or {}).get("resolved", {})
                self._steps[path] = (read_summary(path, status) or {}).get("steps") or resolved.get("steps")
        except UserError as error:
            return Line(study, arm, seed, "damaged", reason=f"{error.problem}: {error.got}", log=log, path=path)
        baseline = {}
        if arm != BASELINE and (baseline_log := _baseline_log(path, seed)):
            with suppress(UserError):  # a damaged baseline has a line of its own
                baseline = _losses(baseline_log, baseline_log.stat().st_size)
        step = row.get("step", status.get("step"))
        loss = measured.get(LOSS)
        beside = baseline.get(measured.get("tokens", -1))
        steps, left = self._steps[path], None
        if state == "running" and step and steps and row.get("seconds"):
            left = (steps - step) * row["seconds"] / step
        ended = None if state in LIVE else status.get("updated")
        age = datetime.now(UTC) - datetime.fromisoformat(ended or status["heartbeat"])
        return Line(
            study=study,
            arm=arm,
            seed=seed,
            state=state,
            step=step,
            steps=steps,
            loss=loss,
            against_baseline=None if loss is None or beside is None else loss - beside,
            age_seconds=age.total_seconds(),
            left_seconds=left,
            reason=status.get("reason") or "",
            log=log,
            path=path,
        )

    def _of_jobs(self, directory: Path, runs: Mapping[Path, Line]) -> dict[Path, Line]:
        """The lines of one study that SLURM's states change, and one per job whose run has no directory yet."""
        try:
            jobs = submitted_jobs(directory)
            lines = [runs.get(directory / run) for run in jobs]
            if all(line is not None and line.state in (*SETTLED, "failed") for line in lines):
                return {}
            queried_at, entries = self._queues.get(directory, (-QUEUE_SECONDS, {}))
            if time.monotonic() - queried_at >= QUEUE_SECONDS:
                entries = entries_of(jobs)
                self._queues[directory] = (time.monotonic(), entries)
        except UserError as error:
            log, reason = directory / FOLDER, f"{error.problem}: {error.got}"
            return {log: Line(directory.name, "SLURM", None, "unknown", reason=reason, log=log)}
        changed = {}
        for run, entry in entries.items():
            path = directory / run
            line = runs.get(path)
            if line is None:
                state, reason = "lost", entry.description()
                if entry.state == "PENDING":
                    state, reason = "queued", entry.why
                elif entry.live:
                    state = "starting"
                arm = run.partition("/")[0]
                changed[path] = Line(
                    directory.name, arm, seed_of(path), state, reason=reason, log=entry.log, job=entry.job
                )
            elif line.state in LIVE:
                changed[path] = replace(line, job=entry.job)
            elif line.state in ("preempted", "lost"):
                reason = f"{line.reason}; {entry.description()}" if entry.live and line.reason else entry.description()
                changed[path] = replace(line, job=entry.job, reason=reason)
        return changed


def _baseline_log(path: Path, seed: int | None) -> Path | None:
    """metrics.jsonl of the newest run of the baseline with this seed, beside the arm of a run."""
    folder = path.parent.parent / BASELINE
    runs = [] if folder.is_symlink() else folder.glob(f"s{seed}-*")  # a link could lead anywhere
    logs = [run / "metrics.jsonl" for run in runs if not run.is_symlink()]
    return max(filter(Path.exists, logs), key=lambda log: log.stat().st_mtime, default=None)


@lru_cache(maxsize=1024)
def _losses(log: Path, size: int) -> dict[int, float]:
    """The validation losses in a log by number of tokens. A log of another size is read again."""
    return {row["tokens"]: row[LOSS] for row in read_rows(log) if row.get(LOSS) is not None}


def _of_study(directory: Path, lines: list[Line]) -> list[Line]:
    """The lines, with the runs that a study.yaml still requests, and those that it replaced in the state `replaced`."""
    try:
        study = read_study(directory) if (directory / "study.yaml").is_file() else None
    except UserError as error:
        log = directory / "study.yaml"
        return [*lines, Line(directory.name, "study.yaml", None, "damaged", reason=error.got, log=log)]
    if study is None:
        return lines
    counted, others = [], []
    for line in lines:
        if line.study == study.name and _is_replaced(line, study):
            others.append(replace(line, state=REPLACED, against_baseline=None))
        else:
            counted.append(line)
    begun = {(line.arm, line.seed) for line in counted if line.study == study.name}
    to_come = [line for line in _expected(study, begun) if (line.arm, line.seed) not in begun]
    return [*counted, *others, *to_come]


def _is_replaced(line: Line, study: Study) -> bool:
    """Whether a run is of a configuration, or of code, with which its study is no longer trained."""
    if line.path is None:
        return False
    with suppress(UserError):  # a damaged run
        if study.source and _code(line.path) not in ("", study.source):
            return True
        if any(len(hashes) > 1 for hashes in study.configs.values()):  # reading a configuration takes the longest
            config = _config(line.path)
            return config is not None and bool(departure(config, line.arm, study))
    return False


@lru_cache(maxsize=4096)
def _code(path: Path) -> str:
    """The hash of the code that made a run, which stays as it is; '' where it was not recorded."""
    source = (read_env(path) or {}).get("source")
    return source_hash(source) if source else ""


@lru_cache(maxsize=4096)
def _config(path: Path) -> dict[str, Any] | None:
    """The configuration of a run, which stays as it is."""
    return read_config(path)


def _expected(study: Study, begun: set[tuple[str, int | None]]) -> list[Line]:
    """The runs of a study; with a learning-rate grid, as many as are known to come.

    Args:
        begun: Arm and seed of the existing runs. An arm with a run in a look has reached that look.
    """
    arms = [arm.name for arm in study.all_arms]
    if study.lr_grid:  # at which rates, only the runs so far can say
        trained = Counter(seed for _, seed in begun)
        planned = dict.fromkeys(study.tuning_seeds, (len(study.lr_grid), "a rate of the grid"))
        planned |= dict.fromkeys(study.first_seeds, (RATES, "a best rate or beside it"))
        lines = []
        for seed, (rates, place) in planned.items():
            lines += [Line(study.name, place, seed, "waiting")] * (rates * len(arms) - trained[seed])
        return lines
    baseline_first = study.requires and {arm for arm, _ in begun}.isdisjoint(arms[1:])
    lines = []
    for arm, (start, end) in product(arms, pairwise([0, *(study.looks or [len(study.seeds)])])):
        seeds = study.seeds[start:end]
        is_later = begun.isdisjoint(product([arm], seeds)) if start else baseline_first and arm != BASELINE
        lines += [Line(study.name, arm, seed, LATER if is_later else "waiting") for seed in seeds]
    return lines

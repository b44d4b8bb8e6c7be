"""Reading runs: each directory is either used or excluded with a reason."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from nexus_ablate.comparison.curves import Curves, read_curves
from nexus_ablate.comparison.terms import Terms, read_terms
from nexus_ablate.comparison.windows import WindowLosses, read_windows
from nexus_ablate.errors import ConfigError, UserError, printable
from nexus_ablate.provenance import code_of, source_hash
from nexus_ablate.runs import SETTLED, RunRecord, read_run
from nexus_ablate.runs.contradiction import contradiction
from nexus_ablate.runs.formats import INIT
from nexus_ablate.runs.record import last_row, leaves, read_document, runs_and_strangers
from nexus_ablate.study.schema import Study


@dataclass(frozen=True)
class Excluded:
    """A directory that gave no result to the table, and why."""

    path: Path
    reason: str
    arm: str = ""
    seed: int | None = None
    state: str = ""
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trained:
    """A run with a result: finished, or diverged, which is a result too.

    Attributes:
        init: Hash of the normal numbers behind each parameter's first value, by parameter name, and its shape; None
            where an older version did not record it.
        figures: Every number of the summary by name, those of evaluations as `evaluation/figure`.
        probed: The last row of probes.jsonl; {} where there is none.
        windows: Final validation losses by window of text; None where the run kept none.
    """

    record: RunRecord
    curves: Curves
    init: dict[str, tuple[str, tuple[int, ...] | None]]
    figures: dict[str, float]
    probed: dict[str, Any] = field(default_factory=dict)
    windows: WindowLosses | None = None

    def figure(self, name: str) -> float:
        """A number of the run at its end, a list by head as its mean; NaN where there is none."""
        value = self.figures.get(name, self.probed.get(name, self.curves.last.get(name)))
        values = value if isinstance(value, list) else [value]
        numbers = [v for v in values if isinstance(v, int | float)]
        return float(np.mean(numbers)) if numbers and len(numbers) == len(values) else float("nan")

    def excluded(self, reason: str, state: str = "") -> Excluded:
        """The run as one that gives no result to the table, in its own state unless another is given."""
        record = self.record
        return Excluded(record.path, reason, record.arm, record.seed, state or record.state)

    @property
    def seed(self) -> int:
        assert self.record.seed is not None
        return self.record.seed

    @property
    def config_hash(self) -> str:
        """What the arm was asked for, whatever code made it; '' where an older version did not record it."""
        return str(self.env.get("config_hash") or "")

    @property
    def code(self) -> dict[str, str] | None:
        """The hash of each file that made it; None where an older version did not record them."""
        return code_of(self.env)

    @cached_property
    def source(self) -> str:
        """The same for all runs by one state of this package; version and commit where no hash was recorded."""
        if (code := self.code) is None:
            return f"version {self.env.get('version')} at commit {self.env.get('git_commit')}"
        return source_hash({name: value for name, value in code.items() if not name.startswith("plugin ")})

    @property
    def plugins(self) -> tuple[tuple[str, str], ...]:
        """Name and hash of each plugin that it used."""
        return tuple(sorted(item for item in (self.code or {}).items() if item[0].startswith("plugin ")))

    @property
    def begun(self) -> str:
        """When it was first started, in UTC, as text that sorts."""
        return str(self.record.status.get("started"))

    @property
    def env(self) -> dict[str, Any]:
        return self.record.env or {}

    @property
    def config(self) -> dict[str, Any]:
        return self.record.config or {}

    @property
    def summary(self) -> dict[str, Any]:
        return self.record.summary or {}


@dataclass
class Collection:
    """Everything in scope of a comparison: what can be used, what cannot, and the terms of each study."""

    runs: list[Trained]
    excluded: list[Excluded]
    terms: dict[str, Terms]

    def study_of(self, run: Trained) -> Study:
        return self.terms.get(run.record.study, Terms()).study


def collect(dirs: Iterable[Path]) -> Collection:
    """Read every run in the given directories: runs, arms, studies or a runs_dir.

    Raises:
        ConfigError: There is no run at all.
        UserError: A directory does not exist, or a study.yaml is damaged.
    """
    dirs = list(dirs)
    paths, strangers = runs_and_strangers(dirs)
    collection = Collection([], [], {})
    sources: dict[str, Any] = {}
    for path in paths:
        result = _read(path)
        if isinstance(result, Excluded):
            collection.excluded.append(result)
            continue
        if result.code:  # the hashes of a thousand runs by one code are kept once
            result.env["source"] = sources.setdefault(result.source, result.env["source"])
        collection.runs.append(result)
    collection.excluded += (Excluded(path, reason) for path, reason in strangers.items())
    if not paths and not collection.excluded:
        fix = "give a run, an arm, a study or a runs_dir"
        raise ConfigError("there are no runs here", " ".join(map(str, dirs)), fix)
    for folder in sorted({path.parent.parent for path in paths}):
        if os.path.lexists(folder / "study.yaml"):
            collection.terms[folder.name] = read_terms(folder)
    return collection


def _read(path: Path) -> Trained | Excluded:
    try:
        record = read_run(path)
        place = {"arm": record.arm, "seed": record.seed, "state": record.state}
        if record.seed is None:
            return Excluded(path, "not named like a run (s<seed>-<hash>)", **place)
        if record.state not in SETTLED:
            step, steps = record.status.get("step"), ((record.config or {}).get("resolved") or {}).get("steps")
            text = record.state
            if step is not None:
                text += f" at step {step} of {steps}" if steps else f" at step {step}"
            if reason := record.status.get("reason"):
                text += f": {reason}"
            return Excluded(path, printable(text, 200), **place, config=record.config or {})
        run = Trained(
            record=record,
            curves=read_curves(path / "metrics.jsonl"),
            init=_initial_values(path / "init.json"),
            figures=dict(_figures(record.summary or {})),
            probed=last_row(path / "probes.jsonl"),
            windows=read_windows(path / "evaluation.jsonl"),
        )
        if reason := contradiction(record):
            return run.excluded(f"contradicts itself: {reason}", "inconsistent")
        return run
    except UserError as error:
        reason = f"damaged: {error.problem.removeprefix(f'{path}/')}"
        if error.got:
            reason += f" ({error.got})"
        return Excluded(path, printable(reason, 200), arm=path.parent.name, state="damaged")


def _initial_values(path: Path) -> dict[str, tuple[str, tuple[int, ...] | None]]:
    """The contents of init.json, in its present form or in the former one, which had no shapes.

    Raises:
        UserError: It has another form.
    """
    values = {}
    for name, recorded in (read_document(path, INIT) or {}).items():
        if isinstance(recorded, str):
            values[name] = (recorded, None)
        else:
            values[name] = (recorded["z"], tuple(recorded["shape"]))
    return values


def _figures(summary: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for names, value in leaves(summary):
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield "/".join(names), float(value)

"""Reading runs: each directory is either used or excluded with a reason."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import to_builtins

from nexus_ablate.comparison.curves import Curves, read_curves
from nexus_ablate.comparison.endpoint import Endpoint
from nexus_ablate.comparison.windows import WindowLosses, read_windows
from nexus_ablate.console import several
from nexus_ablate.errors import ConfigError, UserError, printable
from nexus_ablate.provenance import code_of, source_hash
from nexus_ablate.runs import SETTLED, RunRecord, find_runs, read_run
from nexus_ablate.runs.formats import INIT
from nexus_ablate.runs.record import last_row, read_document
from nexus_ablate.study.decoding import read_study
from nexus_ablate.study.schema import Expectation, Study

RUN_NAME = re.compile(r"s\d+-[0-9a-f]{8}(-r\d+)?")
CLAIMED = {"val_loss": "val/loss", "tokens": "tokens", "steps": "step"}
"""Figures of summary.json that the last row of metrics.jsonl repeats, and their names there."""


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

    @property
    def seed(self) -> int:
        assert self.record.seed is not None
        return self.record.seed

    @property
    def arm_hash(self) -> str:
        return str(self.env.get("arm_hash") or (self.record.summary or {}).get("arm_hash") or "")

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


@dataclass(frozen=True)
class Excluded:
    """A directory that gave no result to the table, and why.

    Attributes:
        newer_code: How its code differs from that of the run in its place, where it was begun after that.
    """

    path: Path
    reason: str
    arm: str = ""
    seed: int | None = None
    state: str = ""
    newer_code: str = ""


@dataclass(frozen=True)
class Plan:
    """A study as it was fixed before its runs (study.yaml)."""

    name: str
    place: str = ""
    """The study as one types it after a verb: its name, or its directory where that is not in runs/."""
    question: str = ""
    baseline: str = "baseline"
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()
    endpoint: Endpoint = Endpoint()
    """What decides: the primary endpoint."""
    secondary: tuple[Endpoint, ...] = ()
    family: int = 0
    """Comparisons that share the 5% of the table at the least, where it shows fewer of them."""
    delta_min_tokens: float = 0.0
    """The share of training tokens that the margin of the primary endpoint is worth, if it was given so."""
    share: float = 1.0
    """Of the 5%, for the table of the endpoint: less where other endpoints or strata get a verdict too."""
    expects: tuple[Expectation, ...] = ()
    requires: tuple[tuple[str, str], ...] = ()
    """What the baseline's runs must show for the claim to be testable: a measure and a condition, `>= 0.2`."""
    claim: str = ""
    stratum: str = ""
    """The stratum that this study is, of the study `of`."""
    of: str = ""
    all_strata: tuple[str, ...] = ()
    """The strata of the study `of`."""
    rung: int = 0
    """Of a stratum that is a size of a ladder: its n_layers."""
    match: str = "none"
    lr_grid: tuple[float, ...] = ()
    tuning_seeds: tuple[int, ...] = ()
    looks: tuple[int, ...] = ()
    """How many seeds each look has; the arms that are undecided get those of the next one."""
    look_weights: tuple[float, ...] = ()
    """Each look's share of the 5%."""
    exploratory: tuple[str, ...] = ()
    """What was chosen when results had been seen, which an interval takes no account of; () where nothing was."""
    amendments: tuple[str, ...] = ()
    source: str = ""
    """Hash of the code of the last launch."""
    equal: tuple[tuple[str, str], ...] = ()
    """Requested overrides that give the same configuration as another arm, and that arm."""
    refused: tuple[tuple[str, str], ...] = ()
    """Overrides that cannot be run, and why."""
    listed: bool = False
    """The runs are rows of a table that was made elsewhere, with nothing but their results."""
    paired: bool = True
    """Whether arms share seeds with the baseline."""
    step: float = 0.0
    """To which a table made elsewhere rounded the endpoint."""


def amends_claim(amendments: Iterable[str]) -> bool:
    """Whether a claim, or what decides it, was among what `Plan.amendments` lists."""
    changes = [change for line in amendments for change in line.partition(": ")[2].split("; ")]
    return any(change.startswith(("claim: ", "expects: ", "requires: ", "endpoints: ")) for change in changes)


@dataclass
class Collection:
    """Everything in scope of a comparison: what can be used, what cannot, and the studies' plans by study."""

    runs: list[Trained]
    excluded: list[Excluded]
    plans: dict[str, Plan]


def collect(dirs: Iterable[Path]) -> Collection:
    """Read every run in the given directories: runs, arms, studies or a runs_dir.

    Raises:
        ConfigError: There is no run at all.
        UserError: A directory does not exist, or a study.yaml is damaged.
    """
    dirs = list(dirs)
    paths = find_runs(dirs)
    collection = Collection([], [], {})
    sources: dict[str, Any] = {}
    for path in paths:
        result = _read(path)
        if isinstance(result, Trained) and result.code:  # the hashes of a thousand runs by one code are kept once
            result.env["source"] = sources.setdefault(result.source, result.env["source"])
        if isinstance(result, Trained):
            collection.runs.append(result)
        else:
            collection.excluded.append(result)
    for path, reason in _strangers(dirs, {p.resolve() for p in paths}):
        collection.excluded.append(Excluded(path, reason))
    if not paths and not collection.excluded:
        raise ConfigError(
            "there are no runs here", " ".join(map(str, dirs)), "give a run, an arm, a study or a runs_dir"
        )
    for folder in sorted({p.parent.parent for p in paths}):
        if os.path.lexists(folder / "study.yaml"):
            collection.plans[folder.name] = read_plan(folder / "study.yaml")
    return collection


def _read(path: Path) -> Trained | Excluded:
    try:
        record = read_run(path)
        place = {"arm": record.arm, "seed": record.seed, "state": record.state}
        if record.seed is None:
            return Excluded(path, "not named like a run (s<seed>-<hash>)", **place)
        if record.state not in SETTLED:
            return Excluded(path, _why_unsettled(record), **place)
        curves = read_curves(path / "metrics.jsonl")
        if contradiction := _contradiction(record, curves.last):
            return Excluded(path, f"contradicts itself: {contradiction}", record.arm, record.seed, "inconsistent")
        return Trained(
            record=record,
            curves=curves,
            init=_initial_values(path / "init.json"),
            figures=dict(_figures(record.summary or {})),
            probed=last_row(path / "probes.jsonl"),
            windows=read_windows(path / "evaluation.jsonl"),
        )
    except UserError as error:
        reason = f"damaged: {error.problem.removeprefix(f'{path}/')}" + (f" ({error.got})" if error.got else "")
        return Excluded(path, printable(reason, 200), arm=path.parent.name, state="damaged")


def _contradiction(record: RunRecord, last: dict[str, Any]) -> str:
    """How a run's files contradict each other, or ''."""
    seed = (record.config or {}).get("seed")
    if seed != record.seed:
        return f"the directory says seed {record.seed}, config.yaml says {seed}"
    if record.state != "finished":
        return ""
    if not last:
        return "finished without a row in metrics.jsonl"
    unlike = [
        f"{name} is {value} in summary.json, and {last.get(key)} at the end of metrics.jsonl"
        for name, key in CLAIMED.items()
        if (value := (record.summary or {}).get(name)) != last.get(key)
    ]
    return "; ".join(unlike)


def _initial_values(path: Path) -> dict[str, tuple[str, tuple[int, ...] | None]]:
    """The contents of init.json, in its present form or in the former one, which had no shapes.

    Raises:
        UserError: It has another form.
    """
    values = read_document(path, INIT) or {}
    return {k: (v, None) if isinstance(v, str) else (v["z"], tuple(v["shape"])) for k, v in values.items()}


def _why_unsettled(record: RunRecord) -> str:
    steps = ((record.config or {}).get("resolved") or {}).get("steps")
    reached = "" if record.status.get("step") is None else f" at step {record.status['step']}"
    reached += f" of {steps}" if reached and steps else ""
    reason = record.status.get("reason")
    return printable(f"{record.state}{reached}" + (f": {reason}" if reason else ""), 200)


def _figures(values: dict[str, Any], before: str = "") -> Iterable[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _figures(value, f"{before}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{before}{name}", float(value)


def _strangers(dirs: list[Path], runs: set[Path]) -> list[tuple[Path, str]]:
    """Links, and directories that look like runs but are not, each with the reason."""
    arms = {run.parent for run in runs}
    reasons: dict[Path, str] = {}
    for top in dirs:
        depth = len(top.resolve().parts)
        for folder, names, _ in os.walk(top.resolve()):
            here = Path(folder)
            if here in runs or len(here.parts) - depth >= 3:
                names.clear()
                continue
            names[:] = sorted(name for name in names if not name.startswith("."))
            for name in names:
                path = here / name
                if path.is_symlink() and path.resolve() not in runs:
                    reasons[path] = "a link, which is not followed; name what it leads to"
                elif path.resolve() not in runs and (RUN_NAME.fullmatch(name) or here in arms):
                    reasons[path] = "not a run: no status.json"
    return sorted(reasons.items())


def read_plan(path: Path) -> Plan:
    """A study.yaml.

    Raises:
        UserError: It is damaged or a value in it has no meaning.
    """
    directory = Path(os.path.realpath(path.parent))  # a directory that the user names may be a link
    study = read_study(directory)
    if study is None:
        return Plan(path.parent.name, place=_place(directory))
    endpoint, *secondary = endpoints_of(study)
    return Plan(
        name=path.parent.name,
        place=_place(directory),
        question=study.question,
        arms={arm.name: to_builtins(arm) for arm in study.arms},
        seeds=tuple(study.seeds),
        endpoint=endpoint,
        secondary=tuple(secondary),
        delta_min_tokens=study.primary.tokens,
        share=study.share,
        expects=tuple(study.expects),
        requires=tuple(study.requires.items()),
        claim=study.claim,
        stratum=study.stratum,
        of=study.of,
        all_strata=tuple(study.all_strata),
        rung=study.rung,
        match=study.match,
        lr_grid=tuple(study.lr_grid),
        tuning_seeds=tuple(study.tuning_seeds),
        looks=tuple(study.looks),
        look_weights=tuple(study.look_weights),
        exploratory=tuple(_chosen_late(study)),
        amendments=tuple(f"{a.when}: {'; '.join(a.changes)}" for a in study.amendments),
        source=study.source,
        equal=tuple((" ".join(e.overrides), e.arm) for e in study.equal),
        refused=tuple((" ".join(r.overrides), r.reason) for r in study.refused),
    )


def _chosen_late(study: Study) -> Iterable[str]:
    """What a study.yaml says of seeds, looks and their weights that were chosen after the first run."""
    added = [seed for entry in study.added for seed in entry.seeds]
    if added:
        yield f"{several(len(added), 'seed')} added after the others had been looked at ({', '.join(map(str, added))})"
    amended = {change.partition(":")[0] for each in study.amendments for change in each.changes}
    if late := sorted(amended & {"looks", "look_weights", "share", *(() if added else ("seeds",))}):
        yield f"{', '.join(late)} amended after the first run"


def _place(directory: Path) -> str:
    here = Path.cwd().resolve()
    if directory.parent == here / "runs":
        return shlex.quote(directory.name)
    return shlex.quote(str(directory.relative_to(here) if directory.is_relative_to(here) else directory))


def endpoints_of(study: Study) -> list[Endpoint]:
    """The endpoints of a study, the primary first."""
    return [Endpoint(e.name, None if e.delta_min == "auto" else e.delta_min) for e in study.endpoints]

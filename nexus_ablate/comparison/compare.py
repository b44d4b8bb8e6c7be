"""From folders to a word: `compare` reads runs, groups them into arms and makes each row once, in `_row`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from nexus_ablate.comparison.arms import Arm, arms_of, baseline_of
from nexus_ablate.comparison.fairness import Check, checks, is_early, text_check, unfair, unlike_machine
from nexus_ablate.comparison.read import LeftOut, read_folder
from nexus_ablate.comparison.statistics import FEWEST_BLOCKS, LEVEL, Array, Effect, paired_effect, sidak
from nexus_ablate.comparison.verdict import (
    INCONCLUSIVE,
    LEARNED,
    Counts,
    qualifiers,
    seeds_to_decide,
    sentence,
    word_of,
)
from nexus_ablate.comparison.worth import LossByCompute, Worth, loss_by_compute, worth_of
from nexus_ablate.data.batches import BLOCK_WINDOWS
from nexus_ablate.errors import ConfigError
from nexus_ablate.runs.naming import BASELINE
from nexus_ablate.study.definition import folders_of
from nexus_ablate.study.endpoint import DEFAULT_MARGIN, Endpoint
from nexus_ablate.study.record import load
from nexus_ablate.study.study import WORTH_ARMS, Study

BY_WINDOW = ("val_loss", "val_bpb")
"""Endpoints that are recorded by window of text."""


class NoResult(ConfigError):
    """No run, or none of the baseline, has a result yet."""


@dataclass(frozen=True)
class Row:
    """An arm against the baseline on one endpoint.

    Attributes:
        seeds: At which arm and baseline both have a value.
        differences: (seeds,) arm minus baseline on the endpoint's scale.
        effect: None for the baseline, for fewer than two pairs, and for an arm that cannot be compared.
        unfair: The fairness conditions that fail.
        word: "" for the baseline.
        needed: Seeds in all that would decide an INCONCLUSIVE arm.
    """

    arm: Arm
    endpoint: Endpoint
    seeds: list[int] = field(default_factory=list)
    differences: Array = field(default_factory=lambda: np.array([]))
    effect: Effect | None = None
    worth: Worth | None = None
    unfair: list[str] = field(default_factory=list)
    word: str = ""
    qualifiers: tuple[str, ...] = ()
    sentence: str = ""
    needed: int | None = None

    @property
    def is_baseline(self) -> bool:
        return not self.word

    @property
    def verdict(self) -> str:
        """The word and what stands beside it."""
        return f"{self.word} ({', '.join(self.qualifiers)})" if self.qualifiers else self.word


@dataclass(frozen=True)
class Table:
    """The arms of one folder against its baseline.

    Attributes:
        name: The folder's.
        rows: On the first endpoint, the baseline first.
        secondary: On each further endpoint, likewise.
        level: Of each cell.
        cells: Words about differences that share the 5%.
        arms: Every arm, the baseline first.
        left_out: Every run that gives no result.
    """

    name: str
    study: Study | None
    rows: list[Row]
    secondary: list[list[Row]]
    level: float
    cells: int
    checks: list[Check]
    arms: list[Arm]
    left_out: list[LeftOut]

    @property
    def baseline(self) -> Arm:
        return self.arms[0]

    @property
    def endpoint(self) -> Endpoint:
        return self.rows[0].endpoint

    @property
    def question(self) -> str:
        return self.study.question if self.study else ""

    @property
    def setting(self) -> str:
        return self.study.setting if self.study else ""

    @property
    def all_rows(self) -> list[Row]:
        """The rows of every endpoint, without the baseline's."""
        return [row for rows in (self.rows, *self.secondary) for row in rows if not row.is_baseline]


@dataclass(frozen=True)
class Comparison:
    """What `compare` says: a table for each folder, and the settings of a study that have none yet.

    Attributes:
        missing: By setting, why it has no table.
    """

    tables: list[Table]
    missing: dict[str, str] = field(default_factory=dict)


def compare(
    dirs: str | Path | Iterable[str | Path], baseline: str | None = None, allow: Iterable[str] = ()
) -> Comparison:
    """Compare the runs of some folders with their baseline, each folder by itself.

    Args:
        dirs: Studies, experiments or arms of one. `runs/qk` stands for the settings `runs/qk@...` of a study.
        baseline: The arm to compare with. Default: the study's.
        allow: Fairness conditions whose FAIL is waived.

    Raises:
        ConfigError: There is nothing to compare, or a name does not exist.
    """
    names = [dirs] if isinstance(dirs, str | Path) else dirs
    folders: dict[Path, set[str]] = {}
    for path in [folder for name in names for folder in folders_of(Path(name))]:
        study_folder, arm = _study_folder(path)
        folders.setdefault(study_folder, set()).add(arm)
    if not folders:
        raise ConfigError("there is nothing to compare", "no folders", "nexus-ablate compare runs/norms")
    studies = {folder: load(folder) for folder in folders}
    read = {}
    missing: dict[str, str] = {}
    no_result: NoResult | None = None
    for folder, chosen in folders.items():
        study = studies[folder]
        arms, left_out = arms_of(*read_folder(folder), study)
        if "" not in chosen:
            arms = [arm for arm in arms if arm.name in chosen or arm.name == (baseline or BASELINE)]
        try:
            base = _baseline(arms, study, left_out, baseline)
            read[folder] = base, [arm for arm in arms if arm is not base], left_out
        except NoResult as error:
            missing[folder.name.partition("@")[2] or folder.name] = error.got
            no_result = error
    if no_result is not None and not read:
        raise no_result
    for study in studies.values():
        for setting in study.settings if study else ():
            if all(folder.name.partition("@")[2] != setting for folder in folders):
                missing.setdefault(setting, "no run yet")
    cells = _cells(studies, {folder: others for folder, (_, others, _) in read.items()})
    level = sidak(LEVEL, cells)
    tables = []
    for folder, (base, others, left_out) in read.items():
        tables.append(_table(folder.name, studies[folder], base, others, left_out, level, cells, [*allow], baseline))
    return Comparison(tables, missing)


def _study_folder(path: Path) -> tuple[Path, str]:
    """The folder of a study or experiment that a path lies in, and the arm that it names; "" for all of them."""
    if (path / "status.json").exists():
        return path.parent.parent, path.parent.name
    is_arm = not (path / "study.yaml").exists() and any(path.glob("*/status.json"))
    return (path.parent, path.name) if is_arm else (path, "")


def _baseline(arms: list[Arm], study: Study | None, left_out: list[LeftOut], requested: str | None) -> Arm:
    """The baseline, which has a run.

    Raises:
        NoResult: It has none.
    """
    fix = "nexus-ablate status DIR shows what the runs do"
    if not any(arm.runs for arm in arms):
        states = [out.state or "no run" for out in left_out]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        raise NoResult("no run here has a result yet", counts or "no run has started", fix)
    base = baseline_of([arm for arm in arms if arm.name not in WORTH_ARMS], study, requested)
    if not base.runs:
        why = base.left_out[0].reason if base.left_out else "no run has started"
        raise NoResult(f"no run of the baseline {base.name} has a result that can be used", why, fix)
    return base


def _cells(studies: dict[Path, Study | None], others: dict[Path, list[Arm]]) -> int:
    """Words about differences that share the 5%: those planned in each study.yaml, or without one those printed."""
    planned: dict[str, int] = {}
    for folder, study in studies.items():
        name = study.name if study else folder.name
        planned[str(folder.with_name(name))] = study.cells if study else len(others.get(folder, []))
    return max(sum(planned.values()), 1)


def _table(
    name: str,
    study: Study | None,
    base: Arm,
    others: list[Arm],
    left_out: list[LeftOut],
    level: float,
    cells: int,
    allow: list[str],
    requested: str | None,
) -> Table:
    budgets = [arm for arm in others if arm.name in WORTH_ARMS]
    others = [arm for arm in others if arm.name not in WORTH_ARMS]
    seeds = sorted(base.runs)
    curve = loss_by_compute(base, budgets, seeds) if study is not None and study.worth else None
    endpoints = [
        with_margin(endpoint, base, curve) for endpoint in (study.endpoints if study else [Endpoint("val_loss")])
    ]
    for arm in others:
        for seed in arm.runs.keys() - base.runs.keys():
            left_out.append(arm.runs[seed].left_out(f"the baseline has no result at seed {seed}"))
    conditions = checks(base, others, study, endpoints, left_out, allow)
    is_exploratory = study is not None and (bool(study.added_seeds) or requested not in (None, BASELINE))
    tables, effects, lacking = [], {}, {}
    for endpoint in endpoints:
        rows = [Row(base, endpoint, seeds)]
        for arm in others:
            row, why = _row(arm, base, endpoint, level, conditions, is_exploratory, curve)
            rows.append(row)
            if row.effect is not None and endpoint is endpoints[0]:
                effects[arm.name] = row.effect
                if why:
                    lacking[arm.name] = why
        tables.append(rows)
    if effects:
        conditions.append(text_check(effects, lacking, base))
    return Table(name, study, tables[0], tables[1:], level, cells, conditions, [base, *others], left_out)


def with_margin(endpoint: Endpoint, base: Arm, curve: LossByCompute | None) -> Endpoint:
    """The endpoint with its smallest difference that matters as a number, where there is one."""
    if endpoint.compute:
        if curve is None:
            return endpoint
        return endpoint.with_margin(curve.margin(endpoint.compute), f"what {endpoint.delta_min} is worth")
    mean = base.mean(endpoint.name)
    if endpoint.delta_min == "auto" and endpoint.name in BY_WINDOW and mean:
        return endpoint.with_margin(DEFAULT_MARGIN * mean, "0.2% of the loss")
    return endpoint


def _row(
    arm: Arm,
    base: Arm,
    endpoint: Endpoint,
    level: float,
    conditions: list[Check],
    is_exploratory: bool,
    curve: LossByCompute | None,
) -> tuple[Row, str]:
    """The row of an arm, and why its interval lacks the error over evaluation text; "" where it does not."""
    shared = sorted(arm.runs.keys() & base.runs.keys())
    differences = arm.on_scale(endpoint, shared) - base.on_scale(endpoint, shared)
    is_pair = np.isfinite(differences)
    seeds, differences = [seed for seed, pair in zip(shared, is_pair, strict=True) if pair], differences[is_pair]
    broken = unfair(arm, conditions, endpoint)
    effect, lacking = None, ""
    if not broken or broken == [LEARNED]:
        by_block, shares, lacking = _by_block(arm, base, seeds, endpoint)
        effect = paired_effect(differences, level, by_block=by_block, shares=shares)
    is_identical = _is_identical(arm, base)
    counts = counts_of(arm, base)
    word = word_of(endpoint, effect, counts, broken, is_identical)
    row = Row(
        arm=arm,
        endpoint=endpoint,
        seeds=seeds,
        differences=differences,
        effect=effect,
        unfair=broken,
        word=word,
        qualifiers=qualifiers(word, counts, is_exploratory, is_early(arm, base)),
        sentence=sentence(word, endpoint, effect, counts, broken),
    )
    if effect is not None and word == INCONCLUSIVE:
        row = replace(row, needed=seeds_to_decide(effect, endpoint))
    if effect is not None and curve is not None and endpoint.name == "val_loss":
        pairs = [(arm.runs[seed], base.runs[seed]) for seed in seeds]
        is_same_machine = not any(unlike_machine(run, twin) for run, twin in pairs)
        row = replace(row, worth=worth_of(effect, arm, base, curve, is_same_machine))
    return row, lacking


def counts_of(arm: Arm, base: Arm) -> Counts:
    """How the runs of an arm and of the baseline ended."""
    return Counts(
        runs=len(arm.runs),
        failed=len(arm.failed),
        base_runs=len(base.runs),
        base_failed=len(base.failed),
        above_start=sum(run.ended_above_start for run in arm.runs.values()),
        waiting=len(arm.left_out),
    )


def _is_identical(arm: Arm, base: Arm) -> bool:
    """Whether every loss of an arm equals the baseline's to the last bit, at each seed that both have."""
    seeds = arm.runs.keys() & base.runs.keys()
    for seed in seeds:
        curves, base_curves = arm.runs[seed].curves, base.runs[seed].curves
        for losses, base_losses in ((curves.val, base_curves.val), (curves.train, base_curves.train)):
            if not len(losses) or not np.array_equal(losses, base_losses, equal_nan=True):
                return False
    return bool(seeds) and not arm.weights


def _by_block(arm: Arm, base: Arm, seeds: list[int], endpoint: Endpoint) -> tuple[Array | None, Array | None, str]:
    """Differences (seeds, blocks) by block of evaluation text, the blocks' shares of it, or why they are not known."""
    if endpoint.name not in BY_WINDOW:
        return None, None, f"{endpoint.name} is not recorded by window of text"
    first = base.runs[seeds[0]].windows if seeds else None
    for seed in seeds:
        for _, run in [*arm.runs_at(seed), *base.runs_at(seed)]:
            if run.windows is None or first is None:
                return None, None, f"losses by window of text not recorded (seed {seed})"
            if not np.array_equal(run.windows.places, first.places):
                return None, None, f"other windows of text (seed {seed})"
    if first is None:
        return None, None, ""
    blocks = len(first.shares)
    if blocks < FEWEST_BLOCKS:
        tokens = FEWEST_BLOCKS * BLOCK_WINDOWS * first.tokens // len(first.places)
        more = f"train.eval_tokens={tokens}" if tokens <= first.reach else "a longer text"
        return None, None, f"{blocks} blocks; {more} suffices"
    unit = 1.0
    if endpoint.name == "val_bpb":  # the same tokens everywhere: a constant times the loss
        unit = float(np.nanmean(base.values("val_bpb", seeds)) / np.nanmean(base.values("val_loss", seeds)))
    by_block = np.array([_losses_by_block(arm, seed) - _losses_by_block(base, seed) for seed in seeds])
    return unit * by_block, first.shares, ""


def _losses_by_block(arm: Arm, seed: int) -> Array:
    """(blocks,) at the arm's own best learning rate where it has one."""
    total = 0.0
    for weight, run in arm.runs_at(seed):
        assert run.windows is not None
        total = total + weight * run.windows.by_block
    return np.asarray(total)

"""From folders to a word: `compare` reads runs, groups them into arms and makes each row once, in `row_of`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nexus_ablate.comparison.arms import Arm, arms_of, baseline_of
from nexus_ablate.comparison.fairness import Check, checks, is_early, text_check, unfair, unlike_machine
from nexus_ablate.comparison.read import LeftOut, read_folder
from nexus_ablate.comparison.statistics import FEWEST_BLOCKS, LEVEL, Array, Effect, paired_effect, sidak
from nexus_ablate.comparison.verdict import (
    DIFFERENT,
    EXPLORATORY,
    INCONCLUSIVE,
    LEARNED,
    Counts,
    qualifiers,
    seeds_to_decide,
    sentence,
    word_of,
    word_of_interval,
)
from nexus_ablate.comparison.worth import LossByCompute, Worth, loss_by_compute, worth_of
from nexus_ablate.console import nearer
from nexus_ablate.data.batches import BLOCK_WINDOWS
from nexus_ablate.errors import ConfigError
from nexus_ablate.runs.naming import BASELINE
from nexus_ablate.runs.reading import find_runs, has_status
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
    def is_small(self) -> bool:
        """Whether a difference was found that lies wholly below the smallest one that matters."""
        return self.word in DIFFERENT and self.effect is not None and self.effect.within(self.endpoint.margin)

    @property
    def is_undecided(self) -> bool:
        """Whether more seeds could decide it: a word that failed runs keep back is none of seeds."""
        return _is_undecided(self.word, self.effect, self.endpoint)

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
        folder: Where the runs are; None for runs of another tool.
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
    folder: Path | None = None

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
        missing: By its folder's name, why a setting has no table.
    """

    tables: list[Table]
    missing: dict[str, str] = field(default_factory=dict)

    def name_of(self, table: Table) -> str:
        """The table's setting, unless tables are of several studies, whose settings may have one name: the folder's."""
        studies = {each.study.name if each.study else "" for each in self.tables}
        return table.setting if table.setting and len(studies) == 1 else table.name


class Folder(NamedTuple):
    """What was read of a folder: its study, arms (the baseline first) and what gives no result."""

    path: Path
    study: Study | None
    arms: list[Arm]
    left_out: list[LeftOut]


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
    places: dict[Path, set[str]] = {}
    for path in [folder for name in names for folder in folders_of(Path(name))]:
        place, arm = _study_folder(path)
        places.setdefault(place, set()).add(arm)
    if not places:
        raise ConfigError("there is nothing to compare", "no folders", "nexus-ablate compare runs/norms")
    studies = {place: load(place) for place in places}
    missing = {}
    for place, study in studies.items():
        if study is not None:
            names = [f"{study.name}@{setting}" for setting in study.settings]
            missing |= {name: "no run yet" for name in names if not place.with_name(name).exists()}
    folders, errors = [], []
    for place, chosen in places.items():
        try:
            folders.append(_read(place, studies[place], chosen, baseline))
        except NoResult as error:
            errors.append(error)
            missing[place.name] = error.got
    if not folders:
        raise errors[-1]
    cells = _cells(studies, folders)
    return Comparison([_table(folder, cells, baseline, [*allow]) for folder in folders], missing)


def _study_folder(path: Path) -> tuple[Path, str]:
    """The folder of a study or experiment that a path lies in, and the arm that it names; "" for all of them.

    Raises:
        ConfigError: It is a folder of such folders.
    """
    path = Path(os.path.abspath(path)) if path.exists() else path  # `.` has no name
    if has_status(path):
        return path.parent.parent, path.parent.name
    folders = sorted({run.parents[1] for run in find_runs([path])})
    if (path / "study.yaml").exists() or not folders:
        return path, ""
    if path.parent in folders:
        return path.parent, path.name
    if path not in folders and len(folders) > 1:
        fix = shlex.join(["nexus-ablate", "compare", *map(nearer, folders[:3])])
        raise ConfigError("these are several folders of runs, and each is compared by itself", nearer(path), fix)
    return path if path in folders else folders[0], ""


def _read(place: Path, study: Study | None, chosen: set[str], requested: str | None) -> Folder:
    """A folder with a baseline that has a run.

    Args:
        chosen: The arms to compare; "" stands for all of them.

    Raises:
        NoResult: Its baseline has none.
    """
    runs, unread = read_folder(place)
    arms, others = arms_of(runs, study)
    left_out = [*unread, *others]
    if "" not in chosen:
        chosen = {*chosen, requested or BASELINE, *WORTH_ARMS}
        arms = [arm for arm in arms if arm.name in chosen]
    fix = "nexus-ablate status DIR shows what the runs do"
    if not any(arm.runs for arm in arms):
        states = [out.state or "no run" for out in left_out]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        raise NoResult("no run here has a result yet", counts or "no run has started", fix)
    base = baseline_of([arm for arm in arms if arm.name not in WORTH_ARMS], requested)
    if not base.runs:
        reasons = [out.reason for out in left_out if out.arm == base.name]
        problem = f"no run of the baseline {base.name} has a result that can be used"
        raise NoResult(problem, (reasons or ["no run has started"])[0], fix)
    for arm in arms:
        if arm.name not in WORTH_ARMS:
            left_out += without_twin(arm, base)
    return Folder(place, study, [base, *(arm for arm in arms if arm is not base)], left_out)


def without_twin(arm: Arm, base: Arm) -> list[LeftOut]:
    """The runs of an arm at seeds at which the baseline has none."""
    alone = arm.runs.keys() - base.runs.keys()
    return [arm.runs[seed].left_out(f"the baseline has no result at seed {seed}") for seed in alone]


def _cells(studies: dict[Path, Study | None], folders: list[Folder]) -> int:
    """Words about differences that share the 5%: those planned in each study.yaml, or without one those printed."""
    planned: dict[str, int] = {}
    for place, study in studies.items():
        if study is not None:  # of one study in several settings once
            planned[str(place.with_name(study.name))] = study.cells
    printed = sum(len(folder.arms) - 1 for folder in folders if folder.study is None)
    return max(sum(planned.values()) + printed, 1)


@dataclass(frozen=True)
class Context:
    """What all rows of a table share.

    Attributes:
        beside: What stands beside every word of an interval.
        curve: The baseline's loss by compute, where it is known.
    """

    base: Arm
    conditions: list[Check]
    left_out: list[LeftOut]
    beside: tuple[str, ...] = ()
    curve: LossByCompute | None = None


def _table(folder: Folder, cells: int, requested: str | None, allow: list[str]) -> Table:
    study, left_out = folder.study, folder.left_out
    base, *others = [arm for arm in folder.arms if arm.name not in WORTH_ARMS]
    seeds = sorted(base.runs)
    curve = None
    if study is not None and study.worth and base.name == BASELINE:  # whose budgets those of worth are
        curve = loss_by_compute(base, [arm for arm in folder.arms if arm.name in WORTH_ARMS], study.seeds)
    planned = study.endpoints if study is not None else [Endpoint("val_loss")]
    endpoints = [with_margin(endpoint, base, curve) for endpoint in planned]
    conditions = checks(base, others, study, endpoints, left_out, allow)
    is_exploratory = study is not None and (bool(study.added_seeds) or requested not in (None, BASELINE))
    context = Context(base, conditions, left_out, (EXPLORATORY,) if is_exploratory else (), curve)
    level = sidak(LEVEL, cells)
    tables, effects, lacking = [], {}, {}
    for endpoint in endpoints:
        rows = [Row(base, endpoint, seeds)]
        for arm in others:
            shared, differences = pairs_of(arm, base, endpoint)
            by_block, shares, why = _by_block(arm, base, shared, endpoint)
            effect = paired_effect(differences, level, by_block=by_block, shares=shares)
            rows.append(row_of(context, arm, endpoint, shared, differences, effect))
            if rows[-1].effect is not None and endpoint is endpoints[0] and not endpoint.timed:
                effects[arm.name] = rows[-1].effect
                lacking |= {arm.name: why} if why else {}
        tables.append(rows)
    about_text = [text_check(effects, lacking, base)] if effects else []
    arms = [base, *others]
    conditions = conditions + about_text
    name = folder.path.name
    return Table(name, study, tables[0], tables[1:], level, cells, conditions, arms, left_out, folder.path)


def with_margin(endpoint: Endpoint, base: Arm, curve: LossByCompute | None) -> Endpoint:
    """The endpoint with its smallest difference that matters as a number, where there is one."""
    if endpoint.compute and curve is not None:
        return endpoint.with_margin(curve.margin(endpoint.compute), f"what {endpoint.delta_min} is worth")
    mean = base.mean(endpoint.name)
    if endpoint.delta_min == "auto" and endpoint.name in BY_WINDOW and mean:
        return endpoint.with_margin(DEFAULT_MARGIN * mean, "0.2% of the loss")
    return endpoint


def pairs_of(arm: Arm, base: Arm, endpoint: Endpoint) -> tuple[list[int], Array]:
    """The seeds at which arm and baseline both have a value, and (seeds,) their differences, arm minus baseline."""
    shared = sorted(arm.runs.keys() & base.runs.keys())
    differences = arm.on_scale(endpoint, shared) - base.on_scale(endpoint, shared)
    is_pair = np.isfinite(differences)
    return [seed for seed, pair in zip(shared, is_pair, strict=True) if pair], differences[is_pair]


def row_of(
    context: Context, arm: Arm, endpoint: Endpoint, seeds: list[int], differences: Array, effect: Effect | None
) -> Row:
    """The row of an arm: its word, its sentence and what it is worth."""
    base = context.base
    broken = unfair(arm, context.conditions, endpoint)
    is_identical = not endpoint.timed and not differences.any() and _is_identical(arm, base)
    if broken and not (is_identical and broken == [LEARNED]):
        effect = None
    waiting = [out for out in context.left_out if out.arm == arm.name and out.seed not in arm.runs]
    counts = Counts(
        runs=len(arm.runs),
        shared=len(arm.runs.keys() & base.runs.keys()),
        failed=len(arm.failed),
        base_runs=len(base.runs),
        base_failed=len(base.failed),
        above_start=sum(run.ended_above_start for run in arm.runs.values()),
        waiting=len(waiting),
    )
    word = word_of(endpoint, effect, counts, broken, is_identical)
    worth = None
    if effect is not None and context.curve is not None and endpoint.name == "val_loss":
        is_same_machine = not any(unlike_machine(arm.runs[seed], base.runs[seed]) for seed in seeds)
        worth = worth_of(effect, arm, base, context.curve, is_same_machine)
    return Row(
        arm=arm,
        endpoint=endpoint,
        seeds=seeds,
        differences=differences,
        effect=effect,
        worth=worth,
        unfair=broken,
        word=word,
        qualifiers=qualifiers(word, counts, context.beside, is_early(arm, base)),
        sentence=sentence(word, endpoint, effect, counts, broken),
        needed=seeds_to_decide(effect, endpoint) if effect and _is_undecided(word, effect, endpoint) else None,
    )


def _is_undecided(word: str, effect: Effect | None, endpoint: Endpoint) -> bool:
    return word == INCONCLUSIVE and effect is not None and word_of_interval(effect, endpoint) == INCONCLUSIVE


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
    if not seeds:
        return None, None, ""
    first = base.runs[seeds[0]].windows
    for seed in seeds:
        for _, runs in (*arm.counted, *base.counted):
            windows = runs[seed].windows
            if windows is None or first is None:
                return None, None, f"losses by window of text not recorded (seed {seed})"
            if not np.array_equal(windows.places, first.places):
                return None, None, f"other windows of text (seed {seed})"
    assert first is not None
    blocks = len(first.shares)
    if blocks < FEWEST_BLOCKS:
        tokens = FEWEST_BLOCKS * BLOCK_WINDOWS * first.tokens // len(first.places)
        more = f"train.eval_tokens={tokens}" if tokens <= first.reach else "a longer text"
        return None, None, f"{blocks} blocks; {more} suffices"
    unit = 1.0
    if endpoint.name == "val_bpb":  # the same tokens everywhere: a constant times the loss
        unit = float(np.nanmean(base.values("val_bpb", seeds)) / np.nanmean(base.values("val_loss", seeds)))
    by_block = []
    for seed in seeds:
        by_block.append(_losses_by_block(arm, seed) - _losses_by_block(base, seed))
    return unit * np.array(by_block), first.shares, ""


def _losses_by_block(arm: Arm, seed: int) -> Array:
    """(blocks,) at the arm's own best learning rate where it has one."""
    return arm.at_best(seed, lambda run: run.windows.by_block if run.windows else np.nan)

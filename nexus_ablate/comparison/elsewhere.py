"""Judging runs that were trained elsewhere: a table of results becomes arms, which are compared like our own."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from nexus_ablate.comparison.across_strata import changes
from nexus_ablate.comparison.arms import Arm
from nexus_ablate.comparison.curves import Curves
from nexus_ablate.comparison.fairness import checks
from nexus_ablate.comparison.learning_rates import CRITERION, best_lr, lr_points
from nexus_ablate.comparison.listed import FAILED, Listed, ListedEndpoint, Source, on_one_grid, refuse_duplicates
from nexus_ablate.comparison.load import Excluded, Trained
from nexus_ablate.comparison.results import Comparison, Stratum
from nexus_ablate.comparison.terms import NO_STUDY, Terms
from nexus_ablate.comparison.within_stratum import compared, unpaired
from nexus_ablate.console import several
from nexus_ablate.errors import ConfigError, did_you_mean, unknown
from nexus_ablate.measure.measures import Measure, measure_of
from nexus_ablate.runs import RunRecord
from nexus_ablate.study.endpoint import Endpoint, Margin


def endpoint_of(name: str, delta_min: Margin, better: str, runs: list[Listed]) -> Endpoint:
    """The endpoint of a table: a measure of this package, or one of the table's own.

    Raises:
        ConfigError: It is neither said nor known whether lower is better, or the unit is not the measure's.
    """
    known, unit = measure_of(name), runs[0].unit
    if known is None:
        if not better:
            raise ConfigError(
                "judge does not know this endpoint", name, f"--endpoint {name} --better lower (or higher)"
            )
        return ListedEndpoint(name, delta_min, own=Measure(name, unit, "as the source has it", ("summary",), better))
    if better and better != known.better:
        raise ConfigError(
            f"{name} is better {known.better or 'neither lower nor higher'}", better, "leave --better out"
        )
    if unit and known.unit and _first_word(unit) != _first_word(known.unit):
        fix = "--endpoint val_bpb for bits per byte, or convert the column"
        raise ConfigError(f"{name} is in {known.unit}", f"{unit} ({runs[0].where})", fix)
    return ListedEndpoint(name, delta_min, own=replace(known, floor=""))  # a table has no numbers of answers


def _first_word(text: str) -> str:
    return re.split(r"\W", text.strip().lower(), maxsplit=1)[0].rstrip("s")


def judged(
    source: Source,
    runs: list[Listed],
    endpoint: Endpoint,
    baseline: str | None,
    allow: Collection[str],
    tuning_seeds: Iterable[int],
    notes: Mapping[str, list[str]],
) -> Comparison:
    """The comparison of runs that were trained elsewhere, in each stratum by itself.

    Args:
        baseline: The arm that the others are compared with. None: the one called `baseline`.
        allow: Fairness conditions whose FAIL is waived.
        tuning_seeds: Seeds whose runs chose the learning rate of each arm. They are not judged.
        notes: Lines to show beside the verdicts, by stratum.

    Raises:
        ConfigError: There is no baseline, or nothing that could be judged.
    """
    chosen_by = set(tuning_seeds)
    if chosen_by:
        _require_tuning(runs, endpoint, chosen_by)
    if endpoint.log:
        for run in runs:
            if run.value is not None and run.value <= 0:
                fix = f"values above 0; `{FAILED[0]}` if the run failed to train, which counts"
                raise ConfigError(f"{run.where}: {endpoint.name} is compared by ratios", f"{run.value:g}", fix)
    strata: dict[str, list[Listed]] = {}
    for run in runs:
        strata.setdefault(run.stratum, []).append(run)
    tables = []
    for stratum, inside in strata.items():
        table = _table(source, stratum, inside, endpoint, baseline, allow, chosen_by, list(strata))
        table.regime += notes.get(stratum, [])
        tables.append(table)
    return Comparison(source.name, tables, changes(tables), None)


def _table(
    source: Source,
    stratum: str,
    runs: list[Listed],
    endpoint: Endpoint,
    baseline: str | None,
    allow: Collection[str],
    tuning_seeds: set[int],
    strata: list[str],
) -> Stratum:
    where, of = source.name, ""
    if stratum:
        where, of = f"{source.name}, stratum {stratum}", source.name
    excluded = [Excluded(Path(place), reason) for place, reason in source.left_out]
    excluded += [Excluded(Path(run.where), run.caution, run.arm, run.seed) for run in runs if run.unfair]
    fair = [run for run in runs if not run.unfair]
    if not fair:
        fix = "runs that are alike in what the caution names"
        raise ConfigError(f"no row of {where} may be compared", runs[0].caution, fix)
    fair, step, rounding = on_one_grid(fair)
    by_arm: dict[str, list[Listed]] = {}
    for run in fair:
        by_arm.setdefault(run.arm, []).append(run)
    base_name = _baseline(list(by_arm), baseline, where)
    arms = []
    for name, members in by_arm.items():
        arm = _arm(name, members, endpoint, tuning_seeds)
        arms.append(arm)
        unused = len(members) - len(arm.runs) - len(arm.tuning)
        if unused:
            reason = f"{several(unused, 'run')} at other learning rates than its best"
            excluded.append(Excluded(Path(name), reason, name))
    base = arms.pop(list(by_arm).index(base_name))
    if len(base.runs) < 2 or max(len(arm.runs) for arm in arms) < 2:
        counts = ", ".join(f"{arm.label} {len(arm.runs)}" for arm in (base, *arms))
        fix = "at least two seeds per arm; below five there are intervals and no verdict"
        raise ConfigError(f"{where}: with one run the noise between seeds is unknown", f"runs: {counts}", fix)
    is_paired = all(_shares_seeds(arm, base) for arm in arms)
    if is_paired:
        excluded += unpaired(base, arms)
    rates = sorted({rate for arm in (base, *arms) for rate in lr_points(arm.tuning)})
    tuned_on = sorted(tuning_seeds) if rates else []
    study = msgspec.structs.replace(
        NO_STUDY,
        question=where,
        stratum=stratum,
        of=of,
        all_strata=strata,
        share=1 / len(strata),
        endpoints=[endpoint],
        lr_grid=rates,
        tuning_seeds=tuned_on,
    )
    terms = Terms(
        study=study,
        endpoint=endpoint,
        exploratory=tuple(dict.fromkeys(run.caution for run in fair if run.caution)),
        is_listed=True,
        is_paired=is_paired,
        step=step,
        family=len({run.arm for run in runs}) - 1,  # arms that are not comparable have their share too
    )
    table = compared([base, *arms], terms, excluded, checks(base, arms, terms, excluded, allow))
    table.regime += [rounding] * bool(rounding)
    return table


def _require_tuning(runs: list[Listed], endpoint: Endpoint, tuning_seeds: set[int]) -> None:
    if endpoint.better != "lower":
        problem = "--tuning-seeds needs an endpoint of which lower is better"
        raise ConfigError(problem, endpoint.name, "leave --tuning-seeds out, and those rows")
    rows = [run for run in runs if run.seed in tuning_seeds]
    if lacking := next((run for run in rows if run.rate is None), None):
        problem = f"{lacking.where}: a run that chose a learning rate has none"
        raise ConfigError(problem, f"{lacking.arm}, seed {lacking.seed}", "a rate in every row of --tuning-seeds")
    if not rows:
        seeds = sorted({run.seed for run in runs})
        got = f"{', '.join(map(str, sorted(tuning_seeds)))}; the seeds are {', '.join(map(str, seeds[:12]))}"
        raise ConfigError("no row has a seed of --tuning-seeds", got, f"--tuning-seeds {seeds[-1]}")


def _baseline(names: list[str], requested: str | None, where: str) -> str:
    if requested is not None and requested not in names:
        if name := did_you_mean(requested, names):
            problem, fix = f"there is no arm of this name in {where}", f"--baseline {shlex.quote(name)}"
            raise ConfigError(problem, f"--baseline {requested}", fix)
        raise unknown(f"there is no arm of this name in {where}", requested, names, "--baseline {}")
    if requested is None and "baseline" not in names:
        fix = f"--baseline {shlex.quote(names[0])}"
        raise ConfigError(f"no arm of {where} is called baseline", ", ".join(names), fix)
    if len(names) < 2:
        raise ConfigError(f"{where} has one arm", names[0], "rows of a baseline and of the arms to compare with it")
    return requested or "baseline"


def _arm(name: str, runs: list[Listed], endpoint: Endpoint, tuning_seeds: set[int]) -> Arm:
    """The arm at its one learning rate, or at the one that its tuning runs chose.

    Raises:
        ConfigError: It has several learning rates, and nothing that chose one.
    """
    arm = Arm(name, name, {}, tuning=[_trained(run, endpoint) for run in runs if run.seed in tuning_seeds])
    rest = [run for run in runs if run.seed not in tuning_seeds]
    best = best_lr(arm)
    if best is not None:
        rest = [run for run in rest if run.rate == best]
        if not rest:
            fix = f"rows of {name} at the rate {best:g} with seeds that did not choose it"
            raise ConfigError("an arm has no run at its own best learning rate", f"{name}: {best:g}", fix)
    rates = sorted({run.rate for run in rest if run.rate is not None})
    if len(rates) > 1:
        got = f"{name}: {', '.join(map('{:g}'.format, rates))}"
        fix = "--tuning-seeds with the seeds that chose the rate; or one rate for each arm"
        raise ConfigError("an arm has several learning rates; the best on the same seeds would flatter it", got, fix)
    refuse_duplicates(rest, lambda run: run.seed)
    rest.sort(key=lambda run: run.seed)
    arm.runs = {run.seed: _trained(run, endpoint) for run in rest}
    return arm


def _trained(run: Listed, endpoint: Endpoint) -> Trained:
    state = "failed" if run.value is None else "finished"
    place = Path(run.where)
    record = RunRecord(place, "", run.arm, run.seed, 1, state, {}, {}, {"optim": {"lr": run.rate}}, None, None)
    figures = {endpoint.name: run.value, "tokens": run.tokens, "seconds": run.seconds}
    if endpoint.better == "lower":
        figures[CRITERION] = run.value  # learning rates are chosen by it
    if run.tokens and run.seconds:
        figures["tokens_per_second"] = run.tokens / run.seconds
    empty = np.array([])
    curves = Curves(empty, empty, empty, empty, empty, empty)
    return Trained(record, curves, {}, {name: value for name, value in figures.items() if value is not None})


def _shares_seeds(arm: Arm, base: Arm) -> bool:
    """Whether the seeds of one are all among those of the other, and at least two."""
    shared = arm.runs.keys() & base.runs.keys()
    return len(shared) == min(len(arm.runs), len(base.runs)) > 1 or len(arm.runs) == len(shared) == 1

"""Steps to a target loss, as speedruns count them: the log of a run becomes one number.

Beside the verdict stands the rule of the optimizer track of modded-nanogpt (github.com/KellerJordan/modded-nanogpt,
records/track_3_optimization): an arm passes at the first step at which (target - mean loss) sqrt(n) is 0.004 or more,
over its n runs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np

from nexus_ablate.comparison.listed import REQUIRED, Listed, ListedEndpoint, Source, rows_of
from nexus_ablate.console import several
from nexus_ablate.errors import ConfigError
from nexus_ablate.measure.measures import Measure, measure_of
from nexus_ablate.study.endpoint import Endpoint, Margin

RULE = 0.004


def steps_to_target(
    source: Source, name: str, columns: Mapping[str, str], target: float, better: str, delta_min: Margin
) -> tuple[list[Listed], Endpoint, dict[str, list[str]]]:
    """Each run with its steps to the target, the endpoint that they are, and the rule for each arm by stratum.

    Args:
        name: The loss, of which every row has one at a step.
        better: Of a loss that this package does not know: `lower`.
        delta_min: In steps.

    Raises:
        ConfigError: A run does not reach the target, its log has a step twice, or lower is not better.
    """
    known = measure_of(name)
    if (known.better if known else better) != "lower":
        raise ConfigError("--target is for a loss, of which lower is better", name, f"--endpoint {name} --better lower")
    logs: dict[tuple[str, str, int], list[Listed]] = defaultdict(list)
    for row in rows_of(source, name, columns, (*REQUIRED, "step")):
        logs[row.stratum, row.arm, row.seed].append(row)
    for log in logs.values():
        log.sort(key=lambda row: row.step or 0.0)
        for row, following in pairwise(log):
            if row.step == following.step:
                got = f"{row.where} and {following.where}: {row.arm}, seed {row.seed}, step {row.step:g}"
                raise ConfigError("two rows are of one run and one step", got, "one row per run and step")
    # without the steps of a run that does not reach the target, a mean over the others would flatter the arm
    lowest = {key: min(_losses(log)) for key, log in logs.items() if len(_losses(log)) == len(log)}
    worst = max(lowest, key=lowest.__getitem__, default=None)
    if worst is not None and lowest[worst] > target:
        _, arm, seed = worst
        got = f"{arm}, seed {seed}: {lowest[worst]:g} at the lowest"
        raise ConfigError(f"a run does not reach the loss {target:g}", got, f"--target {lowest[worst]:g}")
    by_arm: dict[tuple[str, str], list[list[Listed]]] = defaultdict(list)
    for (stratum, arm, _), log in logs.items():
        by_arm[stratum, arm].append(log)
    rules: dict[str, list[str]] = defaultdict(list)
    for (stratum, arm), arm_logs in by_arm.items():
        rules[stratum].append(f"modded-nanogpt's rule, {arm}: {_first_passing_step(arm_logs, target)}")
    measure = Measure(
        f"steps to {target:g}", "steps", "training steps until the loss is reached", ("summary",), "lower"
    )
    runs = [_run(log, target) for log in logs.values()]
    return runs, ListedEndpoint(measure.name, delta_min, own=measure), rules


def _losses(log: list[Listed]) -> list[float]:
    """The losses of a log; of a run that failed to train fewer than it has rows."""
    return [row.value for row in log if row.value is not None]


def _run(log: list[Listed], target: float) -> Listed:
    """The run with its steps to the target in place of a loss, between two rows by a straight line."""
    first = replace(log[0], tokens=None, seconds=None, unit="steps")
    steps, losses = [row.step or 0.0 for row in log], _losses(log)
    if len(losses) < len(log):
        return replace(first, value=None)
    if losses[0] <= target:
        return replace(first, value=steps[0], caution="logs that begin at or below the target")
    for (step, loss), (next_step, next_loss) in pairwise(zip(steps, losses, strict=True)):
        if next_loss <= target:
            return replace(first, value=step + (next_step - step) * (loss - target) / (loss - next_loss))
    raise AssertionError("every run reaches the target")


def _first_passing_step(runs: list[list[Listed]], target: float) -> str:
    """`(3.28 - mean) sqrt(20) is 0.0051 at step 2750, the first of 0.004 or more; 0.0033 at step 2745`."""
    losses: dict[float, list[float]] = defaultdict(list)
    for log in runs:
        for row in log:
            losses[row.step or 0.0].append(math.inf if row.value is None else row.value)
    steps = [step for step in sorted(losses) if len(losses[step]) == len(runs)]
    if not steps:
        return f"no step at which all of {several(len(runs), 'run')} have a loss"
    form = f"({target:g} - mean) sqrt({len(runs)})"
    before = ""
    for step in steps:
        statistic = (target - float(np.mean(losses[step]))) * math.sqrt(len(runs))
        if statistic >= RULE:
            return f"{form} is {statistic:.4f} at step {step:g}, the first of {RULE} or more{before}"
        before = f"; {statistic:.4f} at step {step:g}"
    return f"{form} is at no step {RULE} or more{before}"

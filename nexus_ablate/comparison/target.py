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
from operator import itemgetter
from typing import TYPE_CHECKING

from nexus_ablate.comparison.listed import REQUIRED, Listed, ListedEndpoint, Source, refuse_duplicates, rows_of
from nexus_ablate.console import several
from nexus_ablate.errors import ConfigError
from nexus_ablate.measure.measures import Measure, measure_of
from nexus_ablate.study.endpoint import Endpoint, Margin

if TYPE_CHECKING:
    import pandas

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
    import pandas

    known = measure_of(name)
    if (known.better if known else better) != "lower":
        raise ConfigError("--target is for a loss, of which lower is better", name, f"--endpoint {name} --better lower")
    rows = rows_of(source, name, columns, (*REQUIRED, "step"))
    what, fix = "one run and one step", "one row per run and step"
    refuse_duplicates(rows, lambda row: (row.stratum, row.arm, row.seed, row.step), what, fix)
    table = pandas.DataFrame(rows)
    table["value"] = table["value"].astype(float).fillna(math.inf)  # of a run that failed to train
    logs, lowest = [], []
    for _, log in table.groupby(["stratum", "arm", "seed"], sort=False):
        log = log.sort_values("step")
        run, steps, losses = rows[log.index[0]], log["step"].tolist(), log["value"].tolist()
        if max(losses) < math.inf:
            lowest.append((min(losses), f"{run.arm}, seed {run.seed}"))
        logs.append((run, steps, losses))
    # without the steps of a run that does not reach the target, a mean over the others would flatter the arm
    loss, worst = max(lowest, key=itemgetter(0), default=(target, ""))
    if loss > target:
        got = f"{worst}: {loss:g} at the lowest"
        raise ConfigError(f"a run does not reach the loss {target:g}", got, f"--target {loss:g}")
    rules: dict[str, list[str]] = defaultdict(list)
    for _, of_arm in table.groupby(["stratum", "arm"], sort=False):
        first = rows[of_arm.index[0]]
        rules[first.stratum].append(f"modded-nanogpt's rule, {first.arm}: {_first_passing_step(of_arm, target)}")
    measure = Measure(
        f"steps to {target:g}", "steps", "training steps until the loss is reached", ("summary",), "lower"
    )
    runs = [_run(first, steps, losses, target) for first, steps, losses in logs]
    return runs, ListedEndpoint(measure.name, delta_min, own=measure), rules


def _run(first: Listed, steps: list[float], losses: list[float], target: float) -> Listed:
    """The run with its steps to the target in place of a loss, between two rows by a straight line.

    Args:
        first: Its first row.
        losses: At the steps; infinite at one at which it had failed to train.
    """
    run = replace(first, value=None, tokens=None, seconds=None, unit="steps")
    if max(losses) == math.inf:
        return run
    end = next(place for place, loss in enumerate(losses) if loss <= target)
    if end == 0:
        cautions = filter(None, [first.caution, "logs that begin at or below the target"])
        return replace(run, value=steps[0], caution="; ".join(cautions))
    step, loss = steps[end - 1], losses[end - 1]
    return replace(run, value=step + (steps[end] - step) * (loss - target) / (loss - losses[end]))


def _first_passing_step(rows: pandas.DataFrame, target: float) -> str:
    """`(3.28 - mean) sqrt(20) is 0.0051 at step 2750, the first of 0.004 or more; 0.0033 at step 2745`."""
    losses = rows.pivot(index="step", columns="seed", values="value")
    runs = losses.shape[1]
    means = losses.dropna().mean(axis=1)
    if means.empty:
        return f"no step at which all of {several(runs, 'run')} have a loss"
    form = f"({target:g} - mean) sqrt({runs})"
    before = ""
    for step, statistic in ((target - means) * math.sqrt(runs)).items():
        if statistic >= RULE:
            return f"{form} is {statistic:.4f} at step {step:g}, the first of {RULE} or more{before}"
        before = f"; {statistic:.4f} at step {step:g}"
    return f"{form} is at no step {RULE} or more{before}"

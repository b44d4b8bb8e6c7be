"""The verdicts of `compare` for a table of results that were trained elsewhere."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path

import numpy as np

from nexus_ablate.comparison.arms import Arm
from nexus_ablate.comparison.compare import Comparison, Context, Row, Table, pairs_of, row_of, without_twin
from nexus_ablate.comparison.fairness import FAIL, PASS, TOLERANCE, WARN, Check, excluded, waived
from nexus_ablate.comparison.foreign import FAILED, Choice, Result, Source, check_choice, results_of
from nexus_ablate.comparison.read import Curves, Run
from nexus_ablate.comparison.statistics import LEVEL, paired_effect, sidak, welch_effect
from nexus_ablate.console import several
from nexus_ablate.errors import ConfigError
from nexus_ablate.measure.measures import BITS, NATS, Measure, find
from nexus_ablate.runs import RunRecord
from nexus_ablate.study.endpoint import DEFAULT_MARGIN, Endpoint
from nexus_ablate.study.study import FEWEST_SEEDS

ONE_TEXT = "for this evaluation text only"
"""What stands beside a word: a table has no losses by window of text."""
NOT_PROVEN = (
    "a table does not prove the same evaluation text, batches, code, schedules and tuning, nor a plan before it"
)
AMOUNTS = ("tokens", "steps", "step")
"""Columns of which all runs must have the same number."""
LARGEST_LOSS = 20.0
"""In nats or bits: far above that of a uniform guess among any vocabulary."""
MOST_DECIMALS = 10
"""A number with as many is not a rounded one."""
FINE = 1e-5
"""A step between values at which two runs do not end by chance."""


@dataclass(frozen=True)
class ForeignEndpoint(Endpoint):
    """An endpoint of a table: its measure may be one that this package doesn't know."""

    own: Measure = Measure("", "", "", ())

    @property
    def measure(self) -> Measure:
        return self.own

    @property
    def is_loss(self) -> bool:
        """Whether it is a cross-entropy, which has a sign and a size."""
        return self.unit in (NATS, BITS) and self.name.endswith(("loss", "bpb"))

    @property
    def is_cost(self) -> bool:
        """Whether it depends on no evaluation text, such as the steps to a loss."""
        return self.timed or self.name in AMOUNTS


def judge(source: Source, chosen: Choice) -> Comparison:
    """The comparison of a table's arms with its baseline.

    Raises:
        ConfigError: The table lacks what was chosen, or holds what is no result.
    """
    check_choice(source, chosen)
    endpoint = _endpoint(chosen)
    results, left_out = results_of(source, chosen)
    _check_values(results, endpoint, source, chosen)
    results, step = on_one_grid(results)
    names = dict.fromkeys([chosen.baseline, *(each.arm for each in [*results, *left_out] if each.arm.strip(","))])
    base, *others = [_arm(name, results, endpoint) for name in names]
    if not base.runs or not others:
        fix = "finished runs of a baseline and of other arms; --arm names the columns that tell arms apart"
        raise ConfigError(
            f"{source.name} has nothing to compare", f"{base.name}: {several(len(base.runs), 'run')}", fix
        )
    base_mean = base.mean(endpoint.name) or 0.0
    if endpoint.is_loss and chosen.delta_min is None:
        origin = "0.2% of the baseline's loss, by default"
        endpoint = replace(endpoint, delta_min=DEFAULT_MARGIN * base_mean, origin=origin)
    is_paired = all(len(arm.runs.keys() & base.runs.keys()) >= FEWEST_SEEDS for arm in others if arm.runs)
    seeds = Check("seeds", PASS, "paired by seed")
    if is_paired:
        for arm in others:
            left_out += without_twin(arm, base)
    else:
        text = f"fewer than {FEWEST_SEEDS} seeds in common with the baseline: Welch's test of unpaired runs"
        seeds = Check("seeds", WARN, text)
    rounding = f"values are rounded to {step:g}; " if step > FINE else ""
    conditions = [Check("source", WARN, source.note + rounding + NOT_PROVEN), *_repeats(results, step), seeds]
    if not endpoint.is_cost:
        conditions += _amounts(base, others)
    conditions = waived([*conditions, *excluded(left_out)], chosen.allow)
    context = Context(base, conditions, left_out, () if endpoint.is_cost else (ONE_TEXT,))
    level = sidak(LEVEL, len(others))
    step = step / abs(base_mean) if endpoint.log and base_mean else step
    rows = [Row(base, endpoint, [*base.runs])]
    for arm in others:
        if is_paired:
            shared, differences = pairs_of(arm, base, endpoint)
            effect = paired_effect(differences, level, step)
        else:
            shared, differences = [*arm.runs], np.array([])
            values, base_values = (each.on_scale(endpoint, [*each.runs]) for each in (arm, base))
            effect = welch_effect(values[np.isfinite(values)], base_values[np.isfinite(base_values)], level, step)
        rows.append(row_of(context, arm, endpoint, shared, differences, effect))
    return Comparison([Table(source.name, None, rows, [], level, len(others), conditions, [base, *others], left_out)])


def _endpoint(chosen: Choice) -> ForeignEndpoint:
    """The endpoint: a measure of this package, or with `better` one of the table's own."""
    measure = Measure(chosen.endpoint, "", "as the source has it", (), chosen.better)
    if not chosen.better:
        measure = replace(find(chosen.endpoint), floor="")  # a table has no numbers of answers
    return ForeignEndpoint(chosen.endpoint, chosen.delta_min or "auto", "declared with --delta-min", measure)


def _check_values(results: list[Result], endpoint: ForeignEndpoint, source: Source, chosen: Choice) -> None:
    """Refuse signs and sizes that a cross-entropy cannot have, and values without a logarithm that is needed.

    Raises:
        ConfigError: There is one.
    """
    largest = LARGEST_LOSS if endpoint.is_loss else np.inf
    for place, _, _, value, _ in results:
        if value > largest or (value <= 0 and (endpoint.is_loss or endpoint.log)):
            command = replace(chosen, better="higher" if value < 0 else "lower").command(source)
            fix = f"{command}, if it is no {endpoint.name}" if value else f"`{FAILED[0]}` if the run failed to train"
            raise ConfigError(f"{place}: {endpoint.name} cannot have this sign or size", f"{value:g}", fix)


def on_one_grid(results: list[Result]) -> tuple[list[Result], float]:
    """The results, as coarse as those of the arm that is rounded most, and the step between values.

    An arm at two decimals and one at five differ by up to half a step for no reason but rounding. Arms with too few
    runs for a word don't count: their last decimals may be zeros by chance.
    """
    decimals: dict[str, list[int]] = {}
    for result in results:
        exponent = Decimal(repr(result.value)).normalize().as_tuple().exponent
        if isinstance(exponent, int):  # not of NaN
            decimals.setdefault(result.arm, []).append(min(max(-exponent, 0), MOST_DECIMALS))
    known = [max(counts) for counts in decimals.values() if len(counts) >= FEWEST_SEEDS]
    fewest = min(known, default=MOST_DECIMALS)
    return [result._replace(value=round(result.value, fewest)) for result in results], 10.0**-fewest


def _arm(name: str, results: list[Result], endpoint: Endpoint) -> Arm:
    runs, empty = {}, np.array([])
    curves = Curves(empty, empty, empty, empty, empty)
    for place, arm, seed, value, amounts in sorted(results, key=lambda result: result.seed):
        if arm == name:
            state = "finished" if np.isfinite(value) else "diverged"
            record = RunRecord(Path(place), "", name, seed, 1, state, {}, {}, {}, None, None)
            runs[seed] = Run(record, curves, {}, {**amounts, endpoint.name: value}, {}, None)
    return Arm(name, runs=runs)


def _repeats(results: list[Result], step: float) -> list[Check]:
    """Runs of one arm that end at the same number are copies, unless it is rounded."""
    counts = Counter((result.arm, result.value) for result in results if np.isfinite(result.value))
    arms = dict.fromkeys(arm for (arm, _), count in counts.items() if count > 1)
    text = f"runs of different seeds end at the same number to the last digit: {', '.join(arms)}"
    return [Check("repeats", WARN, text)] if arms and step <= FINE else []


def _amounts(base: Arm, others: list[Arm]) -> list[Check]:
    """Whether all runs have the same tokens and steps, as far as columns say so."""
    texts, known = {}, False
    for name in AMOUNTS:
        base_amounts = base.values(name, [*base.runs])
        if not np.isfinite(base_amounts).any():
            continue
        known = True
        for arm in (base, *others):
            shares = arm.values(name, [*arm.runs]) / np.nanmedian(base_amounts) - 1
            for share in shares[np.abs(shares) > TOLERANCE["tokens"]]:
                texts[arm.name] = f"{arm.name} {share:+.1%} {name}"
    if texts:
        arms = [arm.name for arm in others] if base.name in texts else [*texts]
        return [Check("tokens", FAIL, ", ".join(texts.values()), tuple(arms))]
    return [Check("tokens", PASS, "the same number of tokens")] if known else []

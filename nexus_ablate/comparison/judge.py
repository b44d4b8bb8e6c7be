"""The verdicts of `compare` for a table of results that were trained elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path

import numpy as np

from nexus_ablate.comparison.arms import Arm
from nexus_ablate.comparison.compare import Comparison, Row, Table, counts_of
from nexus_ablate.comparison.read import Curves
from nexus_ablate.comparison.fairness import FAIL, PASS, TOLERANCE, WAIVED, WARN, Check, unfair
from nexus_ablate.comparison.foreign import FAILED, Choice, Frame, Source, check_choice, runs_of
from nexus_ablate.comparison.read import LeftOut, Run
from nexus_ablate.comparison.statistics import LEVEL, paired_effect, sidak, welch_effect
from nexus_ablate.comparison.verdict import INCONCLUSIVE, WEIGHED, qualifiers, seeds_to_decide, sentence, word_of
from nexus_ablate.console import several
from nexus_ablate.errors import ConfigError, unknown
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
MANY_DIGITS = 6
"""Digits that two runs do not share by chance."""


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
    runs, left_out = runs_of(source, chosen)
    _check_values(runs, endpoint, source, chosen)
    checks = [Check("source", WARN, source.note + NOT_PROVEN), *_repeats(runs)]
    step, rounding = on_one_grid(runs)
    if rounding:
        checks.append(Check("rounding", WARN, rounding))
    names = dict.fromkeys([*runs["arm"], *(out.arm for out in left_out if out.arm)])
    arms = {name: _arm(name, runs[runs["arm"] == name], left_out, endpoint) for name in names}
    base = arms.pop(chosen.baseline)
    others = [*arms.values()]
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
    if is_paired:
        checks.append(Check("seeds", PASS, "paired by seed"))
        for arm in others:
            alone = arm.runs.keys() - base.runs.keys()
            left_out += [arm.runs[seed].left_out(f"the baseline has no result at seed {seed}") for seed in alone]
    else:
        text = f"fewer than {FEWEST_SEEDS} seeds in common with the baseline: Welch's test of unpaired runs"
        checks.append(Check("seeds", WARN, text))
    checks += [] if endpoint.is_cost else _amounts(runs, base.name, [*arms])
    if left_out:
        checks.append(Check("excluded", WARN, f"{several(len(left_out), 'run')} left out, listed with the reason"))
    for name in chosen.allow:
        if name not in [check.name for check in checks]:
            raise unknown("there is no fairness condition of this name", name, [check.name for check in checks])
    checks = [replace(c, status=WAIVED) if c.status == FAIL and c.name in chosen.allow else c for c in checks]
    level = sidak(LEVEL, len(others))
    step = step / abs(base_mean) if endpoint.log and base_mean else step
    rows = [Row(base, endpoint, [*base.runs])]
    rows += [_row(arm, base, endpoint, level, checks, is_paired, step) for arm in others]
    return Comparison([Table(source.name, None, rows, [], level, len(others), checks, [base, *others], left_out)])


def _endpoint(chosen: Choice) -> ForeignEndpoint:
    """The endpoint: a measure of this package, or with `better` one of the table's own."""
    measure = Measure(chosen.endpoint, "", "as the source has it", (), chosen.better)
    if not chosen.better:
        measure = replace(find(chosen.endpoint), floor="")  # a table has no numbers of answers
    return ForeignEndpoint(chosen.endpoint, chosen.delta_min or "auto", "declared with --delta-min", measure)


def _check_values(runs: Frame, endpoint: ForeignEndpoint, source: Source, chosen: Choice) -> None:
    """Refuse signs and sizes that a cross-entropy cannot have, and values without a logarithm that is needed."""
    values = runs["value"]
    is_bad = (values <= 0) & (endpoint.is_loss or endpoint.log) | (values > LARGEST_LOSS) & endpoint.is_loss
    for place, value in values[is_bad].items():
        command = replace(chosen, better="higher" if value < 0 else "lower").command(source)
        fix = f"{command}, if it is no {endpoint.name}" if value else f"`{FAILED[0]}` if the run failed to train"
        raise ConfigError(f"{place}: {endpoint.name} cannot have this sign or size", f"{value:g}", fix)


def on_one_grid(runs: Frame) -> tuple[float, str]:
    """Make all values as coarse as those of the arm that is rounded most; returns the step between them, and a line.

    An arm at two decimals and one at five differ by up to half a step for no reason but rounding. Arms with too few
    runs for a word don't count: their last decimals may be zeros by chance. The line is "" where nothing was rounded.
    """
    finite = runs[runs["value"].notna()]
    by_arm = finite["value"].map(_decimals).groupby(finite["arm"]).agg(["max", "size"])
    known = by_arm["max"][by_arm["size"] >= FEWEST_SEEDS]
    finest = int(by_arm["max"].max()) if len(finite) else 0
    fewest = int(known.min()) if len(known) else finest
    step = 10.0**-fewest
    if fewest == finest:
        return step, ""
    runs["value"] = runs["value"].round(fewest)
    return step, f"all values are rounded to {step:g}, as those of {known.idxmin()} are"


def _decimals(value: float) -> int:
    """Decimals up to the last that is not 0: 2 for 3.28, 0 for 85.0, and no more than those of an unrounded number."""
    exponent = Decimal(repr(value)).normalize().as_tuple().exponent
    return min(max(-int(exponent), 0), MOST_DECIMALS)


def _arm(name: str, rows: Frame, left_out: list[LeftOut], endpoint: Endpoint) -> Arm:
    runs = {}
    empty = np.array([])
    for place, row in rows.sort_values("seed").iterrows():
        figures = {figure: row[figure] for figure in rows.columns.intersection([*AMOUNTS, "seconds"])}
        figures[endpoint.name] = row["value"]
        state = "finished" if np.isfinite(row["value"]) else "diverged"
        record = RunRecord(Path(str(place)), "", name, row["seed"], 1, state, {}, {}, {}, None, None)
        runs[row["seed"]] = Run(record, Curves(empty, empty, empty, empty, empty, empty), {}, figures, {}, None)
    return Arm(name, runs=runs, left_out=[out for out in left_out if out.arm == name])


def _row(
    arm: Arm, base: Arm, endpoint: ForeignEndpoint, level: float, checks: list[Check], is_paired: bool, step: float
) -> Row:
    shared = sorted(arm.runs.keys() & base.runs.keys()) if is_paired else []
    differences = arm.on_scale(endpoint, shared) - base.on_scale(endpoint, shared)
    is_pair = np.isfinite(differences)
    effect = paired_effect(differences[is_pair], level, step)
    if not is_paired:
        values, base_values = (each.on_scale(endpoint, [*each.runs]) for each in (arm, base))
        effect = welch_effect(values[np.isfinite(values)], base_values[np.isfinite(base_values)], level, step)
    broken = unfair(arm, checks, endpoint)
    effect = None if broken else effect
    counts = counts_of(arm, base)
    word = word_of(endpoint, effect, counts, broken, is_identical=False)
    beside = qualifiers(word, counts, is_exploratory=False, is_early=False)
    if word in WEIGHED and not endpoint.is_cost:
        beside = (*beside, ONE_TEXT)
    return Row(
        arm=arm,
        endpoint=endpoint,
        seeds=[seed for seed, pair in zip(shared, is_pair, strict=True) if pair] if is_paired else [*arm.runs],
        differences=differences[is_pair],
        effect=effect,
        unfair=broken,
        word=word,
        qualifiers=beside,
        sentence=sentence(word, endpoint, effect, counts, broken),
        needed=seeds_to_decide(effect, endpoint) if effect is not None and word == INCONCLUSIVE else None,
    )


def _repeats(runs: Frame) -> list[Check]:
    """Runs of one arm that end at the same number are copies, if it has many digits."""
    digits = runs["value"].map(lambda value: len(Decimal(repr(value)).normalize().as_tuple().digits))
    exact = runs[digits >= MANY_DIGITS]
    arms = exact["arm"][exact.duplicated(["arm", "value"])].unique()
    text = f"runs of different seeds end at the same number to the last digit: {', '.join(arms)}"
    return [Check("repeats", WARN, text)] if len(arms) else []


def _amounts(runs: Frame, baseline: str, others: list[str]) -> list[Check]:
    """Whether all runs have the same tokens and steps, as far as columns say so."""
    finished = runs[runs["value"].notna()]
    texts = {}
    known = [name for name in AMOUNTS if name in finished and finished[name].notna().any()]
    for name in known:
        shares = finished[name] / finished[name][finished["arm"] == baseline].median() - 1
        is_unlike = shares.abs() > TOLERANCE["tokens"]
        for arm, share in zip(finished["arm"][is_unlike], shares[is_unlike], strict=True):
            texts[arm] = f"{arm} {share:+.1%} {name}"
    if texts:
        arms = others if baseline in texts else [*texts]
        return [Check("tokens", FAIL, ", ".join(texts.values()), tuple(arms))]
    return [Check("tokens", PASS, "the same number of tokens")] if known else []

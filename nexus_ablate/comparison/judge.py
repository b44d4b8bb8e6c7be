"""The verdicts of `compare` for a table of results that were trained elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from nexus_ablate.comparison.arms import Arm
from nexus_ablate.comparison.compare import Comparison, Context, Row, Table, pairs_of, row_of, without_twin
from nexus_ablate.comparison.fairness import FAIL, PASS, TOLERANCE, WARN, Check, excluded, waived
from nexus_ablate.comparison.foreign import AMOUNTS, Choice, Frame, Source, refuse, results_of, table_of
from nexus_ablate.comparison.read import Curves, Run
from nexus_ablate.comparison.statistics import LEVEL, paired_effect, sidak, welch_effect
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
UNPAIRED = f"fewer than {FEWEST_SEEDS} seeds in common with the baseline: Welch's test of unpaired runs"
LARGEST_LOSS = 20.0
"""In nats or bits: far above that of a uniform guess among any vocabulary."""
MOST_DECIMALS = 10
"""A number with as many is not a rounded one."""
FINE = 1e-5
"""A step between values at which two runs do not end by chance."""
EMPTY = np.array([])


@dataclass(frozen=True)
class ForeignEndpoint(Endpoint):
    """An endpoint of a table.

    Attributes:
        declared: `lower` or `higher` for a measure of the table's own; "" for one of this package.
    """

    declared: str = ""

    @property
    def measure(self) -> Measure:
        if self.declared:
            return Measure(self.name, "", "as the source has it", (), self.declared)
        return replace(find(self.name), floor="")  # a table has no numbers of answers


def judge(source: Source, chosen: Choice) -> Comparison:
    """The comparison of a table's arms with its baseline.

    Raises:
        ConfigError: The table lacks what was chosen, or holds what is no result.
    """
    table = table_of(source, chosen)
    results, left_out = results_of(source.name, table, chosen)
    endpoint = ForeignEndpoint(chosen.endpoint, chosen.delta_min or "auto", "declared with --delta-min", chosen.better)
    decimals = _decimals(results.set_index("arm")[endpoint.name].dropna())
    step = 10.0**-decimals
    results = results.round({endpoint.name: decimals})
    base = _arm(chosen.baseline, results, endpoint)
    names = table["arm"].unique()
    others = [_arm(name, results, endpoint) for name in names if name != base.name and name.strip(",")]
    if not base.runs or not others:
        fix = "finished runs of a baseline and of other arms; --arm names the columns that tell arms apart"
        raise ConfigError(f"{source.name} has nothing to compare", f"arms {', '.join(names)}", fix)
    is_loss = endpoint.unit in (NATS, BITS) and endpoint.name.endswith(("loss", "bpb"))
    values = results[endpoint.name]
    command = replace(chosen, better="higher" if values.min() < 0 else "lower").command(source)
    fix = f"{command}, if it is no {endpoint.name}; `failed` if the run failed to train"
    impossible = (values <= 0) & (is_loss or endpoint.log) | (values > LARGEST_LOSS) & is_loss
    refuse(values, impossible, f"{endpoint.name} cannot have this sign or size", fix)
    mean = base.mean(endpoint.name) or 1.0
    if is_loss and not chosen.delta_min:
        endpoint = endpoint.with_margin(DEFAULT_MARGIN * mean, "0.2% of the loss")
    is_paired = all(len(arm.runs.keys() & base.runs.keys()) >= FEWEST_SEEDS for arm in others if arm.runs)
    for arm in others if is_paired else ():
        left_out += without_twin(arm, base)
    rounding = f"values are rounded to {step:g}; " if step > FINE else ""
    seeds = Check("seeds", PASS, "paired by seed") if is_paired else Check("seeds", WARN, UNPAIRED)
    conditions = [Check("source", WARN, source.note + rounding + NOT_PROVEN), seeds, *excluded(left_out)]
    finished = results.dropna(subset=endpoint.name)
    twice = finished["arm"][finished.duplicated(["arm", endpoint.name])].unique()
    if len(twice) and not rounding:
        text = f"different seeds end at the same number to the last digit: {', '.join(twice)}"
        conditions.append(Check("repeats", WARN, text))
    is_cost = endpoint.timed or endpoint.name in AMOUNTS  # which depends on no text
    if not is_cost:
        conditions += _amounts(finished, base.name)
    conditions = waived(conditions, chosen.allow)
    context = Context(base, conditions, left_out, () if is_cost else (ONE_TEXT,))
    level = sidak(LEVEL, len(others))
    if endpoint.log:
        step /= mean
    base_values = base.on_scale(endpoint, [*base.runs.keys() - base.failed])
    rows = [Row(base, endpoint, [*base.runs])]
    for arm in others:
        pairs, differences = pairs_of(arm, base, endpoint)
        effect = paired_effect(differences, level, step)
        if not is_paired:
            values = arm.on_scale(endpoint, [*arm.runs.keys() - arm.failed])
            effect = welch_effect(values, base_values, level, step)
        rows.append(row_of(context, arm, endpoint, pairs, differences, effect))
    return Comparison([Table(source.name, None, rows, [], level, len(others), conditions, [base, *others], left_out)])


def _decimals(values: Frame) -> int:
    """The decimals of the arm that is rounded most.

    An arm at two decimals and one at five differ by up to half a step for no reason but rounding. Arms with too few
    runs for a word don't count, since their last decimals may be zeros by chance, nor does one whose runs all end at
    one value: at 1.0, or beside an arm whose runs differ.

    Args:
        values: The endpoint by arm.
    """
    arms = values.groupby("arm")
    has_seeds = arms.count() >= FEWEST_SEEDS
    counts = has_seeds & (arms.nunique() > 1)
    if not counts.any():
        counts = has_seeds & (arms.first() % 1 != 0)
    for decimals in range(MOST_DECIMALS):
        is_rounded = (values.round(decimals) == values).groupby("arm").all()
        if (is_rounded & counts).any():
            return decimals
    return MOST_DECIMALS


def _arm(name: str, results: Frame, endpoint: Endpoint) -> Arm:
    curves = Curves(EMPTY, EMPTY, EMPTY, EMPTY, EMPTY)
    runs = {}
    for place, row in results[results["arm"] == name].iterrows():
        figures = row.drop(["arm", "seed"]).dropna().to_dict()
        state = "finished" if endpoint.name in figures else "diverged"
        record = RunRecord(Path(place), "", name, row["seed"], 1, state, {}, {}, {}, None, None)
        runs[record.seed] = Run(record, curves, {}, figures, {}, None)
    return Arm(name, runs=runs)


def _amounts(finished: Frame, baseline: str) -> list[Check]:
    """Whether all runs have the baseline's tokens and steps, as far as columns say so."""
    amounts = finished.set_index("arm").filter(["tokens", "steps", "step"])
    usual = amounts[amounts.index == baseline].median()
    shares = (amounts / usual - 1).stack(future_stack=True)
    unlike = shares[shares.abs() > TOLERANCE["tokens"]]
    texts = {arm: f"{arm} {share:+.1%} {name}" for (arm, name), share in unlike.items()}
    arms = finished["arm"].unique() if baseline in texts else texts
    return [Check("tokens", FAIL, ", ".join(texts.values()), tuple(arms))] if texts else []

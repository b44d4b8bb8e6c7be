"""The comparison of the arms of one stratum: directories of runs become a `Stratum` with every number."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import msgspec
import numpy as np

from nexus_ablate.comparison.arms import Arm, NoResult, against_baseline, group
from nexus_ablate.comparison.budget import regime_lines
from nexus_ablate.comparison.curves import AXES, at_equal, log_token_ratio
from nexus_ablate.comparison.differences import consequences, differing
from nexus_ablate.comparison.failures import rising
from nexus_ablate.comparison.fairness import MISMATCH_FAIL, Check, checks
from nexus_ablate.comparison.judging import EXACT, judge, spread
from nexus_ablate.comparison.learning_rates import at_own_rate, best_lr, beyond_edge, joined, lr_points, lr_sensitivity
from nexus_ablate.comparison.load import Excluded, collect
from nexus_ablate.comparison.results import ArmResult, Interaction, Secondary, Stratum
from nexus_ablate.comparison.statistics import Array, Interval, interaction, mean_interval
from nexus_ablate.comparison.terms import Terms, amendment_lines
from nexus_ablate.comparison.text_sample import check_text
from nexus_ablate.comparison.verdict import FAILS, NOT_COMPARABLE
from nexus_ablate.console import several
from nexus_ablate.errors import unknown
from nexus_ablate.runs.naming import BASELINE
from nexus_ablate.study.endpoint import Endpoint

SHOWN = ("train_loss", "generalization_gap")
"""Figures that are shown beside diagnostics and evaluations, whose names have a slash."""
SPIKES = "spike_score/train/loss"
"""In summary.json, where more than 128 losses were logged after warm-up."""


def compare_stratum(
    dirs: str | Path | Iterable[str | Path],
    baseline: str | None = None,
    allow: Iterable[str] = (),
    arm: str | None = None,
) -> Stratum:
    """Compare every run in the given directories with a baseline.

    Args:
        dirs: Runs, arms, studies or a runs_dir, in any mixture, also while runs are training.
        baseline: The arm to compare with. Default: the study's, or the one called `baseline`.
        allow: Fairness conditions whose FAIL is waived.
        arm: Show this arm alone, against `baseline`.

    The intervals of a direct comparison, of one arm or against another baseline than the study's, are those of all
    pairs of arms together, since any of them could have been picked after seeing the table.

    Raises:
        ConfigError: There is nothing to compare, or a name does not exist.
        NoResult: The baseline has no result yet.
    """
    paths = [dirs] if isinstance(dirs, str | Path) else dirs
    collection = collect(Path(path) for path in paths)
    arms, duplicates = group(collection)
    arms, excluded = joined(arms, collection.excluded + duplicates, collection.terms)
    base, others, terms = against_baseline(arms, excluded, collection.terms, baseline)
    base, *others = [at_own_rate(each) for each in (base, *others)]
    shown = [other for other in others if arm in (None, other.name, other.label)]
    if arm is not None and not shown:
        raise unknown("there is no other arm of this name", arm, [other.label for other in others])
    if arm is not None or (terms.name and base.name != BASELINE):
        terms = _direct(terms, len(others), arm is not None)
    unplanned = sorted(base.runs.keys() - {*terms.study.seeds})
    if terms.name and unplanned and not terms.study.looks:  # more could have been trained until one liked the result
        reason = f"{several(len(unplanned), 'seed')} that the study does not have ({', '.join(map(str, unplanned))})"
        terms = replace(terms, exploratory=(*terms.exploratory, reason))
    if not base.runs:
        fix = "nexus-ablate status DIR shows what it does"
        if base.rates:
            fix = "run the study's command again: it trains every arm at its best learning rate and beside it"
            if any(run.state == "failed" for run in base.waiting):
                fix = f"nexus-ablate study {terms.place} --retry failed"
        raise NoResult("the baseline has no result yet", f"{base.label}, no run that counts", fix)
    excluded += unpaired(base, shown)
    conditions = checks(base, shown, terms, excluded, tuple(allow))
    copies = [
        replace(base, label=" ".join(equal.overrides), waiting=[], tuning=[])
        for equal in terms.study.equal
        if equal.arm == base.name
    ]
    return compared([base, *shown, *copies], terms, excluded, conditions)


def _direct(terms: Terms, others: int, is_alone: bool) -> Terms:
    """The terms of a comparison that the study did not plan: of one arm, or against another baseline."""
    count = max(others, len(terms.study.arms))
    reasons = list(terms.exploratory)
    if terms.study.looks:
        reasons.append("arms were compared directly whose seeds the looks of the study chose")
    # what the study expects is about differences to its own baseline
    changes = {"looks": [], "look_weights": [], "claim": "", "expects": []}
    if is_alone:
        changes |= {"endpoints": terms.study.endpoints[:1], "equal": [], "refused": []}
    study = msgspec.structs.replace(terms.study, **changes)
    return replace(terms, study=study, family=count * (count + 1) // 2, exploratory=tuple(reasons))


def compared(arms: list[Arm], terms: Terms, excluded: list[Excluded], conditions: list[Check]) -> Stratum:
    """The comparison of some arms, the baseline first.

    Args:
        conditions: Of fairness, to which the one on the evaluation text is added where the runs are our own.
    """
    base, study = arms[0], terms.study
    judgement = judge(arms, conditions, terms)
    rows = judgement.results
    _describe(rows, arms, terms)
    regime, together = [], []
    if not terms.is_listed:
        conditions.append(check_text(base, rows, judgement.texts))
        regime = regime_lines(base)
    if terms.is_paired:
        together = _interactions(arms, rows)
    secondary = [_secondary(endpoint, arms, conditions, terms) for endpoint in terms.secondary]
    equal = [(" ".join(equal.overrides), equal.arm) for equal in study.equal]
    refused = [(" ".join(refused.overrides), refused.reason) for refused in study.refused]
    return Stratum(
        question=study.question,
        study=terms.name,
        baseline=base.label,
        endpoint=terms.endpoint,
        match=study.match,
        seed_sd=rows[0].sd,
        comparisons=judgement.comparisons,
        looks=tuple(study.looks),
        look=judgement.look,
        undecided=judgement.undecided,
        exploratory=terms.exploratory,
        checks=conditions,
        rows=rows,
        together=together,
        secondary=secondary,
        tuning_runs=sum(len(arm.tuning) for arm in arms),
        excluded=excluded,
        amendments=amendment_lines(study),
        equal=equal,
        refused=refused,
        regime=regime,
        arms=arms,
        terms=terms,
    )


def unpaired(base: Arm, others: list[Arm]) -> list[Excluded]:
    """The runs at seeds at which the baseline has none."""
    return [
        Excluded(run.record.path, f"the baseline has no result at seed {seed}", arm.name, seed, run.record.state)
        for arm in others
        for seed, run in arm.runs.items()
        if seed not in base.runs
    ]


def _secondary(endpoint: Endpoint, arms: list[Arm], conditions: list[Check], terms: Terms) -> Secondary:
    """An endpoint judged like the primary one. Arms of which the study expects nothing have no word of a difference."""
    here = [expectation for expectation in terms.study.expects if expectation.endpoint == endpoint.name]
    expected = {expectation.arm for expectation in here if expectation.expected not in ("trains", "fails")}
    rows = judge(arms, conditions, replace(terms, endpoint=endpoint)).results
    for row in rows:
        row.is_primary = False
        if row.name not in expected and row.word not in (NOT_COMPARABLE, *FAILS):
            row.verdict = None
    return Secondary(endpoint, rows)


def _describe(rows: list[ArmResult], arms: list[Arm], terms: Terms) -> None:
    """Fill in what does not depend on the endpoint: costs, stability, learning rates, diagnostics, and the curves."""
    base, base_row = arms[0], rows[0]
    sd = spread(_counted_losses(base, base_row))
    for row, arm in zip(rows, arms, strict=True):
        row.tokens_per_second = arm.mean("tokens_per_second")
        row.peak_memory_bytes = arm.mean("peak_memory_bytes")
        row.params = arm.mean("params")
        row.params_share = _share(row.params, base.mean("params"))
        row.flops_share = _share(arm.mean("flops_per_token"), base.mean("flops_per_token"))
        shares = [run.figures[SPIKES] for run in arm.runs.values() if SPIKES in run.figures]
        row.spike_score = float(np.mean(shares)) if shares else None
        row.rising = sum(rising(run) for run in arm.runs.values())
        row.lr = arm.lr if arm.runs else None
        row.best_lr = arm.best_rate or best_lr(arm)
        row.lr_edge = bool(beyond_edge(arm))
        row.lr_sensitivity = lr_sensitivity(arm)
        row.lr_curve = lr_points(arm.tuning)
        row.claim_curve = lr_points(arm.claim_runs if arm.rates else [])
        for name in dict.fromkeys(name for run in arm.runs.values() for name in run.figures):
            mean = arm.mean(name) if "/" in name or name in SHOWN else None
            if mean is not None:
                row.figures[name] = mean, spread(arm.values(name, row.seeds))
        if arm.runs:
            row.requested = differing(arm.config, base.config)
            row.followed = consequences(arm.config, base.config)
        row.notes = _notes(row, arm, base, terms)
        if row is base_row:
            continue
        if not row.unfair_runs and row.word not in FAILS:
            _compare_curves(row, arm, base, {*row.failed, *base_row.failed})
        # three times the baseline's spikes, and more than one in a thousand rows
        row.spiky = (row.spike_score or 0.0) > 3 * max(base_row.spike_score or 0.0, 0.001)
        if row.effect is not None and sd and sd > EXACT:  # equal logits differ in their last bit
            row.delta_over_sd = row.effect.delta / sd


def _share(value: float | None, baseline: float | None) -> float | None:
    return value / baseline - 1 if value and baseline else None


def _notes(row: ArmResult, arm: Arm, base: Arm, terms: Terms) -> list[str]:
    """What an arm changes besides the requested overrides, how it was matched, and how much larger it is."""
    base_notes = (base.config.get("resolved") or {}).get("notes") or []
    arm_notes = (arm.config.get("resolved") or {}).get("notes") or []
    notes = [note for note in arm_notes if note not in base_notes]
    for planned in terms.study.arms:
        if planned.name == arm.name and planned.match:
            how = f"by {' '.join(planned.match.solved)}" if planned.match.solved else "without a change"
            notes.append(f"matched {planned.match.kind} {how}, {planned.match.residual:+.2%} left")
    params, flops = row.params_share or 0.0, row.flops_share or 0.0
    if max(abs(params), abs(flops)) > MISMATCH_FAIL:
        notes.append(f"{1 + params:.3g} times the baseline's parameters, {1 + flops:.3g} times its FLOPs per token")
    return notes


def _compare_curves(row: ArmResult, arm: Arm, base: Arm, failed: set[int]) -> None:
    """Fill in the figures of curves, over the seeds at which both runs trained to the end."""
    pairs = []
    for seed, run in arm.runs.items():
        base_run = base.runs.get(seed)
        if base_run is None or seed in failed:
            continue
        if run.record.state == base_run.record.state == "finished":
            pairs.append((run.curves, base_run.curves))
    by_axis = []
    for axis in AXES:
        differences = np.array([at_equal(axis, *pair) for pair in pairs])
        by_axis.append(mean_interval(differences))
    row.at_tokens, row.at_flops, row.at_seconds = by_axis
    logs = mean_interval(np.array([log_token_ratio(*pair) for pair in pairs]))
    if logs is not None:  # back to ratios: the mean becomes a geometric one
        low, high = (None if end is None else float(np.exp(end)) for end in (logs.low, logs.high))
        row.token_ratio = Interval(float(np.exp(logs.mean)), low, high, logs.n)


def _interactions(arms: list[Arm], rows: list[ArmResult]) -> list[Interaction]:
    """Arms that combine exactly the changes of two other arms, neither of which is such a combination itself."""
    changes = {}
    for arm, row in zip(arms, rows, strict=True):
        if row.effect is not None and arm.runs:
            changes[row.arm] = differing(arm.config, arms[0].config)
    changed = [name for name in changes if changes[name]]
    sums: list[tuple[str, str, str]] = []
    for both, (one, other) in product(changed, sorted(combinations(changed, 2))):
        are_apart = changes[one].keys().isdisjoint(changes[other])
        if are_apart and changes[one] | changes[other] == changes[both]:
            sums.append((both, one, other))
    combined = {both for both, _, _ in sums}
    sums = [names for names in sums if combined.isdisjoint(names[1:])]
    losses = {row.arm: _counted_losses(arm, row) for arm, row in zip(arms, rows, strict=True)}
    together = []
    for names in sums:
        shortest = min(len(losses[name]) for name in names)  # with looks, arms differ in their seeds
        both, one, other, base = (losses[name][:shortest] for name in (*names, rows[0].arm))
        interval = interaction(both, one, other, base, len(sums))
        if interval is not None:
            together.append(Interaction(*names, interval))
    return together


def _counted_losses(arm: Arm, row: ArmResult) -> Array:
    """The endpoint on its scale at each seed of a row; NaN where the row has no value."""
    counted = np.isfinite(np.array(row.values, dtype=float))
    return np.where(counted, arm.on_scale(row.endpoint, row.seeds), np.nan)

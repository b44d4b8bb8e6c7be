"""The comparison: takes directories, returns one object with every number. Outputs show this object and add nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from nexus_ablate.comparison.arms import Arm, gather
from nexus_ablate.comparison.budget import regime_lines
from nexus_ablate.comparison.curves import AXES
from nexus_ablate.comparison.differences import consequences, differing
from nexus_ablate.comparison.endpoint import Endpoint
from nexus_ablate.comparison.failures import rising
from nexus_ablate.comparison.fairness import Check, checks, error_over_text, other_machine, text, unfair
from nexus_ablate.comparison.judge import Judged, Judgement, judge
from nexus_ablate.comparison.load import Excluded, Plan, Trained, collect
from nexus_ablate.comparison.pairs import at_equal, log_token_ratio
from nexus_ablate.comparison.results import ArmResult, Interaction, Secondary, Stratum
from nexus_ablate.comparison.statistics import Array, Interval, interaction, mean_interval
from nexus_ablate.comparison.tuning import at_own_rates, attach, best_lr, lr_points, lr_sensitivity, shared_difference
from nexus_ablate.comparison.verdict import seeds_for_margin, seeds_to_decide
from nexus_ablate.console import several
from nexus_ablate.errors import ConfigError, did_you_mean, unknown

Comparison = Stratum
Row = ArmResult
Together = Interaction
SHOWN = ("train_loss", "generalization_gap")
"""Figures that are shown beside diagnostics and evaluations, whose names have a slash."""


def compare(
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
    """
    paths = [dirs] if isinstance(dirs, str | Path) else list(dirs)
    collection = collect(Path(d) for d in paths)
    base, others, duplicates, plan = gather(collection, baseline)
    everyone = others
    if plan.lr_grid:
        others = attach(base, others, plan)
        base, *others = at_own_rates([base, *others])
    shown = [one for one in others if arm in (None, one.name, one.label)]
    if arm is not None and not shown:
        raise unknown("there is no other arm of this name", arm, [one.label for one in everyone])
    unshown = [one for one in others if one not in shown]
    if arm is not None or (plan.name and base.name != plan.baseline):
        plan = _direct(plan, len(others), arm is not None)
    plan = replace(plan, exploratory=(*plan.exploratory, *_unplanned(base, plan)))
    if not base.runs:
        raise ConfigError("the baseline has no result yet", base.label, "nexus-ablate status DIR shows what it does")
    excluded = collection.excluded + duplicates + unpaired(base, shown)
    conditions = checks(base, shown, plan, excluded, tuple(allow))
    of_unshown = checks(base, unshown, plan, excluded, tuple(allow)) if unshown else []
    arms = [base, *shown, *_copies(base, plan)]
    _require_endpoint(arms, plan.endpoint)
    return compared(arms, plan, excluded, conditions, [(one, unfair(one, of_unshown)) for one in unshown])


def _direct(plan: Plan, others: int, alone: bool) -> Plan:
    """The plan of a comparison that the study did not plan: of one arm, or against another baseline."""
    count = max(others, len(plan.arms))
    looked = ("arms were compared directly whose seeds the looks of the study chose",) if plan.looks else ()
    return replace(
        plan,
        family=count * (count + 1) // 2,
        looks=(),
        exploratory=(*plan.exploratory, *looked),
        claim="",
        expects=(),  # they are about differences to the study's own baseline
        **({"secondary": (), "equal": (), "refused": ()} if alone else {}),
    )


def _unplanned(base: Arm, plan: Plan) -> list[str]:
    """Seeds of the baseline that the study did not plan: more of them could have been trained until one liked it."""
    seeds = sorted(base.runs.keys() - {*plan.seeds}) if plan.seeds and not plan.looks else []
    return [f"{several(len(seeds), 'seed')} that the study does not have ({', '.join(map(str, seeds))})"] * bool(seeds)


def compared(
    arms: list[Arm],
    plan: Plan,
    excluded: list[Excluded],
    conditions: list[Check],
    unshown: Sequence[tuple[Arm, list[str]]] = (),
) -> Stratum:
    """The comparison of some arms, the baseline first.

    Args:
        conditions: Of fairness, to which the one on the evaluation text is added where the runs are our own.
        unshown: Arms that have no row but say how noisy a run is, each with the conditions that it breaks.
    """
    base, everyone = arms[0], [*arms, *(arm for arm, _ in unshown)]
    broken = [*(unfair(arm, conditions) for arm in arms), *(breaks for _, breaks in unshown)]
    judgement = judge(everyone, broken, plan)
    rows = [_result(arm, judged, judgement, plan) for arm, judged in zip(arms, judgement.arms, strict=False)]
    for row, arm in zip(rows, arms, strict=True):
        _measure_once(row, arm, base, plan)
    on_text = _beside_baseline(rows, arms, broken[: len(arms)], plan)
    conditions += [] if plan.listed else [on_text]
    return Stratum(
        question=plan.question,
        study=plan.name,
        baseline=base.label,
        endpoint=plan.endpoint,
        match=plan.match,
        delta_min=judgement.delta_min,
        delta_min_source=judgement.delta_min_source,
        seed_sd=rows[0].sd,
        family=judgement.family,
        noisy=[everyone[i].label for i in judgement.noisy],
        looks=plan.looks,
        look=judgement.look,
        undecided=judgement.undecided,
        exploratory=plan.exploratory,
        checks=conditions,
        rows=rows,
        together=_interactions(arms, judgement.arms[: len(arms)]),
        secondary=[_secondary(endpoint, arms, broken[: len(arms)], plan) for endpoint in plan.secondary],
        tuning_runs=sum(len(arm.tuning) for arm in arms),
        shared_runs=sum(len(arm.shared.runs) for arm in arms if arm.shared),
        excluded=excluded,
        amendments=list(plan.amendments),
        equal=list(plan.equal),
        refused=list(plan.refused),
        regime=[] if plan.listed else regime_lines(arms),
        arms=arms,
        plan=plan,
    )


def _beside_baseline(rows: list[ArmResult], arms: list[Arm], broken: list[list[str]], plan: Plan) -> Check:
    """Fill in the figures that relate each row to the baseline's. Returns the condition on the evaluation text."""
    counted = np.isfinite(np.array(rows[0].values, dtype=float))
    sd = _spread(np.where(counted, arms[0].on_scale(plan.endpoint, rows[0].seeds), np.nan))
    no_text = {}
    for row, arm, conditions_broken in zip(rows[1:], arms[1:], broken[1:], strict=True):
        if not conditions_broken:
            _descriptive(row, arm, arms[0], {*row.failed, *rows[0].failed})
            paired = [seed for seed, d in zip(row.seeds, row.differences, strict=True) if d is not None]
            row.text_se, no_text[row.arm] = error_over_text(arm, arms[0], paired, plan.endpoint.name)
        # three times the baseline's spikes, and more than one in a thousand rows
        row.spiky = (row.spike_score or 0.0) > 3 * max(rows[0].spike_score or 0.0, 0.001)
        row.delta_over_sd = row.effect.delta / sd if row.effect and sd else None
    errors = {r.arm: (r.text_se, r.effect.se) for r in rows if r.text_se is not None and r.effect}
    return text(arms[0], errors, no_text)


def _copies(base: Arm, plan: Plan) -> list[Arm]:
    """Arms of the study whose configuration equals the baseline's: the same runs under the arm's name."""
    return [
        replace(base, label=overrides, waiting=[], tuning=[], tuned=None)
        for overrides, arm in plan.equal
        if arm == base.name
    ]


def unpaired(base: Arm, others: list[Arm]) -> list[Excluded]:
    """The runs at seeds at which the baseline has none."""
    return [
        Excluded(run.record.path, f"the baseline has no result at seed {seed}", arm.name, seed, run.record.state)
        for arm in others
        for seed, run in arm.runs.items()
        if seed not in base.runs
    ]


def _require_endpoint(arms: list[Arm], endpoint: Endpoint) -> None:
    names = {name for arm in arms for name in arm.figure_names}
    finished = [seed for arm in arms for seed, run in arm.runs.items() if run.record.state == "finished"]
    if finished and not any(np.isfinite(arm.values(endpoint.name, list(arm.runs))).any() for arm in arms):
        near = did_you_mean(endpoint.name, names) or "val_loss"
        raise ConfigError("no run has the endpoint of the study", endpoint.name, f"endpoints: {{{near}: {{}}}}")


def _secondary(endpoint: Endpoint, arms: list[Arm], broken: list[list[str]], plan: Plan) -> Secondary:
    """An endpoint judged like the primary one. Arms of which the study expects nothing have no verdict."""
    expected = {e.arm for e in plan.expects if e.endpoint == endpoint.name and e.expected not in ("trains", "fails")}
    if endpoint.timed:
        elsewhere = [arm is not arms[0] and bool(other_machine(arm, arms[0])) for arm in arms]
        broken = [[*names, *["machine"] * other] for names, other in zip(broken, elsewhere, strict=True)]
    own = replace(plan, endpoint=endpoint, share=plan.share if expected else 1.0)
    judgement = judge(arms, broken, own)
    rows = [_result(arm, judged, judgement, own) for arm, judged in zip(arms, judgement.arms, strict=True)]
    for row in rows:
        row.is_primary = False
        if row.name not in expected:
            row.verdict = None
    return Secondary(endpoint, judgement.delta_min, rows)


def _spread(values: Array) -> float | None:
    values = values[np.isfinite(values)]
    return float(values.std(ddof=1)) if len(values) > 1 else None


def _result(arm: Arm, judged: Judged, judgement: Judgement, plan: Plan) -> ArmResult:
    """The result of one arm on the plan's endpoint."""
    seeds, baseline = judged.seeds, judgement.arms[0]
    base_losses = dict(zip(baseline.seeds, baseline.losses, strict=True))
    differences = judged.losses - np.array([base_losses.get(seed, np.nan) for seed in seeds])
    if not plan.paired:
        differences[:] = np.nan
    values = np.where(np.isfinite(judged.losses), arm.values(plan.endpoint.name, seeds), np.nan)
    finite = values[np.isfinite(values)]
    result = ArmResult(
        arm=arm.label,
        endpoint=plan.endpoint,
        verdict=judged.verdict,
        seeds=list(seeds),
        values=_numbers(values),
        differences=_numbers(differences),
        stratum=plan.stratum,
        name=arm.name,
        is_baseline=judged is baseline,
        delta_min=judgement.delta_min,
        waiting=judged.waiting,
        failed=judged.failed,
        unmeasured=judged.unmeasured,
        mean=float(finite.mean()) if len(finite) else None,
        sd=_spread(values),
        effect=judged.effect,
        look=judged.look,
    )
    if judged.effect and judged.evidence:
        result.seeds_to_decide = seeds_to_decide(judged.effect, judged.evidence)
        result.seeds_for_margin = seeds_for_margin(judged.effect, judged.evidence)
    return result


def _measure_once(result: ArmResult, arm: Arm, base: Arm, plan: Plan) -> None:
    """Fill in what does not depend on the endpoint: costs, stability, learning rates and diagnostics."""
    result.tokens_per_second = arm.mean("tokens_per_second")
    result.peak_memory_bytes = arm.mean("peak_memory_bytes")
    result.params = arm.mean("params")
    result.params_share = _share(result.params, base.mean("params"))
    result.flops_share = _share(arm.mean("flops_per_token"), base.mean("flops_per_token"))
    result.spike_score = arm.spike_score
    result.rising = sum(rising(run) for run in arm.runs.values())
    result.lr = arm.lr if arm.runs else None
    result.best_lr, result.lr_edge = best_lr(arm)
    result.lr_sensitivity = lr_sensitivity(arm)
    result.lr_curve = lr_points(arm)
    if arm is not base:
        result.at_shared_lr = shared_difference(arm, base, plan.endpoint)
    for name in arm.figure_names:
        mean = arm.mean(name)
        if mean is not None and ("/" in name or name in SHOWN):
            result.figures[name] = mean, _spread(arm.values(name, result.seeds))
    if arm.runs:
        result.requested = differing(arm.config, base.config)
        result.followed = consequences(arm.config, base.config)
    result.notes = _notes(arm, base, plan)


def _share(value: float | None, baseline: float | None) -> float | None:
    return value / baseline - 1 if value and baseline else None


def _numbers(values: Array) -> list[float | None]:
    return [float(v) if np.isfinite(v) else None for v in values]


def _notes(arm: Arm, base: Arm, plan: Plan) -> list[str]:
    """What an arm changes besides the requested overrides, and how it was matched."""
    arm_notes, base_notes = ((a.config.get("resolved") or {}).get("notes") or [] for a in (arm, base))
    notes = [note for note in arm_notes if note not in base_notes]
    match = plan.arms.get(arm.name, {}).get("match")
    if match:
        solved = " ".join(match.get("solved") or []) or "nothing to change"
        notes.append(f"matched {match.get('kind')} by {solved}, {float(match.get('residual') or 0):+.2%} left")
    return notes


def _descriptive(row: ArmResult, arm: Arm, base: Arm, failed: set[int]) -> None:
    """Figures from the curves, over the seeds at which both runs trained to the end."""
    pairs = [(run, base.runs[seed]) for seed, run in arm.runs.items() if seed in base.runs and seed not in failed]
    pairs = [pair for pair in pairs if all(run.record.state == "finished" for run in pair)]

    def over_pairs(measure: Callable[[Trained, Trained], float]) -> Interval | None:
        return mean_interval(np.array([measure(*pair) for pair in pairs]))

    row.at_tokens, row.at_flops, row.at_seconds = (over_pairs(at_equal(axis)) for axis in AXES)
    row.token_ratio = _exponential(over_pairs(log_token_ratio))


def _exponential(interval: Interval | None) -> Interval | None:
    """From logarithms back to ratios: the mean becomes a geometric one."""
    if interval is None or interval.low is None or interval.high is None:
        return None if interval is None else Interval(float(np.exp(interval.mean)), None, None, interval.n)
    mean, low, high = (float(np.exp(v)) for v in (interval.mean, interval.low, interval.high))
    return Interval(mean, low, high, interval.n)


def _interactions(everyone: list[Arm], judged: list[Judged]) -> list[Interaction]:
    """Arms that combine exactly the changes of two other arms, neither of which is such a combination itself."""
    compared = [0, *(i for i, one in enumerate(judged) if one.effect is not None)]
    arms, tables = [everyone[i] for i in compared], [judged[i] for i in compared]
    changes = [
        {key: value for key, (_, value) in differing(arm.config, arms[0].config).items()} if arm.runs else {}
        for arm in arms
    ]
    sums_of_two = [
        (c, a, b)
        for c in range(1, len(arms))
        for a in range(1, len(arms))
        for b in range(a + 1, len(arms))
        if changes[a]
        and changes[b]
        and not changes[a].keys() & changes[b].keys()
        and changes[c] == changes[a] | changes[b]
    ]
    sums = {c for c, _, _ in sums_of_two}
    sums_of_two = [(c, a, b) for c, a, b in sums_of_two if a not in sums and b not in sums]
    together = []
    for c, a, b in sums_of_two:
        seeds = min((tables[i].seeds for i in (c, a, b)), key=len)  # with looks, arms differ in their seeds
        both, one, other, base = (tables[i].losses[: len(seeds)] for i in (c, a, b, 0))
        interval = interaction(both, one, other, base, len(sums_of_two))
        if interval is not None:
            together.append(Interaction(arms[c].label, arms[a].label, arms[b].label, interval))
    return together

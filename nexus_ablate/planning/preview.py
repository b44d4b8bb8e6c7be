"""A study before it runs: costs, mismatches, finished runs, and fairness."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from statistics import fmean

from nexus_ablate.comparison.fairness import FAIL, PASS, WARN, Check, by_arm, mismatch, untuned
from nexus_ablate.comparison.learning_rates import FURTHER_RATES, RATES
from nexus_ablate.comparison.statistics import detectable_difference, fewest_failures, half_width
from nexus_ablate.comparison.terms import Terms
from nexus_ablate.comparison.verdict import CLAIM_SEEDS, interval_name
from nexus_ablate.config.rules import check_vocabulary
from nexus_ablate.console import several
from nexus_ablate.errors import ConfigError
from nexus_ablate.measure.regime import Regime, check_passes, regime_of
from nexus_ablate.planning.cores_and_gpus import Places
from nexus_ablate.planning.cost import Cost, cost_of, measured_speed, seconds_of, text_tokens, vocabulary
from nexus_ablate.planning.design import Configs
from nexus_ablate.planning.jobs import Job, Runs
from nexus_ablate.planning.looks import ended_later
from nexus_ablate.planning.stale_code import check_code
from nexus_ablate.planning.study_yaml import resolved_otherwise
from nexus_ablate.runs import read_status, read_summary
from nexus_ablate.runs.naming import BASELINE
from nexus_ablate.study.schema import Study, StudyArm

GRID_POINTS = 5
SAME = (
    (
        "evaluation",
        attrgetter("data", "model.context", "train.eval_tokens"),
        "other validation tokens",
        "same validation tokens",
    ),
    (
        "batches",
        attrgetter("data", "model.context", "resolved.tokens_per_step"),
        "other batches",
        "same batches in the same order",
    ),
    (
        "schedule",
        attrgetter("schedule.schedule", "schedule.warmup", "schedule.final_lr", "schedule.cooldown"),
        "another schedule",
        "the same schedule for every arm",
    ),
    (
        "machine",
        attrgetter("train.precision", "train.device"),
        "another precision or device",
        "same precision and device",
    ),
)
"""What the configurations decide: a condition, the values that must be equal, and the words of FAIL and PASS."""


@dataclass(frozen=True)
class ArmPlan:
    """One arm before it is run.

    Attributes:
        params_share, flops_share: Relative difference to the baseline; 0.1 is 10% more.
        seconds: Of one run; None if no speed is known.
        recorded: The speed was measured in finished runs of this arm, not estimated.
    """

    arm: StudyArm
    cost: Cost
    params_share: float
    flops_share: float
    seconds: float | None
    recorded: bool


@dataclass(frozen=True)
class StudyPlan:
    """A study's costs.

    Attributes:
        states: Number of runs by state.
        runs: Number of all runs; with a learning-rate grid up to `further_runs` more, with looks up to the last one.
        seconds: Time for the missing runs on `where`; None if no speed is known.
        regime: Of the baseline.
        later_runs, later_seconds: What later looks add if no arm is decided before the last one.
    """

    study: Study
    arms: list[ArmPlan]
    states: dict[str, int]
    runs: int
    further_runs: int
    seconds: float | None
    where: Places
    fairness: list[Check]
    regime: Regime
    later_runs: int
    later_seconds: float | None


def make_plan(runs: Runs, where: Places) -> StudyPlan:
    """Count runs and costs, and measure a speed if none is recorded. Writes nothing.

    Raises:
        ConfigError: An embedding is smaller than its tokenizer.
    """
    study, configs, base = runs.study, runs.configs, runs.configs[BASELINE]
    for config in configs.values():
        check_vocabulary(config, vocabulary(config))
    jobs, ended = [*runs.tuning, *runs.claims], ended_later(runs)
    costs = {arm: cost_of(config) for arm, config in configs.items()}
    arms = _arm_plans(study, configs, costs, jobs, where.threads)
    per_run = {plan.arm.name: plan.seconds for plan in arms}
    states = Counter(job.state()[0] for job in [*jobs, *ended])
    missing = [per_run[job.of] for job in jobs if not job.has_ended]
    untuned_arms = [arm.name for arm in study.all_arms if not runs.rates(arm)]
    after_tuning = untuned_arms * RATES * len(study.first_seeds)
    if after_tuning:
        states["after tuning"] = len(after_tuning)
        missing += [per_run[name] for name in after_tuning]
    rates = {arm.name: len(runs.rates(arm)) or RATES for arm in study.all_arms}
    later_seeds = len(study.seeds) - len(study.first_seeds)
    later = Counter({name: count * later_seeds for name, count in rates.items()})
    missing_later = later - Counter(job.of for job in ended)
    sides = 2 if study.looks else 1  # at a later look the lowest mean can lie on the other side
    most = RATES + sides * FURTHER_RATES
    further = sum(most - count for count in rates.values() if count >= RATES) * len(study.seeds)
    cost, text = costs[BASELINE], text_tokens(base)
    regime = regime_of(base, cost.params_non_embedding, cost.steps, text)
    checks = fairness(study, configs, costs)
    checks += [Check("regime", WARN, why) for why in regime.warnings()]
    checks += _refusal("text", lambda: check_passes(base, text or sys.maxsize))
    checks += _refusal("code", lambda: check_code(study.name, jobs, retrain=False))
    if resolved := resolved_otherwise(runs):
        checks.append(Check("configuration", FAIL, f"{'; '.join(resolved)}; --retrain trains these arms again"))
    return StudyPlan(
        study=study,
        arms=arms,
        states=dict(states),
        runs=len(jobs) + len(after_tuning),
        further_runs=further,
        seconds=_total(missing, where),
        where=where,
        fairness=checks,
        regime=regime,
        later_runs=later.total(),
        later_seconds=_total([per_run[name] for name in missing_later.elements()], where),
    )


def _arm_plans(study: Study, configs: Configs, costs: dict[str, Cost], jobs: list[Job], threads: int) -> list[ArmPlan]:
    """Each arm's costs. Its speed is that of its finished runs, else the baseline's by their FLOPs."""
    speeds = {}
    for arm in study.all_arms:
        finished = [job for job in jobs if job.of == arm.name and job.state()[0] == "finished"]
        summaries = [read_summary(job.path, read_status(job.path)) or {} for job in finished]
        recorded = [summary["tokens_per_second"] for summary in summaries if summary.get("tokens_per_second")]
        speeds[arm.name] = fmean(recorded) if recorded else None
    base, base_speed = costs[BASELINE], speeds[BASELINE]
    if base_speed is None and None in speeds.values():
        base_speed = measured_speed(configs[BASELINE], threads)
    plans = []
    for arm in study.all_arms:
        cost, recorded = costs[arm.name], speeds[arm.name]
        flops_share = cost.flops_per_token / base.flops_per_token - 1
        speed = recorded or (base_speed and base_speed / (1 + flops_share))
        seconds = seconds_of(configs[arm.name], cost, speed) if speed else None
        plans.append(ArmPlan(arm, cost, cost.params / base.params - 1, flops_share, seconds, recorded is not None))
    return plans


def _total(seconds: list[float | None], where: Places) -> float | None:
    """Seconds of these runs on the workers; None if one is unknown."""
    known = [value for value in seconds if value is not None]
    return math.fsum(known) / max(1, min(where.workers, len(known))) if len(known) == len(seconds) else None


def _refusal(name: str, check: Callable[[], object]) -> list[Check]:
    """A FAIL with the reason why a launch would be refused."""
    try:
        check()
    except ConfigError as error:
        return [Check(name, FAIL, f"{error.problem}; try {error.fix}")]
    return []


def fairness(study: Study, configs: Configs, costs: dict[str, Cost]) -> list[Check]:
    """The conditions of a comparison's fairness header that are known before anything runs."""
    base = configs[BASELINE]
    checks = []
    for name, facts, reason, good in SAME:
        unlike = [arm.name for arm in study.arms if facts(configs[arm.name]) != facts(base)]
        checks.append(by_arm(name, dict.fromkeys(unlike, reason), good))
    for figure, name in (("tokens", "tokens"), ("params", "params"), ("flops", "flops_per_token")):
        base_amount = getattr(costs[BASELINE], name)
        shares = {}
        for arm in study.arms:
            amount = getattr(costs[arm.name], name)
            shares[arm.name] = amount / base_amount - 1 if base_amount else float(amount > 0)  # 0 tokens: steps=0
        checks.append(mismatch(figure, shares, study.match))
    if not study.lr_grid:
        checks.append(untuned({config.schedule.lr for config in configs.values()}))
    else:
        text = (
            f"{len(study.lr_grid)} rates x {several(len(study.tuning_seeds), 'seed')} for every arm, on other seeds; "
            "then each at its best rate, from the losses there and beside it"
        )
        few = len(study.lr_grid) < GRID_POINTS
        advice = f"; {GRID_POINTS} rates advised" if few else ""
        checks.append(Check("learning_rate", WARN if few else PASS, text + advice))
    text = f"{several(len(study.seeds), 'seed')}, every arm with each"
    if study.looks:
        text = f"{study.looks[0]} for every arm, then up to {study.looks[-1]} for those that are undecided"
    checks.append(_seeds(study, text))
    return checks


def _seeds(study: Study, text: str) -> Check:
    """What the seeds can show: the intervals' width, the effect that is found, and whether failures can be told."""
    terms = Terms(study)
    arms, count, weight = len(study.arms), len(study.first_seeds), (study.look_weights or [1.0])[0]
    if len(study.seeds) < CLAIM_SEEDS:
        return Check("seeds", WARN, f"{text}; a verdict needs {CLAIM_SEEDS} seeds")
    level = terms.level(arms, weight)
    width, found = half_width(1.0, count, level), detectable_difference(1.0, count, level)
    text += f"; at {count}: {interval_name(level)}s of ±{width:.2g} SD of a pair's difference, "
    text += f"which find {found:.2g} SD with 80% power"
    fewest = fewest_failures(count, terms.failure_level(arms, weight))
    if fewest is None:
        return Check("seeds", WARN, f"{text}; no number of failed runs can be told from chance")
    return Check("seeds", PASS, f"{text}; {fewest} of {count} failed runs are told from none")

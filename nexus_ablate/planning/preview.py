"""A study before it runs: costs, mismatches, finished runs, and fairness."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from nexus_ablate.comparison.fairness import FAIL, PASS, WARN, Check, by_arm, mismatch, untuned
from nexus_ablate.comparison.learning_rates import FURTHER_RATES, RATES
from nexus_ablate.comparison.statistics import detectable_difference, fewest_failures, half_width
from nexus_ablate.comparison.terms import Terms
from nexus_ablate.comparison.verdict import CLAIM_SEEDS, interval_name
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.console import several
from nexus_ablate.errors import ConfigError
from nexus_ablate.measure.regime import (
    UNLEARNED,
    Regime,
    check_passes,
    has_learned,
    regime_of,
    too_short_to_vary_decay,
)
from nexus_ablate.planning.cores_and_gpus import Places
from nexus_ablate.planning.cost import Cost, cost_of, measured_speed, seconds_of, text_tokens, vocabulary
from nexus_ablate.planning.design import ComposedArm, ComposedStudy
from nexus_ablate.planning.jobs import Job, Runs
from nexus_ablate.planning.looks import ended_later
from nexus_ablate.planning.stale_code import by_other_code, files_of
from nexus_ablate.planning.study_yaml import resolved_otherwise
from nexus_ablate.runs import read_run

GRID_POINTS = 5


@dataclass(frozen=True)
class ArmPlan:
    """One arm before it is run.

    Attributes:
        params_share, flops_share: Relative difference to the baseline; 0.1 is 10% more.
        seconds: Of one run; None if no speed is known.
        recorded: The speed was measured in finished runs of this arm, not estimated.
    """

    arm: ComposedArm
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
        runs: Number of all runs; with a learning-rate grid up to `further_runs` more.
        seconds: Time for the missing runs on `where`; None if no speed is known.
        regime: Of the baseline.
        later_runs, later_seconds: What later looks add if no arm is decided before the last one.
    """

    study: ComposedStudy
    arms: list[ArmPlan]
    states: dict[str, int]
    runs: int
    further_runs: int
    seconds: float | None
    where: Places
    fairness: list[Check]
    regime: Regime
    later_runs: int = 0
    later_seconds: float | None = 0.0


def make_plan(study: ComposedStudy, runs: Runs, where: Places) -> StudyPlan:
    """Count runs and costs, and measure a speed if none is recorded. Writes nothing."""
    from nexus_ablate.measure.initial import initial_of

    jobs = [*runs.tuning, *runs.claims]
    costs = {arm.name: cost_of(arm.config) for arm in study.all_arms}
    speeds = {arm.name: recorded_speed([j for j in jobs if j.of == arm.name]) for arm in study.all_arms}
    base, speed = costs[study.baseline.name], speeds[study.baseline.name]
    if speed is None and any(value is None for value in speeds.values()):
        speed = measured_speed(study.baseline.config, where.threads)
    arms = []
    for arm in study.all_arms:
        cost, known = costs[arm.name], speeds[arm.name]
        estimate = None if speed is None else speed * base.flops_per_token / cost.flops_per_token
        pace = known or estimate
        seconds = None if pace is None else seconds_of(arm.config, cost, pace)
        more = (cost.params / base.params - 1, cost.flops_per_token / base.flops_per_token - 1)
        arms.append(ArmPlan(arm, cost, *more, seconds, known is not None))
    per_run = {plan.arm.name: plan.seconds for plan in arms}
    ended = ended_later(runs)
    states: dict[str, int] = {}
    left = []
    for job in [*jobs, *ended]:
        state = job.state()[0]
        states[state] = states.get(state, 0) + 1
        if state not in ("finished", "diverged", "failed"):
            left.append(per_run[job.of])
    definition = study.study
    rates = RATES if definition.lr_grid else 1
    unknown = [arm.name for arm in study.all_arms if not runs.rates(arm)] * (rates * len(definition.first_seeds))
    if unknown:
        states["after tuning"] = len(unknown)
        left += [per_run[name] for name in unknown]
    further = FURTHER_RATES * len(study.all_arms) * len(definition.first_seeds) if definition.lr_grid else 0
    later = rates * (len(definition.seeds) - len(definition.first_seeds))
    left_later = [per_run[arm.name] for arm in study.all_arms for _ in range(later)]
    for job in ended[: len(left_later)]:
        left_later.remove(per_run[job.of])
    total, total_later = (
        None if None in seconds else math.fsum(seconds) / where.workers for seconds in (left, left_later)
    )
    more = (later * len(study.all_arms), total_later)
    text = text_tokens(study.baseline.config)
    regimes = {
        arm.name: regime_of(arm.config, costs[arm.name].params_non_embedding, costs[arm.name].steps, text)
        for arm in study.all_arms
    }
    base_config = study.baseline.config
    initial = initial_of(base_config, vocabulary(base_config))
    regimes[study.baseline.name] = replace(regimes[study.baseline.name], initial=initial)
    base_jobs = [job for job in runs.claims if job.of == study.baseline.name]
    lines = [*fairness(study, costs), *_idle(study, regimes), *_learned(base_jobs), *_passes(study, text), *_code(jobs)]
    if resolved := resolved_otherwise(study, runs.request.directory):
        lines.append(Check("configuration", FAIL, f"{'; '.join(resolved)}; --retrain trains these arms again"))
    return StudyPlan(
        study, arms, states, len(jobs) + len(unknown), further, total, where, lines, regimes[study.baseline.name], *more
    )


def _idle(study: ComposedStudy, regimes: dict[str, Regime]) -> list[Check]:
    """A WARN for each knob that cannot matter in this budget, above all one that the study varies."""
    base = regimes[study.baseline.name]
    lines = [Check("regime", WARN, why) for why in base.warnings()]
    config = study.baseline.config
    varied = [
        arm.name
        for arm in study.arms
        if (arm.config.weight_decay, arm.config.schedule.decay) != (config.weight_decay, config.schedule.decay)
    ]
    if varied and (why := too_short_to_vary_decay(base, [regimes[name] for name in varied])):
        lines.append(Check("weight decay is varied", WARN, f"{', '.join(varied)}: {why}"))
    return lines


def _learned(jobs: list[Job]) -> list[Check]:
    """A FAIL if the baseline's finished runs have learned nothing, which no arm can be compared with."""
    summaries = [read_run(job.path).summary or {} for job in jobs if job.state()[0] == "finished"]
    losses = [summary["val_bpb"] for summary in summaries if summary.get("val_bpb") is not None]
    unigram = next((summary["unigram_bpb"] for summary in summaries if summary.get("unigram_bpb")), None)
    if not losses or unigram is None or has_learned(losses, unigram):
        return []
    return [Check("baseline", FAIL, f"it {UNLEARNED}")]


def _passes(study: ComposedStudy, text: int | None) -> list[Check]:
    """A FAIL if the text is too short for the budget, which prevents a launch."""
    try:
        check_passes(study.baseline.config, text or sys.maxsize)
    except ConfigError as error:
        return [Check("text", FAIL, f"{error.problem}; try {error.fix}")]
    return []


def _code(jobs: list[Job]) -> list[Check]:
    """A FAIL if other code has finished runs of the study, which prevents a launch."""
    finished = [(job, run) for job, run in by_other_code(jobs) if run.has_result]
    if not finished:
        return []
    why = f"{len(finished)} runs were finished by other code ({files_of(finished)}); --retrain trains them again"
    return [Check("code", FAIL, why)]


def recorded_speed(jobs: list[Job]) -> float | None:
    """Mean tokens per second of the finished runs among the jobs; None if there are none."""
    finished = [read_run(job.path).summary or {} for job in jobs if job.state()[0] == "finished"]
    speeds = [summary["tokens_per_second"] for summary in finished if summary.get("tokens_per_second")]
    return math.fsum(speeds) / len(speeds) if speeds else None


def fairness(composed: ComposedStudy, costs: dict[str, Cost]) -> list[Check]:
    """The conditions of a comparison's fairness header that are known before anything runs."""
    study, base = composed.study, composed.baseline
    checks = [
        _same(composed, "evaluation", _validation, "other validation tokens", "same validation tokens"),
        _same(composed, "batches", _stream, "other batches", "same batches in the same order"),
        _same(composed, "schedule", _schedule, "another schedule", "the same schedule for every arm"),
        _same(composed, "machine", _machine, "another precision or device", "same precision and device"),
    ]
    for figure, name in (("tokens", "tokens"), ("params", "params"), ("flops", "flops_per_token")):
        base_amount = getattr(costs[base.name], name)
        shares = {arm.name: getattr(costs[arm.name], name) / base_amount - 1 for arm in composed.arms}
        checks.append(mismatch(figure, shares, study.match))
    if not study.lr_grid:
        checks.append(untuned({arm.config.schedule.lr for arm in composed.all_arms}))
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
    checks.append(_seeds(composed, text))
    return checks


def _seeds(composed: ComposedStudy, text: str) -> Check:
    """What the seeds can show: the intervals' width, the effect that is found, and whether failures can be told."""
    study = composed.study
    terms = Terms(study, share=study.share, strata=max(len(study.all_strata), 1))
    arms, count, weight = len(composed.arms), len(study.first_seeds), (study.look_weights or [1.0])[0]
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


def _same(composed: ComposedStudy, name: str, facts: Callable[[RunConfig], object], reason: str, good: str) -> Check:
    wanted = facts(composed.baseline.config)
    reasons = {arm.name: reason for arm in composed.arms if facts(arm.config) != wanted}
    return by_arm(name, reasons, good)


def _stream(config: RunConfig) -> object:
    train = config.train
    return config.data.flat(), config.model.context, train.batch_size * train.grad_accum


def _validation(config: RunConfig) -> object:
    return config.data.flat(), config.model.context, config.train.eval_tokens


def _schedule(config: RunConfig) -> object:
    s = config.schedule
    return s.schedule, s.warmup, s.final_lr, s.cooldown


def _machine(config: RunConfig) -> object:
    return config.train.precision, config.train.device

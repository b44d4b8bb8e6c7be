"""Is the comparison fair? One line per condition: PASS, WARN or FAIL. An arm with a FAIL is NOT COMPARABLE.

A FAIL can be waived with `--allow`; it is then shown as WAIVED. Most conditions are about pairs: the runs of an arm and
of the baseline with one seed. `PAIRWISE` says what is unlike about such a pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from nexus_ablate.comparison.arms import Arm
from nexus_ablate.comparison.read import LeftOut, Run
from nexus_ablate.comparison.statistics import LEVEL, Array, Effect, t_quantile
from nexus_ablate.comparison.verdict import LEARNED
from nexus_ablate.config.grammar import show
from nexus_ablate.console import several
from nexus_ablate.errors import unknown
from nexus_ablate.measure.regime import EARLY, has_learned
from nexus_ablate.provenance import differ, differing_files
from nexus_ablate.study.endpoint import Endpoint, logits
from nexus_ablate.study.record import planned
from nexus_ablate.study.study import Study

PASS, WARN, FAIL, WAIVED = "PASS", "WARN", "FAIL", "WAIVED"
TOLERANCE = {"tokens": 0.01, "params": 0.05, "flops": 0.05}
"""Relative differences from which an amount that arms must share is not shared."""
MACHINE = ("device", "processor", "threads")
LIBRARIES = ("torch", "numpy", "tokenizers", "datasets", "safetensors")
"""Libraries whose version can change the numbers of a run."""
ALIKE = "alike in every pair of runs"


@dataclass(frozen=True)
class Check:
    """One condition: its name (for `--allow`), status and result, the arms that break it, and for which endpoint."""

    name: str
    status: str
    text: str
    arms: tuple[str, ...] = ()
    endpoint: str = ""


def checks(
    baseline: Arm,
    others: list[Arm],
    study: Study | None,
    endpoints: list[Endpoint],
    left_out: list[LeftOut],
    allow: Iterable[str],
) -> list[Check]:
    """The fairness conditions of a table.

    Raises:
        ConfigError: `allow` names a condition that does not exist.
    """
    arms = [arm for arm in others if arm.runs]
    conditions = PAIRWISE
    if study is not None and study.match in TOLERANCE:
        conditions = conditions | {study.match: partial(unlike_amount, study.match)}
    results = [_pairwise(name, unlike, baseline, arms) for name, unlike in conditions.items()]
    for endpoint in endpoints:
        if endpoint.timed:
            results.append(_pairwise("machine", unlike_machine, baseline, arms, endpoint.name))
        if endpoint.is_share:
            results.append(_saturated(endpoint, baseline, arms))
    environment = _pairwise("environment", unlike_environment, baseline, arms)
    results += [
        _learned(baseline, arms),
        _learning_rate(baseline, arms, study),
        _seeds(baseline, arms, study),
        replace(environment, status=WARN if environment.arms else PASS, arms=()),
        _plan(baseline, arms, study),
    ]
    return waived([*results, *excluded(left_out)], allow)


def waived(conditions: list[Check], allow: Iterable[str]) -> list[Check]:
    """The conditions, those that the user allows to fail as WAIVED.

    Raises:
        ConfigError: `allow` names a condition that does not exist.
    """
    names = list(dict.fromkeys(check.name for check in conditions))
    for name in allow:
        if name not in names:
            raise unknown("there is no fairness condition of this name", name, names)
    return [replace(c, status=WAIVED) if c.status == FAIL and c.name in allow else c for c in conditions]


def excluded(left_out: list[LeftOut]) -> list[Check]:
    """A line on runs that give no result, where there are some."""
    text = f"{several(len(left_out), 'run')} left out, listed with the reason"
    return [Check("excluded", WARN, text)] if left_out else []


def unfair(arm: Arm, conditions: list[Check], endpoint: Endpoint) -> list[str]:
    """The conditions that an arm breaks, unless they were waived, and that count for the endpoint."""
    failed = [check for check in conditions if check.status == FAIL and check.endpoint in ("", endpoint.name)]
    return [check.name for check in failed if arm.name in check.arms]


def _pairwise(
    name: str, unlike: Callable[[Run, Run], str], baseline: Arm, arms: list[Arm], endpoint: str = ""
) -> Check:
    """Whether the pairs of each arm agree. A run that diverged has no loss, and no pair."""
    texts = {}
    for arm in arms:
        reasons: dict[int, str] = {}
        for run in arm.all_runs:
            twin = baseline.runs.get(run.seed)
            if twin is not None and run.state == twin.state == "finished":
                reasons[run.seed] = reasons.get(run.seed) or unlike(run, twin)
        seeds = [seed for seed, reason in reasons.items() if reason]
        if seeds:
            texts[arm.name] = f"{arm.name}: {reasons[seeds[0]]} ({_seed_list(seeds)})"
    if texts:
        return Check(name, FAIL, "; ".join(texts.values()), tuple(texts), endpoint)
    return Check(name, PASS, ALIKE, (), endpoint)


# --------------------------------------------------------------------------------------- what is unlike about a pair


def unlike_evaluation(run: Run, twin: Run) -> str:
    tokens, twin_tokens = run.summary.get("eval_hash"), twin.summary.get("eval_hash")
    if not tokens or not twin_tokens:
        return "validation tokens not recorded"
    return "" if tokens == twin_tokens else "other validation tokens"


def unlike_batches(run: Run, twin: Run) -> str:
    """Runs are compared up to the end of the shorter one. Hashes are a chain: they cover all batches before."""
    hashes, twin_hashes = run.curves.batches, twin.curves.batches
    shared = hashes.keys() & twin_hashes.keys()
    if not shared:
        return "no batch hash in common"
    step = max(shared)
    return "" if hashes[step] == twin_hashes[step] else f"other batches before step {step}"


def unlike_init(run: Run, twin: Run) -> str:
    """Parameters of the same name and shape must begin with the same normal numbers."""
    unlike = []
    for name, (twin_z, twin_shape) in twin.init.items():
        z, shape = run.init.get(name, (twin_z, twin_shape))
        if shape == twin_shape and z != twin_z:
            unlike.append(name)
    more = " ..." if len(unlike) > 2 else ""
    return f"other initial values of {', '.join(unlike[:2])}{more}" if unlike else ""


def unlike_amount(figure: str, run: Run, twin: Run) -> str:
    """Tokens, parameters or FLOPs of a whole run."""
    amount, twin_amount = (_amount(figure, each) for each in (run, twin))
    if math.isnan(amount) or not twin_amount > 0:
        return ""
    share = amount / twin_amount - 1
    return f"{figure} {share:+.1%}" if abs(share) > TOLERANCE[figure] else ""


def _amount(figure: str, run: Run) -> float:
    return run.figure("flops_per_token") * run.figure("tokens") if figure == "flops" else run.figure(figure)


def unlike_code(run: Run, twin: Run) -> str:
    files = differing_files(run.code, twin.code)
    return differ(files) if files else ""


def unlike_machine(run: Run, twin: Run) -> str:
    facts = [(name, run.summary.get(name), twin.summary.get(name)) for name in MACHINE]
    facts.append(("runs on a device", run.env.get("runs_per_device", 1), twin.env.get("runs_per_device", 1)))
    return _differing(facts)


def unlike_environment(run: Run, twin: Run) -> str:
    facts = [("python", run.env.get("python"), twin.env.get("python"))]
    facts.append(("compiled programs", run.summary.get("programs"), twin.summary.get("programs")))
    packages, twin_packages = run.env.get("packages") or {}, twin.env.get("packages") or {}
    facts += [(name, packages.get(name), twin_packages.get(name)) for name in LIBRARIES]
    return ", ".join(filter(None, (_differing(facts), unlike_machine(run, twin))))


def _differing(facts: Iterable[tuple[str, object, object]]) -> str:
    """Those facts of two runs that differ; one that is not recorded differs from none."""
    known = [(name, fact, twin_fact) for name, fact, twin_fact in facts if None not in (fact, twin_fact)]
    return ", ".join(f"{name} {fact}, not {twin_fact}" for name, fact, twin_fact in known if fact != twin_fact)


PAIRWISE: dict[str, Callable[[Run, Run], str]] = {
    "evaluation": unlike_evaluation,
    "batches": unlike_batches,
    "init": unlike_init,
    "tokens": partial(unlike_amount, "tokens"),
    "code": unlike_code,
}
"""Conditions on pairs: what is unlike about one, or ""."""


# ------------------------------------------------------------------------------------------------- the other conditions


def _learned(baseline: Arm, arms: list[Arm]) -> Check:
    """A baseline that has learned nothing is no baseline: what beats it may be what breaks least."""
    seeds = [*baseline.runs]
    unigram, losses = baseline.values("unigram_bpb", seeds), baseline.values("val_bpb", seeds)
    known = unigram[np.isfinite(unigram)]
    if not len(known) and len(baseline.failed) < len(seeds):
        return Check(LEARNED, WARN, "the unigram entropy of the text is not recorded")
    if len(known) and has_learned(losses.tolist(), float(known[0])):
        return Check(LEARNED, PASS, "the baseline ends below 0.9 of the unigram entropy")
    text = "the baseline has not learned: its loss, or that of most of its runs, is above 0.9 of the unigram entropy"
    return Check(LEARNED, FAIL, text, tuple(arm.name for arm in arms))


def _saturated(endpoint: Endpoint, baseline: Arm, arms: list[Arm]) -> Check:
    """Differences of a share can't be read where neither side is above guessing, or below the largest value."""
    broken = {}
    for arm in arms:
        above_floor, below_ceiling = [], []
        for each in (baseline, arm):
            seeds = [*each.runs]
            items = each.values(endpoint.beside("items"), seeds)
            scaled = each.on_scale(endpoint, seeds)
            floor = logits(each.values(endpoint.beside(endpoint.measure.floor), seeds), items)
            most = logits(np.full(len(items), endpoint.measure.most), items)
            above_floor.append(_lowest(scaled - floor))
            below_ceiling.append(_lowest(most - scaled))
        if max(above_floor) <= 0:
            broken[arm.name] = f"{arm.name} and the baseline are at chance"
        elif max(below_ceiling) <= 0:
            broken[arm.name] = f"{arm.name} and the baseline are at the ceiling"
    text = "; ".join(broken.values()) or f"{endpoint.name} is neither at chance nor at its ceiling"
    return Check("saturated", FAIL if broken else PASS, text, tuple(broken), endpoint.name)


def _lowest(values: Array) -> float:
    """The lower end of the mean's 95% interval; inf below two values."""
    values = values[np.isfinite(values)]
    n = len(values)
    if n < 2:
        return math.inf
    return float(values.mean() - t_quantile(1 - LEVEL / 2, n - 1) * values.std(ddof=1) / math.sqrt(n))


def _learning_rate(baseline: Arm, arms: list[Arm], study: Study | None) -> Check:
    if study is not None and study.lr_grid:
        broken = {arm.name: arm.no_best_rate for arm in (baseline, *arms) if arm.no_best_rate}
        if broken:
            names = [arm.name for arm in arms] if baseline.name in broken else [*broken]
            text = "; ".join(f"{name}: {why}" for name, why in broken.items())
            return Check("learning_rate", FAIL, text, tuple(names))
        return Check("learning_rate", PASS, "each arm at its own best rate, inside the grid")
    rates = {run.rate for arm in (baseline, *arms) for run in arm.runs.values()}
    if len(rates) > 1:
        return Check("learning_rate", WARN, "arms have rates of their own, and none was tuned")
    return Check("learning_rate", WARN, f"all arms share {min(rates):g}; lr_grid=auto finds each arm's own best")


def _seeds(baseline: Arm, arms: list[Arm], study: Study | None) -> Check:
    """Whether every planned seed has its pair, and what the seeds vary."""
    wanted = {*(study.seeds if study is not None else baseline.runs)}
    lacking = []
    for arm in (baseline, *arms):
        if missing := sorted(wanted - arm.runs.keys()):
            lacking.append(f"{arm.name} lacks {_seed_list(missing)}")
    if any("run" in (arm.config.get("init") or {}) for arm in (baseline, *arms)):
        lacking.append("runs go on from the weights of another run: seeds differ in data order and dropout alone")
    text = "; ".join(lacking) or f"{several(len(wanted), 'seed')}, complete and paired"
    return Check("seeds", WARN if lacking else PASS, text)


def _plan(baseline: Arm, arms: list[Arm], study: Study | None) -> Check:
    """Whether study.yaml is what the runs were launched with, and was not added to."""
    if study is None:
        return Check("plan", WARN, "no study.yaml: arms, seeds and endpoint were not fixed before the runs")
    now = planned(study)
    for run in [run for arm in (baseline, *arms) for run in arm.all_runs]:
        for key, then in (run.env.get("plan") or {}).items():
            if now.get(key) != then:
                text = f"study.yaml has {key} {show(now.get(key))}, its runs were launched with {show(then)}"
                return Check("plan", FAIL, text, tuple(arm.name for arm in arms))
    if study.added_seeds:
        return Check("plan", WARN, f"{several(len(study.added_seeds), 'seed')} added after results had been seen")
    return Check("plan", PASS, "arms, seeds and endpoints were fixed before the runs")


def text_check(effects: dict[str, Effect], lacking: dict[str, str], baseline: Arm) -> Check:
    """Whether intervals hold the error over evaluation text, and whether more text would help more than more seeds.

    Args:
        effects: By arm.
        lacking: By arm, why the error over text is not in its interval.
    """
    if lacking:
        reasons = "; ".join(dict.fromkeys(lacking.values()))
        which = "" if lacking.keys() == effects.keys() else f" ({', '.join(lacking)})"
        return Check("text", WARN, f"holds for this text alone{which}: {reasons}")
    larger = {name: effect for name, effect in effects.items() if (effect.text_se or 0.0) > effect.seed_se}
    if not larger:
        return Check("text", PASS, "intervals hold the error over seeds and over text; that over text is smaller")
    tokens = next(run.windows.tokens for run in baseline.runs.values() if run.windows)
    text = f"more validation text than these {tokens} tokens would help more than more seeds ({', '.join(larger)})"
    return Check("text", WARN, text)


# -------------------------------------------------------------------------------------------------------- the regime


def tokens_per_parameter(arm: Arm) -> float | None:
    """Training tokens for each parameter of the blocks that a token passes through; None where that is not known."""
    run = next(iter(arm.runs.values()), None)
    tokens = arm.mean("tokens")
    if run is None or not tokens:
        return None
    ffn = run.config.get("ffn") or {}
    active = ffn["active"] / ffn["experts"] if ffn.get("active") and ffn.get("experts") else 1.0
    params = 0.0
    for name, (_, shape) in run.init.items():
        if name.startswith("blocks."):
            is_experts = ".ffn." in name and len(shape) == 3
            params += math.prod(shape) * (active if is_experts else 1.0)
    return tokens / params if params else None


def is_early(arm: Arm, baseline: Arm) -> bool:
    """Whether the arm or the baseline is early in training."""
    ratios = [tokens_per_parameter(each) for each in (arm, baseline)]
    return any(ratio is not None and ratio < EARLY for ratio in ratios)


def _seed_list(seeds: Iterable[int]) -> str:
    seeds = list(seeds)
    return f"seed{'s' * (len(seeds) != 1)} {', '.join(map(str, seeds[:8]))}" + (" ..." if len(seeds) > 8 else "")

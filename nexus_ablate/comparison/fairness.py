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
from nexus_ablate.console import several
from nexus_ablate.errors import UserError, unknown
from nexus_ablate.measure.regime import EARLY, has_learned
from nexus_ablate.provenance import differ, differing_files
from nexus_ablate.runs.reading import read_rows
from nexus_ablate.study.endpoint import Endpoint, logits
from nexus_ablate.study.study import Study

PASS, WARN, FAIL, WAIVED = "PASS", "WARN", "FAIL", "WAIVED"
TOLERANCE = {"tokens": 0.01, "params": 0.05, "flops": 0.05}
"""Relative differences from which an amount that arms must share is not shared."""
MACHINE = ("device", "processor", "threads")
LIBRARIES = ("torch", "numpy", "tokenizers", "datasets", "safetensors")
"""Libraries whose version can change the numbers of a run."""


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
    conditions = dict(PAIRWISE)
    if study is not None and study.match in TOLERANCE:
        conditions[study.match] = (partial(unlike_amount, study.match), f"the same {study.match}")
    if any(endpoint.timed for endpoint in endpoints):
        conditions["machine"] = (unlike_machine, "the same machine")
    results = [_pairwise(name, unlike, good, baseline, arms) for name, (unlike, good) in conditions.items()]
    results += [
        _seeds(baseline, arms, study),
        _learned(baseline, arms),
        *(_saturated(endpoint, baseline, arms) for endpoint in endpoints if endpoint.is_share),
        _learning_rate(baseline, arms, study),
        _environment(baseline, arms),
        _plan(study),
    ]
    if left_out:
        results.append(Check("excluded", WARN, f"{several(len(left_out), 'run')} left out, listed with the reason"))
    names = list(dict.fromkeys(result.name for result in results))
    for name in allow:
        if name not in names:
            raise unknown("there is no fairness condition of this name", name, names)
    return [replace(c, status=WAIVED) if c.status == FAIL and c.name in allow else c for c in results]


def unfair(arm: Arm, conditions: list[Check], endpoint: Endpoint) -> list[str]:
    """The conditions that an arm breaks, unless they were waived, and that count for the endpoint."""
    broken = []
    for check in conditions:
        counts = check.endpoint in ("", endpoint.name) and (check.name != "machine" or endpoint.timed)
        if check.status == FAIL and arm.name in check.arms and counts:
            broken.append(check.name)
    return broken


def _pairwise(name: str, unlike: Callable[[Run, Run], str], good: str, baseline: Arm, arms: list[Arm]) -> Check:
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
        return Check(name, FAIL, "; ".join(texts.values()), tuple(texts))
    return Check(name, PASS, good)


# --------------------------------------------------------------------------------------- what is unlike about a pair


def unlike_evaluation(run: Run, twin: Run) -> str:
    tokens, twin_tokens = run.summary.get("eval_hash"), twin.summary.get("eval_hash")
    if not tokens or not twin_tokens:
        return "validation tokens not recorded"
    return "" if tokens == twin_tokens else "other validation tokens"


def unlike_batches(run: Run, twin: Run) -> str:
    """Runs are compared up to the end of the shorter one."""
    last, twin_last = run.summary.get("batch_hash"), twin.summary.get("batch_hash")
    if last and last == twin_last:
        return ""
    if last and twin_last and run.summary.get("steps") == twin.summary.get("steps"):
        return "other batches"
    try:
        hashes, twin_hashes = _batch_hashes(run), _batch_hashes(twin)
    except UserError as error:
        return error.problem
    shared = hashes.keys() & twin_hashes.keys()
    if not shared:
        return "no batch hash in common"
    step = max(shared)  # the hash is a chain: if it agrees at a step, all batches before that agree
    return "" if hashes[step] == twin_hashes[step] else f"other batches before step {step}"


def _batch_hashes(run: Run) -> dict[int, str]:
    """By step."""
    rows = read_rows(run.path / "metrics.jsonl")
    return {row["step"]: row["batch_hash"] for row in rows if row.get("batch_hash")}


def unlike_init(run: Run, twin: Run) -> str:
    """Parameters of the same name and shape must begin with the same normal numbers."""
    unlike = []
    for name, (twin_z, twin_shape) in twin.init.items():
        z, shape = run.init.get(name, (twin_z, twin_shape))
        if shape == twin_shape and z != twin_z:
            unlike.append(name)
    more = " ..." if len(unlike) > 2 else ""
    return f"other initial values of {', '.join(unlike[:2])}{more}" if unlike else ""


def unlike_schedule(run: Run, twin: Run) -> str:
    for each in (run, twin):
        steps, done = (each.config.get("resolved") or {}).get("steps"), each.figure("steps")
        if steps and done < steps:
            return f"{'the baseline ' if each is twin else ''}ended at step {done:.0f} of {steps}"
    return ""


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
    files = differing_files(run.code, twin.code) if run.source != twin.source else []
    shared = run.plugins.keys() & twin.plugins.keys()
    files += [name for name in shared if run.plugins[name] != twin.plugins[name]]
    return differ(files) if files else ""


def unlike_machine(run: Run, twin: Run) -> str:
    facts = [(name, run.summary.get(name), twin.summary.get(name)) for name in MACHINE]
    facts.append(("runs on a device", run.env.get("runs_per_device", 1), twin.env.get("runs_per_device", 1)))
    return ", ".join(f"{name} {fact}, not {twin_fact}" for name, fact, twin_fact in facts if fact != twin_fact)


PAIRWISE: dict[str, tuple[Callable[[Run, Run], str], str]] = {
    "evaluation": (unlike_evaluation, "the same validation tokens"),
    "batches": (unlike_batches, "the same batches in the same order"),
    "init": (unlike_init, "the same initial normal numbers wherever name and shape agree"),
    "schedule": (unlike_schedule, "every schedule ran to its end"),
    "tokens": (partial(unlike_amount, "tokens"), "the same number of tokens"),
    "code": (unlike_code, "the same code"),
}
"""Conditions on pairs: what is unlike about one, or "", and what to say where none is."""


# ------------------------------------------------------------------------------------------------- the other conditions


def _seeds(baseline: Arm, arms: list[Arm], study: Study | None) -> Check:
    """Pairs need the same seeds, and seeds that differ."""
    alone = [arm.name for arm in arms if not arm.runs.keys() & baseline.runs.keys()]
    if alone and baseline.runs:
        return Check("seeds", FAIL, f"no seed in common with the baseline: {', '.join(alone)}", tuple(alone))
    copies = {arm.name: text for arm in (baseline, *arms) if (text := _copies(arm))}
    if copies:
        broken = [arm.name for arm in arms] if baseline.name in copies else [*copies]
        return Check("seeds", FAIL, "; ".join(f"{name}: {text}" for name, text in copies.items()), tuple(broken))
    wanted = {*(study.seeds if study is not None else baseline.runs)}
    missing = [(arm.name, sorted(wanted - arm.runs.keys())) for arm in (baseline, *arms)]
    lacking = [f"{name} lacks {_seed_list(seeds)}" for name, seeds in missing if seeds]
    if any(_starts_from_weights(run) for arm in (baseline, *arms) for run in arm.runs.values()):
        lacking.append("runs go on from the weights of another run: seeds differ in data order and dropout alone")
    text = "; ".join(lacking) or f"{several(len(wanted), 'seed')}, complete and paired"
    return Check("seeds", WARN if lacking else PASS, text)


def _starts_from_weights(run: Run) -> bool:
    return "run" in (run.config.get("init") or {})


def _copies(arm: Arm) -> str:
    """Runs of an arm with different seeds but the same initial values or the same batches."""
    first_seeds: dict[tuple[str, object], int] = {}
    for seed, run in arm.runs.items():
        values = "" if _starts_from_weights(run) else tuple(sorted((name, z) for name, (z, _) in run.init.items()))
        for kind, value in (("initial values", values), ("batches", run.summary.get("batch_hash"))):
            first = first_seeds.setdefault((kind, value), seed)
            if value and first != seed:
                return f"the same {kind} at seeds {first} and {seed}"
    return ""


def _learned(baseline: Arm, arms: list[Arm]) -> Check:
    """A baseline that has learned nothing is no baseline: what beats it may be what breaks least."""
    seeds = [*baseline.runs]
    unigram, losses = baseline.values("unigram_bpb", seeds), baseline.values("val_bpb", seeds)
    known = unigram[np.isfinite(unigram)]
    if not len(known):
        if baseline.failed and len(baseline.failed) == len(seeds):
            return Check(LEARNED, FAIL, "no run of the baseline trained", tuple(arm.name for arm in arms))
        return Check(LEARNED, WARN, "the unigram entropy of the text is not recorded")
    if has_learned(losses.tolist(), float(known[0])):
        return Check(LEARNED, PASS, "the baseline ends below 0.9 of the unigram entropy")
    text = "the baseline has not learned: its loss, or that of most of its runs, is above 0.9 of the unigram entropy"
    return Check(LEARNED, FAIL, text, tuple(arm.name for arm in arms))


def _saturated(endpoint: Endpoint, baseline: Arm, arms: list[Arm]) -> Check:
    """Differences of a share can't be read where neither side is above guessing, or below the largest value."""
    broken = {}
    for arm in arms:
        shares = {"at chance": [], "at the ceiling": []}
        for each in (baseline, arm):
            seeds = [*each.runs]
            items = each.values(endpoint.beside("items"), seeds)
            scaled = each.on_scale(endpoint, seeds)
            floor = logits(each.values(endpoint.beside(endpoint.measure.floor), seeds), items)
            most = logits(np.full(len(items), endpoint.measure.most), items)
            shares["at chance"].append(_lowest(scaled - floor))
            shares["at the ceiling"].append(_lowest(most - scaled))
        for where, lows in shares.items():
            if max(lows) <= 0:
                broken[arm.name] = f"{arm.name} and the baseline are {where}"
    if broken:
        return Check("saturated", FAIL, "; ".join(broken.values()), tuple(broken), endpoint.name)
    return Check("saturated", PASS, f"{endpoint.name} is neither at chance nor at its ceiling", (), endpoint.name)


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


def _environment(baseline: Arm, arms: list[Arm]) -> Check:
    """What the runs record of libraries and machine."""
    facts: dict[str, set[str]] = {}
    for run in [run for arm in (baseline, *arms) for run in arm.runs.values()]:
        packages = run.env.get("packages") or {}
        recorded = {name: packages.get(name) for name in LIBRARIES}
        recorded |= {"python": run.env.get("python"), "compiled programs": run.summary.get("programs")}
        recorded |= {name: run.summary.get(name) for name in MACHINE}
        for name, fact in recorded.items():
            if fact is not None:
                facts.setdefault(name, set()).add(str(fact))
    notes = [f"{name} {' and '.join(sorted(values))}" for name, values in facts.items() if len(values) > 1]
    if any(run.env.get("git_dirty") for arm in (baseline, *arms) for run in arm.runs.values()):
        notes.append("uncommitted changes in the code")
    return Check("environment", WARN if notes else PASS, "; ".join(notes) or "the same libraries and machine")


def _plan(study: Study | None) -> Check:
    if study is None:
        return Check("plan", WARN, "no study.yaml: arms, seeds and endpoint were not fixed before the runs")
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
        return Check(
            "text", PASS, "intervals hold the error over seeds and over text; that over text is the smaller one"
        )
    windows = next(run.windows for run in baseline.runs.values() if run.windows)
    ratio = max(
        ((effect.text_se or 0.0) / effect.seed_se) ** 2 if effect.seed_se else math.inf for effect in larger.values()
    )
    if windows.everything:
        remedy = f"a larger validation set than these {windows.reach} tokens"
    else:
        wanted = min(windows.tokens * ratio, windows.reach)
        remedy = f"more validation text (train.eval_tokens={wanted:.0f})"
    return Check("text", WARN, f"{remedy} would help more than more seeds ({', '.join(larger)})")


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

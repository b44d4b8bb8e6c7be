"""Is the comparison fair? One line per condition: PASS, WARN or FAIL. An arm with a FAIL is NOT COMPARABLE.

A FAIL can be waived with `--allow`; it is then shown as WAIVED. Of a table that was made elsewhere most conditions
are UNKNOWN: nothing there proves them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations, product, starmap
from typing import Any

import numpy as np

from nexus_ablate.comparison.arms import Arm
from nexus_ablate.comparison.failures import failed_seeds
from nexus_ablate.comparison.load import Excluded, Plan, Trained
from nexus_ablate.comparison.pairs import shared_init, unlike_batches, unlike_code, unlike_init, unlike_plugins
from nexus_ablate.comparison.tuning import best_lr, failed_rates
from nexus_ablate.comparison.windows import text_error
from nexus_ablate.console import several
from nexus_ablate.errors import UserError, unknown
from nexus_ablate.provenance import NOT_RECORDED

PASS, WARN, FAIL, WAIVED, UNKNOWN = "PASS", "WARN", "FAIL", "WAIVED", "UNKNOWN"
STATUSES = (PASS, WARN, FAIL, WAIVED, UNKNOWN)
MISMATCH_WARN, MISMATCH_FAIL = 0.01, 0.05
"""Relative differences in parameters, FLOPs, tokens or seconds: the first is reported, the second breaks a match."""
TUNING, TEXT = "learning_rate", "text"
LIBRARIES = ("torch", "numpy", "tokenizers", "datasets", "safetensors")
"""Libraries whose version can change the numbers of a run. scipy is used in `compare` only, after the runs."""


@dataclass
class Check:
    """One condition: its name (for `--allow`), status and result, and the arms that break it."""

    name: str
    status: str
    text: str
    arms: list[str] = field(default_factory=list)


def checks(
    baseline: Arm, others: list[Arm], plan: Plan, excluded: list[Excluded], allow: Iterable[str] = ()
) -> list[Check]:
    """The fairness header.

    Raises:
        ConfigError: `allow` names a condition that does not exist.
    """
    arms = [arm for arm in others if arm.runs]
    results = [
        _each("evaluation", arms, lambda arm: _pairwise(arm, baseline, _other_eval), "same validation tokens"),
        _each("batches", arms, lambda arm: _pairwise(arm, baseline, _batches), "same batches in the same order"),
        _init(arms, baseline),
        _schedule(baseline, arms),
        _budget("tokens", "tokens", arms, baseline, plan, breaks=plan.match in ("none", "params", "tokens")),
        _budget("params", "params", arms, baseline, plan, breaks=plan.match == "params"),
        _budget("flops", "flops", arms, baseline, plan, breaks=plan.match == "flops"),
        *([_budget("seconds", "seconds", arms, baseline, plan, breaks=True)] if plan.match == "seconds" else []),
        _seeds(baseline, others, plan),
        _stable(baseline),
        _learning_rate(baseline, arms, plan),
        _code(baseline, arms, excluded),
        *(
            [_each("machine", arms, lambda arm: other_machine(arm, baseline), "same machine")]
            if plan.endpoint.timed
            else []
        ),
        _plan(plan, [baseline, *arms]),
        _excluded(excluded),
    ]
    return _waived(results, [*(check.name for check in results), TEXT], allow)


def _waived(results: list[Check], names: list[str], allow: Iterable[str]) -> list[Check]:
    """The conditions with those that were allowed to fail marked.

    Raises:
        ConfigError: `allow` names none of `names`.
    """
    for name in allow:
        if name not in names:
            raise unknown("there is no fairness condition of this name", name, names)
    for check in results:
        if check.name in allow and check.status == FAIL:
            check.status = WAIVED
    return results


def checks_of_listed(
    baseline: Arm, others: list[Arm], plan: Plan, excluded: list[Excluded], allow: Iterable[str] = ()
) -> list[Check]:
    """The fairness header of a table that was made elsewhere: what it doesn't prove is UNKNOWN, never PASS.

    Raises:
        ConfigError: `allow` names a condition that does not exist.
    """
    arms = [arm for arm in others if arm.runs]
    results = [Check(name, UNKNOWN, f"the source does not say whether {question}") for name, question in _UNPROVED]
    for figure in ("tokens", "seconds"):
        if all(arm.mean(figure) for arm in (baseline, *arms)):
            results.append(_budget(figure, figure, arms, baseline, plan, breaks=figure == "tokens"))
        else:
            results.append(Check(figure, UNKNOWN, f"the source does not have {figure} for every arm"))
    if plan.paired:
        results.append(_seeds(baseline, others, plan))
    else:
        counts = ", ".join(f"{arm.label} {len(arm.runs)}" for arm in (baseline, *arms))
        results.append(Check("seeds", WARN, f"arms and baseline do not share their seeds: unpaired; runs: {counts}"))
    stable = _stable(baseline)
    results.append(stable if stable.status == WARN else Check(stable.name, UNKNOWN, "no failure is listed"))
    rates = {arm.lr for arm in (baseline, *arms)}
    if plan.lr_grid or (len(rates) == 1 and None not in rates):
        results.append(_learning_rate(baseline, arms, plan))
    else:
        how = "has no learning rates" if None in rates else "does not say how each arm's learning rate was chosen"
        results.append(Check(TUNING, UNKNOWN, f"the source {how}"))
    if excluded:
        results.append(_excluded(excluded))
    else:
        results.append(Check("excluded", UNKNOWN, "the source does not say whether runs were left out of it"))
    return _waived(results, [check.name for check in results], allow)


_UNPROVED = (
    ("evaluation", "the validation tokens are the same"),
    ("batches", "runs of one seed saw the same batches"),
    ("init", "runs of one seed began with the same numbers"),
    ("schedule", "every schedule ran to its end"),
    ("params", "the arms have the same number of parameters"),
    ("flops", "the arms cost the same"),
    ("code", "the code and the environment were the same"),
    ("plan", "arms, seeds and endpoint were fixed before the runs"),
    (TEXT, "more validation text would help more than more seeds"),
)
"""Conditions that no table of results proves, and the question of each."""


def unfair(arm: Arm, results: list[Check]) -> list[str]:
    """The names of the conditions that an arm breaks, unless they were waived."""
    return [check.name for check in results if check.status == FAIL and arm.label in check.arms]


def _each(name: str, arms: list[Arm], why: Callable[[Arm], str], good: str, status: str = FAIL) -> Check:
    """PASS if `why` returns no reason for any arm, else `status` with the reason for each arm."""
    reasons = {arm.label: reason for arm in arms if (reason := why(arm))}
    if not reasons:
        return Check(name, PASS, good)
    return Check(name, status, "; ".join(f"{label}: {reason}" for label, reason in reasons.items()), list(reasons))


def _pairwise(arm: Arm, baseline: Arm, unlike: Callable[[Trained, Trained], str]) -> str:
    """How the pairs of an arm differ: the first reason, and the seeds that have one."""
    reasons = {s: unlike(run, baseline.runs[s]) for s, run in arm.runs.items() if s in baseline.runs}
    reasons = {seed: reason for seed, reason in reasons.items() if reason}
    return f"{next(iter(reasons.values()))} ({_seed_list(reasons)})" if reasons else ""


def _other_eval(run: Trained, twin: Trained) -> str:
    a, b = ((each.record.summary or {}).get("eval_hash") for each in (run, twin))
    if "diverged" in (run.record.state, twin.record.state):
        return ""  # no loss of this pair enters the table
    return "" if a == b and a else "other validation tokens" if a and b else "validation tokens not recorded"


def _batches(run: Trained, twin: Trained) -> str:
    if "diverged" in (run.record.state, twin.record.state):
        return ""
    try:
        return unlike_batches(run, twin)
    except UserError as error:
        return error.problem


def _init(arms: list[Arm], baseline: Arm) -> Check:
    """Parameters of the same name and shape must have the same initial numbers in both arms."""
    shares: dict[str, tuple[int, int]] = {}
    unlike: dict[str, dict[int, str]] = {}
    reshaped = []
    for arm in arms:
        for seed, run in arm.runs.items():
            if seed not in baseline.runs:
                continue
            twin = baseline.runs[seed]
            shared, of = shared_init(run, twin)
            shares[arm.label] = min(shares.get(arm.label, (shared, of)), (shared, of))
            recorded = all(shape is not None for one in (run, twin) for _, shape in one.init.values())
            if names := unlike_init(run, twin):
                unlike.setdefault(arm.label, {})[seed] = " of " + ", ".join(names[:2]) + " ..." * (len(names) > 2)
            elif shared == 0 and (of == 0 or not recorded) and _width(arm) == _width(baseline):
                unlike.setdefault(arm.label, {})[seed] = ""
            elif shared == 0:
                reshaped.append(arm.label)
    if unlike:
        text = "; ".join(
            f"{name}: other initial values{next(iter(seeds.values()))} ({_seed_list(seeds)})"
            for name, seeds in unlike.items()
        )
        return Check("init", FAIL, text, list(unlike))
    if reshaped:
        return Check("init", WARN, "no parameter has the baseline's shape: " + ", ".join(dict.fromkeys(reshaped)))
    partly = [f"{name} {shared} of {of}" for name, (shared, of) in shares.items() if shared < of]
    note = f"; other shapes leave {', '.join(partly)}" if partly else ""
    return Check("init", PASS, f"same initial normal numbers wherever name and shape agree{note}")


def _width(arm: Arm) -> Any:
    return (arm.config.get("model") or {}).get("d_model")


def _schedule(baseline: Arm, arms: list[Arm]) -> Check:
    """A baseline that did not end its schedule makes every arm incomparable."""
    check = _each("schedule", [baseline, *arms], _unfinished, "every schedule ran to its end")
    if baseline.label in check.arms:
        check.arms = [arm.label for arm in arms]
    return check


def _unfinished(arm: Arm) -> str:
    """Finished runs that stopped before the end of their schedule."""
    short = {}
    for seed, run in arm.runs.items():
        steps = ((run.config.get("resolved")) or {}).get("steps")
        done = run.figures.get("steps")
        if run.record.state == "finished" and steps and done is not None and done < steps:
            short[seed] = f"ended at step {done:.0f} of {steps}"
    return f"{next(iter(short.values()))} ({_seed_list(short)})" if short else ""


def _budget(name: str, figure: str, arms: list[Arm], baseline: Arm, plan: Plan, breaks: bool) -> Check:
    """Check a relative difference to the baseline: reported above 1%; above 5% it breaks a declared match.

    The difference is that of the pair that differs most. Seconds vary between runs, so their means are compared.
    """
    base = baseline.mean(figure)
    if not base:
        return Check(name, WARN, "not recorded")
    off: dict[str, tuple[float, str]] = {}
    for arm in arms:
        arm_mean, base_mean = arm.mean(figure), base
        pairs = [(arm.value(s, figure), baseline.value(s, figure), s) for s in arm.runs if s in baseline.runs]
        shares = {s: a / b - 1 for a, b, s in pairs if math.isfinite(a) and math.isfinite(b) and b}
        if name == "seconds" and arm_mean is not None:
            off[arm.label] = arm_mean / base_mean - 1, ""
        elif shares:
            worst = max(shares, key=lambda seed: abs(shares[seed]))
            alike = max(shares.values()) - min(shares.values()) < 1e-9
            off[arm.label] = shares[worst], "" if alike else f" at seed {worst}"
    reported = {label: share for label, (share, _) in off.items() if abs(share) > MISMATCH_WARN}
    limit = MISMATCH_WARN if name == "tokens" else MISMATCH_FAIL
    broken = [label for label, (share, _) in off.items() if breaks and abs(share) > limit]
    text = ", ".join(f"{label} {share:+.1%}{off[label][1]}" for label, share in reported.items())
    if reported and plan.match == name:
        text += f" (match={name} was declared)"
    return Check(name, FAIL if broken else WARN if reported else PASS, text or "within 1% of the baseline", broken)


def _seeds(baseline: Arm, others: list[Arm], plan: Plan) -> Check:
    planned = plan.seeds[: plan.looks[0]] if plan.looks else plan.seeds  # later looks are for undecided arms
    arms = [arm for arm in others if arm.runs]
    wanted = {*planned, *(() if plan.looks else baseline.runs)}
    wanted = wanted if planned else wanted.union(*(arm.runs for arm in arms))
    missing = {arm.label: sorted(wanted - arm.runs.keys()) for arm in (baseline, *others)}
    reported = [f"{name} lacks {_seed_list(seeds)}" for name, seeds in missing.items() if seeds]
    alone = [arm.label for arm in arms if not arm.runs.keys() & baseline.runs.keys()]
    if alone:
        return Check("seeds", FAIL, "no seed in common with the baseline: " + ", ".join(alone), alone)
    copied = {arm.label: text for arm in (baseline, *arms) if (text := _copies(arm))}
    if copied:
        broken = [arm.label for arm in arms] if baseline.label in copied else list(copied)
        return Check("seeds", FAIL, "; ".join(f"{label}: {text}" for label, text in copied.items()), broken)
    continued = [arm.label for arm in (baseline, *arms) if any(starts_from_weights(run) for run in arm.runs.values())]
    started = f"; seeds differ in data order and dropout alone, not in the first weights: {', '.join(continued)}"
    detail = "; ".join(reported) or f"{several(len(wanted), 'seed')}, complete and paired"
    return Check("seeds", WARN if reported or continued else PASS, detail + (started if continued else ""))


def starts_from_weights(run: Trained) -> bool:
    """Whether a run's first weights are those of another one, whatever its seed."""
    return "run" in ((run.record.config or {}).get("init") or {})


def _copies(arm: Arm) -> str:
    """Runs of an arm with different seeds but the same initial values or the same batches.

    Runs that start from a checkpoint begin with the same numbers: there only the batches distinguish seeds.
    """
    met: dict[object, int] = {}
    for seed, run in arm.runs.items():
        begun = tuple(sorted((name, z) for name, (z, _) in run.init.items()))
        batches = (run.record.summary or {}).get("batch_hash")
        drawn = not starts_from_weights(run)
        for kind, mark in (("initial values", begun if drawn else ()), ("batches", str(batches or ""))):
            if mark and met.setdefault((kind, mark), seed) != seed:
                one, other = arm.runs[met[kind, mark]].record.path.name, run.record.path.name
                return f"the same {kind} at seeds {met[kind, mark]} and {seed} ({one} and {other})"
    return ""


def _stable(baseline: Arm) -> Check:
    lost = failed_seeds(baseline.runs, baseline.runs)
    if not lost:
        return Check("baseline", PASS, "no run of the baseline failed to train")
    hows = ", ".join(sorted(set(lost.values())))
    return Check("baseline", WARN, f"the baseline failed to train at {_seed_list(lost)} ({hows}): those pairs are lost")


def _learning_rate(baseline: Arm, arms: list[Arm], plan: Plan) -> Check:
    if not plan.lr_grid:
        rates = sorted({arm.lr for arm in (baseline, *arms) if arm.lr is not None})
        shared = f"one learning rate for all ({rates[0]:g})" if len(rates) == 1 else "no learning rate was tuned"
        return Check(TUNING, WARN, f"{shared}: an arm whose best learning rate differs is penalized")
    everyone = [baseline, *arms]
    overlap = sorted(set(plan.tuning_seeds) & set(plan.seeds))
    trials = {arm.label: _rates(arm) for arm in everyone}
    unequal = [label for label, rates in trials.items() if rates != trials[baseline.label]]
    edge = [arm.label for arm in everyone if best_lr(arm)[1]]
    reported = []
    if overlap:
        reported.append(f"tuned on the seeds of the claim ({_seed_list(overlap)})")
    if unequal:
        rates = (
            f"{label} {', '.join(map('{:g}'.format, trials[label])) or 'none'}" for label in (baseline.label, *unequal)
        )
        reported.append("trials at other rates: " + "; ".join(rates))
    if edge:
        reported.append("best at the edge of the grid: " + ", ".join(edge))
    broken = [a.label for a in arms] if overlap or baseline.label in edge else list(dict.fromkeys([*unequal, *edge]))
    if reported:
        return Check(TUNING, FAIL, "; ".join(reported), broken)
    if not any(trials.values()):
        return Check(TUNING, WARN, "the study's learning-rate runs are missing")
    count = len(trials[baseline.label])
    failed = {arm.label: failed_rates(arm) for arm in everyone}
    named = ", ".join(
        f"{label} at {' and '.join(map('{:g}'.format, rates))}" for label, rates in failed.items() if rates
    )
    left_out = f"; left out, because a tuning run failed to train: {named}" if named else ""
    return Check(TUNING, PASS, f"{count} trials for each arm at the same rates, best ones inside the grid{left_out}")


def _rates(arm: Arm) -> list[float]:
    """The learning rate of each tuning run."""
    return sorted(run.config["optim"]["lr"] for run in arm.tuning)


def _code(baseline: Arm, arms: list[Arm], excluded: list[Excluded]) -> Check:
    """Runs made by different code are not a pair. Libraries, machine and uncommitted changes only give a WARN."""
    made = {arm.label: _runs_by_code(arm) for arm in (baseline, *arms)}
    unlike: dict[str, list[str]] = {}
    for arm in arms:
        pairs = combinations((made[baseline.label] | made[arm.label]).values(), 2)
        others = [run for label, runs in made.items() if label != arm.label for run in runs.values() if run.plugins]
        reasons = [*starmap(unlike_code, pairs), *starmap(unlike_plugins, product(made[arm.label].values(), others))]
        if reason := ", ".join(dict.fromkeys(filter(None, reasons))):
            unlike.setdefault(reason, []).append(arm.label)
    if unlike:
        texts = [f"{reason} between the baseline and {', '.join(names)}" for reason, names in unlike.items()]
        return Check("code", FAIL, "; ".join(texts), [name for names in unlike.values() for name in names])
    everyone = [run for runs in made.values() for run in runs.values()]
    commits = sorted({str(run.env["git_commit"])[:8] for run in everyone if run.env.get("git_commit")})
    same = f"same code (commit {', '.join(commits[:3]) or 'not recorded'})"
    notes = _environments([run for arm in (baseline, *arms) for run in arm.runs.values()])
    if newer := [out.newer_code for out in excluded if out.newer_code]:
        notes.insert(0, f"{len(newer)} newer runs are left out: the study was launched last by other code ({newer[0]})")
    if any(run.code is None for run in everyone):
        return Check("code", WARN, "; ".join([f"{NOT_RECORDED}; all by {everyone[0].source}", *notes]))
    return Check("code", WARN, "; ".join([same, *notes])) if notes else Check("code", PASS, f"{same} and environment")


def _runs_by_code(arm: Arm) -> dict[object, Trained]:
    """One run for each version of the code that made runs of the arm, at any learning rate."""
    runs = [*arm.tuning, *(run for each in (arm, arm.tuned, arm.shared) if each for run in each.runs.values())]
    return {(run.source, run.plugins): run for run in runs}


def _environments(runs: list[Trained]) -> list[str]:
    """The conditions under which the finished runs were not trained alike."""

    def facts(run: Trained) -> dict[str, str]:
        summary, packages = run.record.summary or {}, run.env.get("packages") or {}
        return {
            "python": str(run.env.get("python") or ""),
            **{name: str(packages.get(name) or "") for name in LIBRARIES},
            **_machine(run),
            "compiled programs": str(summary.get("programs", "")),
            "graph breaks": str(summary.get("graph_breaks", "")),
            "host": str(run.env.get("host")),
        }

    finished = [run for run in runs if run.record.state == "finished"]
    seen: dict[str, set[str]] = {}
    for run in finished:
        for name, value in facts(run).items():
            if value:
                seen.setdefault(name, set()).add(value)
    reported = [f"{name} {' and '.join(sorted(values))}" for name, values in seen.items() if len(values) > 1]
    if any(run.env.get("git_dirty") for run in finished):
        reported.append("uncommitted changes in the code")
    return reported


def _machine(run: Trained) -> dict[str, str]:
    """What makes a run fast or slow whatever it computes."""
    summary = run.record.summary or {}
    return {
        "device": str(summary.get("device", "")).split(":")[0],
        "processor": str(summary.get("processor", "")),
        "threads": str(summary.get("threads", "")),
        "runs on a device": str(run.env.get("runs_per_device", 1)),
    }


def other_machine(arm: Arm, baseline: Arm) -> str:
    """How the machines of an arm and of the baseline differ, so that neither speed nor memory compares; or ''."""

    def seen(runs: Iterable[Trained]) -> dict[str, set[str]]:
        facts = [_machine(run) for run in runs if run.record.state == "finished"]
        return {name: {each[name] for each in facts} for name in (facts[0] if facts else ())}

    own, other = seen(arm.runs.values()), seen(baseline.runs.values())
    unlike = [name for name in own if name in other and own[name] != other[name]]
    return ", ".join(
        f"{name} {' and '.join(sorted(own[name]))}, not {' and '.join(sorted(other[name]))}" for name in unlike
    )


def _plan(plan: Plan, arms: list[Arm]) -> Check:
    if not plan.name:
        return Check("plan", WARN, "no study.yaml: arms, seeds and endpoint were not fixed before the runs")
    reported = [f"amendments after the first run: {len(plan.amendments)}"] if plan.amendments else []
    if strangers := [arm.label for arm in arms if arm.name not in {plan.baseline, *plan.arms}]:
        reported.append(f"not an arm of the study: {', '.join(strangers)}")
    if reported := [*plan.exploratory, *reported]:
        return Check("plan", WARN, "; ".join(reported))
    return Check("plan", PASS, f"arms, seeds and endpoint ({plan.endpoint.name}) were fixed before the runs")


def _excluded(excluded: list[Excluded]) -> Check:
    text = f"excluded runs, listed below: {len(excluded)}" if excluded else "no run is excluded"
    return Check("excluded", WARN if excluded else PASS, text)


def error_over_text(arm: Arm, baseline: Arm, seeds: list[int], endpoint: str) -> tuple[float | None, str]:
    """Standard error over blocks of text of an arm's mean difference, in the endpoint's unit; or why there is none.

    Args:
        seeds: Those at which both have a result.
    """
    if not seeds:
        return None, ""
    if endpoint not in ("val_loss", "val_bpb"):
        return None, f"{endpoint} is not recorded by window of text"
    reasons = {seed: reason for seed in seeds if (reason := _other_windows(arm.runs[seed], baseline.runs[seed]))}
    if reasons:
        return None, f"{next(iter(reasons.values()))} ({_seed_list(reasons)})"
    arm_windows, base_windows = (
        [run.windows for seed in seeds if (run := each.runs[seed]).windows] for each in (arm, baseline)
    )
    error = text_error(arm_windows, base_windows)
    if error is None:
        return None, f"all {base_windows[0].tokens} validation tokens are one block; raise train.eval_tokens"
    if endpoint == "val_bpb":  # the same tokens everywhere: a constant times the loss
        loss, bits = baseline.mean("val_loss"), baseline.mean("val_bpb")
        return (error * bits / loss, "") if loss and bits else (None, "val_bpb is not recorded")
    return error, ""


def _other_windows(arm_run: Trained, twin: Trained) -> str:
    if arm_run.windows is None or twin.windows is None:
        return "losses by window of text not recorded"
    for run in (arm_run, twin):
        if run.windows and not math.isclose(run.windows.mean, run.figures.get("val_loss", math.nan), rel_tol=1e-6):
            return "losses by window do not average to val_loss"
    return "" if np.array_equal(arm_run.windows.places, twin.windows.places) else "other windows of text"


def text(baseline: Arm, errors: Mapping[str, tuple[float, float]], lacking: Mapping[str, str]) -> Check:
    """Whether more validation text would help more than more seeds.

    Args:
        baseline: Its runs say how much text there is.
        errors: By arm, the standard error of its difference over blocks of text, and over seeds.
        lacking: By arm, why there is none over text; "" where there is.
    """
    larger = {label: pair for label, pair in errors.items() if pair[0] > pair[1]}
    sentences = []
    if larger:
        numbers = ", ".join(f"{label} {a:.2g} over text, {b:.2g} over seeds" for label, (a, b) in larger.items())
        remedy = _more_text(baseline, max((a / b) ** 2 if b else math.inf for a, b in larger.values()))
        sentences.append(f"{remedy} would help more than more seeds; standard errors: {numbers}")
    for reason in dict.fromkeys(filter(None, lacking.values())):
        sentences.append(f"{', '.join(label for label in lacking if lacking[label] == reason)}: {reason}")
    if sentences:
        return Check(TEXT, WARN, "; ".join(sentences), list(larger))
    if not errors:
        return Check(TEXT, PASS, "no arm has a standard error over seeds")
    return Check(TEXT, PASS, "no standard error over text exceeds the one over seeds")


def _more_text(baseline: Arm, factor: float) -> str:
    """The override that gives so many times the validation text."""
    windows = next(run.windows for run in baseline.runs.values() if run.windows)
    if windows.everything:
        return f"a larger validation set than these {windows.reach} tokens"
    if windows.tokens * factor >= windows.reach:
        return f"all of the validation text (train.eval_tokens={windows.reach})"
    return f"more validation text (train.eval_tokens={2 ** math.ceil(math.log2(windows.tokens * factor))})"


def _seed_list(seeds: Iterable[int]) -> str:
    seeds = list(seeds)
    return f"seed{'s' * (len(seeds) != 1)} {', '.join(map(str, seeds[:8]))}" + (" ..." if len(seeds) > 8 else "")

"""Is the comparison fair? One line per condition: PASS, WARN or FAIL. An arm with a FAIL is NOT COMPARABLE.

A FAIL can be waived with `--allow`; it is then shown as WAIVED. Of a table that was made elsewhere most conditions
are UNKNOWN: nothing there proves them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, product

import numpy as np

from nexus_ablate.comparison.arms import Arm
from nexus_ablate.comparison.failures import baseline_has_learned, failed_seeds
from nexus_ablate.comparison.learning_rates import beyond_edge, failed_rates
from nexus_ablate.comparison.load import Excluded, Trained
from nexus_ablate.comparison.pairs import shares_init, unlike_batches, unlike_code, unlike_init, unlike_plugins
from nexus_ablate.comparison.terms import Terms
from nexus_ablate.console import several
from nexus_ablate.errors import unknown
from nexus_ablate.provenance import NOT_RECORDED
from nexus_ablate.runs.naming import BASELINE
from nexus_ablate.study.endpoint import Endpoint

PASS, WARN, FAIL, WAIVED, UNKNOWN = "PASS", "WARN", "FAIL", "WAIVED", "UNKNOWN"
MISMATCH_WARN, MISMATCH_FAIL = 0.01, 0.05
"""Relative differences in parameters, FLOPs, tokens or seconds: the first is reported, the second breaks a match."""
TUNING, TEXT, LEARNED, MACHINE = "learning_rate", "text", "learned", "machine"
OTHER_UNIT = 50.0
"""Times the baseline's mean: more likely another unit than another result."""
MANY_DIGITS = 5
"""Significant digits from which two runs are not equal by chance."""
LIBRARIES = ("torch", "numpy", "tokenizers", "datasets", "safetensors")
"""Libraries whose version can change the numbers of a run. scipy is used in `compare` only, after the runs."""
MACHINE_FACTS = ("device", "processor", "threads", "runs on a device")


@dataclass
class Check:
    """One condition: its name (for `--allow`), status and result, and the arms that break it."""

    name: str
    status: str
    text: str
    arms: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Table:
    """What conditions are checked of: `arms` have runs, `others` are all beside the baseline."""

    baseline: Arm
    others: list[Arm]
    terms: Terms
    excluded: list[Excluded]

    @property
    def arms(self) -> list[Arm]:
        return [arm for arm in self.others if arm.runs]

    @property
    def everyone(self) -> list[Arm]:
        return [self.baseline, *self.arms]


def checks(
    baseline: Arm, others: list[Arm], terms: Terms, excluded: list[Excluded], allow: Iterable[str]
) -> list[Check]:
    """The fairness header.

    Of a table that was made elsewhere, a condition that it does not prove is UNKNOWN, never PASS.

    Raises:
        ConfigError: `allow` names a condition that does not exist.
    """
    table = _Table(baseline, others, terms, excluded)
    results = []
    for name, check, question in CONDITIONS:
        if terms.is_listed and question:
            results.append(Check(name, UNKNOWN, f"the source does not say whether {question}"))
        elif (result := check(table)) is not None:
            results.append(result)
    names = list(dict.fromkeys([*(result.name for result in results), TEXT]))
    for name in allow:
        if name not in names:
            raise unknown("there is no fairness condition of this name", name, names)
    for result in results:
        if result.name in allow and result.status == FAIL:
            result.status = WAIVED
    return results


def unfair(arm: Arm, conditions: list[Check], endpoint: Endpoint) -> list[str]:
    """The names of the conditions that an arm breaks, unless they were waived, and that count for the endpoint."""
    broken = [check.name for check in conditions if check.status == FAIL and arm.label in check.arms]
    return [name for name in broken if name != MACHINE or endpoint.timed]


def by_arm(name: str, reasons: dict[str, str], good: str) -> Check:
    """FAIL with the reason of each arm that has one."""
    broken = {label: reason for label, reason in reasons.items() if reason}
    if not broken:
        return Check(name, PASS, good)
    return Check(name, FAIL, "; ".join(f"{label}: {reason}" for label, reason in broken.items()), list(broken))


def _widened(check: Check, table: _Table) -> Check:
    """The condition, which every arm breaks where the baseline does."""
    if table.baseline.label in check.arms:
        check.arms = [arm.label for arm in table.arms]
    return check


def _pairs(arm: Arm, baseline: Arm) -> Iterator[tuple[Trained, Trained]]:
    """The runs of an arm, at each of its learning rates, beside the baseline's of the same seed."""
    for run in arm.claim_runs:
        if run.seed in baseline.runs:
            yield run, baseline.runs[run.seed]


def _pairwise(name: str, unlike: Callable[[Trained, Trained], str], good: str, table: _Table) -> Check:
    """Whether the pairs of each arm agree. A diverged pair has no loss."""
    different = {}
    for arm in table.arms:
        reasons = {}
        for run, base_run in _pairs(arm, table.baseline):
            if "diverged" not in (run.record.state, base_run.record.state):
                reasons[run.seed] = reasons.get(run.seed) or unlike(run, base_run)
        different[arm.label] = _at_seeds(reasons)
    return by_arm(name, different, good)


def _at_seeds(reasons: dict[int, str]) -> str:
    """The first reason, and the seeds that have one."""
    reasons = {seed: reason for seed, reason in reasons.items() if reason}
    return f"{next(iter(reasons.values()))} ({_seed_list(reasons)})" if reasons else ""


# ------------------------------------------------------------------------------------------------------ the conditions


def _unlike_evaluation(run: Trained, base_run: Trained) -> str:
    tokens, base_tokens = run.summary.get("eval_hash"), base_run.summary.get("eval_hash")
    if not tokens or not base_tokens:
        return "validation tokens not recorded"
    return "" if tokens == base_tokens else "other validation tokens"


def _init(table: _Table) -> Check:
    """Parameters of the same name and shape must have the same initial numbers in both arms."""
    unlike: dict[str, str] = {}
    reshaped = []
    for arm in table.arms:
        reasons = {}
        for run, base_run in _pairs(arm, table.baseline):
            if names := unlike_init(run, base_run):
                more = " ..." if len(names) > 2 else ""
                reasons[run.seed] = f"other initial values of {', '.join(names[:2])}{more}"
            elif not shares_init(run, base_run):
                reshaped.append(arm.label)
        unlike[arm.label] = _at_seeds(reasons)
    if any(unlike.values()) or not reshaped:
        return by_arm("init", unlike, "same initial normal numbers wherever name and shape agree")
    return Check("init", WARN, "no parameter has the baseline's shape: " + ", ".join(dict.fromkeys(reshaped)))


def _schedule(table: _Table) -> Check:
    """A baseline that did not end its schedule makes every arm incomparable."""
    reasons = {}
    for arm in table.everyone:
        short = {}
        for seed, run in arm.runs.items():
            steps = (run.config.get("resolved") or {}).get("steps")
            done = run.figures.get("steps")
            if run.record.state == "finished" and steps and done is not None and done < steps:
                short[seed] = f"ended at step {done:.0f} of {steps}"
        reasons[arm.label] = _at_seeds(short)
    return _widened(by_arm("schedule", reasons, "every schedule ran to its end"), table)


def _budget(figure: str, table: _Table) -> Check | None:
    """A relative difference to the baseline: reported above 1%; above 5% it breaks a declared match.

    The difference is that of the pair that differs most; where runs share no seeds, any two are a pair. Means are
    compared of seconds, which vary between runs.
    """
    match, baseline = table.terms.study.match, table.baseline
    if table.terms.is_listed:
        if not all(arm.mean(figure) for arm in table.everyone):
            return Check(figure, UNKNOWN, f"the source does not have {figure} for every arm")
    elif figure == "seconds" and match != "seconds":
        return None
    base_mean = baseline.mean(figure)
    if not base_mean:
        return Check(figure, WARN, "not recorded")
    mismatches, worst_seeds = {}, {}
    for arm in table.arms:
        mean = arm.mean(figure)
        if figure == "seconds" and mean is not None:
            mismatches[arm.label] = mean / base_mean - 1
            continue
        seeds = [*arm.runs]
        values = arm.values(figure, seeds)
        with np.errstate(divide="ignore", invalid="ignore"):
            if table.terms.is_paired:
                shares = values / baseline.values(figure, seeds) - 1
            else:
                shares = np.divide.outer(values, baseline.values(figure, [*baseline.runs])).ravel() - 1
        known = np.flatnonzero(np.isfinite(shares))
        if known.size:
            worst = known[np.abs(shares[known]).argmax()]
            mismatches[arm.label] = float(shares[worst])
            if table.terms.is_paired and np.ptp(shares[known]) >= 1e-9:
                worst_seeds[arm.label] = f" at seed {seeds[worst]}"
    return mismatch(figure, mismatches, match, worst_seeds)


def mismatch(figure: str, shares: dict[str, float], match: str, places: Mapping[str, str] | None = None) -> Check:
    """Relative differences to the baseline: reported above 1%; above 5% (tokens: 1%) they break a declared match.

    Args:
        figure: tokens, params, flops or seconds.
        shares: By arm.
        match: What the study matches.
        places: Where the difference of an arm is, for the text.
    """
    breaks = match == figure
    if figure == "tokens":
        breaks = match in ("none", "params", "tokens")
    limit = MISMATCH_WARN if figure == "tokens" else MISMATCH_FAIL
    reported, broken = [], []
    for label, share in shares.items():
        if abs(share) > MISMATCH_WARN:
            reported.append(f"{label} {share:+.1%}{(places or {}).get(label, '')}")
        if breaks and abs(share) > limit:
            broken.append(label)
    if not reported:
        return Check(figure, PASS, "within 1% of the baseline")
    declared = f" (match={figure} was declared)" if match == figure else ""
    return Check(figure, FAIL if broken else WARN, ", ".join(reported) + declared, broken)


def _seeds(table: _Table) -> Check:
    terms, baseline, arms = table.terms, table.baseline, table.arms
    if not terms.is_paired:
        counts = ", ".join(f"{arm.label} {len(arm.runs)}" for arm in table.everyone)
        return Check("seeds", WARN, f"arms and baseline do not share their seeds: unpaired; runs: {counts}")
    alone = [arm.label for arm in arms if not arm.runs.keys() & baseline.runs.keys()]
    if alone:
        return Check("seeds", FAIL, "no seed in common with the baseline: " + ", ".join(alone), alone)
    copied = by_arm("seeds", {arm.label: _copies(arm) for arm in table.everyone}, "")
    if copied.status == FAIL:
        return _widened(copied, table)
    wanted = {*terms.study.first_seeds}  # later looks are for undecided arms
    if not terms.study.looks:
        wanted |= baseline.runs.keys()
    if not terms.study.seeds:
        wanted = wanted.union(*(arm.runs for arm in arms))
    lacking = []
    for arm in (baseline, *table.others):
        missing = sorted(wanted - arm.runs.keys())
        if missing:
            lacking.append(f"{arm.label} lacks {_seed_list(missing)}")
    text = "; ".join(lacking) or f"{several(len(wanted), 'seed')}, complete and paired"
    continued = [arm.label for arm in table.everyone if any(map(_starts_from_weights, arm.runs.values()))]
    if continued:
        text += f"; seeds differ in data order and dropout alone, not in the first weights: {', '.join(continued)}"
    return Check("seeds", WARN if lacking or continued else PASS, text)


def _starts_from_weights(run: Trained) -> bool:
    """Whether a run's first weights are those of another one, whatever its seed."""
    return "run" in (run.config.get("init") or {})


def _copies(arm: Arm) -> str:
    """Runs of an arm with different seeds but the same initial values or the same batches.

    Runs that start from a checkpoint begin with the same numbers: there only the batches distinguish seeds.
    """
    first_seeds: dict[tuple[str, object], int] = {}
    for seed, run in arm.runs.items():
        values = "" if _starts_from_weights(run) else tuple(sorted((name, z) for name, (z, _) in run.init.items()))
        for kind, value in (("initial values", values), ("batches", run.summary.get("batch_hash"))):
            first = first_seeds.setdefault((kind, value), seed)
            if value and first != seed:
                names = f"{arm.runs[first].record.path.name} and {run.record.path.name}"
                return f"the same {kind} at seeds {first} and {seed} ({names})"
    return ""


def _units(table: _Table) -> Check | None:
    """A column of one arm that is so many times the baseline's is more likely in another unit than so different."""
    if not table.terms.is_listed:
        return None
    endpoint, suspected = table.terms.endpoint.name, []
    for arm, figure in product(table.arms, dict.fromkeys((endpoint, "tokens", "seconds"))):
        mean, base_mean = arm.mean(figure), table.baseline.mean(figure)
        if not mean or not base_mean:
            continue
        ratio = abs(mean / base_mean)
        text = f"{figure} of {arm.label} is {ratio:.3g} times the baseline's"
        from_bits = min(abs(ratio * math.log(2) - 1), abs(ratio / math.log(2) - 1))
        if figure == endpoint and from_bits < 0.01:
            suspected.append(f"{text}, as bits are of nats")
        elif not 1 / OTHER_UNIT < ratio < OTHER_UNIT:
            suspected.append(text)
    if suspected:
        return Check("units", WARN, f"another unit? {'; '.join(suspected)}")
    return Check("units", PASS, "no column of an arm is in another unit by its size")


def _repeats(table: _Table) -> Check | None:
    """Runs of different seeds end at one number of many digits only if one was copied or the seed had no effect."""
    if not table.terms.is_listed:
        return None
    repeated = []
    for arm in table.everyone:
        seeds_by_value: dict[float, list[int]] = {}
        for seed in arm.runs:
            value = arm.value(seed, table.terms.endpoint.name)
            if len(f"{value!r}".strip("-0.").replace(".", "")) >= MANY_DIGITS:
                seeds_by_value.setdefault(value, []).append(seed)
        for value, seeds in seeds_by_value.items():
            if len(seeds) > 1:
                repeated.append(f"{arm.label} ends at {value!r} at {_seed_list(seeds)}")
    if repeated:
        return Check("repeats", WARN, f"runs of different seeds are equal to the last digit: {'; '.join(repeated)}")
    return Check("repeats", PASS, "no arm has two runs that are equal to the last digit")


def _stable(table: _Table) -> Check:
    failed = failed_seeds(table.baseline.runs, table.baseline.runs)
    if failed:
        how = ", ".join(sorted(set(failed.values())))
        text = f"the baseline failed to train at {_seed_list(failed)} ({how}): those pairs are lost"
        return Check("baseline", WARN, text)
    if table.terms.is_listed:
        return Check("baseline", UNKNOWN, "no failure is listed")
    return Check("baseline", PASS, "no run of the baseline failed to train")


def _learned(table: _Table) -> Check:
    """A baseline that has learned nothing is no baseline: what beats it may be what breaks least."""
    learned = baseline_has_learned(table.baseline)
    if learned is None:
        return Check(LEARNED, UNKNOWN, "the unigram entropy of the text is not recorded")
    if learned:
        return Check(LEARNED, PASS, "the baseline ends below 0.9 of the unigram entropy")
    text = "the baseline has not learned: its loss, or that of most of its runs, is above 0.9 of the unigram entropy"
    return Check(LEARNED, FAIL, text, [arm.label for arm in table.arms])


def _learning_rate(table: _Table) -> Check:
    study, baseline, everyone = table.terms.study, table.baseline, table.everyone
    if not study.lr_grid:
        rates = {arm.lr for arm in everyone}
        if table.terms.is_listed and (len(rates) > 1 or None in rates):
            how = "has no learning rates" if None in rates else "does not say how each arm's learning rate was chosen"
            return Check(TUNING, UNKNOWN, f"the source {how}")
        return untuned({rate for rate in rates if rate is not None})
    trials, edge, wider = {}, [], set(study.lr_grid)
    for arm in everyone:
        trials[arm.label] = sorted(run.config["optim"]["lr"] for run in arm.tuning)
        if beyond := beyond_edge(arm):
            edge.append(arm.label)
            wider.update(beyond)
    unequal = [label for label, rates in trials.items() if rates != trials[baseline.label]]
    reported = []
    if unequal:
        listed = [f"{label} {_rate_list(trials[label], ', ') or 'none'}" for label in (baseline.label, *unequal)]
        reported.append("trials at other rates: " + "; ".join(listed))
    if edge:
        grid = ",".join(f"{rate:.3g}" for rate in sorted(wider))
        reported.append(f"best at the edge of the grid: {', '.join(edge)}; try lr_grid={grid}")
    if reported:
        broken = list(dict.fromkeys([*unequal, *edge]))
        return _widened(Check(TUNING, FAIL, "; ".join(reported), broken), table)
    if not any(trials.values()):
        return Check(TUNING, WARN, "the study's learning-rate runs are missing")
    text = f"{len(trials[baseline.label])} trials for each arm at the same rates, best ones inside the grid"
    failed = [f"{arm.label} at {_rate_list(rates, ' and ')}" for arm in everyone if (rates := failed_rates(arm))]
    if failed:
        text += f"; left out of the choice, because a run failed to train: {', '.join(failed)}"
    if table.terms.is_listed:
        text += "; judged at the best one alone: a wrong choice of the tuning runs counts for an arm or against it"
    if len(study.tuning_seeds) < 2:
        text += "; one tuning seed"
    few = table.terms.is_listed or len(study.tuning_seeds) < 2
    return Check(TUNING, WARN if few else PASS, text)


def untuned(rates: set[float]) -> Check:
    """The condition of a study whose learning rates were not tuned."""
    shared = f"one learning rate for all ({min(rates):g})" if len(rates) == 1 else "no learning rate was tuned"
    return Check(TUNING, WARN, f"{shared}: an arm whose best learning rate differs is penalized")


def _rate_list(rates: list[float], between: str) -> str:
    return between.join(f"{rate:g}" for rate in rates)


def _code(table: _Table) -> Check:
    """Runs made by different code are not a pair. Libraries, machine and uncommitted changes only give a WARN."""
    made = {}  # one run for each version of the code that made runs of the arm, at any learning rate
    for arm in table.everyone:
        made[arm.label] = {(run.source, run.plugins): run for run in arm.all_runs}
    base_made = made[table.baseline.label]
    unlike: dict[str, list[str]] = {}
    for arm in table.arms:
        arm_made = made[arm.label]
        reasons = [unlike_code(run, other) for run, other in combinations((base_made | arm_made).values(), 2)]
        for label, runs in made.items():
            if label != arm.label:
                reasons += [unlike_plugins(run, other) for run, other in product(arm_made.values(), runs.values())]
        reason = ", ".join(dict.fromkeys(filter(None, reasons)))
        if reason:
            unlike.setdefault(reason, []).append(arm.label)
    if unlike:
        texts = [f"{reason} between the baseline and {', '.join(labels)}" for reason, labels in unlike.items()]
        return Check("code", FAIL, "; ".join(texts), [label for labels in unlike.values() for label in labels])
    runs = [run for by_code in made.values() for run in by_code.values()]
    counted = [run for arm in table.everyone for run in arm.runs.values()]
    recorded = {name: texts - {""} for name, texts in _facts(counted).items()}
    notes = [f"{name} {' and '.join(sorted(texts))}" for name, texts in recorded.items() if len(texts) > 1]
    if any(run.env.get("git_dirty") for run in counted if run.record.state == "finished"):
        notes.append("uncommitted changes in the code")
    if any(run.code is None for run in runs):
        return Check("code", WARN, "; ".join([f"{NOT_RECORDED}; all by {runs[0].source}", *notes]))
    commits = sorted({str(run.env["git_commit"])[:8] for run in runs if run.env.get("git_commit")})
    same = f"same code (commit {', '.join(commits[:3]) or 'not recorded'})"
    if notes:
        return Check("code", WARN, "; ".join([same, *notes]))
    return Check("code", PASS, f"{same} and environment")


def _facts(runs: Iterable[Trained]) -> dict[str, set[str]]:
    """What is recorded of the libraries, the program and the machine that made the finished runs; '' where nothing is.

    Those of `MACHINE_FACTS` make a run fast or slow whatever it computes.
    """
    values: dict[str, set[str]] = {}
    for run in runs:
        if run.record.state != "finished":
            continue
        env, summary = run.env, run.summary
        packages = env.get("packages") or {}
        facts = {
            "python": env.get("python"),
            **{name: packages.get(name) for name in LIBRARIES},
            "device": str(summary.get("device", "")).split(":")[0],
            "processor": summary.get("processor"),
            "threads": summary.get("threads"),
            "runs on a device": env.get("runs_per_device", 1),
            "compiled programs": summary.get("programs"),
            "graph breaks": summary.get("graph_breaks"),
            "host": str(env.get("host")),
        }
        for name, value in facts.items():
            values.setdefault(name, set()).add("" if value is None else str(value))
    return values


def _same_machine(table: _Table) -> Check | None:
    """Only endpoints that depend on the machine need the same one: neither speed nor memory compares on another."""
    timed = [endpoint.name for endpoint in (table.terms.endpoint, *table.terms.secondary) if endpoint.timed]
    if not timed:
        return None
    base_values, reasons = _facts(table.baseline.runs.values()), {}
    for arm in table.arms:
        values, unlike = _facts(arm.runs.values()), []
        for name in MACHINE_FACTS:
            facts, base_facts = values.get(name), base_values.get(name)
            if facts and base_facts and facts != base_facts:
                unlike.append(f"{name} {' and '.join(sorted(facts))}, not {' and '.join(sorted(base_facts))}")
        if unlike:
            reasons[arm.label] = f"{', '.join(unlike)}, which counts for {', '.join(timed)}"
    return by_arm(MACHINE, reasons, "same machine")


def _plan(table: _Table) -> Check:
    terms = table.terms
    if not terms.name:
        return Check("plan", WARN, "no study.yaml: arms, seeds and endpoint were not fixed before the runs")
    reported = list(terms.exploratory)
    if terms.study.amendments:
        reported.append(f"amendments after the first run: {len(terms.study.amendments)}")
    strangers = [arm.label for arm in table.everyone if arm.name not in (BASELINE, *terms.arm_names)]
    if strangers:
        reported.append(f"not an arm of the study: {', '.join(strangers)}")
    if reported:
        return Check("plan", WARN, "; ".join(reported))
    return Check("plan", PASS, f"arms, seeds and endpoint ({terms.endpoint.name}) were fixed before the runs")


def _excluded(table: _Table) -> Check:
    if table.excluded:
        return Check("excluded", WARN, f"{several(len(table.excluded), 'run')} excluded, listed with the reason")
    if table.terms.is_listed:
        return Check("excluded", UNKNOWN, "the source does not say whether runs were left out of it")
    return Check("excluded", PASS, "no run is excluded")


CONDITIONS: tuple[tuple[str, Callable[[_Table], Check | None], str], ...] = (
    (
        "evaluation",
        partial(_pairwise, "evaluation", _unlike_evaluation, "same validation tokens"),
        "the validation tokens are the same",
    ),
    (
        "batches",
        partial(_pairwise, "batches", unlike_batches, "same batches in the same order"),
        "runs of one seed saw the same batches",
    ),
    ("init", _init, "runs of one seed began with the same numbers"),
    ("schedule", _schedule, "every schedule ran to its end"),
    ("tokens", partial(_budget, "tokens"), ""),
    ("params", partial(_budget, "params"), "the arms have the same number of parameters"),
    ("flops", partial(_budget, "flops"), "the arms cost the same"),
    ("seconds", partial(_budget, "seconds"), ""),
    ("seeds", _seeds, ""),
    ("units", _units, ""),
    ("repeats", _repeats, ""),
    ("baseline", _stable, ""),
    (LEARNED, _learned, "the baseline has learned anything"),
    (TUNING, _learning_rate, ""),
    ("code", _code, "the code and the environment were the same"),
    (MACHINE, _same_machine, ""),
    ("plan", _plan, "arms, seeds and endpoint were fixed before the runs"),
    ("excluded", _excluded, ""),
    (TEXT, lambda table: None, "more validation text would help more than more seeds"),
)
"""Each condition, how it is checked, and its question where no table of results can prove it.

TEXT is checked by `check_text` when the differences are known.
"""


def _seed_list(seeds: Iterable[int]) -> str:
    seeds = list(seeds)
    return f"seed{'s' * (len(seeds) != 1)} {', '.join(map(str, seeds[:8]))}" + (" ..." if len(seeds) > 8 else "")

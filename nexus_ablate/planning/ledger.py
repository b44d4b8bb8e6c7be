"""The claims ledger: the outcome of each claim in this project's own runs, one JSON file per study in conf/claims.

An entry has the outcome, the table of each stratum, the endpoints of each run, and what made them: the commit, hashes
of the source and of the validation text, versions, machine. It has no logs; comparison/ledger_entry.py has its form.
`nexus-ablate claims` lists the entries and marks those whose source has changed since.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path

import msgspec
import numpy as np

from nexus_ablate.comparison.arms import Arm
from nexus_ablate.comparison.fairness import PASS
from nexus_ablate.comparison.ledger_entry import LedgerEntry, LedgerRow, LedgerStratum, Made
from nexus_ablate.comparison.load import Trained
from nexus_ablate.comparison.results import ArmResult, Comparison, Stratum
from nexus_ablate.comparison.statistics import LEVEL, Array, t_quantile, welch
from nexus_ablate.comparison.verdict import FAILS, NOT_COMPARABLE
from nexus_ablate.config.options import conf_dir
from nexus_ablate.errors import ConfigError, printable
from nexus_ablate.masking import mask
from nexus_ablate.plain_data import UNREADABLE, strict_loads
from nexus_ablate.planning.study_yaml import departures
from nexus_ablate.provenance import source_hash
from nexus_ablate.runs import atomic_write_text, strict_json
from nexus_ablate.study.definition import Request, shipped_studies, shipped_study, strata_of
from nexus_ablate.study.endpoint import Endpoint
from nexus_ablate.study.schema import Study

NO_RESULT = "no result"


@dataclass(frozen=True)
class Replication:
    """One arm of an entry beside the same arm of other runs, by the primary endpoint.

    Attributes:
        difference: Theirs minus the published one, of the differences to the baseline.
        low, high: Its 95% interval (Welch).
        lacking: Why there is no such difference; '' where there is.
    """

    stratum: str
    arm: str
    difference: float = math.nan
    low: float = math.nan
    high: float = math.nan
    lacking: str = ""

    @property
    def agrees(self) -> bool:
        return self.low <= 0 <= self.high


def folder() -> Path:
    """Where entries are kept."""
    return conf_dir() / "claims"


def claims() -> dict[str, Study]:
    """The shipped studies that decide a claim, by name."""
    studies = {name: shipped_study(name) for name in shipped_studies()}
    return {name: study for name, study in studies.items() if study.claim}


def designs() -> dict[str, str]:
    """What the file of each shipped study says of its design: the comment that it begins with, after the question."""
    said = {}
    for name, path in shipped_studies().items():
        comment = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
        said[name] = " ".join(line.lstrip("# ") for line in comment).partition("? ")[2]
    return said


def entries() -> dict[str, LedgerEntry]:
    """The published entries by study.

    Raises:
        ConfigError: One of them is damaged.
    """
    published = {}
    for path in sorted(folder().glob("*.json")):
        try:
            published[path.stem] = msgspec.convert(strict_loads(path.read_text(encoding="utf-8")), LedgerEntry)
        except UNREADABLE as error:
            problem = f"{path.name} is no entry of the ledger"
            raise ConfigError(problem, str(error), "git checkout conf/claims") from None
    return published


def older_code(entry: LedgerEntry) -> str:
    """The commit that trained the entry, if code that computes has changed since; '' if not."""
    return "" if entry.source == source_hash() else (entry.made.commit or "unknown")[:12]


def entry_of(comparison: Comparison) -> LedgerEntry:
    """What is published of a study.

    Raises:
        ConfigError: The study has no claim, is not finished or exploratory, differs from its definition, or its runs
            are by more than one version of the code.
    """
    claim, strata, name, known = comparison.claim, comparison.strata, comparison.name, claims()
    if claim is None or name not in known:
        fix = f"nexus-ablate claims {next(iter(known))}"
        raise ConfigError("only a shipped study with a claim is published", name, fix)
    fresh = f"more seeds in the definition of {name}, none of them trained so far"
    if claim.preliminary:
        rows = chain.from_iterable(stratum.rows for stratum in strata)
        waiting = ", ".join(f"{row.arm}: {row.waiting} missing" for row in rows if row.waiting)
        more = f"nexus-ablate study {name}" if waiting else fresh
        raise ConfigError("this study has too few runs to be published", waiting or str(claim), more)
    if reasons := dict.fromkeys(chain.from_iterable(stratum.exploratory for stratum in strata)):
        raise ConfigError("an exploratory result is not published", "; ".join(reasons), fresh)
    definition = known[name]
    arms = list(chain.from_iterable(stratum.arms for stratum in strata))
    runs = list(chain.from_iterable(arm.all_runs for arm in arms))
    request = Request(definition, [f"runs_dir={runs[0].record.path.parents[2]}"])
    if changes := list(chain.from_iterable(map(departures, strata_of(request)))):
        problem = "this is not the study whose claim would be published"
        raise ConfigError(problem, printable("; ".join(changes), 300), f"nexus-ablate claims {name} runs_dir=elsewhere")
    sources = {run.source: run.code for run in runs}
    if len(sources) > 1 or None in sources.values():
        raise ConfigError("the runs are by several versions of the code", name, f"nexus-ablate study {name} --retrain")
    (source,) = sources.values()
    warnings, amendments = [], {}
    for stratum in strata:
        where = f"{stratum.name}: " if stratum.name else ""
        unmet = [check for check in stratum.checks if check.status != PASS]
        warnings += [f"{check.status} {where}{check.name}: {check.text}" for check in unmet]
        amendments |= dict.fromkeys(stratum.amendments)
    return LedgerEntry(
        study=name,
        claim=definition.claim,
        stated=definition.stated,
        outcome=claim.outcome,
        expectations=claim.results,
        settings=claim.settings,
        dependences=claim.dependences,
        requirements=[requirement.sentence for requirement in claim.requirements],
        warnings=warnings,
        amendments=list(amendments),
        regime=_regime(strata),
        command=f"nexus-ablate claims {name}",
        runs=len(runs),
        hours=math.fsum(map(_seconds, arms)) / 3600,
        made=_made(runs),
        source=source_hash(source),
        strata={stratum.name: _published(stratum) for stratum in strata},
    )


def _made(runs: list[Trained]) -> Made:
    """What made some runs, as the first of them recorded it, and when the last one was begun."""
    env, summary = runs[0].env, runs[0].summary
    return Made(
        version=env.get("version"),
        commit=env.get("git_commit"),
        python=env.get("python"),
        torch=(env.get("packages") or {}).get("torch"),
        threads=summary.get("threads"),
        processor=str(summary.get("processor") or summary.get("device")),
        when=max(run.begun for run in runs)[:10],
        validation_text=summary.get("eval_hash"),
    )


def _seconds(arm: Arm) -> float:
    """Training time of an arm's runs, each counted as the fastest that finished: others waited for a busy machine."""
    runs = arm.all_runs
    finished = [run for run in runs if run.record.state == "finished"] or runs
    seconds = []
    for run in finished:
        spent = [run.figures.get(name, 0.0) for name in ("seconds", "seconds_eval", "seconds_probe")]
        seconds.append(math.fsum(spent))
    return len(runs) * min(seconds, default=0.0)


def _regime(strata: list[Stratum]) -> str:
    """The size, length and data of the baselines, in a line."""
    lines = []
    for stratum in strata:
        config, run = stratum.arms[0].config, next(iter(stratum.arms[0].runs.values()))
        model, tokens = config["model"], run.figure("tokens")
        head_dim = (config.get("resolved") or {}).get("head_dim", "unknown")  # an earlier version did not record it
        lines.append(
            f"n_layers {model['n_layers']}, d_model {model['d_model']}, head_dim {head_dim}, "
            f"context {model['context']}, "
            f"{tokens / 1e6:.2g}M tokens ({tokens / run.figure('params'):.2g} per parameter), "
            f"data={config['data']['name']}"
        )
    return " / ".join(dict.fromkeys(lines))


def _published(stratum: Stratum) -> LedgerStratum:
    rows, margins = [], {}
    for row in stratum.results:
        margins[row.endpoint.name] = row.endpoint.margin
        numbers = LedgerRow(row.arm, row.endpoint.name, row.mean, str(row.verdict or ""))
        if row.effect is not None:
            numbers.delta, numbers.low, numbers.high = row.effect.delta, row.effect.low, row.effect.high
        rows.append(numbers)
    runs, rates = {}, {}
    for row, arm in zip(stratum.rows, stratum.arms, strict=True):
        rates[row.arm] = arm.best_rate or arm.lr
        runs[row.arm] = {}
        for seed in row.seeds:
            runs[row.arm][str(seed)] = {endpoint: _finite(arm.value(seed, endpoint)) for endpoint in margins}
    is_tuned = any(arm.tuning for arm in stratum.arms)
    return LedgerStratum(rows, margins, runs, rates if is_tuned else {})


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def publish(comparison: Comparison) -> Path:
    """Write the entry of a study. Returns its path.

    Raises:
        ConfigError: As `entry_of`.
    """
    entry = entry_of(comparison)
    path = folder() / f"{entry.study}.json"
    atomic_write_text(path, strict_json(mask(msgspec.to_builtins(entry)), indent=1) + "\n")
    return path


def other_circumstances(entry: LedgerEntry, comparison: Comparison) -> list[str]:
    """In what other runs of a study differ from the published ones, besides their seeds."""
    run = next(iter(comparison.strata[0].arms[0].runs.values()))
    made, published = _made([run]), entry.made
    regime = _regime(comparison.strata)
    lines = []
    if regime != entry.regime:
        lines.append(f"another setting: {regime}; published: {entry.regime}")
    if made.validation_text != published.validation_text:
        lines.append("another validation text")
    if source_hash(run.code) != entry.source:
        lines.append(f"other code: commit {made.commit}; published: {published.commit}")
    if made.torch != published.torch:
        lines.append(f"another torch: {made.torch}; published: {published.torch}")
    if made.processor != published.processor:
        lines.append(f"another processor: {made.processor}; published: {published.processor}")
    return lines


def replications(entry: LedgerEntry, comparison: Comparison) -> list[Replication]:
    """The published differences to the baseline beside those of other runs, arm by arm and stratum by stratum."""
    compared, strata = [], {stratum.name: stratum for stratum in comparison.strata}
    for name, published in entry.strata.items():
        endpoint = Endpoint(next(iter(published.margins)))
        former = {}
        for arm, runs in published.runs.items():
            former[arm] = {seed: numbers[endpoint.name] for seed, numbers in runs.items()}
        verdicts = {row.arm: row.verdict for row in published.rows if row.endpoint == endpoint.name}
        rows, now = {}, {}
        if stratum := strata.get(name):
            rows = {row.arm: row for row in stratum.rows}
            new = {}
            for arm in stratum.arms:
                new[arm.label] = {str(seed): arm.value(seed, endpoint.name) for seed in arm.runs}
            now = _differences(new, endpoint)
        for arm, before in _differences(former, endpoint).items():
            if len(before) > 1:
                lacking = _lacking(rows.get(arm), now.get(arm), verdicts[arm])
                difference = () if lacking else _difference(now[arm], before)
                compared.append(Replication(name, arm, *difference, lacking=lacking))
    return compared


def _lacking(row: ArmResult | None, differences: Array | None, published: str) -> str:
    """Why an arm's differences cannot be held against those of the published verdict, or ''.

    Where an arm fails to train as it did not before, the seeds that trained are a selection.
    """
    if row is None or differences is None:
        return NO_RESULT
    if (verdict := row.verdict) and verdict.word in (NOT_COMPARABLE, *FAILS) and verdict.word not in published:
        return f"{verdict.word}: {verdict.sentence}"
    if len(differences) < 2:
        return f"fewer than two pairs: {row.verdict.sentence if row.verdict else 'no verdict'}"
    return ""


def _differences(runs: Mapping[str, Mapping[str, float | None]], endpoint: Endpoint) -> dict[str, Array]:
    """By arm: the differences to the first arm, the baseline, at the seeds of both, on the endpoint's scale."""
    base, *arms = runs

    def values(arm: str, seeds: list[str]) -> Array:
        numbers = np.array([runs[arm][seed] for seed in seeds], dtype=float)
        if endpoint.is_share:  # published without the number of answers, so on its own scale
            return numbers
        return endpoint.on_scale(lambda name: numbers)

    differences = {}
    for arm in arms:
        seeds = [seed for seed in runs[arm] if seed in runs[base]]
        numbers = values(arm, seeds) - values(base, seeds)
        differences[arm] = numbers[np.isfinite(numbers)]
    return differences


def _difference(a: Array, b: Array) -> tuple[float, float, float]:
    """The difference of two means and its 95% interval, for unlike variances."""
    mean = float(a.mean() - b.mean())
    error, df = welch(a, b)
    half = t_quantile(1 - LEVEL / 2, df) * error
    return mean, mean - half, mean + half

"""The claims ledger: the outcome of each claim in this project's own runs, one JSON file per study in conf/claims.

An entry has the outcome, the table of each stratum, the endpoints of each run, and what made them: the commit, hashes
of the source and of the validation text, versions, machine. It has no logs. `nexus-ablate claims` lists the entries and
marks those whose source has changed since.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from nexus_ablate.comparison.arms import Arm
from nexus_ablate.comparison.endpoint import Endpoint
from nexus_ablate.comparison.fairness import PASS
from nexus_ablate.comparison.results import ArmResult, Comparison, Stratum
from nexus_ablate.comparison.statistics import LEVEL, Array, t_quantile, welch
from nexus_ablate.comparison.verdict import FAILS, NOT_COMPARABLE
from nexus_ablate.config.options import conf_dir
from nexus_ablate.errors import ConfigError, printable
from nexus_ablate.masking import mask
from nexus_ablate.plain_data import UNREADABLE, strict_loads
from nexus_ablate.planning.study_yaml import departures
from nexus_ablate.provenance import source_hash
from nexus_ablate.study.definition import Request, shipped_studies, shipped_study, strata_of
from nexus_ablate.study.schema import Study


class LedgerTable(msgspec.Struct):
    """A stratum of an entry; see `_table`."""

    rows: list[dict[str, str | float | None]]
    endpoints: list[str]
    margins: dict[str, float]
    runs: dict[str, dict[str, dict[str, float | None]]]
    rates: dict[str, float] = {}


class LedgerEntry(msgspec.Struct):
    """The form of an entry."""

    study: str
    claim: str
    stated: str
    outcome: str
    regime: str
    command: str
    source: str
    runs: int
    hours: float
    made: dict[str, str | int | None]
    expectations: list[dict[str, str | int | float | None]]
    requirements: list[str]
    warnings: list[str]
    amendments: list[str]
    strata: dict[str, LedgerTable]
    settings: dict[str, str] = {}
    dependences: list[dict[str, str | bool]] = []


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
    for path in sorted((conf_dir() / "studies").glob("*.yaml")):
        comment = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
        said[path.stem] = " ".join(line.lstrip("# ") for line in comment).partition("? ")[2]
    return said


def entries() -> dict[str, dict[str, Any]]:
    """The published entries by study.

    Raises:
        ConfigError: One of them is damaged.
    """
    return {path.stem: read_entry(path) for path in sorted(folder().glob("*.json"))}


def read_entry(path: Path) -> dict[str, Any]:
    """One entry.

    Raises:
        ConfigError: It is damaged.
    """
    try:
        entry = strict_loads(path.read_text(encoding="utf-8"))
        msgspec.convert(entry, LedgerEntry)
    except UNREADABLE as error:
        raise ConfigError(f"{path.name} is no entry of the ledger", str(error), "git checkout conf/claims") from None
    return entry


def older_code(entry: dict[str, Any]) -> str:
    """The commit that trained the entry, if code that computes has changed since; '' if not."""
    commit = entry["made"].get("commit")
    return "" if entry["source"] == source_hash() else str(commit or "unknown")[:12]


def entry_of(comparison: Comparison) -> dict[str, Any]:
    """What is published of a study.

    Raises:
        ConfigError: The study has no claim, is not finished or exploratory, differs from its definition, or its runs
            are by more than one version of the code.
    """
    claim, tables, name, known = comparison.claim, comparison.strata, comparison.name, claims()
    if claim is None or name not in known:
        raise ConfigError(
            "only a shipped study with a claim is published", name, f"nexus-ablate claims {next(iter(known))}"
        )
    fresh = f"more seeds in the definition of {name}, none of them trained so far"
    if claim.preliminary:
        waiting = ", ".join(
            f"{row.arm}: {row.waiting} missing" for table in tables for row in table.rows if row.waiting
        )
        more = f"nexus-ablate study {name}" if waiting else fresh
        raise ConfigError("this study has too few runs to be published", waiting or str(claim), more)
    if reasons := dict.fromkeys(reason for table in tables for reason in table.exploratory):
        raise ConfigError("an exploratory result is not published", "; ".join(reasons), fresh)
    runs = [run for table in tables for arm in table.arms for run in arm.all_runs]
    request = Request(known[name], [f"runs_dir={runs[0].record.path.parents[2]}"])
    if changes := [text for stratum in strata_of(request) for text in departures(stratum)]:
        fix = f"nexus-ablate claims {name} runs_dir=elsewhere"
        raise ConfigError(
            "this is not the study whose claim would be published", printable("; ".join(changes), 300), fix
        )
    sources = {run.source: run.code for run in runs}
    if len(sources) > 1 or None in sources.values():
        raise ConfigError("the runs are by several versions of the code", name, f"nexus-ablate study {name} --retrain")
    (source,) = sources.values()
    env, summary = runs[0].env, runs[0].record.summary or {}
    definition = known[name]
    return {
        "study": name,
        "claim": definition.claim,
        "stated": definition.stated,
        "outcome": claim.outcome,
        "expectations": [asdict(result) for result in claim.results],
        "settings": claim.settings,
        "dependences": [asdict(dependence) for dependence in claim.dependences],
        "requirements": [requirement.sentence for requirement in claim.requirements],
        "warnings": [
            f"{check.status} {f'{table.name}: ' if table.name else ''}{check.name}: {check.text}"
            for table in tables
            for check in table.checks
            if check.status != PASS
        ],
        "amendments": list(dict.fromkeys(line for table in tables for line in table.amendments)),
        "regime": _regime(tables),
        "command": f"nexus-ablate claims {name}",
        "runs": len(runs),
        "hours": math.fsum(_seconds(arm) for table in tables for arm in table.arms) / 3600,
        "made": {
            "version": env.get("version"),
            "commit": env.get("git_commit"),
            "python": env.get("python"),
            "torch": (env.get("packages") or {}).get("torch"),
            "threads": summary.get("threads"),
            "processor": _processor(summary),
            "when": max(run.begun for run in runs)[:10],
            "validation_text": summary.get("eval_hash"),
        },
        "source": source_hash(source),
        "strata": {table.name: _table(table) for table in tables},
    }


def _processor(summary: Mapping[str, Any]) -> str:
    return str(summary.get("processor") or summary.get("device"))


def _seconds(arm: Arm) -> float:
    """Training time of an arm's runs, each counted as the fastest that finished: others waited for a busy machine."""
    spent = ("seconds", "seconds_eval", "seconds_probe")
    runs = arm.all_runs
    finished = [run for run in runs if run.record.state == "finished"] or runs
    return len(runs) * min(math.fsum(run.figures.get(name, 0.0) for name in spent) for run in finished) if runs else 0.0


def _regime(tables: list[Stratum]) -> str:
    """The size, length and data of the baselines, in a line."""
    lines = []
    for table in tables:
        config, run = table.arms[0].config, next(iter(table.arms[0].runs.values()))
        model, tokens = config["model"], run.figure("tokens")
        lines.append(
            f"n_layers {model['n_layers']}, d_model {model['d_model']}, context {model['context']}, "
            f"{tokens / 1e6:.2g}M tokens ({tokens / run.figure('params'):.2g} per parameter), "
            f"data={config['data']['name']}"
        )
    return " / ".join(dict.fromkeys(lines))


def _table(table: Stratum) -> dict[str, Any]:
    """A stratum.

    It has a row for each arm and endpoint, the margins on the scale of differences, each run's endpoints, and the arms'
    learning rates if they were tuned.
    """
    by_endpoint = [(table.endpoint, table.rows), *((other.endpoint, other.rows) for other in table.secondary)]
    names = [endpoint.name for endpoint, _ in by_endpoint]
    margins = {endpoint.name: endpoint.margin for endpoint, _ in by_endpoint}
    rows = [
        {
            "arm": row.arm,
            "endpoint": endpoint.name,
            "mean": row.mean,
            "verdict": str(row.verdict or ""),
            **{bound: getattr(row.effect, bound, None) for bound in ("delta", "low", "high")},
        }
        for endpoint, rows in by_endpoint
        for row in rows
    ]
    runs = {
        row.arm: {str(seed): {name: _finite(arm.value(seed, name)) for name in names} for seed in row.seeds}
        for row, arm in zip(table.rows, table.arms, strict=True)
    }
    entry = {"rows": rows, "endpoints": names, "margins": margins, "runs": runs}
    if any(arm.tuning for arm in table.arms):
        entry["rates"] = {row.arm: arm.best_rate or arm.lr for row, arm in zip(table.rows, table.arms, strict=True)}
    return entry


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def publish(comparison: Comparison) -> Path:
    """Write the entry of a study. Returns its path.

    Raises:
        ConfigError: As `entry_of`.
    """
    from nexus_ablate.runs import atomic_write_text, strict_json

    entry = mask(entry_of(comparison))
    path = folder() / f"{entry['study']}.json"
    atomic_write_text(path, strict_json(entry, indent=1) + "\n")
    return path


def other_circumstances(entry: dict[str, Any], comparison: Comparison) -> list[str]:
    """In what other runs of a study differ from the published ones, besides their seeds."""
    run, made = next(iter(comparison.strata[0].arms[0].runs.values())), entry["made"]
    summary = run.record.summary or {}
    lines = []
    if (regime := _regime(comparison.strata)) != entry["regime"]:
        lines.append(f"another setting: {regime}; published: {entry['regime']}")
    if summary.get("eval_hash") != made["validation_text"]:
        lines.append("another validation text")
    if entry["source"] != source_hash(run.code):
        lines.append(f"other code: commit {run.env.get('git_commit')}; published: {made.get('commit')}")
    torch = (run.env.get("packages") or {}).get("torch")
    if torch != made["torch"]:
        lines.append(f"another torch: {torch}; published: {made['torch']}")
    if (processor := _processor(summary)) != made["processor"]:
        lines.append(f"another processor: {processor}; published: {made['processor']}")
    return lines


def replications(entry: dict[str, Any], comparison: Comparison) -> list[Replication]:
    """The published differences to the baseline beside those of other runs, arm by arm and stratum by stratum."""
    compared, tables = [], {table.name: table for table in comparison.strata}
    for stratum, published in entry["strata"].items():
        endpoint = Endpoint(published["endpoints"][0])
        former = {
            arm: {seed: numbers[endpoint.name] for seed, numbers in runs.items()}
            for arm, runs in published["runs"].items()
        }
        verdicts = {row["arm"]: row["verdict"] for row in published["rows"] if row["endpoint"] == endpoint.name}
        table = tables.get(stratum)
        pairs = list(zip(table.rows, table.arms, strict=True)) if table else []
        rows = {row.arm: row for row, _ in pairs}
        new = {row.arm: {str(s): arm.value(s, endpoint.name) for s in arm.runs} for row, arm in pairs}
        now = _differences(new, endpoint) if new else {}
        for arm, before in _differences(former, endpoint).items():
            if len(before) > 1:
                lacking = _lacking(rows.get(arm), now.get(arm), verdicts[arm])
                difference = () if lacking else _difference(now[arm], before)
                compared.append(Replication(stratum, arm, *difference, lacking=lacking))
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

    shared = {arm: [seed for seed in runs[arm] if seed in runs[base]] for arm in arms}
    differences = {arm: values(arm, seeds) - values(base, seeds) for arm, seeds in shared.items()}
    return {arm: numbers[np.isfinite(numbers)] for arm, numbers in differences.items()}


def _difference(a: Array, b: Array) -> tuple[float, float, float]:
    """The difference of two means and its 95% interval, for unlike variances."""
    mean = float(a.mean() - b.mean())
    error, df = welch(a, b)
    half = t_quantile(1 - LEVEL / 2, df) * error
    return mean, mean - half, mean + half

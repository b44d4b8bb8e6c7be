"""The claims ledger: what this project's own runs said of each claim, one JSON file per study in conf/claims.

An entry has the outcome, the table of each stratum, the endpoints of each run, and what made them: hashes of the source
and of the validation text, versions, machine. It has no logs. `nexus-ablate claims` lists the entries and marks those
whose source has changed since.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nexus_ablate.comparison.arms import Arm
from nexus_ablate.comparison.findings import Findings
from nexus_ablate.comparison.result import Comparison
from nexus_ablate.comparison.statistics import LEVEL, t_quantile
from nexus_ablate.config.options import conf_dir
from nexus_ablate.errors import ConfigError
from nexus_ablate.masking import mask
from nexus_ablate.plain_data import misfit, strict_loads
from nexus_ablate.provenance import differing_files, source_hashes
from nexus_ablate.study.definition import Definition, read_request, shipped_studies

_TABLE = {
    "rows!": [{str: (str, float, bool, None)}],
    "endpoints!": [str],
    "runs!": {str: {str: {str: (float, None)}}},
}
ENTRY = {
    **dict.fromkeys(("study!", "claim!", "stated!", "outcome!", "sentence!", "regime!", "command!"), str),
    "source!": {str: str},
    "runs!": int,
    "hours!": float,
    "made!": {str: (str, None)},
    "expectations!": [{str: str}],
    "requirements!": [str],
    "strata!": {str: _TABLE},
}
"""The form of an entry, in the notation of `plain_data.misfit`."""


@dataclass(frozen=True)
class Replication:
    """One arm of an entry beside the same arm of other runs, by the primary endpoint.

    Attributes:
        difference: Theirs minus the published one, of the differences to the baseline.
        low, high: Its 95% interval (Welch).
    """

    stratum: str
    arm: str
    difference: float
    low: float
    high: float

    @property
    def agrees(self) -> bool:
        return self.low <= 0 <= self.high


def folder() -> Path:
    """Where entries are kept."""
    return conf_dir() / "claims"


def claims() -> dict[str, Definition]:
    """The shipped studies that decide a claim, by name."""
    definitions = {name: read_request([name]).definition for name in shipped_studies()}
    return {name: definition for name, definition in definitions.items() if definition.claim}


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
    entry = strict_loads(path.read_text(encoding="utf-8"))
    if problem := misfit(entry, ENTRY):
        raise ConfigError(f"{path.name} is no entry of the ledger", problem, "git checkout conf/claims")
    return entry


def older_code(entry: dict[str, Any]) -> list[str]:
    """The files that compute and have changed since the entry was trained."""
    return differing_files(entry["source"], source_hashes())


def entry_of(findings: Findings) -> dict[str, Any]:
    """What is published of a study's findings.

    Raises:
        ConfigError: The study has no claim, is not finished, or its runs are by more than one version of the code.
    """
    claim, tables = findings.claim, findings.tables
    name = findings.name
    if claim is None or name not in claims():
        raise ConfigError("only a shipped study with a claim is published", name, f"one of {', '.join(claims())}")
    waiting = [f"{row.arm}: {row.waiting}" for table in tables for row in table.rows if row.waiting]
    if waiting:
        raise ConfigError("runs of this study have no result yet", ", ".join(waiting), f"nexus-ablate study {name}")
    runs = [run for table in tables for arm in table.arms for run in _all_runs(arm)]
    sources = {run.source: run.code for run in runs}
    if len(sources) > 1 or None in sources.values():
        raise ConfigError("the runs are by several versions of the code", name, f"nexus-ablate study {name} --retrain")
    (source,) = sources.values()
    env, summary = runs[0].env, runs[0].record.summary or {}
    definition = claims()[name]
    spent = ("seconds", "seconds_eval", "seconds_probe")
    seconds = math.fsum(run.figures.get(name, 0.0) for run in runs for name in spent)
    return {
        "study": name,
        "claim": definition.claim,
        "stated": definition.stated,
        "outcome": claim.outcome,
        "sentence": claim.sentence,
        "expectations": [
            {"stratum": r.stratum, "arm": r.arm, "endpoint": r.endpoint, "expected": r.expected, "outcome": r.outcome}
            for r in claim.results
        ],
        "requirements": [requirement.sentence for requirement in claim.requirements],
        "regime": _regime(tables),
        "command": f"nexus-ablate claims {name}",
        "runs": len(runs),
        "hours": seconds / 3600,
        "made": {
            "version": env.get("version"),
            "commit": env.get("git_commit"),
            "python": env.get("python"),
            "torch": (env.get("packages") or {}).get("torch"),
            "processor": str(summary.get("processor") or summary.get("device")),
            "when": max(run.begun for run in runs)[:10],
            "validation_text": summary.get("eval_hash"),
        },
        "source": dict(source or {}),
        "strata": {name or "": _table(table) for name, table in zip(findings.strata, tables, strict=True)},
    }


def _all_runs(arm: Arm) -> list[Any]:
    return [*arm.runs.values(), *arm.tuning, *(_all_runs(arm.shared) if arm.shared else [])]


def _regime(tables: list[Comparison]) -> str:
    """The size, length and data of the baselines, in a line."""
    lines = []
    for table in tables:
        config, run = table.arms[0].config, next(iter(table.arms[0].runs.values()))
        model, tokens = config["model"], run.figure("tokens")
        lines.append(
            f"{model['n_layers']} layers, d_model {model['d_model']}, context {model['context']}, "
            f"{tokens / 1e6:.2g}M tokens ({tokens / run.figure('params'):.2g} per parameter), "
            f"data={config['data']['name']}"
        )
    return " / ".join(dict.fromkeys(lines))


def _table(table: Comparison) -> dict[str, Any]:
    """A stratum: a row for each arm and endpoint, and each run's endpoints."""
    names = [table.endpoint.name, *(other.endpoint.name for other in table.secondary)]
    rows = [
        {
            "arm": row.arm,
            "endpoint": table.endpoint.name,
            "mean": row.mean,
            "verdict": str(row.verdict) if row.verdict else "",
            **_bounds(row.effect, table.endpoint.log),
        }
        for row in table.rows
    ]
    for other in table.secondary:
        rows += [
            {
                "arm": row.arm,
                "endpoint": other.endpoint.name,
                "mean": row.mean,
                "verdict": str(row.verdict) if row.verdict else "",
                **_bounds(row.effect, other.endpoint.log),
            }
            for row in other.rows
        ]
    runs = {
        row.arm: {str(seed): {name: _finite(arm.value(seed, name)) for name in names} for seed in row.seeds}
        for row, arm in zip(table.rows, table.arms, strict=True)
    }
    return {"rows": rows, "endpoints": names, "runs": runs}


def _bounds(effect: Any, log: bool) -> dict[str, float | bool | None]:
    if effect is None:
        return {"delta": None, "low": None, "high": None, "ratio": log}
    return {"delta": effect.delta, "low": effect.low, "high": effect.high, "ratio": log}


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def publish(findings: Findings) -> Path:
    """Write the entry of a study's findings. Returns its path.

    Raises:
        ConfigError: As `entry_of`.
    """
    from nexus_ablate.runs import atomic_write_text, strict_json

    entry = mask(entry_of(findings))
    path = folder() / f"{entry['study']}.json"
    atomic_write_text(path, strict_json(json.loads(json.dumps(entry)), indent=1) + "\n")
    return path


def replications(entry: dict[str, Any], findings: Findings) -> list[Replication]:
    """The published differences to the baseline beside those of other runs, arm by arm and stratum by stratum."""
    compared = []
    for stratum, table in zip(findings.strata, findings.tables, strict=True):
        published = entry["strata"].get(stratum)
        if published is None:
            continue
        name = published["endpoints"][0]
        base = next(iter(published["runs"]))
        log = any(row["ratio"] for row in published["rows"] if row["endpoint"] == name)
        values = {label: {str(seed): arm.value(seed, name) for seed in arm.runs} for label, arm in _by_label(table)}
        new = _differences(values, table.rows[0].arm, log)
        values = {arm: {seed: v[name] for seed, v in runs.items()} for arm, runs in published["runs"].items()}
        for arm, differences in _differences(values, base, log).items():
            if min(len(differences), len(new.get(arm, []))) > 1:
                compared.append(Replication(stratum, arm, *_welch(new[arm], differences)))
    return compared


def _by_label(table: Comparison) -> Iterable[tuple[str, Arm]]:
    return zip((row.arm for row in table.rows), table.arms, strict=True)


def _differences(runs: Mapping[str, Mapping[str, float | None]], base: str, log: bool) -> dict[str, list[float]]:
    """By arm: the differences to the baseline at the seeds of both."""

    def scaled(value: float) -> float:
        return (math.log(value) if value > 0 else math.nan) if log else value

    result = {}
    for arm, by_seed in runs.items():
        pairs = [(value, runs[base].get(seed)) for seed, value in by_seed.items()]
        numbers = [scaled(a) - scaled(b) for a, b in pairs if a is not None and b is not None]
        result[arm] = [number for number in numbers if math.isfinite(number)]
    return {arm: numbers for arm, numbers in result.items() if arm != base}


def _welch(one: list[float], other: list[float]) -> tuple[float, float, float]:
    """The difference of two means and its 95% interval, for unlike variances."""
    a, b = np.array(one), np.array(other)
    difference = float(a.mean() - b.mean())
    va, vb = float(a.var(ddof=1)) / len(a), float(b.var(ddof=1)) / len(b)
    if not va + vb:
        return difference, difference, difference
    df = (va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1))
    half = t_quantile(1 - LEVEL / 2, df) * math.sqrt(va + vb)
    return difference, difference - half, difference + half

"""Studies of planted numbers in tests/guards, and the words, differences and intervals that were recorded of them.

A file holds a study's `definition`, its `runs` (an entry for each arm, in each setting, at each learning rate), the
`level` of a cell, the runs that are `left_out`, the conditions that are `broken`, and the `results`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats
from written_runs import Writer, config_of

from nexus_ablate.comparison.compare import Table, compare
from nexus_ablate.comparison.fairness import FAIL

FOLDER = Path(__file__).with_suffix("")
STUDIES = ("plain", "settings", "failures", "baseline_failures", "rates")
NUMBERS = ("n", "delta", "se", "df", "p", "low", "high", "spread", "text_se", "level")
"""Of a cell, None where there is none; `text_se` where the error over text is part of `se`."""
Cell = tuple[str, str, str]
"""Setting ("" in a study without settings), arm and endpoint."""


def read(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())


def recorded(study: dict[str, Any]) -> dict[Cell, dict[str, Any]]:
    """The results in the file, by cell."""
    return {(result["setting"], result["arm"], result["endpoint"]): result for result in study["results"]}


# ----------------------------------------------------------------------------------------------------- planted runs


def tables_of(study: dict[str, Any], root: Path) -> list[Table]:
    """The comparison of a study that is written under `root`: a table for each setting."""
    return compare(write(study, root)).tables


def write(study: dict[str, Any], root: Path) -> list[Path]:
    """The runs and the definition of a study; its folders, one for each setting."""
    definition = study["definition"]
    settings = definition["settings"] or {"": ""}
    folders = []
    for setting, overrides in settings.items():
        name = f"{definition['name']}@{setting}" if setting else definition["name"]
        writer = Writer(root, name)
        for entry in study["runs"]:
            if entry["setting"] == setting:
                _write_entry(writer, entry, overrides.split() + _overrides(definition, entry["arm"]))
        _write_definition(writer, study, setting)
        folders.append(root / name)
    return folders


def _overrides(definition: dict[str, Any], arm: str) -> list[str]:
    return definition["arms"].get(arm, "").split()


def _write_entry(writer: Writer, entry: dict[str, Any], overrides: list[str]) -> None:
    """The runs of an arm at one learning rate.

    `damaged` are seeds whose metrics.jsonl holds a line that is none; the option `stream` is added to each seed.
    """
    folder = entry["arm"]
    if "rate" in entry:
        at_rate = f"optim.lr={entry['rate']}"
        is_default = config_of((at_rate,))[1] == "baseline"
        if not is_default:
            overrides = [*overrides, at_rate]
            folder = f"{folder},{at_rate}"
    for place, seed in enumerate(entry["seeds"]):
        options = dict(entry["options"])
        state = entry["states"].get(str(seed), "finished")
        if state != "finished":
            options |= {"state": state, "steps": 100}
        if "stream" in options:
            options["stream"] += seed
        if "text" in entry:
            options["text"] = tuple(entry["text"][place])
        summary = {name: values[place] for name, values in entry["figures"].items()}
        width = 16 + len(options.get("shape", ""))
        summary["params_non_embedding"] = 3 * 16 * width
        options["env"] = {"arm": entry["arm"]}
        path = writer.run(*overrides, seed=seed, loss=entry["losses"][place], folder=folder, summary=summary, **options)
        if seed in entry["damaged"]:
            metrics = path / "metrics.jsonl"
            metrics.write_text(metrics.read_text() + "nonsense\n")


# ---------------------------------------------------------------------------- what the present rules write and read


def _write_definition(writer: Writer, study: dict[str, Any], setting: str) -> None:
    written = {key: value for key, value in study["definition"].items() if value}
    writer.plan(**written, setting=setting)


def results(tables: Iterable[Table]) -> dict[Cell, dict[str, Any]]:
    """What the comparison says of every cell."""
    found = {}
    for table in tables:
        for row in table.all_rows:
            effect = None if row.word in ("IDENTICAL", "NOT COMPARABLE", "DIVERGED", "INCOMPLETE") else row.effect
            result = {"word": row.word, "qualifiers": [*row.qualifiers], "unfair": sorted(row.unfair)}
            result |= {name: getattr(effect, name, None) for name in NUMBERS}
            found[table.setting, row.arm.name, row.endpoint.name] = result
    return found


def broken(tables: Iterable[Table]) -> dict[str, dict[str, list[str]]]:
    """By setting, the arms that break each fairness condition."""
    conditions = {}
    for table in tables:
        conditions[table.setting] = {c.name: sorted(c.arms) for c in table.checks if c.status == FAIL}
    return conditions


def left_out(tables: Iterable[Table]) -> list[str]:
    """The runs that give no result, as setting/arm/seed."""
    runs = []
    for table in tables:
        for out in table.left_out:
            runs.append(f"{table.setting}/{out.path.parent.name}/{out.path.name.partition('-')[0]}")
    return sorted(runs)


# -------------------------------------------------------------------- the numbers of a cell, written out once more


def reference(study: dict[str, Any], cell: Cell) -> dict[str, Any]:
    """A cell's numbers from the planted ones: each seed at the arm's best rate, the paired t, the error over text."""
    setting, arm, endpoint = cell
    values, text = _at_best_rate(study, setting, arm, endpoint)
    base_values, base_text = _at_best_rate(study, setting, "baseline", endpoint)
    seeds = sorted(values.keys() & base_values.keys())
    n = len(seeds)
    differences = np.array([values[seed] - base_values[seed] for seed in seeds])
    delta, spread = differences.mean(), differences.std(ddof=1)
    se, df, text_se = spread / math.sqrt(n), n - 1, None
    if endpoint == "val_loss" and text:
        by_block = np.array([text[seed] - base_text[seed] for seed in seeds]) + differences[:, None]
        blocks = by_block.shape[1]
        over_text = by_block.mean(0).var(ddof=1) / blocks
        residual = by_block - differences[:, None] - by_block.mean(0) + delta
        both = (residual**2).sum() / ((n - 1) * (blocks - 1)) / (n * blocks)
        variance = max(se**2 + over_text - both, se**2, over_text)
        df = variance**2 / (se**4 / (n - 1) + over_text**2 / (blocks - 1))
        se, text_se = math.sqrt(variance), math.sqrt(over_text)
    level = study["level"]["per_cell"]
    half = stats.t.ppf(1 - level / 2, df) * se
    p = 2 * stats.t.sf(abs(delta) / se, df)
    low, high = delta - half, delta + half
    return dict(zip(NUMBERS, (n, delta, se, df, p, low, high, spread, text_se, level), strict=True))


def _at_best_rate(study: dict[str, Any], setting: str, arm: str, endpoint: str) -> tuple[dict, dict]:
    """By seed, an arm's endpoint on its scale and its text by block (less the mean), at its own best rate."""
    entries = [entry for entry in study["runs"] if (entry["setting"], entry["arm"]) == (setting, arm)]
    entries.sort(key=lambda entry: entry.get("rate", 0.0))
    means = [math.inf if entry["states"] else np.mean(entry["losses"]) for entry in entries]
    lowest, weights = int(np.argmin(means)), {0: 1.0}
    if len(entries) > 1:
        three = means[lowest - 1 : lowest + 2]
        below, at, above = np.log([entry["rate"] for entry in entries[lowest - 1 : lowest + 2]])
        a, b, _ = np.linalg.solve(np.vander([below, at, above]), three)
        best = -b / (2 * a)
        weights = {
            -1: (best - at) * (best - above) / ((below - at) * (below - above)),
            0: (best - below) * (best - above) / ((at - below) * (at - above)),
            1: (best - below) * (best - at) / ((above - below) * (above - at)),
        }
    values, text = {}, {}
    for step, weight in weights.items():
        entry = entries[lowest + step]
        measured = np.array(entry["losses"] if endpoint == "val_loss" else entry["figures"][endpoint])
        scaled = np.log(measured) if "kurtosis" in endpoint else measured
        for place, seed in enumerate(entry["seeds"]):
            if str(seed) in entry["states"] or seed in entry["damaged"]:
                continue
            values[seed] = values.get(seed, 0.0) + weight * scaled[place]
            if "text" in entry:
                blocks = np.array(entry["text"][place])
                text[seed] = text.get(seed, 0.0) + weight * (blocks - blocks.mean())
    return values, text

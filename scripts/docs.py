"""Write what the documentation takes from elsewhere: docs/options.md and the tables of docs/metrics.md from the code,
the tables of docs/baseline.md from docs/baseline.csv."""

import csv
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nexus_ablate.cli.list import catalogue, typed_default, typed_key, typed_option
from nexus_ablate.comparison.statistics import LEVEL, paired_effect
from nexus_ablate.comparison.verdict import MEANINGS
from nexus_ablate.config.grammar import show
from nexus_ablate.config.run_config import CLOSED_GROUPS
from nexus_ablate.console import markdown_table
from nexus_ablate.measure.measures import table

ROOT = Path(__file__).resolve().parent.parent


def with_measures(page: str) -> str:
    """docs/metrics.md with the tables of today between its marks."""
    form = re.compile(r"(<!-- measures: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return form.sub(lambda match: f"{match[1]}{table(match[2])}\n{match[3]}", page)


def with_words(page: str) -> str:
    """docs/reading_a_verdict.md with the words of a verdict and their meanings between its marks."""
    words = "\n".join(markdown_table(("word", "meaning"), MEANINGS.items()))
    form = re.compile(r"(<!-- words -->\n).*?(<!-- end -->)", re.DOTALL)
    return form.sub(lambda match: f"{match[1]}{words}\n{match[2]}", page)


def with_baseline(page: str) -> str:
    """docs/baseline.md with the losses of docs/baseline.csv between its marks, one table per stage."""
    tables = {
        "baseline_init": _rates,
        "baseline_isoflop": partial(_isoflop, width_of_baseline=32),
        "baseline_isoflop_pico": partial(_isoflop, width_of_baseline=64),
    }
    for study, arms in baseline_losses().items():
        table = tables.get(study, _differences)
        form = re.compile(rf"(<!-- {study} -->\n).*?(<!-- end -->)", re.DOTALL)
        lines = "\n".join(table(arms))
        page = form.sub(lambda match, lines=lines: f"{match[1]}\n{lines}\n\n{match[2]}", page)
    return page


def baseline_losses() -> dict[str, dict[str, dict[int, tuple[int, float]]]]:
    """Training tokens and final loss in docs/baseline.csv, by study, arm and seed."""
    losses: dict[str, dict[str, dict[int, tuple[int, float]]]] = {}
    with open(ROOT / "docs/baseline.csv", encoding="utf-8", newline="") as file:
        for run in csv.DictReader(file):
            arm = losses.setdefault(run["study"], {}).setdefault(run["arm"], {})
            arm[int(run["seed"])] = int(run["tokens"]), float(run["val_loss"])
    return losses


def _rates(arms: dict[str, dict[int, tuple[int, float]]]) -> list[str]:
    """Initializations by learning rate."""
    cells: dict[str, dict[str, str]] = {}
    for arm, runs in arms.items():
        init, _, rate = arm.rpartition(" optim.lr=")
        cells.setdefault(init, {})[rate] = " / ".join(f"{loss:.3f}" for _, loss in runs.values())
    rates = sorted({rate for row in cells.values() for rate in row}, key=float)
    rows = [(f"`{init}`", *(row.get(rate, "–") for rate in rates)) for init, row in cells.items()]
    return markdown_table(("initialization", *rates), rows)


def _differences(arms: dict[str, dict[int, tuple[int, float]]]) -> list[str]:
    """Paired differences to the baseline by seed, each with its own 95% interval."""
    baseline, rows = arms["baseline"], []
    for arm, runs in arms.items():
        loss = _loss(runs)
        if arm == "baseline":
            rows.append(("default", loss, "–", "–"))
            continue
        pairs = np.array([runs[seed][1] - baseline[seed][1] for seed in runs if seed in baseline])
        difference = f"{pairs.mean():+.4f}"
        if len(pairs) > 1:
            found = paired_effect(pairs, LEVEL)
            difference += f" ({found.low:+.4f} to {found.high:+.4f})"
        rows.append((f"`{arm}`", loss, difference, f"{(pairs < 0).sum()} of {len(pairs)}"))
    return markdown_table(("arm", "loss", "difference, 95% interval", "lower at"), rows)


def _loss(runs: dict[int, tuple[int, float]]) -> str:
    """The mean loss over the seeds and, with more than one, its standard deviation between them."""
    losses = np.array([loss for _, loss in runs.values()])
    deviation = f" ± {losses.std(ddof=1):.4f}" if len(losses) > 1 else ""
    return f"{losses.mean():.4f}{deviation}"


def _isoflop(arms: dict[str, dict[int, tuple[int, float]]], width_of_baseline: int) -> list[str]:
    """The loss of each width at its best rate, by tokens per parameter, and the lowest point of a parabola by seed."""
    widths: dict[int, list[tuple[float, str, dict[int, tuple[int, float]]]]] = {}
    for arm, runs in arms.items():
        keys = dict(override.split("=") for override in arm.split(",") if "=" in override)
        width = int(keys.get("model.d_model", width_of_baseline))
        rate = keys.get("optim.lr", f"{0.384 / width:.2g}")
        mean = float(np.mean([loss for _, loss in runs.values()]))
        widths.setdefault(width, []).append((mean, rate, runs))
    rows, ratios, losses = [], [], []
    for width, rates in sorted(widths.items()):
        _, rate, runs = min(rates, key=lambda found: found[0])
        parameters, tokens = 48 * width**2, next(iter(runs.values()))[0]
        ratios.append(tokens / parameters)
        losses.append([loss for _, loss in runs.values()])
        rows.append((str(width), f"{parameters:,}", f"{tokens / parameters:.1f}", rate, _loss(runs)))
    vertices, excesses = [], []
    for by_width in np.array(losses).T:
        curve = np.polynomial.Polynomial.fit(np.log(ratios), by_width, 2).convert()
        vertices.append(float(curve.deriv().roots()[0]))
        excesses.append(curve(math.log(20)) - curve(vertices[-1]))
    best = paired_effect(np.array(vertices), LEVEL)
    low, mean, high = (math.exp(value) for value in (best.low, best.delta, best.high))
    lowest = f"A parabola through them is lowest at {mean:.0f} tokens per parameter ({low:.0f} to {high:.0f})"
    heads = ("d_model", "parameters", "tokens per parameter", "best of three rates", "loss")
    return [*markdown_table(heads, rows), "", f"{lowest}; at 20 it lies {np.mean(excesses):.4f} nats higher."]


def options_page(groups: dict[str, Any]) -> str:
    """docs/options.md: every option of `catalogue` with its equations, its keys and its source."""
    about = "Every option with its equation, keys and source. `*` is the baseline. Made by `scripts/docs.py`."
    rows = []
    for group, options in groups.items():
        names = [f"`{name}`" for name in options]
        if group != "switches":
            first = sorted(options, key=lambda name: not options[name]["default"])
            names = [f"`{name}`" + "*" * options[name]["default"] for name in first]
        rows.append((f"`{'study' if group == 'studies' else group}`", " ".join(names)))
    lines = ["# Options", "", about, "", *markdown_table(("group", "options"), rows)]
    for group, options in groups.items():
        lines += ["", f"## {group}"]
        if group == "switches":
            lines += key_table({f"{name}={show(key['default'])}": key for name, key in options.items()})
            continue
        for name, option in options.items():
            lines += ["", f"**`{typed_option(group, name)}`**{' *' if option['default'] else ''} {option['summary']}"]
            if option.get("equation"):
                lines += ["", *("    " + equation for equation in option["equation"])]
            if option.get("prescribes"):
                lines += ["", f"Prescribes {', '.join(f'`{override}`' for override in option['prescribes'])}."]
            if group not in CLOSED_GROUPS:
                lines += key_table(option_keys(group, name, option))
        if group in CLOSED_GROUPS:  # all options of the group have the same keys
            name = next((name for name, option in options.items() if option["default"]), next(iter(options)))
            lines += key_table(option_keys(group, name, options[name]))
    return "\n".join(lines) + "\n"


def option_keys(group: str, name: str, option: dict[str, Any]) -> dict[str, Any]:
    """The keys of an option by how they are typed with their default."""
    return {typed_key(group, name, key) + typed_default(group, spec): spec for key, spec in option["keys"].items()}


def key_table(keys: dict[str, Any]) -> list[str]:
    rows = [(f"`{typed}`", key["takes"], key["meaning"]) for typed, key in keys.items()]
    return ["", *markdown_table(("key", "takes", "meaning"), rows)] if rows else []


if __name__ == "__main__":
    metrics = ROOT / "docs/metrics.md"
    metrics.write_text(with_measures(metrics.read_text(encoding="utf-8")), encoding="utf-8")
    words = ROOT / "docs/reading_a_verdict.md"
    words.write_text(with_words(words.read_text(encoding="utf-8")), encoding="utf-8")
    baseline = ROOT / "docs/baseline.md"
    baseline.write_text(with_baseline(baseline.read_text(encoding="utf-8")), encoding="utf-8")
    (ROOT / "docs/options.md").write_text(options_page(catalogue()), encoding="utf-8")

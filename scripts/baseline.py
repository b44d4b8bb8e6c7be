"""Print the losses behind docs/baseline.md, one table per study: `python scripts/baseline.py [STUDY...]`.

They are in docs/baseline.csv, one run per line.
"""

import csv
import math
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from nexus_ablate.comparison.statistics import LEVEL, paired_effect
from nexus_ablate.console import markdown_table

ROOT = Path(__file__).resolve().parent.parent
Arms = dict[str, dict[int, tuple[int, float]]]
"""Training tokens and final loss by arm and seed."""


def tables(studies: list[str]) -> Iterator[str]:
    """The lines of the tables of some studies; of all where none is named."""
    forms = {
        "init": _rates,
        "isoflop": partial(_isoflop, width_of_baseline=32),
        "isoflop_pico": partial(_isoflop, width_of_baseline=64),
    }
    for study, arms in losses().items():
        if study in studies or not studies:
            yield from (f"## {study}", "", *forms.get(study, _differences)(arms), "")


def losses() -> dict[str, Arms]:
    """docs/baseline.csv by study."""
    found: dict[str, Arms] = {}
    with open(ROOT / "docs/baseline.csv", encoding="utf-8", newline="") as file:
        for run in csv.DictReader(file):
            study = run["study"].removeprefix("baseline_")
            arm = found.setdefault(study, {}).setdefault(run["arm"], {})
            arm[int(run["seed"])] = int(run["tokens"]), float(run["val_loss"])
    return found


def _rates(arms: Arms) -> list[str]:
    """Initializations by learning rate."""
    cells: dict[str, dict[str, str]] = {}
    for arm, runs in arms.items():
        init, _, rate = arm.rpartition(" optim.lr=")
        cells.setdefault(init, {})[rate] = " / ".join(f"{loss:.3f}" for _, loss in runs.values())
    rates = sorted({rate for row in cells.values() for rate in row}, key=float)
    rows = [(f"`{init}`", *(row.get(rate, "–") for rate in rates)) for init, row in cells.items()]
    return markdown_table(("initialization", *rates), rows)


def _differences(arms: Arms) -> list[str]:
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
            assert found is not None
            difference += f" ({found.low:+.4f} to {found.high:+.4f})"
        rows.append((f"`{arm}`", loss, difference, f"{(pairs < 0).sum()} of {len(pairs)}"))
    return markdown_table(("arm", "loss", "difference, 95% interval", "lower at"), rows)


def _loss(runs: dict[int, tuple[int, float]]) -> str:
    """The mean loss over the seeds and, with more than one, its standard deviation between them."""
    losses = np.array([loss for _, loss in runs.values()])
    deviation = f" ± {losses.std(ddof=1):.4f}" if len(losses) > 1 else ""
    return f"{losses.mean():.4f}{deviation}"


def _isoflop(arms: Arms, width_of_baseline: int) -> list[str]:
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
    assert best is not None
    low, mean, high = (math.exp(value) for value in (best.low, best.delta, best.high))
    lowest = f"A parabola through them is lowest at {mean:.0f} tokens per parameter ({low:.0f} to {high:.0f})"
    heads = ("d_model", "parameters", "tokens per parameter", "best of three rates", "loss")
    return [*markdown_table(heads, rows), "", f"{lowest}; at 20 it lies {np.mean(excesses):.4f} nats higher."]


if __name__ == "__main__":
    print("\n".join(tables(sys.argv[1:])))

"""How often these small models agree with what is published: the last section of docs/findings.md.

docs/findings/panel.yaml says which changes, and why some are not scored; docs/findings/panel_runs.json holds the runs.
A change is right where the mean difference to its baseline has the published sign.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import yaml
from scipy import stats

FOLDER = Path(__file__).resolve().parent.parent / "docs/findings"
SIZES = {"femto": "0.05M", "pico": "0.2M"}

Losses = dict[float, dict[int, float]]
"""The final losses of an arm: by learning rate, then by seed."""


@dataclass(frozen=True)
class Outcome:
    """One change at one size: the arm's loss minus the baseline's in nats per byte, 95% interval over seeds."""

    delta: float
    low: float
    high: float
    published: str

    @property
    def is_right(self) -> bool:
        return self.delta > 0 if self.published == "higher" else self.delta < 0

    @property
    def is_decided(self) -> bool:
        return self.low > 0 or self.high < 0

    @property
    def interval(self) -> str:
        return f"{self.delta:+.3f} ({self.low:+.3f} to {self.high:+.3f})"

    @property
    def text(self) -> str:
        return self.interval if self.is_right else f"{self.interval} **wrong**"


def changes() -> dict[str, dict[str, Any]]:
    """The rows of panel.yaml by name."""
    return yaml.safe_load((FOLDER / "panel.yaml").read_text(encoding="utf-8"))


def read_losses() -> dict[tuple[str, str], Losses]:
    """The losses of every arm by (study/arm, size)."""
    losses: dict[tuple[str, str], Losses] = {}
    runs = json.loads((FOLDER / "panel_runs.json").read_text(encoding="utf-8"))["runs"]
    for study, arm, size, rate, seed, loss in runs:
        by_rate = losses.setdefault((f"{study}/{arm}", size), {})
        by_rate.setdefault(rate, {})[seed] = loss
    return losses


def best_rate(losses: Losses) -> float:
    return min(losses, key=lambda rate: mean(losses[rate].values()))


def is_bracketed(losses: Losses, seeds: int) -> bool:
    """Whether the rates on both sides of the best one are trained at all seeds."""
    complete = sorted(rate for rate in losses if len(losses[rate]) == seeds)
    return bool(complete) and min(complete) < best_rate(losses) < max(complete)


def outcome(change: dict[str, Any], size: str, losses: dict[tuple[str, str], Losses]) -> Outcome | None:
    """The change at a size; None where its best rate is not bracketed by trained ones."""
    arm, baseline = (losses.get((name, size), {}) for name in change["runs"])
    if change.get("rates") == "largest":
        rate = max(set(arm) & set(baseline))
        pair = arm[rate], baseline[rate]
    elif is_bracketed(arm, 3) and is_bracketed(baseline, 3):
        pair = arm[best_rate(arm)], baseline[best_rate(baseline)]
    else:
        return None
    differences = [pair[0][seed] - pair[1][seed] for seed in sorted(set(pair[0]) & set(pair[1]))]
    delta = mean(differences)
    interval = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    return Outcome(delta, float(interval.low), float(interval.high), change["published"])


def share(right: int, total: int) -> str:
    """`16 of 17, 94% (71% to 100%)`: a share with its exact 95% interval."""
    interval = stats.binomtest(right, total).proportion_ci(0.95, method="exact")
    return f"{right} of {total}, {right / total:.0%} ({interval.low:.0%} to {interval.high:.0%})"


def newer_wins(change: dict[str, Any]) -> bool:
    """Whether the rule "the newer one ends lower" gives the published sign."""
    return change["published"] == ("lower" if change["newer"] == "arm" else "higher")


def score(size: str, scored: dict[str, dict[str, Any]], losses: dict[tuple[str, str], Losses]) -> str:
    """What the scored changes say at one size, in sentences."""
    outcomes = {name: outcome(change, size, losses) for name, change in scored.items()}
    read = {name: found for name, found in outcomes.items() if found is not None}
    right = {name for name, found in read.items() if found.is_right}
    by_rule = {name for name in read if newer_wins(scored[name])}
    decided = {name for name, found in read.items() if found.is_decided}
    against = ", ".join(sorted(decided - right))
    one_alone = right ^ by_rule
    sentences = [
        f"**{size}** ({SIZES[size]}): {share(len(right), len(read))} have the published sign, "
        f"{len(decided & right)} of these by an interval that excludes 0. Decided against it: {against or 'none'}.",
        f"The rule *the newer one wins* is right for {len(by_rule)} of {len(read)}; "
        f"where rule and runs disagree, the runs are right {len(right - by_rule)} of {len(one_alone)} times.",
    ]
    if not one_alone or stats.binomtest(len(right - by_rule), len(one_alone)).pvalue > 0.05:
        sentences.append("**That is no evidence yet that small models say more than the rule.**")
    return " ".join(sentences)


def section() -> str:
    """The section as Markdown."""
    rows, losses = changes(), read_losses()
    scored = {name: change for name, change in rows.items() if "contested" not in change}
    lines = []
    for size in SIZES:
        lines += [score(size, scored, losses), ""]
    every = {name: outcome(change, "femto", losses) for name, change in rows.items()}
    right = [name for name, found in every.items() if found is not None and found.is_right]
    disputed = ", ".join(name for name in rows if name not in scored)
    lines += [
        f"Not scored, since sources disagree about them: {disputed}. They were taken out after they had been trained; "
        f"with them, `femto` has the published sign for {len(right)} of {len(every)}.",
        "",
        "| change | published, nats per token | femto, nats per byte | pico, nats per byte |",
        "|---|---|---|---|",
        *(table_row(name, change, losses) for name, change in scored.items()),
    ]
    return "\n".join(lines) + "\n"


def table_row(name: str, change: dict[str, Any], losses: dict[tuple[str, str], Losses]) -> str:
    cells = [outcome(change, size, losses) for size in SIZES]
    texts = " | ".join(cell.text if cell else "its best rate is not known" for cell in cells)
    beside = f" beside `{change['baseline']}`" if "baseline" in change else ""
    effect = f" by {abs(change['effect']):.3f}" if "effect" in change else ""
    return f"| {name}: `{change['arm']}`{beside} | {change['published']}{effect} | {texts} |"


if __name__ == "__main__":
    print(section())

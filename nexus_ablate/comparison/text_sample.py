"""Differences by block of evaluation text, whose spread says how far other text of the kind would move a difference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from nexus_ablate.comparison.arms import Arm
from nexus_ablate.comparison.cell import FEWEST_BLOCKS
from nexus_ablate.comparison.fairness import PASS, TEXT, WARN, Check
from nexus_ablate.comparison.results import ArmResult
from nexus_ablate.comparison.statistics import Array
from nexus_ablate.comparison.terms import Terms

BY_WINDOW = ("val_loss", "val_bpb")
"""Endpoints that are recorded by window of text."""


@dataclass(frozen=True)
class TextDifferences:
    """An arm's differences to the baseline by block of text.

    Attributes:
        by_block: (seeds, blocks) in the endpoint's unit, NaN where there is no pair; None where they are not known.
        shares: (blocks,) of the tokens, in each block.
        lacking: Why the error over text is not part of the interval; "" where it is, or where no pair has a result.
    """

    by_block: Array | None = None
    shares: Array | None = None
    lacking: str = ""


def differences_over_text(
    arm: Arm, baseline: Arm, seeds: list[int], has_pair: NDArray[np.bool_], terms: Terms
) -> TextDifferences:
    """The differences of an arm by block of text.

    Args:
        has_pair: (seeds,) whether the arm and the baseline both have a result.
    """
    pairs = list(compress(seeds, has_pair))
    if arm is baseline or terms.is_listed or not pairs:
        return TextDifferences()
    endpoint = terms.endpoint.name
    if endpoint not in BY_WINDOW:
        return TextDifferences(lacking=f"{endpoint} is not recorded by window of text")
    for seed in pairs:
        for _, run in [*arm.runs_at(seed), *baseline.runs_at(seed)]:
            windows, base_windows = run.windows, baseline.runs[seed].windows
            if windows is None or base_windows is None:
                return TextDifferences(lacking=f"losses by window of text not recorded (seed {seed})")
            if not np.array_equal(windows.places, base_windows.places):
                return TextDifferences(lacking=f"other windows of text (seed {seed})")
    unit = 1.0
    if endpoint == "val_bpb":  # the same tokens everywhere: a constant times the loss
        loss, bits = baseline.mean("val_loss"), baseline.mean("val_bpb")
        if not loss or not bits:
            return TextDifferences(lacking="val_bpb is not recorded")
        unit = bits / loss
    windows = baseline.runs[pairs[0]].windows
    assert windows is not None
    blocks = len(windows.shares)
    if blocks < 2:
        return TextDifferences(lacking=f"all {windows.tokens} validation tokens are one block; raise train.eval_tokens")
    by_block = np.full((len(seeds), blocks), math.nan)
    for place, seed in enumerate(seeds):
        if seed in pairs:
            by_block[place] = unit * (_by_block(arm, seed) - _by_block(baseline, seed))
    few = ""
    if blocks < FEWEST_BLOCKS:
        few = f"{blocks} blocks of validation text; its part of the error is counted from {FEWEST_BLOCKS} blocks on"
    return TextDifferences(by_block, windows.shares, few)


def check_text(baseline: Arm, results: list[ArmResult], texts: list[TextDifferences]) -> Check:
    """Whether intervals hold the error over evaluation text, and whether more text would help more than more seeds.

    Args:
        baseline: Its runs say how much text there is.
        results: Of each arm, and `texts` what is known of it by block.
    """
    larger, ratios = [], []
    arms_lacking: dict[str, list[str]] = {}
    good = "no arm has an interval"
    for result, text in zip(results, texts, strict=True):
        effect = result.effect
        if effect is None:
            continue
        good = "intervals hold the error over seeds and over text; that over text is the smaller one"
        if effect.text_se is not None and effect.text_se > effect.seed_se:
            larger.append(f"{result.arm} {effect.text_se:.2g} over text, {effect.seed_se:.2g} over seeds")
            ratios.append((effect.text_se / effect.seed_se) ** 2 if effect.seed_se else math.inf)
        if text.lacking:
            arms_lacking.setdefault(text.lacking, []).append(result.arm)
    sentences = []
    if larger:
        windows = next(run.windows for run in baseline.runs.values() if run.windows)
        wanted = windows.tokens * max(ratios)
        if windows.everything:
            remedy = f"a larger validation set than these {windows.reach} tokens"
        elif wanted >= windows.reach:
            remedy = f"all of the validation text (train.eval_tokens={windows.reach})"
        else:
            remedy = f"more validation text (train.eval_tokens={2 ** math.ceil(math.log2(wanted))})"
        sentences.append(f"{remedy} would help more than more seeds; standard errors: {', '.join(larger)}")
    for reason, labels in arms_lacking.items():
        sentences.append(f"intervals hold the error over seeds alone ({', '.join(labels)}): {reason}")
    if sentences:
        return Check(TEXT, WARN, "; ".join(sentences))
    return Check(TEXT, PASS, good)


def _by_block(arm: Arm, seed: int) -> Array:
    """Losses by block of text, at the arm's own best learning rate where it has one."""
    losses = [weight * run.windows.by_block for weight, run in arm.runs_at(seed) if run.windows is not None]
    return np.sum(losses, axis=0)

"""How often verdicts are wrong, and how often they find an effect: tables with a planted truth, judged by the product.

    python scripts/simulate_verdicts.py [--tables 2000] [--markdown]

A run's loss is seed part + residual, each with variance 1/2: a standard deviation of 1 over seeds and a correlation of
0.5 between arms. "3x as noisy" is the residual's standard deviation. Each line states what must hold.
`tests/test_simulated_verdicts.py` runs the same with fewer tables.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from nexus_ablate.comparison.endpoint import Endpoint
from nexus_ablate.comparison.judging import judge_losses
from nexus_ablate.comparison.statistics import Array
from nexus_ablate.comparison.terms import NO_STUDY, Terms
from nexus_ablate.comparison.verdict import BETTER, EQUIVALENT, WORSE

CLAIMS = (BETTER, WORSE)
BASE_LOSS = 100.0
"""0.2% of it is 0.2 standard deviations, so that an automatic margin is the noise of a run."""
MARGIN = 0.3
"""Declared margin where EQUIVALENT is not the question, in standard deviations."""


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
        before: The figure before these rules, as measured in November 2026.
        target: What must hold: a share, at most (or, for power, at least).
        noise: By row, the residual's multiple; row 0 is the baseline.
        shared: Multiple of a further seed part that the arms share and the baseline lacks.
        shift: By row, the true difference in standard deviations over seeds.
        outlier: Added to the baseline's loss at its first seed.
        share: From a table's words (arms only) to whether it counts.
    """

    name: str
    arms: int
    seeds: int
    before: str
    target: float
    share: Callable[[list[str]], bool | float]
    at_least: bool = False
    noise: dict[int, float] = field(default_factory=dict)
    shared: float = 0.0
    shift: dict[int, float] = field(default_factory=dict)
    outlier: float = 0.0
    terms: Terms = field(default_factory=lambda: Terms(endpoint=Endpoint(delta_min=MARGIN)))

    @property
    def must_be(self) -> str:
        return f"{'at least' if self.at_least else 'at most'} {100 * self.target:.3g}%"

    def holds(self, figure: float) -> bool:
        return figure >= self.target if self.at_least else figure <= self.target


def any_claim(words: list[str]) -> bool:
    return any(word in CLAIMS for word in words)


def any_equivalent(words: list[str]) -> bool:
    return EQUIVALENT in words


def share_worse(*arms: int) -> Callable[[list[str]], float]:
    """The share of these arms (from 1) that is WORSE, as was planted."""
    return lambda words: sum(words[arm - 1] == WORSE for arm in arms) / len(arms)


def everywhere(shift: float, arms: int) -> dict[int, float]:
    return dict.fromkeys(range(1, arms + 1), shift)


ALL = range(1, 9)
LOOK_SEEDS = dict(seeds=list(range(20)), looks=[5, 8, 12, 20], look_weights=[0.15, 0.20, 0.25, 0.40])
LOOKS = Terms(msgspec.structs.replace(NO_STUDY, **LOOK_SEEDS), endpoint=Endpoint(delta_min=MARGIN))
EVERY_SEED = dict(looks=list(range(5, 21)), look_weights=[1 / 16] * 16)
EVERY_LOOK = replace(LOOKS, study=msgspec.structs.replace(LOOKS.study, **EVERY_SEED), share=16)
"""What adding seeds until it is decided amounts to: each look at the whole 5%."""


def cases() -> list[Case]:
    """The cases with their targets."""
    five = {n: 5.0 for n in range(1, 6)}
    rows = [
        Case("equal noise", 8, 5, "3.9%", 0.055, any_claim),
        Case("equal noise", 8, 8, "", 0.055, any_claim),
        Case("baseline 2x as noisy", 8, 5, "8.9%", 0.07, any_claim, noise={0: 2}),
        Case("baseline 2x as noisy", 8, 8, "7.3%", 0.07, any_claim, noise={0: 2}),
        Case("baseline 3x as noisy", 8, 5, "9.7-11%", 0.055, any_claim, noise={0: 3}),
        Case("baseline 3x as noisy", 8, 8, "7.4-8.4%", 0.055, any_claim, noise={0: 3}),
        Case("arms share a seed part, 3x", 8, 5, "10%", 0.055, any_claim, shared=3),
        Case("arms share a seed part, 3x", 8, 8, "7.4%", 0.055, any_claim, shared=3),
        Case("5 of 20 arms 5x as noisy", 20, 5, "8.2%", 0.06, any_claim, noise=five),
        Case("5 of 20 arms 5x as noisy", 20, 8, "6.5%", 0.06, any_claim, noise=five),
        Case("2 of 8 arms 5x as noisy", 8, 5, "6.7-7.4%", 0.06, any_claim, noise={1: 5, 2: 5}),
        Case("1 of 8 arms 3x as noisy", 8, 5, "4.6%", 0.07, any_claim, noise={1: 3}),
        Case("1 of 8 arms 3x as noisy", 8, 8, "3.0%", 0.07, any_claim, noise={1: 3}),
        Case("1 of 2 arms 5x as noisy", 2, 5, "5.4%", 0.07, any_claim, noise={1: 5}),
        Case("1 of 2 arms 5x as noisy", 2, 8, "4.2%", 0.07, any_claim, noise={1: 5}),
        Case("baseline 3x as noisy", 2, 5, "", 0.07, any_claim, noise={0: 3}),
        Case("baseline 3x as noisy", 1, 5, "", 0.07, any_claim, noise={0: 3}),
        Case("2 SD found, equal noise", 8, 5, "88%", 0.83, share_worse(*ALL), True, shift=everywhere(2, 8)),
        Case("3 SD found, equal noise", 8, 5, "", 0.95, share_worse(*ALL), True, shift=everywhere(3, 8)),
        Case("2 SD of the quiet arm found, the other 5x", 2, 5, "12%", 0.60, share_worse(2), True, {1: 5}, 0, {2: 2}),
        Case("2 SD of the quiet arm found, the other 5x", 2, 8, "26%", 0.95, share_worse(2), True, {1: 5}, 0, {2: 2}),
        Case("2 SD of a quiet arm found, 2 of 8 5x", 8, 8, "34%", 0.85, share_worse(3), True, {1: 5, 2: 5}, 0, {3: 2}),
        Case("wrong sign at 2 SD", 8, 5, "0%", 0.005, lambda w: BETTER in w, shift=everywhere(2, 8)),
        Case("EQUIVALENT, truth +2 SD, a baseline seed at +8 SD, automatic margin", 3, 5, "68%", 0.05, any_equivalent,
             shift=everywhere(2, 3), outlier=8, terms=Terms()),
        Case("EQUIVALENT at the border (2 SD), any of 8", 8, 5, "18-21%", 0.05, any_equivalent,
             shift=everywhere(2, 8), terms=Terms(endpoint=Endpoint(delta_min=2.0))),
        Case("EQUIVALENT at the border (2 SD), any of 8", 8, 20, "18-21%", 0.05, any_equivalent,
             shift=everywhere(2, 8), terms=Terms(endpoint=Endpoint(delta_min=2.0))),
        Case("any false word: null, margin 1 SD (EQUIVALENT is true)", 8, 5, "", 0.055, any_claim,
             terms=Terms(endpoint=Endpoint(delta_min=1.0))),
        Case("looks at 5, 8, 12, 20 seeds", 1, 20, "18.7%", 0.05, any_claim, terms=LOOKS),
        Case("looks at 5, 8, 12, 20 seeds", 4, 20, "", 0.055, any_claim, terms=LOOKS),
        Case("looks, baseline 3x as noisy", 4, 20, "", 0.06, any_claim, noise={0: 3}, terms=LOOKS),
        Case("2 SD found by looks", 1, 20, "", 0.99, share_worse(1), True, shift={1: 2}, terms=LOOKS),
        Case("1 SD found by looks", 1, 20, "", 0.50, share_worse(1), True, shift={1: 1}, terms=LOOKS),
    ]  # fmt: skip
    return rows


def control() -> Case:
    """What looks protect from: the same seeds, each look at the whole 5%."""
    return Case("seeds added until it is decided (not offered)", 1, 20, "18.7%", 0.05, any_claim, terms=EVERY_LOOK)


def tables(case: Case, count: int, seed: int) -> Iterator[Array]:
    """Losses (arms + 1, seeds) with the case's truth in them."""
    rng = np.random.default_rng(seed)
    half = math.sqrt(0.5)
    scale, shift = np.full((case.arms + 1, 1), half), np.zeros((case.arms + 1, 1))
    for row, factor in case.noise.items():
        scale[row] *= factor
    for row, by in case.shift.items():
        shift[row] = by
    for _ in range(count):
        losses = BASE_LOSS + half * rng.normal(size=case.seeds) + scale * rng.normal(size=(case.arms + 1, case.seeds))
        losses[1:] += case.shared * half * rng.normal(size=case.seeds)
        losses[0, 0] += case.outlier
        yield losses + shift


def simulate(case: Case, count: int, seed: int = 0) -> tuple[float, float]:
    """The share of tables that count, and the mean number of seeds that the arms used."""
    total, used = 0.0, 0.0
    for losses in tables(case, count, seed):
        judged = judge_losses(losses, case.terms).results[1:]
        total += case.share([one.verdict.word for one in judged if one.verdict is not None])
        used += float(np.mean([len(one.seeds) for one in judged]))
    return total / count, used / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=int, default=2000, help="tables per line")
    parser.add_argument("--markdown", action="store_true", help="the table of docs/reading_a_verdict.md")
    arguments = parser.parse_args()
    begun, missed = time.monotonic(), 0
    head = ("case", "arms", "seeds", "before", "now", "must be", "")
    widths = (68, 4, 5, 9, 7, 12, 6)

    def line(cells: tuple[str, ...]) -> None:
        if arguments.markdown:
            print("| " + " | ".join(cells[:-1]) + " |")
        else:
            print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip(), flush=True)

    line(head)
    if arguments.markdown:
        print("|---|---:|---:|---:|---:|---:|")
    for case in (*cases(), control()):
        figure, used = simulate(case, arguments.tables)
        good = case.holds(figure) or case.terms is EVERY_LOOK
        missed += not good
        seeds = f"{used:.1f}" if case.terms.study.looks else str(case.seeds)
        must = case.must_be if case.terms is not EVERY_LOOK else "control"
        line((case.name, str(case.arms), seeds, case.before, f"{figure:.1%}", must, "" if good else "MISSED"))
    if not arguments.markdown:
        print(
            f"{missed} of {len(cases())} missed; {arguments.tables} tables per line, {time.monotonic() - begun:.0f} s"
        )
    raise SystemExit(1 if missed else 0)


if __name__ == "__main__":
    main()

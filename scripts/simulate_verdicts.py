"""How often verdicts are wrong, and how often they find an effect: tables with a planted truth, judged by the product.

    python scripts/simulate_verdicts.py [--tables 2000] [--only TEXT] [--write]

A run's loss is seed part + residual, each with variance 1/2: a standard deviation of 1 over seeds and of a pair's
difference. Seeds of the simulation are fixed. `--write` makes the table of docs/error_rates.md anew, in a few minutes.
`tests/test_simulated_verdicts.py` holds a part of the table with fewer tables.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from nexus_ablate.comparison.rates import weights_at_best
from nexus_ablate.comparison.statistics import LEVEL, Array, paired_effect, sidak, welch_effect
from nexus_ablate.comparison.verdict import BETTER, DIVERGED, EQUIVALENT, WORSE, Counts, word_of
from nexus_ablate.comparison.worth import LossByCompute
from nexus_ablate.study.endpoint import Endpoint

PAGE = Path(__file__).parent.parent / "docs/error_rates.md"
TABLES = 2000
CLAIMS = (BETTER, WORSE)
MARGIN = 0.3
"""In standard deviations, where EQUIVALENT is not the question."""
HALF = math.sqrt(0.5)
RATES = 2.0 ** np.arange(-1.5, 2.0, 0.5)
"""The grid of a study: seven rates a factor sqrt 2 apart."""
Random = np.random.Generator
Counted = Callable[[list[str]], float]
"""From the words of a table's arms to the share that counts."""


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
        arms: Beside the baseline.
        settings: Tables that share the level.
        target: What must hold: a share of tables, at most (of power, at least); None of a control, which must fail.
        table: From random numbers to what counts of one study.
    """

    name: str
    arms: int
    settings: int
    seeds: int
    target: float | None
    table: Callable[[Random], float]
    at_least: bool = False

    @property
    def must_be(self) -> str:
        if self.target is None:
            return "control"
        return f"{'at least' if self.at_least else 'at most'} {100 * self.target:.3g}%"

    def holds(self, figure: float, tables: int, errors: float = 2.6) -> bool:
        """Whether a simulated share meets the target, up to the 99% binomial error."""
        if self.target is None:
            return figure > 0.06
        error = errors * math.sqrt(self.target * (1 - self.target) / tables)
        return figure >= self.target - error if self.at_least else figure <= self.target + error


def any_of(*counted: str) -> Counted:
    return lambda words: any(word in counted for word in words)


any_claim = any_of(*CLAIMS)


def share_of(word: str) -> Counted:
    """The share of the arms that get a word, as was planted."""
    return lambda words: sum(each == word for each in words) / len(words)


def losses_of(random: Random, arms: int, seeds: int, noise: dict[int, float]) -> Array:
    """Losses (arms + 1, seeds) without effects; `noise` has the residual's multiple by row, the baseline's first."""
    scale = np.full((arms + 1, 1), HALF)
    for row, factor in noise.items():
        scale[row] *= factor
    return HALF * random.normal(size=seeds) + scale * random.normal(size=(arms + 1, seeds))


def words_of(losses: Array, cells: int, margin: float = MARGIN, texts: list[Array] | None = None) -> list[str]:
    """The words of arms by their losses (arms + 1, seeds), NaN for a run that failed to train."""
    words, base = [], losses[0]
    level, endpoint = sidak(LEVEL, cells), Endpoint("val_loss", margin)
    for row, arm in enumerate(losses[1:]):
        pair = np.isfinite(arm - base)
        by_block = texts[row] if texts else None
        shares = None if by_block is None else np.full(by_block.shape[1], 1 / by_block.shape[1])
        effect = paired_effect((arm - base)[pair], level, by_block=by_block, shares=shares)
        failed, base_failed = (int(np.isnan(runs).sum()) for runs in (arm, base))
        words.append(word_of(endpoint, effect, Counts(len(arm), failed, len(base), base_failed), [], False))
    return words


# ---------------------------------------------------------------------------------------------------- kinds of tables


def plain(
    random: Random,
    arms: int,
    seeds: int,
    counted: Counted,
    settings: int = 1,
    noise: dict[int, float] | None = None,
    shift: float = 0.0,
    margin: float = MARGIN,
    cells: int = 0,
) -> float:
    """A study; `shift` is the true difference of every arm, `cells` another level than the study's."""
    words = []
    for _ in range(settings):
        losses = losses_of(random, arms, seeds, noise or {})
        losses[1:] += shift
        words += words_of(losses, cells or arms * settings, margin)
    return counted(words)


def elsewhere(random: Random, arms: int, seeds: int, counted: Counted, shift: float = 0.0) -> float:
    """A table whose arms share no seeds, rounded to a fifth of a standard deviation."""
    losses = np.round(random.normal(size=(arms + 1, seeds)) * 5) / 5
    losses[1:] += shift
    words = []
    for arm in losses[1:]:
        effect = welch_effect(arm, losses[0], sidak(LEVEL, arms), step=0.2)
        words.append(word_of(Endpoint("val_loss", MARGIN), effect, Counts(seeds, 0, seeds, 0), [], False))
    return counted(words)


def added(random: Random, times: int) -> float:
    """Five seeds are added some times, each time after a look at the words."""
    losses = losses_of(random, 1, 5 * (times + 1), {})
    return any(any_claim(words_of(losses[:, :seeds], 1)) for seeds in range(5, losses.shape[1] + 1, 5))


def failing(random: Random, arms: int, seeds: int, counted: Counted, rate: float) -> float:
    """Runs that fail to train by chance, each arm and the baseline alike."""
    losses = losses_of(random, arms, seeds, {})
    losses[random.random(losses.shape) < rate] = np.nan
    return counted(words_of(losses, arms))


def losing_worst(random: Random, lost: int, is_counted: bool = True) -> float:
    """The baseline loses its worst runs, a null arm none: is the arm WORSE?"""
    losses = losses_of(random, 1, 8, {})
    losses[0, np.argsort(losses[0])[8 - lost :]] = np.nan
    if not is_counted:  # survivors as if they were all
        losses = losses[:, np.isfinite(losses[0])]
    return any_of(WORSE)(words_of(losses, 1))


def on_text(random: Random, seeds: int, blocks: int, is_told: bool = True) -> float:
    """Differences that depend on the passage: each block of text has its own effect of 10 SD, 0 over all text."""
    losses, texts = losses_of(random, 2, seeds, {}), []
    for arm in (1, 2):
        by_block = (losses[arm] - losses[0])[:, None] + 10 * random.normal(size=blocks)
        by_block = by_block + random.normal(size=by_block.shape)
        losses[arm] = losses[0] + by_block.mean(axis=1)
        texts.append(by_block)
    return any_claim(words_of(losses, 2, texts=texts if is_told else None))


def tuned(
    random: Random,
    arms: int,
    seeds: int,
    counted: Counted,
    steep: float,
    optima: str,
    skew: float = 0.0,
    shift: float = 0.0,
    rates: Array = RATES,
    tuning_seeds: int = 0,
) -> float:
    """Arms that are equal, or `shift` apart, each at its own best learning rate.

    Half of the residual is that of the arm at its seed, half that of each run.

    Args:
        steep: What a rate a factor of two from the best one loses, in standard deviations.
        optima: Where best rates lie: all at one place of the grid, arms half a factor of sqrt 2 from the baseline, or
            each anywhere.
        skew: Above the best rate the loss rises so much faster, and faster with distance.
        tuning_seeds: Choose the rate by so many seeds and judge there alone.
    """
    seed_part, place = HALF * random.normal(size=seeds), random.uniform(-0.25, 0.25)
    losses = np.empty((arms + 1, seeds))
    for row in range(arms + 1):
        best = {"equal": place, "apart": place + 0.25 * (row > 0), "anywhere": random.uniform(-0.25, 0.25)}[optima]
        arm_part = 0.5 * random.normal(size=seeds)
        by_rate, means = {}, {}
        for rate in rates:
            away = math.log2(rate) - best
            lost = steep * away**2 * (1 + skew * away if away > 0 else 1 / (1 + skew))
            by_rate[rate] = lost + seed_part + arm_part + 0.5 * random.normal(size=seeds) + shift * (row > 0)
            means[rate] = lost + random.normal(size=max(tuning_seeds, 1)).mean()
        weights, _ = weights_at_best(by_rate)
        if tuning_seeds:
            weights = {min(means, key=means.__getitem__): 1.0}
        losses[row] = sum(weight * by_rate[rate] for rate, weight in weights.items()) if weights else np.nan
    return counted(words_of(losses, arms))


def worth(random: Random, multiple: float, seeds: int) -> bool:
    """Whether the interval of worth holds the planted multiple, or beyond the budgets the bound is on its side.

    A pair's standard deviation is a tenth of what twice the compute is worth.
    """
    multiples = np.array([0.5, 1.0, 2.0])
    noise = 0.1 * HALF
    seed_part = noise * random.normal(size=seeds)
    budgets = seed_part - np.log2(multiples)[:, None] + noise * random.normal(size=(3, seeds))
    arm = seed_part - math.log2(multiple) + noise * random.normal(size=seeds)
    curve = LossByCompute(multiples, budgets.mean(axis=1))
    effect = paired_effect(arm - budgets[1], LEVEL)
    assert effect is not None
    at, low, high = (curve.multiple_of(curve.losses[1] + end) for end in (effect.delta, effect.high, effect.low))
    if not 0.5 < multiple < 2:
        return at == (math.inf if multiple > 1 else 0.0)
    return low <= multiple <= high


# ---------------------------------------------------------------------------------------------------------- the table


def cases() -> Iterator[Case]:
    """The lines with their targets."""

    def line(name: str, arms: int, seeds: int, target: float | None, kind: Callable, settings: int = 1, **more) -> Case:
        at_least = bool(more.pop("at_least", False))
        known = {"settings": settings} if kind is plain else {}
        return Case(
            name, arms, settings, seeds, target, partial(kind, arms=arms, seeds=seeds, **known, **more), at_least
        )

    null = {"target": 0.05, "kind": plain, "counted": any_claim}
    for arms, seeds in ((1, 5), (1, 8), (8, 5), (8, 8), (20, 8)):
        yield line("no effects, equal noise", arms, seeds, **null)
    for arms, seeds in ((2, 5), (8, 5), (8, 8)):
        yield line("no effects, baseline 3x as noisy", arms, seeds, **null, noise={0: 3.0})
    yield line("no effects, 1 of 2 arms 5x as noisy", 2, 5, **null, noise={1: 5.0})
    yield line("no effects, 1 of 8 arms 3x as noisy", 8, 5, **null, noise={1: 3.0})
    yield line("no effects, 5 of 20 arms 5x as noisy", 20, 5, **null, noise=dict.fromkeys(range(1, 6), 5.0))
    for settings in (3, 12):
        yield line("no effects, baseline 2x as noisy", 8, 5, **null, settings=settings, noise={0: 2.0})
    yield line("each of ten arms at 5% by itself (not offered)", 10, 5, None, plain, counted=any_claim, cells=1)
    border = {"counted": any_of(EQUIVALENT), "shift": 2.0, "margin": 2.0}
    yield line("EQUIVALENT at the border of a margin of 2 SD", 8, 8, 0.05, plain, **border)
    for arms, seeds, power in ((8, 8, 0.87), (8, 5, 0.37), (2, 5, 0.71), (2, 8, 0.97)):
        planted = {"counted": share_of(WORSE), "shift": 2.0, "at_least": True}
        yield line("2 SD found", arms, seeds, power, plain, **planted)
    yield line("wrong sign at 2 SD", 8, 8, 0.005, plain, counted=any_of(BETTER), shift=2.0)

    yield line("a table from elsewhere without shared seeds", 1, 5, 0.05, elsewhere, counted=any_claim)
    yield line("a table from elsewhere without shared seeds", 8, 8, 0.05, elsewhere, counted=any_claim)
    for times in (1, 2, 4):
        yield Case(
            f"five seeds added {times} times after a look (exploratory)", 1, 1, 5, None, partial(added, times=times)
        )

    for rate in (0.1, 0.2, 0.5):
        yield line(
            f"{rate:.0%} of all runs fail: any BETTER or WORSE", 5, 8, 0.05, failing, counted=any_claim, rate=rate
        )
    yield line("30% of all runs fail: any DIVERGED", 8, 8, 0.01, failing, counted=any_of(DIVERGED), rate=0.3)
    yield Case("the baseline loses its worst 3 of 8: WORSE", 1, 1, 8, 0.0, partial(losing_worst, lost=3))
    yield Case(
        "the same, the others taken for all (not offered)",
        1,
        1,
        8,
        None,
        partial(losing_worst, lost=3, is_counted=False),
    )

    nine = [(8, 5.0, "anywhere", 0.0), (8, 10.0, "apart", 0.0), (20, 10.0, "anywhere", 0.0), (20, 10.0, "apart", 0.0)]
    nine += [(20, 5.0, "apart", 0.0), (8, 5.0, "anywhere", 0.5), (8, 5.0, "apart", 0.5)]
    for seeds, steep, optima, skew in nine:
        skewed = ", 1.5 times as steep above" if skew else ""
        name = f"own rates, best ones {optima}, a factor of two loses {steep:g} SD{skewed}"
        target = 0.1 if skew else 0.05
        yield line(name, 1, seeds, target, tuned, counted=any_claim, steep=steep, optima=optima, skew=skew)
    for optima in ("anywhere", "apart"):
        name = f"own rates, best ones {optima}, a factor of two loses 10 SD, 1.5 times as steep above (the limit)"
        yield line(name, 1, 20, None, tuned, counted=any_claim, steep=10.0, optima=optima, skew=0.5)
    planted = {"counted": share_of(WORSE), "shift": 2.0, "at_least": True}
    yield line("2 SD found at own rates", 1, 8, 0.9, tuned, steep=5.0, optima="apart", **planted)
    wide = {"rates": 2.0 ** np.arange(-2.0, 3.0), "steep": 5.0, "optima": "apart", "skew": 0.5}
    yield line("five rates a factor 2 apart (not offered)", 1, 20, None, tuned, counted=any_claim, **wide)
    alone = {"tuning_seeds": 2, "steep": 5.0, "optima": "anywhere"}
    yield line("the rate of two tuning seeds alone (not offered)", 1, 20, None, tuned, counted=any_claim, **alone)

    for seeds, blocks in ((5, 16), (8, 32), (20, 64)):
        table = partial(on_text, seeds=seeds, blocks=blocks)
        yield Case(f"no effect over all text, {blocks} blocks at 10 SD", 2, 1, seeds, 0.05, table)
    table = partial(on_text, seeds=8, blocks=16, is_told=False)
    yield Case("the same by the error over seeds alone (not offered)", 2, 1, 8, None, table)

    for multiple in (0.8, 1.0, 1.25):
        table = partial(worth, multiple=multiple, seeds=8)
        yield Case(f"worth {multiple:g}: the interval holds it", 1, 1, 8, 0.93, table, at_least=True)
    for multiple, bound in ((0.4, "below 0.5x"), (2.5, "above 2x")):
        table = partial(worth, multiple=multiple, seeds=8)
        yield Case(f"worth {multiple:g}: `{bound}`", 1, 1, 8, 0.93, table, at_least=True)


def simulate(case: Case, tables: int) -> float:
    """The share of tables that count."""
    random = np.random.default_rng([len(case.name), case.arms, case.settings, case.seeds])
    return sum(case.table(random) for _ in range(tables)) / tables


HEADS = ("case", "arms", "settings", "seeds", "measured", "must be")


def row_of(case: Case, figure: float) -> tuple[str, ...]:
    return (case.name, str(case.arms), str(case.settings), str(case.seeds), f"{figure:.1%}", case.must_be)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=int, default=TABLES, help="tables per line")
    parser.add_argument("--only", default="", help="lines whose name has this text")
    parser.add_argument("--write", action="store_true", help="make the table of docs/error_rates.md anew")
    arguments = parser.parse_args()
    begun, missed, rows = time.monotonic(), 0, []
    for case in cases():
        if arguments.only not in case.name:
            continue
        figure = simulate(case, arguments.tables)
        good = case.holds(figure, arguments.tables)
        missed += not good
        rows.append(row_of(case, figure))
        print("  ".join((*rows[-1], "" if good else "MISSED")), flush=True)
    print(f"{missed} of {len(rows)} missed; {arguments.tables} tables per line, {time.monotonic() - begun:.0f} s")
    if arguments.write:
        lines = ["| " + " | ".join(row) + " |" for row in (HEADS, ("---", *["---:"] * 4, "---"), *rows)]
        text = re.sub(r"(\| .*\|\n)+", "\n".join(lines) + "\n", PAGE.read_text(encoding="utf-8"), count=1)
        PAGE.write_text(text, encoding="utf-8")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()

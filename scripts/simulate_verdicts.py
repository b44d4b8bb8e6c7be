"""How often verdicts are wrong, and how often they find an effect: tables with a planted truth, judged by the product.

    python scripts/simulate_verdicts.py [--tables 2000] [--only TEXT] [--write]

A run's loss is seed part + residual, each with variance 1/2: a standard deviation of 1 over seeds and a correlation of
0.5 between arms. "3x as noisy" is the residual's standard deviation. Seeds of the simulation are fixed. `--write` makes
docs/error_rates.md anew, in a few minutes. `tests/test_simulated_verdicts.py` holds a part of the table with fewer
tables.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from nexus_ablate.comparison.fairness import LEARNED
from nexus_ablate.comparison.judging import judge_losses
from nexus_ablate.comparison.learning_rates import best_rate, steps_around, weights_at_best
from nexus_ablate.comparison.results import ArmResult
from nexus_ablate.comparison.statistics import Array
from nexus_ablate.comparison.terms import NO_STUDY, Terms
from nexus_ablate.comparison.text_sample import TextDifferences
from nexus_ablate.comparison.verdict import BETTER, EQUIVALENT, FAILS, WORSE
from nexus_ablate.measure.regime import has_learned
from nexus_ablate.study.endpoint import Endpoint

PAGE = Path(__file__).parent.parent / "docs/error_rates.md"
TABLES = 2000
CLAIMS = (BETTER, WORSE)
WORDS = (BETTER, WORSE, EQUIVALENT)
MARGIN = 0.3
"""Declared where EQUIVALENT is not the question, in standard deviations."""
HALF = math.sqrt(0.5)
Random = np.random.Generator
Counted = Callable[[list[str]], float]
"""From the words of a table's arms to the share that counts."""


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
        arms: Beside the baseline.
        cells: Endpoints x strata.
        target: What must hold: a share of tables, at most (of power, at least); None of a control, which must fail.
        table: From random numbers to what counts of one table, and the seeds that it used.
    """

    name: str
    arms: int
    cells: int
    seeds: str
    target: float | None
    table: Callable[[Random], float]
    at_least: bool = False

    @property
    def must_be(self) -> str:
        if self.target is None:
            return "control"
        return f"{'at least' if self.at_least else 'at most'} {100 * self.target:.3g}%"

    def holds(self, figure: float, tables: int, errors: int = 2) -> bool:
        """Whether a simulated share meets the target, up to some standard errors."""
        if self.target is None:
            return figure > 0.05
        error = errors * math.sqrt(self.target * (1 - self.target) / tables)
        return figure >= self.target - error if self.at_least else figure <= self.target + error


def any_claim(words: list[str]) -> bool:
    """BETTER or WORSE in a table without effects."""
    return any(word in CLAIMS for word in words)


def any_of(*counted: str) -> Counted:
    return lambda words: any(word in counted for word in words)


def share_worse(*arms: int) -> Counted:
    """The share of these arms (from 1) that is WORSE, as was planted."""
    return lambda words: sum(words[arm - 1] == WORSE for arm in arms) / len(arms)


def words_of(results: list[ArmResult]) -> list[str]:
    return [result.word for result in results[1:]]


def losses_of(random: Random, arms: int, seeds: int, noise: dict[int, float]) -> Array:
    """Losses (arms + 1, seeds) without effects; `noise` has the residual's multiple by row, the baseline's first."""
    scale = np.full((arms + 1, 1), HALF)
    for row, factor in noise.items():
        scale[row] *= factor
    return HALF * random.normal(size=seeds) + scale * random.normal(size=(arms + 1, seeds))


def terms_of(cells: int = 1, margin: float = MARGIN, strata: int = 1) -> Terms:
    names = [f"stratum {number}" for number in range(strata)]
    study = msgspec.structs.replace(NO_STUDY, share=1 / cells, stratum=names[0], of="simulated", all_strata=names)
    return Terms(study, endpoint=Endpoint("val_loss", delta_min=margin))


# ---------------------------------------------------------------------------------------------------- kinds of tables


def plain(
    random: Random,
    arms: int,
    seeds: int,
    counted: Counted,
    cells: int = 1,
    noise: dict[int, float] | None = None,
    shift: dict[int, float] | None = None,
    margin: float = MARGIN,
) -> float:
    """Every cell of a study judged at its share; `shift` has the true difference by row."""
    words = []
    for _ in range(cells):
        losses = losses_of(random, arms, seeds, noise or {})
        for row, by in (shift or {}).items():
            losses[row] += by
        words += words_of(judge_losses(losses, terms_of(cells, margin)).results)
    return counted(words)


def looking(random: Random, arms: int, terms: Terms, counted: Counted, noise: dict[int, float], shift: float) -> float:
    """A study with looks; what counts are the words at the end."""
    losses = losses_of(random, arms, len(terms.study.seeds), noise)
    losses[1:] += shift
    return counted(words_of(judge_losses(losses, terms).results))


def until_decided(random: Random) -> float:
    """One seed after another, each time at the whole level."""
    losses = losses_of(random, 1, 20, {})
    return any(any_claim(words_of(judge_losses(losses[:, :seeds], terms_of()).results)) for seeds in range(5, 21))


def failing(random: Random, arms: int, seeds: int, counted: Counted, rate: float, strata: int = 1) -> float:
    """Runs that fail to train by chance, each arm and the baseline alike, 8 deviations below a unigram model."""
    words = []
    for _ in range(strata):
        losses = losses_of(random, arms, seeds, {})
        fails = random.random(losses.shape) < rate
        failed = [dict.fromkeys(np.nonzero(row)[0].tolist(), "non-finite") for row in fails]
        ended = np.ones(losses.shape, dtype=bool)
        losses[fails] = np.nan
        terms = terms_of(strata, strata=strata)
        words += words_of(judge_losses(losses, terms, ended=ended, failed=failed, uninformed=8.0).results)
    return counted(words)


def on_text(
    random: Random, seeds: int, blocks: int, block_sd: float, counted: Counted, is_told: bool = True, arms: int = 2
) -> float:
    """Differences that depend on the passage: each block of text has its own effect, 0 over all text."""
    losses = losses_of(random, arms, seeds, {})
    shares = np.full(blocks, 1 / blocks)
    texts = [TextDifferences()]
    for arm in range(1, arms + 1):
        by_block = (losses[arm] - losses[0])[:, None] + block_sd * random.normal(size=blocks)
        by_block = by_block + random.normal(size=by_block.shape)
        losses[arm] = losses[0] + by_block @ shares
        texts.append(TextDifferences(by_block, shares) if is_told else TextDifferences())
    return counted(words_of(judge_losses(losses, terms_of(), texts=texts).results))


def tuned(
    random: Random,
    arms: int,
    seeds: int,
    counted: Counted,
    steep: float,
    optima: str,
    skew: float = 0.0,
    shift: float = 0.0,
    is_alone: bool = False,
) -> float:
    """Arms that are equal, or `shift` apart, each at its own best learning rate, tuned and judged as a study does it.

    Two tuning seeds choose one of seven rates a factor of two apart. Half of the residual is that of the arm at its
    seed, half that of each run.

    Args:
        steep: What a rate a factor of two from the best one loses, in standard deviations.
        optima: Where best rates lie: all at one place of the grid, arms half a step of it apart from the baseline, or
            each anywhere.
        skew: Above the best rate the loss rises so much faster, and faster with distance.
        is_alone: Judge at the rate that one tuning seed chose.
    """
    seed_part, tuning_part = HALF * random.normal(size=seeds), HALF * random.normal(size=2)
    losses, place = np.empty((arms + 1, seeds)), random.uniform(-0.5, 0.5)
    for row in range(arms + 1):
        best = {"equal": place, "apart": place + 0.5 * (row > 0), "anywhere": random.uniform(-0.5, 0.5)}[optima]
        arm_part, arm_tuning_part = 0.5 * random.normal(size=seeds), 0.5 * random.normal(size=2)

        def lost(octave: float, best: float = best) -> float:
            away = octave - best
            return steep * away**2 * (1 + skew * away if away > 0 else 1 / (1 + skew))

        tuning = {}
        for octave in range(-3, 4):
            runs = lost(octave) + tuning_part + arm_tuning_part + 0.5 * random.normal(size=2)
            tuning[float(octave)] = runs[: 1 if is_alone else 2].tolist()
        chosen = best_rate(tuning)
        assert chosen is not None
        claim: dict[int, Array] = {}
        while missing := [step for step in steps_around(partial(_mean, claim)) if step not in claim]:
            for step in missing:
                runs = seed_part + arm_part + 0.5 * random.normal(size=seeds)
                claim[step] = lost(chosen + step / 2) + shift * (row > 0) + runs
        weights = {0: 1.0} if is_alone else weights_at_best({step: float(runs.mean()) for step, runs in claim.items()})
        losses[row] = sum(weight * claim[step] for step, weight in weights.items())
    return counted(words_of(judge_losses(losses, terms_of()).results))


def _mean(claim: dict[int, Array], step: int) -> float | None:
    return float(claim[step].mean()) if step in claim else None


def unlearned(random: Random, arms: int, seeds: int, counted: Counted, is_checked: bool = True) -> float:
    """A baseline at a unigram model's loss of 30 deviations, and arms that differ by 3."""
    losses = losses_of(random, arms, seeds, {}) + 30.0
    losses[1:] -= 3.0
    unfair = [[] for _ in range(arms + 1)]
    if is_checked and not has_learned(losses[0].tolist(), unigram=30.0):
        unfair = [[LEARNED] for _ in range(arms + 1)]
    return counted(words_of(judge_losses(losses, terms_of(), unfair=unfair).results))


# ---------------------------------------------------------------------------------------------------------- the table

LOOKS = Terms(
    msgspec.structs.replace(NO_STUDY, seeds=list(range(20)), looks=[8, 12, 20], look_weights=[0.3, 0.3, 0.4]),
    endpoint=Endpoint("val_loss", delta_min=MARGIN),
)


def cases() -> Iterator[Case]:
    """The lines with their targets."""
    five_noisy, first = dict.fromkeys(range(1, 6), 5.0), {1: 5.0}
    null = "no effects"

    def line(name: str, arms: int, seeds: int, target: float | None, counted: Counted, cells: int = 1, **more) -> Case:
        at_least = bool(more.pop("at_least", False))
        table = partial(plain, arms=arms, seeds=seeds, counted=counted, cells=cells, **more)
        return Case(name, arms, cells, str(seeds), target, table, at_least)

    for arms, seeds in ((1, 5), (1, 8), (2, 8), (8, 5), (8, 8), (20, 8)):
        yield line(f"{null}, equal noise", arms, seeds, 0.05, any_claim)
    for arms, seeds in ((1, 5), (2, 5), (8, 5), (8, 8), (12, 5), (20, 5)):
        yield line(f"{null}, baseline 2x as noisy", arms, seeds, 0.05, any_claim, noise={0: 2.0})
    for arms, seeds in ((2, 5), (8, 5), (8, 8)):
        yield line(f"{null}, baseline 3x as noisy", arms, seeds, 0.05, any_claim, noise={0: 3.0})
    yield line(f"{null}, 1 of 2 arms 5x as noisy", 2, 5, 0.05, any_claim, noise=first)
    yield line(f"{null}, 1 of 8 arms 5x as noisy", 8, 8, 0.05, any_claim, noise=first)
    yield line(f"{null}, 5 of 20 arms 5x as noisy", 20, 5, 0.05, any_claim, noise=five_noisy)
    for cells in (6, 12, 24):
        yield line(f"{null}, baseline 2x as noisy", 8, 5, 0.05, any_claim, cells, noise={0: 2.0})
    yield line(f"{null}, 1 of 2 arms 3x as noisy", 2, 5, 0.05, any_claim, 12, noise={1: 3.0})
    for seeds in (8, 20):
        name = "EQUIVALENT at the border of a margin of 2 SD"
        yield line(name, 8, seeds, 0.05, any_of(EQUIVALENT), shift=dict.fromkeys(range(1, 9), 2.0), margin=2.0)
    for arms, seeds, power in ((8, 5, 0.35), (8, 8, 0.88), (2, 5, 0.70), (2, 8, 0.97)):
        planted = dict.fromkeys(range(1, arms + 1), 2.0)
        yield line("2 SD found, equal noise", arms, seeds, power, share_worse(*planted), shift=planted, at_least=True)
    yield line(
        "2 SD of the quiet arm found, the other 5x",
        2,
        8,
        0.95,
        share_worse(2),
        noise=first,
        shift={2: 2.0},
        at_least=True,
    )
    yield line("wrong sign at 2 SD", 8, 8, 0.005, any_of(BETTER), shift=dict.fromkeys(range(1, 9), 2.0))

    for arms, noise in ((1, {}), (4, {}), (4, {0: 3.0})):
        name = f"{null}, looks at 8, 12, 20" + (", baseline 3x as noisy" if noise else "")
        table = partial(looking, arms=arms, terms=LOOKS, counted=any_claim, noise=noise, shift=0.0)
        yield Case(name, arms, 1, "8-20", 0.05, table)
    for shift, power in ((1.0, 0.9), (2.0, 0.99)):
        table = partial(looking, arms=1, terms=LOOKS, counted=share_worse(1), noise={}, shift=shift)
        yield Case(f"{shift:g} SD found by looks", 1, 1, "8-20", power, table, at_least=True)
    yield Case("seeds added until it is decided (not offered)", 1, 1, "5-20", None, until_decided)

    for arms, seeds, rate, strata in ((5, 10, 0.5, 4), (5, 8, 0.2, 1), (3, 8, 0.1, 1)):
        table = partial(failing, arms=arms, seeds=seeds, counted=any_claim, rate=rate, strata=strata)
        yield Case(f"{rate:.0%} of all runs fail: BETTER or WORSE", arms, strata, str(seeds), 0.05, table)
    for arms, seeds, rate, strata in ((1, 5, 0.7, 1), (5, 10, 0.5, 4), (8, 8, 0.3, 1)):
        table = partial(failing, arms=arms, seeds=seeds, counted=any_of(*FAILS), rate=rate, strata=strata)
        yield Case(f"{rate:.0%} of all runs fail: DIVERGED or UNSTABLE", arms, strata, str(seeds), 0.01, table)

    for arms, seeds in ((1, 5), (1, 20), (3, 8)):
        for optima in ("equal", "apart", "anywhere"):
            for steep in (1.0, 5.0, 10.0):
                name = f"own learning rates, best ones {optima}, a factor of two loses {steep:g} SD"
                table = partial(tuned, arms=arms, seeds=seeds, counted=any_claim, steep=steep, optima=optima)
                yield Case(name, arms, 1, str(seeds), 0.05, table)
    for steep in (1.0, 5.0):
        name = f"the same, above the best rate 1.5 times {steep:g} SD and below it {steep / 1.5:.2g} SD"
        table = partial(tuned, arms=1, seeds=8, counted=any_claim, steep=steep, optima="anywhere", skew=0.5)
        yield Case(name, 1, 1, "8", 0.05 if steep == 1 else 0.10, table)
    table = partial(tuned, arms=1, seeds=20, counted=any_claim, steep=10.0, optima="anywhere", skew=0.5)
    yield Case("the same, 15 SD above and 6.7 SD below (the limit)", 1, 1, "20", None, table)
    table = partial(tuned, arms=1, seeds=8, counted=share_worse(1), steep=5.0, optima="apart", shift=2.0)
    yield Case("2 SD found at own learning rates", 1, 1, "8", 0.95, table, at_least=True)
    table = partial(tuned, arms=1, seeds=20, counted=any_claim, steep=1.0, optima="equal", is_alone=True)
    yield Case("the rate of one tuning seed alone (not offered)", 1, 1, "20", None, table)

    for seeds, blocks in ((5, 16), (8, 16), (8, 32), (20, 64)):
        table = partial(on_text, seeds=seeds, blocks=blocks, block_sd=10.0, counted=any_claim)
        yield Case(f"no effect over all text, {blocks} blocks at 10 SD", 2, 1, str(seeds), 0.05, table)
    table = partial(on_text, seeds=8, blocks=16, block_sd=10.0, counted=any_claim, is_told=False)
    yield Case("the same by the error over seeds alone (not offered)", 2, 1, "8", None, table)

    table = partial(unlearned, arms=4, seeds=8, counted=any_of(*WORDS))
    yield Case("a baseline that has learned nothing", 4, 1, "8", 0.0, table)
    yield Case("the same without that condition (--allow learned)", 4, 1, "8", None, partial(table, is_checked=False))


def simulate(case: Case, tables: int) -> float:
    """The share of tables that count."""
    random = np.random.default_rng([len(case.name), case.arms, case.cells])
    return sum(case.table(random) for _ in range(tables)) / tables


HEADS = ("case", "arms", "cells", "seeds", "measured", "must be")


def row_of(case: Case, figure: float) -> tuple[str, ...]:
    return (case.name, str(case.arms), str(case.cells), case.seeds, f"{figure:.1%}", case.must_be)


INTRODUCTION = """# How often the words are wrong

Tables with a planted truth, judged by the functions that `compare` uses. A run's loss is a part of its seed plus a
residual, each with variance 1/2, so the standard deviation over seeds is 1 and that of a pair's difference too. A cell
is an endpoint in a stratum. {tables:,} tables per line, with fixed seeds; two standard errors are 1 point at 5%.
`python scripts/simulate_verdicts.py --write` makes this page anew in a few minutes.

What is counted: in lines without effects any BETTER or WORSE; in lines about failures the words that they name; in
lines that say *found* the share of arms whose planted effect got its word. Controls show what a rule protects from.

"""
NOTES = """
**5% is the chance of any false word in a table.** It is split: 4% for words about differences, 1% for words about
failed runs, each shared by all arms, endpoints and strata that get a word (Sidak), and by the looks with fixed weights.
Arms at their own learning rates keep it where the loss rises like a parabola over the logarithm of the rate, or nearly
so. Where it rises much more steeply above the best rate than below, at many seeds, it does not: the line *the limit*.
The sentence does not cover what has no line here: texts of another kind, another size or another budget, and residuals
far from normal at five seeds.
"""


def page_of(rows: list[tuple[str, ...]], tables: int) -> str:
    """docs/error_rates.md."""
    lines = ["| " + " | ".join(row) + " |" for row in (HEADS, ("---", *["---:"] * 4, "---"), *rows)]
    return INTRODUCTION.format(tables=tables) + "\n".join(lines) + "\n" + NOTES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=int, default=TABLES, help="tables per line")
    parser.add_argument("--only", default="", help="lines whose name has this text")
    parser.add_argument("--write", action="store_true", help="make docs/error_rates.md anew")
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
        PAGE.write_text(page_of(rows, arguments.tables), encoding="utf-8")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()

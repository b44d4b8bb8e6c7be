"""What a verdict is about: a measure, on the scale on which its differences are taken, and how they are written."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nexus_ablate.comparison.statistics import Array, mean_interval
from nexus_ablate.measure.measures import BITS, NATS, Measure, find

AT_CHANCE = "AT CHANCE"
AT_CEILING = "AT CEILING"
BY_FLAG = "declared with --delta-min"


@dataclass(frozen=True)
class Endpoint:
    """A measure that arms are compared by.

    Measures that are read on a logarithmic scale, such as a kurtosis, are compared by the difference of their natural
    logarithms, which is shown as a ratio: `x1.25` is a quarter more. Shares of right answers are compared by the
    difference of their empirical logits, ln((k + 0.5) / (n - k + 0.5)) for k of n answers, which is shown as the ratio
    of their odds.

    Attributes:
        name: A name of the measures table, as runs write it.
        delta_min: The smallest difference that matters, in the measure's unit, or for ratios as a share: 0.1 is 10%.
            None: not declared, and no arm can be EQUIVALENT.
        own: Of a measure that the table lacks, what it would say.
        origin: Where `delta_min` comes from, in words.
    """

    name: str = "val_loss"
    delta_min: float | None = None
    own: Measure | None = None
    origin: str = "declared by the study"

    def __str__(self) -> str:
        return self.name if self.delta_min is None else f"{self.name} ({self.delta_min:g})"

    @cached_property
    def measure(self) -> Measure:
        """Its row of the measures table."""
        return self.own or find(self.name)

    @property
    def log(self) -> bool:
        """Whether differences are ratios, of the values or of their odds."""
        return self.measure.log or self.is_share

    @property
    def is_share(self) -> bool:
        """Whether it is a share of right answers."""
        return bool(self.measure.floor)

    def beside(self, name: str) -> str:
        """The name of a figure of the same evaluation: `recall/items` beside `recall/accuracy`."""
        return self.name.rpartition("/")[0] + "/" + name

    @property
    def better(self) -> str:
        """`lower`, `higher`, or '' where neither is better."""
        return self.measure.better

    @property
    def unit(self) -> str:
        return self.measure.unit

    @property
    def timed(self) -> bool:
        """Whether it depends on the machine, not on what was computed: time, speed or memory."""
        return self.unit in ("s", "tokens/s", "bytes") or self.name == "mfu"

    @property
    def margin(self) -> float:
        """`delta_min` on the scale of differences; 0 where none is declared."""
        delta_min = self.delta_min or 0.0
        return math.log1p(delta_min) if self.log else delta_min

    def on_scale(self, figures: Callable[[str], Array]) -> Array:
        """The values whose differences are taken; NaN where a logarithm does not exist.

        Args:
            figures: The values of a figure by its name.
        """
        values = figures(self.name)
        if self.is_share:
            return _logits(values, figures(self.beside("items")))
        if not self.log:
            return values
        return np.log(np.where(values > 0, values, np.nan))

    def readable(self, values: Array) -> Array:
        """The values as they are shown: a share, read from a parabola over learning rates, is one all the same."""
        return np.clip(values, 0, 1) if self.is_share else values

    def saturation(self, figures: Callable[[str], Array]) -> str:
        """AT_CHANCE or AT_CEILING where no mean is above guessing, or below the largest value, with 95% confidence.

        Args:
            figures: As for `on_scale`; each row is an arm, each column a run.
        """
        if not self.is_share:
            return ""
        items = figures(self.beside("items"))
        scaled = self.on_scale(figures)
        above_floor = scaled - _logits(figures(self.beside(self.measure.floor)), items)
        below_ceiling = _logits(np.full(items.shape, self.measure.most), items) - scaled
        for name, distances in ((AT_CHANCE, above_floor), (AT_CEILING, below_ceiling)):
            intervals = [mean_interval(row) for row in distances]
            lows = [interval.low for interval in intervals if interval is not None and interval.low is not None]
            if lows and max(lows) <= 0:
                return name
        return ""

    def value(self, value: float) -> str:
        """A value as text."""
        return f"{value:.4f}" if self._is_loss else f"{value:.4g}"

    def spread(self, sd: float) -> str:
        """A standard deviation as text."""
        return f"{sd:.4f}" if self._is_loss else f"{sd:.2g}"

    def signed(self, difference: float) -> str:
        """A difference as text: `+0.0123`, or as a ratio `x1.23`."""
        if self.log:
            return _times(difference)
        return f"{difference:+.4f}" if self._is_loss else f"{difference:+.4g}"

    def size(self, difference: float) -> str:
        """How large a difference is, whatever its sign, with the unit: `0.0123 nats per token`, `x1.23`."""
        if self.log:
            return _times(abs(difference))
        return f"{self.value(abs(difference))} {self.unit}".rstrip()

    def clause(self, difference: float) -> str:
        """What a difference says of an arm that ends with it: `0.0123 nats per token lower`, `x1.23 as high`."""
        if self.is_share:
            return f"with {_times(difference)} the odds of a right answer"
        if self.log:
            return f"{_times(difference)} as high"
        lower, higher = ("earlier", "later") if self.unit == "steps" else ("lower", "higher")
        return f"{self.size(difference)} {lower if difference < 0 else higher}"

    def within(self, margin: float) -> str:
        """A margin as text: `±0.0100 nats per token`, `x1.1`."""
        return self.size(margin) if self.log else f"±{self.size(margin)}"

    @property
    def matters(self) -> str:
        """The smallest difference that matters and where it comes from, as text."""
        if not self.margin:
            return "not declared, so no arm can be EQUIVALENT"
        return f"{self.within(self.margin) if self.log else self.value(self.margin)} ({self.origin})"

    def axis(self) -> str:
        """What an axis of differences shows."""
        if self.log:
            return f"{'odds' if self.is_share else 'values'} over the baseline's"
        return f"difference, {self.unit or self.name}"

    def good(self) -> str:
        """Which differences are better, in words; '' where neither are."""
        words = {"lower": "negative differences", "higher": "positive differences"}
        if self.log:
            words = {"lower": "ratios below 1", "higher": "ratios above 1"}
        better = words.get(self.better)
        return f"{better} are better" if better else ""

    @property
    def _is_loss(self) -> bool:
        return self.unit in (NATS, BITS)


def _logits(shares: Array, items: Array) -> Array:
    """Empirical logits of shares of some numbers of answers; exists for 0 and 1 too, beyond which a parabola may go."""
    right = np.clip(shares, 0, 1) * items
    return np.log((right + 0.5) / (items - right + 0.5))


def _times(difference: float) -> str:
    """The ratio of a difference of logarithms, without an exponent: `x1.23`, `x0.0123`, `x12,300`, `x1/12,300`."""
    ratio = math.exp(min(abs(difference), 700))
    if ratio < (999.5 if difference > 0 else 100):
        return f"x{math.exp(difference):.3g}"
    side = "1/" if difference < 0 else ""
    return f"x{side}{float(f'{ratio:.3g}'):,.0f}"

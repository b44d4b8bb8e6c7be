"""An endpoint, what a verdict is about: a measure, the scale of its differences, and how they are written."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nexus_ablate.errors import ConfigError
from nexus_ablate.measure.measures import BITS, NATS, Measure, find
from nexus_ablate.plain_data import LARGEST

Array = NDArray[np.float64]
DEFAULT_MARGIN = 0.002
"""Of the baseline's loss, where no smallest difference that matters is declared."""
_COMPUTE = re.compile(r"(\d{1,2}(?:\.\d{1,3})?) ?% compute")


@dataclass(frozen=True)
class Endpoint:
    """A measure that arms are compared by at the end of training.

    Measures that are read on a logarithmic scale, such as a kurtosis, are compared by the difference of their natural
    logarithms, which is shown as a ratio: `x1.25` is a quarter more. Shares of right answers are compared by the
    difference of their empirical logits, ln((k + 0.5) / (n - k + 0.5)) for k of n answers, which is shown as the ratio
    of their odds.

    Attributes:
        name: A name of the measures table, as runs write it.
        delta_min: The smallest difference that matters, in the measure's unit, or for ratios as a share: 0.1 is 10%.
            `2% compute`: what so much more training of the baseline is worth. auto: 0.2% of the baseline's loss; none
            for other measures, of which no arm can be EQUIVALENT.
        origin: Where a resolved `delta_min` comes from, in words.
    """

    name: str
    delta_min: float | str = "auto"
    origin: str = "declared by the study"

    def __post_init__(self) -> None:
        if self.measure.unit in ("text", "hash", "index") or "{" in self.name:
            raise ConfigError("an endpoint is one number", self.name, "endpoints: [val_loss]")
        if isinstance(self.delta_min, str):
            if self.delta_min != "auto" and not self.compute:
                raise self._refused()
        elif isinstance(self.delta_min, bool) or not 0 < self.delta_min < LARGEST:
            raise self._refused()

    def _refused(self) -> ConfigError:
        problem = "delta_min takes auto, a number above 0, or as in `2% compute`"
        return ConfigError(problem, f"delta_min: {self.delta_min}", "delta_min: 0.02")

    @property
    def compute(self) -> float:
        """The share of its own training that `delta_min` is worth to the baseline, as in `2% compute`; else 0."""
        match = _COMPUTE.fullmatch(str(self.delta_min))
        return float(match[1]) / 100 if match else 0.0

    @property
    def written(self) -> Any:
        """The endpoint as it stands in a study's file."""
        return self.name if self.delta_min == "auto" else {"name": self.name, "delta_min": self.delta_min}

    def with_margin(self, delta_min: float, origin: str) -> Endpoint:
        """The endpoint with the smallest difference that matters as a number."""
        return replace(self, delta_min=delta_min, origin=origin)

    @property
    def measure(self) -> Measure:
        """Its row of the measures table."""
        return find(self.name)

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
        """`delta_min` on the scale of differences; 0 where it is not a number."""
        if isinstance(self.delta_min, str):
            return 0.0
        return math.log1p(self.delta_min) if self.log else self.delta_min

    def on_scale(self, figures: Callable[[str], Array]) -> Array:
        """The values whose differences are taken; NaN where a logarithm does not exist.

        Args:
            figures: The values of a figure by its name.
        """
        values = figures(self.name)
        if self.is_share:
            return logits(values, figures(self.beside("items")))
        if not self.log:
            return values
        return np.log(np.where(values > 0, values, np.nan))

    def readable(self, values: Array) -> Array:
        """The values as they are shown: a share, read from a parabola over learning rates, is one all the same."""
        return np.clip(values, 0, 1) if self.is_share else values

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

    def axis(self) -> str:
        """What an axis of differences shows."""
        if self.log:
            return f"{'odds' if self.is_share else 'values'} over the baseline's"
        return f"difference, {self.unit or self.name}"

    @property
    def _is_loss(self) -> bool:
        return self.unit in (NATS, BITS)


def logits(shares: Array, items: Array) -> Array:
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

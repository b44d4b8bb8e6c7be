"""SVG drawings: a frame with axes that takes lines, dots and bands. The page defines the colours.

Every picture is 520 units wide, so one rule of the page keeps its text readable on a phone and on a large screen. The
report has these and not matplotlib's: they follow the page's light and dark theme, say a point's numbers under the
pointer, and keep a report of a thousand runs below one megabyte.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape

from nexus_ablate.console import middle
from nexus_ablate.errors import printable

WIDTH = 520
"""Units of every picture. The page shows them as 342 to 640 pixels."""
LETTER = 9.5
"""Units of a letter at most: on a narrow window the text is larger in proportion."""
COLOURS = 10
"""The page defines --c0 to --c9."""


def colour(index: int) -> str:
    return f"var(--c{index % COLOURS})"


class Frame:
    """A picture with an x and a y axis in the units of the data.

    Args:
        x: Lowest and highest x.
        y: Lowest and highest y.
        log_x: Logarithmic x.
        left: Units left of the plot, for tick labels.
        bottom: Units below it.
    """

    def __init__(
        self,
        x: tuple[float, float],
        y: tuple[float, float],
        width: int = WIDTH,
        height: int = 280,
        left: int = 62,
        right: int = 14,
        bottom: int = 40,
        log_x: bool = False,
    ) -> None:
        self.width, self.height = width, height
        self.left, self.top, self.right, self.bottom = left, 10, width - right, height - bottom
        self._log = log_x
        self.x_range, self.y_range = _wide(x), _wide(y)
        self._parts: list[str] = []

    def x(self, value: float) -> float:
        low, high = self.x_range
        if self._log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.left + (value - low) / (high - low) * (self.right - self.left)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.bottom - (value - low) / (high - low) * (self.bottom - self.top)

    def add(self, tag: str, text: str = "", **attributes: object) -> None:
        """An element; `class_` is class, other underscores are hyphens."""
        names = {k.rstrip("_").replace("_", "-"): v for k, v in attributes.items() if v is not None}
        shown = "".join(f' {k}="{_number(v)}"' for k, v in names.items())
        self._parts.append(f"<{tag}{shown}>{text}</{tag}>" if text else f"<{tag}{shown}/>")

    def line(
        self, xs: Iterable[float], ys: Iterable[float], stroke: str, class_: str = "thin", title: str = ""
    ) -> None:
        """A line through the finite points; it is interrupted at the others."""
        path, pen = [], "M"
        for x, y in zip(xs, ys, strict=True):
            if not (math.isfinite(x) and math.isfinite(y)):
                pen = "M"
                continue
            path.append(f"{pen}{self.x(x):.1f} {self.y(y):.1f}")
            pen = "L"
        if path:
            self.add("path", hover(title), d="".join(path), class_=class_, style=f"stroke:{stroke}")

    def dot(self, x: float, y: float, fill: str, radius: float = 3, title: str = "", class_: str = "") -> None:
        self.add(
            "circle",
            hover(title),
            cx=self.x(x),
            cy=self.y(y),
            r=radius,
            style=f"fill:{fill}",
            class_=class_ or None,
        )

    def words(self, x: float, y: float, text: str, anchor: str = "start", class_: str = "") -> None:
        """Text at a pixel."""
        self.add("text", plain(text), x=x, y=y, text_anchor=anchor, class_=class_ or None)

    def axes(self, x_label: str, y_label: str = "", y_ticks: bool = True, x_ticks: bool = True) -> None:
        low, high = self.x_range
        room = 0.0
        for tick in (_log_ticks(low, high) if self._log else ticks(low, high, 5)) if x_ticks else ():
            at, text = self.x(tick), tick_text(tick, tick if self._log else high - low)
            self.add("line", x1=at, x2=at, y1=self.top, y2=self.bottom, class_="grid")
            half = LETTER * len(text) / 2
            if at - half >= room and at + half <= self.width:  # labels never touch
                self.words(at, self.bottom + 16, text, "middle")
                room = at + half + LETTER
        for tick in ticks(*self.y_range, 5) if y_ticks else []:
            at = self.y(tick)
            self.add("line", x1=self.left, x2=self.right, y1=at, y2=at, class_="grid")
            self.words(self.left - 6, at + 4, tick_text(tick, self.y_range[1] - self.y_range[0]), "end")
        letters = int(2 * min(self.right - (self.left + self.right) / 2, (self.left + self.right) / 2) / (0.9 * LETTER))
        self.words((self.left + self.right) / 2, self.height - 6, middle(x_label, letters), "middle", "label")
        if y_label:
            centre = (self.top + self.bottom) / 2
            self.add(
                "text",
                plain(y_label),
                x=13,
                y=centre,
                text_anchor="middle",
                class_="label upright",
                transform=f"rotate(-90 13 {centre:.0f})",
            )

    def svg(self, title: str) -> str:
        head = f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{plain(title)}">'
        return head + "".join(self._parts) + "</svg>"


def hover(title: str) -> str:
    """The text that is shown when the pointer rests on an element."""
    return f"<title>{plain(title)}</title>" if title else ""


def plain(text: str) -> str:
    """Text that a page shows as it is, in an element or an attribute."""
    return escape(printable(text, 2000))


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers between two ends."""
    raw = (high - low) / about
    size = 10 ** math.floor(math.log10(raw))
    step = next((m * size for m in (1, 2, 5) if m * size >= raw), 10 * size)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def tick_text(value: float, span: float) -> str:
    """The shortest text of a tick that the span allows: 0.005, 12, 3M."""
    for factor, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if span >= factor or abs(value) >= factor:
            unit = 1e3 if letter == "k" else factor
            return f"{value / unit:.4g}{letter}" if value else "0"
    digits = max(0, 1 - math.floor(math.log10(span))) if span else 2
    text = f"{value:.{min(digits, 6)}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) if abs(value) > 1e-12 else "0"


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    fine = [m * 10.0**p for p in powers for m in (1, 2, 5)]
    return [tick for tick in fine if low * 0.999 <= tick <= high * 1.001]


def _wide(ends: tuple[float, float]) -> tuple[float, float]:
    """A range that is not empty."""
    low, high = ends
    return (low, high) if high > low else (low - (abs(low) * 0.01 or 1), high + (abs(high) * 0.01 or 1))


def _number(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else escape(str(value))

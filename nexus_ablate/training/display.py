"""Terminal output of a run: a table before, a progress bar during, a table and the next command after it."""

from __future__ import annotations

import contextlib
import io
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from nexus_ablate.console import folded, open_console, sparkline
from nexus_ablate.errors import printable
from nexus_ablate.measure.regime import UNLEARNED, has_learned
from nexus_ablate.runs import read_rows
from nexus_ablate.runs.lookup import name_to_type

BAR_SECONDS = 0.2  # between drawings of the bar
LINE_SECONDS = 30.0  # between lines where there is no terminal
ASIDE = ("decay", "memory", "outliers", "attention", "weights")
"""Rows of the tables before and after a run that only -v shows."""
WIDE_BAR = 100
"""Columns of a terminal from which the progress bar has room for learning rate and gradient norm."""

RESULTS = {
    "val loss": "{val_loss:.4f} nats per token (best {best_val_loss:.4f})",
    "val bits/byte": "{val_bpb:.4f}, {share:.0%} {side} than a unigram model ({unigram_bpb:.3f})",
    "train loss": "{train_loss:.4f} over the last tenth, gap {generalization_gap:+.4f}{why}",
    "time": "{seconds:.0f} s of training at {tokens_per_second:,.0f} tokens/s, "
    "{seconds_aside:.0f} s of measuring and saving",
    "memory": "{mebibytes:,.0f} MiB at most",
    "outliers": "kurtosis {act/resid/kurtosis_token:.1f} (Gaussian 3), max/median {act/resid/max_over_median:.0f}, "
    "max {act/resid/max_abs:.1f}",
    "attention": "{attn/first_token_mass:.1%} to the first token, sink rate {attn/sink_rate:.1%}{onset}, "
    "entropy {attn/entropy:.2f} (uniform 1)",
    "weights": "RMS {weight_rms/global:.4f}; mean over RMS of the residual stream {act/resid/mean_over_rms:.2f}",
}
"""The table after the last step: rows with figures by their names in summary.json, or made from these."""

verbose = False
"""Whether a run prints every row of its tables; set by the command line."""


class _Nowhere(io.StringIO):
    """A stream that discards its output."""

    def write(self, text: str, /) -> int:
        return len(text)


class Display:
    """Writes to a stream: a progress bar on a terminal, otherwise one line every 30 seconds.

    Args:
        stream: Default: standard error.
        quiet: Print nothing.
        brief: Print messages alone, for a run among many: its launcher prints a line before and one after.
        warned: Takes each warning too, for a launcher that hears nothing else.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        quiet: bool = False,
        brief: bool = False,
        warned: Callable[[str], None] | None = None,
    ) -> None:
        self.stream: TextIO = _Nowhere() if quiet else stream or sys.stderr
        self.console = open_console(file=self.stream)
        self.brief = brief
        self._warned = warned
        self._bar: Any = None
        self._steps = 0
        self._drawn = 0.0

    def say(self, line: str) -> None:
        """Print one line, above the progress bar if there is one."""
        if self._bar is not None:
            self._bar.write(printable(line), file=self.stream)
            return
        try:
            print(printable(line), file=self.stream, flush=True)
        except BrokenPipeError:  # after `2>&1 | head` a run goes on without its display
            if self.stream is sys.stderr:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            self.stream = _Nowhere()

    def warn(self, line: str) -> None:
        """Print one line about something that did not happen as asked."""
        self.say(line)
        if self._warned is not None:
            self._warned(line)

    def before(self, facts: dict[str, str]) -> None:
        """Print the run's facts as a table; of a run among many nothing, because its launcher has named it."""
        if not self.brief:
            shown = [fact for fact in facts.items() if verbose or fact[0] not in ASIDE]
            self.console.print(folded(shown, names="dim"))

    def start(self, steps: int, done: int) -> None:
        self._steps, self._drawn = steps, time.monotonic()
        if self.stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=steps,
                initial=done,
                file=self.stream,
                dynamic_ncols=True,
                bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}  {remaining} left{postfix}",
                mininterval=0,
                leave=False,
            )

    def due(self, step: int) -> bool:
        """Whether `advance` would draw: at most five times per second, so drawing doesn't slow the steps."""
        if self._bar is not None:
            return time.monotonic() - self._drawn >= BAR_SECONDS or step == self._steps
        return time.monotonic() - self._drawn >= LINE_SECONDS

    def advance(self, step: int, loss: float, lr: float, norm: float, tokens_per_second: float) -> None:
        """Show the state after a step, if a redraw is due."""
        if not self.due(step):
            return
        self._drawn = time.monotonic()
        if self._bar is not None:
            shown = f"loss {loss:.3f}  {tokens_per_second / 1000:.1f}k tok/s"
            if shutil.get_terminal_size().columns >= WIDE_BAR:
                shown += f"  lr {lr:.1e}  grad {norm:.2f}"
            self._bar.set_postfix_str(shown, refresh=False)
            self._bar.update(step - self._bar.n)
        else:
            shown = f"loss {loss:.4f} lr {lr:.1e} grad {norm:.2f} {tokens_per_second:.0f} tok/s"
            self.say(f"step {step}/{self._steps} {shown}")

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def after(self, path: Path, summary: dict[str, Any], already_finished: bool = False) -> None:
        """Print the result, the folder it is saved to, and the next command."""
        from rich.markup import escape

        if self.brief:
            return
        facts = {"note": "already finished; showing the saved result"} if already_finished else {}
        for name, fact in result_facts(summary).items():
            if verbose or name not in ASIDE:
                facts[name] = fact
            if name == "val bits/byte" and (curve := loss_curve(path)):
                facts["curve"] = curve
        self.console.print(folded([*facts.items()], names="dim"))
        where = printable(str(path), 4096)
        self.console.print(f"[dim]saved to[/dim]   {escape(where)}", soft_wrap=True)
        run = escape(printable(name_to_type(path), 4096))
        self.console.print(f"[dim]next[/dim]       nexus-ablate show {run}", soft_wrap=True)


def loss_curve(path: Path) -> str:
    """A run's validation losses as a line of blocks with the first and the last; '' where there are fewer than two."""
    rows = read_rows(path / "metrics.jsonl")
    losses = [row["val/loss"] for row in rows if row.get("val/loss") is not None]
    curve = sparkline(losses)
    return curve and f"{losses[0]:.2f} {curve} {losses[-1]:.2f} validation loss by step"


def shown(value: float | None, form: str) -> str:
    """A formatted number; "not finite" for infinity, NaN and None, which is how summary.json stores them."""
    return format(value, form) if value is not None and math.isfinite(value) else "not finite"


class _Figure(float):
    """A number of a summary, formatted by `shown`."""

    def __format__(self, form: str) -> str:
        return shown(float(self), form)


def result_facts(summary: dict[str, Any]) -> dict[str, str]:
    """The table after the last step. Rows whose numbers a summary of another version lacks are left out."""
    numbers = {name: value for name, value in summary.items() if value is None or isinstance(value, int | float)}
    figures: dict[str, Any] = {name: _Figure(math.nan if v is None else v) for name, v in numbers.items()}
    gap, onset = figures.get("generalization_gap", 0.0), summary.get("onsets", {}).get("attn/sink_rate")
    figures["why"] = ": the validation text is easier, or measured later" if gap < 0 else ""
    figures["onset"] = f" (first seen at step {onset['step']:,})" if onset else ""
    with contextlib.suppress(KeyError):
        figures["seconds_aside"] = sum(figures[f"seconds_{activity}"] for activity in ("eval", "probe", "checkpoint"))
    with contextlib.suppress(KeyError):
        figures["mebibytes"] = figures["peak_memory_bytes"] / 2**20
    with contextlib.suppress(KeyError):
        below = 1 - figures["val_bpb"] / figures["unigram_bpb"]
        figures |= {"share": _Figure(abs(below)), "side": "higher" if below < 0 else "lower"}
    facts = {}
    for name, line in RESULTS.items():
        with contextlib.suppress(KeyError):
            facts[name] = line.format_map(figures)
    bpb, unigram = summary.get("val_bpb"), summary.get("unigram_bpb")
    if bpb is not None and unigram and not has_learned([bpb], unigram):
        facts["warning"] = f"the run {UNLEARNED}"
    return facts

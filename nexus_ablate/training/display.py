"""Terminal output of a run: a table before, a progress bar during, a table and the next command after it."""

from __future__ import annotations

import contextlib
import io
import math
import shutil
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.console import folded, open_console, sparkline
from nexus_ablate.errors import printable
from nexus_ablate.measure.regime import UNLEARNED, has_learned, regime_of
from nexus_ablate.runs import read_rows
from nexus_ablate.runs.lookup import name_to_type

BAR_SECONDS = 0.2  # between drawings of the bar
LINE_SECONDS = 30.0  # between lines where there is no terminal
ASIDE = ("decay", "memory", "outliers", "attention", "weights")
"""Rows of the tables before and after a run that only -v shows."""
WIDE_BAR = 100
"""Columns of a terminal from which the progress bar has room for learning rate and gradient norm."""

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
    """

    def __init__(self, stream: TextIO | None = None, quiet: bool = False, brief: bool = False) -> None:
        self.stream: TextIO = _Nowhere() if quiet else stream or sys.stderr
        self.console = open_console(file=self.stream)
        self.brief = brief
        self._bar: Any = None
        self._steps = 0
        self._drawn = 0.0

    def say(self, line: str) -> None:
        """Print one line, above the progress bar if there is one."""
        if self._bar is not None:
            self._bar.write(printable(line), file=self.stream)
        else:
            print(printable(line), file=self.stream, flush=True)

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


def run_facts(config: RunConfig, arm: str, facts: dict[str, Any]) -> dict[str, str]:
    """The table before the first step: arm, notes, model size, data, training budget, regime, device."""
    resolved = config.resolved
    initial = facts.get("initial")
    regime = regime_of(config, facts["params_non_embedding"], facts["steps"], facts["train_tokens"], initial)
    return {
        "arm": arm.replace(",", ", "),
        **({"note": "; ".join(resolved.notes)} if resolved.notes else {}),
        "model": f"{config.model.name}: {config.model.n_layers} layers, d_model {config.model.d_model}, "
        f"{config.model.n_heads} heads of {resolved.head_dim}, d_ff {resolved.d_ff} ({resolved.d_ff_ratio:.3g} d)",
        "parameters": f"{facts['params']:,} ({facts['params_non_embedding']:,} without embeddings)",
        "data": f"{facts['data']}: {facts['train_tokens']:,} tokens, vocabulary {facts['vocab_size']:,}",
        "training": f"{facts['steps']:,} steps x {resolved.tokens_per_step:,} tokens, seed {config.seed}",
        "decay": facts["decay"],
        "regime": str(regime),
        **({"warning": "\n".join(regime.warnings())} if regime.warnings() else {}),
        "device": facts["device"],
        "execution": facts["execution"],
    }


def loss_curve(path: Path) -> str:
    """A run's validation losses as a line of blocks with the first and the last; '' where there are fewer than two."""
    rows = read_rows(path / "metrics.jsonl")
    losses = [row["val/loss"] for row in rows if row.get("val/loss") is not None]
    curve = sparkline(losses)
    return curve and f"{losses[0]:.2f} {curve} {losses[-1]:.2f} validation loss by step"


def shown(value: float | None, form: str) -> str:
    """A formatted number; "not finite" for infinity, NaN and None, which is how summary.json stores them."""
    return format(value, form) if value is not None and math.isfinite(value) else "not finite"


def result_facts(summary: dict[str, Any]) -> dict[str, str]:
    """The table after the last step. Rows whose numbers a summary of another version lacks are left out."""

    def figure(name: str, form: str) -> str:
        return shown(summary[name], form)

    def bits() -> str:
        bpb, unigram = summary["val_bpb"], summary["unigram_bpb"]
        below = None if bpb is None else 1 - bpb / unigram
        side = "higher" if below is not None and below < 0 else "lower"
        share = shown(None if below is None else abs(below), ".0%")
        return f"{shown(bpb, '.4f')}, {share} {side} than a unigram model ({unigram:.3f})"

    def train_loss() -> str:
        gap = summary["generalization_gap"]
        text = f"{figure('train_loss', '.4f')} over the last tenth, gap {shown(gap, '+.4f')}"
        return f"{text}: the validation text is easier, or measured later" if gap is not None and gap < 0 else text

    def time_spent() -> str:
        aside = sum(summary[f"seconds_{activity}"] for activity in ("eval", "probe", "checkpoint"))
        speed = f"{summary['seconds']:.0f} s of training at {summary['tokens_per_second']:,.0f} tokens/s"
        return f"{speed}, {aside:.0f} s of measuring and saving"

    def attention() -> str:
        onset = summary.get("onsets", {}).get("attn/sink_rate")
        return (
            f"{figure('attn/first_token_mass', '.1%')} to the first token, sink rate {figure('attn/sink_rate', '.1%')}"
            + (f" (first seen at step {onset['step']:,})" if onset else "")
            + f", entropy {figure('attn/entropy', '.2f')} (uniform 1)"
        )

    lines = {
        "val loss": lambda: f"{figure('val_loss', '.4f')} nats per token (best {figure('best_val_loss', '.4f')})",
        "val bits/byte": bits,
        "train loss": train_loss,
        "time": time_spent,
        "memory": lambda: f"{summary['peak_memory_bytes'] / 2**20:,.0f} MiB at most",
        "outliers": lambda: (
            f"kurtosis {figure('act/resid/kurtosis_token', '.1f')} (Gaussian 3), "
            f"max/median {figure('act/resid/max_over_median', '.0f')}, max {figure('act/resid/max_abs', '.1f')}"
        ),
        "attention": attention,
        "weights": lambda: (
            f"RMS {figure('weight_rms/global', '.4f')}; mean over RMS of the residual stream "
            f"{figure('act/resid/mean_over_rms', '.2f')}"
        ),
    }
    facts = {}
    for name, line in lines.items():
        with contextlib.suppress(KeyError):
            facts[name] = line()
    bpb, unigram = summary.get("val_bpb"), summary.get("unigram_bpb")
    if bpb is not None and unigram and not has_learned([bpb], unigram):
        facts["warning"] = f"the run {UNLEARNED}"
    return facts

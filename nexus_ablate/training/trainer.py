"""The training loop. It gets a model, data, a run directory and a display, and doesn't depend on any axis or option.

Runs are repeatable because batches and dropout are pure functions of (seed, step), initial values of (seed, name,
shape), and a checkpoint holds everything else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.data import Batches, TokenizedData, chain, eval_places, eval_windows, hash_tokens, token_kinds
from nexus_ablate.errors import AGAIN, CheckpointError, Preempted
from nexus_ablate.measure.counts import flops_per_token, parameters, peak_flops
from nexus_ablate.measure.history import KEPT, final_means, onsets, spike_scores
from nexus_ablate.measure.probe import evaluation_mode, matrix_probe, model_figures, probe
from nexus_ablate.measure.repeats import repeat_figures, repeated_segments
from nexus_ablate.measure.weight_statistics import weight_rms
from nexus_ablate.model import GPT
from nexus_ablate.runs import Run, read_rows
from nexus_ablate.track import Tracker
from nexus_ablate.training import checkpoint
from nexus_ablate.training.display import Display
from nexus_ablate.training.distributed import Place, World
from nexus_ablate.training.gradients import first_over_last
from nexus_ablate.training.memory import TrainingPeak
from nexus_ablate.training.progress import Progress
from nexus_ablate.training.signals import StopRequest
from nexus_ablate.training.step import Seen, Step, compiled_programs, steps_of

EVAL_TOKENS = 8192
"""Tokens per forward pass of the evaluation, unless one window is longer."""
MOST_UNREAD = 1000
"""Steps after which losses are read even if nothing needs to be logged."""


class Trainer:
    """Trains one run from its first step, or from its newest checkpoint, to its summary.

    Args:
        config: The run.
        model: With its initial values, on the device.
        data: Tokens to train and validate on.
        run: The open run directory.
        tracker: Mirrors the run's rows, for example to W&B.
        display: Terminal output.
        stop: Set by a signal; checked after each step.
        world: The processes of the run, of which this is the first. Default: this process alone.
    """

    def __init__(
        self,
        config: RunConfig,
        model: GPT,
        data: TokenizedData,
        run: Run,
        tracker: Tracker,
        display: Display,
        stop: StopRequest,
        world: World | None = None,
    ) -> None:
        self.config, self.model, self.data, self.run = config, model, data, run
        self.tracker, self.display, self.stop = tracker, display, stop
        self.device = next(model.parameters()).device
        self.world = world or World(Place(), self.device)
        self.world.stop = stop
        train, context = config.train, config.model.context
        self.flops_per_token = flops_per_token(config, data.vocab_size)
        self.tokens_per_step = config.resolved.tokens_per_step
        self.steps = steps_of(config, data.vocab_size)
        self._before_last_tenth = 9 * self.steps // 10
        self.batches = Batches(data.train, config.seed, train.batch_size * train.grad_accum, context, data.period)
        shares = {name: train.eval_tokens if name == "val" else -(-train.eval_tokens // 4) for name in data.val}
        self.windows = {name: eval_windows(data.val[name], context, shares[name], data.period) for name in data.val}
        count = len(self.windows["val"])  # split into as few batches of equal size as possible
        self.eval_rows = -(-count // -(-count // max(1, EVAL_TOKENS // context)))
        probe_tokens = np.ascontiguousarray(self.windows["val"][: config.probe.sequences, :-1])
        self.probe_hash = hash_tokens(probe_tokens)  # equal hashes: probed on the same tokens
        self.probe_tokens = torch.from_numpy(probe_tokens).to(self.device)
        segments = None if config.probe.name == "off" else repeated_segments(data.train, context, data.corpus)
        self.segments = None if segments is None else torch.from_numpy(segments).to(self.device)
        self.full_probe = config.probe.name == "full"
        self.token_kinds = token_kinds(data.tokenizer) if self.full_probe else {}
        self.step = Step(config, model, self.steps, self.batches.batch, self.world, data.answers)
        self.progress = Progress()
        self.seen: Seen
        self._peak = TrainingPeak(self.device)
        self._mark = time.monotonic()

    def fit(self) -> dict[str, Any]:
        """Train to the end of the budget.

        Returns:
            The summary.

        Raises:
            Diverged: A loss or a gradient was not finite. The optimizer has taken neither that step nor a later one.
            Preempted: A signal requested a stop; everything is saved.
        """
        self._restore()
        self.step.distribute(self.progress.step)
        checkpoint.require_space(self.run.checkpoints, 3 * sum(p.nbytes for p in self.model.parameters()))
        self._mark = time.monotonic()
        self.model.train()
        if self.step.compiled:
            self.display.say("compiling the training step; train.compile=off skips this")
            with self._aside("compile"):
                uncompiled = self.step.compile(self.batches.batch(self.progress.step))
            if uncompiled:
                self.display.warn(f"training without torch.compile, which failed: {uncompiled}")
                self.run.log(f"torch.compile failed: {uncompiled}")
        if self.progress.step == 0:
            self._record()
        self.display.start(self.steps, self.progress.step)
        while self.progress.step < self.steps:
            self.step_and_record()
            step = self.progress.step
            if step == self.steps:
                break
            if self.world.stopping(step):
                self._save()
                requested = self.stop.signal_name or "a signal to another process"
                raise Preempted(f"stopped by {requested}; saved at step {step} of {self.steps}", requested, AGAIN)
            if step % self.config.train.saves_every(self.steps) == 0:
                self._save()
        self.display.stop()
        self._save()
        return self._summary()

    # -------------------------------------------------------------------------------------------------- one step

    def step_and_record(self) -> None:
        """Take one optimizer step, and record the measurements that are due after it."""
        self.advance()
        step = self.progress.step
        if step % self.config.train.log_every == 0 or self._validates_at(step) or self._probes_at(step):
            self._record()

    def advance(self) -> None:
        progress = self.progress
        batch = self.batches.batch(progress.step)
        self.step.take(progress.step, batch, watched=self.full_probe and self._probes_at(progress.step + 1))
        progress.step += 1
        progress.batch_hash = chain(progress.batch_hash, batch)
        progress.interval_bytes += self._bytes_per_target(batch)
        if self.display.due(progress.step) or progress.step % MOST_UNREAD == 0:
            self._read()
            loss = progress.interval_loss / progress.interval_steps
            self.display.advance(progress.step, loss, self.step.lr, self.seen.norm, self._speed())

    def _read(self) -> None:
        """Add the losses of the steps since the last call to the interval."""
        progress, read = self.progress, self.step.read()
        for step, seen in enumerate(read, progress.step - len(read) + 1):
            self.seen = seen
            progress.interval_loss += seen.loss
            for name, figure in seen.figures.items():
                progress.interval_figures[name] = progress.interval_figures.get(name, 0.0) + figure
            progress.interval_steps += 1
            if step > self._before_last_tenth:
                progress.final_loss += seen.loss

    # ---------------------------------------------------------------------------------------------- measurements

    def _record(self) -> None:
        """Write one row of metrics.jsonl with everything that is due at this step."""
        self._read()
        progress, train = self.progress, self.config.train
        position = self._position()
        row = dict(position)
        last = progress.step == self.steps
        if progress.step and (progress.step % train.log_every == 0 or last):
            row |= self._training_figures()
        if self._probes_at(progress.step):
            with self._aside("probe"):
                tokens, kinds = self.probe_tokens, self.token_kinds
                probed = probe(self.model, tokens, self.full_probe, kinds, self.step.precision_context)
                if self.full_probe:
                    probed |= matrix_probe(self.model, self.step.update_ratios())
                weights = weight_rms(self.model)
                progress.probed = model_figures(probed | weights)
                if self.segments is not None:
                    progress.probed |= repeat_figures(self.model, self.segments, self.step.precision_context)
                self.run.log_probes(position | probed)
                row |= progress.probed | weights
        if self._validates_at(progress.step):
            with self._aside("eval"):
                row |= self._validate(self.windows if last else dict(list(self.windows.items())[:1]))
        self.run.log_metrics(row)
        self.tracker.row_written()

    def _validates_at(self, step: int) -> bool:
        every = self.config.validates_every(self.steps)
        return step == self.steps or step % every == 0

    def _probes_at(self, step: int) -> bool:
        return self.config.probe.due(step, self.steps)

    def _position(self) -> dict[str, Any]:
        tokens = self.progress.step * self.tokens_per_step
        return {
            "step": self.progress.step,
            "tokens": tokens,
            "flops": tokens * self.flops_per_token,
            "seconds": round(self._seconds(), 4),
        }

    def _training_figures(self) -> dict[str, Any]:
        progress = self.progress
        loss = progress.interval_loss / progress.interval_steps
        bytes_per_target = progress.interval_bytes / progress.interval_steps
        more = {name: total / progress.interval_steps for name, total in progress.interval_figures.items()}
        progress.interval_loss, progress.interval_figures, progress.interval_steps = 0.0, {}, 0
        progress.interval_bytes = 0.0
        speed = self._speed()
        figures = {
            "train/loss": loss,
            "train/bpb": loss / math.log(2) / bytes_per_target,
            "lr": self.step.lr,
            "grad_norm/global": self.seen.norm,
            "tokens_per_second": round(speed, 1),
            "peak_memory_bytes": self.peak_memory(),
            "batch_hash": progress.batch_hash,
        }
        norms = dict(zip(self.step.parts, self.seen.norms, strict=True))
        figures |= {f"grad_norm/{part}": norm for part, norm in norms.items()}
        figures["grad_norm/first_over_last"] = first_over_last(norms, self.config.model.n_layers)
        figures |= more
        if self.step.scaler.is_enabled():
            figures["loss_scale"] = self.step.scaler.get_scale()
        if self.device.type == "cuda":
            peak = peak_flops(torch.cuda.get_device_name(self.device), self.config.train.precision)
            figures |= {} if peak is None else {"mfu": speed * self.flops_per_token / (peak * self.world.size)}
        return figures

    def _validate(self, windows: dict[str, np.ndarray]) -> dict[str, float]:
        """Loss in nats per token and bits per byte on the fixed tokens of each validation set."""
        figures = {}
        for name, tokens in windows.items():
            losses_N, targets_N = self._window_losses(tokens), np.full(len(tokens), tokens.shape[1] - 1)
            nats = float(losses_N.mean())
            if self.data.answers is not None:
                targets_N = self.data.answers(tokens).sum(1)
                nats = float(np.average(losses_N, weights=targets_N))
            figures[f"{name}/loss"] = nats
            figures[f"{name}/bpb"] = nats / math.log(2) / self._bytes_per_target(tokens)
            if name == "val" and self.progress.step == self.steps:
                self._write_evaluation(losses_N, targets_N)
        progress = self.progress
        progress.last_val = figures
        best, loss = progress.best_val_loss, figures["val/loss"]
        if math.isfinite(loss) and (best is None or loss < best):
            progress.best_val_loss = loss
        return figures

    def _window_losses(self, tokens: np.ndarray) -> np.ndarray:
        """Mean cross-entropy in nats per token of each of (N, T + 1) windows: (N,) float64.

        All batches have the same shape in every validation set, so that a compiled model is compiled for it only once;
        the last window is repeated to fill the last batch.
        """
        rows = np.arange(self.eval_rows)
        starts = range(0, len(tokens), self.eval_rows)
        with evaluation_mode(self.model):
            losses = [self.step.window_losses(tokens[np.minimum(start + rows, len(tokens) - 1)]) for start in starts]
        return torch.cat(losses)[: len(tokens)].double().cpu().numpy()

    def _bytes_per_target(self, windows: np.ndarray) -> float:
        """The mean number of bytes of the targets of (N, T + 1) windows that the loss counts."""
        targets = windows[:, 1:] if self.data.answers is None else windows[:, 1:][self.data.answers(windows)]
        return float(self.data.token_bytes[targets].mean())

    def _write_evaluation(self, losses_N: np.ndarray, targets_N: np.ndarray) -> None:
        """Save the final losses on `val` by window, in nats per token, with the number of targets that they count."""
        context = self.config.model.context
        places = eval_places(len(self.data.val["val"]), context, self.config.train.eval_tokens, self.data.period)
        self.run.write_evaluation(
            {"block": int(block), "offset": int(start), "tokens": int(targets), "loss": float(loss)}
            for start, block, targets, loss in zip(*places, targets_N, losses_N, strict=True)
        )

    # ----------------------------------------------------------------------------------------------- saved state

    def _save(self) -> None:
        """Save a checkpoint; after the last step with the weights only."""
        self._read()
        last = self.progress.step == self.steps
        with self._aside("checkpoint"):
            self.progress.loss_scale, self.progress.loss_scale_steps = self.step.loss_scale
            tensors = {"model": dict(self.model.state_dict())} | (
                {} if last else {"optimizer": self.step.optimizer.tensors()}
            )
            state = {"progress": self.progress.saved(), "logs": self.run.offsets()}
            keep = 1 if last else self.config.train.keep
            owned = self.run.require_owner
            checkpoint.save(self.run.checkpoints, self.progress.step, tensors, state, keep, owned)

    def _restore(self) -> None:
        """Resume from the newest valid checkpoint, or start from step 0 if there is none."""
        loaded = None
        if self.run.resuming:
            loaded = checkpoint.load_newest(self.run.checkpoints, self._accept)
        if loaded is None:
            self.run.restore({})
            return
        for line in loaded.skipped:
            self.display.warn(f"skipped a damaged checkpoint: {line}")
        checkpoint.discard_newer(self.run.checkpoints, loaded.step)
        self.model.load_state_dict(loaded.tensors["model"])
        self.step.optimizer.load(loaded.tensors.get("optimizer", {}))  # after the last step there is none
        self.progress = Progress.restored(loaded.state["progress"])
        self.step.set_loss_scale(self.progress.loss_scale, self.progress.loss_scale_steps)
        self.run.restore(loaded.state["logs"])
        self.display.say(f"resuming from step {self.progress.step}")

    def _accept(self, state: dict[str, Any]) -> None:
        """Check that the run can resume from a checkpoint's state."""
        if state["progress"].keys() != vars(Progress()).keys():
            raise CheckpointError("it is from another version of this program", "other progress counters", "rerun=on")
        self.run.check(state["logs"])

    def _summary(self) -> dict[str, Any]:
        """The summary."""
        progress = self.progress
        everything, without_tables = parameters(self.model)
        rows = [{k: row[k] for k in KEPT if k in row} for row in read_rows(self.run.path / "metrics.jsonl")]
        probed = {"probe_hash": self.probe_hash, "onsets": onsets(rows)} if progress.probed else {}
        val_loss, train_loss = progress.last_val["val/loss"], {}
        if self.steps:
            mean = progress.final_loss / (self.steps - self._before_last_tenth)
            train_loss = {"train_loss": mean, "generalization_gap": val_loss - mean}
        return {
            "val_loss": val_loss,
            "val_bpb": self.progress.last_val["val/bpb"],
            "best_val_loss": progress.best_val_loss,
            **train_loss,
            **final_means(rows, self.steps),
            **{k: v for k, v in self.progress.last_val.items() if not k.startswith("val/")},
            "unigram_bpb": self.data.unigram_bpb,
            "params": everything,
            "params_non_embedding": without_tables,
            "flops_per_token": self.flops_per_token,
            "steps": progress.step,
            "tokens": progress.step * self.tokens_per_step,
            "flops": progress.step * self.tokens_per_step * self.flops_per_token,
            "seconds": progress.seconds,
            **{f"seconds_{activity}": seconds for activity, seconds in progress.aside.items()},
            "tokens_per_second": progress.step * self.tokens_per_step / progress.seconds,
            "peak_memory_bytes": self.peak_memory(),
            "compiled": self.step.compiled,
            **(compiled_programs() if self.step.compiled else {"programs": 0, "graph_breaks": 0}),
            "batch_hash": progress.batch_hash,
            "eval_hash": hash_tokens(self.windows["val"]),
            **spike_scores(rows, self.config.schedule.warmup_steps(self.steps)),
            **self.progress.probed,
            **probed,
        }

    # ------------------------------------------------------------------------------------------------------ time

    @contextmanager
    def _aside(self, activity: str) -> Iterator[None]:
        """Count the time and the GPU memory of an activity (evaluation, probe, ...) separately from training."""
        self.progress.seconds = self._seconds(wait=True)
        self._peak.pause()
        self._mark = time.monotonic()
        try:
            yield
        finally:
            self._peak.resume()
            now = time.monotonic()
            self.progress.aside[activity] += now - self._mark
            self._mark = now

    def _seconds(self, wait: bool = False) -> float:
        """Training seconds so far, including those before a resume."""
        if wait and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.progress.seconds + time.monotonic() - self._mark

    def _speed(self) -> float:
        """Tokens per second over the whole run so far."""
        return self.progress.step * self.tokens_per_step / max(self._seconds(), 1e-9)

    def peak_memory(self) -> int:
        """Peak memory so far in bytes: allocated by training on the GPU, or resident on the CPU."""
        return self._peak.bytes()

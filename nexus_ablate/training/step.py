"""One step: rows to the device, forward, loss, backward, gradient norms, finite check, clipping, optimizer.

Nothing here waits for a GPU: losses and norms stay on the device until `read`. A step with a non-finite loss or
gradient changes no weight, and neither does any step after it; `read` reports which one it was.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from nexus_ablate.axes.init import stream
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.errors import ConfigError, Diverged
from nexus_ablate.kernels.loss import (
    GPU_LOGIT_BYTES,
    LOGIT_BYTES,
    attach_gradients,
    chunked_losses,
    chunked_nats,
    losses,
)
from nexus_ablate.measure.counts import flops_per_token
from nexus_ablate.measure.weight_statistics import block_matrices
from nexus_ablate.model import GPT
from nexus_ablate.optimizers import build_optimizer
from nexus_ablate.training.choices import choices
from nexus_ablate.training.device import hardware_of, precision_context
from nexus_ablate.training.distributed import Place, World
from nexus_ablate.training.gradients import ROLE, GradientNorms
from nexus_ablate.training.memory import out_of_memory
from nexus_ablate.training.nonfinite import first_nonfinite

IGNORED = -100
"""A target that PyTorch's cross-entropy doesn't count."""
SMALLEST_LOSS_SCALE = 1.0
"""float16: gradients that are non-finite even at this loss scale come from the model, not from the precision."""


@dataclass(frozen=True)
class Seen:
    """The numbers of one step: the loss in nats per token, gradient norms before clipping, and further figures.

    `figures` has the z-loss, if there is one, and what options contribute (`option/...`), by the names they are logged
    under.
    """

    loss: float
    norm: float
    norms: list[float]
    figures: dict[str, float]


class Step:
    """Takes optimizer steps.

    Args:
        config: The run.
        model: On the device.
        steps: Length of the run, for the learning rate.
        batch_of: Returns the (B, T + 1) tokens of a step.
        world: The processes that share the step. Default: this one alone.
        answers: Which targets of windows the loss counts. Default: all of them.
    """

    def __init__(
        self,
        config: RunConfig,
        model: GPT,
        steps: int,
        batch_of: Callable[[int], np.ndarray],
        world: World | None = None,
        answers: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> None:
        self.config, self.model, self.steps, self.batch_of = config, model, steps, batch_of
        self.answers = answers
        self.device = next(model.parameters()).device
        self.world = world or World(Place(), self.device)
        torch.set_float32_matmul_precision("highest")  # float32 is float32: no TF32, whatever the environment says
        fused = config.train.optimizer == "fused"
        self.optimizer = build_optimizer(model, config.optim, config.weight_decay, fused)
        self.gradients = GradientNorms(model)
        self.parallel: DistributedDataParallel | None = None  # of several processes, see `distribute`
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.train.precision == "fp16")
        size = sum(p.numel() for p in model.parameters()), model.geometry.vocab_size
        self.choices = choices(config, *size, steps, hardware_of(self.device), self.world.size)
        self.compiled, self.chunked = self.choices.compiled, self.choices.chunked
        most_bytes = GPU_LOGIT_BYTES if self.device.type == "cuda" else LOGIT_BYTES
        self.chunk(most_bytes if self.chunked else 0)
        self.lr = 0.0  # of the last step
        self._before: list[Tensor] = []
        # A CPU never has to be waited for, and whether float16 overflowed depends on the loss scale at that step.
        waits = self.device.type == "cpu" or self.scaler.is_enabled()
        self.checks_at_once = waits or not self.optimizer.skips_nonfinite
        self._unread: list[tuple[int, Tensor]] = []
        self.figures: list[str] = []  # the names of what a row has after the gradient norms
        self._zero = torch.zeros((), device=self.device)
        self._spoilt = torch.zeros((), device=self.device)  # 1 from the first non-finite step on

    def take(self, number: int, batch: np.ndarray, watched: bool = False) -> None:
        """Take optimizer step `number` (from 0) on (B, T + 1) tokens, in `grad_accum` parts.

        Args:
            watched: Keep a copy of the blocks' matrices for `update_ratios`.

        Raises:
            Diverged: As in `read`. On a GPU only `read` raises it.
        """
        train, schedule = self.config.train, self.config.schedule
        self.lr = schedule.rate(number, self.steps)
        self.optimizer.set_learning_rate(self.lr)
        self._before = [p.detach().clone() for _, p in block_matrices(self.model)] if watched else []
        self._seed_dropout(number)
        loss, figures, sums = self._zero, dict[str, Tensor](), dict[str, Tensor]()
        for number_of_part, rows in enumerate(np.split(batch, train.grad_accum), 1):
            mine = self.world.rows(rows)
            with self._exchange(number_of_part == train.grad_accum):
                part, more, figures_of_part, sums_of_part = self.loss(mine, self._weight(mine, batch))
                if train.grad_accum > 1:
                    part, more = part / train.grad_accum, None if more is None else more / train.grad_accum
                self.scaler.scale(part if more is None else part + more).backward()
            loss = loss + part.detach()
            for name, figure in figures_of_part.items():
                figures[name] = figures.get(name, self._zero) + figure / train.grad_accum
            for name, tensor in sums_of_part.items():
                sums[name] = sums.get(name, self._zero) + tensor
        self.figures, numbers = list(figures), torch.stack((loss, *figures.values()))
        if self.world.size > 1:
            numbers = self.world.average(numbers)
        loss = numbers[0]
        self.scaler.unscale_(self.optimizer)  # type: ignore[reportArgumentType]
        norm, norms = self.gradients.measure()
        seen = torch.cat((torch.stack((loss, norm)), norms, numbers[1:]))
        self._unread.append((number + 1, seen))
        is_taken = True
        if self.checks_at_once:
            is_taken = self._check(number + 1, seen.tolist())
        else:  # a step that is not taken ends the run at the next `read`
            finite = torch.isfinite(loss) & torch.isfinite(norm)
            self._spoilt = torch.maximum(self._spoilt, 1 - finite.float())
            self.optimizer.skip_where(self._spoilt)
        if schedule.clip != "off":
            self.gradients.clip(norm, float(schedule.clip))
        self.scaler.step(self.optimizer)  # type: ignore[reportArgumentType]
        self.scaler.update()
        self.model.constrain()
        if is_taken:
            self.model.update_state({name: self.world.sum(tensor) for name, tensor in sums.items()})
        self.optimizer.zero_grad()

    def _weight(self, rows: np.ndarray, batch: np.ndarray) -> float:
        """What the mean over the targets of some rows counts for in that of the batch, where they average equally."""
        if self.answers is None or len(rows) == len(batch):
            return 1.0
        return self.answers(rows).mean() / self.answers(batch).mean()

    @torch.no_grad()
    def update_ratios(self) -> dict[str, Tensor]:
        """|change| / |weight before| of each matrix of the blocks in the last step (no unit); empty if not watched.

        The change includes weight decay. Keys look like `update_ratio/block_000/query`.
        """
        if not self._before:
            return {}
        pairs = zip(block_matrices(self.model), self._before, strict=True)
        return {f"update_ratio/{name}": (w - old).norm() / old.norm() for (name, w), old in pairs}

    def read(self) -> list[Seen]:
        """The numbers of the steps since the last call, in order. Waits for a GPU.

        Raises:
            Diverged: A loss or a gradient was not finite. The optimizer has taken neither that step nor a later one.
        """
        if not self._unread:
            return []
        numbers = [number for number, _ in self._unread]
        rows = torch.stack([seen for _, seen in self._unread]).tolist()
        self._unread = []
        if not self.checks_at_once:
            for number, row in zip(numbers, rows, strict=True):
                self._check(number, row)
        end = 2 + len(self.parts)
        return [Seen(row[0], row[1], row[2:end], dict(zip(self.figures, row[end:], strict=True))) for row in rows]

    def _check(self, step: int, row: list[float]) -> bool:
        """Whether the optimizer takes a step, which it does unless float16 overflowed.

        Raises:
            Diverged: As in `read`.
        """
        loss, norm, *norms = row[: 2 + len(self.parts)]
        if math.isfinite(loss) and math.isfinite(norm):
            return True
        overflowed = self.scaler.is_enabled() and self.scaler.get_scale() > SMALLEST_LOSS_SCALE
        if math.isfinite(loss) and overflowed:  # float16: the scaler skips this step and lowers the scale
            return False
        bad = [
            part for part, n in zip(self.parts, norms, strict=True) if not (math.isfinite(n) or part.startswith(ROLE))
        ]
        problem = f"the gradient of {', '.join(bad)} is not finite" if math.isfinite(loss) else f"the loss is {loss}"
        where = first_nonfinite(self.model, lambda: self._forward_again(step - 1))
        problem = f"{problem} at step {step}" + (f", first {where}" if where else "")
        raise Diverged(problem, f"loss {loss}, gradient norm {norm}", "a lower optim.lr, or a longer optim.warmup")

    def _forward_again(self, number: int) -> None:
        """Repeat the forward passes of a step on the uncompiled model."""
        self._seed_dropout(number)
        for rows in np.split(self.batch_of(number), self.config.train.grad_accum):
            with self.precision_context():
                self.model(torch.from_numpy(self.world.rows(rows)[:, :-1]).to(self.device))

    def _seed_dropout(self, number: int) -> None:
        if self.config.model.dropout:
            mine = (self.world.place.rank,) if self.world.place.rank else ()
            torch.manual_seed(stream(self.config.seed, "dropout", number, *mine))

    def loss(
        self, rows: np.ndarray, weight: float = 1.0
    ) -> tuple[Tensor, Tensor | None, dict[str, Tensor], dict[str, Tensor]]:
        """Mean cross-entropy of (B, T + 1) tokens in nats per token, and what is trained on besides it, if anything.

        That is the z-loss, `z_loss` times the mean square of log sum exp(logits) (Chowdhery et al. 2022,
        arXiv:2204.02311, section 5), and the losses of options. The third value has all of these and the options'
        figures, by the names they are logged under, the fourth the options' sums.

        Args:
            weight: On cross-entropy and z-loss.
        """
        with self._forward_context():
            objective = self.parallel or self.compute
            loss, z_loss, option_losses, figures, sums, *known = objective(*self._inputs_and_targets(rows))
        if known:
            x_ND, *gradients = known
            loss = attach_gradients(loss, x_ND, self.model.head_weight, *gradients)
        if weight != 1:
            loss, z_loss = loss * weight, z_loss * weight
        more = [z_loss] if self.config.z_loss else []
        figures = {"train/z_loss": z_loss.detach()} | figures if more else figures
        more += option_losses
        return loss, torch.stack(more).sum() if len(more) > 1 else next(iter(more), None), figures, sums

    @torch.no_grad()
    def window_losses(self, rows: np.ndarray) -> Tensor:
        """Mean cross-entropy in nats of the targets of each of (B, T + 1) windows: (B,) float32 on the device.

        Only of the targets that count, and 0 for a window without one.
        """
        with self._forward_context():
            inputs, targets = self._inputs_and_targets(rows)
            nats_BT = self.compute_nats(inputs, targets).view(len(rows), -1)
        if self.answers is None:
            return nats_BT.mean(1)
        return nats_BT.sum(1) / (targets.view(len(rows), -1) != IGNORED).sum(1).clamp(min=1)

    def chunk(self, most_bytes: int) -> None:
        """Compute the logits in chunks of at most `most_bytes` in float32; 0: all at once.

        Sets the two functions that get compiled. `compute` maps inputs and targets to the cross-entropy, the z-loss,
        and the losses, figures and sums of options; with chunked logits, also to the head's input and the gradients of
        the first two losses with respect to that input and the head's weight. `compute_nats` maps them to the
        cross-entropy of each target.
        """
        model, factor = self.model, self.config.z_loss

        def whole(inputs: Tensor, targets: Tensor) -> tuple[Any, ...]:
            context = model.context(inputs)
            logits_BTV = model.logits(model.hidden(inputs, context), model.head_weight)
            loss, z_loss = losses(logits_BTV.flatten(0, 1), targets, factor)
            return loss, z_loss, [*context.losses.values()], context.contributed(), context.sums

        def whole_nats(inputs: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(model(inputs).flatten(0, 1).float(), targets, reduction="none")

        def chunked(inputs: Tensor, targets: Tensor) -> tuple[Any, ...]:
            context = model.context(inputs)
            x_ND = model.hidden(inputs, context).flatten(0, 1)
            head = x_ND.detach(), model.head_weight.detach()
            loss, z_loss, *gradients = chunked_losses(*head, targets, factor, model.product, model.softcap, most_bytes)
            return loss, z_loss, [*context.losses.values()], context.contributed(), context.sums, x_ND, *gradients

        def chunked_nats_(inputs: Tensor, targets: Tensor) -> Tensor:
            x_ND = model.hidden(inputs).flatten(0, 1)
            return chunked_nats(x_ND, model.head_weight, targets, model.product, model.softcap, most_bytes)

        self.compute, self.compute_nats = (chunked, chunked_nats_) if most_bytes else (whole, whole_nats)

    @property
    def loss_scale(self) -> tuple[float, int]:
        """The loss scale of float16, and the steps since its last change: after 2000 without an overflow it doubles."""
        return self.scaler.get_scale(), self.scaler.state_dict().get("_growth_tracker", 0)

    def set_loss_scale(self, scale: float, steps: float) -> None:
        """Continue with the `loss_scale` of another step."""
        if self.scaler.is_enabled():
            state = self.scaler.state_dict() | {"scale": scale, "_growth_tracker": int(steps)}
            self.scaler.load_state_dict(state)

    def distribute(self, number: int) -> int:
        """Give every process the first one's weights, buffers and optimizer state; from now on average the gradients.

        Args:
            number: Steps taken; only the first process's value counts.

        Returns:
            The steps taken.
        """
        if self.world.size == 1:
            return number
        numbers = torch.tensor([number, *self.loss_scale], dtype=torch.float64)
        parameters = dict(self.model.named_parameters())
        buffers = {name: tensor for name, tensor in self.model.state_dict().items() if name not in parameters}
        shared = self.world.share(save({"numbers": numbers} | buffers | self.optimizer.tensors()))
        state = load(shared)
        number, *loss_scale = state.pop("numbers").tolist()
        self.set_loss_scale(*loss_scale)
        self.model.load_state_dict({name: state.pop(name) for name in buffers}, strict=False)
        if not self.world.leads:
            self.optimizer.load(state)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`broadcast_buffers`")  # its successor is missing in older versions
            self.parallel = DistributedDataParallel(Objective(self), broadcast_buffers=False)  # broadcasts the weights
        return int(number)

    def _exchange(self, last: bool) -> AbstractContextManager:
        """The context of a backward pass: only the last one of a step averages the gradients over the processes."""
        return nullcontext() if last or self.parallel is None else self.parallel.no_sync()

    def precision_context(self) -> AbstractContextManager:
        """The context manager for forward passes."""
        return precision_context(self.config.train.precision, self.device.type)

    @contextmanager
    def _forward_context(self) -> Iterator[None]:
        if self.config.train.compile == "graphs":
            torch.compiler.cudagraph_mark_step_begin()  # the last replay's outputs are no longer needed
        with self.precision_context():
            yield

    def _inputs_and_targets(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """(B, T) and (B * T,) on the device; targets that the loss doesn't count are IGNORED."""
        tokens = self._on_device(rows)
        if self.answers is None:
            return tokens[:, :-1], tokens[:, 1:].flatten()
        targets = np.where(self.answers(rows), rows[:, 1:], IGNORED)
        return tokens[:, :-1], self._on_device(targets).flatten()

    def _on_device(self, rows: np.ndarray) -> Tensor:
        """Tokens on the device; a GPU copies them from pinned memory while the CPU continues."""
        tokens = torch.from_numpy(rows)
        if self.device.type == "cuda":
            tokens = tokens.pin_memory()
        return tokens.to(self.device, non_blocking=True)

    @property
    def parts(self) -> list[str]:
        """The parts and roles of `Seen.norms`, in the same order."""
        return self.gradients.parts

    def compile(self, batch: np.ndarray) -> str:
        """Compile forward and backward on a batch, then restore the running statistics that this changed.

        What this process compiled before is forgotten, see `forget_programs`.
        On a GPU evaluation is compiled too, by its first call. On a CPU it isn't: a second program takes half as long
        again, and evaluation is at most 3% of a run's time.

        Returns:
            Under `train.compile=auto`, the reason why the step stays uncompiled; '' if it compiled.

        Raises:
            ConfigError: Compiling was requested, and torch.compile does not work here.
        """
        buffers = {name: b.clone() for name, b in self.model.named_buffers()}
        plain, reason = (self.compute, self.compute_nats), ""
        mode = "reduce-overhead" if self.config.train.compile == "graphs" else None
        # Static shapes: for a second number of rows Dynamo would compile a symbolic, slower program.
        compiled = partial(torch.compile, mode=mode, dynamic=False)
        try:  # even the compiler's import fails where its cache folder can't be made
            forget_programs()
            trust_instruction_sets()
            self.compute = compiled(self.compute)
            if self.device.type != "cpu":
                self.compute_nats = compiled(self.compute_nats)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # the compiler recommends TF32
                loss, more, *_ = self.loss(self.world.rows(batch[: self.config.train.batch_size]))
                (loss if more is None else loss + more).backward()
        except (RuntimeError, OSError) as error:  # RuntimeError is the base class of all compiler errors
            if out_of_memory(error):
                raise
            reason = str(error).strip().splitlines()[0]
            if self.config.train.compile != "auto":
                raise ConfigError("torch.compile does not work here", reason, "train.compile=off") from error
            (self.compute, self.compute_nats), self.compiled = plain, False
        self.optimizer.zero_grad()
        for name, buffer in self.model.named_buffers():
            buffer.copy_(buffers[name])
        return reason


def trust_instruction_sets() -> None:
    """Spare the compiler its test of the vector instructions that the CPU reports, unless the user asks for it.

    It compiles and loads three small libraries, one after another: 8 of 40 s of CPU time when nothing is cached, and
    one second at every later start. A compiler that lacks an instruction set fails on the first kernel instead.
    """
    from torch._inductor import config

    if config.cpp.vec_isa_ok is None:
        config.cpp.vec_isa_ok = True


class Objective(nn.Module):
    """The losses of a step as a module, which is what DistributedDataParallel wraps."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.model = step.model
        self._losses = lambda inputs, targets: step.compute(inputs, targets)  # which `compile` replaces

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Any, ...]:
        return self._losses(inputs, targets)


def forget_programs() -> None:
    """Reset Dynamo, so that a run that compiles starts as in a new process.

    All runs of a worker share their code, and Dynamo keeps at most 8 programs per function. Without the reset, a
    worker's ninth arm would run uncompiled, and an arm's kernels would depend on the arms before it.
    """
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()


def compiled_programs() -> dict[str, int]:
    """The number of compiled programs (training; on a GPU evaluation too) and of graph breaks."""
    from torch._dynamo.utils import counters

    breaks = sum(counters["graph_break"].values())
    return {"programs": counters["stats"]["unique_graphs"], "graph_breaks": breaks}


def steps_of(config: RunConfig, vocab_size: int) -> int:
    """The number of optimizer steps of a run, from any kind of budget (steps, tokens, FLOPs)."""
    if config.resolved.steps is not None:
        return config.resolved.steps
    return math.ceil(config.train.flops / (flops_per_token(config, vocab_size) * config.resolved.tokens_per_step))

"""Whether several runs pay as one program: `python scripts/bench_stack.py 8 model=nano train.device=cuda`.

A prototype, to be measured on a GPU before any of it enters the package. It takes the number of runs and overrides as
for a run, and trains that many seeds with stacked weights in one compiled step: forward, backward, norms, clipping and
AdamW. On a GPU it then captures the step as one CUDA graph; with 1 run, that measures the graph alone. The losses are
compared with those of each run by itself, and the times with a compiled step of one run, in turn.

Shape letters: K runs, B batch, T time.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.func import functional_call, grad, stack_module_state, vmap

from nexus_ablate.bench.timing import clock_of, in_turn, ratios, spread
from nexus_ablate.config.compose import compose
from nexus_ablate.data import Batches, prepare
from nexus_ablate.kernels.loss import losses
from nexus_ablate.model import build_model
from nexus_ablate.training.device import choose_device, precision_context
from nexus_ablate.training.schedule import learning_rate
from nexus_ablate.training.step import Step

COMPARED, TIMED = 100, 10
"""Steps whose losses are compared, and steps per block of the timing."""
SECONDS = 10.0


class Stack:
    """K runs of one shape as one step.

    Args:
        steps: Those of each run by itself, before they have taken any.
    """

    def __init__(self, steps: list[Step]) -> None:
        first = steps[0]
        if first.config.optim.name != "adamw" or first.config.train.grad_accum > 1 or first.config.model.dropout:
            raise SystemExit("the prototype takes AdamW, one micro-batch and no dropout")
        self.config, self.model, self.device = first.config, first.model, first.device
        weights, self.buffers = stack_module_state([step.model for step in steps])  # type: ignore[reportArgumentType]
        self.weights = {name: weight.detach().clone() for name, weight in weights.items()}
        self.moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in self.weights.items()}
        groups = {id(p): group for group in first.optimizer.param_groups for p in group["params"]}
        self.groups = {name: groups[id(p)] for name, p in self.model.named_parameters()}
        rows = first.config.train.batch_size, first.config.model.context + 1
        self.rows_KBT = torch.zeros(len(steps), *rows, dtype=torch.long, device=self.device)
        self.number, self.lr = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        self.trains_K = torch.ones(len(steps), dtype=torch.bool, device=self.device)  # False once a run has diverged
        self.losses_K = torch.zeros(len(steps), device=self.device)
        self.step: Callable[[], None] = torch.compile(self._step, dynamic=False)

    def take(self, number: int, steps: int, rows_KBT: Tensor) -> Tensor:
        """Take step `number` (from 0) of `steps`, and return the K losses, which the next step overwrites."""
        self.rows_KBT.copy_(rows_KBT, non_blocking=True)
        self.number.fill_(number + 1)
        self.lr.fill_(learning_rate(self.config.schedule, number, steps))
        self.step()
        return self.losses_K

    def capture(self) -> None:
        """Capture the step as one CUDA graph, and leave weights and moments as they were."""
        changed = [*self.weights.values(), *(m for pair in self.moments.values() for m in pair), self.trains_K]
        before = [tensor.clone() for tensor in changed]
        aside, step = torch.cuda.Stream(), self.step
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for tensor, value in zip(changed, before, strict=True):
            tensor.copy_(value)
        self.step = graph.replay

    def _step(self) -> None:
        grads, losses_K = vmap(grad(self._loss, has_aux=True))(self.weights, self.buffers, self.rows_KBT)
        norm_K = torch.stack([g.flatten(1).float().square().sum(1) for g in grads.values()]).sum(0).sqrt()
        self.losses_K.copy_(losses_K)
        self.trains_K.logical_and_(torch.isfinite(losses_K) & torch.isfinite(norm_K))
        clip = self.config.schedule.clip
        factor_K = torch.ones_like(norm_K) if clip == "off" else (float(clip) / (norm_K + 1e-6)).clamp(max=1.0)
        for name, g in grads.items():
            self._adamw(name, g * along(factor_K, g))

    def _loss(self, weights: dict[str, Tensor], buffers: dict[str, Tensor], rows_BT: Tensor) -> tuple[Tensor, Tensor]:
        with precision_context(self.config.train.precision, self.device.type):
            logits_BTV = functional_call(self.model, (weights, buffers), (rows_BT[:, :-1],))
        loss, z_loss = losses(logits_BTV.flatten(0, 1), rows_BT[:, 1:].flatten(), self.config.z_loss)
        return loss + z_loss, loss.detach()

    def _adamw(self, name: str, g: Tensor) -> None:
        weight, (m, v), group = self.weights[name], self.moments[name], self.groups[name]
        beta1, beta2 = group["betas"]
        lr = self.lr * group.get("lr_factor", 1.0)
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        m_hat, v_hat = m / (1 - beta1**self.number), v / (1 - beta2**self.number)
        stepped = weight * (1 - lr * group["weight_decay"]) - lr * m_hat / (v_hat.sqrt() + group["eps"])
        weight.copy_(torch.where(along(self.trains_K, weight), stepped, weight))


def along(row_K: Tensor, x: Tensor) -> Tensor:
    """One value per run, broadcastable to a stacked tensor."""
    return row_K.view(-1, *[1] * (x.ndim - 1))


def losses_alone(step: Step, batches: Batches, compiled: bool) -> list[float]:
    """The losses of the first steps of a run by itself."""
    if compiled:
        step.compile(batches.batch(0))
    for number in range(COMPARED):
        step.take(number, batches.batch(number))
    return [seen.loss for seen in step.read()]


def largest_difference(runs: Iterable[Sequence[float]], others: Iterable[Sequence[float]]) -> float:
    """The largest relative difference between the losses of runs."""
    pairs = (pair for a, b in zip(runs, others, strict=True) for pair in zip(a, b, strict=True))
    return max(abs(a - b) / b for a, b in pairs)


def main() -> None:
    count, overrides = int(sys.argv[1]), sys.argv[2:]
    warnings.filterwarnings("ignore", "There is a performance drop")  # vmap repeats attention on a CPU run by run
    configs = [compose([*overrides, "train.loss=whole", "train.compile=on", f"seed={seed}"]) for seed in range(count)]
    config = configs[0]
    device = choose_device(config.train.device)
    if config.train.threads != "auto":
        torch.set_num_threads(config.train.threads)
    data = prepare(config.data, context=config.model.context)
    size, context = config.train.batch_size, config.model.context
    batches = [Batches(data.train, c.seed, size, context, data.period) for c in configs]
    rows = [torch.stack([torch.from_numpy(b.batch(n)).long() for b in batches]) for n in range(COMPARED)]
    if device.type == "cuda":
        rows = [r.pin_memory() for r in rows]

    def step_of(k: int) -> Step:
        model = build_model(configs[k], data.vocab_size).to(device).train()
        return Step(configs[k], model, COMPARED, batches[k].batch)

    alone = [step_of(k) for k in range(count)]
    stack = Stack(alone)
    stacked = [stack.take(n, COMPARED, rows[n]).tolist() for n in range(COMPARED)]
    compiled = [losses_alone(step, batch, True) for step, batch in zip(alone, batches, strict=True)]
    uncompiled = [losses_alone(step_of(k), batches[k], False) for k in range(count)]
    apart, usual = largest_difference(zip(*stacked, strict=True), compiled), largest_difference(uncompiled, compiled)
    print(
        f"{count} x {COMPARED} steps: losses differ by at most {apart:.1e} from those of each run by itself", flush=True
    )
    print(f"those of the same runs uncompiled differ by at most {usual:.1e}", flush=True)

    def take_alone() -> None:
        for n in range(TIMED):
            alone[0].take(n, batches[0].batch(n))
        alone[0].read()

    def take_stacked() -> None:
        for n in range(TIMED):
            stack.take(n, COMPARED, rows[n])

    report("one program", count, take_alone, take_stacked, device)
    if device.type == "cuda":
        stack.capture()
        report("one CUDA graph", count, take_alone, take_stacked, device)


def report(name: str, count: int, alone: Callable[[], None], stacked: Callable[[], None], device: torch.device) -> None:
    """Print the times of a step alone and stacked, measured in turn."""
    taken = in_turn({"alone": alone, "stacked": stacked}, SECONDS, clock_of(device))
    one, all_ = (1000 * spread(taken[kind]).median / TIMED for kind in ("alone", "stacked"))
    ratio = count / ratios(taken["stacked"], taken["alone"]).median
    print(
        f"{name} of {count}: {all_:.2f} ms per step, {one:.2f} by itself: {ratio:.2f} times the throughput of one "
        "after another",
        flush=True,
    )


if __name__ == "__main__":
    main()

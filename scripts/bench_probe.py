"""What the probe costs: `python scripts/bench_probe.py model=nano train.device=cpu`, overrides as for a run.

Training steps and probes of each kind take turns in one process, so that whatever else the machine does falls on all of
them alike. A share is the probes of a run of so many steps over its training time, by medians.
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial

import torch

from nexus_ablate.config.compose import compose
from nexus_ablate.data import Batches, eval_windows, prepare
from nexus_ablate.measure.probe import due, matrix_probe, model_figures, probe
from nexus_ablate.measure.weight_statistics import weight_rms
from nexus_ablate.model import build_model
from nexus_ablate.optimizers import build_optimizer
from nexus_ablate.training.device import choose_device, precision_context
from nexus_ablate.training.gradients import GradientNorms

ROUNDS = 30


def main() -> None:
    config = compose(sys.argv[1:])
    device = choose_device(config.train.device)
    if config.train.threads != "auto":
        torch.set_num_threads(config.train.threads)
    context, size = config.model.context, config.train.batch_size * config.train.grad_accum
    data = prepare(config.data, context=context)
    batches = Batches(data.train, 0, size, context, data.period)
    windows = eval_windows(data.val["val"], context, context * config.probe.sequences, data.period)[:, :-1]
    tokens_BT = torch.from_numpy(windows.copy()).to(device)
    model = build_model(config, data.vocab_size).to(device).train()
    optimizer, gradients = build_optimizer(model, config.optim, config.weight_decay), GradientNorms(model)

    def step(number: int) -> None:
        rows = torch.from_numpy(batches.batch(number)).to(device)
        with precision_context(config.train.precision, device.type):
            logits_BTV = model(rows[:, :-1])
        torch.nn.functional.cross_entropy(logits_BTV.float().flatten(0, 1), rows[:, 1:].flatten()).backward()
        gradients.clip(gradients.measure()[0], 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def look(full: bool) -> None:
        probed = probe(
            model, tokens_BT, full, precision=partial(precision_context, config.train.precision, device.type)
        )
        if full:
            probed |= matrix_probe(model, {})
        model_figures(probed)
        weight_rms(model)

    work = {"step": step, "standard": lambda _: look(False), "full": lambda _: look(True)}
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for number in range(ROUNDS + 3):
        for name, done in work.items():
            taken = timed(partial(done, number), device)
            if number >= 3:  # the first rounds warm up
                seconds[name].append(taken)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    print(f"{config.model.name} on {device}: a step takes {1000 * medians['step']:.1f} ms")
    for name in ("standard", "full"):
        cost = medians[name] / medians["step"]
        shares = {steps: probes_of(steps, config.probe.every) * cost / steps for steps in (200, 800, 2000)}
        listed = ", ".join(f"{share:.1%} of {steps} steps" for steps, share in shares.items())
        print(f"probe={name}: {cost:.2f} steps each; {listed}")


def timed(work: partial[None], device: torch.device) -> float:
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def probes_of(steps: int, every: int) -> int:
    """Probes in a run: those that are due, the one before the first step and the one after the last."""
    return sum(due(step, every) or step in (0, steps) for step in range(steps + 1))


if __name__ == "__main__":
    main()

"""The coordinate check: how much logits and branch outputs change over the first steps, at several widths.

    python scripts/bench_coordinates.py param=mup --picture mup.png

Trains each width on one small batch of random tokens at optim.lr, in float32 on the CPU, without warm-up and clipping;
heads keep their width. Where learning rates transfer, the change doesn't depend on the width (Yang et al. 2022,
arXiv:2203.03466, section D.1 and Figure 5). The check passes if every slope of log change against log width is at most
FLAT in size. Exit status 1: it fails.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from nexus_ablate.config.compose import compose
from nexus_ablate.config.rules import check_vocabulary
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.console import grid, open_console
from nexus_ablate.errors import ConfigError
from nexus_ablate.kernels.loss import losses
from nexus_ablate.measure.probe import evaluation_mode
from nexus_ablate.model import GPT, build_model
from nexus_ablate.optimizers import build_optimizer
from nexus_ablate.report.run_picture import save_figure

FLAT = 0.35
"""Largest slope of log change against log width that passes. In the limit of large widths slopes are multiples of 1/2,
and 0 where rates transfer; at a few hundred channels muP's lie between -0.3 and 0."""
VOCABULARY = 256
SMALL = ("model.context=64", "train.batch_size=4")
"""Defaults: a few steps on few tokens decide."""


@dataclass(frozen=True)
class Coordinates:
    """Root mean square changes since the start, averaged over seeds.

    Attributes:
        changes: After the last step, by name (`logits`, `block 0 attn` ...) and width.
    """

    widths: list[int]
    changes: dict[str, np.ndarray]

    @property
    def slopes(self) -> dict[str, float]:
        """Of log change against log width, by least squares; nan without one."""
        x, slopes = np.log(self.widths), {}
        for name, values in self.changes.items():
            has_logarithm = np.all(np.isfinite(values) & (values > 0))
            slopes[name] = float(np.polyfit(x, np.log(values), 1)[0]) if has_logarithm else math.nan
        return slopes

    @property
    def passes(self) -> bool:
        """Whether no change grows or shrinks with the width."""
        return all(abs(slope) <= FLAT for slope in self.slopes.values())


def configurations(overrides: list[str], widths: list[int]) -> list[RunConfig]:
    """The configuration at each width, with heads of one width.

    Raises:
        ConfigError: A width is not a multiple of the width of a head, or a configuration cannot be run.
    """
    base = compose(overrides)
    check_vocabulary(base, VOCABULARY)
    head_dim, rate = base.resolved.head_dim, f"optim.lr={base.schedule.lr}"  # one rate for all widths
    for width in widths:
        if width % head_dim:
            fix = f"--widths {','.join(str(head_dim * n) for n in (2, 4, 8))}"
            raise ConfigError(f"the widths must be multiples of the width of a head, {head_dim}", str(width), fix)
    return [compose([rate, *overrides, f"model.d_model={w}", f"model.n_heads={w // head_dim}"]) for w in widths]


def check_coordinates(configs: list[RunConfig], steps: int, seeds: int) -> Coordinates:
    """Train each width for some steps on one batch of random tokens, without warm-up and clipping.

    The losses of options and the z-loss are trained on too.

    Args:
        seeds: Over which the changes are averaged.
    """
    widths = [config.model.d_model for config in configs]
    sums: dict[str, np.ndarray] = {}
    for number, config in enumerate(configs):
        for seed in range(seeds):
            for name, change in _changes(config, seed, steps).items():
                sums.setdefault(name, np.zeros(len(widths)))[number] += change
    return Coordinates(widths, {name: total / seeds for name, total in sums.items()})


def _changes(config: RunConfig, seed: int, steps: int) -> dict[str, float]:
    config.seed = seed
    model = build_model(config, VOCABULARY)
    optimizer = build_optimizer(model, config.optim, config.weight_decay)
    optimizer.set_learning_rate(config.schedule.lr)
    shape = config.train.batch_size, config.model.context + 1
    tokens = torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].flatten()
    first = _outputs(model, inputs)
    for _ in range(steps):
        optimizer.zero_grad()
        context = model.context(inputs)
        logits_BTV = model.logits(model.hidden(inputs, context), model.head_weight)
        parts = [*losses(logits_BTV.flatten(0, 1), targets, config.z_loss), *context.losses.values()]
        torch.stack(parts).sum().backward()
        optimizer.step()
        model.constrain()
        model.update_state(context.sums)
    last = _outputs(model, inputs)
    return {name: float((last[name] - first[name]).square().mean().sqrt()) for name in first}


def _outputs(model: GPT, tokens: Tensor) -> dict[str, Tensor]:
    """The logits and the output of each branch, without dropout."""
    outputs: dict[str, Tensor] = {}
    branches: dict[nn.Module, str] = {}
    for number, block in enumerate(model.blocks):
        for part, module in block.named_children():
            if part in ("attn", "ffn"):
                branches[module] = f"block {number} {part}"

    def keep(module: nn.Module, inputs: object, output: Tensor) -> None:
        if module in branches:
            outputs[branches[module]] = output

    with evaluation_mode(model), register_module_forward_hook(keep):
        outputs["logits"] = model(tokens)
    return outputs


def draw(checked: Coordinates, title: str, path: Path) -> None:
    """The change of each quantity against the width, with its slope."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(7, 3.8), layout="constrained")
    axes = figure.subplots()
    for name, slope in checked.slopes.items():
        thick = 2.5 if name == "logits" else 1.0
        axes.plot(checked.widths, checked.changes[name], marker="o", lw=thick, label=f"{name} {slope:+.2f}")
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel="d_model", ylabel="RMS change since the start")
    axes.set_xticks(checked.widths, list(map(str, checked.widths)))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, title="slope")
    figure.suptitle(title, fontsize=11)
    save_figure(figure, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="of the model, its parametrization and optimizer")
    parser.add_argument("--widths", default="64,128,256,512", help="of d_model")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=2, help="that are averaged")
    parser.add_argument("--picture", type=Path, help="a chart (.png, .pdf or .svg)")
    arguments = parser.parse_intermixed_args()
    console = open_console()
    widths = [int(width) for width in arguments.widths.split(",")]
    configs = configurations([*SMALL, *arguments.overrides], widths)
    checked = check_coordinates(configs, arguments.steps, arguments.seeds)
    rows = []
    for name, slope in checked.slopes.items():
        changes = [f"{change:.3g}" for change in checked.changes[name]]
        rows.append((name, *changes, f"{slope:+.2f}", "" if abs(slope) <= FLAT else "not flat"))
    print(f"RMS change since the start after {arguments.steps} steps, and its slope against d_model")
    console.print(grid(("", *map(str, widths), "slope", " "), rows, console.width))
    verdict = f"param={configs[0].param.name} {'passes' if checked.passes else 'fails'}"
    print(f"{verdict}: a slope may be at most {FLAT:g} in size")
    if arguments.picture:
        slopes = checked.slopes.values()
        title = f"{verdict} the coordinate check: slopes {min(slopes):+.2f} to {max(slopes):+.2f}"
        draw(checked, title, arguments.picture)
    return 0 if checked.passes else 1


if __name__ == "__main__":
    sys.exit(main())

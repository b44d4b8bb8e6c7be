"""Which learning rate is best at which width: `python scripts/bench_transfer.py FOLDER [PARAM ...]`.

Trains two-layer models of 32 to 256 channels at seven rates with three seeds, and draws the loss against the rate. Runs
that FOLDER holds already are not trained again. It takes half an hour on two CPU cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from nexus_ablate import load_run
from nexus_ablate.runs import find_runs

PARAMETRIZATIONS = {"sp": "standard", "mup": "muP", "completep": "CompleteP"}
WIDTHS = (32, 64, 128, 256)
RATES = tuple(1e-3 * 2**n for n in range(-1, 6))
SEEDS = (0, 1, 2)
SHAPE = ("model.n_layers=2", "model.context=64", "train.batch_size=8", "train.steps=200", "probe=off", "tracker=files")


def train(folder: Path, param: str, width: int) -> None:
    values = [f"optim.lr={','.join(f'{rate:g}' for rate in RATES)}", f"seed={','.join(map(str, SEEDS))}"]
    values += [f"param={param}", f"model.d_model={width}", f"model.n_heads={width // 32}"]
    if param == "completep":
        values.append("param.base_depth=2")
    command = [sys.executable, "-m", "nexus_ablate", "-m", *SHAPE, *values, f"runs_dir={folder}", "train.threads=1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    print(f"param={param} d_model={width}: trained", flush=True)


def losses_of(folder: Path) -> dict[tuple[str, int, float], list[float]]:
    losses = defaultdict(list)
    for path in find_runs([folder]):
        config, summary = load_run(path).config, load_run(path).summary
        key = config["param"]["name"], config["model"]["d_model"], config["optim"]["lr"]
        losses[key].append(summary["val_loss"] if summary else float("inf"))
    return losses


def main() -> None:
    folder, params = Path(sys.argv[1]), sys.argv[2:] or list(PARAMETRIZATIONS)
    with ThreadPoolExecutor(2) as pool:
        for _ in pool.map(lambda pair: train(folder, *pair), product(params, reversed(WIDTHS))):
            pass
    losses = losses_of(folder)
    size = 3.4 * len(params), 3.4
    figure, axes = plt.subplots(1, len(params), figsize=size, sharey=True, layout="constrained", squeeze=False)
    for panel, param in zip(axes[0], params, strict=True):
        best = []
        for width, colour in zip(WIDTHS, plt.get_cmap("viridis")(np.linspace(0, 0.85, len(WIDTHS))), strict=True):
            means = [float(np.mean(losses[param, width, rate])) for rate in RATES]
            lowest = int(np.argmin(means))
            best.append(RATES[lowest])
            panel.plot(RATES, means, color=colour, label=f"{width}")
            panel.plot(RATES[lowest], means[lowest], "o", color=colour)
        print(f"{param}: best rate at widths {WIDTHS}: {', '.join(f'{rate:g}' for rate in best)}; ", end="")
        print(f"largest over smallest {max(best) / min(best):g}")
        panel.set(xscale="log", title=PARAMETRIZATIONS[param], xlabel="learning rate")
        panel.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("validation loss (nats per token)")
    axes[0, 0].legend(title="d_model", frameon=False)
    figure.savefig(folder / "transfer.svg")
    figure.savefig(folder / "transfer.png", dpi=150)


if __name__ == "__main__":
    main()

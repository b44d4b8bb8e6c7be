"""Wall seconds of whole runs: eager, compiled with an empty compiler cache, and warm.

    python scripts/bench_runs.py default                 the default run, three times
    python scripts/bench_runs.py study [--steps 240]     two arms at eight seeds of pico, from four shorter runs each

A study is extrapolated: two arms at two seeds train `--steps` steps, eager and compiled, in two workers. The seconds of
training of each run are scaled to the whole length, and what it takes besides (compiling, probes, evaluations,
checkpoints) is left as it was. The first seed is cold, the second warm.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from nexus_ablate.config.compose import compose
from nexus_ablate.runs import read_run

COMMAND = [sys.executable, "-m", "nexus_ablate"]


def seconds(arguments: list[str], cache: str) -> float:
    """Wall seconds of a command of nexus-ablate with a folder for the compiler's cache."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
    start = time.monotonic()
    subprocess.run([*COMMAND, *arguments], env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - start


def default(folder: str) -> None:
    """Print the wall seconds of the default run."""
    for name, compiled in {"eager": "off", "cold": "auto", "warm": "auto"}.items():
        settings = ["tracker=files", f"runs_dir={folder}/{name}", f"train.compile={compiled}"]
        print(f"default run, {name}: {seconds(settings, f'{folder}/programs'):.0f} s", flush=True)


def study(folder: str, steps: int) -> None:
    """Print the minutes of two arms at eight seeds of pico, extrapolated."""
    whole = compose(["model=pico"]).resolved.steps
    for compiled in ("off", "on"):
        runs_dir = f"{folder}/{compiled}"
        arms = ["-m", "norm=rms,layer", "seed=0,1", "experiment=pairs", f"runs_dir={runs_dir}", "tracker=files"]
        seconds([*arms, f"train.steps={steps}", f"train.compile={compiled}"], f"{folder}/programs")
        by_seed: dict[int, list[float]] = {0: [], 1: []}
        for path in Path(runs_dir).glob("pairs/*/s*"):
            summary: dict[str, Any] = read_run(path).summary or {}
            training = summary["seconds"] * whole / steps
            aside = sum(summary[f"seconds_{activity}"] for activity in ("eval", "probe", "checkpoint", "compile"))
            by_seed[int(path.name[1])].append(training + aside)
        first, later = (statistics.mean(times) for times in by_seed.values())
        cold, warm = (first + 7 * later) / 60, 8 * later / 60
        print(f"two arms at eight seeds, compile={compiled}: cold {cold:.1f} min, warm {warm:.1f} min", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("default", "study"))
    parser.add_argument("--steps", type=int, default=240)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.what == "default":
            default(folder)
        else:
            study(folder, arguments.steps)


if __name__ == "__main__":
    main()

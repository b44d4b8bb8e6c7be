"""The study queue against one command after another: python scripts/bench_queue.py [--pairs 3] [--runs 8] [--steps 200]

Each pair trains the same runs both ways, start-up included, in turn first and second: a study with one worker a core
and one thread each, and single commands with all cores' threads each. Then every run of the study is trained alone
with one thread, and must give the same losses bit for bit.
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

from nexus_ablate.runs import find_runs, read_jsonl, read_run

CLOCK = {"seconds", "tokens_per_second", "peak_memory_bytes"}
COMMAND = [sys.executable, "-m", "nexus_ablate"]
CORES = len(os.sched_getaffinity(0))


def timed(commands: list[list[str]]) -> float:
    """Wall-clock seconds of the commands, one after another."""
    start = time.monotonic()
    for command in commands:
        done = subprocess.run([*COMMAND, *command], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return time.monotonic() - start


def rows(path: Path) -> list[dict]:
    """The metrics of a run without those of the clock."""
    return [{k: v for k, v in row.items() if k not in CLOCK} for row in read_jsonl(path / "metrics.jsonl")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("pairs", 3), ("runs", 8), ("steps", 200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    seeds = range(arguments.runs // 2)
    arms = ("norm=rms", "norm=layer")
    base = [f"train.steps={arguments.steps}", "tracker=files", "train.device=cpu"]
    ratios = []
    with tempfile.TemporaryDirectory() as scratch:

        def queue(folder: str) -> float:
            study = ["study", "queue", "vary.norm=layer", f"seeds={','.join(map(str, seeds))}", *base]
            return timed([[*study, f"runs_dir={scratch}/{folder}", "--workers", str(CORES)]])

        def in_turn(folder: str, threads: int) -> float:
            where = [f"runs_dir={scratch}/{folder}", f"train.threads={threads}"]
            return timed([[arm, f"seed={seed}", *base, *where] for seed in seeds for arm in arms])

        timed([["train.steps=1", *base, f"runs_dir={scratch}/warm"]])  # the data is prepared once, before both
        for pair in range(arguments.pairs):
            if pair % 2:
                alone, together = in_turn(f"turn{pair}", CORES), queue(f"queue{pair}")
            else:
                together, alone = queue(f"queue{pair}"), in_turn(f"turn{pair}", CORES)
            ratios.append(alone / together)
            print(f"pair {pair}: queue {together:.1f} s, in turn {alone:.1f} s, ratio {ratios[-1]:.2f}", flush=True)
        in_turn("single", threads=1)
        single = {path.name: rows(path) for path in find_runs([Path(scratch) / "single"])}
        queued = {path.name: rows(path) for path in find_runs([Path(scratch) / "queue0"])}
        equal = sum(queued[name] == single.get(name) for name in queued)
        threads = {(read_run(path).summary or {})["threads"] for path in find_runs([Path(scratch) / "queue0"])}
    print(
        f"{arguments.runs} runs of {arguments.steps} steps on {CORES} cores, {arguments.pairs} pairs: "
        f"the queue is {statistics.median(ratios):.2f} times as fast (from {min(ratios):.2f} to {max(ratios):.2f})\n"
        f"threads of a queued run: {threads}; bit-identical to the run alone: {equal} of {len(queued)}"
    )


if __name__ == "__main__":
    main()

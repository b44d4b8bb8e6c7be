"""Benchmark runs per hour: how many concurrent workers, each with a share of the cores, finish most runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Throughput:
    """The combined throughput of a number of workers.

    Attributes:
        step_seconds: Seconds per step of one worker, the median over workers.
        runs_per_hour: Of all workers, counting training steps only, without validation and saving.
    """

    workers: int
    threads: int
    step_seconds: float
    runs_per_hour: float


def bench_sweep(overrides: list[str], steps: int, workers: list[int], cores: int, seconds: float) -> list[Throughput]:
    """Let several processes train at once, for each number of workers in turn.

    Args:
        overrides: The configuration of every run, already checked.
        steps: Steps per run.
        workers: Numbers of workers to try.
        cores: Number of cores that the workers share; each has at least one thread.
        seconds: Approximate total measuring time, without the start of the processes.
    """
    results = []
    for count in workers:
        threads = max(1, cores // count)
        each = _steps_per_second(overrides, count, threads, seconds / len(workers))
        middle = sorted(each)[len(each) // 2]
        results.append(Throughput(count, threads, 1 / middle, 3600 * sum(each) / steps))
    return results


def _steps_per_second(overrides: list[str], count: int, threads: int, seconds: float) -> list[float]:
    """Steps per second of each of `count` processes that train at the same time."""
    command = [sys.executable, "-m", "nexus_ablate.bench.sweep", str(seconds), *overrides, f"train.threads={threads}"]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as folder:
        started = [
            subprocess.Popen(
                command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for _ in range(count)
        ]
        try:
            for process in started:  # all must be warm before any is timed
                assert process.stdout is not None
                if not process.stdout.readline():
                    raise RuntimeError(f"a worker ended with status {process.wait()} before its first step")
            answers = []
            for process in started:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            for process in started:
                assert process.stdout is not None
                answers.append(json.loads(process.stdout.readline()))
            return answers
        finally:
            for process in started:
                process.kill()
                process.communicate()


def _worker(seconds: float, overrides: list[str]) -> None:
    """Print a line when warm, wait for a line, train for `seconds`, and print the steps per second."""
    from nexus_ablate.training.device import share_cores_politely

    share_cores_politely()
    import torch

    from nexus_ablate.bench.step import WARM_STEPS, endless, running
    from nexus_ablate.config.compose import compose
    from nexus_ablate.training.memory import keep_freed_memory

    keep_freed_memory()
    config = compose(endless(overrides))
    torch.set_num_threads(config.train.threads)
    with running(config) as trainer:
        for _ in range(WARM_STEPS):
            trainer.step_and_record()
        print("warm", flush=True)
        sys.stdin.readline()
        start, done = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            trainer.step_and_record()
            done += 1
        print(json.dumps(done / (time.perf_counter() - start)), flush=True)


if __name__ == "__main__":
    _worker(float(sys.argv[1]), sys.argv[2:])

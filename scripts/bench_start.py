"""From the command to the first training step, and from the end of one run to the first step of the next in a worker:

    python scripts/bench_start.py [KEY=VALUE ...]

Seconds of the wall clock and, in brackets, their range and the processor's: what a quiet machine comes near to.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile

REPEATS = 5

CODE = """
import sys, time
begin, begin_cpu = {begin}, 0.0
from nexus_ablate.config.compose import compose
from nexus_ablate.training.device import share_cores_politely
overrides = sys.argv[1:]
config = compose(overrides)
share_cores_politely()
import nexus_ablate.training.session as session
from nexus_ablate.training.step import Step
take, times = Step.take, []
def timed(self, number, batch, **more):
    begun = time.time() - begin
    take(self, number, batch, **more)
    if number == 0:
        times.append((begun, time.time() - begin, time.process_time() - begin_cpu))
Step.take = timed
session.train(config, overrides, quiet=True)
begin, begin_cpu = time.time(), time.process_time()
overrides = [*overrides, "seed=1"]
session.train(compose(overrides), overrides, quiet=True)
import json
print(json.dumps([times, "torch._dynamo" in sys.modules]))
"""


def main() -> None:
    import time

    first, second = [], []
    for _ in range(REPEATS + 1):
        with tempfile.TemporaryDirectory() as folder:
            length = ["train.steps=2", "train.eval_tokens=128", "tracker=files", f"runs_dir={folder}", *sys.argv[1:]]
            command = [sys.executable, "-c", CODE.format(begin=time.time()), *length]
            times, _ = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        first.append(times[0])
        second.append(times[1])
    for name, times in (("command to first step", first[1:]), ("next run in the same worker", second[1:])):
        begun, ended, cpu = (statistics.median(t[i] for t in times) for i in range(3))
        spread = f"{min(t[1] for t in times):.2f} to {max(t[1] for t in times):.2f}"
        print(f"{name}: it begins after {begun:.2f} s and ends after {ended:.2f} s ({spread}; processor {cpu:.2f})")


if __name__ == "__main__":
    main()

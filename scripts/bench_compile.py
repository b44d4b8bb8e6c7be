"""What compiling a run costs and saves: `python scripts/bench_compile.py model=nano train.device=cuda`.

Takes overrides as for a run, trains the same steps uncompiled and compiled, each in a new process, and prints the
seconds of compiling, the time of a step, and after how many steps compiling pays. training/choices.py estimates these
numbers for a GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = 60
LENGTH = [f"train.steps={STEPS}", f"train.eval_every={STEPS}", "train.eval_tokens=16384", "tracker=files", "probe=off"]


def summary_of(overrides: list[str]) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "nexus_ablate", *overrides, *LENGTH, f"runs_dir={folder}"]
        subprocess.run(command, check=True, stderr=subprocess.PIPE)
        (path,) = Path(folder).rglob("summary.json")
        return json.loads(path.read_text())


def main() -> None:
    seconds, compiling = {}, 0.0
    for compiled in ("off", "on"):
        summary = summary_of([*sys.argv[1:], f"train.compile={compiled}"])
        seconds[compiled], compiling = summary["seconds"] / STEPS, summary["seconds_compile"]
        print(
            f"train.compile={compiled}: {1000 * seconds[compiled]:.2f} ms per step, the first included, "
            f"{compiling:.1f} s of compiling, {summary['peak_memory_bytes'] / 2**30:.2f} GiB at most",
            flush=True,
        )
    saved = seconds["off"] - seconds["on"]
    worth = f"compiling pays from {compiling / saved:,.0f} steps on" if saved > 0 else "never pays"
    print(f"a compiled step saves {saved / seconds['off']:.0%}: {worth}")


if __name__ == "__main__":
    main()

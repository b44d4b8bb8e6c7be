"""Run directories written by hand, in the format of runs/README.md: a comparison is tested without training."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from nexus_ablate.config.compose import compose, differences
from nexus_ablate.runs import arm_name
from nexus_ablate.runs.contradiction import config_file_hash

TINY = (
    "model.n_layers=2",
    "model.d_model=16",
    "model.n_heads=2",
    "model.context=8",
    "train.steps=400",
    "optim.lr=3e-3",
)
NAMES = ("embedding.weight", "blocks.0.attn.query.weight", "blocks.0.ffn.up.weight", "blocks.1.ffn.down.weight")
SOURCE = {"axes/norm.py": "1a", "model.py": "1b", "optimizers.py": "1c"}
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""In C, which is most of the time that a run takes to write."""
NOW = "2020-01-01T00:00:00+00:00"


def digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


@cache
def config_of(overrides: tuple[str, ...]) -> tuple[dict[str, Any], str]:
    """A config.yaml's values, and the arm's name against the tiny baseline."""
    config, base = compose([*TINY, *overrides]), compose(list(TINY))
    name = arm_name({k: v for k, v in differences(config).items() if differences(base).get(k) != v})
    return config.nested() | {"resolved": config.resolved.flat()}, name


@dataclass
class Writer:
    """Writes runs of a study under `root`.

    A run's validation curve falls from 5 to its final loss; the training losses follow it with noise of their own.
    """

    root: Path
    study: str = "study"
    steps: int = 400
    paths: list[Path] = field(default_factory=list)

    def run(
        self,
        *overrides: str,
        seed: int = 0,
        loss: float = 2.0,
        state: str = "finished",
        folder: str | None = None,
        rerun: str = "",
        steps: int | None = None,
        summary: dict[str, Any] | None = None,
        stream: int | None = None,
        evaluation: str = "validation",
        shape: str = "",
        env: dict[str, Any] | None = None,
        train_noise: str = "",
        windows: int = 16,
        blocks: int = 8,
        text: tuple[float, ...] = (0.0,),
        started: str = NOW,
        batch: float = 1.0,
    ) -> Path:
        """One run.

        Args:
            loss: Final validation loss; every curve is a function of it and of `train_noise`.
            stream: Seed of batches and initial values where it is not the run's own.
            shape: Changes the hash of every initial value, as another width does.
            windows: Rows of evaluation.jsonl, in blocks of one length; 0: no such file.
            text: What is added to the losses of the blocks in turn, less their mean.
            batch: Tokens of a step, relative to those of other runs.
        """
        values, name = config_of(overrides)
        values = {**values, "seed": seed, "experiment": self.study}
        values["resolved"] = values["resolved"] | {"steps": self.steps}
        arm_hash = digest(overrides, folder if folder and folder.startswith("#") else "") * 4
        code = (env or {}).get("source", SOURCE)
        run_hash = digest(arm_hash, seed, code)
        path = self.root / self.study / (folder or name) / f"s{seed}-{run_hash[:8]}{rerun}"
        path.mkdir(parents=True)
        done = self.steps if steps is None else steps
        stream = seed if stream is None else stream
        rows = list(self._rows(done, loss, stream, train_noise, batch))
        end = at(done, batch)
        write_json(path / "status.json", {
            "state": state, "reason": "" if state == "finished" else f"it is {state}", "started": started, "step": done,
            "traceback": "", "updated": NOW, "host": "elsewhere", "pid": 1, "heartbeat": NOW,
        })  # fmt: skip
        config_yaml = yaml.dump(values, Dumper=DUMPER, sort_keys=False)
        (path / "config.yaml").write_text(config_yaml)
        (path / "overrides.txt").write_text("".join(f"{o}\n" for o in overrides))
        environment = {
            "version": "1", "host": "h", "python": "3", "packages": {"torch": "2"}, "git_commit": "abc",
            "git_dirty": False, "source": SOURCE, "plugins": {}, "config_hash": arm_hash,
            "run_hash": run_hash, "config_file": config_file_hash(config_yaml),
            "arm_hash": digest(arm_hash, (env or {}).get("source")) * 4, **(env or {}),
        }  # fmt: skip
        write_json(path / "env.json", environment)
        sizes = [16 + len(shape), 16]
        write_json(path / "init.json", {n: {"z": digest(stream, n, shape), "shape": sizes} for n in NAMES})
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        probes = {f"act/block_{b:03d}/resid/kurtosis_token": 3.0 + b + loss for b in range(2)}
        (path / "probes.jsonl").write_text(json.dumps({**end, **probes}) + "\n")
        if state == "finished":
            figures = {
                "val_loss": rows[-1]["val/loss"], "val_bpb": loss / 0.7, "unigram_bpb": 6.0, "params": 1000,
                "flops_per_token": 100.0,
                "steps": done, **end, "tokens_per_second": 3200.0, "peak_memory_bytes": 10**8,
                "batch_hash": rows[-1].get("batch_hash"), "eval_hash": evaluation,
                "arm_hash": environment["arm_hash"], "device": "cpu", "threads": 1,
                "act/resid/kurtosis_token": 3.0 + loss, "extrapolation": {"loss": {"16": loss + 0.1}},
            }  # fmt: skip
            write_json(path / "summary.json", figures | (summary or {}))
            if windows:
                (path / "evaluation.jsonl").write_text(evaluation_rows(windows, rows[-1]["val/loss"], text, blocks))
        self.paths.append(path)
        return path

    def arm(self, *overrides: str, losses: list[float], **options: Any) -> list[Path]:
        """A run for each loss, seeds from 0."""
        return [self.run(*overrides, seed=seed, loss=loss, **options) for seed, loss in enumerate(losses)]

    def plan(self, *arms: tuple[str, ...], **values: Any) -> None:
        """study.yaml: the overrides of each arm, or `arms` by name, and the other keys of a study."""
        plan = {
            "name": self.study.partition("@")[0],
            "question": "is it so?",
            "arms": {config_of(a)[1]: list(a) for a in arms},
            "seeds": [0, 1, 2, 3, 4],
        }
        (self.root / self.study).mkdir(parents=True, exist_ok=True)
        (self.root / self.study / "study.yaml").write_text(yaml.safe_dump(plan | values, sort_keys=False))

    def _rows(self, done: int, loss: float, stream: int, train_noise: str, batch: float):
        noise = np.random.default_rng([stream, *train_noise.encode()]).normal(0, 0.02, done + 1)
        chain = ""
        for step in range(0, done + 1, 2):
            value = loss + (5 - loss) * (1 - step / max(self.steps, 1)) ** 2
            row: dict[str, Any] = at(step, batch)
            if step:
                chain = digest(chain, stream, step)
                row |= {"train/loss": value + noise[step] + 0.01, "grad_norm/global": 1.0, "batch_hash": chain}
            if step % 40 == 0 or step == done:
                row["val/loss"] = value
            yield row


def evaluation_rows(windows: int, loss: float, text: tuple[float, ...], blocks: int = 8) -> str:
    """evaluation.jsonl of some blocks with a gap of 1000 tokens before each: noise common to all runs, and `text`."""
    block = np.arange(windows) * blocks // windows
    losses = np.random.default_rng(0).normal(0, 0.3, windows) + np.resize(text, blocks)[block]
    losses += loss - losses.mean()
    rows = (
        {"block": int(b), "offset": 8 * i + 1000 * int(b), "tokens": 8, "loss": float(value)}
        for i, (b, value) in enumerate(zip(block, losses, strict=True))
    )
    return "".join(json.dumps(row) + "\n" for row in rows)


def at(step: int, batch: float = 1.0) -> dict[str, Any]:
    return {"step": step, "tokens": int(32 * batch) * step, "flops": 3200.0 * batch * step, "seconds": step / 100}


def write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values))

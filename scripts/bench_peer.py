"""Our training step beside a peer's, same shape, in turn: `python scripts/bench_peer.py path/to/nanoGPT/model.py`.

Separate processes and page faults mislead by ten per cent: both live in one process and take blocks of steps in turn.
Ours is the step of a real run, with its default logging, gradient norms and probe; the peer's is its model, its
optimizer, and the loop of its train.py. The peer's code is not part of this repository.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

RECIPE = ["preset=nanogpt_shakespeare", "train.device=cpu", "train.steps=1000000", "train.eval_every=1000000"]


def ours(overrides: list[str], folder: str):
    """A trainer that is ready to take steps, and the function that takes one with everything that a run does."""
    from nexus_ablate.composition import compose
    from nexus_ablate.data import prepare
    from nexus_ablate.model import build_model
    from nexus_ablate.registry import Option
    from nexus_ablate.runs import identity, open_run
    from nexus_ablate.track import start_tracker
    from nexus_ablate.training.display import Display
    from nexus_ablate.training.signals import StopRequest
    from nexus_ablate.training.trainer import Trainer

    config = compose([*RECIPE, *overrides])
    data = prepare(config.data, context=config.model.context)
    run = open_run(Path(folder), "bench", "ours", 0, identity(config.science(), "bench", "0", {}), "", [], {})
    tracker = start_tracker(
        Option("files"), run_dir=run.path, config={}, axes={}, study="bench", arm="ours", seed=0, tags=[], say=print
    )
    model = build_model(config, data.vocab_size)
    trainer = Trainer(config, model, data, run, tracker, Display(quiet=True), StopRequest())
    model.train()
    return config, data, trainer.step_and_record


def peer(path: str, config, data):
    """nanoGPT's model, optimizer and loop body at the same shape."""
    import numpy as np
    import torch

    spec = importlib.util.spec_from_file_location("peer_model", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["peer_model"] = module
    spec.loader.exec_module(module)
    shape, context = config.model, config.model.context
    model = module.GPT(
        module.GPTConfig(
            context, data.vocab_size, shape.n_layers, shape.n_heads, shape.d_model, dropout=0.0, bias=False
        )
    )
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), "cpu")
    tokens = np.asarray(data.train)

    def batch():
        starts = torch.randint(len(tokens) - context, (config.train.batch_size,))
        x = torch.stack([torch.from_numpy(tokens[i : i + context].astype(np.int64)) for i in starts])
        y = torch.stack([torch.from_numpy(tokens[i + 1 : i + 1 + context].astype(np.int64)) for i in starts])
        return x, y

    def step():
        _, loss = model(*batch())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def seconds(step, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - start) / count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="path of nanoGPT's model.py")
    parser.add_argument("overrides", nargs="*", help="further overrides of ours, such as norm=rms or probe=off")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--blocks", type=int, default=20, help="pairs of blocks that are timed")
    parser.add_argument("--steps", type=int, default=50, help="steps in a block")
    asked = parser.parse_args()
    import torch

    from nexus_ablate.training.device import share_cores_politely

    share_cores_politely()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        config, data, our_step = ours(asked.overrides, folder)
        their_step = peer(asked.model, config, data)
        for threads in asked.threads:
            torch.set_num_threads(threads)
            seconds(our_step, asked.steps), seconds(their_step, asked.steps)
            pairs = [(seconds(our_step, asked.steps), seconds(their_step, asked.steps)) for _ in range(asked.blocks)]
            ratios = sorted(a / b for a, b in pairs)
            found[threads] = {
                "ours_ms": round(1000 * statistics.median(a for a, _ in pairs), 2),
                "peer_ms": round(1000 * statistics.median(b for _, b in pairs), 2),
                "ratio": round(statistics.median(ratios), 3),
                "ratio_quartiles": [round(ratios[len(ratios) // 4], 3), round(ratios[-1 - len(ratios) // 4], 3)],
            }
            print(f"{threads} thread(s): {json.dumps(found[threads])}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""DeepNorm's claim: it trains where post-norm stalls. Wang et al. 2022, arXiv:2203.00555, at a size for a CPU."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import nexus_ablate
from nexus_ablate.config.compose import compose
from nexus_ablate.data import Batches
from nexus_ablate.model import build_model
from nexus_ablate.optimizers import build_optimizer

SETTING = ["model.d_model=32", "model.n_heads=2", "model.context=32", "norm=layer", "init=xavier"]
SETTING += [
    "train.batch_size=8",
    "optim.lr=1e-3",
    "optim.warmup=20",
    "optim.schedule=constant",
    "optim.clip=off",
    "weight_decay=0",
]
STEPS, LAST = 200, 20


def characters() -> np.ndarray:
    """The package's own source as character ids."""
    text = "".join(path.read_text() for path in sorted(Path(nexus_ablate.__file__).parent.glob("*.py")))
    return np.unique(list(text), return_inverse=True)[1]


def losses(placement: str, n_layers: int, tokens: np.ndarray) -> list[float]:
    config = compose([*SETTING, f"placement={placement}", f"model.n_layers={n_layers}"])
    model = build_model(config, int(tokens.max()) + 1)
    optimizer = build_optimizer(model, config.optim, config.weight_decay)
    batches = Batches(tokens, config.seed, config.train.batch_size, config.model.context)
    results = []
    for step in range(STEPS):
        optimizer.set_learning_rate(config.schedule.rate(step, STEPS))
        window = torch.from_numpy(batches.batch(step))
        loss = torch.nn.functional.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        results.append(loss.item())
    return results


@pytest.mark.parametrize(
    "n_layers",
    [pytest.param(24, marks=pytest.mark.slow), pytest.param(100, marks=[pytest.mark.slow, pytest.mark.long])],
)
def test_post_norm_learns_less_than_a_fifth_of_what_deepnorm_learns(n_layers):
    tokens = characters()
    share = np.bincount(tokens) / len(tokens)
    unigram = -(share * np.log(share, where=share > 0, out=np.zeros_like(share))).sum()
    post, deep = (np.mean(losses(name, n_layers, tokens)[-LAST:]) for name in ("post", "deepnorm"))
    print(f"{n_layers} layers: unigram {unigram:.3f}, post {post:.3f}, deepnorm {deep:.3f} nats")
    assert math.isfinite(post)
    assert deep < unigram - 0.3
    assert unigram - post < 0.2 * (unigram - deep)

import pytest
import torch
from equivalences import EQUIVALENT
from tensors import TOKENS, next_token_loss

from nexus_ablate.model import build_model
from nexus_ablate.optimizers import build_optimizer


def logits_after(config, steps=3):
    """Logits at the start and after a few steps with the configuration's optimizer."""
    model = build_model(config, vocab_size=11)
    optimizer = build_optimizer(model, config.optim, config.weight_decay)
    outputs = [model(TOKENS).detach()]
    for _ in range(steps):
        loss = next_token_loss(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [*outputs, model(TOKENS).detach()]


def both(tiny, pair, *overrides):
    small = ("init=gpt2",) if "ffn=gelu" in pair.first else ()  # at which an approximation hardly differs
    return (logits_after(tiny(*small, *side, *overrides)) for side in (pair.first, pair.second))


@pytest.mark.parametrize("pair", EQUIVALENT, ids=lambda e: " is ".join(",".join(side) for side in (e.first, e.second)))
def test_a_declared_pair_computes_the_same_before_and_after_training(tiny, pair):
    for one, other in zip(*both(tiny, pair, "weight_decay=0"), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


@pytest.mark.parametrize("pair", EQUIVALENT, ids=lambda e: " is ".join(",".join(side) for side in (e.first, e.second)))
def test_decay_of_everything_parts_the_pairs_that_say_so_and_no_other(tiny, pair):
    first, second = both(tiny, pair, "optim.decay=all", "weight_decay=100")
    same = torch.allclose(first[-1], second[-1], rtol=0, atol=1e-4)
    assert same is (pair.until == "always")

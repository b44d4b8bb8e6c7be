"""The regime of a run: what its budget lets it show, before anything is spent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nexus_ablate.config.grammar import factors_by_role
from nexus_ablate.config.roles import BLOCKS
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.errors import ConfigError

SHORT = 1 / 5
"""A run that is a smaller share of the decay timescale ends before decay has taken a fifth of any weight."""
EPOCHS = 4
"""Up to here repeated text is about as good as new text. Muennighoff et al. 2023, arXiv:2305.16264."""
EARLY = 10
"""Tokens per parameter below which a difference is mostly one of how early something is learned."""
LEARNED = 0.1
"""Of the way from the loss of a unigram model to 0 (in a synthetic task from guessing to perfect)."""
UNLEARNED = (
    "is not clearly better than knowing how frequent each token is (its loss is above 0.9 of a unigram model's): "
    "nothing can be compared with it; try train.steps=auto, and optim.lr=auto"
)
"""What to say of a configuration for which `has_learned` is false."""


@dataclass(frozen=True)
class Regime:
    """What a run can show.

    Attributes:
        params: Outside the tables: of the blocks, and of a head of its own.
        text_tokens: Training tokens of the text; None if it has not been tokenized here, or the run didn't record them.
        decay_steps: 1 / (lr x weight_decay), or 1 / weight_decay where it is independent of the rate: the steps over
            which AdamW averages its updates into the weights (Wang & Aitchison 2024, arXiv:2405.13698), for the matrix
            of a block that decays fastest; infinite without weight decay.
    """

    params: int
    tokens: int
    steps: int
    text_tokens: int | None
    decay_steps: float

    @property
    def epochs(self) -> float | None:
        """How often the run reads the text."""
        return self.tokens / self.text_tokens if self.text_tokens else None

    def __str__(self) -> str:
        epochs = "epochs unknown (the text's tokens are not counted)"
        if self.epochs is not None:
            epochs = f"{_short(self.epochs)} epochs"
        decay = "no weight decay"
        if math.isfinite(self.decay_steps):
            decay = f"weight decay: {f'active {self._time_of_decay}' if self.decay_matters else 'barely active'}"
        return f"{_short(self.tokens / self.params)} tokens per parameter, {epochs}; {decay}"

    @property
    def decay_matters(self) -> bool:
        """Whether the run is long enough for its weight decay to matter."""
        return math.isfinite(self.decay_steps) and self.steps >= SHORT * self.decay_steps

    @property
    def _time_of_decay(self) -> str:
        return f"(time scale {self.decay_steps:,.0f} steps, run {self.steps:,})"

    def warnings(self) -> list[str]:
        """What the budget rules out."""
        lines = []
        if math.isfinite(self.decay_steps) and not self.decay_matters:
            enough = math.ceil(SHORT * self.decay_steps)
            lines.append(f"weight decay is barely active {self._time_of_decay}; it matters from {enough:,} steps on")
        if self.epochs is not None and self.epochs > EPOCHS:
            lines.append(
                f"the run reads the text {_short(self.epochs)} times; above {EPOCHS} it measures memorization too"
            )
        ratio = self.tokens / self.params
        if 0 < ratio < EARLY:
            steps = math.ceil(EARLY * self.params * self.steps / self.tokens)
            lines.append(
                f"{_short(ratio)} tokens per parameter is early training, where orders may reverse; try {_steps(steps)}"
            )
        return lines


def has_learned(losses: Sequence[float], unigram: float) -> bool:
    """Whether runs of one configuration learned more than how frequent each token is.

    Their mean loss must lie below 0.9 of the unigram entropy, and at least half of them must.

    Args:
        losses: Final validation losses, of at least one run; one that is not finite counts as the unigram entropy.
        unigram: The unigram entropy of the validation text in the same unit; of a synthetic task that of its answers,
            which is the loss of guessing.
    """
    limit = (1 - LEARNED) * unigram
    counted = [loss if math.isfinite(loss) else unigram for loss in losses]
    below = [loss for loss in counted if loss < limit]
    return math.fsum(counted) / len(counted) < limit and 2 * len(below) >= len(counted)


def check_passes(config: RunConfig, text_tokens: int) -> None:
    """Check that a budget in tokens reads the text at most EPOCHS times. A budget in steps is taken as it is.

    Args:
        text_tokens: Training tokens of the text.

    Raises:
        ConfigError: The text is too short.
    """
    train, per_step = config.train, config.resolved.tokens_per_step
    if (train.tokens == "auto" and train.steps != "auto") or train.flops != "auto":
        return
    tokens = (config.resolved.steps or 0) * per_step
    if tokens <= EPOCHS * text_tokens:
        return
    problem = f"the run would read its text {tokens / text_tokens:.3g} times; new text is worth more from {EPOCHS} on"
    asked = "train.steps=auto" if train.tokens == "auto" else f"train.tokens={train.tokens}"
    got = f"{asked} is {tokens:,} tokens at model={config.model.name}, data={config.data.name} has {text_tokens:,}"
    most = max(1, EPOCHS * text_tokens // per_step)
    raise ConfigError(problem, got, f"train.steps={most}, or data=tinystories, or more text in data.files")


def _short(number: float) -> str:
    """Three digits, and never an exponent above 1: `0.00123`, `19.6`, `5,430`."""
    return f"{float(f'{number:.3g}'):,.12g}"


def _steps(steps: int) -> str:
    """The override for about so many steps, rounded up to two digits."""
    unit = 10 ** max(0, len(str(steps)) - 2)
    return f"train.steps={-(-steps // unit) * unit}"


def regime_of(config: RunConfig, params: int, steps: int, text_tokens: int | None) -> Regime:
    """The regime of a run.

    Args:
        params: Those outside the tables.
        steps: Optimizer steps.
    """
    tokens = steps * config.resolved.tokens_per_step
    return regime_from(config.weight_decay, config.optim.keys, params, tokens, steps, text_tokens)


def regime_from(
    weight_decay: float, optim: Mapping[str, Any], params: int, tokens: int, steps: int, text_tokens: int | None
) -> Regime:
    """The regime of a run whose configuration is plain values; `optim` has the keys of the optimizer."""
    by_role, coupled = factors_by_role(optim["groups"]), optim["decay_mode"] == "coupled"
    factors = [by_role.get(role, {}) for role in BLOCKS]
    strongest = max(own.get("weight_decay", 1.0) * (own.get("lr", 1.0) if coupled else 1.0) for own in factors)
    pull = weight_decay * strongest * (optim["lr"] if coupled else 1.0)
    return Regime(params, tokens, steps, text_tokens, decay_steps=1 / pull if pull else math.inf)

"""The regime of a run: tokens per parameter, epochs over the text, the timescale of weight decay beside its length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nexus_ablate.config.grammar import factors_by_role
from nexus_ablate.config.roles import BLOCKS
from nexus_ablate.config.run_config import RunConfig

SHORT = 1 / 5
"""A run that is a smaller share of the decay timescale ends before decay has taken a fifth of any weight."""
EPOCHS = 4
"""Up to here repeated text is about as good as new text. Muennighoff et al. 2023, arXiv:2305.16264."""
LEARNED = 0.1
"""Of the way from the loss of a unigram model to 0 (in a synthetic task from guessing to perfect)."""


@dataclass(frozen=True)
class Regime:
    """Counts that say what a run can show.

    Attributes:
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
            decay = f"decay timescale 1/(lr x weight_decay) {self.decay_steps:,.0f} steps, the run {self.steps:,}"
        return f"{_short(self.tokens / self.params)} tokens per parameter, {epochs}; {decay}"

    @property
    def decay_matters(self) -> bool:
        """Whether the run is long enough for its weight decay to matter."""
        return math.isfinite(self.decay_steps) and self.steps >= SHORT * self.decay_steps

    @property
    def idle_decay(self) -> str:
        """Why weight decay can hardly matter."""
        share = self.steps / self.decay_steps
        return f"the run is {share:.2g} of the decay timescale: weight decay can hardly matter (from {SHORT:g} on)"

    def warnings(self) -> list[str]:
        """What the budget rules out."""
        lines = [] if self.decay_matters or math.isinf(self.decay_steps) else [self.idle_decay]
        if self.epochs is not None and self.epochs > EPOCHS:
            lines.append(
                f"the run reads the text {_short(self.epochs)} times: it measures memorization too (from {EPOCHS} on)"
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


def _short(number: float) -> str:
    """Two digits, and never an exponent above 1: `0.0012`, `540`."""
    return f"{float(f'{number:.2g}'):,.12g}"


def regime_of(config: RunConfig, params: int, steps: int, text_tokens: int | None) -> Regime:
    """The regime of a run.

    Args:
        params: All parameters.
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
    return Regime(params, tokens, steps, text_tokens, 1 / pull if pull else math.inf)


def too_short_to_vary_decay(baseline: Regime, varied: Sequence[Regime]) -> str:
    """Why no difference between arms that vary weight decay can be large; '' where the strongest decay can matter."""
    strongest = min((*varied, baseline), key=lambda regime: regime.decay_steps)
    return "" if strongest.decay_matters else f"even at the strongest decay {strongest.idle_decay}"

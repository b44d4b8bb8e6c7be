"""The regime of a run: what its budget, schedule and initial values let it show, before anything is spent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nexus_ablate.config.grammar import factors_by_role
from nexus_ablate.config.roles import BLOCKS
from nexus_ablate.config.run_config import RunConfig, Schedule
from nexus_ablate.errors import ConfigError

SHORT = 1 / 5
"""A run that is a smaller share of the decay timescale ends before decay has taken a fifth of any weight."""
EPOCHS = 4
"""Up to here repeated text is about as good as new text. Muennighoff et al. 2023, arXiv:2305.16264."""
EARLY = 10
"""Tokens per parameter below which a difference is mostly one of how early something is learned."""
FARTHEST = 2.0
"""Sum of learning rates from which a table's entry or a scalar can reach the values of ALiBi, or double a scale."""
NEARLY_LINEAR = 0.05
"""Share of an activation's variance below which a line would do. SiLU's is 3% at a standard deviation of 0.23."""
UNEQUAL = 10
"""Factor between the embedding and a branch from which one of them hardly counts in the first block."""
LEARNED = 0.1
"""Of the way from the loss of a unigram model to 0 (in a synthetic task from guessing to perfect)."""
UNLEARNED = (
    "is not clearly better than knowing how frequent each token is (its loss is above 0.9 of a unigram model's): "
    "nothing can be compared with it; try train.steps=auto, and optim.lr=auto"
)
"""What to say of a configuration for which `has_learned` is false."""


@dataclass(frozen=True)
class InitialSignal:
    """The signal in the first block of a model before its first step.

    Attributes:
        activation_sd: Standard deviation of what the FFN's activation sees; None if the FFN is no such layer.
        nonlinear: The share of the activation's variance that is not linear in its input; None likewise.
        nonlinear_at_1: The same at a standard deviation of 1.
        embedding_rms: Of the residual stream before the first block.
        branch_rms: Of what the first FFN changes in the residual stream, by its placement's norms and factors.
        sum_is_normed: A norm stands behind their sum, so the scale of the embedding does not count.
    """

    activation_sd: float | None
    nonlinear: float | None
    nonlinear_at_1: float | None
    embedding_rms: float
    branch_rms: float
    sum_is_normed: bool = False

    def __str__(self) -> str:
        text = f"embedding RMS {_short(self.embedding_rms)}, FFN branch {_short(self.branch_rms)}"
        if self.activation_sd is None or self.nonlinear is None:
            return text
        return f"activation input SD {_short(self.activation_sd)} ({self.nonlinear:.0%} nonlinear), {text}"

    def warnings(self) -> list[str]:
        """What is too small to act at the start."""
        lines = []
        if self.nonlinear is not None and self.nonlinear < NEARLY_LINEAR <= (self.nonlinear_at_1 or 0):
            lines.append(
                f"the FFN starts nearly linear: its activation sees an SD of {_short(self.activation_sd or 0)}, where "
                f"{self.nonlinear:.1%} of its output is not linear (at an SD of 1, as under init=fan_in, "
                f"{self.nonlinear_at_1:.0%})"
            )
        large, small = max(self.embedding_rms, self.branch_rms), min(self.embedding_rms, self.branch_rms)
        if large > UNEQUAL * small > 0 and not self.sum_is_normed:
            sides = ("the embedding", "the first FFN's output")
            larger, smaller = sides if self.branch_rms == small else reversed(sides)
            lines.append(
                f"{larger} starts {large / small:.0f} times as large as {smaller} (RMS {_short(large)} and "
                f"{_short(small)}), which hardly counts beside it; try another embed_scale"
            )
        return lines


@dataclass(frozen=True)
class Regime:
    """What a run can show.

    Attributes:
        params: Outside the tables: of the blocks, and of a head of its own.
        text_tokens: Training tokens of the text; None if it has not been tokenized here, or the run didn't record them.
        decay_steps: 1 / (lr x weight_decay), or 1 / weight_decay where it is independent of the rate: the steps over
            which AdamW averages its updates into the weights (Wang & Aitchison 2024, arXiv:2405.13698), for the matrix
            of a block that decays fastest; infinite without weight decay.
        schedule: Of the learning rate.
        moves_by_rate: Whether a step of the optimizer moves an entry by the learning rate at most, as Adam's does.
        initial: The signal before the first step, if it is known.
    """

    params: int
    tokens: int
    steps: int
    text_tokens: int | None
    decay_steps: float
    schedule: Schedule
    moves_by_rate: bool
    initial: InitialSignal | None = None

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
            decay = f"weight decay: {'active' if self.decay_matters else 'barely active'} {self._time_of_decay}"
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
        if self.steps:
            lines += [*self._budget(), *self._rates()]
        return lines + (self.initial.warnings() if self.initial else [])

    def _budget(self) -> list[str]:
        ratio = self.tokens / self.params
        if ratio >= EARLY:
            return []
        steps = math.ceil(EARLY * self.params * self.steps / self.tokens)
        return [
            f"{_short(ratio)} tokens per parameter is early training, where orders may reverse; try {_steps(steps)}"
        ]

    def _rates(self) -> list[str]:
        warmup, total = self.schedule.warmup_steps(self.steps), self.schedule.rate_sum(self.steps)
        if warmup >= self.steps:
            return [
                f"the warm-up of {warmup:,} steps is as long as the run ({self.steps:,} steps), whose learning rate "
                f"never reaches {self.schedule.lr:g}; try optim.warmup=auto"
            ]
        if total >= FARTHEST or not self.moves_by_rate:
            return []
        steps = math.ceil(self.steps * FARTHEST / total)
        return [
            f"learned scales, biases and table entries can move by at most {_short(total)} (the sum of the learning "
            f"rates); they need about {FARTHEST:g}; try {_steps(steps)}"
        ]


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
    if train.steps != "auto" or train.flops != "auto":
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
    """Two digits, and never an exponent above 1: `0.0012`, `540`."""
    return f"{float(f'{number:.2g}'):,.12g}"


def _steps(steps: int) -> str:
    """The override for about so many steps, rounded up to two digits."""
    unit = 10 ** max(0, len(str(steps)) - 2)
    return f"train.steps={-(-steps // unit) * unit}"


def regime_of(
    config: RunConfig, params: int, steps: int, text_tokens: int | None, initial: InitialSignal | None = None
) -> Regime:
    """The regime of a run.

    Args:
        params: Those outside the tables.
        steps: Optimizer steps.
    """
    tokens = steps * config.resolved.tokens_per_step
    return regime_from(config.weight_decay, config.optim.keys, params, tokens, steps, text_tokens, initial)


def regime_from(
    weight_decay: float,
    optim: Mapping[str, Any],
    params: int,
    tokens: int,
    steps: int,
    text_tokens: int | None,
    initial: InitialSignal | None = None,
) -> Regime:
    """The regime of a run whose configuration is plain values; `optim` has the keys of the optimizer."""
    by_role, coupled = factors_by_role(optim["groups"]), optim["decay_mode"] == "coupled"
    factors = [by_role.get(role, {}) for role in BLOCKS]
    strongest = max(own.get("weight_decay", 1.0) * (own.get("lr", 1.0) if coupled else 1.0) for own in factors)
    pull = weight_decay * strongest * (optim["lr"] if coupled else 1.0)
    decay_steps = 1 / pull if pull else math.inf
    return Regime(params, tokens, steps, text_tokens, decay_steps, Schedule.of(optim), "beta2" in optim, initial)

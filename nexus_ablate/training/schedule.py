"""The learning rate of each step."""

from __future__ import annotations

import math

from nexus_ablate.config.run_config import Schedule


def learning_rate(config: Schedule, step: int, steps: int) -> float:
    """The learning rate of step 0 .. steps - 1: linear warm-up, then the schedule down to `final_lr` of the peak."""
    warmup = config.warmup_steps(steps)
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    if config.schedule == "constant":
        return config.lr
    first = max(warmup, steps - round(config.cooldown * steps)) if config.schedule == "wsd" else warmup
    progress = min(1.0, max(0.0, (step - first) / max(1, steps - first)))
    left = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    return config.lr * (config.final_lr + (1 - config.final_lr) * left)

"""The progress of a run: everything that changes during training besides the model and the optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

MEASURED = ("last_val", "probed", "interval_figures")
"""Fields whose values can be infinite or NaN (a ratio to a median of 0); JSON stores such a number as text."""


@dataclass
class Progress:
    """Counters of a run; a checkpoint stores every field."""

    step: int = 0
    seconds: float = 0.0
    aside: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("eval", "probe", "checkpoint", "compile"), 0.0)
    )
    batch_hash: str = ""
    interval_loss: float = 0.0
    interval_bytes: float = 0.0
    interval_figures: dict[str, float] = field(default_factory=dict)
    interval_steps: int = 0
    final_loss: float = 0.0  # the sum over the steps of the last tenth
    best_val_loss: float | None = None
    last_val: dict[str, float] = field(default_factory=dict)
    probed: dict[str, float] = field(default_factory=dict)
    loss_scale: float = 65536.0
    loss_scale_steps: int = 0

    def saved(self) -> dict[str, Any]:
        """The fields as values that strict JSON can store."""
        state = dict(vars(self))
        for name in MEASURED:
            state[name] = {k: v if math.isfinite(v) else str(v) for k, v in state[name].items()}
        return state

    @classmethod
    def restored(cls, state: dict[str, Any]) -> Progress:
        """The inverse of `saved`."""
        state = dict(state)
        for name in MEASURED:
            state[name] = {k: float(v) if isinstance(v, str) else v for k, v in state[name].items()}
        return cls(**state)

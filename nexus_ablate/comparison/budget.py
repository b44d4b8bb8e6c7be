"""What the budget of a comparison's runs can show: the regime that `plan` states before they are trained."""

from __future__ import annotations

import math

from nexus_ablate.comparison.arms import Arm
from nexus_ablate.comparison.load import Trained
from nexus_ablate.config.options import COMMON_KEYS, LATER
from nexus_ablate.measure.regime import EARLY, Regime, regime_from


def regime_lines(baseline: Arm) -> list[str]:
    """The baseline's regime, then what it rules out; [] where its runs don't say."""
    regime = _regime(baseline)
    if regime is None:
        return []
    lines = [f"regime: {regime}"]
    for warning in regime.warnings():
        lines.append(f"WARN regime: {warning}")
    return lines


def _regime(arm: Arm) -> Regime | None:
    """Of an arm's finished runs; None where there is none, or an older version left out what it takes."""
    tokens, steps, text = (arm.mean(name) for name in ("tokens", "steps", "train_tokens"))
    params = arm.mean("params_non_embedding") or arm.mean("params")
    optim = LATER["optim"] | (arm.config.get("optim") or {})
    weight_decay = arm.config.get("weight_decay")
    if not params or not tokens or not steps or weight_decay is None or COMMON_KEYS["optim"].keys() - optim.keys():
        return None
    text = int(text) if text else None
    return regime_from(weight_decay, optim, int(params), int(tokens), int(steps), text)


def is_early(arm: Arm, baseline: Arm) -> bool:
    """Whether the baseline's budget is below EARLY for each parameter in the blocks of either."""
    tokens = baseline.mean("tokens")
    params = [block_parameters(run) for each in (arm, baseline) for run in list(each.runs.values())[:1]]
    return tokens is not None and bool(params) and tokens < EARLY * max(params)


def block_parameters(run: Trained) -> float:
    """Parameters of a run's blocks that a token passes through: of a mixture of experts, its active ones."""
    ffn = run.config.get("ffn") or {}
    active = ffn["active"] / ffn["experts"] if ffn.get("active") and ffn.get("experts") else 1.0
    total = 0.0
    for name, (_, shape) in run.init.items():
        if name.startswith("blocks.") and shape is not None:
            is_experts = ".ffn." in name and len(shape) == 3
            total += math.prod(shape) * (active if is_experts else 1.0)
    return total

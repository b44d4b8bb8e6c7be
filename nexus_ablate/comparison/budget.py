"""What the budget of a comparison's runs can show: the regime that `plan` states before they are trained."""

from __future__ import annotations

from collections.abc import Sequence

from nexus_ablate.comparison.arms import Arm
from nexus_ablate.comparison.differences import differing
from nexus_ablate.config.options import COMMON_KEYS, LATER
from nexus_ablate.measure.regime import InitialSignal, Regime, regime_from, too_short_to_vary_decay

VARY_DECAY = {"weight_decay", "optim.decay"}


def regime_lines(arms: Sequence[Arm]) -> list[str]:
    """The baseline's regime, then what it rules out; [] where its runs don't say.

    Args:
        arms: The baseline first.
    """
    regimes = {arm.label: regime for arm in arms if (regime := _regime(arm)) is not None}
    base = arms[0]
    if base.label not in regimes:
        return []
    own = regimes[base.label]
    varied = [arm.label for arm in arms[1:] if arm.runs and VARY_DECAY & differing(arm.config, base.config).keys()]
    why = too_short_to_vary_decay(own, [regimes[label] for label in varied if label in regimes])
    warnings = [f"WARN regime: {line}" for line in own.warnings()]
    return [
        f"regime: {own}",
        *warnings,
        *([f"WARN weight decay is varied: {', '.join(varied)}: {why}"] if varied and why else []),
    ]


def _regime(arm: Arm) -> Regime | None:
    """Of an arm's finished runs; None where there is none, or an older version left out what it takes."""
    tokens, steps, text = (arm.mean(name) for name in ("tokens", "steps", "train_tokens"))
    params = arm.mean("params_non_embedding") or arm.mean("params")
    optim = LATER["optim"] | (arm.config.get("optim") or {})
    weight_decay = arm.config.get("weight_decay")
    if not params or not tokens or not steps or weight_decay is None or COMMON_KEYS["optim"].keys() - optim.keys():
        return None
    figures = next((run.record.summary or {} for run in arm.runs.values()), {}).get("initial")
    initial = InitialSignal(**figures) if figures else None
    text = int(text) if text else None
    return regime_from(weight_decay, optim, int(params), int(tokens), int(steps), text, initial)

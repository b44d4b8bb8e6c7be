"""Matches arms to the baseline's parameters, FLOPs per token, tokens or seconds as closely as possible.

Parameters and FLOPs are matched by the width of the FFN, or by the depth if the arm sets the width itself; tokens and
seconds by the budget. The remaining difference is recorded with the arm.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from fractions import Fraction

from nexus_ablate.comparison.fairness import MISMATCH_FAIL
from nexus_ablate.config.resolve import changed
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.errors import ConfigError, printable
from nexus_ablate.planning.cost import cost_of, measured_speed, vocabulary
from nexus_ablate.study.arm_overrides import BUDGETS, key_of
from nexus_ablate.study.schema import ArmMatch, Match

UNITS = {"params": "parameters", "flops": "FLOPs per token", "tokens": "tokens", "seconds": "seconds of training"}


def solve(kind: Match, baseline: RunConfig, overrides: list[str], config: RunConfig) -> ArmMatch:
    """How an arm with these overrides and this configuration is made equal to the baseline.

    Raises:
        ConfigError: The baseline's amount cannot be matched within 5%.
    """
    if kind in ("params", "flops"):
        target, got, solved = _size(kind, baseline, overrides, config)
    else:
        target, got, solved = _budget(kind, baseline, overrides, config)
    residual = got / target - 1
    if abs(residual) > MISMATCH_FAIL:
        problem = f"the arm cannot match the baseline's {UNITS[kind]}: the nearest is {residual:+.1%}"
        typed = any(key_of(text) == "d_ff_ratio" for text in overrides)
        fix = "match=none, or leave d_ff_ratio to be solved" if typed else "match=none, or model.d_ff_multiple=1"
        raise ConfigError(problem, f"{got:,.0f} against {target:,.0f}", fix)
    return ArmMatch(kind=kind, target=target, got=got, residual=residual, solved=solved)


def _size(kind: str, baseline: RunConfig, overrides: list[str], config: RunConfig) -> tuple[float, float, list[str]]:
    named = {key_of(text) for text in overrides}
    target, model = _amount(kind, baseline), config.model
    if "d_ff_ratio" not in named:
        start = config.resolved.d_ff // model.d_ff_multiple

        def sized(n: int) -> tuple[str, RunConfig]:
            ratio = str(Fraction(n * model.d_ff_multiple, model.d_model))
            return f"d_ff_ratio={ratio}", changed(config, d_ff_ratio=ratio)
    elif "model.n_layers" not in named:
        start = model.n_layers

        def sized(n: int) -> tuple[str, RunConfig]:
            return f"model.n_layers={n}", changed(config, model=replace(model, n_layers=n))
    else:
        return target, _amount(kind, config), []
    first, second = (_amount(kind, sized(n)[1]) for n in (start, start + 1))
    best = max(1, start + round((target - first) / (second - first)))  # the amount grows linearly
    override, nearest = sized(best)
    return target, _amount(kind, nearest), [] if best == start else [override]


def _amount(kind: str, config: RunConfig) -> float:
    from nexus_ablate.measure.counts import flops_per_token, parameters
    from nexus_ablate.model import countable_model

    vocab_size = vocabulary(config)
    if kind == "params":
        return parameters(countable_model(config, vocab_size))[0]
    return flops_per_token(config, vocab_size)


def _budget(kind: str, baseline: RunConfig, overrides: list[str], config: RunConfig) -> tuple[float, float, list[str]]:
    cost, base_cost = cost_of(config), cost_of(baseline)
    per_step = config.resolved.tokens_per_step
    target = tokens = base_cost.tokens
    speed = None
    if kind == "seconds":
        arm = printable(" ".join(overrides))
        print(f"match=seconds: measuring steps of the baseline and of {arm}", file=sys.stderr)
        base_speed, speed = measured_speed(baseline, threads=1), measured_speed(config, threads=1)
        if base_speed is None or speed is None:
            problem = "match=seconds needs a speed, and one step takes too long to measure"
            raise ConfigError(problem, "match=seconds", "match=flops")
        target = base_cost.tokens / base_speed
        tokens = target * speed
    steps = cost.steps
    if not any(key_of(text) in BUDGETS for text in overrides):
        steps = max(1, round(tokens / per_step))
    got = steps * per_step
    if speed:
        got = got / speed
    return target, got, [] if steps == cost.steps else [f"train.steps={steps}"]

"""The required form of the files of a run and a study, in the notation of `plain_data.misfit`.

A key may be missing unless it ends in `!`, since older versions didn't write it. A non-finite number is null.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

from nexus_ablate.plain_data import LARGEST, misfit
from nexus_ablate.runs.ownership import STATES


def _is_time(value: Any) -> bool:
    try:
        return type(value) is str and datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < LARGEST


def _one_of(*words: str) -> Callable[[Any], bool]:
    return lambda value: type(value) is str and value in words


def _is_by_head(value: Any) -> bool:
    return type(value) is list and bool(value) and not misfit(value, [_MEASURED])


_MEASURED = (float, None)
_TEXT = (str, None)
_CHANGED = {"loss!": _MEASURED, "attn/first_token_mass!": _MEASURED, "act/resid/max_over_median!": _MEASURED}

CONDITION = re.compile(r"(>=|<=) *(-?\d+(?:\.\d+)?(?:e-?\d+)?)")
"""What a study can require of its baseline."""

STATUS = {
    **{"state!": _one_of(*STATES), "host!": str, "pid!": int, "heartbeat!": _is_time},
    **{"reason": str, "traceback": str, "step": (_is_count, None)},
    **{"started": (_is_time, None), "updated": _is_time},
}
CONFIG = {
    "seed": _is_count,
    "model": {"d_model": _is_count},
    "optim": {"lr": _is_positive},
    "tracker": {"name": str},
    "resolved": {"steps": (_is_count, None), "notes": [str]},
}
ENV = {
    **{"git_commit": _TEXT, "arm_hash": _TEXT, "config_hash": _TEXT, "packages": {str: _TEXT}},
    **{"source": ({str: str}, None), "plugins": ({str: {"sha256": str}}, None), "earlier": [{}]},
}
SUMMARY = {
    **dict.fromkeys(("val_loss", "val_bpb", "best_val_loss", "train_loss", "generalization_gap"), _MEASURED),
    **dict.fromkeys(("weight_rms/global", "act/resid/mean_over_rms", "act/resid/first_norm_ratio"), _MEASURED),
    **{f"attn/{vector}/first_norm_ratio": _MEASURED for vector in ("query", "key", "value")},
    **dict.fromkeys(("act/resid/kurtosis_token", "act/resid/max_over_median", "act/resid/max_abs"), _MEASURED),
    **dict.fromkeys(("attn/sink_rate", "attn/first_token_mass", "attn/entropy"), _MEASURED),
    **dict.fromkeys(("seconds", "seconds_eval", "seconds_probe", "seconds_checkpoint", "flops"), float),
    **dict.fromkeys(("tokens_per_second", "flops_per_token", "peak_memory_bytes"), float),
    **dict.fromkeys(("steps", "tokens", "params", "params_non_embedding", "train_tokens"), _is_count),
    **dict.fromkeys(("batch_hash", "eval_hash", "arm_hash"), _TEXT),
    "unigram_bpb": _is_positive,
    "onsets": {str: {"step!": _is_count, "tokens": _is_count}},
    "extrapolation": {
        "non_overlapping": {str: _MEASURED},
        "sliding": {str: _MEASURED},
        "not_defined": ({str: str}, str),
    },
    "streaming": {"kept_tokens": int, **dict.fromkeys(("loss_kept", "loss_dropped", "difference"), _MEASURED)},
    "quantization": {"loss": _MEASURED, "schemes": {str: {"gap!": _MEASURED}}, "worst_block": int},
    "intervention": {str: (_CHANGED, float, bool, str)},
}
ROW = {
    **{"step!": _is_count, "tokens!": _is_count, "flops!": float, "seconds!": float},
    **{"batch_hash": str, "nonfinite": [str], str: (float, None, _is_by_head)},
}
INIT = {str: ({"z!": str, "shape!": [_is_count]}, str)}
PLACE = {"id!": str, "project!": str, "entity": _TEXT}
SUBMISSION = {"jobs!": {str: str}}
JOB_ANSWER = {"reason": str}

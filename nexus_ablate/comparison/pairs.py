"""Two runs of one seed, held against each other: are they a pair, are they the same, who was lower at what cost."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nexus_ablate.comparison.curves import AXES, common_batches
from nexus_ablate.comparison.load import Trained
from nexus_ablate.provenance import differ, differing_files


def same_curves(one: Trained, other: Trained) -> bool:
    """Whether two runs have the same losses to the last bit."""
    a, b = one.curves, other.curves
    return len(a.val) > 0 and all(np.array_equal(x, y, equal_nan=True) for x, y in ((a.val, b.val), (a.train, b.train)))


def unlike_batches(ours: Trained, theirs: Trained) -> str:
    """Why two runs did not see the same batches, or ''. Runs of different length compare on what both saw."""
    a, b = (run.record.summary or {} for run in (ours, theirs))
    if a.get("batch_hash") and a.get("batch_hash") == b.get("batch_hash"):
        return ""
    if a.get("batch_hash") and b.get("batch_hash") and a.get("steps") == b.get("steps"):
        return "other batches"
    common = common_batches(ours.record.path / "metrics.jsonl", theirs.record.path / "metrics.jsonl")
    if common is None:
        return "no batch hash in common"
    step, agree = common
    return "" if agree else f"other batches before step {step}"


def unlike_code(ours: Trained, theirs: Trained) -> str:
    """How the code that made two runs differs, or ''."""
    if ours.code is None and theirs.code is None and ours.source != theirs.source:
        return f"{ours.source} and {theirs.source}"
    files = differing_files(ours.code, theirs.code)
    return differ(files) if files else ""


def unlike_plugins(ours: Trained, theirs: Trained) -> str:
    """The plugins of one name that two runs used and that differ, or ''."""
    files = differing_files(dict(ours.plugins), dict(theirs.plugins))
    return differ(files) if files else ""


def shared_init(ours: Trained, theirs: Trained) -> tuple[int, int]:
    """Parameters whose first values come from the same normal numbers, and parameters of the same name.

    The numbers are a function of (seed, name, shape), so that names which do not agree must have other shapes.
    """
    names = ours.init.keys() & theirs.init.keys()
    return sum(ours.init[name][0] == theirs.init[name][0] for name in names), len(names)


def unlike_init(ours: Trained, theirs: Trained) -> list[str]:
    """Parameters of the same name and shape that began with other numbers; an unknown shape is not the same."""
    names = [name for name in theirs.init if name in ours.init]
    pairs = [(name, ours.init[name], theirs.init[name]) for name in names]
    return [name for name, (z, shape), other in pairs if shape is not None and shape == other[1] and z != other[0]]


def at_equal(axis: str) -> Callable[[Trained, Trained], float]:
    """The difference of two runs' validation losses at the largest budget that both reached."""
    assert axis in AXES

    def difference(ours: Trained, theirs: Trained) -> float:
        if not len(ours.curves.val) or not len(theirs.curves.val):
            return float("nan")
        budget = min(getattr(run.curves, axis)[-1] for run in (ours, theirs))
        return ours.curves.at(axis, budget) - theirs.curves.at(axis, budget)

    return difference


def log_token_ratio(ours: Trained, theirs: Trained) -> float:
    """Log of (arm's tokens / baseline's tokens) to the higher of their two final losses, which both reached."""
    if not len(ours.curves.val) or not len(theirs.curves.val):
        return float("nan")
    target = max(ours.curves.val[-1], theirs.curves.val[-1])
    tokens = ours.curves.tokens_to(target), theirs.curves.tokens_to(target)
    return float(np.log(tokens[0] / tokens[1])) if min(tokens) > 0 else float("nan")

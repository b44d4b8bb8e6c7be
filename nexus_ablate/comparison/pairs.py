"""Comparing two runs of one seed: whether they form a pair, whether they are identical, and their difference."""

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


def unlike_batches(run: Trained, twin: Trained) -> str:
    """Why two runs did not see the same batches, or ''. Runs are compared up to the end of the shorter one."""
    a, b = (each.record.summary or {} for each in (run, twin))
    if a.get("batch_hash") and a.get("batch_hash") == b.get("batch_hash"):
        return ""
    if a.get("batch_hash") and b.get("batch_hash") and a.get("steps") == b.get("steps"):
        return "other batches"
    common = common_batches(run.record.path / "metrics.jsonl", twin.record.path / "metrics.jsonl")
    if common is None:
        return "no batch hash in common"
    step, agree = common
    return "" if agree else f"other batches before step {step}"


def unlike_code(run: Trained, twin: Trained) -> str:
    """How the code that made two runs differs, or ''."""
    if run.code is None and twin.code is None and run.source != twin.source:
        return f"{run.source} and {twin.source}"
    files = differing_files(run.code, twin.code)
    return differ(files) if files else ""


def unlike_plugins(run: Trained, twin: Trained) -> str:
    """Plugins that both runs used under the same name but with different content, or ''."""
    files = differing_files(dict(run.plugins), dict(twin.plugins))
    return differ(files) if files else ""


def shared_init(run: Trained, twin: Trained) -> tuple[int, int]:
    """Parameters whose first values come from the same normal numbers, and parameters of the same name.

    The numbers are a function of (seed, name, shape), so parameters whose numbers differ must have different shapes.
    """
    names = run.init.keys() & twin.init.keys()
    return sum(run.init[name][0] == twin.init[name][0] for name in names), len(names)


def unlike_init(run: Trained, twin: Trained) -> list[str]:
    """Parameters of the same name and shape that began with other numbers; an unknown shape is not the same."""
    names = [name for name in twin.init if name in run.init]
    pairs = [(name, run.init[name], twin.init[name]) for name in names]
    return [name for name, (z, shape), other in pairs if shape is not None and shape == other[1] and z != other[0]]


def at_equal(axis: str) -> Callable[[Trained, Trained], float]:
    """The difference of two runs' validation losses at the largest budget that both reached."""
    assert axis in AXES

    def difference(run: Trained, twin: Trained) -> float:
        if not len(run.curves.val) or not len(twin.curves.val):
            return float("nan")
        budget = min(getattr(each.curves, axis)[-1] for each in (run, twin))
        return run.curves.at(axis, budget) - twin.curves.at(axis, budget)

    return difference


def log_token_ratio(run: Trained, twin: Trained) -> float:
    """Log of (arm's tokens / baseline's tokens) needed to reach the higher of the two final losses."""
    if not len(run.curves.val) or not len(twin.curves.val):
        return float("nan")
    target = max(run.curves.val[-1], twin.curves.val[-1])
    tokens = run.curves.tokens_to(target), twin.curves.tokens_to(target)
    return float(np.log(tokens[0] / tokens[1])) if min(tokens) > 0 else float("nan")

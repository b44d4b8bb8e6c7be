"""Comparing two runs of one seed: how unlike their code is, whether they are identical, and their difference."""

from __future__ import annotations

import numpy as np

from nexus_ablate.comparison.load import Trained
from nexus_ablate.errors import UserError
from nexus_ablate.provenance import differ, differing_files
from nexus_ablate.runs.record import read_rows


def same_curves(one: Trained, other: Trained) -> bool:
    """Whether two runs have the same losses to the last bit."""
    a, b = one.curves, other.curves
    if not len(a.val) or not np.array_equal(a.val, b.val, equal_nan=True):
        return False
    return np.array_equal(a.train, b.train, equal_nan=True)


def unlike_batches(run: Trained, twin: Trained) -> str:
    """Why two runs did not see the same batches, or ''. Runs are compared up to the end of the shorter one."""
    last, twin_last = run.summary.get("batch_hash"), twin.summary.get("batch_hash")
    if last and last == twin_last:
        return ""
    if last and twin_last and run.summary.get("steps") == twin.summary.get("steps"):
        return "other batches"
    logged = []
    for each in (run, twin):
        rows = read_rows(each.record.path / "metrics.jsonl")
        try:
            logged.append({row["step"]: row["batch_hash"] for row in rows if row.get("batch_hash")})
        except UserError as error:
            return error.problem
    hashes, twin_hashes = logged
    shared = hashes.keys() & twin_hashes.keys()
    if not shared:
        return "no batch hash in common"
    step = max(shared)  # the hash is a chain: if it agrees at a step, all batches before that agree
    return "" if hashes[step] == twin_hashes[step] else f"other batches before step {step}"


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


def shares_init(run: Trained, twin: Trained) -> bool:
    """Whether the first values of any parameter come from the same normal numbers.

    The numbers are a function of (seed, name, shape), so parameters whose numbers differ must have different shapes.
    """
    return any(run.init[name][0] == twin.init[name][0] for name in run.init.keys() & twin.init.keys())


def unlike_init(run: Trained, twin: Trained) -> list[str]:
    """Parameters of the same name and shape, or of no recorded shape, that began with other numbers."""
    unlike = []
    for name, (twin_z, twin_shape) in twin.init.items():
        z, shape = run.init.get(name, (twin_z, twin_shape))
        if shape == twin_shape and z != twin_z:
            unlike.append(name)
    return unlike


def at_equal(axis: str, run: Trained, twin: Trained) -> float:
    """The difference of two runs' validation losses at the largest budget that both reached.

    Args:
        axis: One of `AXES`.
    """
    if not len(run.curves.val) or not len(twin.curves.val):
        return float("nan")
    budget = min(getattr(each.curves, axis)[-1] for each in (run, twin))
    return run.curves.at(axis, budget) - twin.curves.at(axis, budget)


def log_token_ratio(run: Trained, twin: Trained) -> float:
    """Log of (arm's tokens / baseline's tokens) needed to reach the higher of the two final losses."""
    if not len(run.curves.val) or not len(twin.curves.val):
        return float("nan")
    target = max(run.curves.val[-1], twin.curves.val[-1])
    tokens, twin_tokens = run.curves.tokens_to(target), twin.curves.tokens_to(target)
    return float(np.log(tokens / twin_tokens)) if min(tokens, twin_tokens) > 0 else float("nan")

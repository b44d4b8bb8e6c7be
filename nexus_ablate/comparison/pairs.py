"""Comparing two runs of one seed: whether they are identical, and how unlike their batches, code and start are."""

from __future__ import annotations

import numpy as np

from nexus_ablate.comparison.load import Trained
from nexus_ablate.errors import UserError
from nexus_ablate.provenance import differ, differing_files
from nexus_ablate.runs.record import read_rows


def same_curves(one: Trained, other: Trained) -> bool:
    """Whether two runs have the same losses to the last bit."""
    a, b = one.curves, other.curves
    is_equal = np.array_equal(a.val, b.val, equal_nan=True) and np.array_equal(a.train, b.train, equal_nan=True)
    return is_equal and len(a.val) > 0


def unlike_batches(run: Trained, twin: Trained) -> str:
    """Why two runs did not see the same batches, or ''. Runs are compared up to the end of the shorter one."""
    last, twin_last = run.summary.get("batch_hash"), twin.summary.get("batch_hash")
    if last and last == twin_last:
        return ""
    if last and twin_last and run.summary.get("steps") == twin.summary.get("steps"):
        return "other batches"
    try:
        hashes, twin_hashes = _batch_hashes(run), _batch_hashes(twin)
    except UserError as error:
        return error.problem
    shared = hashes.keys() & twin_hashes.keys()
    if not shared:
        return "no batch hash in common"
    step = max(shared)  # the hash is a chain: if it agrees at a step, all batches before that agree
    return "" if hashes[step] == twin_hashes[step] else f"other batches before step {step}"


def _batch_hashes(run: Trained) -> dict[int, str]:
    """By step."""
    rows = read_rows(run.record.path / "metrics.jsonl")
    return {row["step"]: row["batch_hash"] for row in rows if row.get("batch_hash")}


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

"""The run directory: layout, identity, one owner, atomic writes, reading back."""

from nexus_ablate.runs.directory import Run, open_run
from nexus_ablate.runs.environ import environment
from nexus_ablate.runs.files import atomic_write_json, atomic_write_text, storage, strict_json, truncate
from nexus_ablate.runs.naming import Identity, arm_name, identity
from nexus_ablate.runs.other_code import OtherCode, made_by_other_code
from nexus_ablate.runs.ownership import SETTLED, STATES, effective_state
from nexus_ablate.runs.record import RunRecord, find_runs, read_jsonl, read_run, read_status

__all__ = [
    "SETTLED",
    "STATES",
    "Identity",
    "OtherCode",
    "Run",
    "RunRecord",
    "arm_name",
    "atomic_write_json",
    "atomic_write_text",
    "effective_state",
    "environment",
    "find_runs",
    "identity",
    "made_by_other_code",
    "open_run",
    "read_jsonl",
    "read_run",
    "read_status",
    "storage",
    "strict_json",
    "truncate",
]

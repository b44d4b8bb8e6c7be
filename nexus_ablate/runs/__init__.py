"""The run directory: layout, identity, one owner, atomic writes, reading back."""

from nexus_ablate.runs.directory import Launch, Run, append_log, open_run
from nexus_ablate.runs.environ import environment
from nexus_ablate.runs.files import (
    atomic_write,
    atomic_write_json,
    atomic_write_text,
    make_directory,
    strict_json,
)
from nexus_ablate.runs.naming import Identity, arm_name, identity, run_path
from nexus_ablate.runs.other_code import made_by_other_code
from nexus_ablate.runs.ownership import SETTLED, effective_state
from nexus_ablate.runs.reading import (
    RunRecord,
    find_runs,
    has_status,
    read_jsonl,
    read_rows,
    read_run,
    read_status,
    read_summary,
)

__all__ = [
    "SETTLED",
    "Identity",
    "Launch",
    "Run",
    "RunRecord",
    "append_log",
    "arm_name",
    "atomic_write",
    "atomic_write_json",
    "atomic_write_text",
    "effective_state",
    "environment",
    "find_runs",
    "has_status",
    "identity",
    "made_by_other_code",
    "make_directory",
    "open_run",
    "read_jsonl",
    "read_rows",
    "read_run",
    "read_status",
    "read_summary",
    "run_path",
    "strict_json",
]

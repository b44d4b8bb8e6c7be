"""`nexus-ablate diff RUN RUN`: how two runs differ: configuration, what follows from it, code, machine, result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nexus_ablate import errors
from nexus_ablate.cli.verb import FULL, Verb

if TYPE_CHECKING:
    from nexus_ablate.runs import RunRecord

VERB = Verb(
    "diff",
    "how two runs differ: configuration, code, machine, result",
    "RUN RUN",
    (
        ("diff 1a2b3c4d 5e6f7a8b", "two runs by their ids (nexus-ablate runs)"),
        ("diff runs/scratch/baseline/s0-1a2b3c4d last", "a directory, and the run that changed last"),
    ),
    (FULL,),
    "Keys that are equal are left out. `follows` lists the values that an `auto` took in one run and not in the other.",
    "two runs",
    kind="results",
)

MACHINE = ("version", "git_commit", "python", "host", "world_size")
RESULTS = ("val_loss", "val_bpb", "params", "tokens", "flops_per_token", "seconds", "device", "threads")
NOTHING = "-"


def run(words: list[str], flags: dict[str, Any]) -> int:
    """Print what differs."""
    from nexus_ablate.console import UNLIMITED, grid, middle, open_console, print_table
    from nexus_ablate.runs import read_run
    from nexus_ablate.runs.lookup import id_of, run_at

    if len(words) != 2:
        fix = "nexus-ablate diff ID last; nexus-ablate runs lists the ids"
        raise errors.ConfigError("diff takes two runs", " ".join(words), fix)
    one, other = (read_run(run_at(word, "diff")) for word in words)
    rows = differences(one, other)
    console, full = open_console(), "full" in flags
    heads = ("key", "part", id_of(one.path), id_of(other.path))
    if rows:
        width = UNLIMITED if full else console.width
        widest = width if full else max(12, (width - 30) // 2 - 4)
        cells = [(key, part, *(middle(text, widest) for text in values)) for part, key, *values in rows]
        print_table(console, grid(heads, cells, width, heads), full)
    else:
        console.print("the two runs have the same configuration, code, machine and result")
    return errors.OK


def differences(one: RunRecord, other: RunRecord) -> list[tuple[str, str, str, str]]:
    """Part, key and the values of both runs, for everything that differs."""
    from nexus_ablate.comparison.differences import consequences, differing
    from nexus_ablate.provenance import code_of, differing_files

    mine, base = other.config or {}, one.config or {}
    rows = [("run", "arm", one.arm, other.arm), ("run", "seed", str(one.seed), str(other.seed))]
    rows += [("config", key, *values) for key, values in differing(mine, base).items()]
    rows += [("follows", key, *values) for key, values in consequences(mine, base).items()]
    env, base_env = other.env or {}, one.env or {}
    base_code, code = code_of(base_env) or {}, code_of(env) or {}
    files = differing_files(code_of(base_env), code_of(env))
    rows += [("code", name, base_code.get(name, "")[:8], code.get(name, "")[:8]) for name in files]
    rows += [("machine", key, _text(base_env.get(key)), _text(env.get(key))) for key in MACHINE]
    packages, base_packages = env.get("packages") or {}, base_env.get("packages") or {}
    for key in base_packages | packages:
        rows.append(("machine", key, _text(base_packages.get(key)), _text(packages.get(key))))
    summary, base_summary = other.summary or {}, one.summary or {}
    rows += [("result", key, _text(base_summary.get(key)), _text(summary.get(key))) for key in RESULTS]
    return [(part, key, value or NOTHING, twin or NOTHING) for part, key, value, twin in rows if value != twin]


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)

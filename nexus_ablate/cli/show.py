"""`nexus-ablate show RUN [RUN]`: one run in the terminal and as a picture, or how two runs differ."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nexus_ablate.cli.flags import FORCE, PICTURE, Flags
from nexus_ablate.cli.verb import Verb
from nexus_ablate.errors import OK, ConfigError, printable

if TYPE_CHECKING:
    from nexus_ablate.runs import RunRecord

VERB = Verb(
    "show",
    "one run: its result and a picture; two: how they differ",
    "RUN [RUN]",
    (
        ("show last", "the run that changed last; saves picture.png in its directory"),
        ("show 1a2b3c4d", "a run by its id (nexus-ablate status), or by its directory"),
        ("show runs/scratch/baseline/s0-1a2b3c4d --out loss.pdf", ""),
        ("show 1a2b3c4d 5e6f7a8b", "how two runs differ: configuration, code, machine, result"),
    ),
    (PICTURE, FORCE),
    "Of two runs the keys that are equal are left out. `follows` lists the values that an `auto` took in one run and "
    "not in the other.",
    needed="one run or two",
    most=2,
    kind="results",
)

MACHINE = ("version", "git_commit", "python", "host", "world_size")
RESULTS = ("val_loss", "val_bpb", "params", "tokens", "flops_per_token", "seconds", "device", "threads")


def run(words: list[str], flags: Flags) -> int:
    """Print a run's state and result and draw its picture, or print what differs between two runs."""
    from nexus_ablate.api import load_run
    from nexus_ablate.runs.lookup import run_at

    if len(words) == 2 and "out" in flags:
        raise ConfigError(
            "--out draws one run", " ".join(words), f"nexus-ablate show {shlex.quote(words[0])} --out run.png"
        )
    record, *others = [load_run(run_at(word, "show")) for word in words]
    if others:
        _show_differences(record, others[0])
    else:
        _show_run(record, flags.get("out") or record.path / "picture.png")
    return OK


def _show_run(record: RunRecord, picture: Path) -> None:
    from rich.text import Text

    from nexus_ablate.cli.evaluate import print_results
    from nexus_ablate.console import folded, grid, nearer, open_console
    from nexus_ablate.report.run_picture import run_figure, run_lines, save_figure
    from nexus_ablate.runs import SETTLED
    from nexus_ablate.runs.contradiction import contradiction
    from nexus_ablate.training.display import result_facts

    curves, figure = run_lines(record), run_figure(record)  # first: of a damaged run nothing is shown
    facts = {"run": f"{record.study} / {record.arm} / seed {record.seed}", "state": record.state}
    if record.status.get("reason"):
        facts["reason"] = record.status["reason"]
    if record.state in SETTLED and (reason := contradiction(record)):
        facts["contradicts itself"] = reason
    if record.summary is not None:
        facts |= result_facts(record.summary)
    console = open_console()
    console.print(folded([*facts.items()], names="dim"))
    print_results(record.summary or {}, console)
    console.print()
    heads = ("curve", "first, by step, last")
    console.print(grid(heads, curves, console.width, heads))
    console.print()
    save_figure(figure, picture)
    place = printable(nearer(picture), 4096)
    console.print(Text.assemble(("picture ", "dim"), place), soft_wrap=True)


def _show_differences(one: RunRecord, other: RunRecord) -> None:
    from nexus_ablate.console import grid, middle, open_console
    from nexus_ablate.runs.lookup import id_of

    console = open_console()
    longest = max(12, (console.width - 30) // 2 - 4)
    rows = []
    for key, part, *values in differences(one, other):
        rows.append((key, part, *(middle(value, longest) for value in values)))
    if not rows:
        console.print("the two runs have the same configuration, code, machine and result")
        return
    heads = ("key", "part", id_of(one.path), id_of(other.path))
    console.print(grid(heads, rows, console.width, heads))


def differences(one: RunRecord, other: RunRecord) -> list[tuple[str, str, str, str]]:
    """Key, part and the values of both runs, for everything that differs."""
    from nexus_ablate.comparison.differences import consequences, differing
    from nexus_ablate.provenance import code_of, differing_files

    configs = other.config or {}, one.config or {}
    rows = [("arm", "run", one.arm, other.arm), ("seed", "run", str(one.seed), str(other.seed))]
    rows += [(key, "config", *values) for key, values in differing(*configs).items()]
    rows += [(key, "follows", *values) for key, values in consequences(*configs).items()]

    env, other_env = one.env or {}, other.env or {}
    code, other_code = code_of(env), code_of(other_env)
    if code and other_code:
        for name in differing_files(code, other_code):
            rows.append((name, "code", code.get(name, "")[:8], other_code.get(name, "")[:8]))
    packages, other_packages = env.get("packages") or {}, other_env.get("packages") or {}
    for part, keys, values, other_values in (
        ("machine", MACHINE, env, other_env),
        ("machine", packages | other_packages, packages, other_packages),
        ("result", RESULTS, one.summary or {}, other.summary or {}),
    ):
        rows += [(key, part, _text(values.get(key)), _text(other_values.get(key))) for key in keys]
    return [(key, part, first or "-", second or "-") for key, part, first, second in rows if first != second]


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)

"""`nexus-ablate dashboard`: the saved W&B workspace of a project and of its studies."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nexus_ablate import errors
from nexus_ablate.masking import mask
from nexus_ablate.plain_data import load_yaml
from nexus_ablate.runs.files import atomic_write_text, check_target

if TYPE_CHECKING:
    from nexus_ablate.track.dashboard import Question

HELP = """nexus-ablate dashboard [--project NAME] [--entity NAME] [--study NAME|DIR,...] [--report] [--dry-run [FILE]]

  nexus-ablate dashboard                              the workspace of the project nexus-ablate
  nexus-ablate dashboard --study norms,placement      with a section of each study, and a workspace of each
  nexus-ablate dashboard --study runs/norms --report  also a report: the question, the verdict so far, the panels
  nexus-ablate dashboard --dry-run view.json          write what would be saved; asks no server

Saved again, a workspace keeps its address and loses what was changed in it by hand: copy it first to keep that."""

FLAGS = ("--project", "--entity", "--study")


def run(arguments: list[str]) -> int:
    """Save the workspaces, or write them down."""
    if any(a in ("-h", "--help") for a in arguments):
        print(HELP)
        return errors.OK
    from nexus_ablate.cli.compare import split

    rest, dry_run = _dry_run(arguments)
    if dry_run not in (None, "-"):
        check_target("--dry-run", Path(str(dry_run)))
    words, options = split(rest, FLAGS, ("--report",))
    if words:
        raise errors.ConfigError("dashboard takes flags only", words[0], f"--study {words[0]}")

    from nexus_ablate.config.options import option_files
    from nexus_ablate.track import dashboard

    project = options.get("--project") or str(option_files("tracker")["wandb"].keys["project"].default)
    report = "--report" in options
    questions = [_question(name, report) for name in options.get("--study", "").split(",") if name]
    if report and not questions:
        raise errors.ConfigError("a report is about a study", "--report", "--study runs/norms --report")
    if dry_run is not None:
        return _write(
            dashboard.specification(dashboard.workspaces(project, options.get("--entity", ""), questions)), dry_run
        )
    entity = options.get("--entity") or dashboard.default_entity()
    for address in dashboard.save(dashboard.workspaces(project, entity, questions)):
        print(f"workspace {address}")
    for question in questions if report else []:
        print(f"report    {dashboard.save_report(project, entity, question)}")
    return errors.OK


def _dry_run(arguments: list[str]) -> tuple[list[str], str | None]:
    """The other arguments, and where the specification goes: '-' is standard output, None nowhere."""
    for at, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == "--dry-run":
            after = arguments[at + 1 :]
            if not equals and after and not after[0].startswith("--"):
                return [*arguments[:at], *after[1:]], after[0]
            return [*arguments[:at], *after], value or "-"
    return arguments, None


def _write(specification: dict, path: str) -> int:
    from nexus_ablate.runs import strict_json

    text = strict_json(specification, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        atomic_write_text(Path(path), mask(text))
        print(f"written to {path}", file=sys.stderr)
    return errors.OK


def _question(name: str, report: bool) -> Question:
    """A study by its directory, its name under runs/, or its name in conf/studies.

    Raises:
        ConfigError: It is none of these.
    """
    from nexus_ablate.comparison.load import read_plan
    from nexus_ablate.study.definition import define, shipped_studies
    from nexus_ablate.track.dashboard import Question

    folder = next((path for path in (Path(name), Path("runs", name)) if path.is_dir()), None)
    table = _verdict(folder) if folder and report else ""
    if folder and (folder / "study.yaml").is_file():
        plan = read_plan(folder / "study.yaml")
        return Question(plan.name, mask(plan.question), plan.baseline, tuple(plan.arms), mask(table))
    if folder:
        return Question(folder.resolve().name, table=mask(table))
    if name not in shipped_studies():
        raise errors.unknown("there is no study of this name, and no directory", name, shipped_studies())
    asked = define({"name": name} | load_yaml(shipped_studies()[name].read_text(encoding="utf-8")))
    return Question(name, asked.question)


def _verdict(folder: Path) -> str:
    """The comparison in Markdown; '' where nothing can be compared yet."""
    from nexus_ablate.comparison.result import compare
    from nexus_ablate.report.exports import markdown

    try:
        return markdown(compare(folder))
    except errors.ConfigError as error:
        print(f"no verdict in the report: {error.problem}", file=sys.stderr)
        return ""

"""`nexus-ablate dashboard`: the saved W&B workspace of a project and of its studies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nexus_ablate.cli.flags import FORCE, JSON_FILE, WANDB, Flags, put
from nexus_ablate.cli.verb import Verb
from nexus_ablate.errors import OK, unknown
from nexus_ablate.masking import mask

if TYPE_CHECKING:
    from nexus_ablate.study.study import Study

VERB = Verb(
    "dashboard",
    "the W&B workspace of a project, one section per study",
    "[STUDY ...]",
    (
        ("dashboard", "the workspace of the project nexus-ablate"),
        ("dashboard norms placement", "with a section and a workspace per study"),
        ("dashboard norms --json view.json", "save what W&B would get; contacts no server"),
    ),
    (WANDB, JSON_FILE, FORCE),
    "Saving a workspace again keeps its URL and overwrites manual changes: copy it first to keep them.",
)


def run(words: list[str], flags: Flags) -> int:
    """Save the workspaces, or write their specification."""
    from nexus_ablate.config.options import option_files
    from nexus_ablate.runs import strict_json
    from nexus_ablate.track import workspaces

    project = flags.get("wandb") or str(option_files("tracker")["wandb"].keys["project"].default)
    entity, _, project = project.rpartition("/")
    studies = [study for name in words for study in _studies(name)]
    if "json" in flags:
        views = workspaces.workspaces(project, entity, studies)
        put(flags["json"], mask(strict_json(workspaces.specification(views), indent=2)) + "\n")
        return OK
    entity = entity or workspaces.default_entity()
    for address in workspaces.save(workspaces.workspaces(project, entity, studies)):
        print(f"workspace {address}")
    return OK


def _studies(name: str) -> list[Study]:
    """A study by its directory, its name under runs/, or its name in conf/studies; each of its settings.

    Raises:
        ConfigError: It is none of these.
    """
    from nexus_ablate.runs.lookup import place_of
    from nexus_ablate.study.definition import folders_of, read_study, settings_of, shipped_studies
    from nexus_ablate.study.record import load
    from nexus_ablate.study.study import Study

    studies = []
    for folder in filter(Path.is_dir, folders_of(place_of(name))):
        called = folder.resolve().name
        studies.append(load(folder) or Study(name=called, question=f"the runs of {called}"))
    if studies:
        return studies
    if name not in shipped_studies():
        raise unknown("there is no study of this name, and no directory", name, shipped_studies())
    return settings_of(read_study([name])[0])

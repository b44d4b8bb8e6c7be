"""The terms of a comparison: the study as it was fixed before its runs, and what was chosen after that."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nexus_ablate.comparison.endpoint import Endpoint
from nexus_ablate.console import several
from nexus_ablate.study.decoding import read_study
from nexus_ablate.study.schema import Study

NO_STUDY = Study(name="", question="", design="list", seeds=[])
DECIDING = ("claim: ", "expects: ", "requires: ", "endpoints: ")
"""How amendments begin that change a claim, or what decides it."""


@dataclass(frozen=True)
class Terms:
    """How the arms of one stratum are compared on one endpoint.

    Attributes:
        study: `NO_STUDY` where there is none.
        name: The study's folder; '' where there is none.
        place: The study as one types it after a verb: its name, or its directory where that is not in runs/.
        baseline: The name of the baseline's directory.
        share: Of the 5%, for this endpoint: less where other endpoints or strata get a verdict too.
        family: Comparisons that share the 5% at the least, where the table shows fewer of them.
        exploratory: What was chosen when results had been seen, which an interval takes no account of.
        is_listed: The runs are rows of a table that was made elsewhere, with nothing but their results.
        is_paired: Whether arms share seeds with the baseline.
        step: To which a table made elsewhere rounded the endpoint.
    """

    study: Study = NO_STUDY
    name: str = ""
    place: str = ""
    baseline: str = "baseline"
    endpoint: Endpoint = Endpoint()
    share: float = 1.0
    family: int = 0
    exploratory: tuple[str, ...] = ()
    is_listed: bool = False
    is_paired: bool = True
    step: float = 0.0

    @property
    def stratum(self) -> str:
        """The stratum that the study is; '' in a study without strata."""
        return self.study.stratum

    @property
    def arm_names(self) -> list[str]:
        """The directories of the arms that the study planned."""
        return [arm.name for arm in self.study.arms]

    @property
    def secondary(self) -> list[Endpoint]:
        """The study's other endpoints."""
        return [endpoint for endpoint in endpoints_of(self.study) if endpoint.name != self.endpoint.name]


def endpoints_of(study: Study) -> list[Endpoint]:
    """The endpoints of a study, the primary first."""
    return [Endpoint(e.name, None if e.delta_min == "auto" else e.delta_min) for e in study.endpoints]


def read_terms(folder: Path) -> Terms:
    """The terms that the study.yaml of a folder sets; a study's name alone where there is no study.yaml.

    Raises:
        UserError: It is damaged or a value in it has no meaning.
    """
    directory = Path(os.path.realpath(folder))  # a directory that the user names may be a link
    study = read_study(directory)
    if study is None:
        return Terms(name=folder.name, place=_place(directory))
    return Terms(
        study=study,
        name=folder.name,
        place=_place(directory),
        endpoint=endpoints_of(study)[0],
        share=study.share,
        exploratory=tuple(chosen_late(study)),
    )


def chosen_late(study: Study) -> Iterator[str]:
    """The seeds, looks and their weights that were chosen after the first run."""
    added = [seed for entry in study.added for seed in entry.seeds]
    if added:
        yield f"{several(len(added), 'seed')} added after the others had been looked at ({', '.join(map(str, added))})"
    keys = {"looks", "look_weights", "share"}
    if not added:
        keys.add("seeds")
    amended = {change.partition(":")[0] for amendment in study.amendments for change in amendment.changes}
    if late := sorted(amended & keys):
        yield f"{', '.join(late)} amended after the first run"


def amendment_lines(study: Study) -> list[str]:
    """Each amendment with its date."""
    return [f"{amendment.when}: {'; '.join(amendment.changes)}" for amendment in study.amendments]


def amends_claim(amendments: Iterable[str]) -> bool:
    """Whether a claim, or what decides it, was among the lines of `amendment_lines`."""
    changes = [change for line in amendments for change in line.partition(": ")[2].split("; ")]
    return any(change.startswith(DECIDING) for change in changes)


def _place(directory: Path) -> str:
    here = Path.cwd().resolve()
    if directory.parent == here / "runs":
        return shlex.quote(directory.name)
    return shlex.quote(str(directory.relative_to(here) if directory.is_relative_to(here) else directory))

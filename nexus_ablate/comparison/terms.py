"""The terms of a comparison: the study as it was fixed before its runs, and what was chosen after that."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from nexus_ablate.comparison.statistics import DIFFERENCES, FAILURES, sidak
from nexus_ablate.console import several
from nexus_ablate.study.decoding import read_study
from nexus_ablate.study.endpoint import Endpoint
from nexus_ablate.study.schema import Study

NO_STUDY = Study(name="", question="", design="list", seeds=[])
DECIDING = ("claim: ", "expects: ", "requires: ", "depends_on: ", "endpoints: ")
"""How amendments begin that change a claim, or what decides it."""


@dataclass(frozen=True)
class Terms:
    """How the arms of one stratum are compared on one endpoint.

    Attributes:
        study: `NO_STUDY` where there is none.
        name: The study's folder; '' where there is none.
        place: The study as one types it after a verb: its name, or its directory where that is not in runs/.
        family: Comparisons in a stratum at the least, where the table shows fewer of them.
        exploratory: What was chosen when results had been seen, which an interval takes no account of.
        is_listed: The runs are rows of a table that was made elsewhere, with nothing but their results.
        is_paired: Whether arms share seeds with the baseline.
        step: To which a table made elsewhere rounded the endpoint.
    """

    study: Study = NO_STUDY
    name: str = ""
    place: str = ""
    endpoint: Endpoint = Endpoint("val_loss")
    family: int = 0
    exploratory: tuple[str, ...] = ()
    is_listed: bool = False
    is_paired: bool = True
    step: float = 0.0

    @property
    def strata(self) -> int:
        """How many strata share the words about failures."""
        return max(len(self.study.all_strata), 1)

    @property
    def arm_names(self) -> list[str]:
        """The directories of the arms that the study planned."""
        return [arm.name for arm in self.study.arms]

    def comparisons(self, arms: int) -> int:
        """Cells that get a word about a difference: arms x endpoints x strata."""
        return round(max(arms, self.family) / self.study.share)

    def level(self, arms: int, weight: float = 1.0) -> float:
        """The level of each of these cells.

        Args:
            arms: Beside the baseline.
            weight: Of the look.
        """
        return sidak(DIFFERENCES * weight, self.comparisons(arms))

    def failure_level(self, arms: int, weight: float = 1.0) -> float:
        """The level of each test of an arm's failures to train: arms x strata share them."""
        return sidak(FAILURES * weight, max(arms, self.family) * self.strata)

    @property
    def secondary(self) -> list[Endpoint]:
        """The study's other endpoints."""
        return [endpoint for endpoint in self.study.endpoints if endpoint.name != self.endpoint.name]


def read_terms(folder: Path) -> Terms:
    """The terms that the study.yaml of a folder sets; a study's name alone where there is no study.yaml.

    Raises:
        UserError: It is damaged or a value in it has no meaning.
    """
    directory = Path(os.path.realpath(folder))  # a directory that the user names may be a link
    here, place = Path.cwd().resolve(), directory
    if directory.parent == here / "runs":
        place = directory.name
    elif directory.is_relative_to(here):
        place = directory.relative_to(here)
    terms = Terms(name=folder.name, place=shlex.quote(str(place)))
    study = read_study(directory)
    if study is None:
        return terms
    return replace(terms, study=study, endpoint=study.primary, exploratory=tuple(chosen_late(study)))


def chosen_late(study: Study) -> Iterator[str]:
    """The seeds, looks and their weights that were chosen after the first run."""
    added, keys = [seed for entry in study.added for seed in entry.seeds], {"looks", "look_weights", "share"}
    if added:
        yield f"{several(len(added), 'seed')} added after the others had been looked at ({', '.join(map(str, added))})"
    else:
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

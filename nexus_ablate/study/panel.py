"""The calibration panel: changes whose outcome is known in larger models, and the studies that try them in small ones.

Changes with the same baseline and the same matching share a study, so that its baseline is trained once. Each stratum
of it is a size at a learning rate.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from nexus_ablate.config.options import conf_yaml
from nexus_ablate.errors import ConfigError
from nexus_ablate.plain_data import UNREADABLE, load_yaml
from nexus_ablate.study.schema import ArmName, Match, Override, Positive, Seed, StratumName, Text

STUDY = "panel"
"""What the names of the panel's studies begin with."""
Kind = Literal["attention", "ffn", "norm", "optimizer", "output", "placement", "position", "regularization", "schedule"]


class PublishedIn(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an outcome is published, in which models, and what was equal in both.

    Attributes:
        place: The table, figure or section.
    """

    title: Text
    arxiv: Annotated[str, Meta(pattern=r"\A(\d{4}\.\d{4,5})?\Z")] = ""
    place: Text
    params: Text
    tokens: Text
    matched: Text


class PanelChange(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the panel.

    Attributes:
        expected: Of the arm's loss beside the baseline's, as published.
        margin: For `equivalent`: the largest difference that doesn't matter, in nats per token; 0 for the others.
        effect: The published difference in nats per token, arm minus baseline; None where no two losses were read.
        says: The published numbers or words.
        newer: Which of the two was proposed later.
        contested: A source of like weight disagrees.
        seen_before: An earlier study of this project had trained it.
        checked: How the entry was compared with its source.
        at: Each of the two at its own best rate, or both at the largest; or the arm at its default, because an arm with
            another optimizer does not take the rate of its stratum.
    """

    kind: Kind
    baseline: list[Override] = []
    arm: Annotated[list[Override], Meta(min_length=1)]
    match: Match = "none"
    expected: Literal["lower", "higher", "equivalent"]
    margin: Annotated[float, Meta(ge=0)] = 0.0
    effect: float | None = None
    says: Text
    source: PublishedIn
    newer: Literal["arm", "baseline"]
    contested: bool
    seen_before: bool
    checked: Literal["source", "abstract", "copy", "unread"]
    at: Literal["own", "largest", "default"] = "own"

    def __post_init__(self) -> None:
        effect = self.effect
        if self.is_null != (self.margin > 0):
            raise ValueError("`equivalent` has a margin above 0, `lower` and `higher` have none")
        if effect is not None and self.is_null and abs(effect) > self.margin:
            raise ValueError(f"the published effect {effect:g} lies outside the margin {self.margin:g}")
        if effect is not None and not self.is_null and (effect > 0) != (self.expected == "higher"):
            raise ValueError(f"the published effect {effect:g} is not {self.expected}")

    @property
    def is_null(self) -> bool:
        return self.expected == "equivalent"

    @property
    def is_scored(self) -> bool:
        """What is contested, was not compared with its source or was not tuned is shown and not scored."""
        return not self.contested and self.checked != "unread" and self.at != "default"

    @property
    def study(self) -> str:
        """The study that trains it."""
        baseline = [text.replace("=", "_") for text in self.baseline] or ["default"]
        matched = [] if self.match == "none" else [self.match]
        return "_".join([STUDY, *baseline, *matched])


class PanelSize(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A size of models, and the learning rates that each change is trained at."""

    overrides: list[Override]
    rates: Annotated[list[Positive], Meta(min_length=2)]


class Panel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The changes by name, and how they are trained: each at every size and rate with every seed."""

    sizes: dict[StratumName, PanelSize]
    seeds: Annotated[list[Seed], Meta(min_length=2)]
    changes: dict[ArmName, PanelChange]

    @property
    def strata(self) -> list[tuple[str, float]]:
        """Each size with each of its rates."""
        return [(name, rate) for name, size in self.sizes.items() for rate in size.rates]

    def studies(self) -> dict[str, dict[str, Any]]:
        """The values of each study's file, by its name."""
        strata = {}
        for size, rate in self.strata:
            strata[stratum_of(size, rate)] = [*self.sizes[size].overrides, f"optim.lr={rate:g}"]
        studies: dict[str, dict[str, Any]] = {}
        for name, change in self.changes.items():
            values = studies.setdefault(change.study, {
                "name": change.study,
                "question": "How often does a small model agree with what is known of larger ones?",
                "baseline": change.baseline,
                "match": change.match,
                "strata": strata,
                "arms": [],
                "seeds": self.seeds,
            })  # fmt: skip
            values["arms"].append({"name": name, "overrides": change.arm})
        return studies


def stratum_of(size: str, rate: float) -> str:
    return f"{size}-{rate:g}"


def read_panel(text: str | None = None) -> Panel:
    """The panel of this YAML; by default that of conf/panel.yaml.

    Raises:
        ConfigError: It is not valid.
    """
    invalid = "the calibration panel"
    try:
        values = conf_yaml("panel") if text is None else load_yaml(text)
        for name, change in values["changes"].items():
            invalid = f"the change {name} of the calibration panel"
            msgspec.convert(change, PanelChange)
        invalid = "the calibration panel"
        return msgspec.convert(values, Panel)
    except UNREADABLE as error:
        raise ConfigError(f"{invalid} is not valid", str(error), "git checkout conf/panel.yaml") from None

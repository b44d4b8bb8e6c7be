"""study.yaml: the study as first launched, with any later amendments.

name, question, design
baseline: {arm: baseline, overrides: [...]}
arms: [{arm: "norm=layer", overrides: [...], also_changes: [...], match: {...}}]    match only if requested
equal: [{overrides: [...], arm: ...}]         requested, but the same run as that arm
refused: [{overrides: [...], reason: ...}]
seeds, match, lr_grid, tuning_seeds
endpoints: {val_loss: {delta_min: auto}}      the primary one first; older versions wrote `endpoint` and `delta_min`
delta_min_tokens: 0.02                        the share of training tokens that gave the margin, if it was given so
claim, requires, share, stratum, rung, of, all_strata    where the study has them; see study/question.py
expects: [{arm: ..., endpoint: ..., expected: lower}]
looks: [5, 8, 12, 20], look_weights: [...]    if later seeds are only for undecided arms; `seeds` then lists all
confirms: NAME                                the study whose claims are judged on fresh seeds
amendments: [{when: ..., changes: [...]}]
added: [{when: ..., seeds: [...]}]            seeds that an amendment added after results had been seen
source: ...                                   hash of the code of the last launch, whose runs are compared
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from nexus_ablate.comparison.endpoint import Endpoint
from nexus_ablate.config.grammar import show
from nexus_ablate.errors import ConfigError
from nexus_ablate.masking import mask
from nexus_ablate.planning.design import ComposedStudy, expand, label
from nexus_ablate.planning.margin import with_margin
from nexus_ablate.runs import atomic_write_text, make_directory
from nexus_ablate.runs.record import read_study
from nexus_ablate.study.definition import Definition, Request, stored_definition
from nexus_ablate.study.overrides import key_of

FIXED = (
    "question",
    "seeds",
    "looks",
    "look_weights",
    "match",
    "lr_grid",
    "tuning_seeds",
    "claim",
    "requires",
    "share",
    "expects",
)


_PRECISION = "train.precision"


def expanded(request: Request) -> ComposedStudy:
    """The study with its arms; what an earlier launch matched or measured stays."""
    record = read_study(request.directory)
    definition = with_added_seeds(request.definition, record)
    study = expand(definition, solved_before(record) or request.solved, request.launch)
    return with_margin(study, request.runs_dir, record)


def departures(request: Request) -> list[str]:
    """How the study that was trained differs from its definition, a text for each part."""
    record = read_study(request.directory)
    if record is None:
        return [f"{request.definition.name} has not been trained"]
    launch = request.launch
    if not any(key_of(text) == _PRECISION for text in request.definition.baseline):
        # `auto` meant that of the machine that trained the study, which need not be this one
        bf16 = f"{_PRECISION}=bf16" in record["baseline"]["overrides"]
        launch = [*launch, f"{_PRECISION}={'bf16' if bf16 else 'fp32'}"]
    return differences_between(record, _values(expanded(replace(request, launch=launch))))


def solved_before(record: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    """The `match` of each arm by its requested overrides."""
    if record is None:
        return {}
    return {
        " ".join(overrides): arm["match"]
        for arm, overrides in zip(record["arms"], stored_definition(record)["arms"], strict=False)
        if arm.get("match")
    }


def with_added_seeds(definition: Definition, record: dict[str, Any] | None) -> Definition:
    """The definition with the seeds that were added since the first launch, if it is otherwise the same study."""
    added = set(added_seeds(record or {}))
    if record is None or [s for s in record.get("seeds", []) if s not in added] != definition.seeds:
        return definition
    return replace(definition, seeds=record["seeds"])


def added_seeds(record: dict[str, Any]) -> list[int]:
    """The seeds that were added after the first launch."""
    return [seed for entry in record.get("added", ()) for seed in entry["seeds"]]


def write_record(study: ComposedStudy, directory: Path, amend: bool = False, source: str = "") -> None:
    """Write study.yaml at the first launch; later, check that the study is still the same, and note the code.

    Args:
        study: From `expand`.
        directory: `<runs_dir>/<study>`.
        amend: Accept what changed and append it to `amendments`.
        source: Hash of the code that trains it from now on; '' if nothing is trained.

    Raises:
        ConfigError: The study has changed since its first launch.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    record, new = read_study(directory), _values(study)
    if record is not None:
        changes = differences_between(record, new)
        source = source or record.get("source", "")
        if changes and not amend:
            name = study.definition.name
            fix = f"use a new name (name={name}_2), or --amend (shown in the report)"
            raise ConfigError(f"study {name} has changed since its first launch", "; ".join(changes), fix)
        if changes:
            new["amendments"] = [*record.get("amendments", []), {"when": now, "changes": changes}]
            new |= {name: record[name] for name in ("confirms", "added") if name in record}
            if added := [seed for seed in new["seeds"] if seed not in record.get("seeds", [])]:
                new["added"] = [*record.get("added", []), {"when": now, "seeds": added}]
        elif source == record.get("source", ""):
            return
        else:
            new = record
    new |= {"source": source} if source else {}
    make_directory(directory, directory.parent)
    atomic_write_text(directory / "study.yaml", yaml.safe_dump(new, sort_keys=False, allow_unicode=True, width=120))


def differences_between(record: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The changes, one text per part: `seeds: [0,1] -> [0,1,2]`."""
    changes = [f"{k}: {show(record.get(k))} -> {show(new.get(k))}" for k in FIXED if record.get(k) != new.get(k)]
    before, after = (_endpoints(values) for values in (record, new))
    if before != after:
        changes.append(f"endpoints: {show([*map(str, before)])} -> {show([*map(str, after)])}")
    before, after = record["baseline"]["overrides"], new["baseline"]["overrides"]
    if before != after:
        changes.append(f"baseline: {label(before)} -> {label(after)}")
    former = {arm["arm"]: arm["overrides"] for arm in record["arms"]}
    current = {arm["arm"]: arm["overrides"] for arm in new["arms"]}
    changes += [f"arm {name} added" for name in current if name not in former]
    changes += [f"arm {name} removed" for name in former if name not in current]
    both = former.keys() & current.keys()
    return changes + [f"arm {n}: {label(former[n])} -> {label(current[n])}" for n in both if former[n] != current[n]]


def _values(study: ComposedStudy) -> dict[str, Any]:
    definition = study.definition
    arms = [
        {"arm": a.name, "overrides": mask(a.overrides), "also_changes": mask(a.also_changes)}
        | ({} if a.match is None else {"match": a.match})
        | ({"named": True} if a.name in definition.names.values() else {})
        for a in study.arms
    ]
    values = {
        "name": definition.name,
        "question": mask(definition.question),
        "design": definition.design,
        "baseline": {"arm": study.baseline.name, "overrides": mask(definition.baseline)},
        "arms": arms,
        "equal": [{"overrides": mask(left.requested), "arm": left.why} for left in study.equal],
        "refused": [{"overrides": mask(left.requested), "reason": mask(left.why)} for left in study.refused],
        "seeds": definition.seeds,
        "endpoints": {name: {"delta_min": margin} for name, margin in definition.endpoints.items()},
        "match": definition.match,
        "lr_grid": definition.lr_grid,
        "tuning_seeds": definition.tuning_seeds,
        "amendments": [],
    }
    if definition.looks:
        values |= {"looks": definition.looks, "look_weights": definition.look_weights}
    expects = [
        {"arm": study.expected(e.arm), "endpoint": e.endpoint, "expected": e.expected} for e in definition.expects
    ]
    optional = {
        "claim": mask(definition.claim),
        "expects": expects,
        "requires": definition.requires,
        "delta_min_tokens": definition.delta_min_tokens,
        "share": definition.share if definition.share != 1 else None,
        "stratum": definition.stratum,
        "rung": definition.rung,
        "of": definition.of,
        "all_strata": definition.all_strata,
        "confirms": definition.confirms,
    }
    return values | {name: value for name, value in optional.items() if value}


def _endpoints(values: dict[str, Any]) -> list[Endpoint]:
    former = {values.get("endpoint", "val_loss"): {"delta_min": values.get("delta_min")}}
    endpoints = values.get("endpoints") or former
    margins = {name: keys.get("delta_min") for name, keys in endpoints.items()}
    return [Endpoint(name, None if margin == "auto" else margin) for name, margin in margins.items()]

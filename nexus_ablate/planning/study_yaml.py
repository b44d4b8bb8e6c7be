"""study.yaml: the study as first launched, its arms named and matched, with any later amendments."""

from __future__ import annotations

from datetime import UTC, datetime

import yaml
from msgspec import structs

from nexus_ablate.comparison.differences import config_hash, differing
from nexus_ablate.config.grammar import show
from nexus_ablate.errors import ConfigError
from nexus_ablate.masking import mask
from nexus_ablate.planning.design import label
from nexus_ablate.planning.jobs import Runs
from nexus_ablate.runs import atomic_write_text, make_directory
from nexus_ablate.runs.record import read_config
from nexus_ablate.study.decoding import checksum, decode, read_study
from nexus_ablate.study.schema import AddedSeeds, Amendment, Study, encode

FIXED = (
    *("question", "seeds", "looks", "look_weights", "match", "lr_grid", "tuning_seeds"),
    *("claim", "requires", "depends_on", "share"),
)


def masked(study: Study) -> Study:
    """The study without secrets."""
    return decode(mask(encode(study)))


def write_record(runs: Runs, amend: bool = False, source: str = "", retrain: bool = False) -> None:
    """Write study.yaml at the first launch; later, check that the study is still the same, and note the code.

    Args:
        amend: Accept what changed and append it to `amendments`.
        source: Hash of the code that trains it from now on; '' if nothing is trained.
        retrain: Accept that arms resolve otherwise than at the first launch, as when an option's default was edited.

    Raises:
        ConfigError: The study has changed since its first launch.
    """
    directory = runs.request.directory
    study, launched = masked(runs.study), read_study(directory)
    hashes = {arm: [config_hash(config.nested(), study)] for arm, config in runs.configs.items()}
    if launched is not None:
        source = source or launched.source
        changes = differences_between(launched, study)
        if changes and not amend:
            fix = f"name={study.of or study.name}_2, or --amend, which the report shows"
            raise ConfigError(f"study {study.name} has changed since its first launch", "; ".join(changes), fix)
        if not retrain and (resolved := resolved_otherwise(runs)):
            problem = f"the arms of study {study.name} resolve otherwise than at its first launch"
            fix = "undo that, or add --retrain to train them again; the old runs are kept but not compared"
            raise ConfigError(problem, "; ".join(resolved), fix)
        for arm, former in launched.configs.items():
            now = hashes.get(arm, [])
            hashes[arm] = [*(old for old in former if old not in now), *now]
        if changes:
            study = _amended(study, launched, changes)
        elif source == launched.source and launched.configs in (hashes, {}):
            return
        else:
            study = launched
    study = structs.replace(study, source=source, configs=hashes)
    make_directory(directory, directory.parent)
    values = encode(study)
    values["checksum"] = checksum(values)
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)
    atomic_write_text(directory / "study.yaml", text)


def resolved_otherwise(runs: Runs) -> list[str]:
    """The arms whose configuration is not that of the first launch although their overrides are, each in a text."""
    study, directory = runs.study, runs.request.directory
    launched = read_study(directory)
    if launched is None or launched.baseline != mask(study.baseline):
        return []
    overrides = {arm.name: arm.overrides for arm in launched.all_arms}
    changed = []
    for arm in study.all_arms:
        former, config = launched.configs.get(arm.name), runs.configs[arm.name].nested()
        if not former or former[-1] == config_hash(config, launched) or overrides.get(arm.name) != mask(arm.overrides):
            continue
        trained_configs = (read_config(path) or {} for path in sorted(directory.glob("*/s*-*")))
        trained = next((run for run in trained_configs if config_hash(run, launched) == former[-1]), {})
        unlike = differing(config, trained)
        if launched.lr_grid:
            unlike.pop("optim.lr", None)
        keys = [f"{key} {was} -> {now}" for key, (was, now) in unlike.items()]
        changed.append(f"{arm.name}: {', '.join(keys)}" if trained else arm.name)
    return changed


def _amended(study: Study, launched: Study, changes: list[str]) -> Study:
    """The changed study with its history."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    added = launched.added
    if seeds := [seed for seed in study.seeds if seed not in launched.seeds]:
        added = [*added, AddedSeeds(when=now, seeds=seeds)]
    amendments = [*launched.amendments, Amendment(when=now, changes=changes)]
    return structs.replace(study, amendments=amendments, added=added, confirms=launched.confirms)


def differences_between(launched: Study, study: Study) -> list[str]:
    """The changes, one text per part: `seeds: [0,1] -> [0,1,2]`."""
    former, current = _parts(launched), _parts(study)
    changes = [f"{part} added" for part in current if part not in former]
    changes += [f"{part} removed" for part in former if part not in current]
    for part, before in former.items():
        if current.get(part, before) != before:
            changes.append(f"{part}: {before} -> {current[part]}")
    return changes


def _parts(study: Study) -> dict[str, str]:
    """What a launch fixes, as text."""
    parts = {name: show(getattr(study, name)) for name in FIXED}
    parts["expects"] = show([f"{e.arm} {e.endpoint} {e.expected}" for e in study.expects])
    parts["endpoints"] = show([str(endpoint) for endpoint in study.endpoints])
    parts["baseline"] = label(study.baseline)
    return parts | {f"arm {arm.name}": label(arm.overrides) for arm in study.arms}

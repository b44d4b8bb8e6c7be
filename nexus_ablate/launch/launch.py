"""Launches a study: fixes it in study.yaml, gives the missing runs to a backend, returns the exit status."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any, Protocol

from nexus_ablate import errors
from nexus_ablate.config.compose import compose
from nexus_ablate.config.grammar import show
from nexus_ablate.config.options import Option
from nexus_ablate.config.rules import check_vocabulary
from nexus_ablate.console import nearer, several
from nexus_ablate.data import prepare
from nexus_ablate.errors import AGAIN, ConfigError
from nexus_ablate.launch.arm_configs import Configs, resolve
from nexus_ablate.launch.job_progress import JobProgress
from nexus_ablate.launch.jobs import Job, another_name, jobs, missing, refuse_other_runs
from nexus_ablate.launch.states import RUN_LIST
from nexus_ablate.masking import mask
from nexus_ablate.measure.regime import check_passes
from nexus_ablate.provenance import source_hash
from nexus_ablate.runs import atomic_write_text, make_directory
from nexus_ablate.runs.files import remove_empty, storage
from nexus_ablate.runs.lookup import DEFAULT
from nexus_ablate.runs.ownership import release, take_lock
from nexus_ablate.runs.reading import read_text
from nexus_ablate.study.arm_overrides import key_of
from nexus_ablate.study.definition import runs_dir_of, settings_of
from nexus_ablate.study.record import load, save
from nexus_ablate.study.study import Study, encode
from nexus_ablate.training.session import other_arithmetic

NOT_FIXED = ("source", "configs", "equal", "added_seeds")
"""Keys of study.yaml that a later launch may change, or that follow from others."""


class Backend(Protocol):
    """Runs jobs: `LocalPool`, `Slurm` or `HydraLauncher`. What became of a run is in its directory."""

    def run(self, jobs: list[Job], progress: JobProgress) -> str:
        """Run the jobs, or hand them over to a queue. Returns the stop signal, or ''.

        Reports `progress.queued` once, then `ended` of each job.
        """
        ...


@dataclass(frozen=True)
class Planned:
    """A study of one setting that can be launched.

    Attributes:
        folder: `<runs_dir>/<study.folder_name>`.
        jobs: All of its runs.
    """

    study: Study
    configs: Configs
    folder: Path
    jobs: list[Job]


def launch(
    study: Study,
    launch_overrides: Sequence[str],
    backend: Backend,
    add_seeds: int = 0,
    retry_failed: bool = False,
    seeds: Collection[int] = (),
) -> int:
    """Run what is missing of a study, setting after setting.

    Args:
        study: From `read_study`.
        launch_overrides: How its runs are carried out.
        add_seeds: Further seeds for every arm of a launched study.
        retry_failed: Run failed runs again. A diverged run has a result and is never repeated.
        seeds: Run these alone. Default: all of the study.

    Returns:
        75 after a stop signal, else the first nonzero exit status of a run, after all have run; 0 if a cluster has
        jobs of the study in its queue.

    Raises:
        UserError: The study cannot be run, or was launched with another definition; nothing was written.
    """
    settings = [plan(setting, launch_overrides) for setting in settings_of(study)]
    added = [job for planned in settings for job in planned.jobs if job.seed in planned.study.added_seeds]
    if add_seeds and not missing(added, retry_failed=True):
        settings = [plan(setting, launch_overrides, add_seeds) for setting in settings_of(study)]
    for planned in settings:
        prepare_data(planned)
    for planned in settings:
        _fix(planned)
    place = settings[0].folder.with_name(study.name)
    name = shlex.quote(study.name if place.parent == DEFAULT else nearer(place))
    status = errors.OK
    for planned in settings:
        is_last = planned is settings[-1]
        ended, stopped = _run(planned, launch_overrides, backend, retry_failed, seeds, name if is_last else "")
        if stopped:
            return errors.PREEMPTED
        status = status or ended
    return status


def plan(study: Study, launch_overrides: Sequence[str], add_seeds: int = 0) -> Planned:
    """The runs of a study of one setting, with its seeds, arms and precision as they were first launched.

    Raises:
        UserError: The study cannot be run, or differs from the one that was launched under its name.
    """
    launch = [*launch_overrides]
    runs_dir = runs_dir_of(launch)
    folder = runs_dir / study.folder_name
    launched = _launched(study, runs_dir)
    if launched is None and add_seeds:
        raise ConfigError("this study has not been launched", str(folder), "the same command without --add-seeds")
    if launched is not None:
        study = _continued(study, launched)
    study, configs = resolve(study, launch)
    if launched is not None:
        refuse_change(launched, study)
    made = jobs(study, configs, runs_dir, launch)
    if add_seeds:
        added = [*islice(count(max(study.seeds) + 1), add_seeds)]
        study = replace(study, seeds=[*study.seeds, *added], added_seeds=[*study.added_seeds, *added])
        made = jobs(study, configs, runs_dir, launch)
    refuse_other_runs(study, made)
    return Planned(replace(study, source=source_hash()), configs, folder, made)


def _launched(study: Study, runs_dir: Path) -> Study | None:
    """The study as it was launched; None if it was not. All settings have the seeds of the one with the most.

    Raises:
        ConfigError: It was launched with other settings, or with some where it has none now.
    """
    records = {}
    for folder in [runs_dir / study.name, *sorted(runs_dir.glob(f"{study.name}@*"))]:
        launched = load(folder)
        if launched is None:
            continue
        if [*launched.settings] != [*study.settings]:
            problem = f"study {study.name} was launched with other settings, and a launched study is fixed"
            former, now = (", ".join(names) or "none" for names in (launched.settings, study.settings))
            raise ConfigError(problem, f"{former} -> {now}", another_name(study))
        records[folder] = launched
    record = records.get(runs_dir / study.folder_name)
    if record is None:
        return None
    longest = max(records.values(), key=lambda launched: len(launched.seeds))
    return replace(record, seeds=longest.seeds, added_seeds=longest.added_seeds)


def _continued(study: Study, launched: Study) -> Study:
    """The study with the seeds and the precision of its first launch; new seeds of a sweep are added ones."""
    seeds, added = study.seeds, launched.added_seeds
    first = [seed for seed in launched.seeds if seed not in added]
    if [seed for seed in seeds if seed not in added] == first:
        seeds = launched.seeds
    elif study.multirun:
        new = [seed for seed in study.seeds if seed not in launched.seeds]
        seeds, added = [*launched.seeds, *new], [*added, *new]
    precision = [text for text in launched.baseline if key_of(text) == "train.precision"]
    if any(key_of(text) == "train.precision" for text in study.baseline):
        precision = []
    return replace(study, seeds=seeds, added_seeds=added, baseline=[*study.baseline, *precision])


def refuse_change(launched: Study, study: Study) -> None:
    """Refuse a study that is not the one that was launched under its name.

    Raises:
        ConfigError: It differs.
    """
    former, now = _parts(launched), _parts(study)
    changes = [f"{part} added" for part in now if part not in former]
    changes += [f"{part} removed" for part in former if part not in now]
    for part, before in former.items():
        if now.get(part, before) != before:
            changes.append(f"{part}: {before} -> {now[part]}")
    if not changes:
        for arm, hashed in launched.configs.items():
            if study.configs.get(arm) != hashed:
                changes.append(f"{arm} resolves otherwise")
    if changes:
        problem = f"study {study.name} was launched otherwise, and a launched study is fixed"
        raise ConfigError(problem, "; ".join(changes), another_name(study))


def _parts(study: Study) -> dict[str, str]:
    """What a launch fixes, each part as text."""
    values: dict[str, Any] = mask(encode(study))
    parts = {f"arm {name}": str(overrides) for name, overrides in values.pop("arms", {}).items()}
    for text in values.pop("baseline", []):
        key, _, value = text.partition("=")
        parts[f"baseline {key}"] = value
    values["seeds"] = [seed for seed in study.seeds if seed not in study.added_seeds]
    return parts | {key: show(value) for key, value in values.items() if key not in NOT_FIXED}


def prepare_data(planned: Planned) -> None:
    """Tokenize each text of runs that have not begun, once and before anything is written.

    Raises:
        UserError: A text cannot be read, or is too short for a run.
    """
    if all(job.state()[0] != "missing" for job in planned.jobs):
        return
    configs = [*planned.configs.values()]
    longest: dict[str, tuple[Option, int]] = {}
    for config in configs:
        key = str(config.data.flat())
        _, context = longest.get(key, (config.data, 0))
        longest[key] = (config.data, max(context, config.model.context))
    for option, context in longest.values():
        text = prepare(option, context=context)
        for config in configs:
            if config.data == option:
                check_passes(config, len(text.train))
                check_vocabulary(config, text.vocab_size)


def _fix(planned: Planned) -> None:
    """Write study.yaml and the list of runs, or check that another launch has not written another study since.

    Raises:
        UserError: It has, or the disk refuses.
    """
    with _locked(planned.folder):
        launched = load(planned.folder)
        if launched is not None:
            refuse_change(launched, planned.study)
            if added := [seed for seed in launched.seeds if seed not in planned.study.seeds]:
                raise ConfigError("another launch has just added seeds to this study", f"seeds {show(added)}", AGAIN)
        if launched != planned.study:
            save(planned.study, planned.folder)
        runs = "".join(f"{job.path.relative_to(planned.folder)}\n" for job in planned.jobs)
        if runs != read_text(planned.folder / RUN_LIST):
            atomic_write_text(planned.folder / RUN_LIST, runs)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a study's folder, which is made; it is removed where nothing was written into it.

    Raises:
        AlreadyRunning: Another launch of the study holds the lock for a moment, or its jobs are being submitted.
    """
    made = make_directory(folder, folder.parent)
    with storage(folder / "LOCK"):
        lock = take_lock(folder, "is being launched")
    try:
        yield
    except BaseException:
        if folder in made:
            (folder / "LOCK").unlink()
            remove_empty(made)
        raise
    finally:
        release(lock)


def _run(
    planned: Planned,
    launch_overrides: Sequence[str],
    backend: Backend,
    retry_failed: bool,
    seeds: Collection[int],
    compare: str,
) -> tuple[int, str]:
    """Run what is missing of a study of one setting; see `launch`. Returns the status and the stop signal, or ''."""
    study, progress = planned.study, JobProgress(planned.folder, retry_failed)
    chosen = [job for job in planned.jobs if not seeds or job.seed in seeds]
    if study.question:
        progress.say(f"study {study.folder_name}: {study.question}")
    if study.added_seeds:
        progress.say(f"  seeds {show(study.added_seeds)} were added, so the words of this study are exploratory")
    for title, arm in study.equal.items():
        progress.say(f"  {title} equals {arm} and is not trained twice")
    for title, reason in study.refused.items():
        progress.say(f"  {title} is refused: {reason}")
    waiting = missing(chosen, retry_failed)
    ended = [job for job in chosen if job not in waiting]
    for job in ended:
        progress.keep(job, job.result())
    _say_of_other_arithmetic(ended, launch_overrides, progress)
    for job in waiting:
        progress.statuses[job.path] = errors.PREEMPTED
    stopped = backend.run(waiting, progress) if waiting else ""
    progress.end(stopped, compare)
    return progress.status, stopped


def _say_of_other_arithmetic(ended: list[Job], launch_overrides: Sequence[str], progress: JobProgress) -> None:
    """Say which finished runs are kept although this launch asks for another device or for compiled steps."""
    if not any(key_of(text) in ("train.device", "train.compile") for text in launch_overrides):
        return
    unlike = Counter(", ".join(other_arithmetic(compose(job.overrides), job.path)) for job in ended)
    for what, number in unlike.items():
        if what:
            kept = f"{several(number, 'finished run')} trained with {what} than requested, and kept"
            progress.say(f"{kept}; a study of another name trains them as requested")

"""One run from start to end: prepare the data, open the directory, build the model, train, save the summary."""

from __future__ import annotations

import hashlib
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nexus_ablate import errors
from nexus_ablate.config.compose import differences, plugins_used
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.data import TokenizedData, prepare
from nexus_ablate.errors import AlreadyRunning, StorageError, UserError
from nexus_ablate.measure.regime import check_passes
from nexus_ablate.provenance import source_hash, source_hashes
from nexus_ablate.runs import (
    Identity,
    Launch,
    Run,
    arm_name,
    environment,
    identity,
    made_by_other_code,
    open_run,
    read_run,
    run_path,
)
from nexus_ablate.runs.files import refused
from nexus_ablate.track import Tracker, refresh, start_tracker
from nexus_ablate.training.device import IDLE, choose_threads, device_of, processor_name
from nexus_ablate.training.display import Display
from nexus_ablate.training.distributed import World, join, place
from nexus_ablate.training.evaluation import evaluate
from nexus_ablate.training.memory import keep_freed_memory, out_of_memory
from nexus_ablate.training.refusals import check_start, check_world, too_large
from nexus_ablate.training.start import initial_model, science_of


@dataclass
class Outcome:
    """The result of a run: exit status, run directory and summary. `already_finished`: nothing was trained."""

    status: int
    path: Path
    summary: dict[str, Any]
    already_finished: bool = False


def identity_of(config: RunConfig, fingerprint: str) -> Identity:
    """The identity of a run from its configuration, data fingerprint, current code and plugins."""
    return identity(science_of(config), fingerprint, source_hash(), {p.name: p.sha256 for p in plugins_used(config)})


def code_for(config: RunConfig) -> dict[str, Any]:
    """The hashes of the current code and plugins, for env.json."""
    plugins = {p.name: {"directory": str(p.directory), "sha256": p.sha256} for p in plugins_used(config)}
    return {"source": source_hashes(), "plugins": plugins}


def train(
    config: RunConfig,
    overrides: list[str] | None = None,
    quiet: bool = False,
    brief: bool = False,
    arm: str = "",
    run_conditions: dict[str, Any] | None = None,
    warned: Callable[[str], None] | None = None,
) -> Outcome:
    """Train one run: start it, resume it, or return the saved result if it is already finished.

    Args:
        config: From `compose`.
        overrides: As typed by the user; recorded in the run directory.
        quiet: Print nothing.
        brief: Print messages and progress only, for a run among many.
        arm: The arm's name in its study. Default: the run's differences from the default configuration.
        run_conditions: Saved in env.json: what else was running on the machine.
        warned: Takes each warning, printed or not.

    Returns:
        The outcome. In a distributed run only the first process gets the summary.

    Raises:
        UserError: With the documented exit status: configuration 2, diverged 3, checkpoint 4, storage 5, alive
            elsewhere 6, preempted 75. The run directory records the same.
    """
    where = place()
    check_world(config, where)
    with join(where, device_of(config.train)) as world:
        if not world.leads:
            return _follow(world, config)
        display = Display(quiet=quiet, brief=brief, warned=warned)
        try:
            return _lead(world, config, overrides or [], display, arm, run_conditions or {})
        except UserError as error:
            if not world.has_shared:  # the others wait for the decision
                world.share(str(error.status).encode())
            raise


def _follow(world: World, config: RunConfig) -> Outcome:
    """Take part in a distributed run as a process other than the first; returns no summary.

    The first process decides: `train`, or the exit status with which all end, and whose reason it alone prints.
    """
    from nexus_ablate.training.follower import follow

    runs_dir = Path(config.runs_dir)
    decision = world.share(b"").decode()
    if decision != "train":
        return Outcome(int(decision), runs_dir, {}, already_finished=True)
    data = prepare(config.data, context=config.model.context)
    _use_threads(config)
    try:
        follow(config, data, world)
    except (errors.Diverged, errors.Preempted) as error:  # the first process reports it
        return Outcome(error.status, runs_dir, {})
    return Outcome(errors.OK, runs_dir, {})


def _lead(
    world: World, config: RunConfig, overrides: list[str], display: Any, arm: str, run_conditions: dict[str, Any]
) -> Outcome:
    """Train in the first process of a run, usually the only one."""
    data = prepare(config.data, context=config.model.context)
    arm = arm or arm_name(differences(config))
    ident = identity_of(config, data.fingerprint)
    code = code_for(config)
    config_yaml = yaml.safe_dump(
        config.nested() | {"resolved": config.resolved.flat()}, sort_keys=False, allow_unicode=True, width=10**6
    )  # width: a folded line would split a secret, and masking would miss it
    env = environment(sys.argv) | code | {"world_size": world.size} | run_conditions
    path = run_path(config.runs_dir, config.experiment, arm, config.seed, ident)
    launch = Launch(ident, config_yaml, overrides, env)

    def check() -> None:
        check_passes(config, len(data.train))
        check_start(config, data.vocab_size)

    def is_wanted(result: Path) -> bool:
        return not other_arithmetic(config, result)

    with open_run(path, launch, config.rerun, check, is_wanted) as run:
        if run.finished:
            record = read_run(run.path)
            if record.status["state"] == "diverged":
                raise errors.Diverged(
                    record.status["reason"], str(run.path), "rerun=on trains it again, in a new folder beside this one"
                )
            summary = record.summary or {}
            probed = (record.config or {}).get("probe")
            if probed != config.nested()["probe"]:
                display.say("this run has other probe settings than requested; rerun=on trains it again")
            if config.evals:
                summary = evaluate(run.path, config.evals)
                if summary != record.summary:
                    refresh(run.path, display.warn)
            world.share(str(errors.OK).encode())
            display.after(run.path, summary, already_finished=True)
            return Outcome(errors.OK, run.path, summary, already_finished=True)
        if not (run.resuming or config.rerun):
            reasons = []
            if run.path != path:
                unlike = ", ".join(other_arithmetic(config, path))
                reasons.append(f"{path.name} was trained with {unlike} than requested, so its numbers differ")
            if others := made_by_other_code(run.path, ident.config_hash, code):
                reasons.append(f"an earlier run of this configuration, {others[-1]}")
            for reason in reasons:
                display.say(f"{reason}; training again")
                run.log(f"{reason}; training again")
        try:
            world.share(b"train")
            summary, tracker = _train(config, data, run, arm, ident.arm_hash, display, world)
        except BaseException as error:
            known_error = error
            if out_of_memory(error):
                known_error = too_large(config)
            elif isinstance(error, OSError):  # from reads and writes that bypass runs/files.py
                known_error = refused(error)
            _give_up(run, display, known_error, "" if isinstance(error, UserError) else traceback.format_exc())
            raise known_error from (None if known_error is error else error)
    try:
        summary = evaluate(run.path, config.evals) if config.evals else summary
    finally:
        tracker.finish("finished", summary)
    display.after(run.path, summary)
    return Outcome(errors.OK, run.path, summary)


def other_arithmetic(config: RunConfig, path: Path) -> list[str]:
    """The device and train.compile of a finished run, where a configuration asks for others: its numbers would differ.

    The number of CPU threads isn't among them: losses were equal to the last bit with one and with two. Of a damaged
    run nothing is known; what reads its result says so.
    """
    try:
        summary = read_run(path).summary or {}
    except UserError:
        return []
    train, unlike = config.train, []
    device = str(summary.get("device", train.device)).partition(":")[0]
    if train.device != "auto" and train.device.partition(":")[0] != device:
        unlike.append(f"another device ({device})")
    compiled = summary.get("compiled")
    if compiled is not None and train.compile != "auto" and (train.compile != "off") != compiled:
        unlike.append(f"another train.compile ({'on' if compiled else 'off'})")
    return unlike


def _use_threads(config: RunConfig) -> tuple[int, str]:
    """Set the number of CPU threads. Returns it, and a warning if fewer cores are idle."""
    import torch

    threads, warning = choose_threads(config.train.threads, IDLE)
    torch.set_num_threads(threads)
    keep_freed_memory()
    return threads, warning


def _state_after(error: BaseException) -> str:
    """The state of a run that an error ended."""
    if isinstance(error, KeyboardInterrupt):
        return "preempted"
    known = {errors.DIVERGED: "diverged", errors.PREEMPTED: "preempted", errors.ALIVE: "preempted"}
    return known.get(errors.status_of(error), "failed")


def _give_up(run: Run, display: Any, error: BaseException, trace: str) -> None:
    """Record in the run directory why the run ended."""
    display.stop()
    state = _state_after(error)
    if isinstance(error, KeyboardInterrupt):  # only before the first step, so nothing is lost
        reason, trace = "interrupted before training", ""
    else:
        reason = error.problem if isinstance(error, UserError) else errors.described(error)
    try:
        run.status(state, reason, trace, errors.status_of(error))
        run.log(f"{state}: {reason}" + (f"\n{trace}" if trace else ""))
    except (StorageError, AlreadyRunning) as refused_write:
        if not isinstance(error, type(refused_write)):  # the original error already reports it
            raise


def _train(
    config: RunConfig, data: TokenizedData, run: Run, arm: str, arm_hash: str, display: Any, world: World
) -> tuple[dict[str, Any], Tracker]:
    """Build the model, train it and save the summary. The tracker stays open for evaluations."""
    import torch

    from nexus_ablate.optimizers import decay_groups
    from nexus_ablate.training.run_facts import run_facts
    from nexus_ablate.training.signals import StopRequest
    from nexus_ablate.training.trainer import Trainer

    threads, warning = _use_threads(config)
    if warning:
        display.say(warning)
    model = initial_model(config, data.vocab_size)
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    run.write_json("init.json", {name: {"z": z, "shape": shapes[name]} for name, z in model.z_hashes.items()})
    z_hashes = "\n".join(f"{name} {z}" for name, z in sorted(model.z_hashes.items()))
    model.to(world.device)
    tracker = start_tracker(config.tracker, run.path, display.say, display.warn)
    try:
        with StopRequest() as stop:
            trainer = Trainer(config, model, data, run, tracker, display, stop, world)
            groups = decay_groups(model, config.schedule.decay, config.schedule.groups)
            facts = run_facts(trainer, arm, groups, threads)
            display.before(facts)
            run.write_json("decay_groups.json", groups)
            run.status("running")
            run.log("; ".join(f"{name}: {value}" for name, value in facts.items()))
            summary = trainer.fit() | {
                "arm_hash": arm_hash,
                "init_hash": hashlib.sha256(z_hashes.encode()).hexdigest(),
                "train_tokens": len(data.train),
                "threads": threads,
                "device": str(world.device),
                "processor": processor_name(world.device.type),
                "float32_matmul_precision": torch.get_float32_matmul_precision(),
                "world_size": world.size,
            }
        run.write_summary(summary)
        run.status("finished")
    except BaseException as error:
        tracker.finish(_state_after(error), {})
        raise
    return summary, tracker

"""`nexus-ablate -m KEY=A,B ...`: every combination, through Hydra's sweeper and any of its launchers.

A launcher collects the return values of its jobs and gives up if one job is gone. The results are then read from the
run directories.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nexus_ablate import errors
from nexus_ablate.config.compose import compose, compose_values, differences
from nexus_ablate.config.overrides import check_overrides, searches
from nexus_ablate.config.resolve import from_values, precision_on
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.console import SHORTEST_NAME, grid, middle, open_console
from nexus_ablate.errors import ConfigError, UserError, unknown
from nexus_ablate.execution.launcher import open_hydra, require, require_sweeper
from nexus_ablate.execution.ranking import RANKING, ranked
from nexus_ablate.execution.status import nearer
from nexus_ablate.runs import arm_name, has_status, read_run, run_path

STATUS = {
    "finished": errors.OK,
    "diverged": errors.DIVERGED,
    "preempted": errors.PREEMPTED,
    "created": errors.ALIVE,
    "running": errors.ALIVE,
}

SWEEP = "NEXUS_ABLATE_SWEEP"
"""The environment variable with the number of jobs of this multirun, the overrides that all share, and what varies."""
NEVER, GONE = "it never started", "its process ended without reporting why"


def multirun(overrides: list[str]) -> int:
    """Train every combination.

    Returns:
        The first nonzero exit status of a run, after all have run.
    """
    check_overrides(overrides, sweeps=True)
    launcher = next((text.partition("=")[2] for text in overrides if text.startswith("hydra/launcher=")), "basic")
    require(launcher)
    require_sweeper(next((text.partition("=")[2] for text in overrides if text.startswith("hydra/sweeper=")), "basic"))

    from hydra.errors import HydraException

    from nexus_ablate.execution.cluster import refuse_secrets
    from nexus_ablate.execution.cluster_job import SOURCE
    from nexus_ablate.provenance import source_hash

    by_submitit = "slurm" in launcher or "submitit" in launcher
    if by_submitit:
        refuse_secrets(overrides)
    for text in overrides:
        if text.startswith("hydra.sweep.dir=") and not by_submitit:
            raise ConfigError("runs are kept in runs_dir; Hydra's sweep directory is not used", text, "runs_dir=runs")

    os.environ[SOURCE] = source_hash()
    searching = searches(overrides)
    _ROWS.clear()
    with open_hydra() as (hydra, scratch):
        try:
            _check_plugins(overrides, hydra.config_loader)
            combinations = _combinations(overrides, hydra.config_loader)
            _try_out(combinations)
            train = compose_values(combinations[0])["train"]
            if launcher == "basic" and not searching:
                _refuse_what_every_run_lacks(combinations)
            if launcher != "basic" and train["precision"] == "auto":  # which could mean something else on a node
                pinned = f"train.precision={precision_on(train['device'])}"
                overrides, combinations = [*overrides, pinned], [[*each, pinned] for each in combinations]
            shared = sorted(set.intersection(*map(set, combinations)))
            os.environ[SWEEP] = json.dumps([None if searching else len(combinations), shared, _group_of(overrides)])
            folder = _submitit_folder(overrides, hydra) if "slurm" in launcher else None
            where = [f"hydra.launcher.submitit_folder='{folder}'"] if folder else []
            if not by_submitit:  # Hydra records the overrides as typed, secrets included
                where = [f"hydra.sweep.dir='{scratch}'"]
            try:
                returned = hydra.multirun("config", job, [*overrides, *where], with_log_configuration=False)
                if returned is None:  # from a sweeper that keeps the results to itself
                    results = list(_ROWS)
                else:
                    results = [job_return.return_value for batch in returned for job_return in _batch(batch)]
            except (HydraException, UserError):
                raise
            except Exception as error:  # a launcher can raise anything if a job is gone
                if launcher == "basic":  # it runs jobs in this process
                    raise
                results = _after(error, combinations, folder)
        except HydraException as error:
            raise ConfigError(str(error).splitlines()[0], " ".join(overrides), "nexus-ablate train --help") from error
    _summary(results)
    return next((r["status"] for r in results if r["status"] != errors.OK), errors.OK)


def _check_plugins(overrides: list[str], loader: Any) -> None:
    """Raises:
    ConfigError: A launcher or sweeper that isn't installed.
    """
    for text in overrides:
        group, _, name = text.partition("=")
        if group in ("hydra/launcher", "hydra/sweeper"):
            options = loader.get_group_options(group)
            if name not in options:
                raise unknown("Hydra has no installed plugin of this name", name, options, f"{group}={{}}")


class RunRow(dict[str, Any]):
    """A run's row of the result table. As a number it is the validation loss, which a searching sweeper minimizes."""

    def __float__(self) -> float:
        return float(self.get("val_loss", math.inf))


_ROWS: list[RunRow] = []
"""The rows of this multirun's runs that were started by this process."""


def job(composed: Any) -> RunRow:
    """One run of a multirun, in the process that the launcher chose. Returns its row; a failure doesn't stop others."""
    row = _trained()
    _ROWS.append(row)
    return row


def _trained() -> RunRow:
    from hydra.core.hydra_config import HydraConfig

    from nexus_ablate.execution.apart import APART
    from nexus_ablate.execution.cluster_job import SOURCE, in_job, train_in_job
    from nexus_ablate.execution.worker import Order

    overrides = list(HydraConfig.get().overrides.task)
    try:
        config = from_values(compose_values(overrides))
        path = path_of(config)
    except UserError as error:
        print(error, file=sys.stderr)
        return RunRow(_refused(overrides, error))
    name = _name_of_job(overrides, config.seed)
    print(name, file=sys.stderr, flush=True)
    order = Order(
        overrides,
        arm_name(differences(config)),
        {"multirun": _sweep()[2]},
        brief=True,
        source=os.environ.get(SOURCE, ""),
    )
    answer = train_in_job(order, path.name.partition("-")[2]) if in_job() else APART.train(order, path)
    row = RunRow(_row(config, overrides, answer.path or path) | {"status": answer.status, "why": answer.reason})
    end = f"val loss {row['val_loss']:.4f}" if "val_loss" in row else answer.reason
    print(f"{name}  {errors.printable(end)}", file=sys.stderr, flush=True)
    return row


def _name_of_job(overrides: list[str], seed: int) -> str:
    """`job 3/8  norm=layer  seed 1`: its number, its overrides that not all jobs of the multirun have, its seed."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    total, shared, _ = _sweep()
    settings = HydraConfig.get().job
    number = "" if OmegaConf.is_missing(settings, "num") else f" {int(settings.num) + 1}"
    number += f"/{total}" if number and total else ""
    arm = _distinct(overrides, shared)
    width = max(SHORTEST_NAME, open_console(stderr=True).width - 50)
    return errors.printable(f"job{number}  {middle(arm, width)}  seed {seed}")


def _sweep() -> tuple[int | None, list[str], str]:
    return tuple(json.loads(os.environ.get(SWEEP, '[null, [], ""]')))


def _group_of(overrides: list[str]) -> str:
    """What a multirun varies, as typed: `norm=layer,rms placement=pre,post`; '' if an experiment gathers its runs."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    if any(text.startswith("experiment=") for text in overrides):
        return ""
    swept = [each for each in OverridesParser.create().parse_overrides(overrides) if each.is_sweep_override()]
    return errors.printable(
        " ".join(str(each.input_line) for each in swept if each.key_or_group != "seed") or "baseline"
    )


def _distinct(overrides: Iterable[str], shared: Iterable[str]) -> str:
    """An arm by the overrides that not all of them share, without the seed."""
    own = [text for text in overrides if text not in shared and not text.startswith("seed=")]
    return re.sub(r"\\(.)", r"\1", ",".join(own)) or "baseline"  # without what Hydra escapes


def path_of(config: RunConfig) -> Path:
    """The run directory of a configuration."""
    from nexus_ablate.data import fingerprint_of
    from nexus_ablate.training.session import identity_of

    ident = identity_of(config, fingerprint_of(config.data, config.model.context))
    return run_path(config.runs_dir, config.experiment, arm_name(differences(config)), config.seed, ident)


def _refused(overrides: list[str], error: UserError) -> dict[str, Any]:
    """A row of the result table, of overrides that are no run."""
    return {"name": _distinct(overrides, _sweep()[1]), "status": error.status, "why": error.problem}


def _row(config: RunConfig, overrides: list[str], path: Path) -> dict[str, Any]:
    """A row of the result table, from a run's directory."""
    row: dict[str, Any] = {"name": _distinct(overrides, _sweep()[1]), "seed": config.seed, "why": ""}
    row["changes"] = [f"{key}={value}" for key, value in differences(config).items()]
    if not has_status(path):
        return row | {"status": errors.BUG, "why": NEVER}
    try:
        run = read_run(path)
    except UserError as error:
        return row | {"status": errors.BUG, "why": error.problem, "path": str(path)}
    why = run.status.get("reason") or ("" if run.state in STATUS else GONE)
    row |= {"path": str(path), "status": STATUS.get(run.state, errors.BUG), "why": why}
    loss = (run.summary or {}).get("val_loss")
    return row if run.state != "finished" or loss is None else row | {"val_loss": loss}


def _batch(returned: Any) -> list[Any]:
    return list(returned) if isinstance(returned, list | tuple) else [returned]


def _combinations(overrides: list[str], loader: Any) -> list[list[str]]:
    """The combinations that Hydra's basic sweeper makes of the overrides, in its order; an interval is its start."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import IntervalSweep, ValueType

    task_overrides = [text for text in overrides if not text.lstrip("+~").startswith("hydra")]
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(task_overrides)
    for override in parsed:
        if isinstance(sweep := override.value(), IntervalSweep):
            override._value, override.value_type = sweep.start, ValueType.ELEMENT
    return BasicSweeper.split_arguments(parsed, None)[0]


def _try_out(combinations: list[list[str]]) -> None:
    """Refuse what would fail in every run alike.

    Raises:
        ConfigError: No combination, an interpolation of nothing, or a runs_dir that cannot be written.
    """
    if not combinations:  # of a glob that matches nothing
        raise ConfigError("a multirun has no run", "no combination", "nexus-ablate -m norm=layer,rms seed=0,1,2")
    by_text = {text: combination for combination in combinations for text in combination}
    for text, combination in by_text.items():
        if re.search(r"\$\W*{", text):  # an interpolation, as the sweeper escapes it
            compose_values(combination)
    folder = Path(str(compose_values(combinations[0])["runs_dir"])).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        tempfile.TemporaryDirectory(dir=existing, prefix=".nexus_ablate-").cleanup()
    except OSError as error:
        got, fix = f"{existing}: {error.strerror}", "runs_dir=/tmp/runs"
        raise ConfigError("runs_dir cannot be written", got, fix) from error


def _refuse_what_every_run_lacks(combinations: list[list[str]]) -> None:
    """Say once what this machine has for none of the combinations: a device, a text, a checkpoint.

    Raises:
        UserError: The refusal of the first combination, if each is refused.
    """
    from nexus_ablate.training.device import choose_device

    first: UserError | None = None
    for overrides in combinations:
        try:
            config = from_values(compose_values(overrides))
            if config.train.device != "auto":  # which would lease a GPU to this process
                choose_device(config.train.device)
            path_of(config)
            return
        except UserError as error:
            first = first or error
    if first is not None:
        raise first


def _submitit_folder(overrides: list[str], hydra: Any) -> Path:
    """The folder for submitit's files of this sweep. Fixing its time stamp here makes the jobs findable later.

    Raises:
        ConfigError: SLURM would refuse the jobs.
    """
    from hydra.types import RunMode

    from nexus_ablate.execution.cluster import try_out

    composed = hydra.compose_config("config", overrides, run_mode=RunMode.MULTIRUN, with_log_configuration=False)
    launcher = composed.hydra.launcher
    flags = {key: launcher[key] for key in ("partition", "qos", "account", "constraint", "gres")}
    flags |= {"time": launcher.timeout_min, "cpus-per-task": launcher.cpus_per_task, **launcher.additional_parameters}
    flags |= {"mem": f"{launcher.mem_gb}G"} if launcher.mem_gb else {}
    try_out([f"--{key}={value}" for key, value in flags.items() if value is not None])
    return Path(launcher.submitit_folder).absolute()


def _after(error: Exception, combinations: list[list[str]], folder: Path | None) -> list[dict[str, Any]]:
    """One row per combination, for a launcher that could not collect all results.

    Args:
        error: The launcher's exception.
        combinations: In the order of the jobs.
        folder: submitit's folder of this sweep, for a launcher that uses SLURM.

    Raises:
        ConfigError: The launcher started no run.
    """
    from nexus_ablate.execution.cluster_queue import CRASHED, sweep_entries
    from nexus_ablate.execution.queue import mark_failed

    entries = sweep_entries(folder) if folder else []
    results = []
    for number, overrides in enumerate(combinations):
        try:
            config = compose(overrides)
            path = path_of(config)
        except UserError as refused:
            results.append(_refused(overrides, refused))
            continue
        row = _row(config, overrides, path)
        entry = entries[number] if len(entries) == len(combinations) else None
        if row["why"] in (GONE, NEVER):
            if entry is None or entry.state in CRASHED:
                mark_failed(path, entry.description() if entry else GONE)
            row["why"] = entry.description() if entry else row["why"]
        results.append(row)
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    reason = f"{type(error).__name__}: {first}"
    if not entries and all(row["why"] == NEVER for row in results):
        raise ConfigError("nothing was launched", reason, "nexus-ablate doctor") from error
    print(f"the launcher gave up ({reason}); showing the state of each run", file=sys.stderr)
    return results


def _summary(results: Sequence[dict[str, Any]]) -> None:
    """Print which runs didn't finish, the arms by loss, how many finished, and the next command."""
    console = open_console(stderr=True)
    losses: dict[tuple[str, int], float | None] = {}
    for number, result in enumerate(results):
        losses[(result["name"], result.get("seed", number))] = result.get("val_loss")
        if result["why"]:
            parts = [result["name"], f"seed {result['seed']}" if "seed" in result else "", result["why"]]
            parts += [nearer(Path(result["path"]))] if "path" in result else []
            console.print(errors.printable("  ".join(filter(None, parts)), 1000), markup=False, soft_wrap=True)
    if ranking := ranked(losses):
        console.print()
        console.print(grid(RANKING, ranking, console.width))
        console.print()
    finished = [result for result in results if result["status"] == errors.OK]
    print(f"{len(finished)} of {len(results)} runs finished", file=sys.stderr)
    arms = {Path(result["path"]).parent: set(result["changes"]) for result in finished if "path" in result}
    if arms:
        words = ["compare" if len(arms) > 1 else "status", *sorted(map(nearer, arms))]
        if not any(all(plain <= other for other in arms.values()) for plain in arms.values()):
            words += ["--baseline", next(iter(arms)).name]  # every arm makes a change that some other arm lacks
        print(f"next  {errors.printable(shlex.join(['nexus-ablate', *words]), 4096)}", file=sys.stderr)

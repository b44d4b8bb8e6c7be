"""`nexus-ablate KEY=VALUE ...`: one run; with -m, every combination through Hydra's sweeper and launcher."""

from __future__ import annotations

import sys
from typing import Any

from nexus_ablate import errors
from nexus_ablate.composition import check_overrides, compose, search_plugins
from nexus_ablate.errors import ConfigError, UserError
from nexus_ablate.registry import conf_dir

HELP = """nexus-ablate [train] [KEY=VALUE ...]        one run
nexus-ablate -m KEY=A,B KEY=C,D ...         every combination, through Hydra

  nexus-ablate norm=rms placement=pre
  nexus-ablate norm=layer placement=post bias=on d_ff_ratio=8/3 weight_decay=0 position=alibi train.steps=50
  nexus-ablate model=micro train.device=cuda:1 data=files data.files=[book.txt]
  nexus-ablate -m norm=layer,rms placement=pre,post seed=0,1,2

`nexus-ablate list` names every key and option. `--cfg job` prints the configuration and trains nothing.
The same command again: a finished run prints its result, an interrupted one goes on. Exit status: 0 ok, 1 a bug,
2 configuration, 3 diverged, 4 checkpoint unusable, 5 storage, 6 alive elsewhere, 75 preempted."""

HYDRA_FLAGS = (
    "--cfg",
    "-c",
    "--info",
    "-i",
    "--hydra-help",
    "--shell-completion",
    "-sc",
    "--resolve",
    "--package",
    "-p",
)


def run(arguments: list[str]) -> int:
    """Train what the arguments ask for."""
    if any(a in ("-h", "--help") for a in arguments):
        print(HELP)
        return errors.OK
    if any(a.split("=")[0] in HYDRA_FLAGS for a in arguments):
        return _hydra_flag(arguments)
    flags = [a for a in arguments if a.startswith("-")]
    overrides = [a for a in arguments if not a.startswith("-")]
    for flag in flags:
        if flag not in ("-m", "--multirun"):
            raise errors.unknown("train has no flag of this name", flag, ["-m", "--multirun", "--help", *HYDRA_FLAGS])
    if flags:
        return multirun(overrides)
    return single(overrides)


def single(overrides: list[str]) -> int:
    """One run in this process."""
    from nexus_ablate.training.device import share_cores_politely

    config = compose(overrides)
    share_cores_politely()
    from nexus_ablate.training.session import train

    return train(config, overrides).status


def multirun(overrides: list[str]) -> int:
    """Every combination, through Hydra's sweeper and whatever launcher was chosen.

    Returns:
        The first exit status that is not 0, after all runs had their turn.
    """
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException

    from nexus_ablate.training.device import share_cores_politely

    check_overrides(overrides)
    share_cores_politely()  # launched processes inherit it
    search_plugins()
    with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        try:
            returned = hydra.multirun(
                config_name="config", task_function=job, overrides=overrides, with_log_configuration=False
            )
        except HydraException as error:
            raise ConfigError(str(error).splitlines()[0], " ".join(overrides)) from error
    results = [job_return.return_value for batch in returned for job_return in _batch(batch)]
    _table(results)
    return next((r["status"] for r in results if r["status"] != errors.OK), errors.OK)


def _batch(returned: Any) -> list[Any]:
    return list(returned) if isinstance(returned, list | tuple) else [returned]


def job(composed: Any) -> dict[str, Any]:
    """One run of a multirun, in whatever process the launcher chose; its failure is its own."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    from nexus_ablate.config import from_values
    from nexus_ablate.runs import arm_name

    overrides = list(HydraConfig.get().overrides.task)
    told: dict[str, Any] = {"arm": ",".join(overrides) or "baseline", "status": errors.OK, "why": ""}
    try:
        config = from_values(OmegaConf.to_container(composed, resolve=True))  # type: ignore[arg-type]
        from nexus_ablate.composition import differences
        from nexus_ablate.training.session import train

        told["arm"] = f"{arm_name(differences(config))} s{config.seed}"
        outcome = train(config, overrides, brief=True)
        told |= {"path": str(outcome.path), "val_loss": outcome.summary["val_loss"]}
    except UserError as error:
        print(error, file=sys.stderr)
        told |= {"status": error.status, "why": error.what}
    except Exception as error:  # a bug in one run: its traceback is in its status.json; the others have their turn
        import traceback

        traceback.print_exc()
        told |= {"status": errors.BUG, "why": f"{type(error).__name__}: {error}"}
    return told


def _table(results: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("arm", "val loss", "", "where"):
        table.add_column(name, overflow="fold")
    for told in results:
        loss = f"{told['val_loss']:.4f}" if "val_loss" in told else "-"
        cells = (told["arm"], loss, told["why"], told.get("path", "-"))
        table.add_row(*(escape(errors.printable(cell)) for cell in cells))
    Console(file=sys.stderr, highlight=False).print("", table)


def _hydra_flag(arguments: list[str]) -> int:
    """What Hydra itself answers: --cfg, --info, shell completion."""
    import hydra

    search_plugins()
    sys.argv = [sys.argv[0], *arguments]
    hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(lambda composed: None)()
    return errors.OK

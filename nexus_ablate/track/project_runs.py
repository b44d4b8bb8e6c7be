"""The runs of a W&B project as rows of results, for `nexus-ablate judge`. Changes nothing on W&B."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nexus_ablate.comparison.listed import NO_SEED, REQUIRED, Source
from nexus_ablate.errors import ConfigError, printable
from nexus_ablate.track.account import LOG_IN, REFUSAL, asked, quiet_client

TIMEOUT = 60
"""Seconds that a page of runs may take."""
DIVERGED = "diverged"
ATTRIBUTES = ("name", "id", "group", "job_type", "state")
SENT = {"rate": "config.optim.lr", "tokens": "summary.tokens", "seconds": "summary.seconds"}
"""Optional columns of runs that this package sent."""


def runs_on_wandb(
    place: str,
    filters: Mapping[str, Any],
    endpoint: str,
    columns: Mapping[str, str],
) -> tuple[Source, dict[str, str]]:
    """The finished runs of a project as rows.

    Args:
        place: `ENTITY/PROJECT`.
        filters: As `wandb.Api().runs` takes them.
        endpoint: The measure to judge by.
        columns: What W&B calls `arm`, `seed`, the endpoint, and so on: `config.KEY`, `summary.KEY`, `name`, `id`,
            `group`, `job_type` or `state`. Default: what this package sends. Other optional columns are never guessed.

    Returns:
        The rows, and the whole mapping of columns. Runs that have not finished, or lack an arm, a seed or the endpoint,
        are left out with the reason.

    Raises:
        ConfigError: There is no key, no such project, no access to it, or no usable run.
        UserError: W&B failed.
    """
    parts = place.split("/")
    if len(parts) != 2 or not all(parts):
        raise ConfigError("W&B runs are named by entity and project", f"wandb:{place}", "wandb:ENTITY/PROJECT")
    names = {"arm": "config.arm", "seed": "config.seed", endpoint: f"summary.{endpoint}", **SENT, **columns}
    for name, column in names.items():
        is_field = column.startswith(("config.", "summary."))
        if not is_field and column not in ATTRIBUTES and (name, column) != ("seed", NO_SEED):
            fix = f"--columns {name}=config.{column} or {name}=summary.{column}; or one of {', '.join(ATTRIBUTES)}"
            raise ConfigError("W&B has no such column", f"{name}={column}", fix)
    required = [names[name] for name in (*REQUIRED, endpoint) if names[name] != NO_SEED]
    rows, left_out, reasons = [], [], []
    for run in _runs(place, filters):
        where = f"{place}/{run.id}"
        cells = {column: _cell(run, column) for column in names.values()}
        cells = {column: value for column, value in cells.items() if value is not None}
        diverged = run.summary.get("status") == DIVERGED  # sent by nexus-ablate; to W&B such a run has failed
        if diverged:
            cells[names[endpoint]] = DIVERGED
        lacking = [column for column in required if column not in cells]
        if (run.state == "finished" or diverged) and not lacking:
            rows.append((where, cells))
            continue
        reasons.append(f"has no {', '.join(lacking)}" if run.state == "finished" else run.state)
        left_out.append((where, f"{reasons[-1]} ({printable(str(run.name), 60)})"))
    if not rows:
        got = "; ".join(dict.fromkeys(reasons)) or "no runs"
        fix = "--columns arm=config.KEY,seed=config.KEY,val_loss=summary.KEY, or other --filters"
        raise ConfigError("the project has no finished run to judge", f"wandb:{place}: {got}", fix)
    present = {column for _, cells in rows for column in cells}
    for name in SENT:
        if name not in columns and names[name] not in present:
            del names[name]
    return Source(f"wandb:{place}", rows, tuple(left_out)), names


def _runs(place: str, filters: Mapping[str, Any]) -> list[Any]:
    import wandb

    quiet_client()
    with asked("W&B failed", "the same command again"):
        try:
            return list(wandb.Api(timeout=TIMEOUT).runs(place, filters=dict(filters), lazy=False))
        except Exception as error:  # W&B may raise anything
            if not REFUSAL.search(str(error)):
                raise
            fix = f"check the name, and that your key may read it ({LOG_IN})"
            raise ConfigError("W&B has no such project, or your key may not read it", f"wandb:{place}", fix) from error


def _cell(run: Any, column: str) -> Any:
    """A run's attribute, or a key of its config or summary: the whole key if there is one, else its parts."""
    if column in ATTRIBUTES:
        return getattr(run, column, None)
    head, _, key = column.partition(".")
    values = run.config if head == "config" else run.summary_metrics
    if key in values:
        return values[key]
    for part in key.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values

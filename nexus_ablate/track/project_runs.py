"""The runs of a W&B project as a table, for `nexus-ablate judge`. Changes nothing on W&B."""

from __future__ import annotations

from nexus_ablate.comparison.foreign import DIVERGED, Source, source_of
from nexus_ablate.errors import ConfigError
from nexus_ablate.track.account import LOG_IN, REFUSAL, asked, quiet_client

TIMEOUT = 60
"""Seconds that a page of runs may take."""


def runs_on_wandb(place: str) -> Source:
    """The runs of a project with the columns of W&B's own export: name, state, group, configuration and summary.

    Args:
        place: `ENTITY/PROJECT`.

    Raises:
        ConfigError: There is no key, no such project, no access to it, or it has no runs.
        UserError: W&B failed.
    """
    quiet_client()
    with asked("W&B failed", "the same command again"):
        import wandb

        try:
            runs = [*wandb.Api(timeout=TIMEOUT).runs(place, lazy=False)]
        except Exception as error:  # W&B may raise anything
            if not REFUSAL.search(str(error)):
                raise
            fix = f"check the name, and that your key may read it ({LOG_IN})"
            raise ConfigError("W&B has no such project, or your key may not read it", f"wandb:{place}", fix) from error
    rows = {}
    for run in runs:
        row = {**run.config, **run.summary_metrics, "ID": run.id, "Name": run.name, "group": run.group}
        is_diverged = row.pop("status", "") == DIVERGED  # sent by nexus-ablate; to W&B such a run has failed
        rows[f"{place}/{run.id}"] = {**row, "State": DIVERGED if is_diverged else run.state}
    return source_of(f"wandb:{place}", rows)

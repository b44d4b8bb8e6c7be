"""`nexus-ablate sync DIR...`: sends runs to W&B from their directories; can be repeated."""

from __future__ import annotations

import sys

from nexus_ablate.cli.flags import WANDB, Flags
from nexus_ablate.cli.verb import Verb
from nexus_ablate.errors import OK, AlreadyRunning, UserError

VERB = Verb(
    "sync",
    "send local runs to W&B; can be repeated",
    "DIR...",
    (
        ("sync runs/norms", "every run of a study"),
        ("sync runs/scratch/baseline/s0-1a2b3c4d", "one run"),
        ("sync runs --wandb team/mine", "to another project"),
    ),
    (WANDB,),
    "Sends what W&B does not have yet: rows, summary, and heat maps of the probe. Reads only the run "
    "directory. A run keeps its place on W&B (wandb.json), and no step is sent twice. Skips runs that are in "
    "training or that another process still sends.",
    "at least one directory",
)


def run(dirs: list[str], flags: Flags) -> int:
    """Send the runs in turn. For a damaged run, print the reason and continue with the others."""
    from nexus_ablate.console import grid, open_console
    from nexus_ablate.runs import read_run
    from nexus_ablate.runs.lookup import id_of, runs_at
    from nexus_ablate.runs.ownership import LIVE
    from nexus_ablate.track import sync
    from nexus_ablate.track.account import WandbFailed, require_key

    require_key()
    entity, _, project = flags.get("wandb", "").rpartition("/")
    paths = runs_at(dirs, "sync")
    status, pages, rows = OK, [], []
    try:
        for path in paths:
            try:
                record = read_run(path)
                run = (record.arm, id_of(path), f"{record.seed}")
                if record.state in LIVE:
                    rows.append((*run, f"{record.state}, skipped", "", ""))
                    continue
                done = sync(record, project or None, entity or None)
            except WandbFailed:
                raise
            except AlreadyRunning:
                rows.append((*run, "being sent, skipped", "", ""))
                continue
            except UserError as error:
                print(error, file=sys.stderr)
                status = status or error.status
                continue
            rows.append((*run, record.state, f"{done.before:,}", f"{done.sent:,}"))
            pages.append(done.url)
    finally:  # after an error of W&B, this shows what was sent
        console = open_console()
        if rows:
            heads = ("arm", "id", "seed", "state", "rows there", "rows sent")
            console.print(grid(heads, rows, console.width, ("id", "state")))
        if len(pages) > 1:
            pages = sorted({page.partition("/runs/")[0] for page in pages})
        for page in pages:
            console.print(f"W&B: {page}", markup=False, soft_wrap=True)
    return status

"""Send a run directory to W&B afterwards: it had no tracker, was offline or was cut off. Deletes nothing on W&B."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable
from pathlib import Path

from nexus_ablate.config.options import Option
from nexus_ablate.errors import UserError
from nexus_ablate.runs import RunRecord, read_run
from nexus_ablate.track.account import asked, resolve_mode
from nexus_ablate.track.mirror import INIT_TIMEOUT, PATIENCE
from nexus_ablate.track.run_on_wandb import PLACE_FILE, place_of, settings_of
from nexus_ablate.track.upload import Upload, only_sender

SYNC_INIT, SYNC_FINISH = 30.0, 600.0  # seconds; long, since the command has nothing else to do


def sync(
    record: RunRecord,
    project: str | None = None,
    entity: str | None = None,
    init: float = SYNC_INIT,
    finish: float = SYNC_FINISH,
) -> Upload:
    """Send what W&B doesn't have of a run: rows, the heat maps of the probe, summary, state.

    Args:
        record: A run that isn't being trained.
        project: The W&B project. Default: where the run was before, or the project of its `tracker` option.
        entity: The W&B entity, with the same default.
        init: Seconds until W&B must have accepted the run.
        finish: Seconds until it must have taken everything.

    Returns:
        The closed upload, which knows how many rows were sent.

    Raises:
        ConfigError: There is no key.
        AlreadyRunning: Another process sends it.
        WandbFailed: W&B failed; rows already sent aren't sent again.
        UserError: A file of the run is damaged.
    """
    place = place_of(record.path, _tracker(record), project, entity)
    named = shlex.quote(str(record.path / PLACE_FILE))
    fix = f"the same command again; first rm {named} if the run was deleted on W&B"
    with asked("W&B failed", fix), only_sender(record.path), tempfile.TemporaryDirectory() as scratch:
        upload = Upload(record, place, settings_of(record, place, "online", Path(scratch), init, finish))
        try:
            upload.close(record.state, record.summary or {})
        except UserError:
            upload.abandon()
            raise
    return upload


def refresh(path: Path, say: Callable[[str], None]) -> None:
    """Send later results of a finished run, such as an evaluation, if the run is on W&B already."""
    record, sends = read_run(path), f"`nexus-ablate sync {shlex.quote(str(path))}` sends it"
    if not (path / PLACE_FILE).exists():
        return
    if resolve_mode(_tracker(record)) != "wandb":
        say(f"W&B lacks what is new of this run; {sends}")
        return
    try:
        sync(record, init=INIT_TIMEOUT, finish=PATIENCE)
    except UserError as error:
        got = f" ({error.got})" if error.got else ""
        say(f"{error.problem}{got}; nothing is lost: {sends}")


def _tracker(record: RunRecord) -> Option:
    chosen = dict((record.config or {}).get("tracker") or {})
    return Option(str(chosen.pop("name", "files")), chosen)

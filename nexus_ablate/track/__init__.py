"""Where a run's rows go besides its own directory: nowhere, or to W&B as a mirror that can fail without consequence.

The run directory is the truth. The mirror reads `metrics.jsonl` as the run writes it, `sync` reads it afterwards: both
send by the same way what W&B does not have yet, so that it does not matter which of them a run went through, or how
often.
"""

from nexus_ablate.track.account import resolve_mode
from nexus_ablate.track.compared import publish
from nexus_ablate.track.mirror import FilesTracker, Tracker, WandbTracker, start_tracker
from nexus_ablate.track.push import Synced, refresh, sync

__all__ = [
    "FilesTracker",
    "Synced",
    "Tracker",
    "WandbTracker",
    "publish",
    "refresh",
    "resolve_mode",
    "start_tracker",
    "sync",
]

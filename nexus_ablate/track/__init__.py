"""An optional copy of a run on W&B. The run doesn't depend on it.

The run directory is authoritative. The mirror reads `metrics.jsonl` while the run writes it, `sync` reads it later.
Both send what W&B doesn't have yet with the same code, so they can be combined and repeated.
"""

from nexus_ablate.track.mirror import FilesTracker, Tracker, start_tracker
from nexus_ablate.track.push import refresh, sync

__all__ = ["FilesTracker", "Tracker", "refresh", "start_tracker", "sync"]

"""A comparison on W&B: a separate W&B run with the verdict table, the report, and both as an artifact."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nexus_ablate.errors import printable
from nexus_ablate.track.account import asked
from nexus_ablate.track.push import SYNC_FINISH, SYNC_INIT
from nexus_ablate.track.run_on_wandb import MAX_NAME, quiet
from nexus_ablate.track.upload import begin


def publish(
    project: str,
    name: str,
    answer: str,
    tables: Mapping[str, tuple[Sequence[str], Sequence[Sequence[str]]]],
    files: Mapping[str, str],
) -> str:
    """Send a comparison. A later one of the same name continues its W&B run; unchanged files make no new version.

    Args:
        project: `project` or `entity/project`.
        name: The study, or what else is compared.
        answer: The verdicts in a sentence.
        tables: Titles, and rows of strings, by setting; '' for a study without settings.
        files: Content of the artifact by file name; `report.html` is also shown as a page.

    Returns:
        The URL of the W&B run.

    Raises:
        ConfigError: There is no key.
        UserError: W&B failed.
    """
    entity, _, project = project.rpartition("/")
    with asked("W&B did not take the comparison", "the same command again"), TemporaryDirectory() as scratch:
        import wandb

        settings = {
            **quiet(Path(scratch), SYNC_INIT, SYNC_FINISH),
            "mode": "online",
            "project": project,
            "entity": entity or None,
            "run_id": "compare-" + hashlib.blake2b(name.encode(), digest_size=8).hexdigest(),
            "resume": "allow",
            "run_name": printable(f"compare {name}", MAX_NAME),
            "run_group": printable(name, MAX_NAME),
            "run_job_type": "compare",  # the dashboard's panels of training runs exclude this type
        }
        run = begin(settings, {"study": name})
        shown: dict[str, Any] = {"report": wandb.Html(files["report.html"], inject=False)}
        for setting, (columns, rows) in tables.items():
            title = f"verdict/{setting}" if setting else "verdict"
            shown[title] = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
        run.log(shown)
        accepted = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:100]  # what W&B takes
        artifact = wandb.Artifact(f"comparison-{accepted}", type="comparison", description=answer)
        for file, text in files.items():
            with artifact.new_file(file, encoding="utf-8") as target:
                target.write(text)
        run.log_artifact(artifact)
        run.summary["answer"] = answer
        run.finish()
        return run.url or ""

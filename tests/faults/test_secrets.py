"""No secret reaches a file, a report, a process's output, or what is sent to W&B (R19)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from faults.bench import only
from nexus_ablate.runs import environ

CANARIES = {
    "WANDB_API_KEY": "canary0wandb0local0key0of0forty0characters",
    "HF_TOKEN": "hf_canaryCANARYcanaryCANARYcanary0123",
    "AWS_SECRET_ACCESS_KEY": "canary/aws+secret",
    "MY_SERVICE_PASSWORD": "canary with spaces",
    "GITHUB_TOKEN": "ghp_canarycanarycanary",
}
IN_COMMANDS = "https://me:canary-in-a-url@host/x"


def traces(root, text: str) -> list[str]:
    """Files under `root` that hold it, and names that do."""
    needle = text.encode()
    files = [path for path in root.rglob("*") if path.is_file()]
    return [str(path) for path in files if needle in path.read_bytes() or text in path.name]


def train_and_report(tiny_run, tmp_path, *extra: str) -> str:
    """What a run, its repetition, its report and its failure say; everything they write is under runs/."""
    command = [sys.executable, "-m", "nexus_ablate"]
    variables = os.environ | CANARIES
    offline = [o for o in tiny_run("train.steps=4", "model.n_layers=1") if o != "tracker=files"]
    said = ""
    for arguments in (
        [*offline, "tracker=wandb_offline", *extra],
        [*offline, "tracker=wandb_offline", *extra],
        ["compare", "runs", "--html", "runs/page.html", "--json", "runs/page.json"],
        ["show", str(only(tmp_path / "runs"))] if (tmp_path / "runs").exists() else ["list"],
        ["status", "runs"],
        [*offline, "tracker=files", "seed=1", f"data.path={IN_COMMANDS}"],
    ):
        done = subprocess.run(
            [*command, *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=variables,
            timeout=120,
            check=False,
        )
        said += done.stdout + done.stderr
    return said


@pytest.mark.slow
def test_no_secret_is_in_anything_that_a_run_writes_says_or_mirrors(tiny_run, tmp_path, counted):
    said = train_and_report(tiny_run, tmp_path)
    (tmp_path / "runs" / "said").write_text(said)
    assert "val bits/byte" in said
    assert list((tmp_path / "runs").rglob("wandb/offline-run-*"))
    for name, secret in CANARIES.items():
        assert traces(tmp_path, secret) == [], name
    counted(f"{len(CANARIES)} secrets, {sum(1 for _ in (tmp_path / 'runs').rglob('*'))} files, 0 found")


@pytest.mark.slow
def test_a_failed_run_s_traceback_holds_no_secret(tiny_run, tmp_path):
    code = (
        "import os, sys\nfrom nexus_ablate.data import Batches\n"
        "def fail(self, step): raise RuntimeError('login with ' + os.environ['WANDB_API_KEY'] + ' at "
        + IN_COMMANDS
        + "')\nBatches.batch = fail\nfrom nexus_ablate.cli import main\nsys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, *tiny_run("train.steps=2")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | CANARIES, timeout=60, check=False)
    assert done.returncode == 1
    assert "login with" in (only(tmp_path / "runs") / "status.json").read_text()
    assert traces(tmp_path / "runs", CANARIES["WANDB_API_KEY"]) == []
    assert traces(tmp_path / "runs", "canary-in-a-url") == []


def test_control_without_the_mask_they_would_be_found(tiny_run, tmp_path, monkeypatch):
    from nexus_ablate.runs import directory, open_run
    from nexus_ablate.runs.naming import identity

    monkeypatch.setattr(directory, "mask", lambda text: text)
    ident = identity({"seed": 0}, "d", "1", {})
    with open_run(tmp_path, "s", "a", 0, ident, "", [f"x={IN_COMMANDS}"], {}) as run:
        assert traces(run.path, "canary-in-a-url") != []
    assert "canary" not in environ.mask(IN_COMMANDS)

"""A study with strata while it runs: those without a result are named, and nothing is concluded without them."""

from __future__ import annotations

import json
import subprocess
import sys

from written_runs import Writer

from nexus_ablate import cli

LOSSES = [2.0, 2.02, 1.98, 2.01, 1.99]
LOWER = [loss - 0.5 for loss in LOSSES]


def strata(tmp_path, *finished, rungs=(0, 0)):
    """A study of a shallow and a deep stratum, both planned."""
    for name, rung in zip(("shallow", "deep"), rungs, strict=True):
        writer = Writer(tmp_path / "runs", f"depth@{name}")
        writer.plan(
            ("norm=layer",),
            of="depth",
            stratum=name,
            rung=rung,
            claim="LayerNorm ends lower",
            expects=[{"arm": "norm=layer", "endpoint": "val_loss", "expected": "lower"}],
        )
        if name in finished:
            writer.arm(losses=LOSSES)
            writer.arm("norm=layer", losses=LOWER)
        else:
            writer.run(state="running")


def test_a_stratum_without_a_result_is_named_and_the_claim_is_preliminary(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    strata(tmp_path, "shallow")
    assert cli.main(["compare", "runs/depth", "--html", "page.html", "--md", "page.md"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "preliminary: SUPPORTED: LayerNorm ends lower"
    line = "stratum deep: no result yet (1 lost)"
    assert line in lines
    assert line in (tmp_path / "page.html").read_text() and line in (tmp_path / "page.md").read_text()
    assert cli.main(["compare", "runs/depth", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["missing"] == {"deep": "1 lost"}


def test_with_all_strata_nothing_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    strata(tmp_path, "shallow", "deep")
    assert cli.main(["compare", "runs/depth"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("SUPPORTED") and "no result yet" not in printed


def test_a_study_without_any_result_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    strata(tmp_path)
    assert cli.main(["compare", "runs/depth"]) == 2
    assert "no run here has a result yet" in capsys.readouterr().err


def test_a_ladder_without_all_its_sizes_has_no_multipliers(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    strata(tmp_path, "shallow", rungs=(2, 3))
    assert cli.main(["compare", "runs/depth"]) == 0
    printed = capsys.readouterr().out
    assert "compute multipliers are read when every size has results" in printed and "x1" not in printed


def test_the_plan_of_every_stratum_is_on_disk_before_the_first_run(tiny_run, tmp_path, monkeypatch):
    from nexus_ablate.execution import launch

    seen = []
    monkeypatch.setattr(launch, "launch", lambda *_, **__: seen.append(sorted(tmp_path.rglob("study.yaml"))) or 0)
    text = "question: q?\narms: [norm=layer]\nseeds: [0, 1]\nstrata: {model.n_layers: [1, 2]}\n"
    (tmp_path / "mine.yaml").write_text(text)
    base = [text for text in tiny_run() if not text.startswith("model.n_layers")]
    assert cli.main(["study", str(tmp_path / "mine.yaml"), *base]) == 0
    assert [path.parent.name for path in seen[0]] == ["mine@n_layers-1", "mine@n_layers-2"]


def test_a_reader_who_closes_the_pipe_has_the_saved_files(tmp_path):
    strata(tmp_path, "shallow", "deep")
    command = f"{sys.executable} -m nexus_ablate compare runs/depth --html page.html --csv table.csv | true"
    subprocess.run(command, shell=True, cwd=tmp_path, check=True, timeout=60)
    assert "SUPPORTED" in (tmp_path / "page.html").read_text() and (tmp_path / "table.csv").stat().st_size

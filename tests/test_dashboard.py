"""The saved workspaces: what they show, that they are the same at every saving, and what they refuse."""

from __future__ import annotations

import json
import re
import secrets
import sys

import pytest
from wandb_server import serving_alone

from nexus_ablate import cli
from nexus_ablate.config.options import AXES
from nexus_ablate.errors import ConfigError
from nexus_ablate.study.study import Study, from_values
from nexus_ablate.track import workspaces as workspaces_module
from nexus_ablate.track.workspaces import described, specification, workspaces

ENDPOINTS = ("val_loss", "attn/sink_rate")
NORMS = from_values(
    {
        "name": "norms",
        "question": "Is RMSNorm worse?",
        "baseline": ["train.steps=9"],
        "arms": {"layer": "norm=layer", "none": "norm=none"},
        "endpoints": [*ENDPOINTS],
    }
)


def panels(view):
    """The panels' types and configs by section."""
    sections = view["spec"]["section"]["panelBankConfig"]["sections"]
    return {s["name"]: [{"type": p["viewType"], **p["config"]} for p in s["panels"]] for s in sections}


def titled(view):
    return {p["chartTitle"]: p for section in panels(view).values() for p in section if "chartTitle" in p}


@pytest.fixture(scope="module")
def views():
    return specification(workspaces("p", "me", [NORMS]))["views"]


def test_losses_are_means_over_seeds_by_arm_with_a_band_at_equal_tokens_flops_and_seconds(views):
    plots = titled(views[0])
    for budget, title in workspaces_module.BUDGETS.items():
        plot = plots[f"validation loss by {title}"]
        assert (plot["xAxis"], plot["metrics"]) == (budget, ["val/loss"])
        assert (plot["groupBy"], plot["groupAgg"], plot["groupArea"]) == ("arm.value", "mean", "minmax")
    bar = plots["final validation loss by arm"]
    assert (bar["type"], bar["metrics"], bar["groupBy"]) == ("Bar Chart", ["val_loss"], "arm.value")


def test_the_question_of_a_study_has_a_bar_for_each_measure_that_decides_it(views):
    bars = [panel for panel in panels(views[1])["question"] if panel["type"] == "Bar Chart"]
    assert [panel["metrics"] for panel in bars] == [["val_loss"], ["attn/sink_rate"]]
    assert [panel["chartTitle"] for panel in bars] == ["val_loss by arm", "sink rate by arm"]


def test_gradients_by_block_outliers_and_sinks_have_their_panels(views):
    plots = titled(views[0])
    regex = plots["gradient norm by block: attention"]["metricRegex"]
    assert re.fullmatch(regex, "grad_norm/block_003/attn") and not re.fullmatch(regex, "grad_norm/block_003/ffn")
    assert plots["kurtosis of the residual stream"]["metrics"] == ["act/resid/kurtosis_token"]
    assert plots["largest over median magnitude of the residual stream"]["metrics"] == ["act/resid/max_over_median"]
    assert plots["attention to the first token"]["metrics"] == ["attn/first_token_mass"]
    assert "heat_map/act/resid/kurtosis_token" in plots["blocks over training"]["mediaKeys"]


def test_choices_are_compared_over_the_axes(views):
    plots = titled(views[0])
    columns = [column["accessor"] for column in plots["axes and final loss"]["columns"]]
    assert columns == [*(f"config:axis/{axis}.value" for axis in AXES), "summary:val_loss"]
    scatter = plots["final loss against kurtosis"]
    assert (scatter["xAxis"], scatter["yAxis"]) == ("summary:act/resid/kurtosis_token", "summary:val_loss")
    assert {"type": "Run Comparer", "diffOnly": "split"} in panels(views[0])["choices"]
    shown = views[0]["spec"]["section"]["runSets"][0]["runFeed"]["columnVisible"]
    assert {f"config:axis/{axis}.value" for axis in AXES} < shown.keys()


def test_every_metric_of_a_panel_is_one_that_a_run_logs(views, tiny_run):
    from nexus_ablate import compose, train

    outcome = train(compose(tiny_run("probe=standard")), quiet=True)
    from nexus_ablate.runs import read_run

    logged = {name for row in read_run(outcome.path).metrics() for name in row} | outcome.summary.keys()
    for title, plot in titled(views[0]).items():
        for name in plot.get("metrics", []):
            assert name in logged, title
        assert not plot.get("metricRegex") or any(re.fullmatch(plot["metricRegex"], name) for name in logged), title


def test_a_study_has_a_section_that_asks_its_question_and_a_workspace_of_its_runs_alone(views):
    project, study = views
    (panel,) = panels(project)["study norms"]
    assert panel["value"].startswith(
        "**Is RMSNorm worse?**\n\nBaseline: train.steps=9\n\n- layer: norm=layer\n- none: norm=none\n"
    )
    (link,) = re.findall(r"\(\?nw=(\w+)\)", panel["value"])
    assert study["name"] == f"nw-{link}-v" and study["displayName"] == "nexus-ablate: norms"
    assert titled(study).keys() - titled(project).keys() == {"val_loss by arm", "sink rate by arm"}
    filters = [json.dumps(v["spec"]["section"]["runSets"][0]["filters"]) for v in views]
    assert ["norms" in text for text in filters] == [False, True]
    assert all('"jobType"' in text for text in filters), "reports of comparisons are no training runs"


def test_what_a_user_named_is_text_and_not_markup():
    text = described(
        Study(name="a", question="[a](http://evil) <script>", baseline=["`x`"], arms={"*y*": ["norm=layer"]})
    )
    assert not set("<>[]`") & set(text) and text.count("*") == 4


def test_the_specification_is_the_same_each_time_and_round_trips(views):
    from wandb_workspaces.workspaces import Workspace, internal

    assert specification(workspaces("p", "me", [NORMS]))["views"] == views
    for view in views:
        spec = internal.WorkspaceViewspec.model_validate(json.loads(json.dumps(view["spec"])))
        names = {"name": view["name"], "display_name": view["displayName"], "id": ""}
        read = Workspace._from_model(internal.View(entity="me", project="p", spec=spec, **names))
        assert specification([read])["views"] == [view]


# On a server


@pytest.fixture
def server(tmp_path, monkeypatch):
    with serving_alone(tmp_path, monkeypatch) as server:
        yield server


def addresses(capsys, *arguments):
    assert cli.main(["dashboard", *arguments]) == 0
    return [line.split()[1] for line in capsys.readouterr().out.splitlines()]


def test_a_workspace_is_created_once_then_updated_at_the_same_address(server, capsys):
    first = addresses(capsys, "norms")
    assert [url.partition("?")[0] for url in first] == [f"{server.url}/me/nexus-ablate"] * 2
    assert addresses(capsys, "norms") == first
    assert len(server.views) == 2
    project = next(iter(server.views.values()))
    stored = {"spec": json.loads(project["spec"])}
    assert "attention to the first token" in titled(stored) and "study norms" in panels(stored)
    assert not server.unknown


def test_control_with_names_of_chance_each_saving_makes_another_workspace(server, capsys, monkeypatch):
    monkeypatch.setattr(workspaces_module, "_digest", lambda *_: secrets.token_hex(6))
    assert addresses(capsys) != addresses(capsys)
    assert len(server.views) == 2


def test_a_project_that_does_not_exist_is_said(server, capsys):
    assert cli.main(["dashboard", "--wandb", "elsewhere"]) == 2
    assert "no such project" in capsys.readouterr().err and not server.views


def test_a_server_that_refuses_is_said_in_three_lines(server, capsys):
    server.behaviour = "unauthorized"
    assert cli.main(["dashboard", "--wandb", "me/nexus-ablate"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: W&B refused the dashboard") and len(error.splitlines()) <= 3


def test_json_writes_the_specification_and_asks_nobody(server, tmp_path, capsys):
    assert cli.main(["dashboard", "--json", "view.json", "gates"]) == 0
    assert cli.main(["dashboard", "gates", "--json", "-"]) == 0
    assert (tmp_path / "view.json").read_text() == capsys.readouterr().out
    views = json.loads((tmp_path / "view.json").read_text())["views"]
    assert len(views) == 2 and "sink rate by arm" in titled(views[1])
    assert server.requests == 0


def test_a_study_with_settings_has_a_workspace_of_each(server, tmp_path, capsys):
    def filtered(study):
        assert cli.main(["dashboard", study, "--json", "-"]) == 0
        _, *views = json.loads(capsys.readouterr().out)["views"]
        return [re.findall(r'"(\w+@[\w-]+)"', json.dumps(view["spec"]["section"]["runSets"]))[0] for view in views]

    for setting in ("n_layers-4", "n_layers-24"):
        (tmp_path / "runs" / f"mine@{setting}").mkdir(parents=True)
    assert filtered("mine") == filtered("runs/mine") == ["mine@n_layers-24", "mine@n_layers-4"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["nroms"], "try: norms"),
        (["--wandb", "a?b"], "try: --wandb a-b"),
        (["--wanbd", "x"], "try: --wandb"),
    ],
)
def test_mistakes_are_said_before_anything_is_asked(server, arguments, problem, capsys):
    assert cli.main(["dashboard", *arguments]) == 2
    assert problem in capsys.readouterr().err and server.requests == 0


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    with pytest.raises(ConfigError, match="wandb-workspaces is missing"):
        workspaces("p", "me", [])


def test_a_study_s_folder_may_have_symbols_that_w_b_refuses_in_the_name_of_a_workspace(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "lr=3e-4").mkdir(parents=True)
    assert cli.main(["dashboard", "lr=3e-4", "--json", "-"]) == 0
    view = json.loads(capsys.readouterr().out)["views"][1]
    assert view["displayName"] == "nexus-ablate: lr_3e-4" and "lr=3e-4" in json.dumps(view["spec"])

"""Saved workspaces on W&B: one of the project, and one per study.

W&B can filter a whole workspace, but not a section of it. So each study has its own workspace, filtered to its runs,
and the project's workspace has a section with the study's question and a link to it. Names and ids follow from the
project and the study: saving again updates the same workspace at the same URL.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nexus_ablate.config.options import AXES
from nexus_ablate.errors import ConfigError
from nexus_ablate.masking import mask
from nexus_ablate.measure.measures import MEASURES, Measure, expression
from nexus_ablate.report.run_picture import HEAT_MAPS
from nexus_ablate.study.study import Study
from nexus_ablate.track.account import LOG_IN, asked, quiet_client

if TYPE_CHECKING:
    from wandb_workspaces.reports.v2 import BarPlot, LinePlot
    from wandb_workspaces.workspaces import Section, Workspace

TITLE = "nexus-ablate"
REFUSED = "W&B refused the dashboard"
FIX = f"{LOG_IN}, and check that the server can be reached; --json needs no server"
BUDGETS = {"tokens": "tokens", "flops": "training FLOPs", "seconds": "seconds of training"}


def described(study: Study) -> str:
    """The question, the baseline and the arms of a study, in Markdown."""
    lines = [f"**{_plain(study.question)}**", ""]
    if study.baseline:
        lines += [f"Baseline: {_plain(', '.join(study.baseline))}", ""]
    for name, overrides in study.arms.items():
        lines.append(f"- {_plain(name)}: {_plain(' '.join(overrides))}")
    for key, values in study.vary.items():
        lines.append(f"- {_plain(key)}: {_plain(', '.join(values))}")
    return "\n".join(lines)


def workspaces(project: str, entity: str, studies: Sequence[Study]) -> list[Workspace]:
    """The project's workspace first, then one per study. Needs no network.

    Raises:
        ConfigError: The package is missing.
    """
    try:
        from wandb_workspaces import workspaces as ws
        from wandb_workspaces.reports import v2 as wr
    except ImportError as error:
        fix = "pip install 'nexus-ablate[dashboard]'"
        raise ConfigError("the package wandb-workspaces is missing", str(error), fix) from error
    about = []
    boards = []
    for study in studies:
        link = f"[Its runs alone](?nw={_digest(project, study.folder_name)})"
        text = wr.MarkdownPanel(markdown=f"{described(study)}\n\n{link}")
        about.append(ws.Section(name=f"study {study.folder_name}", panels=[text], is_open=True))
        panels: list[Any] = [wr.MarkdownPanel(markdown=described(study))]
        for endpoint in study.endpoints:
            panels.append(_bars(endpoint.name, endpoint.measure.title or endpoint.name))
        question = ws.Section(name="question", panels=panels, is_open=True)
        boards.append(_workspace(project, entity, study.folder_name, [question]))
    return [_workspace(project, entity, "", about), *boards]


def specification(views: Sequence[Workspace]) -> dict[str, Any]:
    """The workspaces as they are sent to W&B, in JSON types."""
    sent = []
    for view in views:
        model = view._to_model()
        spec = json.loads(model.spec.model_dump_json(by_alias=True, exclude_none=True))
        sent.append({"name": model.name, "displayName": model.display_name, "spec": spec})
    return {"project": views[0].project, "entity": views[0].entity, "views": sent}


def save(views: Sequence[Workspace]) -> list[str]:
    """Create or update the workspaces.

    Returns:
        Their URLs.

    Raises:
        ConfigError: There is no key, or no such project.
        UserError: W&B refused.
    """
    from wandb_workspaces.workspaces import internal

    quiet_client()
    addresses = []
    for view in views:
        name = view._internal_name.removeprefix("nw-").removesuffix("-v")
        with asked(REFUSED, FIX):
            try:
                view._internal_id = internal.get_view_dict(view.entity, view.project, name)["id"]
            except ValueError as error:  # no such view, or no such project
                if "Project" in str(error):
                    fix = "train or sync a run there first, or choose --wandb ENTITY/PROJECT"
                    raise ConfigError("W&B has no such project", f"{view.entity}/{view.project}", fix) from error
            addresses.append(view.save().url)
    return addresses


def default_entity() -> str:
    """The account's default user or team on W&B.

    Raises:
        ConfigError: There is no key.
        UserError: W&B failed.
    """
    import wandb

    quiet_client()
    with asked(REFUSED, FIX):
        return str(wandb.Api().default_entity)


def _workspace(project: str, entity: str, study: str, first: list[Section]) -> Workspace:
    """The workspace of a study, or with '' that of the project."""
    from wandb_workspaces import expr
    from wandb_workspaces import workspaces as ws

    title = TITLE
    filters = [expr.Metric("JobType") == "train"]
    grouping: list[Any] = [expr.Config("study"), expr.Config("arm")]
    if study:
        title = f"{TITLE}: "
        for letter in study:
            is_symbol = unicodedata.category(letter).startswith("S")  # W&B refuses them in a workspace's name
            title += "_" if is_symbol else letter
        filters.append(expr.Config("study") == study)
        grouping = [expr.Config("arm")]
    axes = [f"config:axis/{axis}.value" for axis in AXES]
    view: Any = ws.Workspace(
        entity=entity,
        project=project,
        name=title,
        sections=[*first, *sections()],
        settings=ws.WorkspaceSettings(x_axis="tokens", max_runs=100),
        runset_settings=ws.RunsetSettings(
            filters=filters,
            groupby=grouping,
            pinned_columns=["run:displayName", "summary:val_loss", *axes],
        ),
    )
    view._internal_name = f"nw-{_digest(project, study)}-v"  # its address ends in ?nw=<digest>
    view._internal_runset_id = _digest(project, study, "runs")
    for section in view.sections:
        for number, panel in enumerate(section.panels):  # W&B keeps a user's changes to a panel by its id
            panel._id = _digest(section.name, str(number))
    return view


def sections() -> list[Section]:
    """The panels, by subject."""
    from wandb_workspaces import workspaces as ws
    from wandb_workspaces.reports import v2 as wr
    from wandb_workspaces.reports.v2.interface import ParallelCoordinatesPlotColumn

    panels: dict[str, list[Any]] = {}
    panels["loss"] = [
        *(_lines(f"validation loss by {title}", budget, y=["val/loss"]) for budget, title in BUDGETS.items()),
        _lines("training loss", y=["train/loss"], smoothing_type="exponentialTimeWeighted", smoothing_factor=0.5),
        _bars("val_loss", "final validation loss"),
        _bars("tokens_per_second", "tokens per second"),
    ]
    for name in ("gradients", "outliers", "sinks", "weights"):
        panels[name] = [_measured(measure) for measure in MEASURES if measure.panel == name]
    for part, title in (("attn", "attention"), ("ffn", "FFN")):
        by_block = rf"grad_norm/block_\d+/{part}"
        panels["gradients"].append(_lines(f"gradient norm by block: {title}", metric_regex=by_block, log_y=True))
    heat_maps = [f"heat_map/{name}" for name in HEAT_MAPS]
    panels["outliers"].append(wr.MediaBrowser(title="blocks over training", media_keys=heat_maps))
    final_loss = wr.SummaryMetric("val_loss")
    kurtosis = wr.SummaryMetric("act/resid/kurtosis_token")
    columns = [ParallelCoordinatesPlotColumn(metric=wr.Config(f"axis/{axis}")) for axis in AXES]
    columns.append(ParallelCoordinatesPlotColumn(metric=final_loss))
    panels["choices"] = [
        wr.ParallelCoordinatesPlot(title="axes and final loss", columns=columns),
        wr.ScatterPlot(title="final loss against kurtosis", x=kurtosis, y=final_loss, log_x=True),
        wr.RunComparer(diff_only="split"),
    ]
    return [ws.Section(name=name, panels=drawn, is_open=True) for name, drawn in panels.items()]


def _lines(title: str, budget: str = "tokens", **settings: Any) -> LinePlot:
    """A measure over training: the mean over an arm's seeds, in a band from the lowest to the highest."""
    from wandb_workspaces.reports.v2 import Config, LinePlot

    return LinePlot(
        title=title,
        x=budget,
        title_x=BUDGETS[budget],
        groupby=Config("arm"),
        groupby_aggfunc="mean",
        groupby_rangefunc="minmax",
        max_runs_to_show=100,
        **settings,
    )


def _measured(measure: Measure) -> LinePlot:
    """A measure of the table; one with a placeholder in its name is one line per block."""
    name = measure.names[-1]
    settings: dict[str, Any] = {"log_y": True} if measure.log else {}
    if "{" in name:
        return _lines(measure.title, metric_regex=expression(name), **settings)
    return _lines(measure.title, y=[name], **settings)


def _bars(metric: str, title: str) -> BarPlot:
    """A measure at the end of training, as the mean and the standard deviation over an arm's seeds."""
    from wandb_workspaces.reports.v2 import BarPlot, Config

    return BarPlot(
        title=f"{title} by arm",
        metrics=[metric],
        groupby=Config("arm"),
        groupby_aggfunc="mean",
        groupby_rangefunc="stddev",
    )


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=6).hexdigest()


def _plain(text: str) -> str:
    """A user's text without secrets, with Markdown's special characters escaped."""
    return re.sub(r"[<>&`[\]*_|\\]", lambda found: f"&#{ord(found[0])};", " ".join(mask(text).split()))

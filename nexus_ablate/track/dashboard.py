"""Pages on W&B about the runs: a saved workspace of the project, one per study, and a report per study.

W&B can filter a whole workspace, but not a section of it. So each study has its own workspace, filtered to its runs,
and the project's workspace has a section with the study's question and a link to it. Names and ids follow from the
project and the study: saving again updates the same workspace at the same URL.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nexus_ablate.config.options import AXES
from nexus_ablate.errors import ConfigError, UserError
from nexus_ablate.measure.measures import MEASURES, expression, find
from nexus_ablate.report.run_picture import HEAT_MAPS
from nexus_ablate.track.account import LOG_IN, failure, quiet_client, redactor, require_key

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Section, Workspace

TITLE = "nexus-ablate"
BUDGETS = {"tokens": "tokens", "flops": "training FLOPs", "seconds": "seconds of training"}


@dataclass(frozen=True)
class Question:
    """A study's text on W&B.

    Attributes:
        study: Its name, by which W&B groups its runs.
        text: The question it answers.
        baseline: The arm that the others are compared with.
        arms: The other arms.
        table: The verdict in Markdown, if runs have been compared.
        endpoints: The measures that decide it.
    """

    study: str
    text: str = ""
    baseline: str = ""
    arms: tuple[str, ...] = ()
    table: str = ""
    endpoints: tuple[str, ...] = ()

    def markdown(self) -> str:
        """The question, the baseline and the arms."""
        lines = [f"**{_plain(self.text) or _plain(self.study)}**", ""]
        lines += [f"Baseline: {_plain(self.baseline)}", ""] if self.baseline else []
        return "\n".join(lines + [f"- {_plain(arm)}" for arm in self.arms])


def workspaces(project: str, entity: str, questions: Sequence[Question]) -> list[Workspace]:
    """The project's workspace first, then one per study. Needs no network.

    Raises:
        ConfigError: The package is missing.
    """
    ws, wr = _package()

    about = []
    for question in questions:
        text = f"{question.markdown()}\n\n[Its runs alone](?nw={view_id(project, question.study)})"
        about.append(ws.Section(name=f"study {question.study}", panels=[wr.MarkdownPanel(markdown=text)], is_open=True))
    boards = [_workspace(project, entity, None, about)]
    for question in questions:
        panels = [
            wr.MarkdownPanel(markdown=question.markdown()),
            *(_bars(n, find(n).title or n) for n in question.endpoints),
        ]
        question_section = ws.Section(name="question", panels=panels, is_open=True)
        boards.append(_workspace(project, entity, question.study, [question_section]))
    return boards


def specification(views: Sequence[Workspace]) -> dict[str, Any]:
    """The workspaces as they are sent to W&B, in JSON types."""
    return {
        "project": views[0].project,
        "entity": views[0].entity,
        "views": [_sent(view) for view in views],
    }


def save(views: Sequence[Workspace]) -> list[str]:
    """Create or update the workspaces.

    Returns:
        Their URLs.

    Raises:
        ConfigError: There is no key, or no such project.
        UserError: W&B refused.
    """
    from wandb_workspaces.workspaces import internal

    require_key()
    quiet_client()
    addresses = []
    for view in views:
        try:
            name = view._internal_name.removeprefix("nw-").removesuffix("-v")
            view._internal_id = internal.get_view_dict(view.entity, view.project, name)["id"]
        except ValueError as error:
            if "Project" in str(error):
                fix = "train or sync a run there first, or choose --project and --entity"
                raise ConfigError("W&B has no such project", f"{view.entity}/{view.project}", fix) from error
        except Exception as error:  # W&B may raise anything
            raise _refused(error) from error
        try:
            addresses.append(view.save().url)
        except Exception as error:  # W&B may raise anything
            raise _refused(error) from error
    return addresses


def save_report(project: str, entity: str, question: Question) -> str:
    """Create or update the report of a study: question, verdict, and the panels of its runs.

    Returns:
        Its URL.

    Raises:
        ConfigError: There is no key.
        UserError: W&B refused, or its server doesn't support reports.
    """
    import wandb

    _, wr = _package()
    require_key()
    quiet_client()
    title = f"{TITLE}: {question.study}"
    try:
        runs = wr.Runset(
            entity=entity,
            project=project,
            name=question.study,
            filters=f"Config('study') = '{question.study}' and JobType = 'train'",
            groupby=["config.arm"],
        )
        blocks = [wr.MarkdownBlock(text=question.table or question.markdown())]
        for section in sections():
            blocks += [wr.H2(text=section.name), wr.PanelGrid(runsets=[runs], panels=section.panels)]
        report = wr.Report(project=project, entity=entity, title=title, blocks=blocks, width="fluid")
        report.id = next((r.id for r in wandb.Api().reports(f"{entity}/{project}") if r.display_name == title), "")
        report.save()
        return report.url
    except Exception as error:  # W&B may raise anything
        raise _refused(error) from error


def default_entity() -> str:
    """The account's default user or team on W&B.

    Raises:
        ConfigError: There is no key.
        UserError: W&B failed.
    """
    import wandb

    require_key()
    quiet_client()
    try:
        return str(wandb.Api().default_entity)
    except Exception as error:  # W&B may raise anything
        raise _refused(error) from error


def view_id(project: str, study: str | None) -> str:
    """The part of a workspace's URL that identifies it: `?nw=<id>`."""
    return _digest(project, study or "")


def _workspace(project: str, entity: str, study: str | None, first: list[Section]) -> Workspace:
    from wandb_workspaces import expr

    ws, _ = _package()
    filters = [expr.Metric("JobType") == "train"]
    filters += [expr.Config("study") == study] if study else []
    view = ws.Workspace(
        entity=entity,
        project=project,
        name=f"{TITLE}: {study}" if study else TITLE,
        sections=[*first, *sections()],
        settings=ws.WorkspaceSettings(x_axis="tokens", max_runs=100),
        runset_settings=ws.RunsetSettings(
            filters=filters,
            groupby=[expr.Config(key) for key in (("arm",) if study else ("study", "arm"))],
            pinned_columns=["run:displayName", "summary:val_loss", *(f"config:axis/{axis}.value" for axis in AXES)],
        ),
    )
    view._internal_name = f"nw-{view_id(project, study)}-v"
    view._internal_runset_id = _digest(project, study or "", "runs")
    for section in view.sections:
        for number, panel in enumerate(section.panels):  # W&B keeps a user's changes to a panel by its id
            panel._id = _digest(section.name, str(number))
    return view


def sections() -> list[Section]:
    """The panels, by subject. A line is the mean over an arm's seeds, its band the range from lowest to highest."""
    ws, wr = _package()
    arm = wr.Config("arm")

    def lines(title: str, metric: str, x: str = "tokens", **more: Any) -> Any:
        return wr.LinePlot(
            title=title,
            x=x,
            y=[metric] if "metric_regex" not in more else [],
            title_x=BUDGETS[x],
            groupby=arm,
            groupby_aggfunc="mean",
            groupby_rangefunc="minmax",
            max_runs_to_show=100,
            **more,
        )

    def over_training(panel: str) -> list[Any]:
        """The measures of a section of the table."""
        scale: dict[bool, dict[str, Any]] = {True: {"log_y": True}, False: {}}
        of_panel = [measure for measure in MEASURES if measure.panel == panel]
        names = [(m, {"metric_regex": expression(m.names[-1])} if "{" in m.names[-1] else {}) for m in of_panel]
        return [lines(m.title, m.names[-1], **scale[m.log], **more) for m, more in names]

    smoothed = {"smoothing_type": "exponentialTimeWeighted", "smoothing_factor": 0.5}
    loss = [
        *(lines(f"validation loss by {BUDGETS[x]}", "val/loss", x) for x in BUDGETS),
        lines("training loss", "train/loss", **smoothed),
        _bars("val_loss", "final validation loss"),
        _bars("tokens_per_second", "tokens per second"),
    ]
    gradients = [
        *over_training("gradients"),
        lines("gradient norm by block: attention", "", metric_regex=r"grad_norm/block_\d+/attn", log_y=True),
        lines("gradient norm by block: FFN", "", metric_regex=r"grad_norm/block_\d+/ffn", log_y=True),
    ]
    heat_maps = [f"heat_map/{name}" for name, _, _ in HEAT_MAPS]
    outliers = [*over_training("outliers"), wr.MediaBrowser(title="blocks over training", media_keys=heat_maps)]
    choices = [
        wr.ParallelCoordinatesPlot(
            title="axes and final loss",
            columns=[
                *(wr.ParallelCoordinatesPlotColumn(metric=wr.Config(f"axis/{axis}")) for axis in AXES),
                wr.ParallelCoordinatesPlotColumn(metric=wr.SummaryMetric("val_loss")),
            ],
        ),
        wr.ScatterPlot(
            title="final loss against kurtosis",
            x=wr.SummaryMetric("act/resid/kurtosis_token"),
            y=wr.SummaryMetric("val_loss"),
            log_x=True,
        ),
        wr.RunComparer(diff_only="split"),
    ]
    sections_by_name = {"loss": loss, "gradients": gradients, "outliers": outliers}
    sections_by_name |= {name: over_training(name) for name in ("sinks", "weights")} | {"choices": choices}
    return [ws.Section(name=name, panels=panels, is_open=True) for name, panels in sections_by_name.items()]


def _bars(metric: str, title: str) -> Any:
    """A measure at the end of training, as the mean and the standard deviation over an arm's seeds."""
    _, wr = _package()
    return wr.BarPlot(
        title=f"{title} by arm",
        metrics=[metric],
        groupby=wr.Config("arm"),
        groupby_aggfunc="mean",
        groupby_rangefunc="stddev",
    )


def _package() -> tuple[Any, Any]:
    """The modules of workspaces and of reports. They are untyped here: a type checker can't see what they export.

    Raises:
        ConfigError: The package is missing.
    """
    try:
        from wandb_workspaces import workspaces
        from wandb_workspaces.reports import v2
    except ImportError as error:
        fix = "pip install 'nexus-ablate[dashboard]'"
        raise ConfigError("the package wandb-workspaces is missing", str(error), fix) from error
    return workspaces, v2


def _sent(view: Workspace) -> dict[str, Any]:
    model = view._to_model()
    spec = json.loads(model.spec.model_dump_json(by_alias=True, exclude_none=True))
    return {"name": model.name, "displayName": model.display_name, "spec": spec}


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=6).hexdigest()


def _plain(text: str) -> str:
    """A user's text with Markdown's special characters escaped."""
    return "".join(f"&#{ord(c)};" if c in "<>&`[]*_|\\" else c for c in " ".join(text.split()))


def _refused(error: Exception) -> UserError:
    fix = f"{LOG_IN}, and check that the server can be reached; --dry-run needs no server"
    return UserError("W&B refused the dashboard", failure(error, redactor(os.environ)), fix)

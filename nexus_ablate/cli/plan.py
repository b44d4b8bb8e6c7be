"""`nexus-ablate plan STUDY ...`: a study's arms, refusals, costs and fairness. Nothing is run or written."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nexus_ablate.cli.backend import WORKERS
from nexus_ablate.cli.verb import FULL, Flags, Verb
from nexus_ablate.console import UNLIMITED, duration, grid, print_table, several
from nexus_ablate.errors import OK, printable
from nexus_ablate.runs.naming import BASELINE

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from nexus_ablate.planning.preview import StudyPlan

VERB = Verb(
    "plan",
    "preview a study: arms, refusals, costs; runs nothing",
    "STUDY [KEY=VALUE ...]",
    (
        ("plan norms", ""),
        ("plan mine vary.norm=layer,rms vary.bias=on,off match=params", ""),
    ),
    (WORKERS, FULL),
    "Prints the arms with parameters, FLOPs and time, the reasons for refused ones, how many runs are already "
    "finished, and the fairness conditions that can be checked in advance. `~`: estimated, because no run of the arm "
    "has finished.",
    "a study",
    kind="studies",
)


def run(words: list[str], flags: Flags) -> int:
    """Print the plan of a study."""
    from nexus_ablate.console import open_console
    from nexus_ablate.planning.cores_and_gpus import places_for
    from nexus_ablate.planning.jobs import Runs
    from nexus_ablate.planning.preview import make_plan
    from nexus_ablate.study.definition import read_request, strata_of

    console, plans = open_console(), []
    for request in strata_of(read_request(words)):
        runs = Runs.of(request)
        with open_console(stderr=True).status(f"counting the costs of {several(len(runs.configs), 'arm')}"):
            where = places_for([*runs.tuning, *runs.claims], flags.get("workers", "auto"))
            plans.append(make_plan(runs, where))
        if len(plans) > 1:
            console.print()
        _show(plans[-1], console, "full" in flags)
    if len(plans) > 1:
        count, time = _total(plans)
        console.print(f"\n{len(plans)} strata: {count} runs, about {time or 'an unknown time'}")
    return OK


def _show(plan: StudyPlan, console: Console, full: bool) -> None:
    """Print the plan; `full`: with the arms' whole names."""
    from rich.markup import escape

    from nexus_ablate.planning.design import label
    from nexus_ablate.report.arm_tables import TONES
    from nexus_ablate.report.terminal import COLOURS
    from nexus_ablate.study.arm_overrides import lost

    def say(style: str, head: str, text: str) -> None:
        console.print(f"[{style}]{head}[/{style}]{escape(printable(text, 2000))}")

    study = plan.study
    say("bold", escape(printable(study.name)), f"  {study.question}")
    if study.baseline:
        say("dim", "baseline", f"  {label(study.baseline)}")
    console.print()
    print_table(console, _arms(plan, UNLIMITED if full else console.width), full)
    for arm in study.arms:
        for note in arm.also_changes:
            say("dim", "note", f"     {note}")
        if texts := lost(study.baseline, arm.overrides):
            note = f"{arm.name} drops {', '.join(texts)} of the baseline; write it in the arm to keep it"
            say("dim", "note", f"     {note}")
    for copy in study.equal:
        say("dim", "equal", f"    {label(copy.overrides)} is {copy.arm}")
    for refused in study.refused:
        say("red", "refused", f"  {label(refused.overrides)}: {refused.reason}")
    if study.requires and not study.lr_grid:
        conditions = ", ".join(f"{name} {bound}" for name, bound in study.requires.items())
        rest = "of the baseline, which is trained first; if not, no other arm is trained"
        say("dim", "requires", f"  {conditions} {rest}")
    console.print()
    say("dim", "regime", f"  {plan.regime}")
    for check in plan.fairness:
        say(COLOURS[TONES[check.status]], check.status, f"  {check.name}: {check.text}")
    console.print(f"\n{_runs(plan)}")


def _runs(plan: StudyPlan) -> str:
    """How many runs there are, of what, and how long the missing ones take here."""
    from nexus_ablate.comparison.learning_rates import RATES

    study, where = plan.study, plan.where
    what = f"{several(len(plan.arms), 'arm')} x seeds {','.join(map(str, study.first_seeds))}"
    if study.lr_grid:
        last = " by the last look" if study.looks else ""
        what += (
            f" x {RATES} rates, and before that {len(study.lr_grid)} rates x {len(study.tuning_seeds)} tuning seeds "
            f"per arm; up to {plan.further_runs} more{last} where the best rate lies further out"
        )
    if study.looks:
        what += f", then {', '.join(map(str, study.looks[1:]))} seeds for undecided arms"
    count, time = _total([plan])
    states = ", ".join(f"{n} {state}" for state, n in plan.states.items())
    place = f" on {several(len(where.gpus), 'GPU')}" if where.gpus else ""
    return (
        f"{count} runs: {what} ({states})\n"
        f"about {time or 'an unknown time (there is no finished run)'} for what is missing, "
        f"{where.workers} at a time with {several(where.threads, 'CPU thread')}{place}"
    )


def _total(plans: list[StudyPlan]) -> tuple[str, str]:
    """How many runs some strata have and how long the missing ones take ('' if unknown), with looks to the last one."""
    runs, later_runs = sum(plan.runs for plan in plans), sum(plan.later_runs for plan in plans)
    count = f"{runs} to {runs + later_runs}" if later_runs else str(runs)
    seconds = [plan.seconds for plan in plans if plan.seconds is not None]
    later = [plan.later_seconds for plan in plans if plan.later_seconds is not None]
    if len(seconds) < len(plans):
        return count, ""
    time = duration(math.fsum(seconds))
    if later_runs and len(later) == len(plans):
        time += f" to {duration(math.fsum(seconds + later))}"
    return count, time


def _arms(plan: StudyPlan, width: int) -> Table:
    rows = []
    for arm in plan.arms:
        more_params, more_flops = f"{arm.params_share:+.1%}", f"{arm.flops_share:+.1%}"
        if arm.arm.name == BASELINE:
            more_params = more_flops = ""
        params, flops = f"{arm.cost.params:,}", f"{arm.cost.flops_per_token / 1e6:,.2f}M"
        time = duration(arm.seconds) or "?"
        if not arm.recorded:
            time += " ~"
        rows.append([arm.arm.name, params, more_params, flops, more_flops, time])
    return grid(("arm", "params", "", "FLOPs/token", "", "per run"), rows, width)

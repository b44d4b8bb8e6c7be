"""`nexus-ablate plan STUDY ...`: a study's arms, refusals and costs. Nothing is run or written."""

from __future__ import annotations

import math
from statistics import fmean
from typing import TYPE_CHECKING

from nexus_ablate.cli.flags import WORKERS, Flags
from nexus_ablate.cli.verb import Verb
from nexus_ablate.console import duration, grid, open_console, several
from nexus_ablate.errors import OK, ConfigError, printable
from nexus_ablate.runs.naming import BASELINE

if TYPE_CHECKING:
    from nexus_ablate.launch.launch import Planned
    from nexus_ablate.launch.local import Places

VERB = Verb(
    "plan",
    "preview a study: arms, refusals, costs; runs nothing",
    "STUDY [KEY=VALUE ...]",
    (
        ("plan norms", ""),
        ("plan mine vary.norm=layer,rms vary.bias=on,off match=params", ""),
    ),
    (WORKERS,),
    "Prints the arms with parameters, FLOPs and time, the reasons for refused ones, how many runs are missing, and the "
    "difference that the seeds can show. `~`: estimated, because no run of the arm has finished.",
    "a study",
    kind="studies",
)
HEADS = ("arm", "params", "", "FLOPs/token", "", "tokens", "per run")


def run(words: list[str], flags: Flags) -> int:
    """Print the plan of a study."""
    from nexus_ablate.launch.jobs import missing
    from nexus_ablate.launch.launch import plan
    from nexus_ablate.launch.local import places_for
    from nexus_ablate.study.definition import read_study, settings_of

    study, launch_overrides = read_study(words, "plan")
    console = open_console()

    def say(text: str) -> None:
        console.print(printable(text, 2000), markup=False, soft_wrap=True)

    settings = [plan(setting, launch_overrides) for setting in settings_of(study)]
    places = places_for([job for planned in settings for job in planned.jobs], flags.get("workers", "auto"))
    say(f"{study.name}  {study.question}".rstrip())
    seconds: list[float | None] = []
    for planned in settings:
        if planned.study.setting:
            say("")
            changes = " ".join(study.settings[planned.study.setting])
            say(f"{planned.study.setting}: {changes or 'the baseline as it is'}")
        per_run = _show_arms(planned, places)
        seconds += [per_run[job.arm] for job in missing(planned.jobs)]
        say("")
        for line in _notes(planned):
            say(line)
    refused = [f"refused  {title}: {reason}" for planned in settings for title, reason in planned.study.refused.items()]
    for line in dict.fromkeys(refused):  # once, where it is refused in every setting
        say(line)
    say(_seeds(settings[0]))
    runs = sum(len(planned.jobs) for planned in settings)
    known = [value for value in seconds if value is not None]
    total = "an unknown time"
    if len(known) == len(seconds):
        total = duration(math.fsum(known) / max(1, min(places.workers, len(known))))
    say(f"{several(runs, 'run')}, {len(seconds)} missing: about {total} by {places}")
    return OK


def _show_arms(planned: Planned, places: Places) -> dict[str, float | None]:
    """Print the costs of each arm. Returns the seconds of a run, None where no speed is known.

    An arm's speed is that of its finished runs, else the baseline's by their FLOPs.
    """
    from nexus_ablate.launch.cost import cost_of, measured_speed, seconds_of

    speeds = {}
    for arm in planned.configs:
        speeds[arm] = _recorded_speed(planned, arm)
    base_speed = speeds[BASELINE]
    if base_speed is None and None in speeds.values():
        base_speed = measured_speed(planned.configs[BASELINE], places.threads)
    base = cost_of(planned.configs[BASELINE])
    rows, per_run = [], {}
    for arm, config in planned.configs.items():
        cost, recorded = cost_of(config), speeds[arm]
        speed = recorded or (base_speed and base_speed * base.flops_per_token / cost.flops_per_token)
        per_run[arm] = seconds_of(config, cost, speed) if speed else None
        shares = [f"{cost.params / base.params - 1:+.1%}", f"{cost.flops_per_token / base.flops_per_token - 1:+.1%}"]
        if arm == BASELINE:
            shares = ["", ""]
        flops = f"{cost.flops_per_token / 1e6:,.2f}M"
        time = (duration(per_run[arm]) or "?") + ("" if recorded else " ~")
        rows.append([arm, f"{cost.params:,}", shares[0], flops, shares[1], f"{cost.tokens:,}", time])
    console = open_console()
    console.print(grid(HEADS, rows, console.width))
    return per_run


def _recorded_speed(planned: Planned, arm: str) -> float | None:
    """Tokens per second of an arm's finished runs; None if there are none."""
    from nexus_ablate.runs import read_status, read_summary

    speeds = []
    for job in planned.jobs:
        if job.arm == arm and job.state()[0] == "finished":
            summary = read_summary(job.path, read_status(job.path)) or {}
            speeds.append(summary.get("tokens_per_second") or 0.0)
    return fmean(speeds) or None if speeds else None


def _notes(planned: Planned) -> list[str]:
    """What the budget of the baseline lets a study show, and which settings of the baseline an arm does not keep."""
    from nexus_ablate.launch.cost import cost_of, text_tokens
    from nexus_ablate.measure.regime import check_passes, regime_of
    from nexus_ablate.study.arm_overrides import lost

    study, base = planned.study, planned.configs[BASELINE]
    cost, text = cost_of(base), text_tokens(base)
    regime = regime_of(base, cost.params_non_embedding, cost.steps, text)
    lines = [f"baseline {' '.join(study.overrides_of(BASELINE))}", f"regime   {regime}"]
    lines += [f"WARN     {why}" for why in regime.warnings()]
    try:
        check_passes(base, text or cost.tokens)
    except ConfigError as error:
        lines.append(f"FAIL     {error.problem}; try {error.fix}")
    for config in planned.configs.values():
        for note in config.resolved.notes:
            if " also changes " in note and note not in base.resolved.notes:
                lines.append(f"note     {note}")
    for arm, overrides in study.arms.items():
        if texts := lost(study.baseline, overrides):
            lines.append(f"note     {arm} drops {', '.join(texts)} of the baseline; write it in the arm to keep it")
    lines += [f"equal    {title} is {arm}" for title, arm in study.equal.items()]
    return [*dict.fromkeys(lines)]  # several arms may change the same


def _seeds(planned: Planned) -> str:
    """The difference that the seeds can show."""
    from nexus_ablate.comparison.statistics import LEVEL, detectable_difference, sidak
    from nexus_ablate.study.study import FEWEST_SEEDS

    study = planned.study
    text = f"seeds    {several(len(study.seeds), 'seed')}"
    if len(study.seeds) < FEWEST_SEEDS:
        return f"{text}; a word about a difference needs {FEWEST_SEEDS}"
    found = detectable_difference(1.0, len(study.seeds), sidak(LEVEL, max(study.cells, 1)))
    return f"{text} show {found:.2g} SD of a pair's difference with 80% power"

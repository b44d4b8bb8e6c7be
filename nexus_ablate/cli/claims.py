"""`nexus-ablate claims`: claims of the field, their published outcomes, and your runs beside the published ones."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nexus_ablate.cli.backend import split_launcher
from nexus_ablate.cli.study import RUN_FLAGS
from nexus_ablate.cli.verb import Flag, Flags, Verb, typed
from nexus_ablate.errors import OK, PREEMPTED, ConfigError, unknown

if TYPE_CHECKING:
    from nexus_ablate.comparison.ledger_entry import LedgerEntry
    from nexus_ablate.study.panel import Panel

VERB = Verb(
    "claims",
    "claims of the field; NAME trains and judges one",
    "[NAME [KEY=VALUE ...]]",
    (
        ("claims --panel", "how often small models agree with what is known of larger ones"),
        ("claims", "every claim: fidelity, outcome, and whether its code has changed since"),
        ("claims rms_vs_layer", "train its study and judge it"),
        ("claims --check runs/rms_vs_layer", "compare your runs with the published ones"),
        ("claims --check qk_norm", "train a baseline run again: does the code of today end in the same place?"),
    ),
    (
        Flag(
            "--check",
            "DIR|NAME",
            "runs of a claim's study, compared with the published ones; of a claim: train one again",
        ),
        Flag("--publish", "DIR", "write the entry of finished runs into conf/claims (in a checkout)"),
        Flag("--panel", "", "the calibration panel, of the runs in runs_dir=runs or the published ones"),
        *RUN_FLAGS,
    ),
    "docs/claims.md shows the outcomes with their differences and intervals. Overrides after NAME are those of "
    "`nexus-ablate study NAME`; with others than how runs are carried out it is a replication in another setting.\n\n"
    "docs/panel.md has the calibration panel with its sources.",
    kind="studies",
)


def run(words: list[str], flags: Flags) -> int:
    """List, check, publish, or train and judge."""
    if "panel" in flags:
        return _panel(words, flags)
    if bool(words) + ("check" in flags) + ("publish" in flags) > 1:
        one = ["--check", flags["check"]] if "check" in flags else words[:1]
        named = " ".join([*words, *typed(flags, "check", "publish")])
        raise ConfigError("claims does one thing at a time", named, shlex.join(["nexus-ablate", "claims", *one]))
    if words:
        return _train(words, flags)
    if "publish" in flags:
        return _publish(flags["publish"])
    from nexus_ablate.planning.ledger import entries

    published = entries()
    if "check" not in flags:
        return _list(published)
    name = flags["check"]
    return _train_again(published[name]) if name in published else _check(name, published)


def _list(published: dict[str, LedgerEntry]) -> int:
    from nexus_ablate.console import folded, open_console
    from nexus_ablate.planning.ledger import claims, older_code
    from nexus_ablate.report.ledger_page import outcome_of

    rows = []
    for name, definition in claims().items():
        claim = definition.claim
        outcome = f"not trained yet\n{definition.cost.removesuffix(' on two CPU cores')}"
        if entry := published.get(name):
            claim, outcome = entry.claim, outcome_of(entry)
            if commit := older_code(entry):
                outcome += f"\nolder code: commit {commit}"
        rows.append((name, " ".join(definition.fidelity), outcome, claim))
    open_console().print(folded(rows, ("study", "fidelity", "outcome", "claim")))
    return OK


def _panel(words: list[str], flags: Flags) -> int:
    """Print the calibration panel and its scores, or publish its runs."""
    from nexus_ablate.comparison.calibration import outcomes, publish, read_runs, recorded
    from nexus_ablate.console import open_console
    from nexus_ablate.report import panel_page
    from nexus_ablate.report.parts import ReportPart
    from nexus_ablate.report.terminal import show
    from nexus_ablate.study.arm_overrides import key_of
    from nexus_ablate.study.definition import runs_dir_of
    from nexus_ablate.study.panel import read_panel

    unused = [word for word in words if key_of(word) != "runs_dir"]
    unused += typed(flags, *(name for name in flags if name not in ("panel", "publish")))
    if unused:
        fix = "nexus-ablate claims --panel runs_dir=runs"
        raise ConfigError("--panel takes runs_dir= alone", " ".join(unused), fix)
    panel = read_panel()
    if "publish" in flags:
        path = publish(panel, Path(flags["publish"]))
        print(f"saved to {path}; python scripts/docs.py writes docs/panel.md", file=sys.stderr)
        return OK
    runs, where = read_runs(panel, runs_dir_of(words)).runs, f"runs in {runs_dir_of(words)}"
    if not runs:
        published = recorded()
        runs, where = published.runs, f"published runs, commit {', '.join(commit[:12] for commit in published.commits)}"
    found = outcomes(panel, runs)
    tables = [panel_page.short_table(panel, found)]
    if found:
        tables += panel_page.score_table(found), panel_page.kind_table(found)
    parts = []
    for table in tables:
        parts += ReportPart("table", table=table), ReportPart("heading")
    if runs:
        parts.append(ReportPart("text", f"From the {where}."))
    for line in panel_page.sentences(panel, runs):
        parts += ReportPart("heading"), ReportPart("text", line)
    show(parts, open_console())
    if len(found) < len(panel.sizes) * len(panel.changes):
        _print_studies(panel)
    return OK


def _print_studies(panel: Panel) -> None:
    """The commands that train the panel."""
    print("\nTo train what is missing (nexus-ablate plan STUDY says how long it takes):")
    for study, values in panel.studies().items():
        runs = (len(values["arms"]) + 1) * len(values["strata"]) * len(panel.seeds)
        print(f"  nexus-ablate study {study}   {runs} runs")


def _train(words: list[str], flags: Flags) -> int:
    from nexus_ablate.cli import compare, study
    from nexus_ablate.planning.ledger import claims
    from nexus_ablate.study.definition import read_request

    if words[0] not in claims():
        raise unknown("there is no claim of this name", words[0], claims(), "nexus-ablate claims {}")
    status = study.run(words, flags)
    words, launcher, _ = split_launcher(words, flags, "nexus-ablate claims")
    if launcher == "slurm" or status == PREEMPTED:
        return status
    compared = compare.run([str(read_request(words).directory)], {})
    return status or compared


def _train_again(entry: LedgerEntry) -> int:
    """Train the first run of an entry's baseline with the present code and compare its endpoints."""
    from msgspec import structs

    from nexus_ablate.comparison.arms import group
    from nexus_ablate.comparison.load import collect
    from nexus_ablate.config.compose import compose
    from nexus_ablate.planning.design import expand
    from nexus_ablate.planning.jobs import Runs
    from nexus_ablate.planning.ledger import older_code
    from nexus_ablate.study.arm_overrides import merged
    from nexus_ablate.study.definition import read_request, strata_of
    from nexus_ablate.training.device import share_cores_politely

    share_cores_politely()
    from nexus_ablate.training.session import train

    name, made = entry.study, entry.made
    request = strata_of(read_request([name, f"name=check_{name}", f"train.threads={made.threads}"]))[0]
    study = request.study
    stratum = entry.strata.get(study.stratum)
    baseline = next(iter(stratum.runs.values())) if stratum else {}
    published = baseline.get(str(study.seeds[0]))
    if stratum is None or published is None or study.claim != entry.claim:
        raise ConfigError("this study has changed since it was published", name, f"nexus-ablate claims {name}")
    if study.lr_grid:  # the baseline's own rate is known
        rate = next(iter(stratum.rates.values()))
        overrides = merged(study.baseline, [f"optim.lr={rate:g}"])
        study = structs.replace(study, lr_grid=[], tuning_seeds=[], baseline=overrides)
    job = Runs(*expand(study), request).claims[0]
    train(compose(job.overrides), job.overrides, arm=job.arm)
    (arm,), _ = group(collect([job.path]))
    values = {endpoint: arm.value(job.seed, endpoint) for endpoint in published}
    for endpoint, former in published.items():
        word = "equal" if values[endpoint] == former else "DIFFERS"
        print(f"{word}  baseline s{job.seed} {endpoint}: {values[endpoint]!r}, published {former!r}")
    if values != published:
        print(f"published with torch {made.torch} on {made.processor}; others round in other ways")
        if commit := older_code(entry):
            print(f"published by other code (commit {commit}), whose defaults may have been others")
    return OK


def _check(directory: str, published: dict[str, LedgerEntry]) -> int:
    """Hold the differences of finished runs against the published ones."""
    from nexus_ablate.comparison.across_strata import compare
    from nexus_ablate.planning.ledger import NO_RESULT, other_circumstances, replications
    from nexus_ablate.report.sentences import arm_of

    comparison = compare(directory)
    entry = published.get(comparison.name)
    if entry is None:
        raise ConfigError("nothing is published of this study", comparison.name or directory, "nexus-ablate claims")
    arms = replications(entry, comparison)
    if all(arm.lacking == NO_RESULT for arm in arms):
        raise ConfigError("these runs share no arm with the published ones", directory, entry.command)
    for arm in arms:
        name = arm_of(arm.stratum, arm.arm)
        if arm.lacking:
            print(f"not compared  {name}: {arm.lacking}")
            continue
        word = "agrees" if arm.agrees else "DIFFERS"
        interval = f"95% interval {arm.low:+.4f} to {arm.high:+.4f}"
        print(f"{word}  {name}: {arm.difference:+.4f} from the published difference ({interval})")
    for line in other_circumstances(entry, comparison):
        print(f"a replication with {line}")
    outcome = comparison.claim.outcome if comparison.claim else "no outcome"
    agree = sum(arm.agrees for arm in arms)
    print(f"replicates {agree} of {len(arms)} differences; outcome {outcome}, published {entry.outcome}")
    return OK


def _publish(directory: str) -> int:
    from nexus_ablate.comparison.across_strata import compare
    from nexus_ablate.planning.ledger import publish

    print(f"saved to {publish(compare(directory))}; python scripts/docs.py writes docs/claims.md", file=sys.stderr)
    return OK

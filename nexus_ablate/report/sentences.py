"""What a report says in sentences: the answer, its conditions, the claim, what was left out. Every output uses them."""

from __future__ import annotations

import shlex

from nexus_ablate.comparison.findings import Findings
from nexus_ablate.comparison.result import Comparison, Row, Together
from nexus_ablate.comparison.verdict import CLAIM_SEEDS, IDENTICAL, MEANINGS, UNSTABLE
from nexus_ablate.console import several
from nexus_ablate.report.tables import interval_text

CHANGE_NOTE = "change: from the first stratum to the last, paired by seed, descriptive"
SCALING_NOTE = (
    "x1.2: the arm reaches its loss where the baseline needs 1.2 times the compute, at equal training tokens. "
    "Intervals hold all arms and sizes, with the noise of the fit. By time: at equal training time, by the measured "
    "speeds, whose own noise is not in the interval. Predicted: the largest size from the sizes below it alone."
)


def title(comparison: Comparison) -> str:
    return comparison.question or comparison.study or "comparison"


def answer(comparison: Comparison) -> str:
    """The answer in a sentence: each verdict word with its arms."""
    arms_by_word: dict[str, list[str]] = {}
    prefix = ""
    for row in comparison.rows[1:]:
        if row.verdict is not None:
            arms_by_word.setdefault(row.verdict.word, []).append(row.arm)
            prefix = max(prefix, row.verdict.prefix, key=len)
    if not arms_by_word:
        return f"Only {comparison.baseline} has a result; there is nothing to compare it with."
    words = [f"{word}: {' · '.join(arms_by_word[word])}" for word in MEANINGS if word in arms_by_word]
    return f"{prefix}{'. '.join(words)}."


def basis(comparison: Comparison) -> list[str]:
    """The conditions of the verdicts, one sentence each."""
    endpoint, seeds = comparison.endpoint, len(comparison.rows[0].seeds)
    unit = f" in {endpoint.unit}" if endpoint.unit else ""
    better = f"; {endpoint.good()}" if endpoint.good() else ""
    sd = "" if comparison.seed_sd is None else f", standard deviation over seeds {endpoint.spread(comparison.seed_sd)}"
    matters = endpoint.within(comparison.delta_min) if endpoint.log else endpoint.value(comparison.delta_min)
    lines = [
        f"{endpoint.name}{unit}, against {comparison.baseline} ({several(seeds, 'seed')}{sd}){better}",
        f"smallest difference that matters: {matters} ({comparison.delta_min_source})",
        *comparison.regime,
    ]
    if comparison.looks:
        looks = ", ".join(map(str, comparison.looks))
        lines.append(f"looks at {looks} seeds share the 5%; {comparison.look} of {len(comparison.looks)} are complete")
    if not comparison.terms.is_paired:
        lines.append(
            "unpaired, since the arms share no seeds: each is judged by Welch's t-test against the baseline, with "
            "intervals that are simultaneous over all arms (Sidak)"
        )
    if comparison.noisy:
        lines.append(
            f"unlike noise ({', '.join(comparison.noisy)}): every arm is judged by its own paired differences, because "
            "a pooled spread would claim too much"
        )
    if any(row.at_shared_lr for row in comparison.rows):
        lines.append("each arm is judged at its own best learning rate")
    name = comparison.arms[0].name if comparison.arms else comparison.baseline
    if name != comparison.baseline:
        lines.append(f"{comparison.baseline} is {name}")
    if comparison.exploratory:
        place = comparison.terms.place
        fresh = f"; nexus-ablate study {place} --confirm judges fresh seeds alone" if place else ""
        lines.append(f"exploratory: {'; '.join(comparison.exploratory)}{fresh}")
    if seeds < CLAIM_SEEDS:
        lines.append(f"preliminary: fewer than {CLAIM_SEEDS} seeds; treat as a hint")
    if any(row.verdict and row.verdict.word == UNSTABLE for row in comparison.rows):
        lines.append("values in brackets are over the seeds that trained; do not compare them")
    return lines


def direction(comparison: Comparison) -> str:
    """What an axis of differences shows, and which side is better."""
    side = {"lower": " (left is better)", "higher": " (right is better)"}.get(comparison.endpoint.better, "")
    return comparison.endpoint.axis() + side


def reason(row: Row) -> str:
    """Why an arm has its verdict, and what it changes besides what was asked for; '' for the baseline."""
    return "; ".join([row.verdict.sentence, *row.notes]) if row.verdict else ""


def together_text(two: Together) -> str:
    """An interaction in a sentence."""
    return f"{two.one} with {two.other}: {interval_text(two.interval)} beyond the sum of the two (negative: lower)"


def left_out(comparison: Comparison) -> list[str]:
    """One line per item in scope that is not in the table: excluded, refused, equal to another arm, tuning."""
    lines = [f"{'/'.join(out.path.parts[-2:])}: {out.reason}" for out in comparison.excluded]
    lines += [f"{overrides}: refused, {why}" for overrides, why in comparison.refused]
    lines += [f"{overrides}: the same configuration as {arm}, not trained twice" for overrides, arm in comparison.equal]
    if comparison.tuning_runs:
        lines.append(f"{several(comparison.tuning_runs, 'run')} chose learning rates")
    if comparison.shared_runs:
        lines.append(f"under `at shared LR`: {several(comparison.shared_runs, 'run')} at the study's learning rate")
    return lines


def claim_lines(findings: Findings) -> list[str]:
    """The claim with its outcome, what it requires, and each expectation."""
    claim = findings.claim
    if claim is None:
        judged = f"the claim is judged over all strata: nexus-ablate compare {shlex.quote(str(findings.whole))}"
        return [judged] if findings.whole and findings.tables[0].terms.study.claim else []
    lines = [requirement.sentence for requirement in claim.requirements]
    for expected in claim.results:
        stratum = f"{expected.stratum}: " if expected.stratum else ""
        lines.append(f"{expected.outcome}: {stratum}{expected.arm} {expected.sentence}")
    return [str(claim), *(lines or [claim.sentence])]


def missing_lines(findings: Findings) -> list[str]:
    """The strata without a result, and the arms of a ladder without a compute multiplier."""
    lines = [f"stratum {name}: no result yet ({states})" for name, states in findings.missing.items()]
    if not any(table.terms.study.rung for table in findings.tables):
        return lines
    if findings.missing:
        return [*lines, "compute multipliers are read when every size has results"]
    scaled = {arm.arm for arm in findings.scaling}
    rows = [row for row in findings.tables[0].rows if row.verdict and row.verdict.word != IDENTICAL]
    without = ", ".join(row.arm for row in rows if row.arm not in scaled)
    reason = "a size lacks a fair result at one of at least three seeds"
    return [f"no compute multiplier, since {reason}: {without}"] if without else []

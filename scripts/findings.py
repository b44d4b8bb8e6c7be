"""Fill in the numbers of docs/findings.md, and write docs/findings.jsonl and docs/findings.png.

    nexus-ablate compare prose_norm --json prose_norm.json
    python scripts/findings.py prose_norm.json

keeps what the page needs of each comparison in docs/findings/STUDY.json and fills the page in from all of these. Words,
differences and intervals are those of `compare`. A mark in the page, `<!-- result: STUDY ARM ENDPOINT as SUBJECT -->`,
says which row of which comparison answers the question above it.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import panel

DOCS = Path(__file__).resolve().parent.parent / "docs"
FOLDER = DOCS / "findings"
SIZES = {"pico": "", "femto": "_femto"}
"""What the name of a study ends in at each size, the larger first."""
UNFINISHED = ("INCOMPLETE", "TOO FEW SEEDS")
OF_A_TABLE = ("setting", "unit", "level", "cells", "basis")
OF_A_ROW = (
    *(
        "endpoint",
        "arm",
        "overrides",
        "word",
        "verdict",
        "sentence",
        "delta",
        "low",
        "high",
        "level",
        "p",
        "n",
        "spread",
        "needed",
    ),
    *("worth", "worth_low", "worth_high", "worth_per_flop", "mean", "sd", "val_bpb", "params_share", "flops_share"),
    *("tokens", "seconds", "failed"),
)
ROW = re.compile(
    r"^## (?P<question>.+)\n(?:(?!## ).*\n)*?<!-- result: (?P<source>.+) as (?P<subject>.+) -->\n", re.MULTILINE
)


@dataclass(frozen=True)
class Finding:
    """A question of the page, and the values of the row of a comparison that answers it, by size."""

    question: str
    source: str
    subject: str
    values: dict[str, dict[str, Any]]

    @property
    def answer(self) -> str:
        """What the largest trained size says, as a sentence."""
        return next((answer(self.subject, values) for values in self.values.values()), "Not trained yet.")

    @property
    def signs(self) -> list[bool]:
        """Whether the arm is worse, at each size that decides it."""
        return [values["delta"] > 0 for values in self.values.values() if values["word"] in ("BETTER", "WORSE")]

    def interval(self, size: str) -> str:
        values = self.values.get(size, {})
        return f"{values['delta']:+.3f} ({values['low']:+.3f} to {values['high']:+.3f})" if "low" in values else "–"


def answer(subject: str, values: dict[str, Any]) -> str:
    """The word of a comparison as a sentence about `subject`."""
    word = values["word"]
    if word in ("BETTER", "WORSE"):
        return f"{subject} is {word.lower()} by {abs(values['delta']):.3f}."
    if word == "EQUIVALENT":
        return f"The same: {subject} changes less than matters."
    if word == "INCONCLUSIVE":
        return f"Not decided: needs {values.get('needed', 'more than 200')} seeds."
    return f"{values['verdict']}."


def keep(comparison: Path) -> None:
    """Store the part of a `compare --json` file that the page needs."""
    tables = json.loads(comparison.read_text(encoding="utf-8"))["tables"]
    kept = []
    for table in tables:
        facts = {name: table[name] for name in OF_A_TABLE}
        facts["warnings"] = [check["text"] for check in table["checks"] if check["status"] != "PASS"]
        facts["rows"] = [row_values(row) for row in table["rows"]]
        kept.append(facts)
    file = FOLDER / f"{tables[0]['name']}.json"
    file.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def row_values(row: dict[str, Any]) -> dict[str, Any]:
    losses = {name.removeprefix("seed "): loss for name, loss in row.items() if name.startswith("seed ")}
    return {name: row[name] for name in OF_A_ROW if row.get(name) is not None} | {"losses": losses}


def values_of(source: str, size: str) -> dict[str, Any] | None:
    """The row of a kept comparison that `STUDY[@SETTING] ARM ENDPOINT` names; None before all of it is trained."""
    folder, arm, endpoint = source.split()
    study, _, setting = folder.partition("@")
    file = FOLDER / f"{study}{SIZES[size]}.json"
    if not file.exists():
        return None
    for table in json.loads(file.read_text(encoding="utf-8")):
        for row in table["rows"]:
            if (table["setting"], row["arm"], row["endpoint"]) == (setting, arm, endpoint):
                facts = {name: table[name] for name in ("unit", "basis", "warnings")}
                return None if row["word"] in UNFINISHED else row | facts
    raise SystemExit(f"{file} has no row of {source}")


def findings(page: str) -> list[Finding]:
    """The questions of a page, in its order."""
    found = []
    for match in ROW.finditer(page):
        by_size = {size: values_of(match["source"], size) for size in SIZES}
        values = {size: values for size, values in by_size.items() if values is not None}
        found.append(Finding(match["question"], match["source"], match["subject"], values))
    return found


def filled(page: str) -> str:
    """The page with the numbers of today between its marks."""
    rows = findings(page)
    page = replaced(page, "answers", answers(rows))
    page = replaced(page, "panel", panel.section())
    for row in rows:
        lines = [paragraph(row, size, values) for size, values in row.values.items()]
        page = replaced(page, f"result: {row.source} as {row.subject}", "\n".join(lines) or "Not trained yet.")
    return page


def paragraph(row: Finding, size: str, values: dict[str, Any]) -> str:
    """What one size says, and what it cost and rests on."""
    study = row.source.split()[0]
    in_bits = values["val_bpb"] / values["mean"] * values["delta"] if values["endpoint"] == "val_loss" else None
    bits = "" if in_bits is None else f", {in_bits:+.4f} bits per byte"
    worth = f" It is worth {values['worth']} of the compute." if values.get("worth") else ""
    beside = on_bytes(values, size) if values["endpoint"] == "val_loss" else ""
    hours = 2 * values["n"] * values["seconds"] / 3600
    at_size = "" if size == "pico" else f" model={size} name={study}{SIZES[size]}"
    command = f"nexus-ablate study docs/findings/{study}.yaml train.compile=off{at_size}"
    return (
        f"- **{size}**: {values['verdict']}, {values['sentence']}{bits}.{worth} {values['basis']}.{beside} "
        f"{hours:.1f} core hours with its baseline: `{command}`"
    )


def on_bytes(values: dict[str, Any], size: str) -> str:
    """What the same change did to models that read Python as bytes; "" where none were trained."""
    for change in panel.changes().values():
        if change["arm"] == values["overrides"] and "baseline" not in change:
            found = panel.outcome(change, size, panel.read_losses())
            return f" On Python as bytes: {found.interval}, three seeds, each at its best rate." if found else ""
    return ""


def replaced(page: str, mark: str, text: str) -> str:
    form = re.compile(rf"(<!-- {re.escape(mark)} -->\n).*?(<!-- end -->)", re.DOTALL)
    return form.sub(lambda match: f"{match[1]}\n{text.strip()}\n\n{match[2]}", page)


def answers(rows: list[Finding]) -> str:
    """The first table of the page, and how many of its words chance would make."""
    lines = ["| question | answer | at pico | at femto | worth in compute |", "|---|---|---|---|---|"]
    for row in rows:
        if row.values:
            worth = row.values.get("pico", {}).get("worth", "–")
            lines.append(
                f"| {row.question} | {row.answer} | {row.interval('pico')} | {row.interval('femto')} | {worth} |"
            )
    untrained = [row.question for row in rows if not row.values]
    if untrained:
        lines += ["", f"Asked, and not trained yet: {' '.join(untrained)}"]
    if len(untrained) == len(rows):
        return lines[-1]
    levels = [values["level"] for row in rows for values in row.values.values() if "level" in values]
    decided = [row.signs for row in rows if len(row.signs) == len(SIZES)]
    alike = sum(len(set(signs)) == 1 for signs in decided)
    lines += [
        "",
        f"If nothing mattered, about {sum(levels):.1f} of these {len(levels)} intervals would still exclude 0.",
    ]
    if decided:
        lines.append(f"Both sizes decide {len(decided)} of the questions, {alike} of these with the same sign.")
    return "\n".join(lines)


def records(rows: list[Finding]) -> str:
    """One line of JSON per question and size."""
    lines = []
    for row in rows:
        for size, values in row.values.items():
            lines.append(json.dumps({"question": row.question, "source": row.source, "size": size, **values}))
    return "".join(f"{line}\n" for line in lines)


def draw(rows: list[Finding], file: Path) -> None:
    """A forest plot: a line per question and size, the baseline at 0."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 1 + 0.5 * len(rows)), layout="constrained")
    for size, shift, color in (("pico", -0.12, "#3b6fb6"), ("femto", 0.12, "#c2571a")):
        axes.plot([], [], "o-", color=color, label=size)
        for line, row in enumerate(rows):
            values = row.values.get(size, {})
            if "low" in values:
                axes.plot([values["low"], values["high"]], [line + shift] * 2, color=color, linewidth=2)
                axes.plot([values["delta"]], [line + shift], "o", color=color, markersize=5)
    axes.axvline(0, color="#888888", linewidth=1)
    axes.set_yticks(range(len(rows)), [row.question for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("loss beside the baseline's, nats per piece (left is better)")
    axes.legend(frameon=False)
    figure.savefig(file, dpi=130)


def main() -> None:
    for comparison in sys.argv[1:]:
        keep(Path(comparison))
    page = DOCS / "findings.md"
    text = filled(page.read_text(encoding="utf-8"))
    page.write_text(text, encoding="utf-8")
    rows = findings(text)
    (DOCS / "findings.jsonl").write_text(records(rows), encoding="utf-8")
    if trained := [row for row in rows if row.values]:
        draw(trained, DOCS / "findings.png")


if __name__ == "__main__":
    main()

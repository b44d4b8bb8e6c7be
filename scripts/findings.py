"""Fill in the numbers of docs/findings.md and README.md, and write docs/findings.jsonl and docs/findings.png.

    nexus-ablate compare prose_norm --json prose_norm.json
    python scripts/findings.py prose_norm.json

keeps what the page needs of each comparison in docs/findings/STUDY.json and fills the page in from all of these. Words,
differences and intervals are those of `compare`. A mark in the page, `<!-- result: STUDY ARM ENDPOINT as SUBJECT -->`,
says which row of which comparison answers the question above it.
"""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import panel

from nexus_ablate.comparison.worth import Worth

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
FOLDER = DOCS / "findings"
SIZES = {"pico": "", "femto": "_femto"}
"""What the name of a study ends in at each size, the larger first."""
DECIDED = ("BETTER", "WORSE")
UNDECIDED = "not decided"
WORTH = ("worth", "worth_low", "worth_high")
OF_A_ROW = (
    *("endpoint", "arm", "overrides", "is_baseline", "word", "verdict", "sentence", "unit"),
    *("delta", "low", "high", "level", "p", "n", "spread", "needed"),
    *("mean", "val_bpb", "tokens", "seconds"),
    *WORTH,
)
ROW = re.compile(
    r"^## (?P<question>.+)\n(?:(?!## ).*\n)*?<!-- result: (?P<source>.+) as (?P<subject>.+) -->\n", re.MULTILINE
)

Values = dict[str, Any]
"""What is kept of a row of a comparison, and of its table."""


@dataclass(frozen=True)
class Finding:
    """A question of the page, and the values of the row of a comparison that answers it, by size."""

    question: str
    source: str
    subject: str
    values: dict[str, Values]

    @property
    def answer(self) -> str:
        """What the sizes say, as a sentence."""
        told: dict[str, list[str]] = {}
        for size, values in self.values.items():
            word, case = claim(values, size)
            told.setdefault(word, []).append(case)
        undecided = told.pop(UNDECIDED, [])
        said = " and ".join(f"{word} {' and '.join(cases)}" for word, cases in told.items())
        left = f"{UNDECIDED} {' or '.join(undecided)}"
        if not said:
            return f"{left.capitalize()}."
        return f"{self.subject} {said}; {left}." if undecided else f"{self.subject} {said}."

    def interval(self, size: str) -> str:
        values = self.values.get(size, {})
        return f"{values['delta']:+.3f} ({values['low']:+.3f} to {values['high']:+.3f})" if "low" in values else "–"

    @property
    def worth(self) -> str:
        """What the difference is worth, at the largest size that knows."""
        for size, values in self.values.items():
            if "worth" in values:
                ends = (math.inf if values[name] == "above" else values[name] for name in WORTH)
                return f"{Worth(*ends)} at {size}"
        return "–"


def claim(values: Values, size: str) -> tuple[str, str]:
    """What a row says about its subject, in plain words: the word, and how much at which size."""
    word = values["word"]
    if word in DECIDED:
        return f"is {word.lower()}", f"by {abs(values['delta']):.3f} at {size}"
    if word == "EQUIVALENT":
        return "makes no difference", f"above {values['delta_min']:.3f} at {size}"
    if word == "INCONCLUSIVE":
        seeds = f" ({values['needed']} seeds would decide this difference)" if "needed" in values else ""
        return UNDECIDED, f"at {size}{seeds}"
    return f"is {values['verdict']}", f"at {size}"


# ------------------------------------------------------------------------------------------- what is kept of `compare`


def keep(comparison: Path) -> None:
    """Store the part of a `compare --json` file that the page needs."""
    tables = json.loads(comparison.read_text(encoding="utf-8"))["tables"]
    kept = []
    for table in tables:
        facts = {name: table[name] for name in ("setting", "delta_min", "cells")}
        facts["warnings"] = {check["name"]: check["text"] for check in table["checks"] if check["status"] != "PASS"}
        facts["rows"] = [row_values(row) for row in table["rows"]]
        kept.append(facts)
    file = FOLDER / f"{tables[0]['name']}.json"
    file.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def row_values(row: dict[str, Any]) -> Values:
    losses = {name.removeprefix("seed "): loss for name, loss in row.items() if name.startswith("seed ")}
    return {name: row[name] for name in OF_A_ROW if row.get(name) is not None} | {"losses": losses}


def values_of(source: str, size: str) -> Values | None:
    """The row of a kept comparison that `STUDY[@SETTING] ARM ENDPOINT` names; None until every seed has its pair."""
    folder, arm, endpoint = source.split()
    study, _, setting = folder.partition("@")
    file = FOLDER / f"{study}{SIZES[size]}.json"
    if not file.exists():
        return None
    table = next(table for table in json.loads(file.read_text(encoding="utf-8")) if table["setting"] == setting)
    rows = {row["arm"]: row for row in table["rows"] if row["endpoint"] == endpoint}
    if arm not in rows:
        raise SystemExit(f"{file} has no row of {source}")
    if "seeds" in table["warnings"] or rows[arm]["word"] == "INCOMPLETE":
        return None
    baseline = next(row for row in rows.values() if row["is_baseline"])
    return rows[arm] | {"baseline": baseline, "warnings": table["warnings"], "delta_min": table["delta_min"]}


def findings(page: str) -> list[Finding]:
    """The questions of a page, in its order."""
    found = []
    for match in ROW.finditer(page):
        by_size = {size: values_of(match["source"], size) for size in SIZES}
        values = {size: values for size, values in by_size.items() if values is not None}
        found.append(Finding(match["question"], match["source"], match["subject"], values))
    return found


# --------------------------------------------------------------------------------------------------------- the page


def filled(page: str) -> str:
    """The page with the numbers of today between its marks."""
    rows = findings(page)
    page = replaced(page, "answers", answers(rows))
    page = replaced(page, "panel", panel.section())
    for row in rows:
        lines = [paragraph(row, size, values) for size, values in row.values.items()]
        page = replaced(page, f"result: {row.source} as {row.subject}", "\n".join(lines) or "Not trained yet.")
    return page


def replaced(page: str, mark: str, text: str) -> str:
    form = re.compile(rf"(<!-- {re.escape(mark)} -->\n).*?(<!-- end -->)", re.DOTALL)
    return form.sub(lambda match: f"{match[1]}\n{text.strip()}\n\n{match[2]}", page)


def answers(rows: list[Finding]) -> str:
    """The first table of the page, and what holds for all of it."""
    trained = [row for row in rows if row.values]
    untrained = " ".join(row.question for row in rows if not row.values)
    asked = f"Asked, and not trained yet: {untrained}" if untrained else ""
    if not trained:
        return asked
    lines = ["| question | answer | at pico | at femto | worth |", "|---|---|---|---|---|"]
    for row in trained:
        cells = (row.question, row.answer, row.interval("pico"), row.interval("femto"), row.worth)
        lines.append(f"| {' | '.join(cells)} |")
    every = [values for row in trained for values in row.values.values()]
    by_chance = sum(values["level"] for values in every if "level" in values)
    decided = [row for row in trained if both_decide(row)]
    alike = sum(len({values["word"] for values in row.values.values()}) == 1 for row in decided)
    notes = [
        f"If nothing mattered, about {by_chance:.1f} of these {len(every)} intervals would exclude 0.",
        f"The runs took {hours(every):.1f} core hours.",
    ]
    if decided:
        notes.append(f"Both sizes decide {len(decided)} of the questions, {alike} with the same sign.")
    picture = "![The differences in loss after training, with their intervals](findings.png)"
    return "\n".join([*lines, "", picture, "", " ".join(notes), "", asked])


def summary(rows: list[Finding]) -> str:
    """Five rows for the README."""
    trained = [row for row in rows if row.values][:5]
    return "\n".join(["| question | answer |", "|---|---|", *(f"| {row.question} | {row.answer} |" for row in trained)])


def both_decide(row: Finding) -> bool:
    return [values["word"] in DECIDED for values in row.values.values()] == [True] * len(SIZES)


def hours(every: list[Values]) -> float:
    """Core hours of all runs; a baseline that several rows share counts once."""
    runs = {
        (len(row["losses"]), row["mean"], row["seconds"]) for values in every for row in (values, values["baseline"])
    }
    return sum(number * seconds for number, _, seconds in runs) / 3600


def paragraph(row: Finding, size: str, values: Values) -> str:
    """What one size says, what it rests on and what it cost."""
    _, _, beside = values["verdict"].partition(" (")
    said = f"{row.subject} {values['sentence']}" + (f" ({beside}" if beside else "")
    notes = [f"The default model ends at {values['baseline']['mean']:.3f}"]
    if "low" in values:
        level, spread = values["level"], values["spread"]
        notes.append(f"The interval holds with {1 - level:.1%}; differences of single pairs have an SD of {spread:.3f}")
        if values["endpoint"] == "val_loss":
            in_bits = values["delta"] * values["val_bpb"] / values["mean"]
            notes.append(f"That is {in_bits:+.4f} bits per byte{on_bytes(values, size)}")
    notes += [text[0].upper() + text[1:] for name, text in values["warnings"].items() if name != "learning_rate"]
    study = row.source.split()[0]
    at_size = "" if size == "pico" else f" model={size} name={study}{SIZES[size]}"
    command = f"nexus-ablate study docs/findings/{study}.yaml train.compile=off{at_size}"
    return (
        f"- **{size}**: {'. '.join([said, *notes])}. {hours([values]):.1f} core hours with the default's: `{command}`"
    )


def on_bytes(values: Values, size: str) -> str:
    """What the same change did to models that read Python as bytes; "" where that is not known."""
    architecture = re.sub(r" optim\.lr=\S+", "", values["overrides"])
    for change in panel.changes().values():
        if change["arm"] == architecture and "baseline" not in change:
            found = panel.outcome(change, size, panel.read_losses())
            rates = "both at the largest rate" if change.get("rates") == "largest" else "each at its best rate"
            if found is not None:
                return f". On Python as bytes it is {found.interval} nats per byte, three seeds, {rates}"
    return ""


def records(rows: list[Finding]) -> str:
    """One line of JSON per question and size."""
    lines = []
    for row in rows:
        for size, values in row.values.items():
            lines.append(json.dumps({"question": row.question, "source": row.source, "size": size, **values}))
    return "".join(f"{line}\n" for line in lines)


def draw(rows: list[Finding], file: Path) -> None:
    """A forest plot of the rows on the loss: a line per question and size, the baseline at 0."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 1.2 + 0.4 * len(rows)), layout="constrained")
    for size, shift, color in (("pico", -0.12, "#3b6fb6"), ("femto", 0.12, "#c2571a")):
        known = {line + shift: row.values[size] for line, row in enumerate(rows) if "low" in row.values.get(size, {})}
        means = [values["delta"] for values in known.values()]
        lows, highs = ([values[end] for values in known.values()] for end in ("low", "high"))
        if known:
            axes.hlines([*known], lows, highs, color, linewidth=2)
            axes.plot(means, [*known], "o", color=color, markersize=5, label=size)
    axes.axvline(0, color="#888888", linewidth=1)
    axes.set_yticks(range(len(rows)), [row.subject for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("loss beside the default's, nats per token (left is better)")
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    numbers = " ".join(row.interval(size) for row in rows for size in SIZES)
    figure.savefig(file, dpi=130, metadata={"Title": numbers})


def main() -> None:
    for comparison in sys.argv[1:]:
        keep(Path(comparison))
    page, readme = DOCS / "findings.md", ROOT / "README.md"
    text = filled(page.read_text(encoding="utf-8"))
    rows = findings(text)
    page.write_text(text, encoding="utf-8")
    readme.write_text(replaced(readme.read_text(encoding="utf-8"), "findings", summary(rows)), encoding="utf-8")
    (DOCS / "findings.jsonl").write_text(records(rows), encoding="utf-8")
    on_loss = [row for row in rows if row.source.endswith(" val_loss")]
    with_intervals = [row for row in on_loss if any("low" in values for values in row.values.values())]
    if with_intervals:
        draw(with_intervals, DOCS / "findings.png")


if __name__ == "__main__":
    main()

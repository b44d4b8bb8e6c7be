"""Write what the documentation takes from elsewhere: docs/options.md and the tables of docs/metrics.md from the code,
docs/claims.md and its figure from conf/claims, docs/panel.md and its figure from conf/panel.yaml, the table of
docs/baseline.md from docs/baseline.csv."""

import csv
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from nexus_ablate.cli.list import catalogue, typed_default, typed_key, typed_option
from nexus_ablate.comparison.calibration import outcomes, recorded
from nexus_ablate.comparison.verdict import MEANINGS
from nexus_ablate.config.grammar import show
from nexus_ablate.config.run_config import CLOSED_GROUPS
from nexus_ablate.measure.measures import table
from nexus_ablate.planning.ledger import claims, designs, entries
from nexus_ablate.report import ledger_page, panel_page
from nexus_ablate.study.panel import read_panel

ROOT = Path(__file__).resolve().parent.parent


def with_measures(page: str) -> str:
    """docs/metrics.md with the tables of today between its marks."""
    form = re.compile(r"(<!-- measures: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return form.sub(lambda match: f"{match[1]}{table(match[2])}\n{match[3]}", page)


def with_words(page: str) -> str:
    """docs/reading_a_verdict.md with the words of a verdict and their meanings between its marks."""
    rows = [f"| {word} | {meaning} |" for word, meaning in MEANINGS.items()]
    form = re.compile(r"(<!-- words -->\n).*?(<!-- end -->)", re.DOTALL)
    return form.sub(lambda match: "\n".join([match[1] + "| word | meaning |", "|---|---|", *rows, match[2]]), page)


def with_outcomes(page: str, published: dict[str, Any]) -> str:
    """README.md with the outcomes of the published claims between its marks."""
    form = re.compile(r"(<!-- claims -->\n).*?(<!-- end -->)", re.DOTALL)
    return form.sub(lambda match: f"{match[1]}{ledger_page.decided(claims(), published)}\n{match[2]}", page)


def with_baseline(page: str) -> str:
    """docs/baseline.md with the losses of docs/baseline.csv between its marks: initializations by rate."""
    with open(ROOT / "docs/baseline.csv", encoding="utf-8", newline="") as file:
        runs = list(csv.DictReader(file))
    rates = sorted({run["lr"] for run in runs}, key=float)
    losses: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        losses.setdefault((run["init"], run["lr"]), []).append(f"{float(run['val_loss']):.3f}")
    lines = [f"| `init=` | {' | '.join(rates)} |", "|---|" + "---|" * len(rates)]
    for init in dict.fromkeys(run["init"] for run in runs):
        cells = [" / ".join(losses.get((init, rate), ["–"])) for rate in rates]
        lines.append(f"| `{init}` | {' | '.join(cells)} |")
    form = re.compile(r"(<!-- baseline -->\n).*?(<!-- end -->)", re.DOTALL)
    return form.sub(lambda match: f"{match[1]}\n{chr(10).join(lines)}\n\n{match[2]}", page)


def options_page(groups: dict[str, Any]) -> str:
    """docs/options.md: every option of `catalogue` with its equations, its keys and its source."""
    about = "Every option with its equation, keys and source. `*` is the baseline. Made by `scripts/docs.py`."
    lines = ["# Options", "", about, "", "| group | options |", "|---|---|"]
    for group, options in groups.items():
        names = [f"`{name}`" for name in options]
        if group != "switches":
            first = sorted(options, key=lambda name: not options[name]["default"])
            names = [f"`{name}`" + "*" * options[name]["default"] for name in first]
        lines.append(f"| `{'study' if group == 'studies' else group}` | {' '.join(names)} |")
    for group, options in groups.items():
        lines += ["", f"## {group}"]
        if group == "switches":
            rows = {f"{name}={show(key['default'])}": key for name, key in options.items()}
            lines += key_table(rows)
            continue
        for name, option in options.items():
            lines += ["", f"**`{typed_option(group, name)}`**{' *' if option['default'] else ''} {option['summary']}"]
            if option.get("equation"):
                lines += ["", *("    " + equation for equation in option["equation"])]
            if option.get("prescribes"):
                lines += ["", f"Prescribes {', '.join(f'`{override}`' for override in option['prescribes'])}."]
            if group not in CLOSED_GROUPS:
                lines += key_table(option_keys(group, name, option))
        if group in CLOSED_GROUPS:  # all options of the group have the same keys
            name = next((name for name, option in options.items() if option["default"]), next(iter(options)))
            lines += key_table(option_keys(group, name, options[name]))
    return "\n".join(lines) + "\n"


def option_keys(group: str, name: str, option: dict[str, Any]) -> dict[str, Any]:
    """The keys of an option by how they are typed with their default."""
    return {typed_key(group, name, key) + typed_default(group, spec): spec for key, spec in option["keys"].items()}


def key_table(keys: dict[str, Any]) -> list[str]:
    rows = ["", "| key | takes | meaning |", "|---|---|---|"] if keys else []
    for typed, key in keys.items():
        takes, meaning = (key[name].replace("|", "\\|") for name in ("takes", "meaning"))
        rows.append(f"| `{typed}` | {takes} | {meaning} |")
    return rows


def source_of_claims() -> str:
    """The hash of what docs/claims.png is drawn from."""
    return hashlib.sha256(json.dumps(entries(), sort_keys=True).encode()).hexdigest()


def draw_claims() -> None:
    """docs/claims.png, with the hash of its source."""
    metadata = {"Title": "Outcomes and differences by claim", "Source": source_of_claims()}
    ledger_page.figure(entries()).savefig(ROOT / "docs/claims.png", dpi=90, metadata=metadata)


if __name__ == "__main__":
    metrics = ROOT / "docs/metrics.md"
    metrics.write_text(with_measures(metrics.read_text(encoding="utf-8")), encoding="utf-8")
    words = ROOT / "docs/reading_a_verdict.md"
    words.write_text(with_words(words.read_text(encoding="utf-8")), encoding="utf-8")
    baseline = ROOT / "docs/baseline.md"
    baseline.write_text(with_baseline(baseline.read_text(encoding="utf-8")), encoding="utf-8")
    (ROOT / "docs/options.md").write_text(options_page(catalogue()), encoding="utf-8")
    panel, trained = read_panel(), recorded()
    found = outcomes(panel, trained.runs) if trained else []
    (ROOT / "docs/panel.md").write_text(panel_page.page(panel, found), encoding="utf-8")
    if found:
        panel_page.figure(found).savefig(ROOT / "docs/panel.png", dpi=110)
    published = entries()
    (ROOT / "docs/claims.md").write_text(ledger_page.page(claims(), published, designs()), encoding="utf-8")
    if published:
        draw_claims()
        readme = ROOT / "README.md"
        readme.write_text(with_outcomes(readme.read_text(encoding="utf-8"), published), encoding="utf-8")

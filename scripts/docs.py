"""Write what the documentation takes from the code: docs/options.md, the tables of docs/metrics.md and the words."""

import re
from pathlib import Path
from typing import Any

from nexus_ablate.cli.list import catalogue, typed_default, typed_key, typed_option
from nexus_ablate.comparison.verdict import MEANINGS
from nexus_ablate.config.grammar import show
from nexus_ablate.config.run_config import CLOSED_GROUPS
from nexus_ablate.console import markdown_table
from nexus_ablate.measure.measures import table

ROOT = Path(__file__).resolve().parent.parent


def with_measures(page: str) -> str:
    """docs/metrics.md with the tables of today between its marks."""
    form = re.compile(r"(<!-- measures: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return form.sub(lambda match: f"{match[1]}{table(match[2])}\n{match[3]}", page)


def with_words(page: str) -> str:
    """docs/reading_a_verdict.md with the words of a verdict and their meanings between its marks."""
    words = "\n".join(markdown_table(("word", "meaning"), MEANINGS.items()))
    form = re.compile(r"(<!-- words -->\n).*?(<!-- end -->)", re.DOTALL)
    return form.sub(lambda match: f"{match[1]}{words}\n{match[2]}", page)


def options_page(groups: dict[str, Any]) -> str:
    """docs/options.md: every option of `catalogue` with its equations, its keys and its source."""
    about = "Every option with its equation, keys and source. `*` is the baseline. Made by `scripts/docs.py`."
    rows = []
    for group, options in groups.items():
        names = [f"`{name}`" for name in options]
        if group != "switches":
            first = sorted(options, key=lambda name: not options[name]["default"])
            names = [f"`{name}`" + "*" * options[name]["default"] for name in first]
        rows.append((f"`{'study' if group == 'studies' else group}`", " ".join(names)))
    lines = ["# Options", "", about, "", *markdown_table(("group", "options"), rows)]
    for group, options in groups.items():
        lines += ["", f"## {group}"]
        if group == "switches":
            lines += key_table({f"{name}={show(key['default'])}": key for name, key in options.items()})
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
    rows = [(f"`{typed}`", key["takes"], key["meaning"]) for typed, key in keys.items()]
    return ["", *markdown_table(("key", "takes", "meaning"), rows)] if rows else []


if __name__ == "__main__":
    metrics = ROOT / "docs/metrics.md"
    metrics.write_text(with_measures(metrics.read_text(encoding="utf-8")), encoding="utf-8")
    words = ROOT / "docs/reading_a_verdict.md"
    words.write_text(with_words(words.read_text(encoding="utf-8")), encoding="utf-8")
    (ROOT / "docs/options.md").write_text(options_page(catalogue()), encoding="utf-8")

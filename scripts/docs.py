"""Write what the documentation takes from the code: docs/options.md, tables of README.md and metrics.md."""

import re
from pathlib import Path

from nexus_ablate.cli.list import catalogue, markdown, option_table
from nexus_ablate.measure.measures import table

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- options: scripts/docs.py -->\n", "\n<!-- end -->"


def with_table(readme: str) -> str:
    """The README with the table of today between its two marks."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + option_table(catalogue()) + END + after


def with_measures(page: str) -> str:
    """docs/metrics.md with the tables of today between its marks."""
    form = re.compile(r"(<!-- measures: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return form.sub(lambda match: f"{match[1]}{table(match[2])}\n{match[3]}", page)


if __name__ == "__main__":
    metrics = ROOT / "docs/metrics.md"
    metrics.write_text(with_measures(metrics.read_text(encoding="utf-8")), encoding="utf-8")
    (ROOT / "docs/options.md").write_text(markdown(catalogue()) + "\n", encoding="utf-8")
    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text(encoding="utf-8")), encoding="utf-8")

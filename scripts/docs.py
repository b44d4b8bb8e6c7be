"""Write what the documentation takes from the code: docs/options.md, and the tables of docs/metrics.md."""

import re
from pathlib import Path

from nexus_ablate.cli.list import catalogue, markdown
from nexus_ablate.measure.measures import table

ROOT = Path(__file__).resolve().parent.parent


def with_measures(page: str) -> str:
    """docs/metrics.md with the tables of today between its marks."""
    form = re.compile(r"(<!-- measures: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return form.sub(lambda match: f"{match[1]}{table(match[2])}\n{match[3]}", page)


if __name__ == "__main__":
    metrics = ROOT / "docs/metrics.md"
    metrics.write_text(with_measures(metrics.read_text(encoding="utf-8")), encoding="utf-8")
    (ROOT / "docs/options.md").write_text(markdown(catalogue()) + "\n", encoding="utf-8")

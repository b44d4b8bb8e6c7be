"""Write what the documentation takes from elsewhere: docs/options.md and the tables of docs/metrics.md from the code,
docs/claims.md and its figure from conf/claims."""

import re
from pathlib import Path
from typing import Any

from nexus_ablate.cli.list import catalogue, markdown
from nexus_ablate.measure.measures import table
from nexus_ablate.planning.ledger import claims, designs, entries
from nexus_ablate.report import ledger_page

ROOT = Path(__file__).resolve().parent.parent


def with_measures(page: str) -> str:
    """docs/metrics.md with the tables of today between its marks."""
    form = re.compile(r"(<!-- measures: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return form.sub(lambda match: f"{match[1]}{table(match[2])}\n{match[3]}", page)


def with_outcomes(page: str, published: dict[str, Any]) -> str:
    """README.md with the outcomes of the published claims between its marks."""
    form = re.compile(r"(<!-- claims -->\n).*?(<!-- end -->)", re.DOTALL)
    return form.sub(lambda match: f"{match[1]}{ledger_page.decided(claims(), published)}\n{match[2]}", page)


if __name__ == "__main__":
    metrics = ROOT / "docs/metrics.md"
    metrics.write_text(with_measures(metrics.read_text(encoding="utf-8")), encoding="utf-8")
    (ROOT / "docs/options.md").write_text(markdown(catalogue()) + "\n", encoding="utf-8")
    published = entries()
    (ROOT / "docs/claims.md").write_text(ledger_page.page(claims(), published, designs()), encoding="utf-8")
    if published:
        ledger_page.figure(published).savefig(ROOT / "docs/claims.png", dpi=110)
        readme = ROOT / "README.md"
        readme.write_text(with_outcomes(readme.read_text(encoding="utf-8"), published), encoding="utf-8")

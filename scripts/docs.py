"""Write what the documentation takes from elsewhere: docs/options.md and the tables of docs/metrics.md from the code,
docs/claims.md and its figure from conf/claims."""

import re
from pathlib import Path

from nexus_ablate.cli.list import catalogue, markdown
from nexus_ablate.measure.measures import table
from nexus_ablate.report import ledger_page
from nexus_ablate.study.ledger import claims, entries

ROOT = Path(__file__).resolve().parent.parent


def with_measures(page: str) -> str:
    """docs/metrics.md with the tables of today between its marks."""
    form = re.compile(r"(<!-- measures: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return form.sub(lambda match: f"{match[1]}{table(match[2])}\n{match[3]}", page)


if __name__ == "__main__":
    metrics = ROOT / "docs/metrics.md"
    metrics.write_text(with_measures(metrics.read_text(encoding="utf-8")), encoding="utf-8")
    (ROOT / "docs/options.md").write_text(markdown(catalogue()) + "\n", encoding="utf-8")
    published = entries()
    (ROOT / "docs/claims.md").write_text(
        ledger_page.page({name: study.claim for name, study in claims().items()}, published), encoding="utf-8"
    )
    if published:
        ledger_page.figure(published).savefig(ROOT / "docs/claims.png", dpi=110)

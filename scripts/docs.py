"""Write what the documentation takes from the registry: docs/options.md and the README's table of options."""

from pathlib import Path

from nexus_ablate.cli.list import catalogue, markdown, option_table

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- options: scripts/docs.py -->\n", "\n<!-- end -->"


def with_table(readme: str) -> str:
    """The README with the table of today between its two marks."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + option_table(catalogue()) + END + after


if __name__ == "__main__":
    (ROOT / "docs/options.md").write_text(markdown(catalogue()) + "\n", encoding="utf-8")
    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text(encoding="utf-8")), encoding="utf-8")

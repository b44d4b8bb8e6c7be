"""Write docs/options.md, which is taken from the registry."""

from pathlib import Path

from nexus_ablate.cli.list import catalogue, markdown

ROOT = Path(__file__).resolve().parent.parent

if __name__ == "__main__":
    (ROOT / "docs/options.md").write_text(markdown(catalogue()) + "\n", encoding="utf-8")

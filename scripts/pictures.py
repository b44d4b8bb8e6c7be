"""Draw every picture of the documentation: `python scripts/pictures.py [NAME...]`, about half an hour.

Runs that a picture needs and runs/ lacks are trained. Each file holds its title and numbers as `Title`, which the tests
compare with the page that shows it.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from matplotlib import pyplot
from PIL import Image
from PIL.PngImagePlugin import PngInfo

import nexus_ablate
from nexus_ablate.report.sentences import answer

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs"


def nexus(*words: str) -> None:
    """Run a command of the package."""
    subprocess.run([sys.executable, "-m", "nexus_ablate", *words], cwd=ROOT, check=True)


def default_run() -> None:
    nexus("train", "experiment=pictures", "tracker=files")
    (run,) = RUNS.glob("pictures/baseline/s0-*")
    nexus("show", str(run), "--out", "docs/default_run.png", "--force")


def first_look() -> None:
    """The head of the report of `first_look`, in a browser."""
    nexus("study", "first_look")
    with tempfile.TemporaryDirectory() as folder:
        page, shot = Path(folder) / "page.html", Path(folder) / "shot.png"
        nexus("compare", "runs/first_look", "--html", str(page))
        chromium = ["chromium", "--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1180,632"]
        light = "--blink-settings=preferredColorScheme=1"
        subprocess.run([*chromium, light, f"--screenshot={shot}", f"file://{page}"], check=True, capture_output=True)
        (table,) = nexus_ablate.compare(RUNS / "first_look").tables
        differences = [f"{row.arm.name} {row.effect.delta:+.4f}" for row in table.rows if row.effect is not None]
        info = PngInfo()
        info.add_text("Title", f"{answer(table)} {', '.join(differences)}")
        with Image.open(shot) as image:
            image.convert("RGB").save(ROOT / "docs/first_look.png", pnginfo=info, optimize=True)


def coordinates(param: str) -> None:
    """The coordinate check, which fails under `sp`: exit status 1."""
    picture = f"docs/coordcheck_{param}.png"
    subprocess.run([sys.executable, "scripts/bench_coordinates.py", f"param={param}", "--picture", picture], cwd=ROOT)


def new_2026() -> None:
    """Training losses of each option of `new_2026` beside the baseline's."""
    nexus("study", "new_2026")
    draw_curves(RUNS / "new_2026", ROOT / "docs/new_2026.png")


def draw_curves(study: Path, target: Path) -> None:
    """A panel per arm, a line per run of three seeds: the mean training loss of 5% of the run."""
    (table,) = nexus_ablate.compare(study).tables
    baseline, *arms = table.arms
    figure, panels = pyplot.subplots(-(-len(arms) // 4), 4, figsize=(12, 8), sharex=True, sharey=True)
    for panel, arm in zip(panels.flat, arms, strict=False):
        for colour, runs in (("0.6", baseline.runs), ("tab:blue", arm.runs)):
            for seed in (0, 1, 2):
                rows = nexus_ablate.load_run(runs[seed].path).metrics_frame().dropna(subset="train/loss")
                smooth = rows["train/loss"].rolling(max(1, len(rows) // 20)).mean()
                panel.plot(rows["tokens"], smooth, color=colour, linewidth=1)
        panel.set_title(arm.name)
    for panel in panels.flat[len(arms) :]:
        panel.remove()
    last = baseline.values("val_loss", [0, 1, 2]).mean()
    panels.flat[0].set_ylim(0.95 * last, 1.6 * last)
    figure.supxlabel("tokens")
    figure.supylabel("training loss in nats per token; grey: the baseline")
    differences = [f"{row.arm.name} {row.effect.delta:+.4f}" for row in table.rows if row.effect is not None]
    figure.savefig(target, dpi=90, bbox_inches="tight", metadata={"Title": ", ".join(differences)})


PICTURES: dict[str, Callable[[], None]] = {
    "default_run": default_run,
    "first_look": first_look,
    "new_2026": new_2026,
    "coordcheck_mup": partial(coordinates, "mup"),
    "coordcheck_sp": partial(coordinates, "sp"),
}

if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]()

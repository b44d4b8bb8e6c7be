"""Draw every picture of the documentation: `python scripts/pictures.py [NAME...]`, about a quarter of an hour.

Runs that a picture needs and runs/ lacks are trained. Each file holds its title and numbers as `Title`, which the tests
compare with the page that shows it; those of docs/claims hold a hash of what is published.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

import nexus_ablate
from nexus_ablate.report.sentences import answer

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs"


def nexus(*words: str) -> None:
    """Run a command of the package; status 1 is the answer of a coordinate check that fails."""
    status = subprocess.run([sys.executable, "-m", "nexus_ablate", *words], cwd=ROOT).returncode
    if status not in (0, 1):
        raise SystemExit(status)


def claims() -> None:
    subprocess.run([sys.executable, "scripts/docs.py"], cwd=ROOT, check=True)


def default_run() -> None:
    nexus("train", "experiment=pictures", "tracker=files")
    (run,) = RUNS.glob("pictures/baseline/s0-*")
    nexus("show", str(run), "--out", "docs/default_run.png", "--force")


def first_look() -> None:
    """The head of the report of `first_look`, in a browser."""
    nexus("study", "first_look", "--retrain")
    with tempfile.TemporaryDirectory() as folder:
        page, shot = Path(folder) / "page.html", Path(folder) / "shot.png"
        nexus("compare", "runs/first_look", "--html", str(page))
        chromium = ["chromium", "--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1180,590"]
        light = "--blink-settings=preferredColorScheme=1"
        subprocess.run([*chromium, light, f"--screenshot={shot}", f"file://{page}"], check=True, capture_output=True)
        (stratum,) = nexus_ablate.compare(RUNS / "first_look").strata
        differences = [f"{row.arm} {row.difference:+.4f}" for row in stratum.rows if row.difference is not None]
        info = PngInfo()
        info.add_text("Title", f"{answer(stratum)} {', '.join(differences)}")
        with Image.open(shot) as image:
            image.convert("RGB").save(ROOT / "docs/first_look.png", pnginfo=info, optimize=True)


def induction_layers() -> None:
    """Answers on repeated tokens by step: a line per run, in the colour of its arm."""
    from matplotlib.figure import Figure

    nexus("study", "induction_layers", "--retrain")
    comparison = nexus_ablate.compare(RUNS / "induction_layers")
    means = {row.arm: row.mean for row in comparison.strata[0].rows}
    figure = Figure(figsize=(6.5, 3.6), layout="constrained")
    axes = figure.subplots()
    for colour, arm in enumerate(comparison.strata[0].arms):
        for number, run in enumerate(arm.runs.values()):
            log = nexus_ablate.load_run(run.record.path).metrics_frame().dropna(subset="repeats/accuracy")
            axes.plot(log["step"], log["repeats/accuracy"], color=f"C{colour}", label="_" * bool(number) + arm.label)
    axes.set(xlabel="training step", ylabel="repeated tokens answered, share", ylim=(0, 1.02))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside upper center", ncols=2)
    title = ", ".join(f"{arm} {mean:.3f}" for arm, mean in means.items() if mean is not None)
    figure.savefig(ROOT / "docs/induction_layers.png", dpi=130, metadata={"Title": title})


def coordcheck_mup() -> None:
    nexus("bench", "coordinates", "param=mup", "--picture", "docs/coordcheck_mup.png", "--force")


def coordcheck_sp() -> None:
    nexus("bench", "coordinates", "param=sp", "--picture", "docs/coordcheck_sp.png", "--force")


PICTURES: dict[str, Callable[[], None]] = {
    "claims": claims,
    "default_run": default_run,
    "first_look": first_look,
    "induction_layers": induction_layers,
    "coordcheck_mup": coordcheck_mup,
    "coordcheck_sp": coordcheck_sp,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]()

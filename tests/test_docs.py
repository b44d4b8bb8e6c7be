"""What the documentation says can be typed: every command in it is run, with the training itself replaced."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pandas as pd
import pytest
from checkouts import ROOT, script
from PIL import Image
from wandb_server import serving_alone
from written_runs import Writer

from nexus_ablate import errors
from nexus_ablate.cli import main
from nexus_ablate.cli.list import catalogue
from nexus_ablate.cli.verb import all_verbs, verb_names
from nexus_ablate.measure.measures import SECTIONS
from nexus_ablate.measure.regime import check_passes

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "runs/README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAME = r"(?:torchrun \S+ \d -m nexus_ablate|nexus-ablate)"
LINE = re.compile(rf"^(?: {{4}}|\$ )(?P<command>{NAME} .*?)(?: {{2,}}.*)?$", re.M)
SPAN = re.compile(rf"`(?P<command>{NAME} ([^\s`]+ [^`\n]+|[^\s`]+=[^\s`]+))`")
PLACEHOLDER = re.compile(r"(?<![\w/.])[A-Z][A-Z_]+(?![\w.])|\.\.\.|/path/|path/to")
"""`DIR`, `KEY=VALUE`, `...`: a form and no command."""
FILE = re.compile(r"^```\w+ (?P<name>\S+)\n(?P<text>.*?)^```$", re.M | re.S)
"""A file of a page: its name stands behind the language."""
SIZES = {
    "vocab_size": 256,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
PUBLISHED = {
    "Llama-3.2-1B": {"model_type": "llama", "max_position_embeddings": 8, **SIZES},
    "pythia-70m": {"model_type": "gpt_neox", "max_position_embeddings": 8, **SIZES},
}
"""Models that a page imports: their configuration, small and without weights."""
DEFAULT_TEXT = 10_000_000
"""Training tokens of data=stdlib, which has more on every Python."""


def commands() -> list[str]:
    """Every command that trains in the help, and every command of every page, once, without its explanation."""
    texts = [page.read_text() for page in PAGES]
    for verb in all_verbs():
        if verb.name in ("train", "study"):
            texts += [verb.notes, *(f"    nexus-ablate {command}" for command, _ in verb.examples)]
    result = [match["command"].strip() for text in texts for form in (LINE, SPAN) for match in form.finditer(text)]
    named = [re.sub(f"^{NAME}", "nexus-ablate", command) for command in result]
    return [c for c in dict.fromkeys(named) if not PLACEHOLDER.search(c)]


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder with the texts, tables and files that the pages speak of; nothing is trained."""
    from nexus_ablate.launch import launch
    from nexus_ablate.launch.local import LocalPool
    from nexus_ablate.launch.slurm import Slurm
    from nexus_ablate.training import evaluation, session

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEXUS_ABLATE_CACHE", str(tmp_path / "cache"))
    for name in ("book.txt", "tinyshakespeare.txt", "gcide.txt"):
        (tmp_path / name).write_text("to be or not to be\n" * 500)
    shutil.copytree(ROOT / "docs/findings", tmp_path / "docs/findings")
    documents = pd.DataFrame({"text": ["to be or not to be\n" * 50] * 10, "review": ["it was good\n" * 50] * 10})
    documents.to_json(tmp_path / "notes.jsonl", orient="records", lines=True)
    documents.to_csv(tmp_path / "reviews.csv", index=False)
    documents.to_parquet(tmp_path / "corpus.parquet")
    for page in PAGES:
        for match in FILE.finditer(page.read_text()):
            (tmp_path / match["name"]).write_text(match["text"])
    rows = (("baseline", 0, 2.0), ("baseline", 1, 2.1), ("new", 0, 1.9), ("new", 1, 1.95))
    lines = [f"{arm},{seed},{loss},3e-3,100,1" for arm, seed, loss in rows]
    (tmp_path / "runs.csv").write_text("\n".join(["arm,seed,val_loss,rate,tokens,seconds", *lines, ""]))
    for name, config in PUBLISHED.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))

    def check_budget(config):
        if config.data.name == "stdlib":
            check_passes(config, DEFAULT_TEXT)

    def train(config, *_, **__):
        check_budget(config)
        return session.Outcome(0, tmp_path, {"val_loss": 1.0})

    def check_budgets(planned):  # the texts of this folder are short, others are on the Hub
        for config in planned.configs.values():
            check_budget(config)

    def run(_, jobs, progress):
        progress.statuses |= {job.path: 0 for job in jobs}
        return ""

    monkeypatch.setattr("nexus_ablate.cli.bench.SECONDS", 0.1)
    monkeypatch.setattr("nexus_ablate.cli.doctor.import_error", lambda modules: ("", ""))  # takes seconds
    monkeypatch.setattr(session, "train", train)
    monkeypatch.setattr(LocalPool, "run", run)
    monkeypatch.setattr(Slurm, "check", lambda _: None)
    monkeypatch.setattr(Slurm, "run", run)
    monkeypatch.setattr(evaluation, "evaluate", lambda path, names: {name: {"not_defined": "here"} for name in names})
    monkeypatch.setattr(launch, "prepare_data", check_budgets)


def with_what_it_needs(words: list[str], place: Path) -> None:
    """Make the study that a command continues, or the runs that it reads; a command that launches begins with none."""
    if words[0] in ("study", "plan"):
        if words[1] == "mine" and "vary." not in " ".join(words):
            assert main(["study", "mine", "vary.norm=layer", "model=femto"]) == 0
        return
    if words[0] not in ("compare", "status", "show", "sample", "evaluate", "sync"):
        return
    study = next((word.removeprefix("runs/") for word in words[1:] if word != "last"), "scratch")
    writer = Writer(place / "runs", study)
    writer.arm(losses=[2.0, 2.01, 1.99, 2.0, 2.02])
    writer.arm("norm=layer", losses=[2.1, 2.12, 2.09, 2.11, 2.12])


def test_the_pages_have_commands():
    assert len(commands()) > 20
    assert {c.split()[1] for c in commands()} >= {"compare", "explain", "plan", "evaluate", "-m"}


def test_the_page_of_the_command_line_shows_every_verb():
    page = (ROOT / "docs/command_line.md").read_text()
    assert {name for name in verb_names() if f"`nexus-ablate {name}" not in page} == set()


def test_every_flag_that_a_page_names_is_one_of_a_verb():
    flags = {name for verb in all_verbs() for flag in verb.flags for name in (flag.name, *flag.keys)} | {"--plugin"}
    named = {flag for page in PAGES for flag in re.findall(r"`(--[a-z][a-z-]*)", page.read_text())}
    assert named - flags == set()


LONG = re.compile("bench position|(plan|study) .*model=micro")
"""Commands of the slow tier."""
COMMANDS = [pytest.param(c, marks=pytest.mark.slow) if LONG.search(c) else c for c in commands()]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_documentation_runs(command, desk, capsys, monkeypatch, tmp_path):
    # Hydra's launchers are plugins that a user installs; the runs are the same
    command = re.sub(r" (--launcher (joblib|ray)|\+?hydra[/.]launcher[=.]\S+)", "", command)
    words = shlex.split(command.partition(" | ")[0])[1:]
    if words[0] == "bench":
        words[1] = words[1].replace("norm", "norm=rms,layer")
    with_what_it_needs(words, tmp_path)
    if {"sync", "dashboard", "--wandb"} & set(words):
        with serving_alone(tmp_path, monkeypatch):
            assert main(words) == 0, capsys.readouterr().err
        return
    assert main(words) == 0, capsys.readouterr().err


BENCHMARK = re.compile(r"python scripts/bench_step\.py ([^`\n]+)")
SMALL = (
    "model=femto model.n_layers=1 model.d_model=16 model.n_heads=1 model.context=16 train.batch_size=2 --seconds 0.1"
)


@pytest.mark.slow
@pytest.mark.parametrize("words", dict.fromkeys(w for page in PAGES for w in BENCHMARK.findall(page.read_text())))
def test_a_benchmark_of_a_step_that_a_page_names_runs(words, tmp_path):
    words = words.partition("  #")[0].replace("--against OPTION", "--against norm=layer")
    command = [sys.executable, str(ROOT / "scripts/bench_step.py"), *shlex.split(words), *SMALL.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "tokens/s" in done.stdout, done.stderr


def test_a_command_that_is_wrong_is_seen(desk):
    assert main(shlex.split("nexus-ablate norm=rmss")[1:]) == 2


def test_the_page_of_options_and_the_tables_of_measures_are_those_of_the_code():
    docs = script("docs")
    assert (ROOT / "docs/options.md").read_text() == docs.options_page(catalogue()), "python scripts/docs.py"
    metrics = (ROOT / "docs/metrics.md").read_text()
    assert docs.with_measures(metrics) == metrics, "python scripts/docs.py"
    assert docs.with_measures(metrics.replace("Eq. 3", "Eq. 4")) == metrics
    words = (ROOT / "docs/reading_a_verdict.md").read_text()
    assert docs.with_words(words) == words, "python scripts/docs.py"
    assert docs.with_words(words.replace("to the last bit", "almost")) == words
    assert set(re.findall("<!-- measures: (.*) -->", metrics)) == SECTIONS.keys()


def test_the_losses_of_the_baseline_page_are_those_of_its_table():
    page, lines = (ROOT / "docs/baseline.md").read_text(), [*script("baseline").tables([])]
    rows = re.findall(r"^\|.*\d of \d \|$", page, re.M)
    assert rows and [row for row in rows if row not in lines] == []
    printed = "\n".join(lines)
    numbers = re.findall(r"(?<![\d.])0\.\d{4}(?=\D)", page.partition("## What was measured")[2])
    by_compare = {"0.0123", "0.0647"}  # the interval of all arms together
    assert len(numbers) > 20 and {number for number in numbers if number not in printed} == by_compare


NUMBERS = {
    "default_run.png": ("command_line.md", r"validation loss ([\d.]+)"),
    "first_look.png": ("../README.md", r" ([-+]0\.\d+)"),
    "findings.png": ("findings.md", r"([-+]0\.\d+)"),
    "new_2026.png": ("recent_options.md", r" ([-+]0\.\d+)"),
    "coordcheck_mup.png": ("learning_rate_transfer.md", r"([-+]\d\.\d+)"),
    "coordcheck_sp.png": ("learning_rate_transfer.md", r"([-+]\d\.\d+)"),
}
"""The page that shows a picture, and the numbers in the picture's title that the page must say."""


def data_of(name):
    with Image.open(ROOT / "docs" / name) as picture:
        return picture.info


@pytest.mark.parametrize("name", NUMBERS)
def test_a_picture_holds_the_numbers_that_its_page_says(name):
    page, form = NUMBERS[name]
    text = (ROOT / "docs" / page).read_text()
    numbers = re.findall(form, data_of(name)["Title"])
    assert numbers and name in text
    assert not [number for number in numbers if number not in text], "python scripts/pictures.py"


def test_every_picture_is_on_a_page():
    assert {path.name for path in (ROOT / "docs").glob("*.png")} == {*NUMBERS}


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_pages_that_help_names_are_in_the_folder_that_it_shows_and_in_a_wheel(capsys):
    for words in ([], *([verb.name] for verb in all_verbs())):
        assert main([*words, "--help"]) == 0
    shown = capsys.readouterr().out
    folder = Path(re.search(r"(\S+) +what help calls docs/", shown)[1])
    named = set(re.findall(r"docs/(\w+\.md)", shown))
    assert len(named) >= 5 and named <= {page.name for page in folder.glob("*.md")}
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert build["wheel"]["force-include"][folder.name] == "nexus_ablate/docs" and "/docs" in build["sdist"]["include"]


def test_the_index_leads_to_every_page():
    linked = set(re.findall(r"\]\(([^)#]+)", (ROOT / "docs/README.md").read_text()))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"} <= linked


def test_the_documentation_has_every_exit_status():
    table = (ROOT / "docs/command_line.md").read_text().partition("## Exit status")[2]
    documented = {int(number) for number in re.findall(r"^\| (\d+) \|", table, re.M)}
    assert documented == {value for name, value in vars(errors).items() if name.isupper() and isinstance(value, int)}


@pytest.mark.slow
@pytest.mark.long
def test_the_tutorial_ends_in_the_verdicts_that_it_shows(tmp_path):
    tutorial = (ROOT / "docs/tutorial.md").read_text()
    (tmp_path / "mine.yaml").write_text(next(FILE.finditer(tutorial))["text"])
    (text,) = re.findall(r"python3 -c \"(.*)\" > book.txt", tutorial)
    with (tmp_path / "book.txt").open("w") as book:
        subprocess.run([sys.executable, "-c", text], stdout=book, check=True)
    printed = ""
    environment = {**os.environ, "NEXUS_ABLATE_CACHE": str(tmp_path / "cache")}
    for words in ("study mine.yaml", "compare mine"):
        command = [sys.executable, "-m", "nexus_ablate", *words.split()]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1800, env=environment)
        assert ended.returncode == 0, ended.stderr
        printed += ended.stdout + ended.stderr
    row = re.compile(r"^(layernorm|no-positions) +([A-Z]+)", re.M)
    assert row.findall(printed) == row.findall(tutorial.partition("## 5")[2]) != []

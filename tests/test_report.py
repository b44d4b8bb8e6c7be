"""All outputs carry the same numbers, show hostile names as text, and fit where they are read."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
import shlex
import shutil
from html.parser import HTMLParser

import pytest
from browser import NEEDS_CHROMIUM, title_after
from markupsafe import Markup
from rich.console import Console
from test_compare import at_rates, worth_study
from test_report_page import settings, six_arms
from written_runs import Writer

from nexus_ablate.cli import main
from nexus_ablate.comparison.compare import Comparison, compare
from nexus_ablate.console import duration
from nexus_ablate.report import columns, exports, page
from nexus_ablate.report.charts import forest
from nexus_ablate.report.columns import MAIN, Column, text_table
from nexus_ablate.report.sentences import advice, answer
from nexus_ablate.report.terminal import show
from nexus_ablate.study.definition import read_study, runs_dir_of
from nexus_ablate.study.record import load, save

BASE = [2.00, 2.02, 1.98, 2.01, 1.99]
HOSTILE = "<script>alert(1)</script>|[bold]`$x_&\x1b[31m"


@pytest.fixture
def comparison(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    writer = Writer(tmp_path / "runs")
    writer.arm(losses=BASE)
    writer.arm("norm=layer", losses=[x + 0.1 + i / 1000 for i, x in enumerate(BASE)])
    writer.arm("norm=scale", losses=[x - 0.006 + i / 500 for i, x in enumerate(BASE)], train_noise="x")
    for seed in range(5):
        failed = {"state": "diverged", "steps": 60} if seed == 0 else {}
        writer.run("norm=none", seed=seed, loss=1.9, **failed)
    writer.run("norm=dyt", state="running", steps=20)
    writer.plan(("norm=layer",), ("norm=scale",), ("norm=none",), ("norm=dyt",))
    return compare(writer.root / "study")


@pytest.fixture
def hostile(comparison):
    """The same with an arm, its changes and a reason that an attacker chose."""
    table = comparison.tables[0]
    rows = []
    for row in table.rows:
        is_one = row.arm.name == "norm=layer"
        arm = dataclasses.replace(row.arm, name=HOSTILE, overrides=[HOSTILE]) if is_one else row.arm
        rows.append(dataclasses.replace(row, arm=arm, sentence=HOSTILE if is_one else row.sentence))
    checks = [dataclasses.replace(check, text=HOSTILE) for check in table.checks]
    return Comparison([dataclasses.replace(table, rows=rows, checks=checks, arms=[row.arm for row in rows])])


def terminal(comparison, width, details=True):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    show(comparison, console, details)
    return console.file.getvalue()  # type: ignore[attr-defined]


def csv_rows(comparison):
    return list(csv.DictReader(io.StringIO(exports.csv_text(comparison))))


def json_rows(comparison):
    return json.loads(exports.json_text(comparison))["tables"][0]["rows"]


class Page(HTMLParser):
    """Tags, links and cells of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.rows, self.texts, self._cell = [], [], [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href", "xlink:href", "action") or k.startswith("on")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._cell = True

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._cell = None

    def handle_data(self, data):
        self.texts.append(data)
        if self._cell:
            self.rows[-1][-1] += data


def test_every_output_shows_the_same_numbers(comparison):
    table = comparison.tables[0]
    page_rows = [row[1:] for row in Page(page.html(comparison)).rows]
    wide, markdown = terminal(comparison, 200, details=False), exports.markdown(comparison).replace("\\", "")
    in_shown = columns.shown(table, MAIN)
    for row, in_json, in_csv in zip(table.rows, json_rows(comparison), csv_rows(comparison), strict=True):
        cells = [column.cell(row, table) for column in in_shown]
        assert cells[1:] in page_rows
        assert all(cell in wide and cell.replace("<", "&lt;") in markdown for cell in cells)
        assert in_json["arm"] == in_csv["arm"] == row.arm.name and in_json["word"] == in_csv["word"] == row.word
        if row.effect is not None:
            assert in_json["low"] == float(in_csv["low"]) == row.effect.low
            assert in_json["seed 2"] == float(in_csv["seed 2"])


def test_one_entry_shows_another_number_in_every_output(comparison, monkeypatch):
    added = Column("steepest", "steepest", "the largest", lambda row, table: 0.125, lambda value, row: f"{value:.6f}")
    monkeypatch.setattr(columns, "COLUMNS", [*columns.COLUMNS, added])
    for text in (page.html(comparison), exports.markdown(comparison), terminal(comparison, 300)):
        assert "steepest" in text and "0.125000" in text
    for rows in (csv_rows(comparison), json_rows(comparison)):
        assert [float(row["steepest"]) for row in rows] == [0.125] * 5


def test_the_first_lines_say_what_came_out_and_what_was_left_out_is_listed(comparison):
    for text, numbers in ((terminal(comparison, 300), False), (exports.markdown(comparison).replace("\\", ""), True)):
        assert text.index(answer(comparison.tables[0], with_numbers=numbers)) < 60
        assert "lost at step 20 of 400" in text
    assert f"<h1>{answer(comparison.tables[0])}</h1>" in page.html(comparison).replace("<wbr>", "")


def test_six_arms_fit_on_one_screen_of_eighty_columns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    comparison = compare(six_arms(tmp_path / "runs"))
    lines = terminal(comparison, 80, details=False).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24, "\n".join(lines)
    text = "\n".join(lines)
    said = ("Which change", "Better: ", "Worse: ", "(0.69 nats are one bit)", "8 seeds", "12 together", "baseline at ")
    said += (
        "tokens per parameter",
        "lr_grid=auto finds",
        "train.eval_tokens=4096 suffices",
        "next: ",
        "(2 of 8 failed)",
    )
    assert [part for part in said if part not in text] == []
    assert lines[-1] == "  nexus-ablate study six name=six-2 seeds=100-127", "a command is one line"


@pytest.mark.parametrize(("blocks", "remedy"), [(8, "train.eval_tokens=4096 suffices"), (4, "a longer text suffices")])
def test_too_little_validation_text_is_said_with_what_suffices(tmp_path, blocks, remedy):
    writer = Writer(tmp_path)
    writer.arm(losses=BASE, blocks=blocks)
    writer.arm("norm=layer", losses=[x + 0.1 for x in BASE], blocks=blocks)
    text = terminal(compare(tmp_path / "study"), 80, details=False)
    assert f"WARN text: holds for this text alone: {blocks} blocks; {remedy}" in text


TOO_FEW, NEW_STUDY = (
    "5 seeds are the fewest for a verdict (about 64 s of training)",
    "nexus-ablate study study name=study-2 seeds=100-107",
)
UNDECIDED = [0.03, -0.005, 0.015, 0.02, -0.005]
ADVICE = [
    ([0.1, 0.101, 0.102, 0.103, 0.104], [*range(5)], "", ""),
    ([0.1, -0.09], [0, 1], TOO_FEW, NEW_STUDY),
    ([0.1, -0.09], [*range(5)], "runs are missing", "nexus-ablate study study --retry failed"),
    ([0.9, -1.2, 1.2, -0.9, 0.01], [*range(5)], "more than 200 seeds would be needed to decide the rest", ""),
]
"""Differences of an arm by seed, the seeds of its study, and what to do next."""


@pytest.mark.parametrize(("differences", "seeds", "sentence", "command"), ADVICE)
def test_advice_is_a_command_that_would_decide_more(tmp_path, monkeypatch, differences, seeds, sentence, command):
    monkeypatch.chdir(tmp_path)
    writer = Writer(tmp_path / "runs")
    writer.arm(losses=BASE[: len(seeds)])
    writer.arm("norm=layer", losses=[loss + by for loss, by in zip(BASE, differences, strict=False)], train_noise="x")
    writer.plan(("norm=layer",), seeds=seeds)
    assert advice(compare("runs/study")) == (sentence, command)


def written_study(root, name="study", by=UNDECIDED, **plan):
    writer = Writer(root, name)
    writer.arm(losses=BASE)
    writer.arm("norm=layer", losses=[loss + each for loss, each in zip(BASE, by, strict=False)], train_noise="x")
    writer.plan(("norm=layer",), **plan)


@pytest.mark.parametrize("name", ["study", "norms"])
@pytest.mark.parametrize("runs_dir", ["runs", "else where"])
@pytest.mark.parametrize("by", [UNDECIDED, UNDECIDED[:4]], ids=["undecided", "runs are missing"])
@pytest.mark.parametrize("settings", [{}, {"a": "bias=on", "b": "bias=off"}])
def test_the_command_of_an_advice_reads_the_study_as_it_was_launched(
    tmp_path, monkeypatch, name, runs_dir, by, settings
):
    monkeypatch.chdir(tmp_path)
    for setting in settings or [""]:
        folder = f"{name}@{setting}".rstrip("@")
        written_study(tmp_path / runs_dir, folder, by, baseline=["model=mini"], settings=settings)
    _, command = advice(compare(f"{runs_dir}/{name}"))
    verb, *words = shlex.split(command)[1:]
    if len(by) < 5:
        assert [words.pop(), words.pop()] == ["failed", "--retry"]
    study, launch = read_study(words)
    assert verb == "study" and (study.baseline, [*study.arms]) == (["model=mini"], ["norm=layer"])
    assert runs_dir_of(launch).absolute() == tmp_path / runs_dir


@pytest.mark.parametrize("rate", ["0.00424", "0.00849"])
def test_a_run_that_is_missing_at_one_rate_of_a_grid_is_advised(tmp_path, monkeypatch, rate):
    monkeypatch.chdir(tmp_path)
    writer = Writer(tmp_path / "runs", "grid")
    at_rates(writer, best=3e-3, depth=0.0, noise="a")
    at_rates(writer, "norm=layer", best=3.05e-3, depth=0.1, noise="b", arm="layer")
    writer.plan(arms={"layer": "norm=layer"}, lr_grid="auto")
    (missing,) = (tmp_path / "runs/grid").glob(f"layer,optim.lr={rate}/s4-*")
    shutil.rmtree(missing)
    is_read = rate == "0.00424"
    comparison = compare("runs/grid")
    assert comparison.tables[0].rows[1].word == ("TOO FEW SEEDS" if is_read else "BETTER")
    assert advice(comparison)[1] == ("nexus-ablate study grid --retry failed" if is_read else "")


def test_a_shipped_study_is_read_from_its_file_unless_the_launched_one_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written_study(tmp_path / "runs", "norms", baseline=["model=mini"])
    baselines = {"norms": [], "runs/norms": ["model=mini"], "norms name=norms-2 seeds=9-9": ["model=mini"]}
    for words, baseline in baselines.items():
        assert (read_study(words.split())[0].baseline == ["model=mini"]) == bool(baseline), words


def test_of_several_studies_the_advice_is_about_the_one_that_is_not_decided(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written_study(tmp_path / "runs", "one", [0.1, 0.101, 0.102, 0.103, 0.104])
    written_study(tmp_path / "runs", "two")
    sentence, command = advice(compare(["runs/one", "runs/two"]))
    assert command.startswith("nexus-ablate study two name=two-2") and "49 new seeds would decide it" in sentence


def test_a_page_sorts_worth_and_seeds_by_their_numbers(tmp_path):
    worth_study(Writer(tmp_path), 1.7)
    text = page.html(compare(tmp_path / "study"))
    cells = dict(re.findall(r'data-head="(worth|seeds)" data-v="([^"]+)"', text))
    assert float(cells["worth"]) > 2 and float(cells["seeds"]) == 5


@pytest.mark.parametrize("failed", [1, 4])
def test_where_failed_runs_keep_a_word_back_no_seeds_are_advised(tmp_path, failed):
    writer = Writer(tmp_path)
    losses = [2 + 0.02 * (-1) ** seed for seed in range(8)]
    writer.arm(losses=losses)
    for seed, loss in enumerate(losses):
        state = "diverged" if seed < failed else "finished"
        writer.run("norm=layer", seed=seed, loss=loss - 0.1 + seed / 1000, state=state, train_noise="x")
    writer.plan(("norm=layer",), seeds=[*range(8)])
    comparison = compare(tmp_path / "study")
    assert comparison.tables[0].rows[1].word == ("INCONCLUSIVE" if failed == 1 else "TOO FEW SEEDS")
    assert advice(comparison) == ("", "")


def test_the_time_of_an_advice_counts_every_rate_and_the_budgets_of_worth(tmp_path):
    at_rates(Writer(tmp_path, "grid"), best=3e-3, depth=0.0, noise="a")
    layer = Writer(tmp_path, "grid")
    at_rates(layer, "norm=layer", best=3.05e-3, depth=0.0, noise="b", arm="layer")
    layer.plan(arms={"layer": "norm=layer"}, lr_grid="auto", endpoints=[{"name": "val_loss", "delta_min": 1e-9}])
    worth_study(Writer(tmp_path, "worth"), 2.0001, endpoints=[{"name": "val_loss", "delta_min": 1e-9}])
    for study, runs_per_seed in (("grid", 14), ("worth", 2 + 2.5)):
        table = (comparison := compare(tmp_path / study)).tables[0]
        row = dataclasses.replace(table.rows[1], word="INCONCLUSIVE", needed=10)
        effect = dataclasses.replace(row.effect, low=-1.0, high=1.0)
        rows = [table.rows[0], dataclasses.replace(row, effect=effect)]
        sentence, _ = advice(dataclasses.replace(comparison, tables=[dataclasses.replace(table, rows=rows)]))
        assert f"about {duration(10 * runs_per_seed * 4)} of training" in sentence


def test_the_answer_names_differences_that_are_too_small_to_matter(tmp_path):
    writer = Writer(tmp_path)
    writer.arm(losses=BASE)
    for arm, shift in {"norm=layer": 0.1, "norm=none": 0.001}.items():
        writer.arm(arm, losses=[loss + shift + 1e-5 * n for n, loss in enumerate(BASE)])
    text = terminal(compare(tmp_path / "study"), 80, details=False)
    assert "Worse: norm=layer, norm=none. Below the threshold that matters: norm=none." in " ".join(text.split())


def test_an_arm_that_equals_the_baseline_is_named_in_the_details_and_not_counted_as_left_out(tmp_path):
    writer = Writer(tmp_path)
    writer.arm(losses=BASE)
    writer.arm("norm=layer", losses=[x + 0.1 for x in BASE])
    writer.plan(("norm=layer",))
    study = load(tmp_path / "study")
    assert study is not None
    save(dataclasses.replace(study, equal={"norm=rms": "baseline"}), tmp_path / "study")
    comparison = compare(tmp_path / "study")
    assert "left out" not in terminal(comparison, 80, details=False)
    assert "norm=rms: the configuration of baseline, not trained twice" in terminal(comparison, 200, details=True)


def test_three_settings_end_with_a_matrix_and_say_once_what_they_share(tmp_path):
    comparison = compare(settings(tmp_path))
    lines = terminal(comparison, 80, details=False).splitlines()
    assert len(lines) <= 40, "\n".join(lines)
    (matrix,) = [number for number, line in enumerate(lines) if line.split()[1:] == ["depth-2", "depth-4", "depth-8"]]
    assert re.match(r"norm=layer +BETTER -0\.\d+ +BETTER -0\.\d+ +BETTER -0\.\d+ *$", lines[matrix + 2])
    for said, times in (
        ("Is it the depth?", 1),
        ("0.69 nats", 1),
        ("WARN text", 1),
        ("next: ", 1),
        ("baseline at ", 3),
    ):
        assert sum(said in line for line in lines) == times, said
    text = page.html(comparison)
    assert text.index("BETTER -0.05") < text.index("<h1 class=setting"), "the page opens with the matrix"


def test_what_holds_in_one_setting_alone_is_said_there(tmp_path):
    settings(tmp_path)
    for path in (tmp_path / "deep@depth-4").glob("placement=post/s*/env.json"):
        path.write_text(path.read_text().replace('"python": "3"', '"python": "4"'))
    text = terminal(compare(tmp_path / "deep"), 80, details=False)
    warning, own, after = map(text.index, ("WARN environment", "setting depth-4", "setting depth-8"))
    assert own < warning < after


@pytest.mark.parametrize("width", [80, 160])
def test_a_terminal_is_never_overrun_and_no_number_is_cut(comparison, width):
    text = terminal(comparison, width, details=False)
    assert max(map(len, text.split("\n"))) <= width
    shown = MAIN if width > 120 else MAIN[:4]
    for cells in text_table(comparison.tables[0].rows, comparison.tables[0], shown).rows:
        assert all(cell in text for cell in cells[2:])


def test_hostile_names_are_text_everywhere(hostile):
    text = page.html(hostile)
    assert Page(text).tags.count("script") == 1
    assert "<script>alert" not in text and "\x1b" not in text
    shown = terminal(hostile, 300)
    assert "\x1b" not in shown and "[bold]" in shown
    text = exports.markdown(hostile)
    assert "<script" not in text and "\x1b" not in text
    assert HOSTILE in [row["arm"] for row in json_rows(hostile)]


def test_without_the_escaping_the_script_would_be_in_the_page(hostile, monkeypatch):
    monkeypatch.setattr(page, "_shown", Markup)
    assert Page(page.html(hostile)).tags.count("script") > 1


def test_a_page_asks_for_nothing_outside_itself(comparison):
    text = page.html(comparison)
    assert all(link.startswith("#") for link in Page(text).links)
    text = text.replace("http-equiv", "").replace("url(#", "")
    assert "http" not in text and "@import" not in text and "url(" not in text


# ------------------------------------------------------------------------------------------------- command line

REPORTS = ("--html", "--md", "--csv", "--json")


def test_the_command_writes_every_format_and_prints_the_table(comparison, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    files = {flag: tmp_path / f"out{flag}" for flag in REPORTS}
    flags = [part for flag, path in files.items() for part in (flag, str(path))]
    assert main(["compare", str(tmp_path / "runs/study"), *flags]) == 0
    assert "WORSE" in capsys.readouterr().out
    assert all(path.stat().st_size > 500 for path in files.values())


@pytest.mark.parametrize("flag", REPORTS)
def test_a_file_that_exists_is_replaced_with_force_alone(comparison, tmp_path, capsys, flag):
    mine = tmp_path / "mine"
    mine.write_text("my own note\n")
    command = ["compare", str(tmp_path / "runs/study"), flag, str(mine)]
    assert main(command) == 2
    assert "--force" in capsys.readouterr().err and mine.read_text() == "my own note\n"
    assert main([*command, "--force"]) == 0 and mine.read_text() != "my own note\n"


# ------------------------------------------------------------------------------------------------------ drawing


def test_a_picture_says_its_numbers_under_the_pointer_and_follows_the_page_s_colours(comparison):
    picture = forest(comparison.tables[0].rows)
    assert "<title>norm=layer, seed 3: +0.1030</title>" in picture
    assert "var(--c1)" in picture and not re.search(r"#[0-9a-f]{6}", picture)
    assert all(word in picture for word in ("norm=layer", "WORSE", "left is better"))
    assert "INCOMPLETE" in picture and "norm=dyt, seed" not in picture, "an arm without a difference says why"


@pytest.mark.slow
@NEEDS_CHROMIUM
def test_a_click_sorts_the_table_in_a_browser(comparison, tmp_path):
    click = """
      const head = [...document.querySelectorAll('th')].find(h => h.textContent === 'mean');
      const arms = () => [...head.closest('table').tBodies[0].rows].map(r => r.cells[0].textContent).join(' ');
      const before = arms(); head.click(); const up = arms(); head.click();
      document.title = [before, up, arms()].join('|');
    """
    before, up, down = title_after(click, page.html(comparison), tmp_path).split("|")
    assert before.startswith("baseline") and up.startswith("norm=none") and down.startswith("norm=layer")

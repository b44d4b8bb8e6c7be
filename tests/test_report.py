"""All outputs carry the same numbers, show hostile names as text, and can be read where they are opened."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
from browser import NEEDS_CHROMIUM, title_after
from markupsafe import Markup
from rich.console import Console
from written_runs import Writer

from nexus_ablate import api
from nexus_ablate.cli import main
from nexus_ablate.comparison.results import Comparison
from nexus_ablate.comparison.within_stratum import compare_stratum as compare
from nexus_ablate.report import arm_tables, exports, page
from nexus_ablate.report.arm_tables import Column, arm_table, main_columns, mean_text, signed
from nexus_ablate.report.charts import forest
from nexus_ablate.report.parts import of_stratum
from nexus_ablate.report.sentences import answer
from nexus_ablate.report.terminal import show

BASE = [2.00, 2.02, 1.98, 2.01, 1.99]
HOSTILE = "<script>alert(1)</script>|[bold]`$x_&\x1b[31m\\end{tabular}"


@pytest.fixture
def comparison(tmp_path):
    writer = Writer(tmp_path / "runs")
    writer.arm(losses=BASE)
    writer.arm("norm=layer", losses=[x + 0.1 + i / 1000 for i, x in enumerate(BASE)])
    writer.arm("norm=scale", losses=[x - 0.006 + i / 500 for i, x in enumerate(BASE)], train_noise="x")
    for seed in range(5):
        writer.run(
            "norm=none", seed=seed, loss=1.9, state="finished" if seed else "diverged", steps=None if seed else 60
        )
    writer.run("norm=dyt", state="running", steps=20)
    return compare(writer.root)


@pytest.fixture
def hostile(comparison):
    comparison.question = comparison.rows[1].arm = comparison.baseline = comparison.arms[1].label = HOSTILE
    comparison.rows[1].requested = {HOSTILE: (HOSTILE, HOSTILE)}
    comparison.rows[1].figures = {f"act/{HOSTILE}": (1.0, None)}
    comparison.checks[0].text = HOSTILE
    comparison.rows[1].notes = [HOSTILE]
    comparison.amendments = comparison.equal = []
    comparison.refused = [(HOSTILE, HOSTILE)]
    return comparison


def whole(comparison):
    return Comparison("study", [comparison], [], None)


def html(comparison):
    return page.html(whole(comparison))


def markdown(comparison):
    return exports.markdown(whole(comparison))


def latex(comparison):
    return exports.latex(whole(comparison))


def csv_rows(comparison):
    return list(csv.DictReader(io.StringIO(exports.csv_text(whole(comparison)))))


def json_values(comparison):
    return json.loads(exports.json_text(whole(comparison)))


def terminal(comparison, width, details=True):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    show(of_stratum(comparison, details), console)
    return console.file.getvalue()  # type: ignore[attr-defined]


class Page(HTMLParser):
    """Tags, attributes and cells of a page."""

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
    cells = arm_table(comparison.rows, main_columns(comparison)).rows
    shown_rows = Page(html(comparison)).rows
    wide = terminal(comparison, 200, details=False)
    page_md = re.sub(" +", " ", markdown(comparison).replace("\\", "").replace("&lt;", "<"))
    tex = latex(comparison).replace("$\\pm$", "±").replace("\\textless{}", "<").replace("--", "–").replace("\\_", "_")
    values = json_values(comparison)
    table = csv_rows(comparison)
    for row, shown, in_json, in_csv in zip(comparison.rows, cells, values["rows"], table, strict=True):
        assert shown in shown_rows
        assert f"| {' | '.join(shown)} |" in page_md
        assert all(cell in wide for cell in shown)
        assert row.arm in tex and mean_text(row) in tex
        assert in_json["arm"] == in_csv["arm"] == row.arm
        assert in_json["mean"] == row.mean
        assert in_csv["mean"] == ("" if row.mean is None else repr(row.mean))
        assert {name for name, value in in_csv.items() if value} <= in_json.keys()
        if row.effect:
            assert in_json["effect"]["p"] == row.effect.p == float(in_csv["p"])


@pytest.mark.parametrize("table", ["main_columns", "side_columns"])
def test_one_entry_shows_another_column_in_every_output(comparison, monkeypatch, table):
    columns = getattr(arm_tables, table)
    added = Column(
        "steepest", "largest difference", "steepest", lambda row: f"{max(row.pairs, default=0):.6f}", lambda row: 0.125
    )
    monkeypatch.setattr(arm_tables, table, lambda stratum: [*columns(stratum), added])
    cell = f"{max(comparison.rows[1].pairs):.6f}"
    for text in (html(comparison), markdown(comparison), terminal(comparison, 300)):
        assert "steepest" in text and cell in text
    assert (cell in latex(comparison)) == (table == "main_columns")  # a paper has the columns that decide
    frame = api.Comparison(**vars(whole(comparison))).frame()
    for rows in (csv_rows(comparison), json_values(comparison)["rows"], frame.to_dict("records")):
        assert [float(row["steepest"]) for row in rows] == [0.125] * len(comparison.rows)


@pytest.mark.parametrize("kind", ["fixed seeds", "unlike noise", "a look"])
def test_every_output_shows_the_interval_that_decided(kind, tmp_path):
    writer, rng = Writer(tmp_path / "runs"), np.random.default_rng(0)
    spread = 0.5 if kind == "unlike noise" else 0.02
    writer.arm(losses=list(2 + rng.normal(0, spread, 8)))
    for arm in ("norm=layer", "norm=dyt", "bias=on"):
        writer.arm(arm, losses=list(2.01 + rng.normal(0, 0.02, 8)), train_noise=arm)
    looks = {"looks": [5, 8], "look_weights": [0.4, 0.6]} if kind == "a look" else {}
    writer.plan(("norm=layer",), ("norm=dyt",), ("bias=on",), seeds=list(range(8)), delta_min=0.001, **looks)
    comparison = compare(writer.root)
    row = next(r for r in comparison.rows if r.arm == "norm=layer")
    effect = row.effect
    assert effect is not None and row.verdict is not None
    assert effect.level == pytest.approx(1 - (1 - 0.04 * (0.6 if kind == "a look" else 1.0)) ** (1 / 3))
    assert effect.excludes_zero == (row.verdict.word in ("BETTER", "WORSE"))
    ends = f"[{effect.low:+.4f}, {effect.high:+.4f}]"
    assert ends in terminal(comparison, 200) and ends in forest(comparison) and ends in latex(comparison)
    assert ends in "".join(Page(html(comparison)).texts) and ends in markdown(comparison).replace("\\", "")
    assert f"{effect.low:+.4f} to {effect.high:+.4f}" in terminal(comparison, 80).replace("\n", " ")
    in_json = next(r for r in json_values(comparison)["rows"] if r["arm"] == row.arm)
    in_csv = next(r for r in csv_rows(comparison) if r["arm"] == row.arm)
    frame = api.Comparison(**vars(whole(comparison))).frame().set_index("arm").loc[row.arm]
    for low, high in (
        (in_json["low"], in_json["high"]),
        (in_csv["low"], in_csv["high"]),
        (frame["low"], frame["high"]),
    ):
        assert (float(low), float(high)) == (effect.low, effect.high)


def test_the_first_lines_say_what_came_out_and_what_was_left_out_is_listed(comparison):
    for text in (
        terminal(comparison, 300),
        markdown(comparison),
        " ".join(Page(html(comparison).partition("<body>")[2]).texts),
    ):
        plain = text.replace("\\", "")
        assert answer(comparison) in plain
        assert plain.index(answer(comparison)) < 400
        assert "lost at step 20 of 400" in plain


@pytest.mark.parametrize("width", [80, 160])
def test_a_terminal_is_never_overrun_and_no_number_is_cut(comparison, width):
    text = terminal(comparison, width)
    table = text[: text.index("left out")]  # paths of what was left out may be longer
    assert max(map(len, table.split("\n"))) <= width
    assert all(mean_text(row) in text for row in comparison.rows)
    assert "…" not in table


def test_hostile_names_are_text_everywhere(hostile):
    text = html(hostile)
    assert Page(text).tags.count("script") == 1
    assert "<script>alert" not in text and "\x1b" not in text
    shown = terminal(hostile, 300)
    assert "\x1b" not in shown and "[bold]" in shown
    text = markdown(hostile)
    assert "<script" not in text and "\x1b" not in text
    assert all(len(re.findall(r"(?<!\\)\|", line)) == len(re.findall(r"(?<!\\)\|", line.replace(HOSTILE, "")))
               for line in text.split("\n"))  # fmt: skip
    tex = latex(hostile)
    body = tex[tex.index("\\midrule") :]
    assert body.count("\\end{tabular}") == 1 and "alert(1)" in body
    assert json_values(hostile)["rows"][1]["arm"] == HOSTILE
    hostile.rows[1].arm = hostile.arms[1].label = "[1ex] * an argument"
    assert "\n{}[1ex]" in latex(hostile), "after the end of a row LaTeX would read it as a distance"


def test_without_the_escaping_the_script_would_be_in_the_page(hostile, monkeypatch):
    monkeypatch.setattr(page, "_shown", Markup)
    assert Page(html(hostile)).tags.count("script") > 1


def test_a_page_asks_for_nothing_outside_itself(comparison):
    text = html(comparison)
    assert all(link.startswith("#") for link in Page(text).links)
    text = text.replace("http-equiv", "").replace("url(#", "")
    assert "http" not in text and "@import" not in text and "url(" not in text


@pytest.mark.slow
def test_a_page_of_ten_arms_and_five_seeds_is_under_a_megabyte(tmp_path):
    writer = Writer(tmp_path / "runs")
    for arm in range(10):
        losses = [x + arm / 100 for x in BASE]
        writer.arm(*((f"optim.lr={0.001 + arm / 1e5:.5f}",) if arm else ()), losses=losses)
    for path in writer.paths:  # 800 steps of a nano run: a validation and a row every other step
        row = json.loads((path / "probes.jsonl").read_text())
        sites = [
            f"act/block_{b:03d}/{site}/{s}" for b in range(12) for site in ("resid", "attn", "ffn") for s in "abcd"
        ]
        (path / "probes.jsonl").write_text(json.dumps(row | dict.fromkeys(sites, 1.2345)) + "\n")
        lines = (path / "metrics.jsonl").read_text().split("\n")
        (path / "metrics.jsonl").write_text(
            "\n".join(line.replace('"train/loss"', '"val/loss": 2.5, "train/loss"') for line in lines)
        )
    assert len(html(compare(writer.root))) < 1_000_000


# ------------------------------------------------------------------------------------------------- command line

REPORTS = ("--html", "--md", "--latex", "--csv", "--json", "--runs")


def test_the_command_writes_every_format_and_prints_the_table(comparison, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    files = {flag: tmp_path / f"out{flag}" for flag in REPORTS}
    flags = [part for flag, path in files.items() for part in (flag, str(path))]
    assert main(["compare", str(tmp_path / "runs"), *flags]) == 0
    assert "WORSE" in capsys.readouterr().out
    assert all(path.stat().st_size > 500 for path in files.values())


@pytest.mark.parametrize("flag", REPORTS)
def test_a_report_replaces_an_existing_file_only_with_force(comparison, tmp_path, capsys, flag):
    mine = tmp_path / "mine"
    mine.write_text("arm,seed,val_loss\nbaseline,0,2.0\n")
    command = ["compare", str(tmp_path / "runs"), flag, str(mine)]
    assert main(command) == 2
    refusal = [f"error: {flag} would replace an existing file", f"  got: {mine}"]
    assert capsys.readouterr().err.splitlines() == [*refusal, f"  try: {flag} mine_{flag[2:]}, or --force"]
    assert mine.read_text() == "arm,seed,val_loss\nbaseline,0,2.0\n"
    assert main([*command, "--force"]) == 0
    assert not mine.read_text().startswith("arm,seed,val_loss\nbaseline,0,2.0\n")


def test_two_reports_are_not_written_to_one_file(comparison, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["compare", str(tmp_path / "runs"), "--html", str(out), "--csv", str(out)]) == 2
    assert "--csv names the file of another flag" in capsys.readouterr().err
    assert not out.exists()


def test_json_on_standard_output_is_json_alone(comparison, tmp_path, capsys):
    assert main(["compare", str(tmp_path / "runs"), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["baseline"] == "baseline"


# ------------------------------------------------------------------------------------------------------ drawing


def test_a_number_that_rounds_to_zero_has_no_sign():
    assert [signed(value) for value in (-0.04, 0.04, -0.06)] == ["0.0", "0.0", "-0.1"]


def test_a_cell_that_a_spreadsheet_would_execute_is_text_and_numbers_stay_numbers(comparison):
    comparison.rows[1].arm = comparison.rows[2].arm = "=HYPERLINK(1)"
    comparison.rows[1].figures = {"@act": (-1.5, None)}
    rows = csv_rows(comparison)
    assert [row["arm"] for row in rows[:3]] == ["baseline", "'=HYPERLINK(1)", "'=HYPERLINK(1)"]
    assert rows[1]["'@act"] == "-1.5" and float(rows[2]["delta"]) < 0
    assert exports.runs_text(whole(comparison)).count("\n'=HYPERLINK(1),") == 10


@pytest.mark.parametrize("output", ["--csv", "--runs"])
@pytest.mark.parametrize("name", ["=HYPERLINK(1)", "+1", "-1", "@SUM(1)", "＝1"])
def test_no_csv_of_judge_or_compare_holds_a_formula(name, output, tmp_path, monkeypatch, capsys):
    """As a control, without the protection both do."""
    writer = Writer(tmp_path / "runs")
    writer.arm(losses=BASE)
    writer.arm("norm=layer", losses=BASE, folder=name)
    rows = [f"{arm},{seed},2.{seed}" for arm in ("baseline", name) for seed in range(5)]
    (tmp_path / "table.csv").write_text("\n".join(["arm,seed,val_loss", *rows]))

    def formulas() -> list[str]:
        found = []
        for command in (["judge", str(tmp_path / "table.csv")], ["compare", str(writer.root)]):
            assert main([*command, output, "-"]) == 0
            cells = [cell for row in csv.reader(io.StringIO(capsys.readouterr().out)) for cell in row]
            assert [cell for cell in cells if name in cell]
            found += {cell for cell in cells if cell.startswith(name)}
        return found

    assert not formulas()
    monkeypatch.setattr(exports, "FORMULA_STARTS", ("no start",))
    assert formulas() == [name, name]


def test_a_picture_says_its_numbers_under_the_pointer_and_follows_the_page_s_colours(comparison):
    picture = forest(comparison)
    assert "<title>norm=layer, seed 3: +0.1030</title>" in picture
    assert "var(--c1)" in picture and not re.search(r"#[0-9a-f]{6}", picture)
    assert all(word in picture for word in ("norm=layer", "WORSE", "left is better"))
    running = picture[picture.index(">norm=dyt<") :]
    assert "INCOMPLETE" in running and "norm=dyt, seed" not in picture, "an arm without a difference says why"


@pytest.mark.slow
@NEEDS_CHROMIUM
def test_a_click_sorts_the_table_in_a_browser(comparison, tmp_path):
    click = """
      const head = [...document.querySelectorAll('th')].find(h => h.textContent === 'loss');
      const arms = () => [...head.closest('table').tBodies[0].rows].map(r => r.cells[0].textContent).join(' ');
      const before = arms(); head.click(); const up = arms(); head.click();
      document.title = [before, up, arms()].join('|');
    """
    before, up, down = (text.split() for text in title_after(click, html(comparison), tmp_path).split("|"))
    assert before[0] == "baseline"
    assert up[:3] == ["norm=none", "norm=scale", "baseline"] and up[-1] == "norm=dyt"  # what has no loss stays last
    assert down[0] == "norm=layer" and down[-1] == "norm=dyt"


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("pdflatex"), reason="needs pdflatex")
def test_latex_compiles_what_a_name_may_hold(hostile, tmp_path):
    (tmp_path / "table.tex").write_text(latex(hostile))
    (tmp_path / "page.tex").write_text(
        "\\documentclass{article}\\usepackage{booktabs}\\begin{document}\\input{table}\\end{document}"
    )
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]

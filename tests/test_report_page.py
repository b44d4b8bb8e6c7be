"""The report in a browser: nothing wider than the page, readable text, working switches."""

from __future__ import annotations

import json
import re
import sys
from html import escape

import numpy as np
import pytest
from browser import NEEDS_CHROMIUM, title_after
from written_runs import Writer

import nexus_ablate
from nexus_ablate.cli import main
from nexus_ablate.comparison.across_strata import compare
from nexus_ablate.report import charts
from nexus_ablate.report.page import html

LONG = ("norm=layer", "placement=sandwich", "position=learned", "qk_norm=rms", "weight_decay=0.3", "train.batch_size=2")
WIDTHS = (390, 768, 1280, 1920)

MEASURE = """
const rgb = text => { const c = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  c.clearRect(0, 0, 1, 1); c.fillStyle = text; c.fillRect(0, 0, 1, 1); return [...c.getImageData(0, 0, 1, 1).data]; };
const light = ([r, g, b]) => { const f = [r, g, b].map(v => { v /= 255;
  return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
  return 0.2126 * f[0] + 0.7152 * f[1] + 0.0722 * f[2]; };
const behind = element => { const layers = [];
  for (let e = element; e; e = e.parentElement) layers.push(rgb(getComputedStyle(e).backgroundColor));
  return layers.reverse().reduce((under, [r, g, b, a]) => under.map((u, i) => u + ([r, g, b][i] - u) * a / 255),
    [255, 255, 255]); };
const report = {width: innerWidth, wide: [], clipped: [], faint: [], overlapping: []};
document.querySelectorAll('details').forEach(d => d.open = true);
const name = e => e.tagName + '.' + (e.getAttribute('class') || '') + ' ' + e.textContent.trim().slice(0, 40);
for (const e of document.body.querySelectorAll('*')) {
  const box = e.getBoundingClientRect();
  if (!box.width || ['SCRIPT', 'STYLE', 'title'].includes(e.tagName)) continue;
  if (box.right > innerWidth + 0.5 || box.left < -0.5) report.wide.push(name(e));
  if (e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflowX !== 'visible') report.clipped.push(name(e));
  if (![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())) continue;
  const style = getComputedStyle(e);
  const [one, two] = [light(rgb(e.closest('svg') ? style.fill : style.color)), light(behind(e))].sort((a, b) => b - a);
  if ((one + 0.05) / (two + 0.05) < 4.5) report.faint.push(name(e));
  const scale = e.closest('svg') ? Math.hypot(e.getScreenCTM().a, e.getScreenCTM().b) : 1;
  if (parseFloat(style.fontSize) * scale < 9.5) report.faint.push('small ' + name(e));
}
for (const svg of document.querySelectorAll('svg')) {
  const texts = [...svg.querySelectorAll('text')].filter(t => !t.matches('.upright,.broken'));
  const boxes = texts.map(t => t.getBoundingClientRect());
  boxes.forEach((a, i) => boxes.slice(i + 1).forEach((b, j) => {
    const beside = a.right < b.left + 1 || b.right < a.left + 1, above = a.bottom < b.top + 3 || b.bottom < a.top + 3;
    if (a.width && b.width && !beside && !above)
      report.overlapping.push(texts[i].textContent + ' | ' + texts[i + 1 + j].textContent);
  }));
}
parent.document.title = JSON.stringify(report);
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Two arms with long and short names, one of them with failures, and layers with values that span decades."""
    writer = Writer(tmp_path_factory.mktemp("report") / "runs", "mine")
    rng = np.random.default_rng(0)
    writer.arm(losses=list(2 + rng.normal(0, 0.01, 5)))
    writer.arm(*LONG, losses=list(2.1 + rng.normal(0, 0.01, 5)))
    writer.arm("norm=dyt", losses=[2.05, 2.06, 2.04, 2.05])
    writer.run("norm=dyt", seed=4, state="diverged")
    return compare(writer.root)


def measured(page, width, dark, folder):
    """What `MEASURE` finds in a page at a width, in the light or in the dark theme.

    The page is in a frame, because a window of the browser is at least 500 pixels wide.
    """
    frame = escape(page.replace("</body>", f"<script>{MEASURE}</script></body>"))
    whole = f'<body><iframe style="width:{width}px; height:900px; border:0" srcdoc="{frame}"></iframe></body>'
    theme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    report = json.loads(title_after("", whole, folder, "--hide-scrollbars", "--window-size=2000,1000", theme))
    assert report.pop("width") == width
    return report


NOTHING = {"wide": [], "clipped": [], "faint": [], "overlapping": []}


@pytest.mark.slow
@NEEDS_CHROMIUM
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_page_clipped_too_faint_or_on_top_of_another(study, tmp_path, width, dark):
    assert measured(html(study), width, dark, tmp_path) == NOTHING


@pytest.mark.slow
@NEEDS_CHROMIUM
@pytest.mark.parametrize(
    ("rule", "replacement", "problem"),
    [
        ("table.classList.add('stacked')", "void 0", "clipped"),
        ("--muted:light-dark(#5f6672,", "--muted:light-dark(#a0a6b2,", "faint"),
        ("13px", "9px", "faint"),
        ("13px", "40px", "overlapping"),
        ("figure { margin:0; max-width:540px }", "figure { margin:0; width:640px }", "wide"),
    ],
)
def test_without_its_rules_the_page_fails_on_a_phone(study, tmp_path, rule, replacement, problem):
    text = html(study)
    assert rule in text
    assert measured(text.replace(rule, replacement), 390, False, tmp_path)[problem]


@pytest.mark.slow
@NEEDS_CHROMIUM
def test_the_switch_shows_one_budget_at_a_time(study, tmp_path):
    click = """
      const shown = () => [...document.querySelectorAll('.panel')].filter(p => p.offsetWidth).map(p => p.dataset.axis)
        + ':' + [...document.querySelectorAll('.whole')].filter(p => p.offsetWidth).length;
      const states = [shown()];
      document.querySelector('.switch [data-axis=flops]').click(); states.push(shown());
      document.querySelector('.switch [data-whole]').click(); states.push(shown());
      document.title = states.join(' ');
    """
    assert title_after(click, html(study), tmp_path) == "tokens:0 flops:0 flops:1"


def test_the_verdict_is_the_second_column(study):
    head = re.search(r"<thead><tr>(.*?)</tr>", html(study))
    assert head is not None
    assert re.findall(r">([^<]+)</th>", head[1])[:4] == ["arm", "verdict", "delta", "interval"]


def test_the_foot_names_date_version_source_command_and_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    writer = Writer(tmp_path / "runs", "mine")
    writer.arm(losses=[2.0, 2.01], env={"host": "a-machine", "version": "0.0.7"})
    writer.arm("norm=layer", losses=[2.1, 2.12], env={"host": "a-machine", "version": "0.0.7"})
    command = ["compare", "runs/mine", "--html", "out.html"]
    monkeypatch.setattr(sys, "argv", ["nexus-ablate", *command])
    assert main(command) == 0
    foot = (tmp_path / "out.html").read_text().partition("<footer>")[2]
    for text in ("UTC by nexus-ablate", "nexus-ablate compare runs/mine --html out.html", "version 0.0.7", "a-machine"):
        assert text in foot
    assert re.search(r"<dt>source hash</dt><dd>[0-9a-f]{8}</dd>", foot)


def test_a_chart_that_would_be_empty_is_a_sentence(study, tmp_path, monkeypatch):
    assert "No run failed to train" not in html(study)  # one did
    writer = Writer(tmp_path, "calm")
    writer.arm(losses=[2.0, 2.01])
    writer.arm("norm=layer", losses=[2.1, 2.12])
    monkeypatch.setattr(charts, "losses", lambda *args, **kwargs: "")
    text = html(compare(writer.root))
    assert "No run failed to train" in text and "There is no curve" in text


def test_every_section_opens_with_a_sentence(study):
    sections = re.findall(r"<section><h2>(.*?)</h2>(.{20})", html(study))
    assert len(sections) >= 5
    assert all(re.match(r"<p>[A-Z]", start) for _, start in sections)


def test_the_losses_start_where_the_arms_come_apart_unless_the_whole_run_is_asked_for(study):
    late, whole = (charts.losses(study.strata[0], "tokens", whole) for whole in (False, True))
    assert ">0</text>" in whole and ">0</text>" not in late


def test_a_watched_page_reloads_itself_while_runs_are_to_come_and_not_after(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    writer = Writer(tmp_path / "runs", "mine")
    writer.arm(losses=[2.0, 2.01])
    writer.plan(("norm=layer",), seeds=[0, 1])
    pages = []

    def finish(seconds):
        pages.append((tmp_path / "out.html").read_text())
        writer.arm("norm=layer", losses=[2.1, 2.12])

    monkeypatch.setattr("nexus_ablate.cli.compare.time.sleep", finish)
    assert main(["compare", "runs/mine", "--html", "out.html", "--watch"]) == 0
    (live,), last = pages, (tmp_path / "out.html").read_text()
    assert "http-equiv=refresh" in live and "Live: 2 runs so far" in live and "preliminary" in live
    assert "http-equiv=refresh" not in last and "Live:" not in last and "norm=layer" in last
    assert "2 finished, 2 waiting" in capsys.readouterr().err
    assert main(["compare", "runs/mine", "--watch"]) == 2
    assert "--html" in capsys.readouterr().err


def test_results_show_themselves_in_a_notebook(tmp_path):
    writer = Writer(tmp_path / "runs", "mine")
    writer.arm(losses=[2.0, 2.01, 2.02, 2.0, 2.01])
    writer.arm("norm=layer", losses=[2.1, 2.12, 2.11, 2.1, 2.12])
    result = nexus_ablate.compare(writer.root)
    assert "norm=layer" in repr(result) and "WORSE" in repr(result) and max(map(len, repr(result).split("\n"))) <= 100
    frame = result._repr_html_()
    assert frame.startswith("<iframe srcdoc=") and "norm=layer" in frame and "interval" in frame
    assert "<script" not in frame  # of the page around it
    run = nexus_ablate.load_run(writer.paths[0])
    assert "finished" in repr(run) and str(writer.paths[0]) in repr(run)
    assert run._repr_html_().count("<tr>") == len(repr(run).split("\n"))

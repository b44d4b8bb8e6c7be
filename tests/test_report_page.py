"""The report in a browser: nothing wider than the page, and readable text."""

from __future__ import annotations

import json
import re
import sys
from html import escape

import numpy as np
import pytest
from browser import NEEDS_CHROMIUM, title_after
from test_compare import BASE, at_rates
from written_runs import Writer

import nexus_ablate
from nexus_ablate.cli import main
from nexus_ablate.comparison.compare import compare
from nexus_ablate.report import charts
from nexus_ablate.report.page import html

LONG = ("norm=layer", "placement=sandwich", "position=learned", "qk_norm=rms", "weight_decay=0.3", "train.batch_size=2")

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
const report = {width: innerWidth, height: document.documentElement.scrollHeight, cards: 0, wide: [], clipped: [],
  faint: [], overlapping: [], on_zero: []};
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
  const boxes = texts.map(t => t.getBoundingClientRect()), whole = svg.getBoundingClientRect();
  const dashed = [...svg.querySelectorAll('path')].filter(p => !['', 'none'].includes(p.style.strokeDasharray));
  const zeros = dashed.map(p => p.getBoundingClientRect());
  boxes.forEach((a, i) => {
    if (a.right > whole.right + 1 || a.left < whole.left - 1) report.clipped.push(texts[i].textContent);
    if (zeros.some(z => z.left < a.right && a.left < z.right + 1 && z.top < a.bottom - 3 && a.top < z.bottom - 3))
      report.on_zero.push(texts[i].textContent);
  });
  boxes.forEach((a, i) => boxes.slice(i + 1).forEach((b, j) => {
    const beside = a.right < b.left + 1 || b.right < a.left + 1, above = a.bottom < b.top + 3 || b.bottom < a.top + 3;
    if (a.width && b.width && !beside && !above)
      report.overlapping.push(texts[i].textContent + ' | ' + texts[i + 1 + j].textContent);
  }));
}
report.cards = document.querySelectorAll('.deciding.stacked').length;
parent.document.title = JSON.stringify(report);
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Two arms with long and short names, one of them with a failure."""
    writer = Writer(tmp_path_factory.mktemp("report") / "runs", "mine")
    rng = np.random.default_rng(0)
    writer.arm(losses=list(2 + rng.normal(0, 0.01, 5)))
    writer.arm(*LONG, losses=list(2.1 + rng.normal(0, 0.01, 5)))
    writer.arm("norm=dyt", losses=[2.05, 2.06, 2.04, 2.05])
    writer.run("norm=dyt", seed=4, state="diverged")
    return compare(writer.root / "mine")


@pytest.fixture(scope="module")
def pages(study, tmp_path_factory):
    """The page by kind of comparison."""
    runs = tmp_path_factory.mktemp("pages") / "runs"
    return {
        "long names": html(study),
        "six arms": html(compare(six_arms(runs))),
        "settings": html(compare(settings(runs))),
        "tuned": html(compare(tuned_arms(runs))),
    }


def six_arms(runs):
    """Six arms with eight seeds, a margin, a second endpoint of ratios, and failures."""
    writer, rng = Writer(runs, "six"), np.random.default_rng(1)
    arms = [("norm=layer",), ("norm=dyt",), ("placement=sandwich", "qk_norm=rms"), ("position=learned",)]
    arms += [("gate=headwise",), ("norm=none",)]
    seeds = 2 + rng.normal(0, 0.012, 8)
    for arm, shift in zip([(), *arms], (0, 0.003, 0.09, -0.03, 0.16, -0.004, 0.3), strict=True):
        for seed, loss in enumerate(seeds + shift + rng.normal(0, 0.004, 8)):
            fails = arm == ("norm=none",) and seed in (1, 4)
            kurtosis = {"act/resid/kurtosis_token": 3 + 100 * abs(shift) + rng.normal(0, 0.1)}
            state, steps = ("diverged", 60) if fails else ("finished", None)
            writer.run(*arm, seed=seed, loss=loss, state=state, steps=steps, summary=kurtosis)
    endpoints = [{"name": "val_loss", "delta_min": 0.01}, "act/resid/kurtosis_token"]
    writer.plan(*arms, seeds=list(range(8)), endpoints=endpoints, question="Which change to the block helps?")
    return writer.root / "six"


def settings(runs):
    """Two arms at three depths."""
    rng, overrides = np.random.default_rng(2), {f"depth-{n}": f"model.n_layers={n}" for n in (2, 4, 8)}
    for number, name in enumerate(overrides):
        writer = Writer(runs, f"deep@{name}")
        seeds = 2 - 0.2 * number + rng.normal(0, 0.01, 5)
        writer.arm(losses=list(seeds))
        writer.arm("placement=post", losses=list(seeds + 0.03 * number + rng.normal(0, 0.003, 5)), train_noise="x")
        writer.arm("norm=layer", losses=list(seeds - 0.05 + rng.normal(0, 0.003, 5)), train_noise="y")
        shared = {"settings": overrides, "question": "Is it the depth?"}
        writer.plan(("placement=post",), ("norm=layer",), setting=name, **shared)
    return runs / "deep"


def tuned_arms(runs):
    """Two arms, each at its own rate."""
    writer = Writer(runs, "tuned")
    at_rates(writer, best=2.6e-3, depth=0.0, noise="a")
    at_rates(writer, "norm=layer", best=4.1e-3, depth=0.1, noise="b", arm="layer")
    writer.plan(arms={"layer": "norm=layer"}, lr_grid="auto")
    return writer.root / "tuned"


def measured(page, width, dark, folder):
    """What `MEASURE` finds in a page at a width, in the light or in the dark theme.

    The page is in a frame, because a window of the browser is at least 500 pixels wide.
    """
    frame = escape(page.replace("</body>", f"<script>{MEASURE}</script></body>"))
    whole = f'<body><iframe style="width:{width}px; height:500px; border:0" srcdoc="{frame}"></iframe></body>'
    theme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    report = json.loads(title_after("", whole, folder, "--hide-scrollbars", "--window-size=2000,1000", theme))
    assert report.pop("width") == width
    return report


SCREENS = {390: 8 * 844, 768: 4 * 1024, 1280: 3 * 900, 1920: 3 * 1080}
"""Pixels of the longest page, its details closed: eight screens of a phone, three of a laptop."""
KINDS = ("long names", "six arms", "settings", "tuned")


@pytest.mark.slow
@NEEDS_CHROMIUM
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", SCREENS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_short_and_nothing_in_it_is_wide_clipped_faint_or_on_top_of_another(
    pages, tmp_path, kind, width, dark
):
    report = measured(pages[kind], width, dark, tmp_path)
    assert report.pop("height") <= SCREENS[width]
    assert report.pop("cards") == 0 or width < 768
    assert report == {"wide": [], "clipped": [], "faint": [], "overlapping": [], "on_zero": []}


@pytest.mark.slow
@NEEDS_CHROMIUM
@pytest.mark.parametrize(
    ("rule", "replacement", "problem"),
    [
        ("table.classList.add('stacked')", "void 0", "clipped"),
        ("--muted:light-dark(#5f6672,", "--muted:light-dark(#a0a6b2,", "faint"),
        ("13px", "9px", "faint"),
        ("13px", "40px", "overlapping"),
        ("13px", "40px", "clipped"),
        ("figure { margin:0; max-width:570px }", "figure { margin:0; width:640px }", "wide"),
        ("text-anchor: end", "text-anchor: start", "on_zero"),
    ],
)
def test_without_its_rules_the_page_fails_on_a_phone(study, tmp_path, rule, replacement, problem):
    text = html(study)
    assert rule in text
    assert measured(text.replace(rule, replacement), 390, False, tmp_path)[problem]


@pytest.mark.slow
@NEEDS_CHROMIUM
def test_the_first_screen_of_a_laptop_has_answer_table_and_forest_plot(pages, tmp_path):
    where = """
      const low = name => Math.round(document.querySelector(name).getBoundingClientRect().bottom);
      document.title = [low('h1'), low('table'), low('figure svg')].join(' ');
    """
    bottoms = [*map(int, title_after(where, pages["six arms"], tmp_path, "--window-size=1280,900").split())]
    assert bottoms == sorted(bottoms) and bottoms[-1] <= 900


def test_the_verdict_is_the_second_column(study):
    head = re.search(r"<thead><tr>(.*?)</tr>", html(study))
    assert head is not None
    assert re.findall(r">([^<]+)</th>", head[1])[:4] == ["arm", "verdict", "difference", "interval"]


def test_the_foot_names_date_version_commit_and_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    writer = Writer(tmp_path / "runs", "mine")
    writer.arm(losses=[2.0, 2.01])
    writer.arm("norm=layer", losses=[2.1, 2.12])
    command = ["compare", "runs/mine", "--html", "out.html"]
    monkeypatch.setattr(sys, "argv", ["nexus-ablate", *command])
    assert main(command) == 0
    foot = (tmp_path / "out.html").read_text().partition("<footer>")[2]
    for text in (
        "UTC by nexus-ablate",
        "nexus-ablate compare runs/mine --html out.html",
        "<dt>commit</dt><dd>abc</dd>",
    ):
        assert text in foot


def test_a_page_opens_with_its_question_and_the_answer(pages):
    page = pages["six arms"].replace("<wbr>", "")
    head = re.search(r"<p class=muted>(.*?)</p>\s*<h1>(.*?)</h1>", page)
    assert head is not None and head[1] == "Which change to the block helps?"
    assert head[2].startswith("Better: placement=sandwich,qk_norm=rms (-0.03")
    assert "<h1>Is it the depth?</h1>" in pages["settings"].partition("<table")[0], "and several with the matrix"


def test_pictures_name_their_axes_and_have_the_words_in_the_colours_of_the_table(pages):
    axes = {
        "six arms": ["difference, nats per token (left is better)", "validation loss, nats per token"],
        "tuned": ["learning rate", "training tokens"],
    }
    for kind, labels in axes.items():
        assert all(f">{label}</text>" in pages[kind] for label in labels)
    assert re.search(r"fill: var\(--good\)[^>]*>BETTER</text>", pages["six arms"])
    assert re.search(r"fill: var\(--bad\)[^>]*>WORSE</text>", pages["six arms"])
    assert re.search(r">x\d+</text>", pages["six arms"])  # ratios have ticks that are ratios


def test_a_curve_needs_five_validations(tmp_path):
    writer = Writer(tmp_path, "calm", steps=80)
    writer.arm(losses=BASE)
    writer.arm("norm=layer", losses=[loss + 0.1 for loss in BASE])
    assert charts.losses(compare(writer.root / "calm").tables[0]) == ""


def test_the_colour_of_the_baseline_is_no_other_arm_s():
    names = [charts.shade(place) for place in range(40)]
    assert names.count(names[0]) == 1 and len(set(names)) == charts.ARM_COLOURS


def test_results_show_themselves_in_a_notebook(tmp_path):
    writer = Writer(tmp_path / "runs", "mine")
    writer.arm(losses=[2.0, 2.01, 2.02, 2.0, 2.01])
    writer.arm("norm=layer", losses=[2.1, 2.12, 2.11, 2.1, 2.12])
    result = nexus_ablate.compare(writer.root / "mine")
    assert "norm=layer" in repr(result) and "WORSE" in repr(result) and max(map(len, repr(result).split("\n"))) <= 100
    frame = result._repr_html_()
    assert frame.startswith("<iframe srcdoc=") and "norm=layer" in frame and "interval" in frame
    assert "<script" not in frame  # of the page around it
    run = nexus_ablate.load_run(writer.paths[0])
    assert "finished" in repr(run) and str(writer.paths[0]) in repr(run)
    assert run._repr_html_().count("<tr>") == len(repr(run).split("\n"))

"""The report in a browser: nothing wider than the page, readable text, working switches."""

from __future__ import annotations

import json
import re
import shutil
import sys
from datetime import UTC, datetime
from html import escape

import numpy as np
import pytest
from browser import NEEDS_CHROMIUM, title_after
from matplotlib.axes import Axes
from test_comparison_runs import BASE, around, planned, tuned
from written_runs import Writer

import nexus_ablate
from nexus_ablate.cli import main
from nexus_ablate.comparison.across_strata import compare
from nexus_ablate.comparison.elsewhere import endpoint_of, judged
from nexus_ablate.comparison.listed import read_source, runs_of
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
    """Two arms with long and short names, one of them with failures, and layers with values that span decades."""
    writer = Writer(tmp_path_factory.mktemp("report") / "runs", "mine")
    rng = np.random.default_rng(0)
    writer.arm(losses=list(2 + rng.normal(0, 0.01, 5)))
    writer.arm(*LONG, losses=list(2.1 + rng.normal(0, 0.01, 5)))
    writer.arm("norm=dyt", losses=[2.05, 2.06, 2.04, 2.05])
    writer.run("norm=dyt", seed=4, state="diverged")
    return compare(writer.root)


@pytest.fixture(scope="module")
def pages(study, tmp_path_factory):
    """The page by kind of comparison."""
    runs = tmp_path_factory.mktemp("pages") / "runs"
    return {
        "long names": html(study),
        "six arms": html(compare(six_arms(runs))),
        "strata": html(compare(strata(runs))),
        "tuned": html(compare(tuned_arms(runs))),
        "judged": html(judged_table(runs)),
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
    endpoints = {"val_loss": {"delta_min": 0.01}, "act/resid/kurtosis_token": {}}
    writer.plan(*arms, seeds=list(range(8)), endpoints=endpoints, question="Which change to the block helps?")
    return writer.root / "six"


def strata(runs):
    """Two arms at three depths."""
    rng, names = np.random.default_rng(2), ["depth-2", "depth-4", "depth-8"]
    for number, name in enumerate(names):
        writer = Writer(runs, f"deep@{name}")
        seeds = 2 - 0.2 * number + rng.normal(0, 0.01, 5)
        writer.arm(losses=list(seeds))
        writer.arm("placement=post", losses=list(seeds + 0.03 * number + rng.normal(0, 0.003, 5)), train_noise="x")
        writer.arm("norm=layer", losses=list(seeds - 0.05 + rng.normal(0, 0.003, 5)), train_noise="y")
        shared = {"of": "deep", "all_strata": names, "share": 1 / 3, "question": "Is it the depth?"}
        writer.plan(("placement=post",), ("norm=layer",), stratum=name, **shared)
    return runs / "deep"


def tuned_arms(runs):
    """Two arms, each tuned over a grid of rates."""
    writer = Writer(runs, "tuned")
    for arm, shift in (((), 0.0), (("norm=layer",), 0.05)):
        tuned(writer, *arm, train_noise=str(arm))
        around(writer, *arm, losses=[loss + shift for loss in BASE], train_noise=str(arm))
    planned(writer, delta_min=0.01)
    return writer.root / "tuned"


def judged_table(runs):
    """A table with an arm whose name is one long word."""
    rows = ["arm,seed,val_loss"]
    name = "adam_with_every_setting_of_a_sweep_in_its_name_lr0.02_wd0.1_beta0.95_warmup200_of_3000_steps"
    for arm, shift in (("baseline", 0), ("muon", -0.03), (name, 0.02)):
        rows += [f"{arm},{seed},{2 + shift + seed / 100 + 0.004 * (seed % 3) * bool(shift):.4f}" for seed in range(6)]
    table = runs.parent / "runs.csv"
    table.write_text("\n".join(rows) + "\n")
    source = read_source(table)
    listed = runs_of(source, "val_loss", {})
    return judged(source, listed, endpoint_of("val_loss", "auto", "", listed), None, (), (), {})


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
"""Pixels of the longest page of one stratum, its details closed: eight screens of a phone, three of a laptop."""
KINDS = ("long names", "six arms", "strata", "tuned", "judged")


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
        ("figure { margin:0; max-width:620px }", "figure { margin:0; width:640px }", "wide"),
        ("text-anchor: end", "text-anchor: start", "on_zero"),
    ],
)
def test_without_its_rules_the_page_fails_on_a_phone(study, tmp_path, rule, replacement, problem):
    text = html(study)
    assert rule in text
    assert measured(text.replace(rule, replacement), 390, False, tmp_path)[problem]


@pytest.mark.slow
@NEEDS_CHROMIUM
@pytest.mark.parametrize(("rule", "problem"), [("overflow-wrap:anywhere", "cards"), ("<details", "height")])
def test_without_its_rules_the_page_is_cards_or_long_on_a_laptop(pages, tmp_path, rule, problem):
    page = pages["judged" if problem == "cards" else "six arms"].replace(
        rule, {"<details": "<details open"}.get(rule, "")
    )
    limit = {"cards": 0, "height": SCREENS[1280]}
    assert measured(page, 1280, False, tmp_path)[problem] > limit[problem]


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
    for text in (
        "UTC by nexus-ablate",
        "nexus-ablate compare runs/mine --html out.html",
        "<dt>version</dt><dd>0.0.7</dd>",
        "a-machine",
    ):
        assert text in foot
    assert re.search(r"<dt>source hash</dt><dd>[0-9a-f]{8}</dd>", foot)


def test_a_page_opens_with_its_question_once_and_the_answer_as_a_sentence(pages):
    heads = {kind: re.search(r"<p class=muted>(.*?)</p>\s*<h1>(.*?)</h1>", pages[kind]) for kind in KINDS}
    questions = {kind: head[1] for kind, head in heads.items() if head}
    assert questions["six arms"] == "Which change to the block helps?" and questions["strata"] == "Is it the depth?"
    assert all(pages[kind].partition("<body>")[2].count(questions[kind]) == 1 for kind in ("six arms", "strata"))
    answers = {kind: head[2].replace("<wbr>", "") for kind, head in heads.items() if head}
    sentence = r"placement=sandwich,qk_norm=rms ends 0\.03\d\d nats per token lower \(0\.02\d\d to 0\.03\d\d\), "
    assert re.fullmatch(rf"{sentence}at 8 of 8 seeds\.", answers["six arms"])
    assert "placement=post: INCONCLUSIVE in depth-2, WORSE in depth-4, depth-8." in answers["strata"]
    assert answers["judged"].startswith("muon ends 0.0")
    assert "at 5 of 5 seeds; both are best at a learning rate of 0.003" in pages["tuned"]


def test_conditions_that_pass_and_measures_are_closed(pages):
    page = pages["six arms"]
    assert re.search(r"<details><summary>\d+ checks passed</summary>", page)
    assert re.search(r"<details><summary>\d+ not proved by the source: evaluation, ", pages["judged"])
    measures = page.partition("measures by arm")[2].partition("</details>")[0]
    lines = {title: rest for title, rest in re.findall(r'title="[^"]*">([^<]+)</td>(.*?)</tr>', measures, re.S)}
    assert {"act/resid/kurtosis_token", "outcome"} <= lines.keys()
    assert "<details" not in page.partition("<table")[2].partition("</table>")[0]


def test_pictures_name_their_axes_and_have_the_words_in_the_colours_of_the_table(pages):
    axes = {
        "six arms": ["difference, nats per token (left is better)", "validation loss, nats per token"],
        "tuned": ["learning rate", "training tokens", "training FLOPs", "seconds of training"],
    }
    for kind, labels in axes.items():
        assert all(f">{label}</text>" in pages[kind] for label in labels)
    assert re.search(r"fill: var\(--good\)[^>]*>BETTER</text>", pages["six arms"])
    assert re.search(r"fill: var\(--bad\)[^>]*>WORSE</text>", pages["six arms"])
    assert re.search(r">x\d+</text>", pages["six arms"])  # ratios have ticks that are ratios


def test_a_chart_that_would_be_empty_is_a_sentence(tmp_path, monkeypatch):
    writer = Writer(tmp_path, "calm")
    writer.arm(losses=[2.0, 2.01])
    writer.arm("norm=layer", losses=[2.1, 2.12])
    monkeypatch.setattr(charts, "losses", lambda *args, **kwargs: "")
    assert "There is no curve" in html(compare(writer.root))


def test_a_single_seed_is_a_point_at_its_difference_and_a_ratio_keeps_its_ticks(tmp_path):
    writer = Writer(tmp_path, "one")
    for arm, loss in (((), 2.0), (("norm=layer",), 2.1), (("norm=scale",), 1.95)):
        writer.run(*arm, loss=loss)
    one = compare(writer.root).strata[0]
    with charts.picture("differences") as (_, axes):
        charts.draw_intervals(axes, charts._bars(one.rows), "nats")
        places = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "o"]
        assert sorted(places) == pytest.approx([-0.05, 0.1]) and axes.get_xlim()[1] < 0.2
    kurtosis = "act/resid/kurtosis_token"
    for name, factor in (("s-1", 3.0), ("s-2", 6.0)):
        writer = Writer(tmp_path, f"deep@{name}")
        for seed in range(5):
            writer.run(seed=seed, summary={kurtosis: 5.0 + 0.1 * seed})
            writer.run("norm=layer", seed=seed, summary={kurtosis: factor * (5.0 + 0.1 * (4 - seed))})
            writer.run("norm=none", seed=seed, state="diverged", steps=60)
        plan = {"stratum": name, "of": "deep", "share": 0.5, "all_strata": ["s-1", "s-2"], "seeds": [*range(5)]}
        writer.plan(("norm=layer",), ("norm=none",), endpoints=[{"name": kurtosis}], **plan)
    picture = charts.strata(compare(tmp_path / "deep"))
    assert ">x2</text>" in picture and picture.count(">DIVERGED</text>") == 2


def test_curves_of_differences_begin_with_the_first_validation_after_the_start(study):
    stratum = study.strata[0]
    first = max(float(run.curves.tokens[1]) for arm in stratum.arms for run in arm.runs.values())
    drawn, plot = [], Axes.plot
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Axes, "plot", lambda axes, x, *rest, **how: drawn.append(x) or plot(axes, x, *rest, **how))
        assert charts.paired_differences(stratum, "tokens")
    assert drawn and min(float(x[0]) for x in drawn) == first


def test_the_colour_of_the_baseline_is_no_other_arm_s():
    names = [charts.shade(place) for place in range(40)]
    assert names.count(names[0]) == 1 and len(set(names)) == charts.ARM_COLOURS


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
    assert "http-equiv=refresh" in live and "Live: some runs have no result yet" in live and "preliminary" in live
    assert "http-equiv=refresh" not in last and "Live:" not in last and "norm=layer" in last
    assert "2 finished, 2 waiting" in capsys.readouterr().err
    assert main(["compare", "runs/mine", "--watch"]) == 2
    assert "--html" in capsys.readouterr().err


def test_a_page_is_watched_from_before_the_baseline_has_a_result(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    writer = Writer(tmp_path / "runs", "mine")
    writer.arm("norm=layer", losses=[2.1, 2.12])
    running = writer.run(seed=0, state="running", steps=100)
    status, now = json.loads((running / "status.json").read_text()), datetime.now(UTC).isoformat()
    (running / "status.json").write_text(json.dumps(status | {"heartbeat": now, "updated": now}))
    writer.plan(("norm=layer",), seeds=[0, 1])
    seen: list[bool] = []

    def finish(seconds):
        if not seen:
            shutil.rmtree(running)
        writer.run(seed=len(seen))
        seen.append((tmp_path / "out.html").exists())

    monkeypatch.setattr("nexus_ablate.cli.compare.time.sleep", finish)
    assert main(["compare", "runs/mine", "--html", "out.html", "--watch"]) == 0
    assert seen == [False, True] and "norm=layer" in (tmp_path / "out.html").read_text()


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

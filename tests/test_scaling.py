"""Ladders of sizes: compute multipliers, their intervals, and what is said of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scipy.optimize import curve_fit
from written_runs import Writer

from nexus_ablate import errors
from nexus_ablate.cli import main
from nexus_ablate.comparison import scaling
from nexus_ablate.comparison.scaling import HOLDS, NEEDS, REVERSES, SHRINKS
from nexus_ablate.comparison.statistics import Interval

COMPUTE = (1e14, 4e14, 16e14, 64e14)
LAW = (0.9, 0.5, 0.35)
"""Irreducible loss, reducible loss in the middle of the ladder, and the exponent."""


def loss_at(compute: np.ndarray | float, law: tuple[float, float, float] = LAW) -> np.ndarray:
    irreducible, scale, alpha = law
    relative = np.asarray(compute) / np.exp(np.log(COMPUTE).mean())
    return irreducible + scale * relative**-alpha


def ladder(seed: int, multipliers: tuple[float, ...], noise: float = 0.005, seeds: int = 5) -> list[np.ndarray]:
    """Losses of baseline and arm by rung: 60% of a run's variance is the seed's."""
    random = np.random.default_rng(seed)
    tables = []
    for compute, m in zip(COMPUTE, multipliers, strict=True):
        shared, own = random.normal(0, noise * 0.6**0.5, seeds), random.normal(0, noise * 0.4**0.5, (2, seeds))
        tables.append(loss_at(np.array([compute, m * compute]))[:, None] + shared + own)
    return tables


def read(tables: list[np.ndarray]) -> scaling.Scaling:
    return scaling.scaling(["arm"], COMPUTE, tables)[0]


def covers(interval: Interval, value: float) -> bool:
    assert interval.low is not None and interval.high is not None
    return interval.low <= value <= interval.high


@pytest.fixture
def fewer_draws(monkeypatch):
    monkeypatch.setattr(scaling, "DRAWS", 1000)


def test_without_noise_the_multiplier_is_the_planted_one():
    for planted in (0.5, 1.0, 1.05, 2.0):
        one = read(ladder(0, (planted,) * 4, noise=1e-7))
        assert [cell.mean for cell in one.multipliers] == pytest.approx([planted] * 4, rel=0.02)
        assert one.predicted == pytest.approx(planted, rel=0.02)


def test_the_law_is_that_of_an_independent_least_squares_fit():
    compute = np.array(COMPUTE) / np.exp(np.log(COMPUTE).mean())
    losses = loss_at(np.array(COMPUTE)) + np.array([0.004, -0.003, 0.002, -0.001])
    law = scaling.fit(compute, losses[None], np.ones(4))
    reference, _ = curve_fit(lambda c, e, a, alpha: e + a * c**-alpha, compute, losses, p0=(1, 1, 0.3))
    assert [float(law.irreducible[0]), float(law.scale[0]), float(law.alpha[0])] == pytest.approx(reference, rel=0.05)


@pytest.mark.parametrize("studies", [60, pytest.param(1000, marks=(pytest.mark.slow, pytest.mark.long))])
def test_intervals_cover_the_planted_multipliers_and_no_difference_seldom_holds(studies, fewer_draws, counted):
    held = 0
    for planted in (1.0, 1.05, 1.2):
        result = [read(ladder(seed, (planted,) * 4)) for seed in range(studies)]
        inside = [all(covers(cell, planted) for cell in one.multipliers) for one in result]
        trends = [covers(one.trend, 1) for one in result]
        counted(f"x{planted}: {sum(inside)} of {studies} ladders covered, {sum(trends)} trends")
        assert sum(inside) >= 0.93 * studies - 2 * (0.05 * 0.95 * studies) ** 0.5
        assert sum(trends) >= 0.93 * studies - 2 * (0.05 * 0.95 * studies) ** 0.5
        held += sum(one.outcome == HOLDS for one in result) if planted == 1.0 else 0
        if planted == 1.2:
            assert sum(one.multipliers[-1].mean > 1 for one in result) >= 0.95 * studies
    counted(f"{held} of {studies} ladders without a difference hold")
    assert held <= 0.05 * studies + 2 * (0.05 * 0.95 * studies) ** 0.5


def at_largest_size(tables: list[np.ndarray]) -> float:
    return tables[-1][1].mean() - tables[-1][0].mean()


@pytest.mark.parametrize("studies", [100, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.long])])
def test_the_rungs_below_predict_the_sign_and_size_of_the_held_out_one(studies, monkeypatch, counted):
    """Decision accuracy: the largest size by a law and a line that are fitted without it."""
    monkeypatch.setattr(scaling, "DRAWS", 20)
    for planted in ((1.05,) * 4, (1.2,) * 4, (1.6, 1.4, 1.2, 1.1), (1.05, 1.1, 1.2, 1.3)):
        ladders = [ladder(seed, planted) for seed in range(studies)]
        results = [read(tables) for tables in ladders]
        signs = sum((one.predicted > 1) == (at_largest_size(t) < 0) for one, t in zip(results, ladders, strict=True))
        near = sum(abs(np.log(one.predicted / planted[-1])) < np.log(1.1) for one in results)
        counted(f"x{planted[0]} to x{planted[-1]}: {signs} of {studies} signs, {near} within 10% of the planted one")
        assert signs >= 0.9 * studies and near >= 0.8 * studies


def test_a_prediction_does_not_see_what_it_predicts():
    tables = ladder(1, (1.2,) * 4)
    spoilt = [*tables[:-1], tables[-1] + np.array([[0.3], [-0.2]])]
    assert read(spoilt).predicted == read(tables).predicted
    assert read(spoilt).multipliers[-1].mean > 1.5 * read(tables).multipliers[-1].mean
    few = scaling.scaling(["arm"], COMPUTE[:3], tables[:3])[0]
    assert few.predicted is None, "no law of three parameters from two sizes"


def test_control_without_the_noise_of_the_seeds_the_intervals_do_not_cover(fewer_draws, monkeypatch):
    monkeypatch.setattr(scaling, "_draws", lambda table, random: np.tile(table.mean(axis=1), (scaling.DRAWS, 1)))
    result = [read(ladder(seed, (1.2,) * 4)) for seed in range(40)]
    assert sum(all(covers(cell, 1.2) for cell in one.multipliers) for one in result) < 4


@pytest.mark.parametrize(
    ("multipliers", "outcome"),
    [
        ((1.2, 1.2, 1.2, 1.2), HOLDS),
        ((0.8, 0.8, 0.8, 0.8), HOLDS),
        ((1.6, 1.4, 1.2, 1.05), SHRINKS),
        ((1.3, 1.1, 0.9, 0.7), REVERSES),
        ((1.0, 1.0, 1.0, 1.0), f"{NEEDS} 5"),
    ],
)
def test_the_outcome_is_read_off_the_intervals(multipliers, outcome):
    assert read(ladder(1, multipliers, noise=0.001)).outcome == outcome


def written_ladder(root: Path, worth: float, seeds: int = 5, **of_one_size: Any) -> Path:
    """Runs of a ladder of four sizes with one arm, as they would lie after they were trained."""
    random = np.random.default_rng(3)
    for layers, compute in zip((2, 3, 4, 6), COMPUTE, strict=True):
        writer = Writer(root, f"deep@layers-{layers}")
        per_token = compute / (400 * 32)
        for seed in range(seeds):
            base, arm = loss_at(np.array([compute, worth * compute])) + random.normal(0, 0.001, 2)
            own = {"flops_per_token": per_token, "tokens_per_second": 1000.0}
            writer.run(seed=seed, loss=float(base), summary=own)
            slower = own | {"tokens_per_second": 1000 * (1 - layers / 20)}
            writer.run("norm=layer", seed=seed, loss=float(arm), summary=slower, **(of_one_size if layers == 3 else {}))
        writer.plan(
            ("norm=layer",), seeds=list(range(seeds)), stratum=f"layers-{layers}", of="deep", rung=layers, share=0.25
        )
    return root / "deep"


def test_compare_says_what_a_difference_is_worth_at_each_size(tmp_path, capsys):
    runs = written_ladder(tmp_path, 1.3)
    assert main(["compare", str(runs)]) == 0
    shown = capsys.readouterr().out
    assert "HOLDS: the largest rung differs" in " ".join(shown.split())
    assert "at 1.0e+14 FLOPs" in shown and "at 6.4e+15 FLOPs" in shown
    assert main(["compare", str(runs), "--json", "-", "--html", str(tmp_path / "a.html")]) == 0
    (one,) = json.loads(capsys.readouterr().out)["scaling"]
    assert one["arm"] == "norm=layer"
    multipliers = [cell["mean"] for cell in one["multipliers"]]
    assert multipliers == pytest.approx([1.3] * 4, rel=0.05) and one["speeds"] == pytest.approx([0.9, 0.85, 0.8, 0.7])
    assert (
        "by time at 6.4e+15" in shown
        and f" x{multipliers[-1] * 0.7:.3g} [x" in shown
        and "at equal training tokens" in shown
    )
    page = (tmp_path / "a.html").read_text()
    assert "HOLDS" in page and "6.4e+15" in page
    picture = page[page.index('aria-label="compute multipliers against compute"') :].partition("</svg>")[0]
    shown = [float(text) for text in re.findall(r"norm=layer at [^:]+ FLOPs: x([\d.]+)", picture)]
    assert shown == [float(f"{cell['mean']:.3g}") for cell in one["multipliers"]]


@pytest.mark.parametrize("unfair", [{"evaluation": "another"}, {"state": "diverged"}])
def test_an_arm_without_a_fair_result_at_a_size_has_no_multiplier(tmp_path, capsys, unfair):
    runs = written_ladder(tmp_path, 1.3, **unfair)
    assert main(["compare", str(runs)]) == 0
    shown = capsys.readouterr().out
    assert "HOLDS" not in shown and "no compute multiplier" in shown


def test_a_ladder_of_three_seeds_is_preliminary(tmp_path, capsys):
    runs = written_ladder(tmp_path, 1.3, seeds=3)
    assert main(["compare", str(runs)]) == 0
    assert "norm=layer preliminary: HOLDS" in " ".join(capsys.readouterr().out.split())


def test_strata_that_are_no_sizes_have_no_multipliers(tmp_path, capsys):
    runs = written_ladder(tmp_path, 1.3)
    for path in tmp_path.glob("deep@*/study.yaml"):
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"rung": 0}))
    assert main(["compare", str(runs), "--json", "-"]) == 0
    assert "scaling" not in json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_any_study_becomes_a_ladder_with_one_override(capsys):
    assert main(["plan", "dropout", "rungs=1,2,3,4", "name=ladder", "tokens_per_parameter=1"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "ladder@layers-4" in shown and "train.tokens=786432" in shown and "model.d_model=128" in shown
    assert "4 strata: 60 runs" in shown


@pytest.mark.parametrize(
    "words",
    [
        ["gqa", "rungs=2,3,4"],
        ["gqa", "rungs=4,3,2,1"],
        ["gqa", "rungs=1,2,3,x"],
        ["gqa", "rungs=0,2,3,4"],
        ["biases", "rungs=1,2,3,4"],
        ["gates", "rungs=1,2,3,4"],
        ["gqa", "rungs=1,2,3,4", "tokens_per_parameter=0"],
    ],
)
def test_a_mistake_is_three_lines(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *words]) == errors.CONFIG
    assert len(capsys.readouterr().err.splitlines()) == 3
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.long
def test_a_real_ladder_trains_each_size_and_reads_the_multipliers(tmp_path, tiny_run, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shape = ("model.n_layers", "model.d_model", "model.n_heads", "train.steps", "runs_dir", "train.batch_size")
    base = [o for o in tiny_run("probe=off", "train.eval_every=100", "optim.warmup=0") if not o.startswith(shape)]
    sizes = ["rungs=1,2,3,4", "tokens_per_parameter=0.05", "seeds=0,1,2", "delta_min=10"]
    overrides = ["runs_dir=runs", "vary.norm=rms,layer", "question=x", *sizes, *base, "train.batch_size=8"]
    assert main(["study", "mine", *overrides, "--workers", "1"]) == 0
    capsys.readouterr()
    assert main(["compare", "runs/mine", "--json", "-"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["scaling"]
    assert one["arm"] == "norm=layer" and len(one["multipliers"]) == 4
    assert one["compute"] == sorted(one["compute"])

"""Every number that a run writes is in the table of measures, and every row of the table is written by some run."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nexus_ablate.cli import main
from nexus_ablate.config.compose import compose
from nexus_ablate.errors import ConfigError
from nexus_ablate.measure import statistics
from nexus_ablate.measure.measures import MEASURES, SECTIONS, find, measure_of
from nexus_ablate.measure.probe import model_figures, probe
from nexus_ablate.measure.statistics import SITES, STATISTICS, WHOLE
from nexus_ablate.model import build_model
from nexus_ablate.runs import read_jsonl, read_run
from nexus_ablate.training.session import train

ELSEWHERE = {
    "mfu": "a GPU",
    "spike_score_olmo2/{metric}": "1000 logged steps",
    "{set}/loss": "data=stdlib",
    "{set}/bpb": "data=stdlib",
}
"""Rows that no run of this test can have, and what it would take."""


def flat(values, before=""):
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{before}{name}/")
        elif "not_defined" not in f"{before}{name}":
            yield f"{before}{name}"


def written(path):
    """Every name in the logs and the summary of a run."""
    logs = [read_jsonl(path / name) for name in ("metrics.jsonl", "probes.jsonl")]
    return {name for log in logs for row in log for name in row} | set(flat(read_run(path).summary or {}))


def test_every_number_of_a_run_is_in_the_table_and_every_row_of_the_table_in_a_run(tiny_run):
    everything = ["probe=full", "evals=[extrapolation,streaming,quantization,intervention]", "z_loss=1e-4"]
    everything += ["kv_bias=key", "gate=elementwise", "norm=batch", "tie_embeddings=off", "norm_bias=on"]
    long = ["train.steps=140", "train.precision=fp16", "probe.every=1000", "train.checkpoint_every=1000"]
    names = written(train(compose(tiny_run(*everything)), quiet=True).path)
    names |= written(train(compose(tiny_run(*long)), quiet=True).path)
    assert not sorted(name for name in names if measure_of(name) is None)
    found = {measure_of(name).name for name in names}  # type: ignore[union-attr]
    assert {measure.name for measure in MEASURES} - found == ELSEWHERE.keys()


def test_an_undeclared_statistic_is_found(tiny):
    row = statistics.Statistic("undeclared", lambda x: x.mean(), ("resid",), False, max, ())
    STATISTICS.append(row)
    try:
        found = probe(build_model(tiny(), 11), torch.zeros(1, 8, dtype=torch.int64))
        names = found | model_figures(found)
    finally:
        STATISTICS.remove(row)
    strangers = {name for name in names if measure_of(name) is None}
    assert strangers == {"act/block_000/resid/undeclared", "act/block_001/resid/undeclared", "act/resid/undeclared"}


@pytest.mark.parametrize("statistic", STATISTICS, ids=lambda statistic: statistic.name)
def test_a_statistic_and_its_row_agree_on_level_and_on_the_whole_model(statistic):
    for site in statistic.sites:
        last = "top_channel" if statistic.name == "top" else statistic.name
        name = SITES[site].format(block="block_000", matrix="block_000/query")
        measure = find(f"{name}/{last}")
        assert ("full" in measure.where) == (statistic.full or site == "matrix")
        if site in WHOLE:
            word = {max: "largest", statistics.mean: "mean", None: ""}[statistic.over]
            assert measure.whole.partition(",")[0] == word


def test_names_and_units_of_the_table_are_in_order():
    names = [name for measure in MEASURES for name in measure.names]
    assert len(names) == len(set(names))
    for measure in MEASURES:
        assert measure.better in ("", "lower", "higher") and measure.definition and measure.where
        assert set(measure.where) <= {"step", "standard", "full", "summary"} | SECTIONS.keys()
        assert bool(measure.panel or measure.heat_map) <= bool(measure.title)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("attn/sink_rate", "attn/{block}/sink_rate"),
        ("attn/block_011/sink_rate", "attn/{block}/sink_rate"),
        ("act/resid/rms", "act/{block}/{site}/rms"),
        ("prose/loss", "{set}/loss"),
        ("train/loss", "train/loss"),
        ("grad_norm/final_norm", "grad_norm/{module}"),
        ("spike_score_olmo2/grad_norm/global", "spike_score_olmo2/{metric}"),
        ("extrapolation/by_position/8/33-64", "extrapolation/by_position/{factor}/{tokens_read}"),
        ("weight/block_000/ffn_in_2/rms", "weight/{block}/{matrix}/rms"),
    ],
)
def test_a_name_leads_to_its_row(name, row):
    assert find(name).name == row


def test_a_wrong_name_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="attn/sink_rate"):
        find("attn/sinkrate")


def test_list_measures_prints_the_table_without_torch(capsys):
    assert main(["list", "measures"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "attn/{block}/sink_rate" in shown and "2410.10781" in shown
    code = "import sys, nexus_ablate.measure.measures; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent).returncode == 0

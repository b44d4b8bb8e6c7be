"""Every number that a run writes is in the table of measures, and every row of the table is written by some run."""

import re

import pytest
import torch

from nexus_ablate.config.compose import compose
from nexus_ablate.errors import ConfigError
from nexus_ablate.measure import activation_statistics as statistics
from nexus_ablate.measure.activation_statistics import SITES, STATISTICS
from nexus_ablate.measure.measures import MEASURES, SECTIONS, find, measure_of
from nexus_ablate.measure.probe import model_figures, probe
from nexus_ablate.model import build_model
from nexus_ablate.runs import read_jsonl, read_run
from nexus_ablate.training.session import train

ELSEWHERE = {
    "mfu": "a GPU",
    "{set}/loss": "data=stdlib",
    "{set}/bpb": "data=stdlib",
}
"""Rows that no run of this test can have, and what it would take."""
EVALUATIONS = ("extrapolation", "streaming", "quantization", "intervention")
EVALUATIONS += ("induction", "recall:pairs:2", "copy", "minimal_pairs")


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
    everything = ["probe=full", f"evals=[{','.join(EVALUATIONS)}]", "z_loss=1e-4"]
    everything += ["kv_bias=key", "gate=elementwise", "norm=batch", "tie_embeddings=off", "norm_bias=on"]
    long = ["train.steps=140", "train.precision=fp16", "probe.every=1000", "train.checkpoint_every=1000", "ffn=moe"]
    names = written(train(compose(tiny_run(*everything)), quiet=True).path)
    names |= written(train(compose(tiny_run(*long)), quiet=True).path)
    assert not sorted(name for name in names if measure_of(name) is None)
    result = {measure_of(name).name for name in names}  # type: ignore[union-attr]
    assert {measure.name for measure in MEASURES} - result == ELSEWHERE.keys()


def test_an_undeclared_statistic_is_found(tiny):
    row = statistics.Statistic("undeclared", lambda x: x.mean(), ("resid",), False, ())
    STATISTICS.append(row)
    try:
        probed = probe(build_model(tiny(), 11), torch.zeros(1, 8, dtype=torch.int64))
        names = probed | model_figures(probed)
    finally:
        STATISTICS.remove(row)
    strangers = {name for name in names if measure_of(name) is None}
    assert strangers == {"act/block_000/resid/undeclared", "act/block_001/resid/undeclared"}


@pytest.mark.parametrize("statistic", STATISTICS, ids=lambda statistic: statistic.name)
def test_a_statistic_and_its_row_agree_on_the_level(statistic):
    for site in statistic.sites:
        last = {"top_": "top_channel", "score_at/": "score_at/4-7"}.get(statistic.name, statistic.name)
        name = SITES[site].format(block="block_000", matrix="block_000/query")
        measure = find(f"{name}/{last}")
        assert ("full" in measure.where) == (statistic.full or site == "matrix")


def test_a_definition_is_understood_without_the_row_before_it():
    """Reports show one definition alone, under the pointer or below a table."""
    relative = [measure.name for measure in MEASURES if re.match(r"(the same|that|these|its) ", measure.definition)]
    assert not relative


def test_names_and_units_of_the_table_are_in_order():
    names = [name for measure in MEASURES for name in measure.names]
    assert len(names) == len(set(names))
    for measure in MEASURES:
        assert measure.better in ("", "lower", "higher") and measure.definition and measure.where
        assert set(measure.where) <= {"step", "standard", "full", "summary"} | SECTIONS.keys()
        assert bool(measure.panel or measure.heat_map) <= bool(measure.title)
        assert measure.whole.partition(",")[0] in ("", "mean", "largest")


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("attn/sink_rate", "attn/{block}/sink_rate"),
        ("attn/block_011/sink_rate", "attn/{block}/sink_rate"),
        ("act/resid/rms", "act/{block}/{site}/rms"),
        ("prose/loss", "{set}/loss"),
        ("train/loss", "train/loss"),
        ("grad_norm/final_norm", "grad_norm/{module}"),
        ("extrapolation/by_position/8/33-64", "extrapolation/by_position/{factor}/{tokens_read}"),
        ("weight/block_000/ffn_in_2/rms", "weight/{block}/{matrix}/rms"),
        ("update_ratio/ffn_in_2", "update_ratio/{block}/{matrix}"),
        ("attn/score_at/64-127", "attn/{block}/score_at/{distance}"),
        ("grad_norm/first_over_last", "grad_norm/first_over_last"),
    ],
)
def test_a_name_leads_to_its_row(name, row):
    assert find(name).name == row


def test_a_wrong_name_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="attn/sink_rate"):
        find("attn/sinkrate")

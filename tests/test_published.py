"""Every causal language model of the installed `transformers`: exact, refused with a reason, or wrong."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from nexus_ablate.pretrained.families import FAMILIES

SCRIPT = Path(__file__).parent.parent / "scripts" / "published.py"
PAGE = (SCRIPT.parents[1] / "docs/published_decoders_table.md").read_text(encoding="utf-8")
TYPES = {"exact": 61, "refused": 135}
KEYS = {"exact": 2874, "refused": 95}
"""What becomes of the exact types with one key changed or removed, where transformers does not refuse it itself."""


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("published_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_the_page_counts_what_is_tested_and_has_a_row_for_each_type(script):
    assert f"{sum(TYPES.values())} types: {TYPES['exact']} exact, {TYPES['refused']} refused, 0 wrong." in PAGE
    assert f"One key changed or removed: {KEYS['exact']} exact, {KEYS['refused']} refused, 0 wrong." in PAGE
    types, _, keys = PAGE.partition("## Keys")
    rows = re.findall(r"^\| ([\w-]+) \| (exact|refused) \|", types, re.M)
    assert [kind for kind, _ in rows] == script.types(), "scripts/published.py"
    assert [kind for kind, word in rows if word == "exact"] == re.findall(r"^\| ([\w-]+) \| \d+ \|", keys, re.M)


@pytest.mark.parametrize("kind", ["gpt2", "mamba"])
def test_a_row_of_the_page_is_what_the_script_writes(kind, script):
    row = [*script.types_table(script.outcomes([kind]))][4]
    assert row.startswith(f"| {kind} |") and row in PAGE.splitlines(), "scripts/published.py"


@pytest.fixture(scope="module")
def outcomes(script):
    return script.outcomes(script.types())


@pytest.mark.slow
@pytest.mark.long
def test_no_type_of_the_library_is_wrong(outcomes):
    assert Counter(result.word for result in outcomes.values()) == TYPES
    assert all(result.reason for result in outcomes.values() if result.word == "refused")
    assert PAGE.startswith("\n".join([script.HEAD, *script.types_table(outcomes)])), "scripts/published.py"
    assert [kind for kind in FAMILIES if outcomes[kind].word != "exact"] == ["ministral3"]  # queries grow with position


@pytest.mark.slow
@pytest.mark.long
def test_no_changed_or_removed_key_of_a_family_is_wrong(outcomes, script):
    lines = [*script.keys_table([kind for kind in outcomes if outcomes[kind].word == "exact"])]
    assert lines[-1] == f"One key changed or removed: {KEYS['exact']} exact, {KEYS['refused']} refused, 0 wrong."
    assert PAGE.endswith("\n".join(["", *lines, ""])), "scripts/published.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "refused"),
    [("gpt2", {"scale_attn_by_inverse_layer_idx", "add_cross_attention", "is_encoder_decoder"}),
     ("qwen2", {"is_encoder_decoder"})],
)  # fmt: skip
def test_a_key_changed_or_removed_is_exact_or_refused_and_its_effect_is_measured(kind, refused, script):
    found = script.keys_of(kind)
    assert not found.wrong and found.words["exact"] > 40
    assert {text.partition(" ")[0] for text in found.refused} == refused
    assert {"use_cache", "initializer_range", "bos_token_id"} <= {*found.inert}
    active = {"hidden_act", "rms_norm_eps", "layer_norm_epsilon", "activation_function", "rope_parameters.rope_theta"}
    assert not active & {*found.inert}

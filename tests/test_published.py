"""Every causal language model of the installed `transformers`: exact, refused with a reason, or wrong."""

from __future__ import annotations

from collections import Counter

import checkouts
import pytest

from nexus_ablate.pretrained.families import FAMILIES

PAGE = (checkouts.ROOT / "docs/published_decoders.md").read_text(encoding="utf-8")
TYPES = {"exact": 61, "refused": 135}
KEYS = {"exact": 2874, "refused": 95}
"""What becomes of the exact types with one key changed or removed, where transformers does not refuse it itself."""


@pytest.fixture(scope="module")
def script():
    return checkouts.script("published")


def test_the_page_counts_what_is_tested():
    page = " ".join(PAGE.split())
    counts = f"Of {sum(TYPES.values())} types {TYPES['exact']} are exact, {TYPES['refused']} are refused"
    changes = f"Of {sum(KEYS.values()):,} such changes of the {TYPES['exact']} exact types {KEYS['exact']:,} are exact"
    assert counts in page and f"{changes}, {KEYS['refused']} are refused" in page


@pytest.mark.parametrize(("kind", "word"), [("gpt2", "exact"), ("mamba", "refused")])
def test_a_type_is_a_row_of_what_the_script_prints(kind, word, script):
    assert [*script.types_table(script.outcomes([kind]))][4].startswith(f"| {kind} | {word} |")


@pytest.fixture(scope="module")
def outcomes(script):
    return script.outcomes(script.types())


@pytest.mark.slow
@pytest.mark.long
def test_no_type_of_the_library_is_wrong(outcomes):
    assert Counter(result.word for result in outcomes.values()) == TYPES
    assert all(result.reason for result in outcomes.values() if result.word == "refused")
    assert [kind for kind in FAMILIES if outcomes[kind].word != "exact"] == ["ministral3"]  # queries grow with position


@pytest.mark.slow
@pytest.mark.long
def test_no_changed_or_removed_key_of_a_family_is_wrong(outcomes, script):
    lines = [*script.keys_table([kind for kind in outcomes if outcomes[kind].word == "exact"])]
    assert lines[-1] == f"One key changed or removed: {KEYS['exact']} exact, {KEYS['refused']} refused, 0 wrong."


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

"""Every causal language model of the installed `transformers`: exact, refused with a reason, or wrong."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path

import pytest

from nexus_ablate.pretrained.families import FAMILIES

SCRIPT = Path(__file__).parent.parent / "scripts" / "published.py"
EXACT, REFUSED = 61, 135


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("published_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.long
def test_no_type_of_the_library_is_wrong(script):
    rows = [
        line.split(" | ") for line in script.types_table(script.types()) if line.startswith("| ") and "---" not in line
    ]
    words = Counter(row[1] for row in rows[1:])
    assert words == {"exact": EXACT, "refused": REFUSED}
    assert all(row[2].strip(" |") for row in rows[1:] if row[1] == "refused")
    exact = {row[0].strip("| ") for row in rows[1:] if row[1] == "exact"}
    assert set(FAMILIES) - exact == {"ministral3"}  # its queries grow with the position


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "refused"), [("gpt2", {"scale_attn_by_inverse_layer_idx"}), ("qwen2", set())])
def test_a_key_changed_or_removed_is_exact_or_refused_and_its_effect_is_measured(kind, refused, script):
    found = script.keys_of(kind)
    assert not found.wrong and found.words["exact"] > 40
    names = {text.partition(" ")[0] for text in found.refused}
    assert names == refused | {"is_encoder_decoder"} | ({"add_cross_attention"} if kind == "gpt2" else set())
    assert {"use_cache", "initializer_range", "bos_token_id"} <= {*found.inert}
    active = {"hidden_act", "rms_norm_eps", "layer_norm_epsilon", "activation_function", "rope_parameters.rope_theta"}
    assert not active & {*found.inert}

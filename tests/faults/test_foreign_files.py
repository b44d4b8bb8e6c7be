"""Files that others made, or that were damaged on their way: a model's configuration, a tokenizer, a study's file."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nexus_ablate.cli import main
from nexus_ablate.pretrained import library

LLAMA = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
LLAMA |= {"intermediate_size": 32, "vocab_size": 64}
HUGE = 10**9
CONFIGS: dict[str, Any] = {
    "a billion wide": LLAMA | {"hidden_size": HUGE},
    "a billion heads": LLAMA | {"hidden_size": 2 * HUGE, "num_attention_heads": HUGE},
    "no heads": LLAMA | {"num_attention_heads": 0},
    "a tenth of a layer": LLAMA | {"num_hidden_layers": 0.1},
    "fewer layers than none": LLAMA | {"num_hidden_layers": -1},
    "a word": LLAMA | {"hidden_size": "wide"},
    "a tera of tokens": LLAMA | {"vocab_size": 10**12},
    "no number": LLAMA | {"rms_norm_eps": float("nan")},
    "an infinite number": LLAMA | {"rope_theta": float("inf")},
    "a list": [LLAMA],
    "a hundred thousand levels": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "no model_type": {"hidden_size": 16},
    "nothing": "",
}


def bpe(vocab: Any = None, **more: Any) -> dict[str, Any]:
    return {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1} if vocab is None else vocab, "merges": []}} | more


TOKENIZERS: dict[str, Any] = {
    "nine hundred levels": '{"a":' * 900 + "1" + "}" * 900,
    "a hundred thousand levels": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "nothing": "",
    "an empty mapping": {},
    "a list": [],
    "half a character": bpe({"\ud800": 0, "a": 1}),
    "an empty token": bpe({"": 0, "a": 1}),
    "an id of 2^31": bpe({"a": 2**31, "b": 0}),
    "an id of 2^63": bpe({"a": 2**63}),
    "an id below 0": bpe({"a": -1}),
    "half an id": bpe({"a": 0.5}),
    "an id that is no number": bpe({"a": float("nan")}),
    "an id twice": bpe({"a": 0, "b": 0}),
    "a gap of a million": bpe({"a": 0, "b": 10**6}),
    "a merge of three": bpe() | {"model": bpe()["model"] | {"merges": ["x y z", 3]}},
    "an added id of 2^31": bpe(added_tokens=[{"id": 2**31, "content": "x"}]),
    "no model": {"model": None},
}
STUDY_LINES = (
    *("name: [a]", "name: a/b", "question: [a]", "baseline: {a: b}", "baseline: 3", "baseline: [3]", "baseline: [a]"),
    *("arms: 3", "arms: [norm=rms]", "arms: {a: 3}", "arms: {a: [3]}", "arms: {a: {b: c}}", "arms: {3: norm=rms}"),
    *(
        "vary: 3",
        "vary: [norm]",
        "vary: {norm: 3}",
        "vary: {norm: []}",
        "vary: {3: [a]}",
        "design: [grid]",
        "design: 3",
    ),
    *("seeds: 3", "seeds: {a: 3}", "seeds: 1e400", "seeds: [x]", "seeds: [-1]", "seeds: [0, 0]", "endpoints: 3"),
    *("endpoints: []", "endpoints: [3]", "endpoints: [[a]]", "endpoints: {val_loss: 3}", "endpoints: [{delta_min: 1}]"),
    *(
        "endpoints: [{name: [a]}]",
        "endpoints: [{name: val_loss, delta_min: [a]}]",
        "endpoints: [{name: val_loss, a: 1}]",
    ),
    *("settings: 3", "settings: {a: {b: c}}", "settings: [a, b]", "lr_grid: x", "lr_grid: 3", "lr_grid: {a: b}"),
    *("lr_grid: [x, y, z]", "match: [a]", "match: 3", "worth: 3", "worth: [a]", "source: 3", "configs: [a]"),
    *("strata: 3", "claim: {a: b}", "looks: [1]", "delta_min: 0.1"),
)


LEVELS = ("{a: b}", "[[rms]]", "[{a: b}]", "[null]", "null", "2020-01-01", ".inf", "!!binary aGVsbG8=", "!!set {a}")
STUDY_LINES += (
    *("arms: " + "[" * 3000 + "]" * 3000, "design: !!bool x", "arms: {layer: 'norm=layer \"open'}"),
    *("seeds: [" + "9" * 400 + "]", "? [1, 2]\n: 3", "2020-01-01: x", "null: x", "vary: {seed: [1, 2]}"),
    *(f"vary: {{norm: [layer, {level}]}}" for level in LEVELS),
    *(f"arms: {{layer: norm=layer, other: {level}}}" for level in LEVELS),
)


def written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def is_refused(capsys: pytest.CaptureFixture[str], *command: str) -> bool:
    """Whether a command ends in three lines, with exit status 2."""
    status = main([*command])
    lines = capsys.readouterr().err.splitlines()
    return status == 2 and [line.split(":")[0] for line in lines[-3:]] == ["error", "  got", "  try"]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_of_no_model_is_refused(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(written(CONFIGS[name]))
    assert is_refused(capsys, "import", str(tmp_path))
    assert is_refused(capsys, "import", str(tmp_path / "config.json"))
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_that_is_none_is_refused(name, capsys, tmp_path, text_file, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEXUS_ABLATE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "tokenizer.json"
    path.write_text(written(TOKENIZERS[name]))
    data = ["model=femto", "train.steps=1", "data=files", f"data.files=[{text_file}]", f"data.tokenizer={path}"]
    assert is_refused(capsys, *data)
    assert is_refused(capsys, "plan", "mine", "vary.norm=layer", *data)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("line", STUDY_LINES)
def test_a_study_s_file_with_another_form_is_refused(line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = {"question": "question: is it?", "arms": "arms: {layer: norm=layer}"} | {line.partition(":")[0]: line}
    if line.startswith("vary"):
        del lines["arms"]
    (tmp_path / "mine.yaml").write_text("\n".join([*lines.values(), ""]))
    assert is_refused(capsys, "plan", "mine.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


def test_control_a_traceback_is_noticed(capsys, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(written(LLAMA))
    monkeypatch.setattr(library, "read_config", lambda path: 1 / 0)
    assert not is_refused(capsys, "import", str(tmp_path))

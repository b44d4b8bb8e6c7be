"""Checkpoints that the `transformers` library saves, imported, evaluated, compared and trained on."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from published import library_model, tokens
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nexus_ablate.cli import main
from nexus_ablate.cli.sample import visible
from nexus_ablate.comparison.result import compare
from nexus_ablate.comparison.verdict import NOT_COMPARABLE, UNDECIDED
from nexus_ablate.runs import find_runs, read_run
from nexus_ablate.training.evaluation import restore

TEXT = "the quick brown fox jumps over the lazy dog.\n" * 300
QUICK = ["data=files", "data.files=[text.txt]", "tracker=files", "train.device=cpu", "train.threads=1",
         "train.eval_tokens=240", "train.batch_size=2", "optim.warmup=0"]  # fmt: skip
IMPORTED = ["bloom", "gemma2", "gpt2", "gpt_neox", "llama3", "mistral", "olmo2", "opt", "phi", "qwen3"]
VOCAB = 260
"""Four rows more than the tokenizer has tokens, as released embeddings are padded."""


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Each test runs in a folder and with a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEXUS_ABLATE_CACHE", str(tmp_path / "cache"))
    Path("text.txt").write_text(TEXT)


def byte_tokenizer() -> Tokenizer:
    """A tokenizer.json of 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def saved(name: str) -> torch.nn.Module:
    """A model of the library, saved in `model/` with a tokenizer."""
    model = library_model(name, vocab_size=VOCAB)
    model.save_pretrained("model")
    byte_tokenizer().save("model/tokenizer.json")
    return model


def imported(*overrides: str) -> Path:
    assert main(["import", "model", *QUICK, *overrides]) == 0
    (path,) = find_runs([Path("runs/imported")])
    return path


def refusal(capsys, *command: str) -> str:
    """What a refused command says, in three lines; nothing is left behind."""
    assert main([*command]) == 2
    said = capsys.readouterr().err
    assert [line.split(":")[0].strip() for line in said.strip().splitlines()] == ["error", "got", "try"], said
    assert not find_runs([Path("runs")]) if Path("runs").exists() else True
    return said


@pytest.mark.parametrize("name", [n if n == "llama3" else pytest.param(n, marks=pytest.mark.slow) for n in IMPORTED])
def test_an_imported_checkpoint_gives_the_logits_of_the_library_that_saved_it(name):
    expected = saved(name)
    _, _, actual = restore(read_run(imported()))
    with torch.no_grad():
        torch.testing.assert_close(actual(tokens()), expected(tokens()).logits, rtol=0, atol=1e-5)


def test_an_imported_model_writes_what_the_library_that_saved_it_would(capsys):
    expected = saved("llama3")
    imported()
    capsys.readouterr()
    greedy = ["--tokens", "5", "--temperature", "1e-6"]
    assert main(["sample", "last", "--prompt", "to be", *greedy]) == 0
    text = capsys.readouterr().out.rstrip("\n")
    prompt = torch.tensor([byte_tokenizer().encode("to be").ids])
    written = expected.generate(prompt, max_new_tokens=5, min_new_tokens=5, do_sample=False)[0]
    assert text == visible(byte_tokenizer().decode(written.tolist())).rstrip("\n")


@pytest.mark.slow
def test_a_run_that_continues_from_an_imported_one_starts_where_that_is(capsys):
    saved("llama3")
    first = imported()
    overrides = (first / "overrides.txt").read_text().splitlines()
    plain = [text for text in overrides if not text.startswith(("init", "experiment", "train.steps"))]
    start = [*plain, f"init.run='{first}'", "init=checkpoint"]
    assert main([*start, "experiment=copy", "train.steps=0"]) == 0
    for seed in (0, 1):
        assert main([*start, "experiment=more", "train.steps=3", f"seed={seed}"]) == 0
    (copy,) = find_runs([Path("runs/copy")])
    one, other = (read_run(path) for path in (first, copy))
    assert one.summary["val_loss"] == other.summary["val_loss"]
    names = "extrapolation,streaming,quantization,intervention"
    assert main(["evaluate", str(first), str(copy), "--evals", names]) == 0
    one, other = (read_run(path).summary for path in (first, copy))
    assert all(one[name] == other[name] for name in names.split(","))
    same = {name for name in one if name.startswith(("act/", "attn/", "logits/", "weight_rms/", "val_", "params"))}
    assert len(same) > 20 and all(one[name] == other[name] for name in same)
    assert shown(first, capsys) == shown(copy, capsys) != []
    more = [read_run(path) for path in find_runs([Path("runs/more")])]
    assert len({run.summary["init_hash"] for run in more}) == 1
    assert len({run.summary["val_loss"] for run in more}) == 2
    assert main(["show", str(first)]) == 0
    assert main(["compare", "runs/more"]) == 0
    assert "data order and dropout alone" in " ".join(capsys.readouterr().out.split())


def shown(path, capsys):
    """What `show` prints of a run, but for what is about this directory and this moment."""
    capsys.readouterr()
    assert main(["show", str(path)]) == 0
    lines = capsys.readouterr().out.partition("\nstate")[2].splitlines()
    return [line for line in lines if not line.startswith(("time", "memory", "picture"))]


def test_the_content_of_the_weights_is_part_of_the_identity():
    saved("gpt2")
    first = imported()
    state = load_file("model/model.safetensors")
    save_file({name: tensor + 1e-3 for name, tensor in state.items()}, "model/model.safetensors")
    assert main(["import", "model", *QUICK]) == 0
    assert len(find_runs([Path("runs/imported")])) == 2
    assert main(["import", "model", *QUICK]) == 0  # the same again is the same run
    assert len(find_runs([Path("runs/imported")])) == 2
    assert first.exists()


def test_a_config_alone_is_printed_as_overrides(capsys):
    saved("llama3")
    assert main(["import", "model/config.json"]) == 0
    assert capsys.readouterr().out.startswith("nexus-ablate preset=llama3 ")
    assert not Path("runs").exists()


CONFIGS = {
    "another architecture": ({"model_type": "mamba"}, "a recurrent state"),
    "no architecture": ({"model_type": None}, "model_type=None"),
    "an unknown architecture": ({"model_type": "bananas"}, "does not know this architecture"),
    "an unknown scaling": ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
    "an unknown activation": ({"hidden_act": "quick_gelu"}, "quick_gelu"),
    "quantized weights": ({"quantization_config": {"bits": 4}}, "the weights are quantized"),
    "contradictory heads": ({"num_key_value_heads": 3}, "n_kv_heads must divide model.n_heads"),
    "a size that is a text": ({"hidden_size": "many"}, "transformers refuses this config.json"),
    "a list as rope": ({"rope_parameters": [1]}, "transformers refuses this config.json"),
    "another size": ({"intermediate_size": 64}, "of different sizes"),
    "another depth": ({"num_hidden_layers": 5}, "the weights lack tensors"),
    "fewer layers": ({"num_hidden_layers": 3}, "model.layers.3."),
    "a bias that is not there": ({"attention_bias": True}, "the weights lack tensors"),
    "fewer rows than tokens": ({"vocab_size": 100}, "of different sizes"),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A saved model that each test breaks a copy of."""
    folder = tmp_path_factory.mktemp("llama")
    model = library_model("llama", vocab_size=VOCAB)
    model.save_pretrained(folder / "model")
    byte_tokenizer().save(str(folder / "model/tokenizer.json"))
    return folder / "model"


@pytest.fixture
def copied(llama, tmp_path):
    import shutil

    return Path(shutil.copytree(llama, tmp_path / "model"))


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_cannot_be_expressed_or_is_of_other_weights_is_refused(case, copied, capsys):
    changes, reason = CONFIGS[case]
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | changes))
    assert reason in refusal(capsys, "import", "model", *QUICK)


def truncated(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def pickled(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))


FILES = {
    "weights cut off": (truncated, "cannot be read as safetensors"),
    "a pickle instead of weights": (pickled, "pickled weights are not read"),
    "a pickle under their name": (
        lambda folder: (folder / "model.safetensors").write_bytes(pickle.dumps({})),
        "cannot be read as safetensors",
    ),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer"),
    "a broken tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer.json"),
    "a broken config": (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "no config.json here"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_directory_that_cannot_be_read_is_refused(case, copied, capsys):
    damage, reason = FILES[case]
    damage(copied)
    assert reason in refusal(capsys, "import", "model", *QUICK)


@pytest.mark.parametrize(
    ("run", "reason"), [("none", "there is none here"), ("nowhere", "there is none here"), (".", "neither a run nor")]
)
def test_a_start_from_nothing_is_refused(run, reason, capsys):
    assert reason in refusal(capsys, *QUICK, "init=checkpoint", f"init.run={run}", "train.steps=1")


def test_a_start_from_another_architecture_is_refused(copied, capsys):
    command = [*QUICK, "preset=llama", "model.d_model=32", "init=checkpoint", "init.run=model", "train.steps=1"]
    assert "the weights" in refusal(capsys, *command)


def test_a_comparison_of_an_imported_model_gives_no_verdict():
    saved("gpt2")
    imported()
    assert main([*QUICK, "experiment=imported", "train.steps=1", "model.d_model=16", "model.context=24"]) == 0
    arms = [read_run(path).arm for path in find_runs([Path("runs/imported")])]
    rows = compare(Path("runs/imported"), baseline=arms[0], allow=["tokens", "params", "flops", "schedule"]).rows
    (verdict,) = [row.verdict for row in rows if row.verdict is not None]
    assert verdict.word in (*UNDECIDED, NOT_COMPARABLE), verdict

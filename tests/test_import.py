"""Checkpoints that the `transformers` library saves, imported, evaluated, compared and trained on."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from published import library_model, tokens
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nexus_ablate.cli import main
from nexus_ablate.comparison.compare import compare
from nexus_ablate.comparison.verdict import NOT_COMPARABLE, TOO_FEW_SEEDS
from nexus_ablate.data import eval_windows
from nexus_ablate.errors import escaped
from nexus_ablate.runs import find_runs, read_run
from nexus_ablate.training.evaluation import restore

TEXT = "the quick brown fox jumps over the lazy dog.\n" * 300
QUICK = ["data=files", "data.files=[text.txt]", "tracker=files", "train.device=cpu", "train.threads=1",
         "train.eval_tokens=240", "train.batch_size=2", "optim.warmup=0"]  # fmt: skip
IMPORTED = ["bloom", "gemma2", "gpt2", "gpt_neox", "llama3", "mistral", "olmo2", "opt", "phi", "qwen3"]
WEIGHTS = "model.safetensors"
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


def test_an_imported_checkpoint_gives_the_logits_of_the_library_that_saved_it():
    expected = saved("llama3")
    _, _, actual = restore(read_run(imported()))
    with torch.no_grad():
        torch.testing.assert_close(actual(tokens()), expected(tokens()).logits, rtol=0, atol=1e-5)


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
    one, other = (read_run(path).summary for path in (first, copy))
    same = {name for name in one if name.startswith(("act/", "attn/", "logits/", "weight_rms/", "val_", "params"))}
    assert len(same) > 20 and all(one[name] == other[name] for name in same)
    more = [read_run(path) for path in find_runs([Path("runs/more")])]
    assert len({run.summary["init_hash"] for run in more}) == 1
    assert len({run.summary["val_loss"] for run in more}) == 2
    assert main(["compare", "runs/more"]) == 0
    assert "data order and dropout alone" in " ".join(capsys.readouterr().out.split())


def test_the_content_of_the_weights_is_part_of_the_identity():
    saved("gpt2")
    first = imported()
    weights(lambda name, w: w + 1e-3)(Path("model"))
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
    return Path(shutil.copytree(llama, tmp_path / "model"))


def config(**changes):
    """A folder with other values in config.json."""

    def damage(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(values | changes))

    return damage


def weights(change):
    """A folder with other tensors, each from its name and value."""

    def damage(folder: Path) -> None:
        state = load_file(folder / WEIGHTS)
        save_file({name: change(name, tensor) for name, tensor in state.items()}, folder / WEIGHTS)

    return damage


def file(name: str, data: bytes | None = None):
    """A folder with other bytes in a file, or without it."""
    return lambda folder: (folder / name).unlink() if data is None else (folder / name).write_bytes(data)


def truncated(folder: Path) -> None:
    file(WEIGHTS, (folder / WEIGHTS).read_bytes()[:5000])(folder)


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
DAMAGES = {
    "another architecture": (config(model_type="mamba"), "a recurrent state"),
    "no architecture": (config(model_type=None), "model_type=None"),
    "an unknown architecture": (config(model_type="bananas"), "does not know this architecture"),
    "an unknown scaling": (config(rope_parameters=DYNAMIC), "dynamic"),
    "an unknown activation": (config(hidden_act="quick_gelu"), "quick_gelu"),
    "quantized weights": (config(quantization_config={"bits": 4}), "the weights are quantized"),
    "contradictory heads": (config(num_key_value_heads=3), "n_kv_heads must divide model.n_heads"),
    "a size that is a text": (config(hidden_size="many"), "transformers refuses this config.json"),
    "a list as rope": (config(rope_parameters=[1]), "transformers refuses this config.json"),
    "another size": (config(intermediate_size=64), "of different sizes"),
    "another depth": (config(num_hidden_layers=5), "the weights lack tensors"),
    "fewer layers": (config(num_hidden_layers=3), "model.layers.3."),
    "a bias that is not there": (config(attention_bias=True), "the weights lack tensors"),
    "fewer rows than tokens": (config(vocab_size=100), "of different sizes"),
    "weights cut off": (truncated, "cannot be read as safetensors"),
    "a pickle instead of weights": (pickled, "pickled weights are not read"),
    "a pickle under their name": (file(WEIGHTS, pickle.dumps({})), "cannot be read as safetensors"),
    "no tokenizer": (file("tokenizer.json"), "no tokenizer"),
    "a broken tokenizer": (file("tokenizer.json", b"{"), "tokenizer.json"),
    "a broken config": (file("config.json", b"{"), "config.json cannot be read"),
    "no config": (file("config.json"), "config.json cannot be read"),
    "a NaN": (
        weights(lambda name, w: w * float("nan") if name == "model.norm.weight" else w),
        "model.norm.weight has NaN",
    ),
    "an infinity": (weights(lambda name, w: w / 0 if "layers.2.mlp.up" in name else w), "has NaN or infinite values"),
    "whole numbers": (weights(lambda name, w: (100 * w).to(torch.int8)), "is int8"),
    "one matrix of whole numbers": (weights(lambda name, w: (9 * w).int() if "k_proj" in name else w), "is int32"),
    "eight-bit floats": (
        weights(lambda name, w: w.to(torch.float8_e4m3fn) if "q_proj" in name else w),
        "is float8_e4m3fn",
    ),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_directory_that_cannot_be_expressed_or_read_or_is_not_of_one_model_is_refused(case, copied, capsys):
    damage, reason = DAMAGES[case]
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
    (table,) = compare("runs/imported", baseline=arms[0], allow=["tokens"]).tables
    assert table.rows[1].word in (TOO_FEW_SEEDS, NOT_COMPARABLE)


# ------------------------------------------------------------------------------------------------------------- weights


def loss() -> float:
    (path,) = find_runs([Path("runs/imported")])
    return read_run(path).summary["val_loss"]


def sharded(folder: Path, stale: bool) -> None:
    """Two files with an index; `stale`: the second also has an old copy of a tensor that the index has in the first."""
    state = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(state)
    files = {"a.safetensors": names[:12], "b.safetensors": names[12:]}
    index = {name: file for file, there in files.items() for name in there}
    for file, there in files.items():
        kept = {name: state[name] for name in there}
        if stale and file == "b.safetensors":
            kept[names[0]] = 3 * torch.randn_like(state[names[0]])
        save_file(kept, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def test_the_index_says_which_file_a_tensor_is_read_from(copied):
    imported()
    expected = loss()
    for stale in (False, True):
        shutil.rmtree("runs")
        shutil.copytree(copied, Path("whole"), dirs_exist_ok=True)
        sharded(Path("whole"), stale)
        assert main(["import", "whole", *QUICK]) == 0
        assert loss() == expected
        shutil.rmtree("whole")


@pytest.mark.parametrize("type_", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_any_float_are_read(type_, copied):
    weights(lambda name, w: w.to(type_))(copied)
    assert imported()


def test_the_figures_of_the_proof_are_printed_and_recorded(copied, capsys):
    path = imported()
    printed = capsys.readouterr().out
    saved_figures = json.loads((path / "env.json").read_text())["imported"]
    assert "a small model's logits differ" in printed and "logits over 24 tokens differ" in printed
    assert saved_figures["structure"]["difference"] < 1e-9 == saved_figures["structure"]["allowed"]
    assert 0 < saved_figures["weights"]["difference"] < saved_figures["weights"]["allowed"] < 1e-3


def test_weights_that_give_other_logits_than_the_library_are_refused_with_the_block(copied, capsys, monkeypatch):
    from nexus_ablate.pretrained.names import Tensors

    whole = Tensors.tensor

    def off(self, name):
        tensor = whole(self, name)
        return tensor * 1.01 if name == "blocks.2.ffn.up.weight" and tensor.dtype == torch.float32 else tensor

    monkeypatch.setattr(Tensors, "tensor", off)
    said = refusal(capsys, "import", "model", *QUICK)
    assert "the weights do not give the logits of transformers" in said and "first in block 2" in said


def test_a_structure_that_differs_is_refused_with_the_figure_and_the_block(copied, capsys):
    saved("gpt2")
    config(scale_attn_by_inverse_layer_idx=True)(Path("model"))
    capsys.readouterr()
    said = refusal(capsys, "import", "model", *QUICK)
    assert "first in block 1" in said and "1.0e-09 are allowed" in said


def test_a_key_without_effect_is_accepted_whatever_its_name(copied):
    config(attention_bananas=3, use_cache=False)(copied)
    assert imported()


@pytest.mark.parametrize(
    "change",
    ("position.theta=7", "attn_softcap=1", "attn_scale=1", "logit_scale=2", "final_softcap=1", "final_norm=off"),
)
def test_a_change_of_the_architecture_is_refused_at_the_import(copied, capsys, change):
    said = refusal(capsys, "import", "model", *QUICK, change)
    assert "another architecture" in said and change in said


# ------------------------------------------------------------------------------------------ measures of the library


def nats(library: torch.nn.Module, windows) -> torch.Tensor:
    """The library's loss on each target of the windows."""
    rows = torch.as_tensor(windows)
    with torch.no_grad():
        logits = library(input_ids=rows[:, :-1], use_cache=False).logits.float()
    return torch.nn.functional.cross_entropy(logits.mT, rows[:, 1:], reduction="none").double()


@pytest.mark.slow
@pytest.mark.parametrize("name", IMPORTED)
def test_losses_and_samples_are_the_librarys(name, capsys, monkeypatch):
    library = saved(name)
    path = imported()
    assert main(["evaluate", str(path), "--evals", "extrapolation"]) == 0
    run = read_run(path)
    summary, (config, data, _) = run.summary, restore(run)
    losses = summary["extrapolation"]["non_overlapping"]
    assert ("2" in losses) == (name not in {"gpt2", "opt"}) and losses["1"] == pytest.approx(summary["val_loss"])
    for factor, loss in losses.items():
        windows = eval_windows(data.val["val"], config.model.context, config.train.eval_tokens, 1, int(factor))
        assert loss == pytest.approx(float(nats(library, windows).mean()), rel=0, abs=1e-5)
    tokens = torch.tensor(byte_tokenizer().encode("to be").ids)
    draws = torch.Generator().manual_seed(1)
    for _ in range(5):
        with torch.no_grad():
            logits_V = library(input_ids=tokens[None], use_cache=False).logits[0, -1, : data.vocab_size].float()
        tokens = torch.cat((tokens, torch.multinomial(logits_V.softmax(0), 1, generator=draws)))
    capsys.readouterr()
    monkeypatch.setattr("nexus_ablate.cli.sample.TOKENS", 5)
    assert main(["sample", str(path), "--prompt", "to be"]) == 0
    shown = escaped(byte_tokenizer().decode(tokens.tolist()), kept="\n\t")
    assert capsys.readouterr().out.rstrip("\n") == shown.rstrip("\n")

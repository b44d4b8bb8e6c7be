"""Corpora, tokenizers and the token cache: what is refused, what is identical, what is never trusted."""

from __future__ import annotations

import codecs
import errno
import functools
import gzip
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nexus_ablate.cli import main
from nexus_ablate.config.compose import compose
from nexus_ablate.config.options import Option, check_option, option_files
from nexus_ablate.data import cache, corpus, fingerprint_of, hub, load_tokenizer, prepare, repeated_text
from nexus_ablate.data.tables import column_texts
from nexus_ablate.data.tokenizer import (
    _PROBES,
    BpeTokenizer,
    ByteTokenizer,
    CharTokenizer,
    FileTokenizer,
    parse_tokenizer,
)
from nexus_ablate.errors import ConfigError, StorageError

TEXT = "".join(f"Line {i}: naïve 漢字 🙂, the quick brown fox.\n" for i in range(60))
ODD = "tabs\tand  spaces\r\n\n<|endoftext|> é e\u0301 漢字 🙂🏽 \x01 end "


def option(name: str, **keys: Any) -> Option:
    defaults = {key: spec.default for key, spec in option_files("data")[name].keys.items()}
    return check_option("data", {"name": name, **defaults, **keys})


def files(*paths: Path, **keys: Any) -> Option:
    return option("files", files=[str(path) for path in paths], **keys)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def text_of(data: cache.TokenizedData, tokens: np.ndarray) -> str:
    return data.tokenizer.decode(tokens)


def refusal(chosen: Option, **arguments: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        fingerprint_of(chosen, **arguments)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------------------- contract


DRAWN = """
import json
import numpy as np
from nexus_ablate.data import BackCopyCorpus, Batches, RecallCorpus
from nexus_ablate.data.corpus import StdlibCorpus
from nexus_ablate.data.tokenizer import BpeTokenizer
recall = RecallCorpus(pairs=4, power=0.01, filler="blank", symbols=32, length=32, sequences=64, score="answers")
copies = BackCopyCorpus(symbols=8, triggers=2, length=16, sequences=64, chain=0)
text = "".join(f"Line {i}: naïve 漢字 🙂, the quick brown fox.\\n" for i in range(60))
print(json.dumps({
    "the standard library": StdlibCorpus().fingerprint(),
    "merges": BpeTokenizer.train(iter([text]), 400).to_json(),
    "a batch": Batches(np.arange(1000), 3, 4, 8).batch(7).tolist(),
    "recall": recall.draw("val", 3).tolist(),
    "copies": copies.draw("val", 3).tolist(),
}))
"""


def test_every_process_reads_draws_and_merges_the_same():
    shown = set()
    for seed in "17":
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", DRAWN]
        shown.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert len(shown) == 1 and json.loads(shown.pop())["the standard library"] == corpus.StdlibCorpus().fingerprint()


# ---------------------------------------------------------------------------------------------------------------- files


def test_one_file_is_cut_where_nanogpt_cuts_it(text_file: Path, tmp_path: Path):
    data = prepare(files(text_file), tmp_path / "cache", context=8)
    cut = int(len(TEXT) * 0.9)
    assert text_of(data, data.train) == TEXT[:cut]
    assert text_of(data, data.val["val"]) == TEXT[cut:]


def test_several_files_are_cut_once_and_joined_by_one_newline(tmp_path: Path):
    texts = ["a" * 70, "b" * 20, "c" * 10]
    for text in texts:
        (tmp_path / text[0]).write_text(text)
    data = prepare(files(*(tmp_path / text[0] for text in texts), val_fraction=0.2), tmp_path / "cache", context=8)
    assert text_of(data, data.train) == "a" * 70 + "\n" + "b" * 10
    assert text_of(data, data.val["val"]) == "b" * 10 + "\n" + "c" * 10


@pytest.mark.parametrize(
    ("keys", "problem", "fix"),
    [
        ({"files": []}, "data=files needs at least one file", ""),
        ({"files": ["{}/txet.txt"]}, "data.files names a file that does not exist", "try: {}/text.txt"),
        ({"files": ["{}"]}, "this is a directory", "data.files=[{}/text.txt]"),
        ({"files": ["{}/text.txt", "{}/./text.txt"]}, "names a file twice", ""),  # it would validate on itself
        ({"files": ["{}/text.txt"], "tokenizer": "byte"}, "", "try: bytes"),
    ],
)
def test_what_names_no_text_is_refused_with_what_was_meant(text_file: Path, keys: Any, problem: str, fix: str):
    folder = str(text_file.parent)
    message = refusal(option("files", **keys | {"files": [name.replace("{}", folder) for name in keys["files"]]}))
    assert problem in message and fix.replace("{}", folder) in message


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "empty file"), (b"text\0text" * 100, "binary"), (b"caf\xe9 " * 100, "UTF-8"), (b"short", "too short")],
)
def test_an_unusable_file_is_refused_before_anything_is_written(tmp_path: Path, content: bytes, reason: str):
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    message = refusal(files(path))
    assert "data.files" in message and reason in message and str(path) in message
    with pytest.raises(ConfigError, match=reason):
        prepare(files(path), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


DOCUMENTS = ["One document\nof two lines, with a comma", "NA", "1.0", '{"text": "not parsed"}', "naïve \u2028 end"]


def write_table(path: Path, documents: list[str]) -> Path:
    import pandas as pd

    table = pd.DataFrame({"id": range(len(documents)), "text": documents})
    if path.suffix.lower() == ".parquet":
        table.to_parquet(path)
    elif path.suffix.lower() in JSON:
        table.to_json(path, orient="records", lines=path.suffix != ".json")
    else:
        table.to_csv(path, index=False, sep="\t" if path.suffix.lower() == ".tsv" else ",")
    return path


JSON = (".json", ".jsonl", ".ndjson")
TABLES = (".parquet", ".csv", ".tsv", *JSON)


@pytest.mark.parametrize("suffix", [*TABLES, ".PARQUET"])
def test_a_table_is_read_by_its_text_column_and_never_as_raw_text(tmp_path: Path, suffix: str):
    path = write_table(tmp_path / f"mine{suffix}", DOCUMENTS * 30)
    data = prepare(option("files", files=[str(path)]), tmp_path / "cache")
    assert text_of(data, data.train).startswith("\n".join(DOCUMENTS))


def test_missing_cells_of_a_column_are_left_out_whatever_stands_for_them(tmp_path: Path):
    import pandas as pd

    path, texts = tmp_path / "mine.parquet", ["one", None, "two"]
    for cells in (pd.array(texts, dtype="string"), pd.Series(texts, dtype=object)):
        pd.DataFrame({"text": cells}).to_parquet(path)
        assert column_texts(path, "text") == ["one", "two"]


@pytest.mark.parametrize("suffix", JSON)
def test_half_of_a_surrogate_pair_in_json_is_read_as_the_replacement_character(tmp_path: Path, suffix: str):
    row = r'{"text": "cut \ud83d, whole \ud83d\ude42, \\ud83d \ude42"}'
    path = tmp_path / f"mine{suffix}"
    path.write_text(f"[{row}]" if suffix == ".json" else f"{row}\n")
    assert column_texts(path, "text") == ["cut \ufffd, whole 🙂, \\ud83d \ufffd"]


def test_a_column_of_lists_is_refused_as_no_text(tmp_path: Path):
    import pandas as pd

    path = tmp_path / "chat.parquet"
    pd.DataFrame({"messages": [[{"role": "user"}, {"role": "assistant"}]]}).to_parquet(path)
    assert "data.column holds no text" in refusal(files(path, column="messages"))


REFUSED = [
    *((suffix, "txet", None, "try: data.column=text") for suffix in TABLES),
    *((suffix, "text", b"\x00\xff\x00", "cannot be read as") for suffix in TABLES),
    *(
        (suffix, "id", None, "data.column holds no text") for suffix in (".parquet", *JSON)
    ),  # every cell of the others is text
    (".csv", "text", b"text\nHello, world\nNo comma\n", "more fields than the header"),
    (".csv", "text", b"text,label\nsome words,0,\nothers,1,\n", "more fields than the header"),
    *((suffix, "text", b'["a", "b"]\n', "no object such as") for suffix in JSON),
    (".json", "text", b'{\n "text": "one object over lines"\n}', "try: a list of objects such as"),
    (".jsonl", "text", b"", "mine.jsonl has no rows"),
]


@pytest.mark.parametrize(("suffix", "column", "content", "words"), REFUSED)
def test_a_table_without_the_column_or_damaged_is_refused(
    tmp_path: Path, suffix: str, column: str, content: bytes | None, words: str
):
    path = write_table(tmp_path / f"mine{suffix}", DOCUMENTS)
    if content is not None:
        path.write_bytes(content)
    assert words in refusal(option("files", files=[str(path)], column=column))


@pytest.mark.parametrize("suffix", [".txt", ".csv", ".jsonl", ".json"])
def test_a_byte_order_mark_at_the_start_of_a_file_is_no_text(tmp_path: Path, suffix: str):
    path = tmp_path / f"plain{suffix}"
    path.write_text(TEXT) if suffix == ".txt" else write_table(path, DOCUMENTS * 30)
    marked, chosen = path.with_stem("marked"), {"tokenizer": "char"}
    marked.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    assert fingerprint_of(files(marked, **chosen)) == fingerprint_of(files(path, **chosen))
    inside = path.with_stem("inside")
    inside.write_bytes(path.read_bytes().replace(b"o", codecs.BOM_UTF8 + b"o"))
    assert fingerprint_of(files(inside, **chosen)) != fingerprint_of(files(path, **chosen))


@pytest.mark.parametrize("suffix", [".txt", ".csv", ".jsonl"])
@pytest.mark.parametrize(
    ("encode", "kind", "command"),
    [
        (gzip.compress, "gzip", "gunzip -k"),
        (lambda text: text.decode().encode("utf-16"), "UTF-16", "iconv"),
        (lambda text: codecs.BOM_UTF16_BE + text.decode().encode("utf-16-be"), "UTF-16", "iconv"),
    ],
)
def test_the_command_that_is_suggested_makes_a_compressed_or_encoded_file_readable(
    tmp_path: Path, suffix: str, encode: Callable[[bytes], bytes], kind: str, command: str
):
    plain = tmp_path / f"my text{suffix}"
    plain.write_text(TEXT, encoding="utf-8") if suffix == ".txt" else write_table(plain, DOCUMENTS * 30)
    encoded = plain.with_name(f"{plain.name}.gz" if kind == "gzip" else f"encoded{suffix}")
    expected = fingerprint_of(files(plain))
    encoded.write_bytes(encode(plain.read_bytes()))
    plain.unlink()
    before, message = set(tmp_path.iterdir()), refusal(files(encoded))
    assert f"this file is {kind}" in message and message.count("\n") == 2
    fix = message.partition("try: ")[2]
    assert fix.startswith(command)
    subprocess.run(fix, shell=True, check=True)
    (made,) = set(tmp_path.iterdir()) - before
    assert fingerprint_of(files(made)) == expected


def test_text_must_hold_two_tokens_more_than_a_sequence(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("x" * 100)  # 10 of them are validation
    assert fingerprint_of(files(path), context=8)
    message = refusal(files(path), context=9)
    assert "10 bytes of validation text, at least 11 tokens needed" in message


def test_text_that_is_too_short_only_in_its_own_tokens_is_refused_with_their_number(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("the same words " * 100)
    chosen = files(path, tokenizer="bpe", bpe_vocab=300)
    fingerprint_of(chosen, context=64)
    with pytest.raises(ConfigError, match=r"data=files is too short: \d+ tokens in val, 66 needed"):
        prepare(chosen, tmp_path / "cache", context=64)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_made_for_short_sequences_is_refused_for_long_ones(text_file: Path, tmp_path: Path):
    chosen = files(text_file, tokenizer="char")
    long = len(TEXT[int(len(TEXT) * 0.9) :])
    prepare(chosen, tmp_path / "cache", context=8)
    with pytest.raises(ConfigError, match=f"{long} tokens in val, {long + 2} needed"):
        prepare(chosen, tmp_path / "cache", context=long)


def test_the_fingerprint_is_of_the_content_the_split_and_the_tokenizer_not_of_the_name(text_file: Path):
    same = text_file.with_name("copy.txt")
    same.write_text(TEXT, encoding="utf-8")
    base = fingerprint_of(files(text_file))
    assert fingerprint_of(files(same)) == base
    assert fingerprint_of(files(text_file, bpe_vocab=300)) == base  # only bpe reads it
    bpe = fingerprint_of(files(text_file, tokenizer="bpe"))
    others = [
        fingerprint_of(files(text_file, val_fraction=0.2)),
        fingerprint_of(files(text_file, tokenizer="char")),
        bpe,
        fingerprint_of(files(text_file, tokenizer="bpe", bpe_vocab=300)),
    ]
    same.write_text(TEXT + "x", encoding="utf-8")
    others.append(fingerprint_of(files(same)))
    assert len({base, *others}) == 6


def test_two_files_are_not_the_fingerprint_of_their_concatenation(tmp_path: Path):
    for name, text in (("a", "x" * 200), ("b", "y" * 200), ("ab", "x" * 200 + "y" * 200)):
        (tmp_path / name).write_text(text)
    assert fingerprint_of(files(tmp_path / "a", tmp_path / "b"), 8) != fingerprint_of(files(tmp_path / "ab"), 8)


LINES = [f"Line {i} of a text in which no line comes twice." for i in range(400)]


def write_texts(folder: Path, texts: dict[str, list[str]]) -> list[Path]:
    """Files of documents by their names: a table of them, or their lines."""
    for name, documents in texts.items():
        path = folder / name
        write_table(path, documents) if path.suffix == ".jsonl" else path.write_text("\n".join(documents))
    return [folder / name for name in texts]


@pytest.mark.parametrize(
    ("texts", "share"),
    [
        ({"a.txt": LINES, "copy.txt": LINES}, 1),
        ({"a.jsonl": LINES}, 0),
        ({"a.jsonl": LINES * 2}, 1),
        ({"a.jsonl": [f"{i}: a short row" for i in range(99)] * 2}, 1),
        ({"a.txt": [" ".join(LINES)]}, 0),
        ({"a.txt": [" ".join(LINES)], "copy.txt": [" ".join(LINES)]}, 1),
    ],
)
def test_the_share_of_validation_text_that_stands_in_the_training_text_is_known_before_and_after_it_is_tokenized(
    tmp_path, monkeypatch, texts, share
):
    monkeypatch.setenv("NEXUS_ABLATE_CACHE", str(tmp_path / "cache"))
    chosen = files(*write_texts(tmp_path, texts), val_fraction=0.1)
    shares = [repeated_text(chosen, 16), prepare(chosen, context=16).repeated, repeated_text(chosen, 16)]
    assert shares == pytest.approx([share] * 3, abs=0.04)


@pytest.mark.parametrize(
    ("texts", "share"),
    [
        ({"a.txt": LINES}, 0),
        ({"a.txt": LINES, "b.txt": [*LINES[:10], *(f"Then {line}" for line in LINES[:30])]}, 0.22),
    ],
)
def test_a_run_and_explain_warn_of_validation_text_that_stands_in_the_training_text(tmp_path, capsys, texts, share):
    paths = ",".join(map(str, write_texts(tmp_path, texts)))
    chosen = ["data=files", f"data.files=[{paths}]", "data.val_fraction=0.1"]
    tiny = ["model=femto", "model.n_layers=1", "model.context=16", "train.steps=1", "probe=off", "tracker=files"]
    for verb in (["explain"], ["train"], ["explain"]):  # before and after the text is tokenized
        assert main([*verb, *tiny, *chosen, f"runs_dir={tmp_path}/runs"]) == 0
        shown = " ".join("".join(capsys.readouterr()).split())
        warned = re.search(r"(\d+)% of the validation text also stands in the training text", shown)
        assert int(warned[1]) == pytest.approx(100 * share, abs=3) if warned else share == 0


# --------------------------------------------------------------------------------------------------------------- stdlib


def test_the_standard_library_shares_no_file_between_training_and_validation():
    source: Any = corpus.StdlibCorpus()
    train, val = list(source.train_texts()), list(source.val_texts())
    assert not set(map(hash, train)) & set(map(hash, val))
    share = sum(map(len, val)) / sum(map(len, train))
    assert 0.02 < share < 0.1 and sum(map(len, train)) > 5_000_000
    names = {path.name for path in source._paths}
    assert {"ast.py", "__init__.py"} <= names and not any("test" in path.parts for path in source._paths)
    assert sum(map(len, source.extra_val()["prose"])) > 100_000


def test_an_interpreter_without_sources_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(corpus.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert "no source of the standard library" in refusal(option("stdlib"))


def test_prose_is_a_second_validation_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    source: Any = corpus.StdlibCorpus()
    monkeypatch.setattr(corpus.StdlibCorpus, "_paths", source._paths[::12])
    data = prepare(option("stdlib", tokenizer="char"), tmp_path)  # prose brings characters of its own
    assert list(data.val) == ["val", "prose"]
    assert "".join(source.extra_val()["prose"])[:200] in text_of(data, data.val["prose"][:1000])


# ------------------------------------------------------------------------------------------------------------------ hub


@pytest.fixture
def parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import datasets.config
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "parquet"
    folder.mkdir()
    documents = [f"Document {i} says {i * i} things.\nAnd ends." for i in range(400)]
    for split, texts in (
        ("train-0", [*documents[:200], None, ""]),
        ("train-1", documents[200:]),
        ("validation", TEXT[:999]),
    ):
        rows = list(texts) if isinstance(texts, list) else [texts]
        pq.write_table(pa.table({"text": rows, "id": list(range(len(rows)))}), folder / f"{split}.parquet")
    return folder


@pytest.mark.parametrize("val_split", ["validation", "none"])
def test_streaming_and_in_memory_give_the_same_tokens(
    parquet: Path, tmp_path: Path, val_split: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hub, "VAL_CHARACTERS", 1000)
    chosen = [option("hub", path=str(parquet), val_split=val_split, streaming=on) for on in (False, True)]
    memory, stream = (prepare(each, tmp_path / f"cache{i}") for i, each in enumerate(chosen))
    assert memory.fingerprint == stream.fingerprint
    np.testing.assert_array_equal(memory.train, stream.train)
    np.testing.assert_array_equal(memory.val["val"], stream.val["val"])
    train, val = text_of(memory, memory.train), text_of(memory, memory.val["val"])
    assert train.endswith("Document 399 says 159201 things.\nAnd ends.") and "\n\n" not in train
    if val_split == "none":
        assert val.startswith("Document 0 ") and 1000 <= len(val) < 1100
        last = val.count("Document")
        assert train.startswith(f"Document {last} ")  # training begins where validation ended
    else:
        assert val == TEXT[:999] and train.startswith("Document 0 ")


@pytest.mark.parametrize("tokenizer", ["bytes", "char", "bpe"])
def test_a_token_limit_keeps_exactly_the_prefix(parquet: Path, tmp_path: Path, tokenizer: str):
    keys = {
        "path": str(parquet),
        "val_split": "validation",
        "streaming": True,
        "tokenizer": tokenizer,
        "bpe_vocab": 300,
    }
    whole = prepare(option("hub", **keys), tmp_path / "a")
    part = prepare(option("hub", **keys, token_limit=1234), tmp_path / "a")
    assert len(part.train) == 1234 and part.fingerprint != whole.fingerprint
    start = text_of(part, part.train)
    assert text_of(whole, whole.train[: 2 * len(part.train)]).startswith(start)


def test_text_behind_a_token_limit_may_hold_characters_that_the_vocabulary_lacks(tmp_path: Path):
    write_table(tmp_path / "train.parquet", ["plain text"] * 200 + ["caf\u00e9"])
    write_table(tmp_path / "validation.parquet", ["plain text"] * 20)
    keys = {"path": str(tmp_path), "val_split": "validation", "tokenizer": "char", "token_limit": 999}
    assert len(prepare(option("hub", **keys), tmp_path / "cache").train) == 999


def test_a_data_set_s_tokens_come_with_the_share_of_validation_that_training_repeats(parquet: Path, tmp_path: Path):
    chosen = option("hub", path=str(parquet), val_split="validation")
    assert prepare(chosen, tmp_path / "cache").repeated == 0
    write_table(parquet / "train-2.parquet", [TEXT])
    assert prepare(chosen, tmp_path / "cache").repeated > 0.9


def test_a_local_directory_is_known_by_its_content_not_by_its_place(parquet: Path, tmp_path: Path):
    before = fingerprint_of(option("hub", path=str(parquet)))
    moved = parquet.rename(tmp_path / "moved")
    assert fingerprint_of(option("hub", path=str(moved))) == before
    (moved / "validation.parquet").write_bytes(b"other")
    assert fingerprint_of(option("hub", path=str(moved))) != before


def test_a_directory_named_like_a_reader_of_datasets_is_read_alone(parquet: Path, tmp_path: Path, monkeypatch):
    """`datasets` takes the word `parquet` for its own reader, and would read the whole working directory."""
    (tmp_path / "other").mkdir()
    write_table(tmp_path / "other" / "train.parquet", ["zzz"] * 99)
    monkeypatch.chdir(tmp_path)
    texts = [
        text_of(data, data.train)
        for path in ("parquet", str(parquet))
        for data in [prepare(option("hub", path=path, val_split="validation"), tmp_path / f"cache-{path[:1] == '/'}")]
    ]
    assert texts[0] == texts[1] and "zzz" not in texts[0]


@pytest.mark.parametrize("streaming", [False, True])
def test_files_replaced_with_the_same_modification_time_are_read_again(parquet: Path, tmp_path: Path, streaming: bool):
    for number, word in enumerate(("apple", "grape")):
        for split in ("train-0", "train-1", "validation"):
            path = write_table(parquet / f"{split}.parquet", [f"document {i} has the word {word}" for i in range(99)])
            os.utime(path, (1.7e9, 1.7e9))
        chosen = option("hub", path=str(parquet), val_split="validation", streaming=streaming)
        data = prepare(chosen, tmp_path / f"cache{number}")
        assert text_of(data, data.train).count(word) == 198


@pytest.mark.parametrize("streaming", [False, True])
def test_shards_may_have_no_rows_or_other_columns_besides_the_text(parquet: Path, tmp_path: Path, streaming: bool):
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as pq

    chosen = option("hub", path=str(parquet), val_split="validation", streaming=streaming)
    before = prepare(chosen, tmp_path / "before")
    (parquet / "dataset_infos.json").write_text("{}")  # describes the shards and is none
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), parquet / "train-2.parquet")
    pd.DataFrame({"text": ["the last"], "url": ["x"]}).to_parquet(parquet / "train-3.parquet")
    after = prepare(chosen, tmp_path / "after")
    assert text_of(after, after.train) == text_of(before, before.train) + "\nthe last"
    pd.DataFrame({"body": ["no text"]}).to_parquet(parquet / "train-4.parquet")
    with pytest.raises(ConfigError, match=r"train-4.parquet has no column text, but body"):
        prepare(chosen, tmp_path / "refused")


def test_a_hub_data_set_is_known_by_name_revision_and_limit_without_the_network():
    base = fingerprint_of(option("tinystories"))
    assert fingerprint_of(option("tinystories", streaming=True)) == base
    changes = (
        {"revision": "abc"},
        {"token_limit": 9},
        {"split": "train[:1%]"},
        {"column": "x"},
        {"config": "y"},
    )
    assert len({base, *(fingerprint_of(option("tinystories", **change)) for change in changes)}) == 6


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"column": "txet"}, "try: data.column=text"),
        ({"column": "id"}, "data.column holds no text"),
        ({"split": "trian"}, "check data.config, data.split"),
        ({"config": "nope"}, "check data.config, data.split"),
        ({"val_split": "none"}, "shorter than the 1000000 characters of validation"),
    ],
)
def test_what_a_data_set_lacks_is_refused(
    parquet: Path, tmp_path: Path, streaming: bool, keys: dict[str, str], words: str
):
    chosen = option("hub", **{"path": str(parquet), "val_split": "validation", "streaming": streaming, **keys})
    with pytest.raises(ConfigError) as caught:
        prepare(chosen, tmp_path / "cache")
    assert words in str(caught.value) and list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "data=hub needs a data set"),
        ({"path": "./nowhere"}, "data.path is not a directory"),
        ({"path": "owner/name", "val_split": "train"}, "would validate on the training text"),
        ({"path": "owner/name", "val_split": "train[90%:]"}, "would validate on the training text"),
    ],
)
def test_a_hub_option_that_cannot_be_meant_is_refused_without_the_network(keys: dict[str, str], words: str):
    assert words in refusal(option("hub", **keys))


@pytest.mark.parametrize(
    ("split", "other", "overlap"),
    [
        ("train", "test", False),
        ("train[:90%]", "train[90%:]", False),
        ("train[:90%]", "train", True),
        ("train[:90%]", "train[:90%]", True),
        ("train[:90%]+extra", "train[90%:]+extra[:5]", True),
    ],
)
def test_a_split_is_refused_beside_all_of_what_it_is_cut_from(split, other, overlap):
    assert hub.may_overlap(split, other) == hub.may_overlap(other, split) == overlap


def test_the_splits_that_are_suggested_can_be_typed():
    message = refusal(option("hub", path="owner/name", val_split="train"))
    splits = shlex.split(message.partition("try: ")[2].partition(", another")[0])
    chosen = compose(["data=hub", "data.path=owner/name", *splits]).data.keys
    assert (chosen["split"], chosen["val_split"]) == ("train[:90%]", "train[90%:]")


def test_an_empty_directory_is_refused(tmp_path: Path):
    assert "data.path holds no files" in refusal(option("hub", path=str(tmp_path)))


def test_an_unreachable_hub_is_a_refusal_within_seconds_that_leaves_nothing(tmp_path: Path):
    code = f"""if True:
        from pathlib import Path
        from nexus_ablate.data import prepare
        from nexus_ablate.errors import ConfigError
        from nexus_ablate.config.options import Option, option_files
        keys = {{k: s.default for k, s in option_files("data")["tinystories"].keys.items()}}
        try:
            prepare(Option("tinystories", keys), Path({str(tmp_path / "cache")!r}))
        except ConfigError as error:
            print(error)"""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=30)
    assert "data.path=roneneldan/TinyStories cannot be read" in run.stdout, run.stderr
    assert "check the network" in run.stdout
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_full_disk_under_the_download_is_a_storage_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("datasets.load_dataset", full)
    with pytest.raises(StorageError, match="download"):
        prepare(option("tinystories"), tmp_path)


def test_a_data_set_is_asked_for_as_configured_and_its_code_is_never_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    import datasets

    requests = []

    def load(path: str, **keys: object) -> datasets.Dataset:
        requests.append({"path": path, **keys})
        return datasets.Dataset.from_dict({"text": [TEXT]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    prepare(option("wikitext103", revision="abc"), tmp_path)
    common = {"path": "Salesforce/wikitext", "name": "wikitext-103-raw-v1", "revision": "abc", "streaming": False}
    assert [request.pop("split") for request in requests] == ["validation", "train"] and requests == [common] * 2


# ----------------------------------------------------------------------------------------------------------- tokenizers


@functools.cache
def tokenizers() -> dict[str, Any]:
    return {
        "bytes": ByteTokenizer(),
        "char": CharTokenizer.train([[TEXT + ODD]]),
        "bpe": BpeTokenizer.train(iter([TEXT, ODD]), 400),
    }


@pytest.mark.parametrize("kind", ["bytes", "char", "bpe"])
def test_every_tokenizer_gives_text_back_and_counts_its_bytes_exactly(kind: str, tmp_path: Path):
    tokenizer = tokenizers()[kind]
    for text in (TEXT, ODD, " "):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.token_bytes[ids].sum() == len(text.encode())
        assert ids.max() < tokenizer.vocab_size == len(tokenizer.token_bytes)
    assert tokenizer.token_bytes.dtype == np.float64 and tokenizer.token_bytes[tokenizer.separator].tolist() == [1.0]


@pytest.mark.parametrize("kind", ["bytes", "char", "bpe"])
def test_a_saved_tokenizer_is_loaded_as_it_was(kind: str, tmp_path: Path):
    tokenizer = tokenizers()[kind]
    tokenizer.save(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = load_tokenizer(path)
        np.testing.assert_array_equal(loaded.encode(TEXT + ODD), tokenizer.encode(TEXT + ODD))
        np.testing.assert_array_equal(loaded.token_bytes, tokenizer.token_bytes)
        np.testing.assert_array_equal(loaded.separator, tokenizer.separator)
        assert loaded.vocab_size == tokenizer.vocab_size


def test_characters_are_numbered_as_in_nanogpt():
    tokenizer = CharTokenizer.train([["hello"], ["world"]])
    assert tokenizer.decode(range(tokenizer.vocab_size)) == "".join(sorted(set("helloworld")))
    with pytest.raises(ConfigError, match="not in the tokenizer's vocabulary"):
        tokenizer.encode("help!")


def test_bpe_separates_documents_and_reads_the_separators_name_as_text(tmp_path: Path):
    for name in "ab":
        (tmp_path / name).write_text(f"<|endoftext|> {name} " * 30)
    chosen = files(tmp_path / "a", tmp_path / "b", tokenizer="bpe", bpe_vocab=300, val_fraction=0.25)
    data = prepare(chosen, tmp_path / "cache", context=8)
    end = int(data.tokenizer.separator[0])
    assert (np.asarray(data.train) == end).sum() == 1 and (np.asarray(data.val["val"]) == end).sum() == 0


def test_bpe_encodes_a_long_text_in_pieces_with_the_ids_of_the_whole(monkeypatch: pytest.MonkeyPatch):
    tokenizer = BpeTokenizer.train(iter([TEXT, ODD]), 400)
    marks = [
        " ",
        "  ",
        "   ",
        "\n",
        " \n",
        "\n\n",
        "\r\n",
        "\t",
        "\u00a0",
        "\u2028",
        "\x1c",
        "'s",
        "'ll",
        "a",
        "É",
        "e\u0301",
    ]
    marks += ["the", "1", "12", "²", "٣", ",", "...", "_", "漢", "🙂", "🏽", "\u200b", "<|endoftext|>"]
    drawn = np.random.default_rng(0).choice(marks, 20_000)
    text, whole = "".join(drawn) + TEXT + ODD, FileTokenizer.encode
    expected, pieces = whole(tokenizer, text), []
    monkeypatch.setattr(FileTokenizer, "encode", lambda self, text: pieces.append(text) or whole(self, text))
    monkeypatch.setattr("nexus_ablate.data.tokenizer._PIECE_CHARACTERS", 10)
    np.testing.assert_array_equal(tokenizer.encode(text), expected)
    assert len(pieces) > 500 and "".join(pieces) == text
    assert tokenizer.encode("").tolist() == []


def test_a_tokenizer_file_is_used_and_known_by_its_content(text_file: Path, tmp_path: Path):
    tokenizers()["bpe"].save(tmp_path)
    chosen = files(text_file, tokenizer=str(tmp_path / "tokenizer.json"))
    data = prepare(chosen, tmp_path / "cache", context=8)
    assert data.vocab_size == tokenizers()["bpe"].vocab_size and TEXT.startswith(text_of(data, data.train))
    before = fingerprint_of(chosen)
    BpeTokenizer.train(iter([TEXT]), 300).save(tmp_path)
    assert fingerprint_of(chosen) != before == data.fingerprint


def test_a_tokenizer_with_many_tokens_is_kept_in_four_bytes(text_file: Path, tmp_path: Path):
    source = json.loads(tokenizers()["bpe"].to_json())
    source["model"]["vocab"] |= {f"unused{i}": 1000 + i for i in range(70_000)}
    (tmp_path / "tokenizer.json").write_text(json.dumps(source))
    data = prepare(files(text_file, tokenizer=str(tmp_path)), tmp_path / "cache", context=8)
    assert data.train.dtype == np.uint32 and data.vocab_size == 71_000 and TEXT.startswith(text_of(data, data.train))
    assert prepare(files(text_file), tmp_path / "cache", context=8).train.dtype == np.uint16


def lowercasing() -> str:
    source = json.loads(tokenizers()["bpe"].to_json())
    return json.dumps(source | {"normalizer": {"type": "Lowercase"}})


def without_a_word_for_most_characters() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    characters = sorted(set(_PROBES[0].replace(" ", "▁")))
    backend = Tokenizer(models.BPE({character: i for i, character in enumerate(characters)}, []))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    assert backend.decode(backend.encode(_PROBES[0]).ids) == _PROBES[0]
    return backend.to_str()


def with_a_space_in_front() -> str:
    source = json.loads(tokenizers()["bpe"].to_json())
    source["pre_tokenizer"]["add_prefix_space"] = True
    return json.dumps(source)


@pytest.mark.parametrize("make", [lowercasing, without_a_word_for_most_characters, with_a_space_in_front])
def test_a_tokenizer_that_loses_text_or_hides_its_bytes_is_refused(text_file: Path, make: Callable[[], str]):
    path = text_file.with_name("t.json")
    path.write_text(make())
    assert "does not reproduce the bytes of a text" in refusal(files(text_file, tokenizer=str(path)))


@pytest.mark.parametrize("form", ["NFC", "NFKC"])
def test_a_tokenizer_that_changes_some_characters_refuses_texts_with_them(form: str, tmp_path: Path):
    source = json.loads(tokenizers()["bpe"].to_json()) | {"normalizer": {"type": form}}
    tokenizer = parse_tokenizer(json.dumps(source), "t.json")
    plain = "Caf\u00e9 and na\u00efve, 漢字"
    assert tokenizer.decode(tokenizer.encode(plain)) == plain
    assert tokenizer.token_bytes[tokenizer.encode(plain)].sum() == len(plain.encode())
    with pytest.raises(ConfigError, match="changes this text") as refused:
        tokenizer.encode("plain Cafe\u0301")
    assert "e\u0301' becomes '\u00e9'" in refused.value.got


def byte_fallback(prefix: bool) -> str:
    """A tokenizer as Llama 2's (with a space in front of each text) or Gemma's."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "t", "h", "e", "th", "the", "▁the"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    vocabulary = {word: i for i, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    end = [decoders.Strip(" ", 1, 0)] if prefix else []
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *end]
    backend.decoder = decoders.Sequence(steps)
    return backend.to_str()


@pytest.mark.parametrize("prefix", [True, False])
def test_byte_fallback_gives_text_back_and_counts_the_bytes_of_documents(prefix: bool):
    tokenizer = parse_tokenizer(byte_fallback(prefix), "t.json")
    documents = [TEXT, ODD, "the cat\n", "\n\n", "  the"]
    ids = [tokenizer.encode(text) for text in documents]
    assert [tokenizer.decode(document) for document in ids] == documents
    tokens = np.concatenate([*(part for document in ids for part in (document, tokenizer.separator))])
    joined = sum(len(text.encode()) + 1 for text in documents)
    assert tokenizer.token_bytes[tokens].sum() == joined
    with pytest.raises(ConfigError, match="changes this text"):
        tokenizer.encode("a \u2581 in the text")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("not json", "not a valid tokenizer.json"),
        ("{}", "not a valid tokenizer.json"),
        ('{"type": "char", "characters": ""}', "not a vocabulary of sorted characters"),
        ('{"type": "char", "characters": "ba"}', "not a vocabulary of sorted characters"),
        ('{"type": "char", "characters": "\\ud800"}', "not a vocabulary of sorted characters"),
        (None, "does not exist"),
    ],
)
def test_an_unusable_tokenizer_file_is_refused_at_once(text_file: Path, content: str | None, words: str):
    path = text_file.with_name("t.json")
    if content is not None:
        path.write_text(content)
    message = refusal(files(text_file, tokenizer=str(path)))
    assert words in message and str(path) in message


# ---------------------------------------------------------------------------------------------------------------- cache


def test_the_unigram_score_is_the_one_of_the_definition(text_file: Path, tmp_path: Path):
    data = prepare(files(text_file, tokenizer="char"), tmp_path / "cache", context=8)
    counts = np.bincount(data.train, minlength=data.vocab_size)
    probability = (counts + 1) / (len(data.train) + data.vocab_size)
    val = data.val["val"]
    n_bytes = len(text_of(data, val).encode())
    assert data.unigram_bpb == pytest.approx(-np.log2(probability[val]).sum() / n_bytes)


def test_a_second_use_reads_the_cache_and_builds_nothing(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first = prepare(files(text_file), tmp_path / "cache", context=8)
    monkeypatch.setattr(cache, "_build", None)
    again = prepare(files(text_file), tmp_path / "cache", context=8)
    assert isinstance(again.train, np.memmap) and not again.train.flags.writeable
    np.testing.assert_array_equal(first.train, again.train)
    assert (again.unigram_bpb, again.fingerprint) == (first.unigram_bpb, fingerprint_of(files(text_file)))


def test_the_fingerprint_writes_nothing(text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NEXUS_ABLATE_CACHE", str(tmp_path / "cache"))
    fingerprint_of(files(text_file))
    assert not (tmp_path / "cache").exists()


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch):
    for name in ("NEXUS_ABLATE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache.default_cache_dir() == Path("/home/someone/.cache/nexus-ablate")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache.default_cache_dir() == Path("/xdg/nexus-ablate")
    monkeypatch.setenv("NEXUS_ABLATE_CACHE", "/own")
    assert cache.default_cache_dir() == Path("/own")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)


def become_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


CACHED = ("train.npy", "val.npy", "tokenizer.json", "manifest.json")


@pytest.mark.parametrize(("file", "damage"), [*itertools.product(CACHED, (truncate, flip, Path.unlink, become_pipe))])
def test_a_damaged_cache_is_rebuilt_and_never_used(text_file: Path, tmp_path: Path, file: str, damage: Any):
    root = tmp_path / "cache"
    chosen = files(text_file, tokenizer="char")
    prepare(chosen, root, context=8)
    directory = next(root.iterdir())
    whole = {path.name: path.read_bytes() for path in directory.iterdir()}
    damage(directory / file)
    data = prepare(chosen, root, context=8)
    assert text_of(data, data.train) + text_of(data, data.val["val"]) == TEXT
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == whole
    assert list(root.iterdir()) == [directory]


def test_a_large_file_is_held_against_its_size(text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache, "_HASHED_BYTES", 100)
    prepare(files(text_file), tmp_path / "cache", context=8)
    truncate(next(tmp_path.glob("cache/*/train.npy")))
    data = prepare(files(text_file), tmp_path / "cache", context=8)
    assert text_of(data, data.train) == TEXT[: int(len(TEXT) * 0.9)]


@pytest.mark.parametrize("torn", [False, True])
def test_a_process_that_comes_second_uses_what_is_valid_and_replaces_what_is_torn(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: bool
):
    root, real, winner = tmp_path / "cache", corpus.FilesCorpus.val_texts, []

    def another_process_first(self: corpus.FilesCorpus) -> Iterator[str]:
        monkeypatch.setattr(corpus.FilesCorpus, "val_texts", real)
        prepare(files(text_file), root, context=8)
        winner.append(next(path for path in root.iterdir() if path.name[0] != ".") / "train.npy")
        if torn:
            truncate(winner[0])
        winner.append(winner[0].stat().st_ino)
        return real(self)

    monkeypatch.setattr(corpus.FilesCorpus, "val_texts", another_process_first)
    data = prepare(files(text_file), root, context=8)
    assert (winner[0].stat().st_ino == winner[1]) is not torn
    assert text_of(data, data.train) == TEXT[: int(len(TEXT) * 0.9)] and data.name == "files"
    assert [path.name for path in root.iterdir()] == [winner[0].parent.name]


def test_an_interrupted_build_leaves_nothing_that_could_be_used(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    root, real, seen = tmp_path / "cache", corpus.FilesCorpus.val_texts, []

    def interrupted(self: corpus.FilesCorpus) -> Iterator[str]:
        seen.extend(path.name for path in root.iterdir())
        raise KeyboardInterrupt

    monkeypatch.setattr(corpus.FilesCorpus, "val_texts", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(files(text_file), root, context=8)
    assert len(seen) == 1 and seen[0].startswith(".")  # half-made, the tokens bear another name
    assert list(root.iterdir()) == []
    monkeypatch.setattr(corpus.FilesCorpus, "val_texts", real)
    assert prepare(files(text_file), root, context=8)


def test_what_a_killed_build_left_is_removed_by_a_later_one_of_the_same_tokens_after_a_day(
    text_file: Path, tmp_path: Path
):
    root, two_days = tmp_path / "cache", time.time() - 2 * 86400
    prepare(files(text_file), root, context=8)
    (made,) = root.iterdir()
    for name, written in (
        (f".{made.name}-old", two_days),
        (f".{made.name}-new", time.time()),
        (".other-old", two_days),
    ):
        (root / name).mkdir()
        (root / name / "train.npy").touch()
        os.utime(root / name / "train.npy", (written, written))
        os.utime(root / name, (two_days, two_days))
    truncate(made / "train.npy")
    prepare(files(text_file), root, context=8)
    assert {path.name for path in root.iterdir()} == {made.name, f".{made.name}-new", ".other-old"}


def test_an_unwritable_cache_is_a_storage_error_that_names_it(text_file: Path, tmp_path: Path):
    blocked = text_file / "cache"
    with pytest.raises(StorageError) as caught:
        prepare(files(text_file), blocked, context=8)
    assert str(blocked) in str(caught.value) and "NEXUS_ABLATE_CACHE" in str(caught.value)


def test_a_full_disk_is_a_storage_error_and_leaves_nothing(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache.os, "fsync", full)
    with pytest.raises(StorageError) as caught:
        prepare(files(text_file), tmp_path / "cache", context=8)
    assert "No space left" in str(caught.value) and list((tmp_path / "cache").iterdir()) == []

"""`nexus-ablate import PATH`: a published decoder as overrides; with weights, as a run that can be evaluated."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from nexus_ablate import errors
from nexus_ablate.cli.verb import KINDS, Flag, Verb
from nexus_ablate.errors import ConfigError

LONGEST = 2048
"""Most positions of an imported run unless more are requested: RoPE's tables for 131072 take gigabytes."""

VERB = Verb(
    "import",
    "a Hugging Face model as overrides, or with weights as a run",
    "PATH [KEY=VALUE ...]",
    (
        ("import Llama-3.2-1B/config.json", "the overrides that express it"),
        ("import pythia-70m", "and a run with its weights, on data=stdlib"),
        ("import pythia-70m data=files data.files=[book.txt]", "on your own text"),
    ),
    (Flag("--overrides", "", "only print the overrides, even if there are weights"),),
    "PATH is a config.json, or a directory with one, model.safetensors (one file or several with an index) and "
    "tokenizer.json. Nothing is approximated: what cannot be expressed is listed. No code or pickle is loaded. "
    "The run is saved in runs_dir/imported, or in the experiment that you name. It has no seeds, so comparisons with "
    "it have measures but no verdict.",
    "a config.json or a directory",
    KINDS[0],
)


def run(words: list[str], flags: dict[str, Any]) -> int:
    """Print the overrides; with weights, measure the model and save it as a run."""
    from nexus_ablate.pretrained.expression import express, read_config
    from nexus_ablate.pretrained.weights import weight_files

    path, further = Path(words[0]), words[1:]
    expression = express(read_config(path))
    weights = weight_files(path) if path.is_dir() and "overrides" not in flags else []
    print(shlex.join(["nexus-ablate", *expression.overrides]))
    if not weights:
        if further:
            raise ConfigError("a run needs weights, but there are none", shlex.join(further), f"import {words[0]}")
        return errors.OK
    keys = {text.partition("=")[0] for text in further}
    tokenizer = path / "tokenizer.json"
    if "data.tokenizer" not in keys and not tokenizer.is_file():
        fix = "put the model's tokenizer.json next to its weights, or name it: data.tokenizer=PATH"
        raise ConfigError("the directory has weights but no tokenizer", str(path), fix)
    chosen = {"experiment": "imported", "train.steps": "0", "init": "checkpoint", "init.run": quoted(path)}
    chosen["data.tokenizer"] = quoted(tokenizer)
    if expression.context > LONGEST:
        chosen["model.context"] = str(LONGEST)
        if "model.context" not in keys:
            print(f"model.context={LONGEST} of {expression.context}; set model.context=N for longer texts")
    added = [f"{key}={value}" for key, value in chosen.items() if key not in keys]
    overrides = [text for text in expression.overrides if text.partition("=")[0] not in {*chosen, *keys}]

    from nexus_ablate.cli.train import single

    return single([*overrides, *added, *further])


def quoted(path: Path) -> str:
    """An absolute path as the value of an override."""
    escaped = str(path.resolve()).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"

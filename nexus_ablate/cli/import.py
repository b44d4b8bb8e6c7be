"""`nexus-ablate import PATH`: a published decoder as overrides; with weights, as a run that can be evaluated."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

from nexus_ablate.cli.flags import Flags
from nexus_ablate.cli.verb import Verb
from nexus_ablate.config.override_syntax import quoted
from nexus_ablate.errors import OK, ConfigError

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
    (),
    "PATH is a config.json, or a directory with one, model.safetensors (one file or several with an index) and "
    "tokenizer.json. The transformers library reads it, and it is accepted only if its logits are equal to that "
    "library's: a small model of the same configuration in float64, and the weights in float32. No code of a model and "
    "no pickle is loaded. "
    "The run is saved in runs_dir/imported, or in the experiment that you name. It has no seeds, so comparisons with "
    "it have measures but no verdict.",
    "a config.json or a directory",
    kind="runs",
)


def run(words: list[str], flags: Flags) -> int:
    """Print the overrides and prove them; with weights, prove those, measure the model and save it as a run."""
    from nexus_ablate.pretrained.library import check_library

    check_library()
    path, further = Path(words[0]), words[1:]
    if not path.exists():
        fix = shlex.join(["hf", "download", words[0], "--local-dir", path.name])
        raise ConfigError("there is no file or directory of this name", words[0], fix)
    from nexus_ablate.pretrained.expression import express
    from nexus_ablate.pretrained.library import outline, read_config, weight_files
    from nexus_ablate.pretrained.proof import structure, weights

    files = weight_files(path) if path.is_dir() else {}
    if further and not files:
        raise ConfigError(
            "a run needs weights, but there are none",
            shlex.join(further),
            shlex.join(["nexus-ablate", "import", words[0]]),
        )
    config = read_config(path)
    expression = express(config, outline(config))
    shape = structure(config).check(f"this {config.model_type} is not what its overrides say")
    print(shlex.join(["nexus-ablate", *expression.overrides]))
    print(
        f"structure   a small model's logits differ from transformers' by {shape.difference:.1e} of the largest, in "
        f"float64 ({shape.allowed:.0e} is allowed)"
    )
    if not files:
        return OK
    chosen = {"experiment": "imported", "train.steps": "0", "init": "checkpoint", "init.run": quoted(path.resolve())}
    keys = {text.partition("=")[0] for text in further}
    tokenizer = path / "tokenizer.json"
    if "data.tokenizer" not in keys and not tokenizer.is_file():
        fix = "put the model's tokenizer.json next to its weights, or name it: data.tokenizer=PATH"
        raise ConfigError("the directory has weights but no tokenizer", str(path), fix)
    chosen["data.tokenizer"] = quoted(tokenizer.resolve())
    if expression.context > LONGEST:
        chosen["model.context"] = str(LONGEST)
        if "model.context" not in keys:
            print(f"model.context={LONGEST} of {expression.context}; set model.context=N for longer texts")
    added = [f"{key}={value}" for key, value in chosen.items() if key not in keys]
    overrides = [text for text in expression.overrides if text.partition("=")[0] not in {*chosen, *keys}]
    overrides += [*added, *further]

    from nexus_ablate.config.compose import compose
    from nexus_ablate.training.device import share_cores_politely
    from nexus_ablate.training.session import train

    run_config = compose(overrides)
    proof = weights(config, files).check("the weights do not give the logits of transformers")
    print(
        f"weights     logits over {proof.tokens} tokens differ by {proof.difference:.1e}, in float32 "
        f"({proof.allowed:.1e} is allowed, ten times what two kernels of transformers differ by)"
    )
    share_cores_politely()
    conditions = {"imported": {"structure": dataclasses.asdict(shape), "weights": dataclasses.asdict(proof)}}
    return train(run_config, overrides, run_conditions=conditions).status

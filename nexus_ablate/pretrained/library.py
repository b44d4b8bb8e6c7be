"""What the `transformers` library reads: configurations and weights. No code of a model and no pickle is loaded."""

from __future__ import annotations

import copy
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nexus_ablate.errors import ConfigError, described, require_module
from nexus_ablate.plain_data import UNREADABLE

if TYPE_CHECKING:
    from torch import Tensor, nn

Files = dict[Path, list[str] | None]
"""Files with the tensors to read from each; None for all."""
COPY = "copy the directory again"
FROM_ONE = "take config.json and weights from one model"
SAFE = "save it as safetensors: model.save_pretrained(DIR)"


def check_library() -> None:
    """Check that `transformers` is installed, without importing it.

    Raises:
        ConfigError: It isn't.
    """
    require_module("transformers", "reading a published model", "pip install 'nexus-ablate[import]'")


def quiet_library() -> Any:
    """The `transformers` library, from now on without warnings and progress bars."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def read_json(file: Path) -> dict[str, Any]:
    """The mapping in a JSON file.

    Raises:
        ConfigError: There is none.
    """
    try:
        return dict(json.loads(file.read_bytes()))
    except (OSError, *UNREADABLE) as error:
        fix = "give the directory of a model as transformers saves it, or its config.json"
        raise ConfigError(f"{file.name} cannot be read", described(error), fix) from error


def read_config(path: Path) -> Any:
    """The library's configuration of a config.json, given by its path or its directory.

    Raises:
        ConfigError: There is none, the library doesn't know its architecture, or refuses its values.
    """
    return parse_config(read_json(path / "config.json" if path.is_dir() else path))


def parse_config(values: dict[str, Any]) -> Any:
    """The library's configuration of the values of a config.json.

    Raises:
        ConfigError: As in `read_config`.
    """
    transformers = quiet_library()
    kind = values.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        problem = f"transformers {transformers.__version__} does not know this architecture"
        fix = "a newer transformers; models that bring their own code are not run"
        raise ConfigError(problem, f"model_type={kind!r}", fix)
    if quantization := values.get("quantization_config"):
        got = f"quantization_config={quantization!r}"
        raise ConfigError("the weights are quantized", got, "the model in float32, float16 or bfloat16")
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(values)
    except Exception as error:  # whatever the library's own checks raise
        raise ConfigError("transformers refuses this config.json", f"{kind}: {described(error)}", COPY) from error
    return config.get_text_config(decoder=True)


def kernels(config: Any) -> list[str]:
    """The library's kernels for attention, the exact one first: Falcon's eager one adds ALiBi twice."""
    return ["sdpa", "eager"] if getattr(config, "alibi", False) else ["eager", "sdpa"]


def built(config: Any, **settings: Any) -> nn.Module:
    """The library's model of a configuration, in evaluation, with its own initial values.

    Raises:
        ConfigError: It can't be built from these values, or isn't a causal language model.
    """
    settings |= {"attn_implementation": kernels(config)[0], "experts_implementation": "eager"}
    try:
        return quiet_library().AutoModelForCausalLM.from_config(copy.deepcopy(config), **settings).eval()
    except Exception as error:  # whatever the library's own checks raise
        problem = "transformers cannot build a causal language model of this config.json"
        raise ConfigError(problem, f"{config.model_type}: {described(error)}", COPY) from error


def logits_of(library: nn.Module, tokens: Tensor) -> Tensor:
    """The library's logits.

    Raises:
        ConfigError: Its model can't be run, as one of Phi that rotates an odd number of channels.
    """
    try:
        return library(input_ids=tokens, use_cache=False).logits
    except RuntimeError as error:
        raise ConfigError("transformers cannot run a model of this config.json", described(error), COPY) from error


def outline(config: Any) -> dict[str, Any]:
    """The names of a model's tensors and tensors of their shapes, which take no memory."""
    import torch

    with torch.device("meta"):
        return dict(built(config).state_dict())


# ------------------------------------------------------------------------------------------------------------- weights


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "consolidated.00.pth")


def weight_files(directory: Path) -> Files:
    """The safetensors files of a directory, each with its tensors by the index, or None for all; empty without weights.

    Raises:
        ConfigError: The weights are pickled, or the index names a missing file.
    """
    if (directory / WEIGHTS).is_file():
        return {directory / WEIGHTS: None}
    if (directory / INDEX).is_file():
        files: dict[Path, list[str]] = {}
        for tensor, name in read_json(directory / INDEX).get("weight_map", {}).items():
            if not (directory / name).is_file():
                raise ConfigError(f"{INDEX} names a file that is not there", name, "copy all of them")
            files.setdefault(directory / name, []).append(tensor)
        return {**files}
    for name in PICKLES:
        if (directory / name).is_file():
            raise ConfigError("pickled weights are not read: they can run code", str(directory / name), SAFE)
    return {}


def content_hash(files: Files) -> str:
    """sha256 over the contents of the files."""
    hashes = [_hash_of(path, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(b"".join(hashes)).hexdigest()


@cache
def _hash_of(path: Path, size: int, modified: int) -> bytes:
    """sha256 of a file, cached by its size and modification time."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def read_tensors(files: Files) -> dict[str, Tensor]:
    """The tensors by their names; of one that several files have, the one in the file that the index names.

    Raises:
        ConfigError: A file isn't a safetensors file, is truncated, or lacks a tensor.
    """
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, Any] = {}
    for path, names in files.items():
        try:
            with safe_open(path, "pt") as file:
                for name in names or file.keys():
                    tensors[name] = file.get_tensor(name)
        except (SafetensorError, OSError, ValueError) as error:
            raise ConfigError("the weights cannot be read as safetensors", f"{path}: {error}", SAFE) from error
    return tensors


def load(config: Any, files: Files) -> nn.Module:
    """The library's model with published weights, float32, on the CPU, in evaluation.

    Raises:
        ConfigError: Weights are missing, too many, of another size, not finite, or of a type that needs a scale.
    """
    import torch

    tensors = read_tensors(files)
    parameters = "\n".join(outline(config))
    types = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    for name, tensor in tensors.items():
        if tensor.dtype not in types and name in parameters:
            got, fix = f"{name} is {tensor.dtype}".replace("torch.", ""), "the model in float32 or bfloat16"
            raise ConfigError("the weights are quantized, without their scales", got, fix)
    settings = {"state_dict": tensors, "dtype": torch.float32, "attn_implementation": kernels(config)[0]}
    settings |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        model_class = quiet_library().MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model, report = model_class.from_pretrained(None, config=config, **settings)
    except Exception as error:  # whatever the library raises for weights that do not fit
        raise ConfigError("transformers cannot load the weights", described(error), FROM_ONE) from error
    unused = []
    for name in report["unexpected_keys"]:
        if tensors[name].is_floating_point() and 0 < tensors[name].ndim < 4:  # not a mask or a constant of older files
            unused.append(name)
    problems = {
        "config.json and weights are of different sizes": report["mismatched_keys"],
        "the weights lack tensors": report["missing_keys"],
        "the weights have tensors that this architecture doesn't use": unused,
    }
    for problem, names in problems.items():
        if names:
            raise ConfigError(problem, ", ".join(sorted(map(str, names))[:3]), FROM_ONE)
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            got, fix = f"{name} has NaN or infinite values", "a checkpoint from before the divergence"
            raise ConfigError("the weights are not finite", got, fix)
    return model.eval()

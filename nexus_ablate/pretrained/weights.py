"""Files of published weights: which there are, the hash of their content, and the library's model with them."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nexus_ablate.errors import ConfigError
from nexus_ablate.pretrained.library import COPY, outline, quiet
from nexus_ablate.runs.files import read_regular

if TYPE_CHECKING:
    from torch import Tensor, nn

Files = dict[Path, list[str] | None]
"""Files with the tensors to read from each; None for all."""
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "consolidated.00.pth")
FROM_ONE = "take config.json and weights from one model"
SAFE = "save it as safetensors: model.save_pretrained(DIR)"


def weight_files(directory: Path) -> Files:
    """The safetensors files of a directory, each with its tensors by the index, or None for all; empty without weights.

    Raises:
        ConfigError: The weights are pickled, or the index names a missing file.
    """
    if (directory / WEIGHTS).is_file():
        return {directory / WEIGHTS: None}
    if (directory / INDEX).is_file():
        files: Files = {}
        try:
            index = json.loads(read_regular(directory / INDEX, 2**26, follow=True) or b"")["weight_map"]
            for tensor, name in sorted(index.items(), key=lambda item: item[1]):
                if Path(name).name != name or not (directory / name).is_file():
                    raise ConfigError(f"{INDEX} names files that are not there", name, "copy all of them")
                files.setdefault(directory / name, []).append(tensor)  # type: ignore[union-attr]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{INDEX} cannot be read", f"{directory}: {error}", COPY) from error
        return files
    for name in PICKLES:
        if (directory / name).is_file():
            raise ConfigError("pickled weights are not read: they can run code", str(directory / name), SAFE)
    return {}


def content_hash(files: Files) -> str:
    """sha256 over the contents of the files."""
    return _hash_of(tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in files))


@cache
def _hash_of(files: tuple[tuple[Path, int, int], ...]) -> str:
    """As `content_hash`, cached by each file's size and modification time."""
    digest = hashlib.sha256()
    for path, _, _ in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


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
                for name in file.keys() if names is None else names:
                    tensors[name] = file.get_tensor(name)
        except (SafetensorError, OSError, ValueError) as error:
            raise ConfigError("the weights cannot be read as safetensors", f"{path}: {error}", SAFE) from error
    return tensors


def load(config: Any, files: Files, kernel: str = "eager") -> nn.Module:
    """The library's model with published weights, float32, on the CPU, in evaluation.

    Raises:
        ConfigError: Weights are missing, too many, of another size, not finite, or of a type that needs a scale.
    """
    import torch

    tensors = read_tensors(files)
    parameters = outline(config)
    types = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    for name, tensor in tensors.items():
        if tensor.dtype not in types and any(f".{parameter}".endswith(f".{name}") for parameter in parameters):
            got = f"{name} is {str(tensor.dtype).removeprefix('torch.')}"
            raise ConfigError(
                "the weights are quantized, without their scales", got, "the model in float32 or bfloat16"
            )
    with quiet() as transformers:
        try:
            model, report = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
                None, config=config, state_dict=tensors, dtype=torch.float32, attn_implementation=kernel,
                output_loading_info=True, ignore_mismatched_sizes=True,
            )  # fmt: skip
        except Exception as error:  # whatever the library raises for weights that do not fit
            got = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
            raise ConfigError("transformers cannot load the weights", got, FROM_ONE) from error
    unexpected = [name for name in report["unexpected_keys"] if is_parameter(tensors[name])]
    for problem, names in (
        ("config.json and weights are of different sizes", report["mismatched_keys"]),
        ("the weights lack tensors", report["missing_keys"]),
        ("the weights have tensors that this architecture doesn't use", unexpected),
    ):
        if names:
            raise ConfigError(problem, ", ".join(sorted(map(str, names))[:3]), FROM_ONE)
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            got = f"{name} has NaN or infinite values"
            raise ConfigError("the weights are not finite", got, "a checkpoint from before the divergence")
    return model.eval()


def is_parameter(tensor: Tensor) -> bool:
    """Whether a tensor that the library doesn't read can be a weight, and not a mask or a constant of older files."""
    return tensor.is_floating_point() and 0 < tensor.ndim < 4

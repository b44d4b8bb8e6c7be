"""Load the weights of a published decoder: read from safetensors, renamed and split by the family's table."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nexus_ablate.errors import ConfigError
from nexus_ablate.pretrained.families import Family, Shape
from nexus_ablate.runs.files import read_regular

if TYPE_CHECKING:
    from torch import Tensor

    from nexus_ablate.model import GPT

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "consolidated.00.pth")
FROM_ONE = "take config.json and weights from one model"
_BLOCK = re.compile(r"^blocks\.(\d+)\.")
_LEAVES = {"gain": "weight", "excess": "weight"}


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a directory; none if it has no weights at all.

    Raises:
        ConfigError: The weights are pickled, or the index names a missing file.
    """
    if (directory / WEIGHTS).is_file():
        return [directory / WEIGHTS]
    if (directory / INDEX).is_file():
        try:
            names = set(json.loads(read_regular(directory / INDEX, 2**26, follow=True) or b"")["weight_map"].values())
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{INDEX} cannot be read", f"{directory}: {error}", "copy it again") from error
        foreign = [name for name in names if not isinstance(name, str) or Path(name).name != name]
        missing = [name for name in names if name not in foreign and not (directory / name).is_file()]
        if foreign or missing:
            got = sorted(map(str, foreign + missing))[0]
            raise ConfigError(f"{INDEX} names files that are not there", got, "copy all of them")
        return [directory / name for name in sorted(names)]
    for name in PICKLES:
        if (directory / name).is_file():
            fix = "save it as safetensors: model.save_pretrained(DIR)"
            raise ConfigError("pickled weights are not read: they can run code", str(directory / name), fix)
    return []


def content_hash(files: list[Path]) -> str:
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


def read_tensors(files: list[Path]) -> dict[str, Tensor]:
    """All tensors of the files by their names.

    Raises:
        ConfigError: A file isn't a safetensors file, or is truncated.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for path in files:
        with path.open("rb") as file:
            start = file.read(2)
        if start[:2] == b"PK" or start[:1] == b"\x80":
            fix = "save it as safetensors: model.save_pretrained(DIR)"
            raise ConfigError("these weights are a pickle and not safetensors", str(path), fix)
        try:
            tensors |= load_file(path)
        except (SafetensorError, OSError, ValueError) as error:
            raise ConfigError("the weights cannot be read", f"{path}: {error}", "copy the file again") from error
    return tensors


def translate(family: Family, published: Mapping[str, Tensor], model: GPT) -> dict[str, Tensor]:
    """The state dict of `model`, float32, from published tensors.

    Args:
        model: Provides names and shapes.

    Raises:
        ConfigError: A tensor is missing, has another shape, or wouldn't be used.
    """
    import torch

    geometry = model.geometry
    shape = Shape(geometry.n_heads, geometry.n_kv_heads, geometry.head_dim)
    state: dict[str, Tensor] = {}
    read: set[str] = set()
    for name, parameter in model.state_dict().items():
        sources, take = _sources(family, name, published)
        source = sources[0]
        if missing := [one for one in sources if one not in published]:
            raise ConfigError("the weights lack a tensor", f"{missing[0]}, which is {name} here", "copy them again")
        tensor = published[source] if len(sources) == 1 else torch.stack([published[one] for one in sources])
        try:
            tensor = tensor if take is None else take(tensor, shape)
        except (RuntimeError, ValueError, IndexError) as error:
            got = f"{source} {tuple(tensor.shape)}: {error}"
            raise ConfigError("config.json and weights are of different sizes", got, FROM_ONE) from error
        if name == "position.table.weight":  # a shorter context only needs the first rows
            tensor = tensor[: len(parameter)]
        if tensor.shape != parameter.shape:
            got = f"{source}: {tuple(tensor.shape)} in the weights, {tuple(parameter.shape)} by config.json"
            raise ConfigError("config.json and weights are of different sizes", got, FROM_ONE)
        state[name] = tensor.float().clone()
        read |= {*sources}
    ignores_key_bias = "blocks.0.attn.query.bias" in state and "blocks.0.attn.key.bias" not in state
    left = [
        name for name in published if name not in read and not _is_needless(family, name, published, ignores_key_bias)
    ]
    if left:
        problem = "the weights have tensors that this architecture doesn't use"
        raise ConfigError(problem, ", ".join(sorted(left)[:3]), FROM_ONE)
    return state


def _sources(family: Family, name: str, published: Mapping[str, Tensor]) -> tuple[list[str], Any]:
    """The published names of a parameter (several if it stacks several tensors), and the function that extracts it."""
    match = _BLOCK.match(name)
    layer = match[1] if match else ""
    general = _BLOCK.sub("blocks.{}.", name)
    module, _, leaf = general.rpartition(".")
    entry, suffix = family.modules.get(general), ""
    if entry is None:
        entry, suffix = family.modules.get(module), f".{_LEAVES.get(leaf, leaf)}"
    if entry is None:
        raise ConfigError("this architecture has weights that the family lacks", name, "report it as a bug")
    name, take = entry if isinstance(entry, tuple) else (entry, None)
    names = [f"{option.format(layer)}{suffix}" for option in alternatives(name)]
    names += [option.partition(".")[2] for option in names]  # without the first part, as in GPT-2's release
    for option in names:
        numbered = [option.replace("*", str(n)) for n in range(len(published))] if "*" in option else [option]
        if there := [one for one in numbered if one in published]:
            return there, take
    return [names[0]], take


def alternatives(name: str) -> list[str]:
    """The names that `a.b|c` stands for: `a.b` and `a.c`."""
    *start, last = name.split(".")
    return [".".join((*start, option)) for option in last.split("|")]


def _is_needless(family: Family, name: str, published: Mapping[str, Tensor], ignores_key_bias: bool) -> bool:
    """Whether a published tensor may stay unused: a buffer, a tied head, or a key bias that softmax ignores."""
    if name.endswith(family.unread):
        return True
    source = f"{family.modules['embedding']}.weight"
    head = family.modules["head"]
    heads = [f"{option}.weight" for option in alternatives(head)] if isinstance(head, str) else []
    if name in heads and source in published:
        return published[name].shape == published[source].shape and bool((published[name] == published[source]).all())
    key = family.modules["blocks.{}.attn.key"]
    return ignores_key_bias and isinstance(key, str) and name.endswith(f".{key.rpartition('.{}.')[2]}.bias")

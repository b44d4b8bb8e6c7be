"""What the `transformers` library reads: configurations and weights. No code of a model and no pickle is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nexus_ablate.errors import ConfigError
from nexus_ablate.runs.files import read_regular

if TYPE_CHECKING:
    from torch import nn

CONFIG_BYTES = 2**24
COPY = "copy the directory again"


def check_library() -> None:
    """Check that `transformers` is installed, without importing it.

    Raises:
        ConfigError: It isn't.
    """
    if find_spec("transformers") is None:
        raise ConfigError(
            "reading a published model needs the transformers library",
            "it is not installed",
            "pip install 'nexus-ablate[import]'",
        )


@contextmanager
def quiet() -> Iterator[Any]:
    """The `transformers` library without warnings and progress bars."""
    import warnings

    import transformers

    level, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield transformers
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()


def read_config(path: Path) -> Any:
    """The library's configuration of a config.json, given by its path or its directory.

    Raises:
        ConfigError: There is none, the library doesn't know its architecture, or refuses its values.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        data = read_regular(file, CONFIG_BYTES, follow=True)
    except OSError as error:
        raise ConfigError("config.json cannot be read", f"{file}: {error.strerror}", COPY) from error
    if data is None:
        raise ConfigError(
            "there is no config.json here", str(path), "give a config.json or the directory that holds it"
        )
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError("config.json is not valid JSON", f"{file}: {error}", COPY) from error
    if not isinstance(values, dict):
        raise ConfigError("config.json is not a mapping", str(file), COPY)
    return parse_config(values)


def parse_config(values: dict[str, Any]) -> Any:
    """The library's configuration of the values of a config.json.

    Raises:
        ConfigError: As in `read_config`.
    """
    with quiet() as transformers:
        kind = values.get("model_type")
        known = transformers.CONFIG_MAPPING
        if kind not in known:
            problem = f"transformers {transformers.__version__} does not know this architecture"
            fix = "a newer transformers; models that bring their own code are not run"
            raise ConfigError(problem, f"model_type={kind!r}", fix)
        if values.get("quantization_config"):
            got = f"quantization_config={values['quantization_config']!r}"[:120]
            raise ConfigError("the weights are quantized", got, "the model in float32, float16 or bfloat16")
        try:
            config = known[kind].from_dict(values)
        except Exception as error:  # whatever the library's own checks raise
            got = f"{kind}: {type(error).__name__}: {error}"[:300]
            raise ConfigError("transformers refuses this config.json", got, COPY) from error
        return config.get_text_config(decoder=True)


def built(config: Any, kernel: str = "eager", **settings: Any) -> nn.Module:
    """The library's model of a configuration, in evaluation, with its own initial values.

    Raises:
        ConfigError: It can't be built from these values, or isn't a causal language model.
    """
    import copy

    with quiet() as transformers:
        try:
            model = transformers.AutoModelForCausalLM.from_config(
                copy.deepcopy(config), attn_implementation=kernel, experts_implementation="eager", **settings
            )
        except Exception as error:  # whatever the library's own checks raise
            got = f"{config.model_type}: {type(error).__name__}: {error}".replace("\n", " ")[:300]
            raise ConfigError(
                "transformers cannot build a causal language model of this config.json", got, COPY
            ) from error
    return model.eval()


def outline(config: Any) -> dict[str, Any]:
    """The names of a model's tensors and tensors of their shapes, which take no memory."""
    import torch

    with torch.device("meta"):
        return dict(built(config).state_dict())

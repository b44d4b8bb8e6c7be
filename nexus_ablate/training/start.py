"""Initial values of a model: drawn by its init, or the weights of a run or of a published decoder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from nexus_ablate.model import GPT

FROM_RUN = "\"init.run='runs/scratch/ARM/s0-HASH'\", the folder that a run is saved to"


@dataclass(frozen=True)
class Weights:
    """Weights to start from.

    Attributes:
        sha256: The hash of their content.
        read: Returns the state dict for a model, on the CPU.
    """

    path: Path
    sha256: str
    read: Callable[[GPT], dict[str, Tensor]]


def science_of(config: RunConfig) -> dict[str, Any]:
    """The part of the configuration that can change the result, including the hash of the weights it starts from.

    Raises:
        ConfigError: As in `weights_of`.
    """
    weights = weights_of(config)
    return config.science() | (
        {} if weights is None else {"init": {"name": config.init.name, "sha256": weights.sha256}}
    )


def weights_of(config: RunConfig) -> Weights | None:
    """The weights that a run starts from; None if its init draws them.

    Raises:
        ConfigError: `init.run` doesn't name any.
    """
    if "run" not in config.init.keys:
        return None
    from nexus_ablate.pretrained.library import content_hash, weight_files
    from nexus_ablate.runs import has_status

    name = str(config.init.keys["run"])
    path = Path(name)
    if name == "none" or not path.is_dir():
        raise ConfigError("init=checkpoint needs a run, but there is none here", f"init.run={name}", FROM_RUN)
    if has_status(path):
        return Weights(path, checkpoint_hash(path), lambda model: _of_run(config, path))
    files = weight_files(path)
    if not files:
        raise ConfigError("init.run is neither a run nor a directory with weights", f"init.run={name}", FROM_RUN)
    return Weights(path, content_hash(files), lambda model: _of_decoder(config, files, path, model))


def checkpoint_hash(run: Path) -> str:
    """sha256 over the weights in a run's newest whole checkpoint.

    Raises:
        ConfigError: The run has none.
    """
    from nexus_ablate.training.checkpoint import newest_hash

    try:
        digest = newest_hash(run / "checkpoints", "model")
    except CheckpointError as error:
        raise ConfigError(f"init.run: {error.problem}", error.got, FROM_RUN) from error
    if digest is None:
        raise ConfigError("the run of init.run has no checkpoint", str(run), "finish it first, or name another run")
    return digest


def _of_run(config: RunConfig, run: Path) -> dict[str, Tensor]:
    """The weights of a run, whose tokenizer must be that of the configuration. Another architecture is noted."""
    from nexus_ablate.config.compose import differences
    from nexus_ablate.config.resolve import from_values
    from nexus_ablate.pretrained.expression import NO_ARCHITECTURE
    from nexus_ablate.runs import read_run
    from nexus_ablate.training.checkpoint import load_newest

    former = from_values({key: value for key, value in (read_run(run).config or {}).items() if key != "resolved"})
    for key in ("tokenizer", "bpe_vocab"):
        had, has = (each.data.keys.get(key) for each in (former, config))
        if had != has:
            problem = "the weights to start from read the tokens of another tokenizer"
            raise ConfigError(problem, f"data.{key}={has}", f"data.{key}={had}")
    for key, value in differences(config, former).items():
        if key not in NO_ARCHITECTURE and key.partition(".")[0] not in NO_ARCHITECTURE:
            note = f"the weights to start from were trained with another {key} than {value}"
            if note not in config.resolved.notes:
                config.resolved.notes.append(note)
    loaded = load_newest(run / "checkpoints")
    if loaded is None:
        raise ConfigError("the run of init.run has no checkpoint", str(run), "finish it first, or name another run")
    return loaded.tensors["model"]


def _of_decoder(config: RunConfig, files: Any, path: Path, model: GPT) -> dict[str, Tensor]:
    from nexus_ablate.pretrained.expression import check_architecture, express
    from nexus_ablate.pretrained.library import check_library, load, read_config

    check_library()
    published = read_config(path)
    expression = express(published, load(published, files).state_dict())
    check_architecture(config, expression)
    return expression.state(model)


def initial_model(config: RunConfig, vocab_size: int) -> GPT:
    """The model of a configuration with its initial values, on the CPU, and their hashes as `z_hashes`.

    Raises:
        ConfigError: The weights to start from are of another architecture.
    """
    from nexus_ablate.axes.modules import parameter_roles
    from nexus_ablate.config.roles import VECTOR
    from nexus_ablate.model import GPT, build_model, products

    weights = weights_of(config)
    if weights is None:
        return build_model(config, vocab_size)
    with products(config.train.linear):
        model = GPT(config, vocab_size)
    load_fitting(model, weights.read(model), weights.path)
    model.constrain()
    model.z_hashes = {
        name: hashlib.blake2b(parameter.detach().contiguous().numpy().data, digest_size=8).hexdigest()
        for name, parameter in model.named_parameters()
        if parameter_roles(model)[name] != VECTOR
    }
    return model


def load_fitting(model: GPT, state: dict[str, Tensor], path: Path) -> None:
    """Load a state into a model.

    Raises:
        ConfigError: Names or shapes differ from the model's.
    """
    expected, saved = ({name: tuple(t.shape) for name, t in of.items()} for of in (model.state_dict(), state))
    if other := sorted(name for name in expected.keys() | saved.keys() if expected.get(name) != saved.get(name)):
        name = other[0]
        got = f"{name}: {saved.get(name, 'not there')} in {path}, {expected.get(name, 'not there')} in the model"
        fix = "use the architecture and the tokenizer of these weights"
        raise ConfigError("the weights to start from do not fit the model", got, fix)
    model.load_state_dict(state)

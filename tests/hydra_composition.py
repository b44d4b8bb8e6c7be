"""What Hydra itself composes, which our composition must equal."""

from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from nexus_ablate.config.options import conf_dir


def composed_by_hydra(overrides: list[str]) -> dict[str, Any]:
    """The composed values, with interpolations resolved.

    Raises:
        HydraException: Hydra refuses an override.
    """
    with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
        return OmegaConf.to_container(compose("config", overrides=overrides), resolve=True)  # type: ignore[return-value]

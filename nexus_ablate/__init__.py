"""nexus-ablate: ablations of transformer architecture choices that end in a verdict you can trust.

from nexus_ablate import compose, build_model, train, run_study, load_run

config = compose(["norm=layer", "train.steps=50"])
logits_BTV = build_model(config, vocab_size=256)(tokens_BT)
outcome = train(config)
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {  # imported on first use, so that `import nexus_ablate` is fast
    "compose": "nexus_ablate.config.compose",
    "build_model": "nexus_ablate.model",
    "train": "nexus_ablate.training.session",
    "run_study": "nexus_ablate.api",
    "load_run": "nexus_ablate.api",
    "compare": "nexus_ablate.api",
}
__all__ = [*_HOME, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'nexus_ablate' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__

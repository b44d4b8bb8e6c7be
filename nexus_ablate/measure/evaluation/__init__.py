"""What the insides of a trained model cost its user later: longer text, endless text, coarse numbers, removed outliers.

Each evaluation is a function of a `Subject` that returns plain numbers, or raises `NotDefined` where the architecture
gives the question no meaning. They are documented in docs/metrics.md.
"""

from collections.abc import Callable
from typing import Any

from nexus_ablate.measure.evaluation.extrapolation import extrapolation
from nexus_ablate.measure.evaluation.intervention import intervention
from nexus_ablate.measure.evaluation.quantization import quantization
from nexus_ablate.measure.evaluation.streaming import streaming
from nexus_ablate.measure.evaluation.subject import NotDefined, Subject

EVALUATIONS: dict[str, Callable[[Subject], dict[str, Any]]] = {
    "extrapolation": extrapolation,
    "streaming": streaming,
    "quantization": quantization,
    "intervention": intervention,
}

__all__ = ["EVALUATIONS", "NotDefined", "Subject"]

"""Evaluations of a trained model: longer text, endless text, quantization, removal of outliers and sinks.

Each module has one evaluation, a class registered under its name in `conf/evaluation/`. docs/metrics.md defines their
results.
"""

from importlib import import_module
from pkgutil import iter_modules

from nexus_ablate.measure.evaluation.subject import EVALUATION, Evaluation, NotDefined, Subject

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["EVALUATION", "Evaluation", "NotDefined", "Subject"]

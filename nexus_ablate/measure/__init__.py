"""Measurements: statistics as pure functions, probes without side effects, evaluations, counts."""

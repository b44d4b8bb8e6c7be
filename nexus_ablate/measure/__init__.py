"""Measuring: statistics as pure functions, probes that leave no trace, evaluations, counts."""

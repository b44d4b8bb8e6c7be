"""Comparing runs: from any set of run directories to verdicts, without torch.

load curves windows -> arms tuning failures pairs -> fairness statistics -> judge verdict -> result -> findings claim
"""

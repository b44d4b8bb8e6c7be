"""Comparing runs: from any set of run directories to verdicts, without torch.

load curves windows -> arms tuning failures pairs -> fairness statistics -> judge verdict -> result -> findings claim
listed elsewhere: the same for runs of other tools, from a table of results
"""

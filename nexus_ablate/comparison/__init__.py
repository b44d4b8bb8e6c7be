"""Comparing runs: from folders to words, without torch.

read -> arms (rates) -> fairness, statistics -> verdict, worth -> compare; judge: the same for rows of a foreign table
"""

"""Comparing runs: from any set of run directories to verdicts, without torch.

terms curves windows -> load -> arms -> learning_rates failures pairs -> fairness -> results
statistics -> cell -> decision -> judging -> within_stratum -> claim ladder -> across_strata
listed elsewhere: the same for runs of other tools, from a table of results
"""

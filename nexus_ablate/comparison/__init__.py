"""Reading runs and saying what they show. Works on any set of run directories and imports no torch.

load curves -> arms tuning divergence pairs -> fairness statistics -> verdict -> result, which is all that
table terminal exports page plots show.
"""

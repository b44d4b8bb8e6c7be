"""The architecture choices: one file per axis, one registered class per option.

Shape letters in names, here and in model.py: B batch, T time (queries), S time (keys), D d_model, H heads,
d head width, F FFN width, V vocabulary. `x_BTD` is (batch, time, d_model).
"""

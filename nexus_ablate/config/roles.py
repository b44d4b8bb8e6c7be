"""The roles of parameters, on which initial values, weight decay and factors on the learning rate depend."""

from __future__ import annotations

SMALL_MAP = "small_map"
"""Role of a matrix that is no projection of a branch, such as one in a score, a function of positions or the mixture of
residual streams. Its variance is 1 / fan_in under every init, unless its module gives another in `stds`."""

BLOCKS = ("query", "key", "value", "attn_out", "ffn_in", "ffn_out")
"""Roles of the matrices that every block has. The output projections of the branches are `attn_out` and `ffn_out`."""

MATRICES = ("query", "key", "value", "gate", "attn_out", "ffn_in", "ffn_out", "head", SMALL_MAP)
"""Roles of matrices."""

LEARNED = "learned_"
"""What the names of keys and values begin with that no token makes. They have the roles of the projections."""

EMBEDDINGS = ("embedding", "position")
"""Roles of tables that are looked up. A head tied to the embedding is the embedding."""

VECTOR = "vector"
"""Role of gains, biases and scalars, which start at a constant set by their module."""

ROLES = (*MATRICES, *EMBEDDINGS, VECTOR)

DECAYED = {"matrices": MATRICES, "matrices_embeddings": (*MATRICES, *EMBEDDINGS), "all": ROLES}
"""The roles that decay, by `optim.decay`."""


def is_matrix(name: str, ndim: int, role: str) -> bool:
    """Whether a parameter is one or several matrices, and no gain with a row per head, learned key or table."""
    return ndim > 1 and role in MATRICES and not name.rpartition(".")[2].startswith(LEARNED)

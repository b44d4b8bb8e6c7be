"""Layouts of published tensors that hold several modules, or are stored otherwise than here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Shape(NamedTuple):
    """The sizes needed to split fused weights."""

    n_heads: int
    n_kv_heads: int
    head_dim: int


Layout = Callable[["Tensor", Shape], "Sequence[Tensor]"]
"""Splits a published tensor into the parts that are modules of their own here."""


def by_kind(w: Tensor, shape: Shape) -> Sequence[Tensor]:
    """All queries, then all keys, then all values."""
    return w.split([heads * shape.head_dim for heads in (shape.n_heads, shape.n_kv_heads, shape.n_kv_heads)])


def by_group(w: Tensor, shape: Shape) -> Sequence[Tensor]:
    """For each key head its queries, its key and its value."""
    groups = w.unflatten(0, (shape.n_kv_heads, -1, shape.head_dim))
    sizes = [shape.n_heads // shape.n_kv_heads, 1, 1]
    return [part.flatten(0, 2) for part in groups.split(sizes, 1)]


def by_core(w: Tensor, shape: Shape) -> Sequence[Tensor]:
    """CodeGen's order: for each of four cores the queries, values and keys of its heads."""
    query, value, key = w.unflatten(0, (4, 3, -1)).transpose(0, 1).flatten(1, 2)
    return query, key, value


def halves(w: Tensor, shape: Shape) -> Sequence[Tensor]:
    """The gate, then the other projection."""
    return w.chunk(2)


def transposed(w: Tensor, shape: Shape) -> Sequence[Tensor]:
    """One matrix, stored as (d_in, d_out)."""
    return [w.mT if w.ndim == 2 else w]


def transposed_by_kind(w: Tensor, shape: Shape) -> Sequence[Tensor]:
    return by_kind(transposed(w, shape)[0], shape)


def swapped(w: Tensor, shape: Shape) -> Sequence[Tensor]:
    """The halves of each head exchanged, for a rotation in the other direction."""
    return [w.unflatten(0, (-1, 2, shape.head_dim // 2)).flip(1).flatten(0, 2)]


def only_expert(w: Tensor, shape: Shape) -> Sequence[Tensor]:
    """The matrix or bias of the only expert, stored as (1, d_in, d_out) or (1, d_out)."""
    return transposed(w[0], shape)


def alternating(w: Tensor, shape: Shape) -> Sequence[Tensor]:
    """The rows of the gate and of the other projection in turn, of the only expert."""
    rows = only_expert(w, shape)[0]
    return rows[0::2], rows[1::2]


def scalar(w: Tensor, shape: Shape) -> Sequence[Tensor]:
    """A number that is stored as a list of one."""
    return [w[0]]


FUSED: dict[str, Layout] = {
    "mlp.act_fn.alpha_p": scalar,
    "mlp.act_fn.alpha_n": scalar,
    "self_attn.qkv_proj": by_kind,
    "attn.Wqkv": by_kind,
    "attn.c_attn": by_group,
    "attn.qkv_proj": by_core,
    "attention.query_key_value": by_group,
    "self_attention.query_key_value": by_group,
    "self_attn.query_key_value": by_group,
    "mlp.gate_up_proj": halves,
}
"""Layouts by published names."""
CONV1D: dict[str, Layout] = {
    "attn.c_attn": transposed_by_kind,
    "attn.c_proj": transposed,
    "mlp.c_fc": transposed,
    "mlp.c_proj": transposed,
}
"""GPT-2's layouts."""
EXPERTS: dict[str, Layout] = {
    "mlp.experts.gate_up_proj": alternating,
    "mlp.experts.gate_up_proj_bias": alternating,
    "mlp.experts.down_proj": only_expert,
    "mlp.experts.down_proj_bias": only_expert,
}
"""Layouts of gpt-oss with one expert."""

"""Names of published tensors: one table for all families, because most of them use the same few names.

A family adds only the names for which it means something else (families.py). Whether the table is right is not assumed:
every import is proved (proof.py).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

NAMES = {
    "embedding": "embed_tokens wte embed_in word_embeddings tokens_embed transformer.w",
    "position.table": "wpe embed_positions positions_embed position_embeddings",
    "embed_norm": "word_embeddings_layernorm layernorm_embedding embeddings.LayerNorm",
    "project_in": "project_in",
    "project_out": "project_out",
    "final_norm": "norm final_layernorm ln_f final_layer_norm layer_norm norm_f layernorm",
    "head": "lm_head embed_out output_projection lm_head.decoder",
    "blocks.{}.attn.query": "self_attn.q_proj attn.q_proj attn.attention.q_proj multi_head_attention.Wq "
    "attention.self.query self_attn.qkv_proj attn.Wqkv attn.c_attn attn.qkv_proj attention.query_key_value "
    "self_attention.query_key_value self_attn.query_key_value",
    "blocks.{}.attn.key": "self_attn.k_proj attn.k_proj attn.attention.k_proj multi_head_attention.Wk "
    "attention.self.key self_attn.qkv_proj attn.Wqkv attn.c_attn attn.qkv_proj attention.query_key_value "
    "self_attention.query_key_value self_attn.query_key_value",
    "blocks.{}.attn.value": "self_attn.v_proj attn.v_proj attn.attention.v_proj multi_head_attention.Wv "
    "attention.self.value self_attn.qkv_proj attn.Wqkv attn.c_attn attn.qkv_proj attention.query_key_value "
    "self_attention.query_key_value self_attn.query_key_value",
    "blocks.{}.attn.out": "self_attn.o_proj self_attn.out_proj self_attn.dense attn.out_proj attn.c_proj "
    "attn.attention.out_proj attention.dense self_attention.dense multi_head_attention.dense attention.output.dense",
    "blocks.{}.attn.out.bias": "attention.dense_bias",
    "blocks.{}.attn.inner_norm": "self_attn.attn_sub_norm",
    "blocks.{}.attn.qk_norm.query": "self_attn.q_norm self_attn.q_layernorm self_attn.query_layernorm "
    "self_attn.q_layernorm.norms.*",
    "blocks.{}.attn.qk_norm.key": "self_attn.k_norm self_attn.k_layernorm self_attn.key_layernorm "
    "self_attn.k_layernorm.norms.*",
    "blocks.{}.attn.core.normalizer.logit_H": "self_attn.sinks",
    "blocks.{}.ffn.gate": "mlp.gate_proj mlp.gate_up_proj",
    "blocks.{}.ffn.up": "mlp.up_proj mlp.c_fc mlp.fc_in mlp.dense_h_to_4h fc1 mlp.fc1 ffn.up_proj intermediate.dense "
    "ffn.0 mlp.gate_up_proj",
    "blocks.{}.ffn.down": "mlp.down_proj mlp.c_proj mlp.fc_out mlp.dense_4h_to_h fc2 mlp.fc2 ffn.down_proj "
    "output.dense ffn.2",
    "blocks.{}.ffn.inner_norm": "mlp.ffn_sub_norm",
    "blocks.{}.ffn.raw_alpha_p": "mlp.act_fn.alpha_p",
    "blocks.{}.ffn.raw_alpha_n": "mlp.act_fn.alpha_n",
    "blocks.{}.norm_attn": "input_layernorm ln_1 ln_attn norm_1 self_attn_layer_norm layernorm1 "
    "attention_layernorm "
    "attention.output.LayerNorm",
    "blocks.{}.norm_ffn": "pre_feedforward_layernorm post_attention_layernorm ln_2 ln_mlp norm_2 final_layer_norm "
    "feedforward_layernorm "
    "layernorm2 output.LayerNorm",
    "blocks.{}.norm_attn_out": "post_self_attn_layernorm post_norm1",
    "blocks.{}.norm_ffn_out": "post_mlp_layernorm post_norm2",
}
"""Published names by the names of modules and parameters here, the first one that exists. Those of a block are relative
to it, those outside are the ends of whole names; `*` is the index of a head."""

LEAVES = {"gain": "weight", "excess": "weight"}
PARTS = {"query": 0, "key": 1, "value": 2, "gate": 0, "up": 1}
"""Which part of a fused matrix a module is."""
_BLOCK = re.compile(r"^(.*?\b(?:layers|h|blocks|layer))\.(\d+)\.")


@dataclass(frozen=True)
class Shape:
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
    return [part.flatten(0, 2) for part in (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])]


def by_core(w: Tensor, shape: Shape) -> Sequence[Tensor]:
    """CodeGen's order: for each of four cores the queries, values and keys of its heads."""
    query, value, key = w.unflatten(0, (4, 3, -1)).unbind(1)
    return [part.flatten(0, 1) for part in (query, key, value)]


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
    return [w[0].mT if w.ndim == 3 else w[0]]


def alternating(w: Tensor, shape: Shape) -> Sequence[Tensor]:
    """The rows of the gate and of the other projection in turn, of the only expert."""
    rows = only_expert(w, shape)[0]
    return [rows[0::2], rows[1::2]]


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
"""Layouts of tensors that hold several modules, by their published names."""


class Tensors:
    """Where the parameters of a model are in published tensors.

    Args:
        published: The tensors by their names.
        n_layers: The number of blocks.
        names: Names that the family uses otherwise, as in `NAMES`.
        layouts: Layouts that the family uses otherwise, as in `FUSED`.
    """

    def __init__(
        self, published: Mapping[str, Tensor], n_layers: int, names: Mapping[str, str], layouts: Mapping[str, Layout]
    ) -> None:
        self.published, self.last = published, n_layers - 1
        self.names, self.layouts = {**NAMES, **names}, {**FUSED, **layouts}
        blocks = [match[1] for match in map(_BLOCK.match, published) if match]
        self.blocks = blocks[0] if blocks else ""
        """The published name of the list of blocks."""

    def find(self, name: str) -> list[str]:
        """The published names of a parameter: none, one, or several that are stacked."""
        match = re.match(r"blocks\.(\d+)\.", name)
        general = f"blocks.{{}}.{name[match.end() :]}" if match else name
        module, _, leaf = general.rpartition(".")
        options = self.names.get(general, "").split()
        options += [f"{option}.{LEAVES.get(leaf, leaf)}" for option in self.names.get(module, "").split()]
        for option in options:
            found = self._in_block(match[1], option) if match else self._outside(option)
            if found:
                return found
        return []

    def _in_block(self, layer: str, option: str) -> list[str]:
        name = f"{self.blocks}.{layer}.{option}"
        if "*" not in name:
            return [name] if name in self.published else []
        heads = (name.replace("*", str(head)) for head in range(len(self.published)))
        return list(itertools.takewhile(self.published.__contains__, heads))

    def _outside(self, option: str) -> list[str]:
        ends = (name for name in self.published if f".{name}".endswith(f".{option}"))
        return [name for name in ends if not name.startswith(f"{self.blocks}.")][:1]

    def has(self, name: str) -> bool:
        """Whether a parameter, in the last block if it is in any, has a published tensor."""
        return bool(self.find(name.format(self.last)))

    def scores(self, layer: int) -> tuple[list[str], float]:
        """The published tensors that scale a block's scores, and the power of a factor on scores that they need."""
        sides = [f"blocks.{layer}.attn.{{}}{side}" for side in ("query", "key")]
        norms = [name for side in sides for name in self.find(side.format("qk_norm.") + ".gain")]
        query, key = (self.find(side.format("") + ".weight") for side in sides)
        return (norms, 0.5) if norms else (query, 0.5 if query == key else 1.0)

    def tensor(self, name: str, shape: Shape) -> Tensor | None:
        """The published tensor of a parameter, split and transposed; None if there is none."""
        import torch

        found = self.find(name)
        if not found:
            return None
        tensors = [self.published[published] for published in found]
        tensor = tensors[0] if len(tensors) == 1 else torch.stack(tensors)
        relative = re.sub(rf"^{re.escape(self.blocks)}\.\d+\.", "", found[0])
        layout = self.layouts.get(relative) or self.layouts.get(relative.rpartition(".")[0])
        if layout is None:
            return tensor
        parts = layout(tensor, shape)
        return parts[PARTS[name.split(".")[-2]]] if len(parts) > 1 else parts[0]

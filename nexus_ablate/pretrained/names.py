"""Names of published tensors: one table for all families, because most of them use the same few names.

A family adds only the names for which it means something else (families.py). Whether the table is right is not assumed:
every import is proved (proof.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from nexus_ablate.pretrained.layouts import FUSED, Shape

if TYPE_CHECKING:
    from torch import Tensor

    from nexus_ablate.pretrained.families import Family

QKV = (
    " self_attn.qkv_proj attn.Wqkv attn.c_attn attn.qkv_proj attention.query_key_value "
    "self_attention.query_key_value self_attn.query_key_value"
)
NAMES = {
    "embedding": "embed_tokens wte embed_in word_embeddings tokens_embed transformer.w",
    "position.table": "wpe embed_positions positions_embed position_embeddings",
    "embed_norm": "word_embeddings_layernorm layernorm_embedding embeddings.LayerNorm",
    "project_in": "project_in",
    "project_out": "project_out",
    "final_norm": "norm final_layernorm ln_f final_layer_norm layer_norm norm_f layernorm",
    "head": "lm_head embed_out output_projection lm_head.decoder",
    "blocks.{}.attn.query": "self_attn.q_proj attn.q_proj attn.attention.q_proj multi_head_attention.Wq "
    "attention.self.query" + QKV,
    "blocks.{}.attn.key": "self_attn.k_proj attn.k_proj attn.attention.k_proj multi_head_attention.Wk "
    "attention.self.key" + QKV,
    "blocks.{}.attn.value": "self_attn.v_proj attn.v_proj attn.attention.v_proj multi_head_attention.Wv "
    "attention.self.value" + QKV,
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
    "blocks.{}.norm_attn": "input_layernorm ln_1 ln_attn norm_1 self_attn_layer_norm layernorm1 attention_layernorm "
    "attention.output.LayerNorm",
    "blocks.{}.norm_ffn": "pre_feedforward_layernorm post_attention_layernorm ln_2 ln_mlp norm_2 final_layer_norm "
    "feedforward_layernorm layernorm2 output.LayerNorm",
    "blocks.{}.norm_attn_out": "post_self_attn_layernorm post_norm1",
    "blocks.{}.norm_ffn_out": "post_mlp_layernorm post_norm2",
}
"""Published names by the names of modules and parameters here, the first one that exists. Those of a block are relative
to it, those outside are the ends of whole names; `*` is the index of a head."""
LEAVES = {"gain": "weight", "excess": "weight"}
PARTS = {"query": 0, "key": 1, "value": 2, "gate": 0, "up": 1}
"""Which part of a fused matrix a module is."""


class Tensors:
    """Where the parameters of a model are in published tensors.

    Args:
        config: The library's configuration.
        published: The tensors by their names.
        family: Names and layouts that the family uses otherwise.
    """

    def __init__(self, config: Any, published: Mapping[str, Tensor], family: Family) -> None:
        self.config, self.published = config, published
        self.names, self.layouts = NAMES | family.names, FUSED | family.layouts
        stacks = re.findall(r"^(.*?\b(?:layers|h|blocks|layer))\.\d+\.", "\n".join(published), re.MULTILINE)
        self.blocks = stacks[0] if stacks else "blocks"
        """The published name of the list of blocks."""

    def find(self, name: str) -> tuple[str, list[str]]:
        """The table's name for a parameter, and its published names: none, one, or several that are stacked."""
        layer = re.match(r"blocks\.(\d+)", name)
        start = rf"{self.blocks}\.{layer[1]}\." if layer else rf"(?!{self.blocks}\.\d)(?:.*\.)?"
        general = re.sub(r"^blocks\.\d+", "blocks.{}", name)
        module, _, leaf = general.rpartition(".")
        endings = dict.fromkeys(self.names.get(general, "").split(), "")
        endings |= dict.fromkeys(self.names.get(module, "").split(), f".{LEAVES.get(leaf, leaf)}")
        for option, ending in endings.items():
            pattern = re.compile(start + option.replace("*", r"\d+") + ending)
            found = [published for published in self.published if pattern.fullmatch(published)]
            if found:
                return option, found if layer else found[:1]
        return "", []

    def has(self, name: str) -> bool:
        """Whether a parameter, in the last block if it is in any, has a published tensor."""
        return bool(self.find(name.format(self.config.num_hidden_layers - 1))[1])

    def unknown(self) -> list[str]:
        """Published names that the table lacks, without the number of their block."""
        options = " ".join(self.names.values()).replace("*", r"\d+").split()
        known = re.compile(rf"(.*\.)?({'|'.join(options)})(\.\w+)?")
        names = dict.fromkeys(re.sub(rf"^{self.blocks}\.\d+\.", "", name) for name in self.published)
        return [name for name in names if not known.fullmatch(name)]

    def size(self, name: str) -> int:
        """The number of values of a parameter as it is stored, other parts of a fused one included."""
        return self.published[self.find(name)[1][0]].numel()

    @cached_property
    def shape(self) -> Shape:
        """The sizes of attention, from the shapes of its tensors."""
        d_model, n_heads = self.config.hidden_size, self.config.num_attention_heads
        head_dim = self.size("blocks.0.attn.out.weight") // d_model // n_heads
        keys = self.size("blocks.0.attn.key.weight") // d_model // head_dim
        is_fused = self.find("blocks.0.attn.key.weight") == self.find("blocks.0.attn.query.weight")
        return Shape(n_heads, (keys - n_heads) // 2 if is_fused else keys, head_dim)

    def tensor(self, name: str) -> Tensor | None:
        """The published tensor of a parameter, split and transposed; None if there is none."""
        import torch

        option, found = self.find(name)
        if not found:
            return None
        tensors = [self.published[published] for published in found]
        tensor = torch.stack(tensors) if len(tensors) > 1 else tensors[0]
        if option not in self.layouts:
            return tensor
        parts: Sequence[Tensor] = self.layouts[option](tensor, self.shape)
        return parts[PARTS[name.split(".")[-2]]] if len(parts) > 1 else parts[0]

"""What a published model has that no axis can express, by the names of its tensors."""

from __future__ import annotations

import re
from typing import Any

from nexus_ablate.pretrained.names import Tensors

SIGNS = {
    "a mixture of experts (ffn=moe would do; only a mapping is missing)": (
        r"expert|router|\bmoe|e_score|mlp\.gate\.weight"
    ),
    "layers with a recurrent state (state-space, convolution or linear attention)": (
        r"conv|A_log|dt_(bias|proj)|ssm|mamba|linear_attn|time_mix|attention\.time|[xm]lstm|temporal_block|slope_rate"
    ),
    "keys and values from a narrow projection (latent attention)": r"kv_[ab]_|q_[ab]_|kv_lora",
    "cross-attention to an encoder": r"encoder_attn|cross_attn|crossattention",
    "another modality than text": r"vision|image|audio|speech|visual|modal",
    "differential attention (mixer=differential would do; only a mapping is missing)": r"lambda_[qk]",
    "an embedding for each layer": r"per_layer|altup",
    "an embedding of something other than tokens and positions": r"token_type|segment|lang_emb|z_L_init|pronunciation",
    "a head with layers of its own": r"predictions|generator_|lm_head\.(dense|layer_norm|norm)|pred_layer",
    "learned factors on branches, queries or channels": r"(_residual|layer_scalar|lambda_[12]|sqk|suv\w*|_scale)$",
    "these relative positions": r"rel_|relative|r_w_bias|position_bias",
    "an activation with learned parameters": r"act_fn",
    "a gate on attention (gate=elementwise or headwise would do; only a mapping is missing)": (
        r"attn\.(gate_proj|g_proj|s_gate|gate_bias)"
    ),
}
"""Patterns in the names of tensors by what they are a part of."""
NEEDED = ("embedding", "blocks.{}.attn.query", "blocks.{}.attn.key", "blocks.{}.attn.out", "blocks.{}.ffn.down")


def missing_parts(config: Any, source: Tensors, unused: tuple[str, ...]) -> str:
    """The parts of a published model that no axis can express, '' if there are none.

    Args:
        source: Where its tensors are.
        unused: Parts of names of tensors that change nothing.
    """
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder"
    unknown = [name for name in unknown_tensors(source) if not any(part in name for part in unused)]
    reasons = [meaning for meaning, sign in SIGNS.items() if any(re.search(sign, name) for name in unknown)]
    if not reasons and unknown:
        reasons = [f"what {', '.join(unknown[:3])} does"]
    if not reasons and not all(source.has(f"{name}.weight") for name in NEEDED):
        reasons = ["blocks of attention and an FFN"]
    return ", ".join(reasons)


def unknown_tensors(source: Tensors) -> list[str]:
    """Published names that the table lacks, without the number of their block."""
    known = {option for options in source.names.values() for option in options.split()}
    unknown = []
    for name in source.published:
        inside = re.sub(rf"^{re.escape(source.blocks)}\.\d+\.", "", name)
        general = re.sub(r"\.\d+$", ".*", inside.rpartition(".")[0])
        outside = any(f".{whole}".endswith(f".{option}") for option in known for whole in (name, general))
        if not outside if inside == name else not {inside, general, inside.rpartition(".")[0]} & known:
            unknown.append(inside)
    return list(dict.fromkeys(unknown))

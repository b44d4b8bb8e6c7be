"""A published configuration at small sizes: the same layers and rules, so that a proof takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nexus_ablate.errors import ConfigError
from nexus_ablate.pretrained.families import first
from nexus_ablate.pretrained.library import parse_config

VOCAB, WINDOW, MARGIN = 101, 24, 12
"""Rows of the embedding, tokens of the longest window, and tokens by which sequences are longer than that."""
LENGTHS = ("sliding_window", "window_size", "original_max_position_embeddings")
CONTEXTS = ("max_position_embeddings", "max_seq_len", "seq_length", "n_positions", "n_ctx")
D_FFS = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "dff")


def shrunk(config: Any) -> tuple[Any, int]:
    """A small configuration, and a number of tokens beyond all of its windows and original contexts.

    Layers, layer types, scalings and factors stay. Heads keep whether keys are shared and whether their number is a
    power of two. Windows, original contexts and contexts are divided by one number.

    Raises:
        ConfigError: The library refuses the small configuration, or too few channels of a head are rotated.
    """
    values = config.to_dict()
    lengths = [value for key, value in walked(values) if key in LENGTHS and value]
    contexts = [value for key, value in walked(values) if key in CONTEXTS and value]
    longest = max(lengths or contexts, default=WINDOW)
    divisor = max(1.0, min([longest / WINDOW, *(length / 3 for length in lengths)]))
    tokens = MARGIN + (round(longest / divisor) if lengths else WINDOW)
    shortest_context = 1 if getattr(config, "rope_parameters", None) else tokens
    names = getattr(config, "attribute_map", {})
    sizes = {names.get(key, key): value for key, value in small_sizes(config).items()}

    def small(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {inner: small(inner, inner_value) for inner, inner_value in value.items()}
        if not value:
            return value
        if key in LENGTHS:
            return max(2, round(value / divisor))
        if key in CONTEXTS:
            return max(shortest_context, round(value / divisor))
        if str(key).endswith("_token_id"):
            return min(value, VOCAB - 1) if isinstance(value, int) else VOCAB - 1
        return sizes.get(key, value)

    return parse_config(small("", values)), tokens


def small_sizes(config: Any) -> dict[str, int]:
    """Small values of the keys that hold sizes."""
    n_heads, d_model = config.num_attention_heads, config.hidden_size
    n_kv = first(config, "num_key_value_heads", "num_kv_heads", default=n_heads)
    head_dim = first(config, "head_dim", default=d_model // n_heads)
    fractions = [value for key, value in walked(config.to_dict()) if key == "partial_rotary_factor" and value]
    fraction = min([first(config, "rotary_dim", default=head_dim) / head_dim, *fractions])
    head_dims = (16, 20, 24, 32, 40, 64, head_dim)
    fitting = [size for size in head_dims if size * fraction >= 4 and int(size * fraction) % 2 == 0]
    if not fitting:
        problem = "positions rotate an even number of channels of a head, at least 4 of them"
        got = f"partial_rotary_factor={fraction:g}, head_dim={head_dim}"
        raise ConfigError(problem, got, f"partial_rotary_factor={max(0.25, 4 / head_dim):g}")
    small = fitting[0]
    heads = 6 if n_heads & (n_heads - 1) else 4
    groups = heads if n_kv == n_heads else min(n_kv, 2)
    width = heads * (small if head_dim * n_heads == d_model else small + 2)
    d_embed = width if first(config, "word_embed_proj_dim", default=d_model) == d_model else width // 2
    return dict.fromkeys(D_FFS, 2 * width - 4) | {
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "num_kv_heads": groups,
        "head_dim": small,
        "rotary_dim": int(small * fraction),
        "vocab_size": VOCAB,
        "word_embed_proj_dim": d_embed,
    }


def walked(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every key with its value, also of mappings inside."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from walked(value)
        else:
            yield key, value

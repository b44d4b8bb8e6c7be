"""A published configuration at small sizes: the same layers and rules, so that a proof takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

VOCAB, WINDOW, MARGIN = 101, 24, 12
"""Rows of the embedding, tokens of the longest window, and tokens by which sequences are longer than that."""
LENGTHS = ("sliding_window", "window_size", "original_max_position_embeddings")
CONTEXTS = ("max_position_embeddings", "max_seq_len", "seq_length", "n_positions", "n_ctx")
HEAD_DIMS = (16, 20, 24, 32, 40, 64)


def shrunk(config: Any) -> tuple[Any, int]:
    """A small configuration, and a number of tokens beyond all of its windows and original contexts.

    Layers, layer types, scalings and factors stay. Heads keep whether keys are shared and whether their number is a
    power of two. Windows, original contexts and contexts are divided by one number.
    """
    values = config.to_dict()
    lengths = [value for key, value in walked(values) if key in LENGTHS and value]
    contexts = [value for key, value in walked(values) if key in CONTEXTS and value]
    divisor = max(lengths, default=max(contexts, default=WINDOW)) / WINDOW
    divisor = max(1.0, min([divisor, *(length / 3 for length in lengths)]))
    tokens = round(max(lengths, default=WINDOW * divisor) / divisor) + MARGIN
    rotary = bool(getattr(config, "rope_parameters", None))

    def small(key: str, value: Any) -> Any:
        if key in LENGTHS and value:
            return max(2, round(value / divisor))
        if key in CONTEXTS and value:
            return round(value / divisor) if rotary else max(tokens, round(value / divisor))
        if key.endswith("_token_id") and isinstance(value, int):
            return min(value, VOCAB - 1)
        return value

    values = replaced(values, small)
    names = getattr(config, "attribute_map", {})
    for key, value in small_sizes(config).items():
        if values.get(names.get(key, key)) is not None:
            values[names.get(key, key)] = value
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(values.get(key), list):
            values[key] = VOCAB - 1
    return type(config).from_dict(values), tokens


def small_sizes(config: Any) -> dict[str, int]:
    """Small values of the keys that hold sizes."""
    n_heads, d_model = config.num_attention_heads, config.hidden_size
    n_kv = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None) or n_heads
    head_dim = getattr(config, "head_dim", None) or d_model // n_heads
    heads = 4 if n_heads & (n_heads - 1) == 0 else 6
    groups = heads if n_kv == n_heads else min(n_kv, 2)
    fraction = rotated(config, head_dim)
    small = next(size for size in (*HEAD_DIMS, head_dim) if int(size * fraction) % 2 == 0 and size * fraction >= 4)
    width = heads * small if head_dim * n_heads == d_model else heads * small + 8
    sizes = {
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "num_kv_heads": groups,
        "head_dim": small,
        "rotary_dim": int(small * fraction),
        "vocab_size": VOCAB,
        "word_embed_proj_dim": width if getattr(config, "word_embed_proj_dim", d_model) == d_model else width // 2,
    }
    for key in ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "dff"):
        d_ff = getattr(config, key, None)
        sizes[key] = width * d_ff // d_model if d_ff and d_ff % d_model == 0 else 2 * width - 4
    return sizes


def rotated(config: Any, head_dim: int) -> float:
    """The share of a head's channels that is rotated."""
    if getattr(config, "rotary_dim", None):
        return config.rotary_dim / head_dim
    fractions = [value for key, value in walked(config.to_dict()) if key == "partial_rotary_factor" and value]
    return min(fractions, default=1.0)


def walked(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every key with its value, also of mappings inside."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from walked(value)
        else:
            yield key, value


def replaced(values: dict[str, Any], change: Any) -> dict[str, Any]:
    """The values with a change of each, also of mappings inside."""
    changed = {}
    for key, value in values.items():
        changed[key] = replaced(value, change) if isinstance(value, dict) else change(str(key), value)
    return changed

"""Read a config.json key by key, and record what can't be expressed and which keys were never read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HARMLESS = {
    *("_name_or_path", "architectures", "auto_map", "chunk_size_feed_forward", "dtype", "torch_dtype", "id2label"),
    *("label2id", "model_type", "output_attentions", "output_hidden_states", "problem_type", "return_dict"),
    *("transformers_version", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id"),
    *("decoder_start_token_id", "forced_eos_token_id", "use_cache", "cache_implementation", "prefix"),
    *("initializer_range", "init_std", "init_device", "initializer_factor", "task_specific_params", "pretraining_tp"),
    *("slow_but_exact", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
    *("summary_first_dropout", "reorder_and_upcast_attn", "attn_implementation", "_attn_implementation", "verbose"),
    *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "router_aux_loss_coef", "max_window_layers"),
    *("classifier_dropout", "layerdrop", "embedding_fraction", "word_embed_dim", "unsloth_version", "rope_ratio"),
}
"""Keys that change neither the function nor the weights of a decoder in evaluation."""
_DROPOUT = ("dropout", "_pdrop")


class Fields:
    """The values of a config.json.

    Attributes:
        refused: One line per setting that can't be expressed.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values, self._path, self._read = values, path, set[str]()
        self.refused: list[str] = []

    def __call__(self, *names: str, default: Any = ...) -> Any:
        """The value of the first name that exists and isn't null. Without a default, there must be one."""
        self._read |= {*names}
        for name in names:
            if self._values.get(name) is not None:
                return self._values[name]
        if default is ...:
            self.refuse(f"{self._path}{names[0]} is missing")
            return 1
        return default

    def whole(self, *names: str, default: Any = ...) -> int:
        """A whole number above 0."""
        value = self(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.refuse(f"{self._path}{names[0]}={value!r} is not a whole number above 0")
            return 1
        return value

    def number(self, *names: str, default: Any = ...) -> float:
        """A number."""
        value = self(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(f"{self._path}{names[0]}={value!r} is not a number")
            return 1.0
        return float(value)

    def flag(self, *names: str, default: bool) -> bool:
        """True or false."""
        value = self(*names, default=default)
        if not isinstance(value, bool):
            self.refuse(f"{self._path}{names[0]}={value!r} is neither true nor false")
        return bool(value)

    def only(self, name: str, *accepted: Any, why: str) -> None:
        """Refuse any value but these; a missing or null one is accepted."""
        value = self(name, default=accepted[0])
        if value not in accepted:
            self.refuse(f"{self._path}{name}={value!r}: {why}")

    def within(self, name: str) -> Fields:
        """The mapping under a name; empty if there is none."""
        value = self(name, default={})
        inner = Fields(value if isinstance(value, dict) else {}, f"{self._path}{name}.")
        inner.refused = self.refused
        return inner

    def refuse(self, line: str) -> None:
        self.refused.append(line)

    def finish(self) -> None:
        """Refuse keys that were never read, except those without effect."""
        for name, value in self._values.items():
            off = value is None or value is False or value == [] or value == {}
            if name not in self._read | HARMLESS and not name.endswith(_DROPOUT) and not off:
                self.refuse(f"{self._path}{name}={value!r}: its effect is not known here")

"""The configuration of a run as dataclasses. Each key has its constraint and meaning here, its default in the YAML.

The option files of axes, optimizers, data and trackers are their own schema (see options.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from nexus_ablate.config.grammar import Constraint
from nexus_ablate.config.options import COMMON_KEYS, LATER, OPTIONS, Option, at_layer, option_files

OPTION_GROUPS = (*OPTIONS, "data", "tracker")
"""The groups whose option files are their own schema."""


def key(constraint: str, meaning: str, science: bool = True) -> Any:
    """A dataclass field for a key: its constraint, its meaning, and whether it can change the result."""
    return field(metadata={"constraint": Constraint(constraint), "meaning": meaning, "science": science})


MEANT = (
    "norm_bias",
    "final_norm",
    "embed_scale",
    "d_ff_ratio",
    "qkv_bias",
    "attn_out_bias",
    "ffn_bias",
    "n_kv_heads",
    "nope_every",
    "d_embed",
)
"""The keys whose `auto` is replaced by a value in `resolved`."""


@dataclass
class ModelConfig:
    """The size of the model."""

    name: str = key("text", "name of the size")
    n_layers: int = key("int [1, 10000]", "blocks, each attention and FFN")
    n_heads: int = key("int [1, 1024]", "query heads")
    d_model: int = key("int [1, 65536]", "width of the residual stream")
    head_dim: Any = key("auto | int [1, 65536]", "width of a head; auto: d_model / n_heads")
    context: int = key("int [2, 1048576]", "tokens per sequence in training")
    d_ff_multiple: int = key("int [1, 1024]", "the FFN width is rounded to the nearest multiple of this")
    dropout: float = key("float [0, 1)", "on embeddings, attention weights and branch outputs")


@dataclass(frozen=True)
class Schedule:
    """The keys that every optimizer has; see COMMON_KEYS."""

    lr: float
    decay: str
    schedule: str
    warmup: int | str
    final_lr: float
    cooldown: float
    clip: float | str
    decay_mode: str
    cautious_decay: bool
    groups: list[str]

    @classmethod
    def of(cls, keys: Mapping[str, Any]) -> Schedule:
        """The schedule in the keys of an optimizer."""
        return cls(**{key: keys[key] for key in COMMON_KEYS["optim"]})

    def warmup_steps(self, steps: int) -> int:
        """The meaning of `warmup` in a run of so many steps.

        `auto` is an eighth of the run up to 100 steps, or one step in a hundred where that is more.
        """
        return max(min(100, steps // 8), steps // 100) if self.warmup == "auto" else int(self.warmup)

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of step 0 .. steps - 1: linear warm-up, then down to `final_lr` of the peak."""
        warmup = self.warmup_steps(steps)
        if step < warmup:
            return self.lr * (step + 1) / (warmup + 1)
        if self.schedule == "constant":
            return self.lr
        first = max(warmup, steps - round(self.cooldown * steps)) if self.schedule == "wsd" else warmup
        progress = min(1.0, max(0.0, (step - first) / max(1, steps - first)))
        left = 0.5 * (1 + math.cos(math.pi * progress)) if self.schedule == "cosine" else 1 - progress
        return self.lr * (self.final_lr + (1 - self.final_lr) * left)


@dataclass
class TrainConfig:
    """Budget, batches, precision, and how the run is executed.

    That changes the last digits of a result only; with dropout a compiled step draws other masks.
    """

    name: str = key("text", "name of the recipe")
    steps: Any = key(
        "auto | int [0, 1e9]",
        "optimizer steps, unless tokens or flops give the budget; 0: measure the untrained model; auto: 20 tokens per "
        "parameter of the default blocks at this size, 12 n_layers d_model^2",
    )
    tokens: Any = key("auto | int [1, 1e15]", "training tokens; auto: from steps")
    flops: Any = key("auto | float [1, inf)", "training FLOPs; auto: from steps")
    batch_size: int = key("int [1, 1e6]", "sequences in a micro-batch")
    grad_accum: int = key("int [1, 1e6]", "micro-batches in a step")
    precision: str = key(
        "auto | fp32 | bf16 | fp16",
        "of matrix products; weights stay float32; auto: bf16 on GPUs that multiply in it, else fp32",
    )
    eval_every: Any = key(
        "auto | int [1, 1e9]", "steps between validations; auto: 2 to 8 per run, at most 3% of its time if more than 2"
    )
    eval_tokens: int = key(
        "int [1, 1e12]",
        "validation tokens, spread over the validation set, the same ones each time; other sets: a quarter",
    )
    log_every: int = key("int [1, 1e9]", "steps between rows of metrics.jsonl", science=False)
    checkpoint_every: Any = key(
        "auto | int [1, 1e9]", "steps between checkpoints; auto: a tenth of the run, at least 200", science=False
    )
    keep: int = key("int [1, 1e9]", "checkpoints kept while training; one after the end", science=False)
    compile: str = key(
        "auto | on | off | graphs",
        "torch.compile; graphs: its kernels replayed as CUDA graphs; auto: on if the run is long enough to gain",
        science=False,
    )
    loss: str = key(
        "auto | whole | chunked",
        "all logits at once, or some rows at a time; auto: chunked from 256 MiB",
        science=False,
    )
    attention: str = key(
        "auto | sdpa", "softmax attention on a CPU; auto: in blocks of queries if that is faster", science=False
    )
    linear: str = key("auto | blas", "matrix products on a CPU; auto: larger ones by oneDNN on x86", science=False)
    optimizer: str = key("fused | plain", "AdamW as one kernel, or written out", science=False)
    activation_checkpointing: bool = key(
        "on | off", "keep only each block's input and recompute the rest: less memory", science=False
    )
    device: str = key("auto | cpu | cuda | mps | text", "where to train; cuda:1 names a GPU", science=False)
    threads: Any = key("auto | int [1, 1024]", "CPU threads; auto: the cores that are idle", science=False)

    def saves_every(self, steps: int) -> int:
        """The meaning of `checkpoint_every` in a run of so many steps."""
        return max(200, steps // 10) if self.checkpoint_every == "auto" else self.checkpoint_every


@dataclass
class ProbeConfig:
    """The probe: the pass that takes measurements."""

    name: str = key("text", "off, standard or full")
    every: Any = key(
        "auto | int [1, 1e9]", "steps between probes, besides powers of two; auto: an eighth of the run, at least 100"
    )
    sequences: int = key("int [1, 1e6]", "validation sequences in the probe batch")

    def due(self, step: int, steps: int) -> bool:
        """Whether a run of so many steps probes after this one."""
        if self.name == "off":
            return False
        every = max(100, steps // 8) if self.every == "auto" else self.every
        return step in (0, steps) or step & (step - 1) == 0 or step % every == 0


@dataclass
class Resolved:
    """The meaning of every `auto`, and the numbers that follow from the configuration."""

    norm_bias: bool
    final_norm: bool
    embed_scale: float | str
    d_embed: int
    nope_every: int | str | list[int]
    init: Option
    qk_norm: Option
    qkv_bias: bool
    attn_out_bias: bool
    ffn_bias: bool
    n_kv_heads: int
    windows: list[int]
    head_dim: int
    d_ff: int
    d_ff_ratio: float
    steps: int | None
    tokens_per_step: int
    notes: list[str] = field(default_factory=list)
    prescribed: dict[str, str] = field(default_factory=dict)
    """The option that determined an `auto`, by key."""

    @property
    def nope_layers(self) -> frozenset[int]:
        """The layers without positions, from 0."""
        every = self.nope_every
        if isinstance(every, list):
            return frozenset(every)
        return frozenset() if isinstance(every, str) else frozenset(range(every - 1, len(self.windows), every))

    def flat(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "init": self.init.flat(), "qk_norm": self.qk_norm.flat()}


@dataclass
class RunConfig:
    """The complete, checked configuration of one run. `resolved` has the meaning of every `auto`."""

    norm: Option
    placement: Option
    position: Option
    mixer: Option
    attention: Option
    normalizer: Option
    qk_norm: Option
    gate: Option
    value: Option
    conv: Option
    ffn: Option
    head: Option
    init: Option
    param: Option
    data: Option
    tracker: Option
    model: ModelConfig
    optim: Option
    train: TrainConfig
    probe: ProbeConfig
    bias: bool = key("on | off", "bias of every linear layer in the blocks")
    norm_bias: str = key("auto | on | off", "bias of the norms; auto: as the norm is published")
    norm_gain_sites: Any = key(
        "blocks | list of text",
        "norms that start at norm.gain_init, the others at 1: of attn, ffn, attn_out, ffn_out, attn_inner, ffn_inner, "
        "final, embed; blocks: all but final and embed",
    )
    weight_decay: float = key("float [0, inf)", "decoupled, times the learning rate")
    d_ff_ratio: Any = key("auto | ratio (0, 1e4]", "FFN width over d_model; auto: 4, or 8/3 for gated FFNs")
    final_norm: str = key("auto | on | off", "norm before the head; auto: as the placement is published")
    embed_scale: Any = key(
        "auto | off | sqrt_d | learned | float (0, inf)", "factor on the embedding; learned starts at sqrt(d_model)"
    )
    embed_norm: bool = key("on | off", "a norm on the input of the first block, positions included")
    d_embed: Any = key(
        "auto | int [1, 65536]",
        "width of the embedding and the head; auto: d_model, without linear layers to and from d_model",
    )
    vocab_size: Any = key(
        "auto | int [1, 1e9]", "rows of the embedding, at least the tokenizer's vocabulary; auto: exactly as many"
    )
    tie_embeddings: bool = key("on | off", "the head is the embedding, transposed")
    head_bias: bool = key("on | off", "bias of the head")
    logit_scale: Any = key("off | float (0, inf)", "factor on the logits, before their cap")
    qkv_bias: str = key("auto | on | off", "bias of the query, key and value projections; auto: as bias")
    attn_out_bias: str = key("auto | on | off", "bias of attention's output projection; auto: as bias")
    ffn_bias: str = key("auto | on | off", "bias of the FFN's projections; auto: as bias")
    n_kv_heads: Any = key("auto | int [1, 1024]", "key and value heads, shared by groups of query heads; auto: n_heads")
    nope_every: Any = key(
        "auto | off | int [2, 1e9] | list of int [0, 1e9]",
        "layers without positions: each n-th, counted from 1, or a list of layers, counted from 0; auto: as the "
        "position is published",
    )
    clip_qkv: Any = key("off | float (0, inf)", "largest magnitude of projected queries, keys and values")
    window: Any = key(
        "off | int [1, 1e9] | list of int [0, 1e9]", "keys that a query sees, itself included; a list: by layer"
    )
    attn_scale: Any = key("auto | float (0, inf)", "factor on the scores; auto: as the score is published")
    attn_softcap: Any = key("off | float (0, inf)", "c in c tanh(score / c), before the mask")
    final_softcap: Any = key("off | float (0, inf)", "c in c tanh(logit / c), on the output")
    kv_bias: str = key("off | key | key_value", "a learned key (and value) that every query sees; key: its value is 0")
    sink_token: bool = key("on | off", "a learned embedding before each sequence, without a position")
    z_loss: float = key("float [0, inf)", "factor on the mean squared log-sum-exp of the logits, added to the loss")
    seed: int = key("int [0, 2147483647]", "fixes initial values, data order and dropout together")
    preset: str = key("none | text", "the published recipe that sets the other keys' defaults", science=False)
    experiment: str = key("text", "the folder of runs_dir that the run belongs to", science=False)
    runs_dir: str = key("text", "the folder in which runs are saved", science=False)
    rerun: bool = key(
        "on | off", "train again in a new folder next to a finished run of the same identity", science=False
    )
    evals: list[str] = key(
        "list of text",
        "evaluations after the last step, as streaming or streaming:kept:8; `evaluate` can add them later",
        science=False,
    )
    resolved: Resolved = field(init=False)

    @property
    def schedule(self) -> Schedule:
        """The learning-rate schedule, which parameters decay, and clipping."""
        return Schedule.of(self.optim.keys)

    def validates_every(self, steps: int) -> int:
        """The meaning of `train.eval_every` in a run of so many steps. A token takes a third of its training time."""
        if self.train.eval_every != "auto":
            return self.train.eval_every
        affordable = 0.03 * 3 * steps * self.resolved.tokens_per_step / self.train.eval_tokens
        validations = max(2, min(8, int(affordable)))
        return max(1, -(-steps // validations))

    def options(self, resolved: Resolved | None = None) -> dict[str, Option]:
        """The option of each axis and the optimizer, with `auto` and prescribed values resolved."""
        resolved = resolved or self.resolved
        chosen = {group: getattr(self, group) for group in OPTIONS}
        return chosen | {"init": resolved.init, "qk_norm": resolved.qk_norm}

    def layers_reading(self, key: str) -> set[int]:
        """The layers whose mixer reads a key that acts through mixers alone (`READ_BY_MIXERS` in rules.py)."""
        files, layers = option_files("mixer"), range(self.model.n_layers)
        reads = {layer: files[at_layer("mixer", self.mixer, layer).name].reads for layer in layers}
        return {layer for layer in layers if key in reads[layer] or "all" in reads[layer]}

    def nested(self) -> dict[str, Any]:
        """The configuration as the user would write it, with `auto`, for config.yaml."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.init}
        values |= {name: dataclasses.asdict(values[name]) for name in CLOSED_GROUPS}
        return values | {name: values[name].flat() for name in OPTION_GROUPS}

    def science(self) -> dict[str, Any]:
        """Everything that can change the result, except the data, which the identity covers by its content hash.

        `auto` is replaced by its meaning, so setting a key to its default's meaning gives the same run.
        """
        given = self.nested()
        values: dict[str, Any] = {group: option.flat() for group, option in self.options().items()}
        for name in ("model", "train"):
            keys = (key for key in given[name] if key != "name" and f"{name}.{key}" not in _no_science())
            values[name] = {key: given[name][key] for key in keys}
        values |= {name: given[name] for name in keys_of(RunConfig) if name not in _no_science()}
        for name in MEANT:
            values[name] = getattr(self.resolved, name)
        values["bias"] = self.resolved.qkv_bias and self.resolved.attn_out_bias and self.resolved.ffn_bias
        values["window"] = self.resolved.windows if any(self.resolved.windows) else []
        values["model"] |= {"head_dim": self.resolved.head_dim, "d_ff": self.resolved.d_ff}
        values["train"] |= {"steps": self.resolved.steps}
        for axis, meant in LATER.items():
            values[axis] = {k: v for k, v in values[axis].items() if k not in meant or v != meant[k]}
        values = {name: value for name, value in values.items() if value != {} or name not in LATER}
        del values["model"]["d_ff_multiple"], values["train"]["tokens"]
        return values


CLOSED_GROUPS = {"model": ModelConfig, "train": TrainConfig, "probe": ProbeConfig}


@cache
def _no_science() -> frozenset[str]:
    """The keys that cannot change a result."""
    keys = []
    for group, cls in {"": RunConfig, **CLOSED_GROUPS}.items():
        fields = [field for field in dataclasses.fields(cls) if field.metadata.get("science") is False]
        keys += [f"{group}.{field.name}" if group else field.name for field in fields]
    return frozenset(keys)


def by_key(values: dict[str, Any]) -> dict[str, Any]:
    """The nested values of a configuration by key, as on the command line: `norm`, `norm.eps`."""
    keys: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            keys |= {name if key == "name" else f"{name}.{key}": item for key, item in value.items()}
        else:
            keys[name] = value
    return keys


def flat(values: dict[str, Any]) -> dict[str, Any]:
    """Those of `by_key` that can change the result, and never the seed."""
    left_out = {"seed", "tracker", "probe", "resolved"} | _no_science()
    return {key: v for key, v in by_key(values).items() if left_out.isdisjoint((key, key.partition(".")[0]))}


@cache
def keys_of(cls: type) -> dict[str, Constraint]:
    """The keys of a configuration dataclass and their constraints."""
    return {f.name: f.metadata["constraint"] for f in dataclasses.fields(cls) if "constraint" in f.metadata}

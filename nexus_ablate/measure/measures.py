"""Every number that a run can produce: its name, unit, definition, source, direction and where it is measured.

`docs/metrics.md`, the panels and summaries on W&B, and the columns of comparisons are generated from this table. It
computes nothing and doesn't import torch.

A name may have placeholders, as in `attn/{block}/sink_rate`; PLACEHOLDERS defines them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from itertools import chain

from nexus_ablate.console import markdown_table
from nexus_ablate.errors import unknown

PLACEHOLDERS = {
    "block": (r"block_\d+", "a block, from `block_000`"),
    "site": (r"resid|attn|ffn", "`resid` (the residual stream after the block), `attn` or `ffn` (outputs of the branches)"),
    "branch": (r"attn|ffn", "`attn` or `ffn`"),
    "part": (r"attn|ffn|norm", "`attn`, `ffn` or `norm` (everything else in the block)"),
    "module": (r"(?!global\b)[a-z]\w*", "a module outside the blocks: `embedding`, `final_norm`, `head` ..."),
    "vector": (r"query|key|value", "`query`, `key` or `value`"),
    "role": (r"[a-z]\w*", "`query key value gate attn_out ffn_in ffn_out embedding position head small_map` or `vector`"),
    "matrix": (r"[a-z]\w*", "the role of a matrix; a second one of that role is `ffn_in_2`"),
    "figure": (r"[a-z]\w*", "the name that the option gives it"),
    "set": (r"(?!train\b|val\b)[a-z]\w*", "a further validation set"),
    "task": (r"compile|eval|probe|checkpoint", "`compile`, `eval`, `probe` or `checkpoint`"),
    "metric": (r"train/loss|grad_norm/global", "`train/loss` or `grad_norm/global`"),
    "onset": (r"attn/sink_rate|act/resid/max_over_median|repeats/accuracy", "`attn/sink_rate`, `act/resid/max_over_median` or `repeats/accuracy`"),
    "kind": (r"newline|full_stop", "`newline` or `full_stop`"),
    "factor": (r"\d+", "the factor of the training context"),
    "distance": (r"\d+(?:-\d+)?", "`0`, `1`, `2-3`, `4-7` ..."),
    "tokens_read": (r"\d+(?:-\d+)?", "`1`, `2`, `3-4`, `5-8` ..."),
    "scheme": (r"[a-z]\w*", "a scheme of the table below"),
    "pairs": (r"\d+", "a number of pairs"),
    "length": (r"\d+", "the length of a string"),
    "change": (r"before|(?:massive|sink)_\w+", "`before`, or a change of the list below"),
}  # fmt: skip
"""The regular expression and the meaning of each placeholder."""


@dataclass(frozen=True)
class Measure:
    """One number, or one list of numbers.

    Attributes:
        name: The name with placeholders.
        unit: The unit; "" for a ratio or a share.
        definition: Its definition in a sentence.
        where: Where it is measured: `step` (a row of metrics.jsonl), `standard` or `full` (a probe of this level:
            probes.jsonl), `summary` (summary.json), or the name of an evaluation.
        better: `lower`, `higher` or "" (neither).
        log: Whether plots use a logarithmic scale.
        source: The paper that defines it.
        whole: How the whole model's figure is computed from those of blocks and heads; "" if there is none. Its name
            has no `/{block}`, and it is in metrics.jsonl and summary.json.
        only: The condition under which it exists.
        title: A few words for a panel or a picture.
        panel: The section of the W&B workspace that plots the whole model's figure over training.
        heat_map: Whether pictures show it by block and step.
        most: The largest possible value, if there is one: the end of a picture's scale, and the ceiling of a share.
        floor: Of a share of right answers, the figure beside it that guessing would reach. The number of answers is
            beside it too, as `items`. Such shares are compared by their logits, and above the floor and below the
            ceiling only.
    """

    name: str
    unit: str
    definition: str
    where: tuple[str, ...]
    better: str = ""
    log: bool = False
    source: str = ""
    whole: str = ""
    only: str = ""
    title: str = ""
    panel: str = ""
    heat_map: bool = False
    most: float | None = None
    floor: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Its name, and that of the whole model's figure if there is one."""
        whole = self.name.replace("/{block}", "").replace("{site}", "resid")
        return (self.name, whole) if self.whole else (self.name,)


NATS, BITS, HASH = "nats per token", "bits per byte", "hash"
STEP, SUMMARY, STANDARD, FULL = ("step",), ("summary",), ("standard",), ("full",)
LOGGED = (*STEP, *SUMMARY)


# fmt: off
def _answers(name: str, which: str = "", source: str = "") -> tuple[Measure, ...]:
    """The figures of an evaluation that counts right answers; for `minimal_pairs` an answer is a pair."""
    where = (name.partition("/")[0],)
    return (
        Measure(f"{name}/accuracy", "", f"share of right answers{which}", where, "higher", source=source, most=1.0, floor="chance"),
        Measure(f"{name}/margin", "nats", f"log-probability of the right answer minus that of the most likely other one, mean over answers{which}", where, "higher", source=source),
        Measure(f"{name}/items", "answers", f"number of answers{which}", where),
        Measure(f"{name}/chance", "", f"the accuracy of guessing{which}", where),
        Measure(f"{name}/ngram_accuracy", "", f"the accuracy of a trigram model of the training tokens{which}", where, most=1.0),
        Measure(f"{name}/ngram_margin", "nats", f"the margin of a trigram model of the training tokens{which}", where),
    )


def _losses(name: str, which: str = "") -> tuple[Measure, ...]:
    """The losses of a repeated segment."""
    where = (name.partition("/")[0],)
    return (
        Measure(f"{name}/loss_first", NATS, f"loss of a segment's first occurrence, without its first token{which}", where),
        Measure(f"{name}/loss_second", NATS, f"loss of its second occurrence, without its first token{which}", where, "lower"),
        Measure(f"{name}/gain", NATS, f"`loss_first` minus `loss_second`{which}", where, "higher"),
    )
# fmt: on

SECTIONS: dict[str, tuple[Measure, ...]] = {
    "training": (
        Measure("step", "steps", "optimizer steps taken", STEP),
        Measure("tokens", "tokens", "training tokens read", LOGGED),
        Measure("flops", "FLOPs", "training FLOPs", LOGGED),
        Measure("seconds", "s", "training time over all resumes, without compilation, validation, probes and checkpoints", LOGGED, "lower"),
        Measure("train/loss", NATS, "mean cross-entropy since the last row", STEP, "lower"),
        Measure("train/bpb", BITS, "`train/loss` in bits per byte", STEP, "lower"),
        Measure("train/z_loss", NATS, "mean z-loss since the last row, trained on and not part of `train/loss`", STEP, "lower", only="z_loss > 0"),
        Measure("option/{figure}", "", "a figure or a loss that an option contributes, mean since the last row and over layers (losses: sum over layers, trained on and not part of `train/loss`)", STEP, only="an option that has one, as `ffn=moe`"),
        Measure("val/loss", NATS, "mean cross-entropy on the fixed validation windows, see below", STEP, "lower"),
        Measure("val/bpb", BITS, "`val/loss` in bits per byte", STEP, "lower"),
        Measure("{set}/loss", NATS, "mean cross-entropy on a further validation set", LOGGED, "lower", only="data with further validation sets, as `prose` of stdlib"),
        Measure("{set}/bpb", BITS, "`{set}/loss` in bits per byte", LOGGED, "lower", only="data with further validation sets"),
        Measure("grad_norm/global", "", "norm of all gradients before clipping", LOGGED, log=True, title="gradient norm", panel="gradients"),
        Measure("grad_norm/{block}/{part}", "", "norm of the gradients of a part of a block, before clipping", STEP, log=True),
        Measure("grad_norm/{module}", "", "norm of the gradients of a module outside the blocks, before clipping", STEP, log=True),
        Measure("grad_norm/role/{role}", "", "norm of the gradients of all parameters of a role, before clipping; `vector`: gains and biases", STEP, log=True),
        Measure("grad_norm/first_over_last", "", "norm of the gradients of the first block over that of the last", LOGGED, log=True),
        Measure("weight_rms/{block}", "", "RMS of all matrix entries of the block", STEP, only="probe=standard or full"),
        Measure("weight_rms/global", "", "RMS of all matrix entries of the blocks", LOGGED, only="probe=standard or full", title="RMS of the weights", panel="weights"),
        Measure("weight_rms/role/{role}", "", "RMS of all parameters of a role; `vector`: gains and biases", LOGGED, only="probe=standard or full", title="RMS of the weights by role", panel="weights"),
        Measure("lr", "", "learning rate of the last step", STEP),
        Measure("tokens_per_second", "tokens/s", "training speed since the start", LOGGED, "higher"),
        Measure("mfu", "", "achieved share of the device's peak FLOPs in the run's precision", STEP, "higher", only="a GPU whose peak is known"),
        Measure("peak_memory_bytes", "bytes", "largest memory so far: allocated by training on the GPU, or resident", LOGGED, "lower"),
        Measure("loss_scale", "", "factor on the loss in float16", STEP, only="train.precision=fp16"),
        Measure("batch_hash", HASH, "chain over all training batches", LOGGED),
    ),
    "summary": (
        Measure("val_loss", NATS, "the last `val/loss`", SUMMARY, "lower"),
        Measure("val_bpb", BITS, "the last `val/bpb`", SUMMARY, "lower"),
        Measure("train_loss", NATS, "mean cross-entropy of training over the last tenth of the steps; the gradient norms of the summary: the mean of those logged there", SUMMARY, "lower"),
        Measure("generalization_gap", NATS, "`val_loss` minus `train_loss`", SUMMARY, "lower"),
        Measure("best_val_loss", NATS, "the lowest `val/loss`", SUMMARY, "lower"),
        Measure("unigram_bpb", BITS, "of the training text's token frequencies on the validation text", SUMMARY),
        Measure("params", "", "parameters", SUMMARY),
        Measure("params_non_embedding", "", "parameters without tables of tokens and positions", SUMMARY),
        Measure("flops_per_token", "FLOPs", "training FLOPs per token", SUMMARY),
        Measure("steps", "steps", "optimizer steps taken", SUMMARY),
        Measure("train_tokens", "tokens", "training tokens that the text has", SUMMARY),
        Measure("seconds_{task}", "s", "time for activities other than training steps", SUMMARY),
        Measure("device", "text", "the device that computed", SUMMARY),
        Measure("processor", "text", "the CPU that computed", SUMMARY, only="train.device=cpu"),
        Measure("float32_matmul_precision", "text", "of PyTorch; highest: float32 products without TF32", SUMMARY),
        Measure("threads", "", "CPU threads", SUMMARY),
        Measure("world_size", "", "processes that shared a batch", SUMMARY),
        Measure("compiled", "", "whether the step was compiled", SUMMARY),
        Measure("programs", "", "programs that the compiler made for the run: one for training, on a GPU one more for validation", SUMMARY),
        Measure("graph_breaks", "", "graph breaks in them", SUMMARY, "lower"),
        Measure("eval_hash", HASH, "over the tokens of the validation windows", SUMMARY),
        Measure("probe_hash", HASH, "over the tokens of the probe batch", SUMMARY, only="probe=standard or full"),
        Measure("arm_hash", HASH, "over everything that can change the result, except the seed", SUMMARY),
        Measure("init_hash", HASH, "over the standard normal numbers behind the initial values", SUMMARY),
        Measure("spike_score/{metric}", "", "share of logged values after warm-up above mean + 6 standard deviations of the 128 before them", SUMMARY, "lower", source="OLMo-core's stability monitor", only="more than 128 logged values after warm-up"),
        Measure("onsets/{onset}/step", "steps", "first step at which `attn/sink_rate` reached 0.1, `act/resid/max_over_median` 1000, or `repeats/accuracy` 0.5", SUMMARY, only="a run that reached it"),
        Measure("onsets/{onset}/tokens", "tokens", "training tokens up to `onsets/{onset}/step`", SUMMARY, only="a run that reached it"),
    ),
    "activations": (
        Measure("act/{block}/{site}/rms", "", "root of the mean square of all entries", STANDARD, whole="largest, of `resid`"),
        Measure("act/{block}/{site}/kurtosis_token", "", "E[(x - mean)^4] / var^2 over the width of a token, mean over tokens; 3 (D-1)/(D+1) for a Gaussian", STANDARD, log=True, whole="largest, of `resid`", title="kurtosis of the residual stream", panel="outliers", heat_map=True),
        Measure("act/{block}/resid/max_over_median", "", "largest magnitude of a sequence divided by its median, mean over sequences", STANDARD, log=True, source="arXiv:2402.17762", whole="largest", title="largest over median magnitude of the residual stream", panel="outliers", heat_map=True),
        Measure("act/{block}/resid/mean_over_rms", "", "magnitude of a token's mean over its width, over its RMS, mean over tokens: what LayerNorm subtracts; sqrt(2 / (pi D)) for a Gaussian", STANDARD, whole="mean", title="mean over RMS of the residual stream", panel="outliers"),
        Measure("act/{block}/resid/first_norm_ratio", "", "norm of the first token over the mean norm of the others, mean over sequences", STANDARD, log=True, source="arXiv:2410.10781", whole="largest", title="norm of the first token over the others'", panel="sinks"),
        Measure("act/{block}/{site}/max_abs", "", "largest magnitude", STANDARD, log=True, whole="largest, of `resid`", title="largest activation", panel="outliers"),
        Measure("act/resid/growth", "", "RMS of the residual stream after the last block divided by that after the first", LOGGED, only="probe=standard or full"),
        Measure("act/{block}/resid/kurtosis_sequence", "", "`kurtosis_token` over all T x D entries of a sequence", FULL, log=True, whole="largest"),
        Measure("act/{block}/resid/kurtosis_channel", "", "mean(s^4) / mean(s^2)^2, s the RMS of a channel: 1 (all equal) to D (one holds all)", FULL, log=True, source="arXiv:2405.19279", whole="largest"),
        Measure("act/{block}/resid/massive_count", "entries per sequence", "entries of at least 1000 times the median magnitude", FULL, source="arXiv:2402.17762", whole="largest"),
        Measure("act/{block}/resid/massive_count_strict", "entries per sequence", "those that exceed 100 too, as published; depends on the scale of the residual stream", FULL, source="arXiv:2402.17762", whole="largest"),
        Measure("act/{block}/resid/top_magnitudes", "", "the three largest magnitudes, then the median; mean over sequences", FULL, log=True, source="the authors' script"),
        Measure("act/{block}/resid/top_channel", "index", "channel of the largest entry of a sequence, the most common over sequences", FULL),
        Measure("act/{block}/resid/top_position", "index", "position of the largest entry of a sequence, the most common over sequences", FULL),
        Measure("act/{block}/resid/top_channel_agreement", "", "share of sequences that have it in that channel: 1 means the same channel for every input", FULL, whole="mean"),
        Measure("act/{block}/resid/top_position_agreement", "", "share of sequences that have it at that position", FULL, whole="mean"),
        Measure("act/{block}/resid/top_on_first", "", "share of sequences whose largest entry is on the first token", FULL, whole="mean"),
        Measure("act/{block}/resid/top_on_{kind}", "", "share of sequences whose largest entry is on such a token, counted under the first kind that fits", FULL, whole="mean"),
        Measure("act/{block}/resid/cosine", "", "cosine between the residual stream before and after the block, mean over tokens", FULL, whole="mean"),
        Measure("act/{block}/{branch}/branch_ratio", "", "norm of the branch's output divided by that of the residual stream that enters the block, mean over tokens", FULL, whole="mean"),
        Measure("act/bondarenko_kurtosis", "", "E[(x - mean)^4] / (s^4 + 1e-6) with the unbiased s, mean over rows and tensors (below)", (*FULL, *LOGGED), log=True, source="arXiv:2306.12929"),
        Measure("act/bondarenko_kurtosis_max", "", "`act/bondarenko_kurtosis` of the tensor where it is largest", (*FULL, *LOGGED), log=True, source="arXiv:2306.12929"),
        Measure("act/bondarenko_inf_norm", "", "mean over rows of the largest magnitude, the largest over the tensors", (*FULL, *LOGGED), log=True, source="arXiv:2306.12929"),
    ),
    "attention": (
        Measure("attn/{block}/first_token_mass", "", "share of attention from queries 1 .. T-1 to token 0, mean; uniform attention: 0.059 at T = 64", STANDARD, whole="mean", title="attention to the first token", panel="sinks", heat_map=True, most=1.0),
        Measure("attn/{block}/sink_rate", "", "share of sequences in which token 0 gets more than 0.3, mean over all queries from it on", STANDARD, source="arXiv:2410.10781, Eq. 3", whole="mean", title="sink rate", panel="sinks"),
        Measure("attn/{block}/sink_rate_2", "", "share of sequences in which the second token gets more than 0.3, mean over all queries from it on", FULL, source="arXiv:2410.10781, Eq. 3", whole="mean"),
        Measure("attn/{block}/sink_rate_3", "", "share of sequences in which the third token gets more than 0.3, mean over all queries from it on", FULL, source="arXiv:2410.10781, Eq. 3", whole="mean"),
        Measure("attn/{block}/sink_rate_4", "", "share of sequences in which the fourth token gets more than 0.3, mean over all queries from it on", FULL, source="arXiv:2410.10781, Eq. 3", whole="mean"),
        Measure("attn/{block}/entropy", "", "-sum a ln a divided by that of uniform attention to all keys so far, whatever the window: 1 uniform, 0 one key; rows with one key are left out", STANDARD, source="arXiv:2303.06296", whole="mean", title="attention entropy (uniform 1)", panel="sinks", heat_map=True, most=1.0),
        Measure("attn/{block}/front_mass", "", "share of attention to keys without a query: that of `kv_bias`, or the normalizer's own", STANDARD, whole="mean", only="kv_bias, or a normalizer with a key of its own"),
        Measure("attn/{block}/max_logit", "", "largest magnitude of a scaled score with its position bias, before the cap, over visible keys", STANDARD, source="arXiv:2302.05442", whole="largest", title="largest attention logit", panel="outliers"),
        Measure("attn/{block}/score_at/{distance}", "", "mean scaled score with its position bias, before the cap, of a query and a key so many tokens before it; token 0 and keys that a window hides left out", FULL, whole="mean"),
        Measure("attn/{block}/{vector}/first_norm_ratio", "", "norm of the first token's vector, with its position, over the mean norm of the others', mean over sequences", STANDARD, log=True, source="arXiv:2410.10781", whole="mean", title="norm of the first token's query, key and value over the others'", panel="sinks"),
    ),
    "repeats": (
        Measure("repeats/accuracy", "", "share of tokens predicted right in the second occurrence of a random segment of up to 16 tokens, 16 segments, the same at every probe", LOGGED, "higher", source="arXiv:2209.11895", only="probe=standard or full, and room for two segments of 4 tokens", title="accuracy on repeated random tokens", panel="capabilities", most=1.0),
        Measure("repeats/gain", NATS, "loss of the first occurrence minus that of the second", LOGGED, "higher", source="arXiv:2209.11895", only="as `repeats/accuracy`", title="gain from repetition", panel="capabilities"),
    ),
    "gates and output": (
        Measure("gate/{block}/mean", "", "mean gate score", STANDARD, whole="mean", only="gates that multiply"),
        Measure("gate/{block}/closed", "", "share of scores with a magnitude of at most 0.1", STANDARD, whole="mean", only="gates that multiply"),
        Measure("logits/log_sum_exp", "nats", "ln sum exp of the logits after the cap, mean over tokens", (*STANDARD, *LOGGED)),
        Measure("logits/max_abs", "", "largest logit magnitude after the cap", (*STANDARD, *LOGGED)),
    ),
    "weights": (
        Measure("weight/{block}/{matrix}/rms", "", "RMS of the entries", FULL),
        Measure("weight/{block}/{matrix}/spectral_norm", "", "largest singular value, from the smaller Gram matrix", FULL, whole="largest"),
        Measure("update_ratio/{block}/{matrix}", "", "norm of the optimizer's last change, decay included, divided by the weight's norm before it", FULL, log=True, whole="mean"),
    ),
    "extrapolation": (
        Measure("extrapolation/non_overlapping/{factor}", NATS, "loss in windows of that length, which begin where validation windows do; at 1 the validation loss", ("extrapolation",), "lower", only="positions that are defined at that length"),
        Measure("extrapolation/sliding/{factor}", NATS, "loss of the same targets at every length, spread over the validation text, each with between L - T/2 and L tokens before it", ("extrapolation",), "lower", source="arXiv:2108.12409", only="positions that are defined at that length"),
        Measure("extrapolation/non_overlapping_gap/{factor}", NATS, "loss in windows of that length minus the loss in windows of the trained length", ("extrapolation",), "lower", only="positions that are defined at both lengths"),
        Measure("extrapolation/sliding_gap/{factor}", NATS, "sliding loss at that length minus the sliding loss at the trained length", ("extrapolation",), "lower", only="positions that are defined at both lengths"),
        Measure("extrapolation/by_position/{factor}/{tokens_read}", NATS, "the non-overlapping loss by the number of tokens read", ("extrapolation",), "lower", only="positions that are defined at that length"),
    ),
    "streaming": (
        Measure("streaming/cache_tokens", "tokens", "size of the cache: the training context", ("streaming",)),
        Measure("streaming/kept_tokens", "tokens", "first tokens that are kept", ("streaming",)),
        Measure("streaming/text_tokens", "tokens", "length of a text", ("streaming",)),
        Measure("streaming/loss_before", NATS, "loss until the cache is full", ("streaming",), "lower"),
        Measure("streaming/loss_kept", NATS, "loss after the cache is full, with the first tokens kept", ("streaming",), "lower", source="arXiv:2309.17453"),
        Measure("streaming/loss_dropped", NATS, "loss after the cache is full, without keeping them", ("streaming",), "lower", source="arXiv:2309.17453"),
        Measure("streaming/difference", NATS, "`loss_dropped` minus `loss_kept`: the model's dependence on its first tokens", ("streaming",), "lower"),
    ),
    "quantization": (
        Measure("quantization/loss", NATS, "loss in float", ("quantization",), "lower"),
        Measure("quantization/schemes/{scheme}/loss", NATS, "loss with rounded weights and inputs", ("quantization",), "lower"),
        Measure("quantization/schemes/{scheme}/gap", NATS, "loss with rounded weights and inputs minus the loss in float", ("quantization",), "lower"),
        Measure("quantization/gap_by_block", NATS, "the gap with one block alone under `dynamic_tensor`", ("quantization",), "lower"),
        Measure("quantization/worst_block", "index", "the block with the largest `gap_by_block`", ("quantization",)),
    ),
    "intervention": (
        Measure("intervention/threshold", "", "entries of this many times the median magnitude of their sequence are changed", ("intervention",), log=True),
        Measure("intervention/massive", "", "whether an entry reaches 1000 times the median; otherwise the threshold is what one entry in a thousand reaches", ("intervention",)),
        Measure("intervention/entries_per_sequence", "entries per sequence", "entries that reach the threshold, of all blocks of the unchanged model together, in a training sequence", ("intervention",)),
        Measure("intervention/{change}/loss", NATS, "loss under a change", ("intervention",), "lower", source="arXiv:2402.17762"),
        Measure("intervention/{change}/gap", NATS, "loss under a change minus the loss before it", ("intervention",)),
        Measure("intervention/{change}/attn/first_token_mass", "", "as `attn/first_token_mass`", ("intervention",)),
        Measure("intervention/{change}/attn/sink_rate", "", "as `attn/sink_rate`", ("intervention",)),
        Measure("intervention/{change}/act/resid/max_over_median", "", "as `act/resid/max_over_median`", ("intervention",), log=True),
        Measure("intervention/{change}/act/resid/kurtosis_token", "", "as `act/resid/kurtosis_token`", ("intervention",), log=True),
    ),
    "induction": (
        *_answers("induction", source="arXiv:2209.11895"),
        *_losses("induction"),
        *_answers("induction/distance/{distance}", ", at a distance"),
        *_losses("induction/distance/{distance}", ", at a distance"),
    ),
    "recall": (
        *_answers("recall", source="arXiv:2312.04927"),
        *_answers("recall/distance/{distance}", ", at a distance from the key, with all places asked for equally often"),
        *_answers("recall/pairs/{pairs}", ", with a number of pairs"),
    ),
    "copy": (
        *_answers("copy", source="arXiv:2402.01032"),
        *_answers("copy/length/{length}", ", in strings of a length"),
        Measure("copy/length/{length}/whole", "", "share of strings of a length without an error", ("copy",), "higher", most=1.0),
    ),
    "minimal_pairs": (
        *_answers("minimal_pairs", source="arXiv:1912.00582"),
        *_answers("minimal_pairs/tokens_read/{tokens_read}", ", by the number of tokens that the sentences of a pair share at their start, the separator before them included"),
        Measure("minimal_pairs/left_out", "pairs", "pairs that are longer than the position scheme's table", ("minimal_pairs",)),
    ),
}  # fmt: skip

MEASURES: tuple[Measure, ...] = tuple(chain.from_iterable(SECTIONS.values()))


def table(section: str) -> str:
    """A section as a Markdown table."""
    rows = []
    for measure in SECTIONS[section]:
        name = " ".join(f"`{name}`" for name in measure.names)
        arrow = {"lower": " (lower is better)", "higher": " (higher is better)"}.get(measure.better, "")
        definition = measure.definition + arrow + (f"; whole model: {measure.whole}" if measure.whole else "")
        definition += f"; only with {measure.only}" if measure.only else ""
        rows.append((name, measure.unit, definition, ", ".join(measure.where), measure.source))
    return "\n".join(markdown_table(("name", "unit", "definition", "where", "source"), rows))


def measure_of(name: str) -> Measure | None:
    """The measure of a name as written by runs; None if the table doesn't have it, as for runs of an older version.

    Ignores keys in the name of an evaluation, such as `streaming:kept:8/loss_kept`.
    """
    name = re.sub(r"^(\w+):[^/]*", r"\1", name)
    return next((measure for pattern, measure in _patterns() if pattern.fullmatch(name)), None)


@cache
def whole_of(name: str) -> tuple[str, str] | None:
    """The figure of the whole model that a block's figure is a part of, and how it is made; None where there is none.

    `act/block_002/resid/rms`: (`act/resid/rms`, `largest`).
    """
    measure, whole = measure_of(name), re.sub(r"/block_\d+", "", name)
    if measure is None or not measure.whole or whole == name or measure_of(whole) is not measure:
        return None
    return whole, measure.whole.partition(",")[0]


def find(name: str) -> Measure:
    """The measure of a name, as written by runs or with placeholders as in the table.

    Raises:
        ConfigError: There is none.
    """
    measure = measure_of(name) or next((measure for measure in MEASURES if name in measure.names), None)
    if measure is None:
        raise unknown("there is no measure of this name", name, chain.from_iterable(known.names for known in MEASURES))
    return measure


@cache
def _patterns() -> list[tuple[re.Pattern[str], Measure]]:
    """Regular expressions of all names, those without placeholders first."""
    pairs = [(name, measure) for measure in MEASURES for name in measure.names]
    pairs.sort(key=lambda pair: pair[0].count("{"))
    return [(re.compile(expression(name)), measure) for name, measure in pairs]


def expression(name: str) -> str:
    """A regular expression of the names that runs write."""
    parts = re.split(r"\{(\w+)\}", name)
    return "".join(f"(?:{PLACEHOLDERS[p][0]})" if i % 2 else re.escape(p) for i, p in enumerate(parts))

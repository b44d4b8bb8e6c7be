#!/usr/bin/env python
"""Try every causal language model of the installed `transformers` library, and print what becomes of each.

    scripts/published.py                    all types, and every key of the families, changed and removed
    scripts/published.py gpt2 llama         some of them
    scripts/published.py --keys gpt2        only the keys

A type is exact, refused with a reason, or wrong: accepted by the proof of `nexus-ablate import` though another
comparison differs. The other comparison has other lengths, weights and precision than the proof. A key is inert if
changing it leaves the library's own logits as they were.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from nexus_ablate.console import markdown_table
from nexus_ablate.errors import UserError
from nexus_ablate.pretrained import shrink
from nexus_ablate.pretrained.expression import express
from nexus_ablate.pretrained.library import built, outline, parse_config
from nexus_ablate.pretrained.proof import counterpart, in_double, structure

LAYERS = 2
LARGE = 2**10
ROUNDING = 1e-3
"""Largest difference of a logit in float32, relative to the largest logit."""
NEEDED: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 1, "num_experts_per_tok": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "reformer": {"is_decoder": True},
}
"""Values without which the library can't build a model, or without which a family isn't dense."""
NO_CHOICE = {"model_type", "architectures", "transformers_version", "dtype", "id2label", "label2id", "problem_type"}
"""Keys that don't choose anything of a model."""
OTHER_WORDS = {"gelu": "silu", "silu": "gelu", "relu2": "relu", "relu": "gelu", "gelu_new": "relu",
               "gelu_pytorch_tanh": "silu", "default": "linear"}  # fmt: skip


@dataclass
class Result:
    """What becomes of a configuration: `exact`, `refused` or `wrong`, with the reason."""

    word: str
    reason: str = ""


@dataclass
class Keys:
    """What becomes of a family when one key differs."""

    words: Counter[str] = field(default_factory=Counter)
    refused: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    inert: list[str] = field(default_factory=list)


def types() -> list[str]:
    """The `model_type` of every causal language model of the library."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tried(values: dict[str, Any]) -> Result:
    """Import a configuration, and compare it in another way if it is accepted."""
    try:
        config = parse_config(values)
        express(config, outline(config))
        found = structure(config)
    except UserError as error:
        return Result("refused", f"{error.problem}: {error.got}")
    if found.part:
        return Result("refused", f"the proof differs by {found.difference:.0e}, first in {found.part}")
    difference = compared(config)
    return Result("exact") if difference <= ROUNDING else Result("wrong", f"differs by {difference:.0e}")


def compared(config: Any) -> float:
    """The largest difference of a logit in float32, with other weights and lengths than the proof has."""
    shrink.WINDOW, before = 37, shrink.WINDOW
    try:
        small, length = shrink.shrunk(config)
    finally:
        shrink.WINDOW = before
    with torch.no_grad():
        library = disturbed(built(small, dtype=torch.float32))
        expression = express(small, library.state_dict())
        model = counterpart(expression, length)
        model.load_state_dict(expression.state(model))
        tokens = torch.randint(0, shrink.VOCAB, (2, length), generator=torch.Generator().manual_seed(7))
        expected = library(input_ids=tokens, use_cache=False).logits
        return float((model(tokens) - expected).abs().max() / expected.abs().max())


def disturbed(model: torch.nn.Module) -> torch.nn.Module:
    """The model with drawn matrices, and noise on gains and biases."""
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        noise = 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
    return model


def few_layers(kind: str) -> dict[str, Any]:
    """A family's default configuration at small sizes, with few layers."""
    values = parse_config({"model_type": kind} | NEEDED.get(kind, {})).to_dict()
    config = parse_config(values)
    layers = config.num_hidden_layers
    for key, value in list(values.items()):
        if isinstance(value, list) and len(value) == layers:
            starts = range(layers - LAYERS + 1)
            values[key] = max((value[i : i + LAYERS] for i in starts), key=lambda part: len(set(part)))
        if key == "attention_types":
            values[key] = [[["global", "local"], LAYERS // 2]]
    names = config.attribute_map
    values[names.get("num_hidden_layers", "num_hidden_layers")] = LAYERS
    return shrink.shrunk(parse_config(values))[0].to_dict()


def departures(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Configurations with one key changed or removed, each with `changed` or `removed` and the key."""
    for key, value in values.items():
        if key.startswith("_") or key in NO_CHOICE:
            continue
        if isinstance(value, dict):
            for how, name, inner in departures(value, (*path, key)):
                yield how, name, values | {key: inner}
            continue
        name = ".".join((*path, key))
        yield "removed", name, {other: v for other, v in values.items() if other != key}
        for other in changed(key, value):
            yield "changed", name, values | {key: other}


def changed(key: str, value: Any) -> list[Any]:
    """Other values of a key; none for lists and free text."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + (-1 if key.endswith("_token_id") and value else 1)]
    if isinstance(value, float):
        return [value * 0.5 if value else 0.25]
    if isinstance(value, str):
        return [OTHER_WORDS[value]] if value in OTHER_WORDS else []
    return [3.0, 3, True] if value is None else []


def library_logits(values: dict[str, Any], tokens: torch.Tensor) -> Any:
    """The library's logits, none of a model that has its default size; None if the library can't build it."""
    try:
        config = parse_config(values)
        if config.hidden_size > LARGE:
            return torch.empty(0)
        with in_double(), torch.no_grad():
            return disturbed(built(config, dtype=torch.float64))(input_ids=tokens, use_cache=False).logits
    except Exception:  # whatever the library raises for a value that it can't use
        return None


def parsed(values: dict[str, Any]) -> dict[str, Any]:
    """All values of a configuration, none if the library refuses it."""
    try:
        return parse_config(values).to_dict()
    except UserError:
        return {}


def overrides_of(values: dict[str, Any]) -> list[str]:
    """The overrides of a configuration; none if it is refused."""
    try:
        config = parse_config(values)
        return express(config, outline(config)).overrides
    except UserError:
        return []


def keys_of(kind: str) -> Keys:
    """What becomes of a family with each key changed and removed."""
    values, found = few_layers(kind), Keys()
    length = shrink.shrunk(parse_config(values))[1]
    tokens = torch.randint(0, shrink.VOCAB, (2, length), generator=torch.Generator().manual_seed(1))
    base, overrides = library_logits(values, tokens), overrides_of(values)
    effects: dict[str, set[bool]] = {}
    for how, name, departure in departures(values):
        if parsed(departure) == parsed(values):  # the removed value is the default
            found.words["exact"] += 1
            continue
        logits = library_logits(departure, tokens)
        if logits is None:  # refused by transformers itself
            continue
        same = logits.shape == base.shape and bool((logits - base).abs().max() <= 1e-6)
        if how == "changed":
            effects.setdefault(name, set()).add(same)
        result = Result("exact") if same and overrides_of(departure) == overrides else tried(departure)
        found.words[result.word] += 1
        if result.word != "exact":
            getattr(found, result.word).append(f"{name} {how}: {result.reason}")
    found.inert = [name for name, effect in effects.items() if effect == {True}]
    return found


def outcomes(kinds: list[str]) -> dict[str, Result]:
    """What becomes of each type's default configuration."""
    return {kind: tried({"model_type": kind} | NEEDED.get(kind, {})) for kind in kinds}


def types_table(results: dict[str, Result]) -> Iterator[str]:
    """Lines about every type, and at the end their counts."""
    rows = [(kind, result.word, plain(result.reason)) for kind, result in results.items()]
    yield from ["## Types", "", *markdown_table(("model_type", "outcome", "reason"), rows)]
    counts = Counter(result.word for result in results.values())
    yield from ["", f"{len(results)} types: {', '.join(f'{counts[word]} {word}' for word in ORDER)}.", ""]


def keys_table(families: list[str]) -> Iterator[str]:
    """Lines about the keys of families that are exact, and at the end their counts and everything wrong."""
    total: Counter[str] = Counter()
    rows, wrong = [], []
    for kind in families:
        found = keys_of(kind)
        total += found.words
        wrong += [f"- {kind}: {text}" for text in found.wrong]
        refused = ", ".join(dict.fromkeys(text.partition(" ")[0] for text in found.refused))
        rows.append((kind, *(str(found.words[word]) for word in ORDER), refused, ", ".join(found.inert)))
    yield from ["## Keys", "", *markdown_table(("model_type", *ORDER, "refused keys", "inert keys, measured"), rows)]
    counts = ", ".join(f"{total[word]} {word}" for word in ORDER)
    yield from ["", f"One key changed or removed: {counts}.", *wrong]


ORDER = ("exact", "refused", "wrong")


def plain(reason: str) -> str:
    """A reason in one cell of a table."""
    return " ".join(reason.replace("|", "/").split())[:160]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="only these types")
    parser.add_argument("--keys", action="store_true", help="only the keys")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.keys and arguments.types:
        parts = [keys_table(arguments.types)]
    else:
        results = outcomes(arguments.types or types())
        families = [kind for kind, result in results.items() if result.word == "exact"]
        parts = [keys_table(families)] if arguments.keys else [types_table(results), keys_table(families)]
    for line in itertools.chain(*parts):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

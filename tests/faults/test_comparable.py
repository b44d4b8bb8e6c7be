"""Arms differ in their option alone (R16), and every option and every pair of options is a whole model (R17).

The fast tier holds parts of both for every option: test_model.py (the same z, five finite steps, weights read back),
test_training.py (batches and validation tokens of a few arms), test_explain.py (parameters by component).
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from options import EVERY_OPTION, option_pairs
from torch.profiler import ProfilerActivity, profile

import nexus_ablate.model
from faults.bench import logged, run, sizes, weights
from nexus_ablate.attention_core import AttentionCore
from nexus_ablate.axes import init
from nexus_ablate.data import Batches
from nexus_ablate.errors import ConfigError
from nexus_ablate.measure import counts
from nexus_ablate.measure.architecture import architecture
from nexus_ablate.measure.counts import flops_per_token, parameters
from nexus_ablate.model import build_model, countable_model
from nexus_ablate.optimizers import decay_groups
from nexus_ablate.runs import read_run
from nexus_ablate.runs.reading import read_document
from nexus_ablate.training import checkpoint, trainer
from nexus_ablate.training.step import Step

VOCABULARY, STEPS = 11, 5
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
CONSTANT_INPUT = "position=transformer_xl"
"""Its map of sinusoids needs no gradient of its input, so a step spends 2% less than three times the forward pass."""


# --------------------------------------------------------------------------------------------- R16: the same terms


def terms(path) -> tuple[list[Any], dict[str, str], dict[str, torch.Size]]:
    """The chain of batches up to each row and the validation tokens; the z and the shape of each parameter."""
    summary = read_run(path).summary or {}
    chain = [row.get("batch_hash") for row in logged(path)]
    z = read_document(path / "init.json", dict) or {}
    return [*chain, summary["eval_hash"]], z, {name: tensor.shape for name, tensor in weights(path).items()}


def unlike(one, other) -> list[str]:
    """Parameters of one name and shape in two runs that did not begin with the same z."""
    (_, z, shapes), (_, other_z, other_shapes) = one, other
    both = [name for name in z.keys() & other_z.keys() if shapes[name] == other_shapes[name]]
    assert both
    return [name for name in both if z[name] != other_z[name]]


@pytest.fixture
def arm(tiny_run):
    """The terms of a run of an option."""

    def trained(*options: str, steps: int = 200):
        often = (f"train.steps={steps}", "train.log_every=20", "train.eval_every=200", "train.checkpoint_every=200")
        return terms(run(tiny_run(*often, "probe=off", *options)).path)

    return trained


@sizes(4, len(EVERY_OPTION))
def test_arms_share_every_batch_every_first_value_and_every_validation_token(arm, counted, count):
    baseline = arm()
    assert len(set(baseline[0])) >= 11
    refused = 0
    for option in random.Random(0).sample(EVERY_OPTION, count):
        try:
            other = arm(option)
        except ConfigError:  # alone it contradicts the baseline
            refused += 1
            continue
        assert other[0] == baseline[0], option
        assert unlike(baseline, other) == [], option
    counted(f"{count - refused} of {count} options on equal terms for 200 steps, {refused} refused beside the baseline")


@pytest.mark.slow
def test_control_arms_that_draw_from_one_generator_differ(arm, monkeypatch):
    """As most programs do it: initial values, batches and validation windows from one generator, one after another."""
    batch, windows, build = Batches.batch, trainer.eval_windows, nexus_ablate.model.build_model

    def seeded(config, *arguments):
        torch.manual_seed(config.seed)
        return build(config, *arguments)

    def shift() -> int:
        return int(torch.randint(1000, ()))

    monkeypatch.setattr(nexus_ablate.model, "build_model", seeded)
    monkeypatch.setattr(init, "standard_normal", lambda seed, name, shape: torch.randn(shape))
    monkeypatch.setattr(Batches, "batch", lambda self, step: batch(self, step + shift()))
    monkeypatch.setattr(trainer, "eval_windows", lambda tokens, *others: windows(tokens[shift() % 400 :], *others))
    baseline, again, other = arm(steps=20), arm("rerun=on", steps=20), arm("ffn=gelu", steps=20)
    assert again == baseline, "a seed still repeats the run"
    assert not set(other[0]) - {None} & set(baseline[0])
    assert unlike(baseline, other)


# ------------------------------------------------------------------------------------- R17: every option and every pair


def tokens(step: int = 0, rows: int = 2):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (rows, 9), generator=generator).numpy()


def still(config, model) -> list[str]:
    """Train a few steps; the parameters that had no gradient in any of them. A loss that is not finite raises."""
    moved = set()
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: moved.add(name) if gradient.abs().max() > 0 else None)
    step = Step(config, model, STEPS, tokens)
    for number in range(STEPS):
        step.take(number, tokens(number))
    return [name for name, _ in model.named_parameters() if name not in moved]


def read_back(config, model, folder):
    """Another model of the configuration with the weights that a checkpoint of this one holds."""
    checkpoint.save(folder, STEPS, {"model": dict(model.state_dict())}, {})
    loaded = checkpoint.load_newest(folder)
    assert loaded is not None
    config.seed += 1
    other = build_model(config, VOCABULARY)
    config.seed -= 1
    other.load_state_dict(loaded.tensors["model"])
    return other


def profiled(config, model) -> tuple[float, float]:
    """FLOPs of a token by PyTorch's profiler, forward and in all, in the matrix products of a micro-batch's step."""
    for core in (module for module in model.modules() if isinstance(module, AttentionCore)):
        core.fused = False
    batch = torch.from_numpy(tokens(rows=config.train.batch_size))
    forward, backward = (profile(activities=[ProfilerActivity.CPU], with_flops=True) for _ in range(2))
    with forward:
        logits = model(batch[:, :-1]).flatten(0, 1)
    with backward:
        torch.nn.functional.cross_entropy(logits, batch[:, 1:].flatten()).backward()
    spent = [
        sum(e.flops or 0 for e in p.events() or () if e.name in PRODUCTS) / batch[:, 1:].numel()
        for p in (forward, backward)
    ]
    return spent[0], sum(spent)


def rows(count: int) -> list[tuple[str, ...]]:
    every = [*((option,) for option in EVERY_OPTION), *option_pairs()]
    return random.Random(0).sample(every, count) if count else every


@sizes(6, 0)  # 0: every option alone and every pair
def test_every_option_and_pair_learns_is_read_back_and_costs_what_is_said(tiny, tmp_path, monkeypatch, counted, count):
    monkeypatch.setitem(os.environ, "KINETO_LOG_LEVEL", "99")
    refused = built = 0
    furthest = 0.0
    for number, overrides in enumerate(rows(count)):
        try:
            config = tiny(*overrides)
            model = build_model(config, VOCABULARY)
        except ConfigError:
            refused += 1
            continue
        built += 1
        assert still(config, model) == [], overrides
        other, seen = read_back(config, model, tmp_path / str(number)).eval(), torch.from_numpy(tokens(99)[:, :-1])
        assert torch.equal(other(seen), model.eval()(seen)), overrides
        facts = architecture(config, countable_model(config, VOCABULARY), decay_groups(model, config.schedule.decay))
        said = facts["parameters"]
        sizes_of = sum(parameter.numel() for parameter in model.parameters())
        assert sizes_of == parameters(model)[0] == said["total"], overrides
        forward, everything = profiled(config, model.train())
        expected = flops_per_token(config, VOCABULARY)
        assert 3 * forward == pytest.approx(expected, rel=1e-9), overrides
        if CONSTANT_INPUT in overrides:
            assert 0.97 * expected < everything <= expected, overrides
        else:
            assert everything == pytest.approx(expected, rel=0.01), overrides
            furthest = max(furthest, abs(everything / expected - 1))
    assert refused <= len(EVERY_OPTION) // 5
    counted(
        f"{built} models, {refused} refused; FLOPs at most {furthest:.2%} from the profiler's, but Transformer-XL's"
    )


def test_control_a_parameter_that_nothing_uses_is_seen(tiny):
    config = tiny()
    model = build_model(config, VOCABULARY)
    unused = "blocks.0.ffn.gate.weight"
    model.get_parameter(unused).register_hook(torch.zeros_like)
    assert still(config, model) == [unused]


@pytest.mark.slow
def test_control_a_product_that_is_not_counted_is_seen(tiny, monkeypatch):
    config = tiny()
    forward, everything = profiled(config, build_model(config, VOCABULARY))
    monkeypatch.setattr(
        counts, "flop_registry", {op: f for op, f in counts.flop_registry.items() if "bmm" not in str(op)}
    )
    assert flops_per_token(config, VOCABULARY) < 0.99 * min(3 * forward, everything)


def test_control_a_weight_that_a_checkpoint_left_out_is_seen(tiny, tmp_path, monkeypatch):
    config = tiny()
    model = build_model(config, VOCABULARY)
    save = checkpoint.save

    def forgetful(folder, step, tensors, state):
        part = {name: tensor for name, tensor in tensors["model"].items() if not name.endswith("1.ffn.down.weight")}
        return save(folder, step, {"model": part}, state)

    monkeypatch.setattr(checkpoint, "save", forgetful)
    with pytest.raises(RuntimeError, match=r"blocks\.1\.ffn\.down\.weight"):
        read_back(config, model, tmp_path)

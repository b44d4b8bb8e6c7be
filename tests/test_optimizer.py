import math

import pytest
import torch

from nexus_ablate.axes.roles import parameter_roles
from nexus_ablate.config.compose import compose
from nexus_ablate.model import build_model
from nexus_ablate.optimizers import (
    GradientNorms,
    build_optimizer,
    decay_groups,
    learning_rate,
    part_of,
    warmup_steps,
)

TOKENS = torch.randint(0, 11, (2, 8), generator=torch.Generator().manual_seed(0))


def model_of(tiny, *overrides):
    return build_model(tiny("bias=on", "position=learned", "tie_embeddings=off", *overrides), 11)


def optim(*overrides):
    return compose(list(overrides)).optim


@pytest.mark.parametrize("decay", ["matrices", "matrices_embeddings", "all"])
def test_every_parameter_is_in_exactly_one_group(tiny, decay):
    model = model_of(tiny)
    groups = decay_groups(model, decay)
    assert sorted(groups["decayed"] + groups["free"]) == sorted(dict(model.named_parameters()))


def test_decay_groups_are_what_their_names_say(tiny):
    model = model_of(tiny)
    shapes = {n: p.ndim for n, p in model.named_parameters()}
    tables = {"embedding.weight", "position.table.weight"}
    assert set(decay_groups(model, "matrices")["decayed"]) == {n for n, d in shapes.items() if d > 1} - tables
    assert set(decay_groups(model, "matrices_embeddings")["decayed"]) == {n for n, d in shapes.items() if d > 1}
    assert set(decay_groups(model, "all")["decayed"]) == set(shapes)


def test_a_tied_head_counts_as_the_embedding(tiny):
    assert "embedding.weight" in decay_groups(build_model(tiny(), 11), "matrices")["free"]


def test_a_matrix_without_a_role_is_refused(tiny):
    model = build_model(tiny(), 11)
    model.extra = torch.nn.Linear(3, 3)
    with pytest.raises(TypeError, match=r"extra\.weight"):
        parameter_roles(model)


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_a_step_is_adamw_with_decoupled_decay_as_published(tiny, weight_decay):
    """Against the paper's algorithm written out, two steps."""
    model = model_of(tiny)
    config = optim("optim.lr=0.01")
    optimizer = build_optimizer(model, config, weight_decay)
    decayed = set(decay_groups(model, "matrices")["decayed"])
    m, v = {}, {}
    expected = {n: p.detach().clone() for n, p in model.named_parameters()}
    for t in (1, 2):
        loss = torch.nn.functional.cross_entropy(model(TOKENS[:, :-1]).flatten(0, 1), TOKENS[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        for n, p in model.named_parameters():
            m[n] = 0.9 * m.get(n, 0) + 0.1 * p.grad
            v[n] = 0.95 * v.get(n, 0) + 0.05 * p.grad**2
            step = (m[n] / (1 - 0.9**t)) / ((v[n] / (1 - 0.95**t)).sqrt() + 1e-8)
            expected[n] = expected[n] * (1 - 0.01 * (weight_decay if n in decayed else 0)) - 0.01 * step
        optimizer.step()
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), expected[n], rtol=0, atol=1e-5, msg=n)


def test_warm_up_is_linear_and_then_each_schedule_ends_where_it_says():
    for schedule in ("cosine", "linear", "wsd"):
        config = optim(f"optim.schedule={schedule}", "optim.lr=1.0", "optim.warmup=10", "optim.final_lr=0.1")
        rates = [learning_rate(config, s, 100) for s in range(101)]
        assert rates[:10] == pytest.approx([(s + 1) / 11 for s in range(10)])
        assert max(rates) == rates[10] == 1.0
        assert rates[100] == pytest.approx(0.1)
    assert learning_rate(optim("optim.schedule=constant", "optim.lr=0.5", "optim.warmup=3"), 99, 100) == 0.5


def test_cosine_is_nanogpt_s_formula():
    config = optim("optim.lr=1e-3", "optim.warmup=100")
    for step in (100, 700, 1999):
        ratio = (step - 100) / (2000 - 100)
        expected = 1e-4 + 0.5 * (1 + math.cos(math.pi * ratio)) * (1e-3 - 1e-4)
        assert learning_rate(config, step, 2000) == pytest.approx(expected)


def test_wsd_holds_the_peak_and_then_cools_linearly():
    config = optim("optim.schedule=wsd", "optim.lr=1.0", "optim.warmup=0", "optim.cooldown=0.2", "optim.final_lr=0.0")
    rates = [learning_rate(config, s, 100) for s in range(100)]
    assert rates[:81] == [1.0] * 81
    assert rates[90] == pytest.approx(0.5)


def test_automatic_warm_up_suits_short_and_long_runs():
    assert [warmup_steps(optim(), steps) for steps in (8, 80, 800, 2000, 100_000)] == [1, 10, 100, 100, 1000]


def test_gradient_norms_are_torch_s_and_add_up(tiny):
    model = model_of(tiny)
    model(TOKENS).square().sum().backward()
    total, parts = (t.clone() for t in GradientNorms(model).measure())
    assert total.item() == pytest.approx(
        torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item(), rel=1e-5
    )
    names = GradientNorms(model).parts
    for kind in (True, False):  # by role, and by place: each is all of the gradient
        squares = [n**2 for name, n in zip(names, parts.tolist(), strict=True) if name.startswith("role/") is kind]
        assert sum(squares) ** 0.5 == pytest.approx(total.item(), rel=1e-5)
    queries = [p.grad.flatten() for n, p in model.named_parameters() if n.endswith("query.weight")]
    assert len(queries) == 2
    assert parts[names.index("role/query")].item() == pytest.approx(torch.cat(queries).norm().item(), rel=1e-5)
    attn = [p.grad.flatten() for p in model.blocks[1].attn.parameters()]
    index = GradientNorms(model).parts.index("block_001/attn")
    assert parts[index].item() == pytest.approx(torch.cat(attn).norm().item(), rel=1e-5)


def test_clipping_bounds_the_global_norm_and_leaves_small_gradients(tiny):
    model = model_of(tiny)
    model(TOKENS).square().sum().backward()
    norms = GradientNorms(model)
    before = norms.measure()[0]
    norms.clip(before, float(before) / 2)
    assert norms.measure()[0].item() == pytest.approx(before.item() / 2, rel=1e-4)
    kept = model.blocks[0].attn.query.weight.grad.clone()
    norms.clip(norms.measure()[0], 1e9)
    assert torch.equal(model.blocks[0].attn.query.weight.grad, kept)


def test_parts_are_named_for_sorting():
    assert part_of("blocks.3.attn.query.weight") == "block_003/attn"
    assert part_of("blocks.12.ffn.up.bias") == "block_012/ffn"
    assert part_of("blocks.0.norm_attn.gain") == "block_000/norm"
    assert part_of("embedding.weight") == "embedding"


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_a_step_is_pytorch_s_fused_adamw_to_the_bit(tiny, weight_decay):
    ours, theirs = model_of(tiny), model_of(tiny)
    config = optim("optim.lr=0.01")
    optimizer = build_optimizer(ours, config, weight_decay)
    named, groups = dict(theirs.named_parameters()), decay_groups(theirs, "matrices")
    reference = torch.optim.AdamW(
        [
            {"params": [named[n] for n in groups["decayed"]], "weight_decay": weight_decay},
            {"params": [named[n] for n in groups["free"]], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.9, 0.95),
        eps=1e-8,
        fused=True,
    )
    for rate in (0.01, 0.02, 0.005):
        for model, stepper in ((ours, optimizer), (theirs, reference)):
            for group in stepper.param_groups:
                group["lr"] = rate
            model(TOKENS).square().mean().backward()
            stepper.step()
            stepper.zero_grad()
    for name, p in ours.named_parameters():
        assert torch.equal(p, named[name]), name
        assert all(torch.equal(t, reference.state[named[name]][key]) for key, t in optimizer.state[p].items()), name


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_that_is_spoilt_changes_neither_weights_nor_moments(tiny, fused):
    model = model_of(tiny)
    optimizer = build_optimizer(model, optim(), 0.1, fused)
    model(TOKENS).square().mean().backward()
    optimizer.step()
    kept = [t.clone() for p in model.parameters() for t in (p.detach(), *optimizer.state[p].values())]
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert any(p.grad.any() for p in model.parameters())
    now = [t for p in model.parameters() for t in (p.detach(), *optimizer.state[p].values())]
    assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True))


def test_the_optimizer_does_not_import_the_compiler():
    """It takes two seconds of every start."""
    import subprocess
    import sys

    code = """
import sys, torch
from nexus_ablate.config.compose import compose
from nexus_ablate.model import build_model
from nexus_ablate.optimizers import build_optimizer
config = compose(["model.n_layers=1", "model.d_model=8", "model.n_heads=1", "model.context=8"])
model = build_model(config)
optimizer = build_optimizer(model, config.optim, 0.1)
model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
optimizer.step()
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

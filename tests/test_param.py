"""Parametrizations equal the papers' tables, written out here a second time; sp is what it always was."""

from __future__ import annotations

import json
import re

import pytest
import torch
from torch import Tensor

from nexus_ablate.axes.init import standard_normal
from nexus_ablate.cli import main
from nexus_ablate.config.compose import compose
from nexus_ablate.config.resolve import from_values
from nexus_ablate.model import build_model
from nexus_ablate.optimizers import build_optimizer

L, D, H, F, V, T = 3, 48, 4, 96, 11, 8
SIZES = (f"model.n_layers={L}", f"model.d_model={D}", f"model.n_heads={H}", "d_ff_ratio=2", "model.context=8")
PLAIN = (
    *SIZES,
    "position=none",
    "ffn=relu",
    "tie_embeddings=off",
    "init=gpt2",
    "init.branch_scale=off",
    "norm.fp32=off",
)
BASE = ("param.base_width=16", "param.base_head_dim=4")
M, K, HEAD_BASE = D / 16, L / 2, 4
"""Width and depth relative to the base model of the tests: three times as wide, one and a half times as deep."""
LR, DECAY, EPS, STD, STEPS = 0.01, 0.3, 1e-3, 0.02, 4
TOKENS = torch.randint(0, V, (2, T), generator=torch.Generator().manual_seed(1))


class Reference:
    """A pre-norm transformer by the tables of arXiv:2203.03466 (8) and arXiv:2505.01618 (1), in plain PyTorch.

    Nothing of the package is used but the standard normal numbers behind each first value.
    """

    def __init__(self, rule: str) -> None:
        self.k = K if rule == "completep" else 1.0
        hidden = {"query": (D, D), "key": (D, D), "value": (D, D), "out": (D, D)}
        shapes = {f"blocks.{i}.attn.{name}.weight": shape for i in range(L) for name, shape in hidden.items()}
        shapes |= {f"blocks.{i}.ffn.{n}.weight": s for i in range(L) for n, s in (("up", (F, D)), ("down", (D, F)))}
        self.hidden = {name: self.first(name, shape, STD / M**0.5) for name, shape in shapes.items()}
        self.embedding = self.first("embedding.weight", (V, D), STD)
        self.head = self.first("head.weight", (V, D), STD)
        self.gains = [torch.ones(D, dtype=torch.float64, requires_grad=True) for _ in range(2 * L + 1)]
        eps = (EPS / M, EPS / (M * self.k)) if rule == "completep" else (EPS, EPS)
        groups = [
            {"params": [*self.hidden.values()], "lr": LR / M, "weight_decay": DECAY * M, "eps": eps[1]},
            {"params": self.gains[:-1], "lr": LR, "weight_decay": 0.0, "eps": eps[1]},
            {"params": [self.head], "lr": LR, "weight_decay": DECAY, "eps": eps[0]},
            {"params": [self.embedding, self.gains[-1]], "lr": LR, "weight_decay": 0.0, "eps": eps[0]},
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))

    @staticmethod
    def first(name: str, shape: tuple[int, int], std: float) -> Tensor:
        return (standard_normal(0, name, torch.Size(shape)) * std).double().requires_grad_()

    def norm(self, x: Tensor, site: int) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self.gains[site]

    def __call__(self, tokens: Tensor) -> Tensor:
        x = self.embedding[tokens]
        for i in range(L):
            w = {name.split(".", 2)[2][:-7]: value for name, value in self.hidden.items() if f"blocks.{i}." in name}
            n = self.norm(x, 2 * i)
            q, k, v = (
                (n @ w[f"attn.{p}"].T).unflatten(-1, (H, D // H)).transpose(1, 2) for p in ("query", "key", "value")
            )
            scale = HEAD_BASE**0.5 / (D // H)
            heads = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
            x = x + heads.transpose(1, 2).flatten(2) @ w["attn.out"].T / self.k
            x = x + torch.relu(self.norm(x, 2 * i + 1) @ w["ffn.up"].T) @ w["ffn.down"].T / self.k
        return self.norm(x, 2 * L) @ self.head.T / M


def loss(logits: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())


def learned(model, optimizer) -> Tensor:
    """Logits after some steps; a second set of them would hide what the first steps do."""
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(model(TOKENS)).backward()
        optimizer.step()
    return model(TOKENS)


def model_and_optimizer(*overrides):
    optim = (f"optim.lr={LR}", f"weight_decay={DECAY}", f"optim.eps={EPS}")
    config = compose([*PLAIN, *optim, *overrides])
    model = build_model(config, V).double()
    optimizer = build_optimizer(model, config.optim, config.weight_decay, fused=False)
    optimizer.set_learning_rate(LR)
    return model, optimizer


@pytest.mark.parametrize("rule", ["mup", "completep"])
def test_outputs_equal_an_independent_implementation_of_the_table(rule):
    depth = ("param.base_depth=2",) if rule == "completep" else ()
    model, optimizer = model_and_optimizer(f"param={rule}", *BASE, *depth)
    reference = Reference(rule)
    assert (model(TOKENS) - reference(TOKENS)).abs().max() < 1e-6
    first = model(TOKENS).detach()
    one, other = learned(model, optimizer), learned(reference, reference.optimizer)
    assert (one - other).abs().max() < 1e-6 < 1e-2 < (one - first).abs().max()


@pytest.mark.parametrize("broken", ["lr", "decay", "eps", "init"])
def test_a_factor_that_was_left_out_would_be_seen(broken, monkeypatch):
    from dataclasses import replace

    from nexus_ablate.axes.param import CompleteP

    factors = CompleteP.factors
    monkeypatch.setattr(CompleteP, "factors", lambda *arguments: replace(factors(*arguments), **{broken: 1.0}))
    model, optimizer = model_and_optimizer("param=completep", *BASE, "param.base_depth=2")
    reference = Reference("completep")
    one, other = learned(model, optimizer), learned(reference, reference.optimizer)
    assert (one - other).abs().max() > 1e-5


@pytest.mark.parametrize("rule", ["mup", "completep"])
def test_at_the_size_of_the_base_every_factor_is_1(rule):
    base = [f"param={rule}", f"param.base_width={D}", f"param.base_head_dim={D // H}"]
    base += [f"param.base_depth={L}"] if rule == "completep" else []
    assert torch.equal(learned(*model_and_optimizer(*base)), learned(*model_and_optimizer("param=sp")))
    assert not torch.equal(learned(*model_and_optimizer(*base[:1])), learned(*model_and_optimizer("param=sp")))


def test_sp_is_no_part_of_an_identity_and_older_configurations_mean_it():
    science = compose([]).science()
    assert "param" not in science and "decay_mode" not in science["optim"]
    assert compose(["param=mup"]).science()["param"]["name"] == "mup"
    assert compose(["optim.decay_mode=independent"]).science()["optim"]["decay_mode"] == "independent"
    older = compose([]).nested()
    del older["param"], older["optim"]["decay_mode"]
    assert from_values(older).nested() == compose([]).nested()


def test_explain_states_initial_value_rate_and_decay_of_every_tensor(capsys):
    overrides = [*PLAIN, "param=mup", *BASE, f"optim.lr={LR}", f"weight_decay={DECAY}"]
    assert main(["explain", *overrides, "--json", f"vocab_size={V}"]) == 0
    rows = {row["tensor"]: row for row in json.loads(capsys.readouterr().out)["tensors"]}
    names = {name for name, _ in build_model(compose(overrides), V).named_parameters()}
    assert rows.keys() == {re.sub(r"^blocks\.\d+", "blocks.*", name) for name in names}
    query, head, gain = (rows[n] for n in ("blocks.*.attn.query.weight", "head.weight", "final_norm.gain"))
    assert query["std"] == pytest.approx(STD / M**0.5) and query["lr"] == pytest.approx(LR / M)
    assert query["decay"] == pytest.approx(head["decay"]) == pytest.approx(LR * DECAY) and head["lr"] == LR
    assert gain["std"] is None and gain["decay"] == 0 and query["blocks"] == [0, 1, 2]


def test_completep_divides_the_branches_once():
    assert compose(["param=completep"]).resolved.init.keys["branch_scale"] is False


@pytest.mark.parametrize("mode", ["coupled", "independent"])
def test_independent_decay_does_not_change_with_the_learning_rate(mode):
    shrunk = []
    for lr in (0.01, 0.02):
        keys = (f"optim.lr={lr}", "weight_decay=0.1", f"optim.decay_mode={mode}")
        model, optimizer = model_and_optimizer(*keys)
        optimizer.set_learning_rate(lr / 2)  # half of the peak
        weight = model.blocks[0].attn.query.weight
        before = weight.detach().clone()
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        shrunk.append(float((1 - weight.detach() / before).mean()))
    expected = [0.1 * 0.005, 0.1 * 0.01] if mode == "coupled" else [0.1 / 2, 0.1 / 2]
    assert shrunk == pytest.approx(expected, rel=1e-3)

"""Learning-rate and weight-decay factors by role, from the command line to the weights."""

from __future__ import annotations

import importlib
import json

import pytest
import torch
from options import OPTIMIZERS

from nexus_ablate import errors
from nexus_ablate.cli import main
from nexus_ablate.config.compose import compose
from nexus_ablate.config.resolve import from_values
from nexus_ablate.data import Batches, prepare
from nexus_ablate.launch import cost
from nexus_ablate.model import build_model
from nexus_ablate.training.checkpoint import load_newest

GROUPS = "optim.groups=[embedding:lr:0.1,head:weight_decay:0,ffn_out:lr:3:weight_decay:0.5]"
LR, DECAY, STEPS = 0.01, 10.0, 3
FACTORS = {"embedding": (0.1, 0.0), "head": (1.0, 0.0), "down": (3.0, 0.5)}
"""Of the tensors by a piece of their name: on the learning rate, and on weight decay where matrices decay."""


def by_hand(named: dict[str, torch.Tensor], keep, factors: dict) -> list[dict]:
    """A group for each tensor, with rate and decay written out."""
    groups = []
    for name, tensor in named.items():
        lr, decay = next((f for piece, f in factors.items() if piece in name), (1.0, float(tensor.ndim > 1)))
        groups += [{"params": [tensor], "lr": LR * lr, "weight_decay": DECAY * decay}] if keep(name, tensor) else []
    return groups


def references(optimizer: str, named: dict[str, torch.Tensor], factors: dict) -> list[torch.optim.Optimizer]:
    """PyTorch's own optimizers, or another library's, with groups by hand."""
    adamw = {"betas": (0.9, 0.95), "eps": 1e-8}
    if optimizer == "adamw":
        return [torch.optim.AdamW(by_hand(named, lambda *_: True, factors), **adamw)]
    if optimizer == "adafactor":
        keys = {"beta2_decay": -0.8, "eps": (1e-15, 1e-3), "d": 1.0}
        return [torch.optim.Adafactor(by_hand(named, lambda *_: True, factors), **keys)]
    if optimizer in ("lion", "soap"):
        library = importlib.import_module("pytorch_optimizer")
        groups = by_hand(named, lambda *_: True, factors)
        steps = {"lion": (library.Lion, (0.9, 0.99)), "soap": (library.SOAP, (0.95, 0.95))}[optimizer]
        return [steps[0](groups, LR, steps[1])]
    in_block = lambda name, tensor: name.startswith("blocks") and tensor.ndim == 2  # noqa: E731
    muon = torch.optim.Muon(
        by_hand(named, in_block, factors), momentum=0.95, ns_steps=5, adjust_lr_fn="match_rms_adamw"
    )
    return [muon, torch.optim.AdamW(by_hand(named, lambda *of: not in_block(*of), factors), **adamw)]


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "normuon"])
def test_a_run_equals_the_library_s_optimizer_with_groups_by_hand(optimizer, tiny_run, tmp_path):
    plain = ("optim.schedule=constant", "optim.warmup=0", "optim.clip=off", f"optim.lr={LR}", f"weight_decay={DECAY}")
    overrides = tiny_run(f"optim={optimizer}", *plain, GROUPS, "tie_embeddings=off", f"train.steps={STEPS}")
    assert main(overrides) == errors.OK
    (run,) = tmp_path.glob("runs/scratch/*/s0-*")
    checkpoint = load_newest(run / "checkpoints")
    assert checkpoint is not None
    trained = checkpoint.tensors["model"]

    config = compose(overrides)
    data = prepare(config.data, context=8)
    batches = Batches(data.train, 0, 4, 8, data.period)

    def distance(factors: dict) -> float:
        """The largest distance of a tensor from its reference, relative to how far training moved the reference."""
        model = build_model(config, data.vocab_size)
        named: dict[str, torch.Tensor] = dict(model.named_parameters())
        start = {name: tensor.detach().clone() for name, tensor in named.items()}
        steppers = references(optimizer, named, factors)
        for step in range(STEPS):
            rows = torch.from_numpy(batches.batch(step))
            model.zero_grad()
            torch.nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).backward()
            for stepper in steppers:
                stepper.step()
        assert trained.keys() == named.keys()
        distances = [(trained[n] - named[n].detach()).norm() / (named[n].detach() - start[n]).norm() for n in named]
        return max(map(float, distances))

    # Processors differ in the last digit of a gradient. Such noise gave distances up to 0.054 in 300 trials with Muon,
    # which multiplies in bfloat16, and up to 3e-5 with AdamW.
    assert distance(FACTORS) < (0.12 if optimizer == "muon" else 1e-3)
    for without in FACTORS:
        assert distance(FACTORS | {without: (1.0, 1.0)}) > 0.2, f"control: a missing factor of {without} shows"


def test_explain_prints_rate_and_decay_of_every_tensor_with_its_factors(capsys):
    common = ["explain", "model=nano", "model.n_layers=1", "optim.lr=0.01", "weight_decay=0.5", "--json"]

    def explained(*overrides):
        assert main([*common, *overrides]) == 0
        rows = json.loads(capsys.readouterr().out)["tensors"]
        return {row["tensor"]: (row["lr"], row["decay"]) for row in rows}

    rows = explained("tie_embeddings=off", GROUPS)
    assert rows["embedding.weight"] == pytest.approx((0.001, 0))
    assert rows["head.weight"] == pytest.approx((0.01, 0))
    down = "blocks.*.ffn.down.weight"
    assert rows[down] == pytest.approx((0.03, 0.03 * 0.25))
    assert rows["blocks.*.ffn.up.weight"] == pytest.approx((0.01, 0.005))
    rows = explained("param=mup", "param.base_width=32", "optim.groups=[ffn_out:lr:3]")
    assert rows[down][0] == pytest.approx(0.03 / 4), "times the parametrization's factor"
    rows = explained("optim.decay_mode=independent", "optim.groups=[ffn_out:lr:3]")
    assert rows[down][1] == pytest.approx(0.5), "independent of the rate and its factor"


def test_without_factors_an_identity_is_what_it_was_and_equal_factors_are_one_arm():
    assert "groups" not in compose([]).science()["optim"]
    assert "groups" not in compose(["optim.groups=[query:lr:1]"]).science()["optim"]
    older = compose([]).nested()
    del older["optim"]["groups"]
    assert from_values(older).science() == compose([]).science()
    one = compose(["optim.groups=[value:lr:2.0,query:weight_decay:0:lr:5e-1]"]).science()["optim"]["groups"]
    other = compose(["optim.groups=[query:lr:0.5,query:weight_decay:0.0,value:lr:2]"]).science()["optim"]["groups"]
    assert one == other == ["query:lr:0.5:weight_decay:0", "value:lr:2"]


def test_a_study_varies_factors_and_refuses_those_of_a_role_that_an_arm_lacks(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(cost, "measured_speed", lambda config, threads: None)
    words = ["vary.optim.groups=[],[embedding:lr:0.1],[embedding:lr:10],[gate:lr:2]", "train.steps=2"]
    assert main(["plan", "mine", *words]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "optim.groups=embedding_lr_0.1" in shown and "optim.groups=embedding_lr_10" in shown
    assert "equal optim.groups=[] is baseline" in shown
    assert "refused optim.groups=[gate:lr:2]: no parameter of this model has the role gate" in shown


def test_the_regime_is_that_of_the_block_s_matrix_that_decays_fastest(capsys):
    common = ["optim.lr=0.01", "weight_decay=0.1", "--json"]
    timescale = {}
    for groups in ("[]", "[value:lr:2:weight_decay:5]", "[embedding:lr:100]", "[value:lr:0.1]"):
        assert main(["explain", *common, f"optim.groups={groups}"]) == 0
        timescale[groups] = json.loads(capsys.readouterr().out)["regime"]["decay_timescale_steps"]
    assert [*timescale.values()] == pytest.approx([1000, 100, 1000, 1000])


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        ("[embed:lr:0.1]", "there is no role embed"),
        ("[query:wd:0.1]", "a role has factors on lr, on weight_decay or on both"),
        ("[query:lr]", "a role has factors on lr, on weight_decay or on both"),
        ("[query]", "a role has factors on lr, on weight_decay or on both"),
        ("[query:lr:0]", "a factor on lr is a float (0, inf)"),
        ("[query:weight_decay:-1]", "a factor on weight_decay is a float [0, inf)"),
        ("[query:lr:nan]", "a factor on lr is a float (0, inf)"),
        ("[query:lr:x]", "a factor on lr is a float (0, inf)"),
        ("[query:lr:2,query:lr:3]", "query has two factors on lr"),
        ("query:lr:2", "optim.groups takes factors by role"),
        ("[2]", "optim.groups takes factors by role"),
        ("[head:lr:2]", "a tied head is the embedding and has no factors of its own"),
        ("[vector:weight_decay:2]", "optim.decay=matrices does not decay the role vector"),
        ("[gate:lr:2]", "no parameter of this model has the role gate"),
    ],
)
def test_a_mistake_is_three_lines_before_a_directory_is_made(groups, problem, tiny_run, tmp_path, capsys):
    assert main(tiny_run(f"optim.groups={groups}")) == errors.CONFIG
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"error: {problem}" and len(lines) == 3 and groups in lines[1]
    assert lines[2] != "  try: optim.groups=[]", "that takes nothing by role"
    assert not (tmp_path / "runs").exists()

"""The coordinate check passes where learning rates transfer over the width, and fails where they don't."""

from __future__ import annotations

import pytest

from nexus_ablate.axes.param import Factors, MaximalUpdate
from nexus_ablate.bench.coordinates import check_coordinates
from nexus_ablate.cli import main
from nexus_ablate.model import GPT

TINY = ("model.n_layers=1", "model.d_model=64", "model.n_heads=4", "model.context=16")
MUP = ("param=mup", "param.base_width=64", "param.base_head_dim=16")


def checked(capsys, *arguments):
    status = main(["bench", "coordinates", *TINY, "--widths", "64,128,256", "--seeds", "1", "--steps", "6", *arguments])
    return status, capsys.readouterr().out


def test_mup_passes_and_draws_a_picture(capsys, tmp_path):
    status, shown = checked(capsys, *MUP, "--picture", str(tmp_path / "a.png"))
    assert status == 0 and "param=mup passes" in shown and "not flat" not in shown
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_sp_fails(capsys):
    status, shown = checked(capsys, "param=sp")
    assert status == 1 and "param=sp fails" in shown and "not flat" in shown


def test_dropout_is_no_change_of_the_coordinates(tiny):
    still = tiny("model.dropout=0.5", "optim.lr=1e-12")
    assert check_coordinates([still], steps=1, seeds=1).changes["logits"].max() < 1e-6


@pytest.mark.parametrize("option", ["z_loss={}", "ffn=moe ffn.balance={}"])
def test_what_is_trained_on_besides_moves_the_coordinates(tiny, option):
    without, with_it = (check_coordinates([tiny(*option.format(factor).split())], 2, 1) for factor in (0, 10))
    assert (with_it.changes["logits"] != without.changes["logits"]).all()


def test_weights_are_constrained_after_each_step_as_in_training(tiny):
    config = tiny("preset=ngpt", "optim.lr=1")
    constrained = check_coordinates([config], steps=2, seeds=1).changes["logits"][0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GPT, "constrain", lambda model: None)
        assert check_coordinates([config], steps=2, seeds=1).changes["logits"][0] != constrained


def test_training_that_becomes_non_finite_fails_and_cannot_be_drawn(capsys, tmp_path):
    status, shown = checked(capsys, "param=sp", "optim.lr=1e30")
    assert status == 1 and "param=sp fails" in shown and "not finite, or 0" in shown
    few = ["--widths", "64,128,256", "--seeds", "1", "--steps", "3"]
    assert main(["bench", "coordinates", *TINY, *few, "optim.lr=1e30", "--picture", str(tmp_path / "a.png")]) == 2
    assert "nothing can be drawn" in capsys.readouterr().err and not [*tmp_path.iterdir()]


def test_mup_without_its_learning_rates_fails(capsys, monkeypatch):
    factors = MaximalUpdate.factors
    monkeypatch.setattr(MaximalUpdate, "factors", lambda *rest: Factors(init=factors(*rest).init))
    assert checked(capsys, *MUP)[0] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        "value=residual model.n_layers=2",
        "value=embedding",
        "normalizer=ssmax",
        "normalizer=sigmoid normalizer.bias=auto",
        "conv=canon",
        "ffn=xielu",
        "ffn=polynorm",
        "norm=rms_nonparam",
        "placement=x0",
        "mixer=exclusive",
        "value=gated_embedding",
    ],
)
def test_an_option_of_recent_years_that_mup_does_not_refuse_passes(capsys, overrides):
    assert checked(capsys, *MUP, *overrides.split())[0] == 0


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("param", "status"), [("mup", 0), ("sp", 1)])
def test_the_check_at_its_defaults(param, status):
    assert main(["bench", "coordinates", f"param={param}"]) == status

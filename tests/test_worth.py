"""What a difference is worth, from training to the report."""

from __future__ import annotations

import json

import numpy as np
import pytest

from nexus_ablate.cli import main

SLOW = '''
import time
from nexus_ablate.axes.norm import NORM, RMSNorm

@NORM.register("paused")
class Paused(RMSNorm):
    """RMSNorm that waits before it computes in training."""

    def __init__(self, width, bias, site, *, pause):
        super().__init__(width, bias, site, eps=1e-6, gain_init=1.0, fp32=True)
        self.pause = pause

    def forward(self, x):
        if self.training and x.device.type != "meta":
            time.sleep(self.pause)
        return super().forward(x)
'''
STUDY = """
baseline: [model.n_layers=1, model.d_model=16, model.n_heads=1, model.context=16, train.batch_size=4, train.steps=40,
  train.eval_tokens=4096, data=files, "data.files=[words.txt]", optim.lr=2e-2, norm=paused, probe=off]
arms: {longer: train.steps=60, slower: norm.pause=0.03}
seeds: 0-4
worth: on
"""


@pytest.mark.slow
def test_longer_training_is_worth_its_length_and_nothing_per_flop_and_a_slower_arm_is_worth_less_per_second(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEXUS_ABLATE_CACHE", str(tmp_path / "cache"))
    words = "a cat sat on the mat and ran to the red house of my old friend who was not there".split()
    drawn = np.random.default_rng(0).choice(words, (6000, 8))
    (tmp_path / "words.txt").write_text("\n".join(map(" ".join, drawn)))
    (tmp_path / "slow/norm").mkdir(parents=True)
    (tmp_path / "slow/paused.py").write_text(SLOW)
    text = "# RMSNorm that waits.\nname: paused\npause: 0.015  # float [0, 1]; seconds\n"
    (tmp_path / "slow/norm/paused.yaml").write_text(text)
    monkeypatch.setenv("NEXUS_ABLATE_PLUGINS", str(tmp_path / "slow"))
    (tmp_path / "worth.yaml").write_text(STUDY)
    how = ["tracker=files", "train.device=cpu", "train.threads=1", "--workers", "2"]
    assert main(["study", "worth.yaml", *how]) == 0
    capsys.readouterr()
    assert main(["compare", "worth", "--allow", "tokens,learned", "--json", "-"]) == 0
    rows = {row["arm"]: row for row in json.loads(capsys.readouterr().out)["tables"][0]["rows"]}
    longer, slower = rows["longer"], rows["slower"]
    assert longer["worth_low"] < 1.5 < longer["worth_high"] and longer["worth"] == pytest.approx(1.5, abs=0.25)
    assert longer["worth_per_flop"] == pytest.approx(longer["worth"] / 1.5, rel=0.01)
    assert slower["word"] == "IDENTICAL" and slower["worth"] == pytest.approx(1.0)
    assert slower["worth_per_second"] == pytest.approx(0.5, abs=0.1)

import json

import pytest
import torch

from nexus_ablate.bench import axis_cost, timing
from nexus_ablate.bench.axis_cost import kept_bytes
from nexus_ablate.bench.timing import Clock, in_turn, ratios, spread
from nexus_ablate.cli import main

SMALL = ["model.n_layers=2", "model.d_model=16", "model.n_heads=2", "model.context=8", "train.batch_size=2"]
SMALL += ["train.device=cpu", "train.threads=1"]


class Machine:
    """A clock that the works themselves move."""

    def __init__(self):
        self.time = 0.0
        self.order = []

    def work(self, name, seconds):
        def run():
            self.order.append(name)
            self.time += seconds

        return run

    @property
    def clock(self):
        return Clock(lambda: self.time, lambda: None)


def test_ratios_are_of_neighbours_so_that_a_machine_that_slows_down_does_not_change_them(monkeypatch):
    machine = Machine()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: machine.time)
    slow = [1.0]

    def work(seconds):
        def run():
            slow[0] *= 1.02  # the machine slows down all the while
            machine.time += seconds * slow[0]

        return run

    taken = in_turn({"a": work(1.0), "b": work(2.0)}, 60.0, machine.clock)
    result = ratios(taken["b"], taken["a"])
    assert result.median == pytest.approx(2.0, rel=0.03)
    assert spread(taken["b"]).high / spread(taken["b"]).low > 1.2  # the times themselves moved


def test_every_work_has_a_block_in_each_round_and_every_other_round_is_backwards(monkeypatch):
    machine = Machine()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: machine.time)
    taken = in_turn({"a": machine.work("a", 1.0), "b": machine.work("b", 1.0)}, 0.1, machine.clock)
    assert machine.order == ["a", "b"] + ["a", "b", "b", "a"] * 2 + ["a", "b"]  # once to know how long, then rounds
    assert len(taken["a"]) == len(taken["b"]) == timing.LEAST_ROUNDS


def test_a_spread_is_the_median_and_the_quartiles():
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == timing.Spread(3.0, 2.0, 4.0)


def test_kept_bytes_are_those_that_autograd_holds_without_weights_and_input():
    weight, x = torch.nn.Parameter(torch.randn(4, 5)), torch.randn(6, 4, requires_grad=True)
    assert kept_bytes(lambda: (x @ weight).exp(), [weight, x]) == 4 * 6 * 5


@pytest.mark.parametrize("axis", ["norm", "placement", "ffn", "attention"])
def test_two_options_of_an_axis_are_measured_with_ratio_and_memory(axis, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("nexus_ablate.cli.bench.SECONDS", 0.05)
    from nexus_ablate.config.options import option_files

    two = list(option_files(axis))[:2]
    unrotated = ["position=alibi"] if axis == "attention" else []  # additive scores take no rotary positions
    file = tmp_path / "found.json"
    assert main(["bench", f"{axis}={','.join(two)}", f"--json={file}", *SMALL, *unrotated]) == 0
    report = json.loads(file.read_text())
    costs = {(c["option"], c["place"]): c for c in report["costs"]}
    assert {place for _, place in costs} == ({"block"} if axis == "placement" else {"alone", "block"})
    for cost in costs.values():
        assert cost["kept_bytes"] > 0 or cost["option"] == "none"
        assert cost["ratio"]["low"] <= cost["ratio"]["median"] <= cost["ratio"]["high"]
    assert costs[two[0], "block"]["ratio"]["median"] == 1.0
    shown = capsys.readouterr().out
    for option, place in costs:
        ratio = costs[option, place]["ratio"]["median"]
        assert f"{ratio:.2f} (" in shown and option in shown


@pytest.mark.slow
def test_eager_rms_norm_is_distinguished_from_layer_norm(tmp_path):
    """Seven passes over the tensor against one: the difference that the bench must detect."""
    file = tmp_path / "found.json"
    command = ["bench", "norm=layer,rms", f"--json={file}"]
    assert main([*command, "train.device=cpu", "train.threads=1"]) == 0
    costs = json.loads(file.read_text())["costs"]
    (rms,) = [cost for cost in costs if (cost["option"], cost["place"]) == ("rms", "alone")]
    assert rms["ratio"]["low"] > 1, "both quartiles are above the other's time"


def test_the_norms_of_queries_and_keys_are_no_norms_of_the_block(tiny):
    configs = {name: tiny("qk_norm=rms", f"norm={name}", "train.batch_size=1") for name in ("rms", "layer")}
    assert axis_cost.bench_axis("norm", configs, "rms", 0.01, compiled=False).sites == {"rms": 2, "layer": 2}

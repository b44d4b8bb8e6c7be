import copy
import math

import numpy as np
import pytest
import torch
from options import OPTIMIZERS
from tensors import TOKENS, draw, next_token_loss, peak_bytes
from torch import nn

from nexus_ablate.config.compose import compose
from nexus_ablate.measure import activation_statistics as statistics
from nexus_ablate.measure import attention_statistics as attention
from nexus_ablate.measure.activation_statistics import kurtosis_token, max_abs, max_over_median, rms
from nexus_ablate.measure.probe import (
    matrix_probe,
    model_figures,
    over_blocks,
    probe,
)
from nexus_ablate.measure.weight_statistics import block_matrices, spectral_norm, weight_rms
from nexus_ablate.model import build_model
from nexus_ablate.optimizers import build_optimizer
from nexus_ablate.runs import read_jsonl, read_run
from nexus_ablate.training.gradients import GradientNorms, first_over_last
from nexus_ablate.training.session import train
from nexus_ablate.training.step import Step

# --------------------------------------------------------------------------------------------- values by hand


def test_statistics_of_a_hand_made_tensor():
    x = torch.tensor([[[1.0, -1.0, 2.0, -2.0]]])
    assert rms(x).item() == pytest.approx(2.5**0.5)
    assert max_abs(x).item() == 2.0
    assert max_over_median(x).item() == 2.0  # the lower of the two middle magnitudes, as torch.median takes it
    assert kurtosis_token(x).item() == pytest.approx((2 * 1 + 2 * 16) / 4 / 2.5**2)
    assert statistics.top_magnitudes(x).tolist() == [2.0, 2.0, 1.0, 1.0]
    assert statistics.bondarenko_inf_norm(x.flatten(1)).item() == 2.0


def test_kurtosis_by_sequence_takes_all_entries_of_a_sequence_together():
    x = torch.tensor([[[1.0, -1.0], [2.0, -2.0]]])
    assert statistics.kurtosis_sequence(x).item() == pytest.approx((2 * 1 + 2 * 16) / 4 / 2.5**2)
    assert kurtosis_token(x).item() == pytest.approx(1.0)  # two values of one magnitude each


def test_massive_entries_are_counted_by_ratio_and_strictly():
    x = torch.full((1, 4, 8), 0.05)
    x[0, 1, 2] = 60.0  # 1200 times the median, and under 100
    x[0, 2, 2] = 150.0
    x[0, 3, 2] = 49.0  # 980 times
    assert statistics.massive_count(x).item() == 2.0
    assert statistics.massive_count_strict(x).item() == 1.0
    assert [i.item() for i in statistics.top_entry(x)] == [2, 2]


def test_how_a_branch_changes_the_residual_stream():
    stream, branch = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[0.0, 1.0]]])
    assert statistics.branch_ratio(branch, stream).item() == pytest.approx(0.2)
    assert statistics.cosine(branch, stream).item() == pytest.approx(0.8)


def test_output_and_gate_statistics():
    assert statistics.log_sum_exp(torch.zeros(1, 2, 8)).item() == pytest.approx(math.log(8))
    assert statistics.closed_share(torch.tensor([0.0, -0.05, 0.5, 1.0])).item() == 0.5


def test_the_mean_over_rms_is_the_mean_over_tokens():
    x = torch.tensor([[[3.0, 4.0], [1.0, -1.0]]])
    assert statistics.mean_over_rms(x).item() == pytest.approx(3.5 / 12.5**0.5 / 2)


def test_the_first_token_s_norm_is_taken_over_the_mean_of_the_others():
    x = torch.tensor([[[3.0, 4.0], [0.0, 1.0], [3.0, 0.0]]])
    assert statistics.first_norm_ratio(x, 0).item() == pytest.approx(5 / 2)
    assert statistics.first_norm_ratio(x[:, None], 1).tolist() == [
        pytest.approx(1 / 3)
    ]  # behind a key that is no token


# ---------------------------------------------------------------------- the authors' definitions, written out plainly


def test_bondarenko_s_kurtosis_and_norm_are_those_of_the_authors_hooks():
    x = draw(3, 40) * 5
    rows = x.double().numpy()
    expected = [float(np.mean((row - row.mean()) ** 4) / (torch.tensor(row).std().item() ** 4 + 1e-6)) for row in rows]
    assert statistics.bondarenko_kurtosis(x).item() == pytest.approx(np.mean(expected), rel=1e-5)
    assert statistics.bondarenko_inf_norm(x).item() == pytest.approx(np.mean(np.abs(rows).max(1)), rel=1e-6)


def test_massive_activations_are_those_of_the_authors_script():
    x = draw(4, 6, 10)
    expected = []
    for state in x:
        ordered, _ = torch.sort(state.abs().flatten(), descending=True)
        expected.append([*ordered[:3].tolist(), torch.median(state.abs()).item()])
    torch.testing.assert_close(statistics.top_magnitudes(x), torch.tensor(expected).mean(0))


def test_the_channel_kurtosis_is_he_s():
    x = draw(2, 7, 5) * torch.tensor([1.0, 2.0, 3.0, 4.0, 20.0])
    s = np.sqrt((x.double().numpy().reshape(-1, 5) ** 2).mean(0))
    assert statistics.kurtosis_channel(x).item() == pytest.approx((s**4).mean() / (s**2).mean() ** 2, rel=1e-5)


# ---------------------------------------------------------------------------------------------- attention by hand


def test_attention_statistics_of_a_hand_made_map():
    share = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.25, 0.25, 0.5]])[None, None]
    assert attention.first_token_mass(share, 0).tolist() == [
        pytest.approx((0.5 + 0.25) / 2)
    ]  # the first query has no choice
    assert attention.sink_rate(share, 0, 1, threshold=0.58).tolist() == [1.0]  # (1 + 0.5 + 0.25) / 3
    assert attention.sink_rate(share, 0, 1, threshold=0.59).tolist() == [0.0]
    assert attention.sink_rate(share, 0, 2, threshold=0.37).tolist() == [1.0]  # (0.5 + 0.25) / 2
    row = (0.5 * math.log(4) + 0.5 * math.log(2)) / math.log(3)
    assert attention.entropy(share, 0).tolist() == [pytest.approx((1 + row) / 2)]


def test_a_normalizer_s_own_key_takes_what_rows_lack_and_stands_in_front():
    weight = torch.tensor([[0.6, 0.0], [0.1, 0.2]])[None, None]
    share = attention.shares(weight, own_key=True)
    torch.testing.assert_close(share[0, 0], torch.tensor([[0.4, 0.6, 0.0], [0.7, 0.1, 0.2]]))
    assert attention.front_mass(share, 1).tolist() == [pytest.approx(0.55)]
    assert attention.first_token_mass(share, 1).tolist() == [pytest.approx(0.1)]


def test_without_a_key_of_its_own_rows_are_compared_by_their_sums_and_empty_rows_stay_empty():
    weight = torch.tensor([[2.0, 0.0], [0.0, 0.0]])[None, None]
    assert attention.shares(weight, own_key=False)[0, 0].tolist() == [[1.0, 0.0], [0.0, 0.0]]


def test_the_largest_logit_is_among_keys_that_are_seen():
    score = torch.tensor([[-3.0, 99.0], [1.0, 2.0]])[None, None]
    assert attention.max_logit(score, torch.ones(2, 2).tril().bool()).tolist() == [3.0]


@pytest.mark.parametrize("overrides", [(), ("window=3",), ("kv_bias=key",), ("sink_token=on",)], ids=str)
def test_scores_by_distance_are_alibi_s_slopes_where_queries_are_zero(tiny, overrides):
    """Pair by pair, -slope x distance. Token 0 is left out among the keys: the sink token, where there is one."""
    model = build_model(tiny("position=alibi", *overrides), 11)
    for block in model.blocks:
        nn.init.zeros_(block.attn.query.weight)
    actual = probe(model, TOKENS, full=True)
    window = 3 if overrides == ("window=3",) else 8
    first = 0 if overrides == ("sink_token=on",) else 1
    slopes = [2.0**-4, 2.0**-8]  # Press et al. 2021 for two heads
    expected = {}
    for name, distances in {"0": [0], "1": [1], "2-3": [2, 3], "4-7": [4, 5, 6, 7]}.items():
        pairs = [i - j for i in range(8) for j in range(first, i + 1) if i - j in distances and i - j < window]
        if pairs:
            expected[name] = [-slope * sum(pairs) / len(pairs) for slope in slopes]
    start = "attn/block_001/score_at/"
    assert {name.removeprefix(start): value for name, value in actual.items() if name.startswith(start)} == {
        name: pytest.approx(value) for name, value in expected.items()
    }
    heads = actual["attn/block_000/score_at/1"] + actual[f"{start}1"]
    assert model_figures(actual)["attn/score_at/1"] == pytest.approx(sum(heads) / 4)


def test_first_token_ratios_are_those_of_what_attention_reads(tiny):
    model = build_model(tiny("position=learned", "n_kv_heads=1", "kv_bias=key"), 11)
    attn, x = model.blocks[0].attn, model.blocks[0].norm_attn(model.position.embed(model.embedding(TOKENS)))
    probed = probe(model, TOKENS)
    for name, heads in (("query", 2), ("key", 1), ("value", 1)):
        norms = getattr(attn, name)(x).view(2, 8, heads, 8).norm(dim=-1)
        ratio = (norms[:, 0] / norms[:, 1:].mean(1)).mean(0)
        assert probed[f"attn/block_000/{name}/first_norm_ratio"] == pytest.approx(ratio.tolist(), rel=1e-4)


# ------------------------------------------------------------------------------------------------ weights by hand


LOW_RANK = [torch.ones(12, 64), torch.outer(torch.arange(1.0, 65), torch.arange(1.0, 33))]


@pytest.mark.parametrize("weight", [draw(1, 1), draw(3, 40), draw(128, 344), draw(64, 64), *LOW_RANK])
def test_the_spectral_norm_is_that_of_the_exact_decomposition(weight):
    exact = torch.linalg.matrix_norm(weight.double(), 2).item()
    assert spectral_norm(weight).item() == pytest.approx(exact, rel=1e-5)
    assert spectral_norm(torch.zeros_like(weight)).item() == 0.0
    assert spectral_norm(torch.stack((weight, 3 * weight, weight))).item() == pytest.approx(3 * exact, rel=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_update_ratio_is_what_the_step_changed(tiny, name):
    config = tiny(f"optim={name}", "train.batch_size=2")
    model = build_model(config, 11)
    step = Step(config, model, 20, lambda number: TOKENS.numpy())
    for number in range(2):
        before = {n: w.detach().clone() for n, w in block_matrices(model)}
        step.take(number, TOKENS.numpy(), watched=number == 1)
        assert bool(step.update_ratios()) == (number == 1)
    changed = {f"update_ratio/{n}": (w - before[n]).norm() / before[n].norm() for n, w in block_matrices(model)}
    torch.testing.assert_close(step.update_ratios(), changed)


def test_weight_rms_is_over_all_blocks_and_over_every_parameter_of_a_role(tiny):
    model = build_model(tiny("norm=layer", "tie_embeddings=off"), 11)
    result = weight_rms(model)
    matrices = torch.cat([p.flatten() for p in model.blocks.parameters() if p.ndim > 1])
    queries = torch.cat([block.attn.query.weight.flatten() for block in model.blocks])
    vectors = torch.cat([p for p in model.parameters() if p.ndim == 1])
    assert result["weight_rms/global"] == pytest.approx(rms(matrices).item(), rel=1e-5)
    assert result["weight_rms/role/query"] == pytest.approx(rms(queries).item(), rel=1e-5)
    assert result["weight_rms/role/embedding"] == pytest.approx(rms(model.embedding.weight).item(), rel=1e-5)
    assert result["weight_rms/role/vector"] == pytest.approx(rms(vectors).item(), rel=1e-5)


def test_gradients_of_the_first_block_are_compared_with_those_of_the_last():
    norms = {"block_000/attn": 3.0, "block_000/ffn": 4.0, "block_1000/ffn": 2.0, "block_999/ffn": 9.0, "embedding": 1.0}
    assert first_over_last(norms, 1001) == 2.5
    assert math.isnan(first_over_last({"block_000/attn": 0.0}, 1))


def test_every_matrix_of_the_blocks_is_reported_by_block_and_role(tiny):
    model = build_model(tiny("gate=elementwise"), 11)
    probed = matrix_probe(model, {})
    matrices = sum(p.ndim > 1 for p in model.blocks.parameters())
    assert len(probed) == 2 * matrices
    query = model.blocks[1].attn.query.weight
    assert probed["weight/block_001/query/rms"] == pytest.approx(rms(query).item(), rel=1e-5)
    assert {f"weight/block_000/{role}/rms" for role in ("gate", "ffn_in", "ffn_in_2", "ffn_out")} < probed.keys()


# ------------------------------------------------------------------------------------------------------- the probe


def test_a_probe_reports_every_block_site_and_statistic(tiny):
    model = build_model(tiny(), 11)
    probed = probe(model, TOKENS)
    assert len(probed) == 2 * (3 * 3 + 3 + 4 + 3) + 2
    x = model.embedding(TOKENS)
    context = model.context(TOKENS)
    attn = model.blocks[0].attn(model.blocks[0].norm_attn(x), context)
    assert probed["act/block_000/attn/rms"] == pytest.approx(rms(attn).item(), rel=1e-5)
    stream = model.blocks[0](x, context)
    assert probed["act/block_000/resid/max_abs"] == pytest.approx(max_abs(stream).item(), rel=1e-5)
    assert probed["logits/max_abs"] == pytest.approx(max_abs(model(TOKENS)).item(), rel=1e-5)
    figures = model_figures(probed)
    assert figures["act/resid/rms"] == max(over_blocks(probed, "act/resid/rms"))
    assert figures["act/resid/growth"] == pytest.approx(
        probed["act/block_001/resid/rms"] / probed["act/block_000/resid/rms"]
    )
    heads = probed["attn/block_000/entropy"] + probed["attn/block_001/entropy"]
    assert len(heads) == 4
    assert figures["attn/entropy"] == pytest.approx(sum(heads) / 4)
    assert "attn/front_mass" not in figures
    assert "gate/mean" not in figures


def test_a_full_probe_holds_all_of_a_standard_one(tiny):
    model = build_model(tiny("gate=headwise"), 11)
    standard, full = probe(model, TOKENS), probe(model, TOKENS, full=True)
    assert {name: full[name] for name in standard} == standard
    assert full["act/block_001/resid/cosine"] < 1
    assert len(full["act/block_001/resid/top_magnitudes"]) == 4
    assert {"attn/block_000/sink_rate_4", "act/bondarenko_kurtosis", "act/block_001/ffn/branch_ratio"} < full.keys()


@pytest.mark.parametrize(
    "overrides",
    [("normalizer=softmax1",), ("normalizer=sink",), ("kv_bias=key_value",), ("sink_token=on", "window=3"),
     ("normalizer=sigmoid",), ("attention=additive", "position=alibi"), ("n_kv_heads=1",), ("placement=dual",),
     ("placement=parallel",)],
    ids=str,
)  # fmt: skip
def test_a_full_probe_reads_any_attention_and_its_shares_are_shares(tiny, overrides):
    probed = probe(build_model(tiny(*overrides), 11), TOKENS, full=True)
    for value in over_blocks(probed, "attn/first_token_mass") + over_blocks(probed, "attn/entropy"):
        assert all(0 <= share <= 1 + 1e-6 for share in value)
    own = overrides[0] in ("normalizer=softmax1", "normalizer=sink", "kv_bias=key_value")
    assert bool(over_blocks(probed, "attn/front_mass")) == own


def test_a_gate_s_scores_are_reported_where_it_acts(tiny):
    model = build_model(tiny("gate=elementwise", "gate.site=value"), 11)
    for name, parameter in model.named_parameters():
        if "gate" in name:
            nn.init.zeros_(parameter)
    assert model_figures(probe(model, TOKENS))["gate/mean"] == 0.5


@pytest.mark.parametrize(("placement", "by_token"), [
    ("pre", {"ffn", "norm_ffn"}), ("output", {"ffn", "norm_ffn"}), ("sandwich", {"ffn", "norm_ffn"}),
    ("post", {"ffn"}), ("deepnorm", {"ffn"}), ("hybrid", {"ffn"}), ("hybridnorm", {"ffn"}), ("dual", {"ffn"}),
    ("mixln", {"ffn"}), ("hybridnorm_star", {"ffn", "norm_ffn"}),
])  # fmt: skip
def test_bondarenko_s_average_is_over_their_tensors_with_their_rows(tiny, placement, by_token):
    """The FFN's part of the authors' model runs on (B T, D), and its norm is in it unless it follows the sum."""
    config = tiny("model.n_layers=1", "norm=layer", f"placement={placement}")
    model = build_model(config, 11).eval()
    block, kept = model.blocks[0], {}
    sites = {"block": block, "attn": block.attn, "ffn": block.ffn, "norm_attn": getattr(block, "norm_attn", None),
             "norm_ffn": block.norm_ffn, "final": model.final_norm}  # fmt: skip
    sites = {name: module for name, module in sites.items() if module and not isinstance(module, nn.Identity)}
    for name, module in sites.items():
        module.register_forward_hook(lambda m, i, output, name=name: kept.update({name: output}))
    with torch.no_grad():
        model.embedding.weight.mul_(torch.linspace(0.1, 9, 11)[:, None])  # so that a sequence is not like its tokens
    probed = probe(model, TOKENS, full=True)
    kept["block"] = block.residual(kept["block"])
    rows = [x.reshape(-1 if name in by_token else 2, 16 if name in by_token else 8 * 16) for name, x in kept.items()]
    expected = np.mean([statistics.bondarenko_kurtosis(x).item() for x in rows])
    assert placement != "pre" or len(rows) == 5 * 1 + 1
    assert probed["act/bondarenko_kurtosis"] == pytest.approx(expected, rel=1e-5)


# --------------------------------------------------------------------------------------------------- planted truth


def test_a_massive_activation_that_was_planted_is_reported_at_its_layer_channel_position_and_token(tiny):
    model = build_model(tiny(), 11)
    tokens = torch.randint(0, 9, (4, 8), generator=torch.Generator().manual_seed(1))
    tokens[:, 5] = 10

    def plant(module, inputs, output):
        return output + 5000.0 * nn.functional.one_hot(torch.tensor(3), 16) * (tokens == 10)[..., None]

    handle = model.blocks[1].register_forward_hook(plant)
    probed = probe(model, tokens, full=True, kinds={"newline": {9, 10}, "full_stop": {8}})
    handle.remove()
    assert probed["act/block_001/resid/massive_count_strict"] == 1.0
    assert probed["act/block_000/resid/massive_count"] == 0.0
    where = {
        name: probed[f"act/block_001/resid/top_{name}"] for name in ("channel", "position", "on_newline", "on_first")
    }
    assert where == {"channel": 3, "position": 5, "on_newline": 1.0, "on_first": 0.0}
    assert probed["act/block_001/resid/top_channel_agreement"] == 1.0
    assert probed["act/block_000/resid/top_on_newline"] < 1.0
    assert model_figures(probed)["act/resid/max_over_median"] > 1000


def test_the_kind_of_the_token_with_the_largest_entry_with_a_sink_token_in_front():
    x = torch.zeros(3, 4, 2)
    x[0, 0, 1] = x[1, 1, 1] = x[2, 3, 0] = 9.0
    tokens = torch.tensor([[7, 7, 7], [7, 5, 5], [5, 5, 6]])
    result = statistics.largest_entry(x, tokens, {"newline": {7}, "full_stop": {6}}, 1)
    assert [result[f"on_{kind}"].item() for kind in ("first", "newline", "full_stop")] == [
        pytest.approx(1 / 3) for _ in range(3)
    ]


class PlantedScore(nn.Module):
    """Head 1 gives token 0 eight tenths of every later query's attention, the other heads are uniform."""

    def query(self, q_BHTd):
        return q_BHTd

    def forward(self, q_BHTd, k_BHSd):
        B, H, T, _ = q_BHTd.shape
        score = torch.zeros(B, H, T, T)
        rest = 0.2 / torch.arange(1, T).clamp(min=1)
        score[:, 1, 1:] = rest.log()[:, None]
        score[:, 1, 1:, 0] = math.log(0.8)
        return score


def test_a_head_that_attends_to_the_first_token_is_reported_exactly_there(tiny):
    model = build_model(tiny("model.n_heads=4", "position=none"), 11)
    model.blocks[1].attn.core.score = PlantedScore()
    model.blocks[1].attn.core.scale = 1.0
    model.blocks[1].attn.core.fused = False
    probed = probe(model, TOKENS)
    uniform = sum(1 / i for i in range(2, 9)) / 7
    assert probed["attn/block_001/first_token_mass"] == pytest.approx([uniform, 0.8, uniform, uniform])
    assert probed["attn/block_001/sink_rate"] == [
        1.0 if (1 + 7 * m) / 8 > 0.3 else 0.0 for m in (uniform, 0.8, uniform, uniform)
    ]
    assert probed["attn/block_001/entropy"][0] == pytest.approx(1.0)
    assert all(mass < 0.75 for mass in probed["attn/block_000/first_token_mass"])


# -------------------------------------------------------------------------------------------------------- no trace


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("overrides", [(), ("norm=batch",), ("model.dropout=0.3",), ("gate=elementwise",)], ids=str)
def test_a_probe_leaves_no_trace(tiny, overrides, full):
    """Parameters, buffers, gradients, optimizer, mode, hooks, random state and the next loss, bit by bit."""
    config = tiny(*overrides)
    model = build_model(config, 11).train()
    optimizer = build_optimizer(model, config.optim, 0.1)
    model(TOKENS).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    twin = copy.deepcopy(model)

    def state():
        return [*model.state_dict().values(), *optimizer.tensors().values(), torch.get_rng_state()]

    before = [tensor.clone() for tensor in state()]
    probe(model, TOKENS, full)
    matrix_probe(model, {})
    assert all(torch.equal(a, b) for a, b in zip(state(), before, strict=True))
    assert model.training and all(p.grad is None for p in model.parameters())
    assert not [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]
    losses = []
    for m in (model, twin):
        torch.manual_seed(5)
        losses.append(next_token_loss(m))
    assert torch.equal(*losses)


def test_a_probe_outside_evaluation_mode_would_leave_a_trace(tiny):
    """The control of the tests above: a forward pass in training mode does move BatchNorm's running statistics."""
    model = build_model(tiny("norm=batch"), 11).train()
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model(TOKENS)
    assert any(not torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_hooks_are_gone_even_when_the_pass_fails(tiny):
    model = build_model(tiny("position=learned"), 11)
    with pytest.raises(ValueError, match="8 positions"):
        probe(model, torch.zeros(1, 9, dtype=torch.long), full=True)
    assert not [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]


def test_probes_fall_on_powers_of_two_on_both_ends_and_every_so_often():
    standard = compose(["probe.every=50"]).probe
    assert [s for s in range(130) if standard.due(s, 129)] == [0, 1, 2, 4, 8, 16, 32, 50, 64, 100, 128, 129]
    default = compose([]).probe
    later = [s for s in range(129, 1921) if default.due(s, 1920)]
    assert later == [240, 256, 480, 512, 720, 960, 1024, 1200, 1440, 1680, 1920]
    assert not compose(["probe=off"]).probe.due(0, 10)


def test_a_probe_needs_no_more_memory_than_a_forward_pass_of_its_batch():
    """Against the forward pass of training, attention on the plain path, which keeps what the backward pass needs."""
    config = compose(["model.n_layers=4", "model.d_model=64", "model.n_heads=4", "model.context=64"])
    model = build_model(config, 256)
    tokens = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(0))
    for block in model.blocks:
        block.attn.core.fused = False
    forward = peak_bytes(lambda: model(tokens))
    for full in (False, True):
        assert peak_bytes(lambda full=full: probe(model, tokens, full)) < forward


# -------------------------------------------------------------------------------------------------------- in a run


def test_a_full_probe_of_a_run_holds_weights_updates_and_token_kinds(tiny_run):
    out = train(compose(tiny_run("train.steps=4", "probe=full")), quiet=True)
    record = read_run(out.path)
    last = record.probes()[-1]
    assert last["step"] == 4
    assert 0 < last["update_ratio/block_000/query"] < 1
    assert last["weight/block_001/ffn_out/spectral_norm"] > last["weight/block_001/ffn_out/rms"]
    assert "act/block_000/resid/top_on_newline" in last
    assert "update_ratio/block_000/query" not in record.probes()[0]  # before the first step there is none
    assert out.summary["attn/sink_rate"] == record.metrics()[-1]["attn/sink_rate"]
    updates = [last[f"update_ratio/block_{block:03d}/query"] for block in (0, 1)]
    assert out.summary["update_ratio/query"] == pytest.approx(sum(updates) / 2)
    norms = [last[f"weight/block_{block:03d}/ffn_out/spectral_norm"] for block in (0, 1)]
    assert out.summary["weight/ffn_out/spectral_norm"] == max(norms)
    assert "weight/block_001/ffn_out/rms" not in record.metrics()[-1]


def test_arms_of_a_study_are_probed_on_the_same_tokens(tiny_run):
    outs = [train(compose(tiny_run("train.steps=2", *more)), quiet=True) for more in ((), ("norm=layer", "seed=3"))]
    assert outs[0].summary["probe_hash"] == outs[1].summary["probe_hash"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_a_compiled_model_is_probed_as_an_eager_one(tiny_run):
    eager, compiled = (
        train(
            compose(tiny_run("train.steps=4", f"train.compile={mode}", f"experiment={mode}", "probe=full")), quiet=True
        )
        for mode in ("off", "on")
    )
    expected, actual = read_run(eager.path).probes(), read_run(compiled.path).probes()
    assert len(actual) == len(expected) == 4
    for a, b in zip(actual, expected, strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() - {"seconds"}:
            np.testing.assert_allclose(a[name], b[name], rtol=2e-3, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("overrides", [("qk_norm=rms", "qk_norm.gain=per_head"), ("kv_bias=key_value",)])
def test_gains_by_head_and_learned_keys_and_values_are_no_matrices(tiny, overrides):
    plain, more = build_model(tiny(), 11), build_model(tiny(*overrides), 11)
    assert [name for name, _ in block_matrices(more)] == [name for name, _ in block_matrices(plain)]
    assert weight_rms(more)["weight_rms/global"] == weight_rms(plain)["weight_rms/global"]
    optimizer = build_optimizer(more, tiny("optim=muon").optim, 0.1)
    rest = {parameter for group in optimizer.parts[1].param_groups for parameter in group["params"]}
    added = {p for name, p in more.named_parameters() if name not in dict(plain.named_parameters())}
    assert added and added <= rest


def test_the_largest_of_blocks_of_which_one_is_not_a_number_is_none(tiny):
    probed = probe(build_model(tiny(), 11), TOKENS)
    for block in ("block_000", "block_001"):
        broken = {**probed, f"act/{block}/resid/kurtosis_token": math.nan}
        assert math.isnan(model_figures(broken)["act/resid/kurtosis_token"])


def test_bits_per_byte_of_training_are_those_of_the_tokens_that_were_trained_on(tiny_run, tmp_path):
    (tmp_path / "mixed.txt").write_text("plain text. " * 300 + "中文字" * 120, encoding="utf-8")  # held out: the end
    out = train(compose(tiny_run(f"data.files=[{tmp_path / 'mixed.txt'}]", "data.tokenizer=char")), quiet=True)
    rows = [row for row in read_jsonl(out.path / "metrics.jsonl") if "train/bpb" in row]
    assert rows and all(row["train/bpb"] == pytest.approx(row["train/loss"] / math.log(2)) for row in rows)
    assert 2 < out.summary["val_loss"] / math.log(2) / out.summary["val_bpb"] < 3, (
        "the held-out end has longer characters"
    )


def test_a_parameter_that_the_loss_does_not_depend_on_has_the_gradient_norm_0():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    for layer in model:
        layer.roles = {"weight": "ffn_in"}
    norms = GradientNorms(model)
    model[1](torch.ones(2)).sum().backward()
    total, by_part = norms.measure()
    parts = dict(zip(norms.parts, by_part.tolist(), strict=True))
    assert parts["0"] == 0.0 and parts["1"] == pytest.approx(total.item()) and total > 0

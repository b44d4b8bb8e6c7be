"""The options of 2024 to 2026 against independent references: the authors' equations written out, or another library.

Each has a control: with which keys it is the baseline, exactly.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from tensors import TOKENS, draw, next_token_loss, option_with, randomise
from torch import nn
from torch.nn import functional as F
from transformers import MixtralConfig
from transformers.activations import XIELUActivation
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func

from nexus_ablate.axes.ffn import FFN, FFNParts
from nexus_ablate.axes.modules import Geometry
from nexus_ablate.axes.placement import ManifoldConnection
from nexus_ablate.axes.position import square
from nexus_ablate.config.options import default_option
from nexus_ablate.model import build_model
from nexus_ablate.optimizers import build_optimizer, decay_groups
from nexus_ablate.training.step import Step

D, F_WIDTH = 8, 20
GEOMETRY = Geometry(2, D, 2, 2, 4, F_WIDTH, 8, 11, layer=0)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def ffn(name, **keys):
    return FFN.build(option_with("ffn", name, **keys), FFNParts(GEOMETRY, False, 0.0, nn.Identity()))


def model_of(tiny, *overrides):
    return randomise(build_model(tiny("init=gpt2", *overrides), 11), 0.3).eval()


def same(tiny, first, second):
    """Whether two configurations compute the same logits and gradients from the same seed, bit by bit."""
    results = []
    for overrides in (first, second):
        model = build_model(tiny("init=xavier", *overrides), 11)
        logits = model(TOKENS)
        logits.square().sum().backward()
        shared = ("embedding.weight", "blocks.1.attn.query.weight", "blocks.0.attn.out.weight")
        results.append([logits, *(dict(model.named_parameters())[name].grad for name in shared)])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def losses(model, config, steps=20):
    """The losses of the first steps with the configuration's optimizer."""
    optimizer, results = build_optimizer(model, config.optim, config.weight_decay), []
    optimizer.set_learning_rate(1e-2)
    for _ in range(steps):
        loss = next_token_loss(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        results.append(loss.item())
    return results


# ------------------------------------------------------------------------------------------------- norms and FFNs


@pytest.mark.parametrize("keys", [{}, {"alpha_p": 1.3, "alpha_n": 0.9, "beta": 0.2}])
def test_xielu_is_that_of_transformers(keys):
    module = ffn("xielu", **keys)
    names = {"alpha_p": "alpha_p_init", "alpha_n": "alpha_n_init", "beta": "beta"}
    reference = XIELUActivation(**{names[key]: value for key, value in keys.items()}, dtype=torch.float32)
    z = 3 * draw(4, 5)
    close(module.activation(z), reference._xielu_python(z))
    assert sum(p.numel() for n, p in module.named_parameters() if "raw" in n) == 2


def test_polynorm_is_its_published_code():
    module, z = ffn("polynorm"), draw(3, 4, F_WIDTH)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([0.2, -0.5, 0.7]))
        module.bias.fill_(0.1)

    def norm(x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    close(module.activation(z), 0.2 * norm(z**3) - 0.5 * norm(z**2) + 0.7 * norm(z) + 0.1)
    assert torch.equal(ffn("polynorm").weight, torch.full((3,), 1 / 3)) and ffn("polynorm").bias == 0


# ---------------------------------------------------------------------------------------------- mixture of experts


def mixture(**keys):
    module = ffn("moe", **keys)
    return randomise(module, 0.3)


def mixtral(module):
    """The block of transformers with the same weights."""
    sizes = {"hidden_size": D, "intermediate_size": F_WIDTH, "num_local_experts": module.experts}
    block = MixtralSparseMoeBlock(MixtralConfig(**sizes, num_experts_per_tok=module.active))
    with torch.no_grad():
        block.gate.weight.copy_(module.router.weight)
        block.experts.gate_up_proj.copy_(torch.cat((module.gate, module.up), 1))
        block.experts.down_proj.copy_(module.down)
    return block


class Added:
    """The losses and figures that a module adds."""

    def __init__(self):
        self.losses, self.figures = {}, {}

    def add_loss(self, name, loss):
        self.losses[name] = loss

    def add_figure(self, name, figure):
        self.figures[name] = figure


@pytest.mark.parametrize(("experts", "active"), [(8, 2), (4, 1), (3, 3)])
def test_a_mixture_of_experts_is_mixtral_s_in_output_gradients_and_balance_loss(experts, active):
    module, added = mixture(experts=experts, active=active), Added()
    block, x = mixtral(module), draw(2, 6, D, seed=9)
    actual, expected = module(x, added), block(x)
    close(actual, expected[0] if isinstance(expected, tuple) else expected)
    logits = F.linear(x.flatten(0, 1), block.gate.weight)
    close(added.losses["balance_loss"], 0.01 * load_balancing_loss_func((logits,), experts, active))
    actual.square().sum().backward()
    (expected[0] if isinstance(expected, tuple) else expected).square().sum().backward()
    close(module.down.grad, block.experts.down_proj.grad)
    close(module.router.weight.grad, block.gate.weight.grad)
    p = logits.softmax(-1)
    close(added.figures["router_entropy"], -(p * p.log()).sum(-1).mean())
    assert 1 <= added.figures["largest_load"] <= experts / active + 1e-5


@pytest.mark.parametrize("width", [3, 5, 18, 21])
def test_experts_of_every_width_and_precision_compute(width):
    """grouped_mm takes rows of whole 16 bytes; others are filled up with zeros."""
    sizes = Geometry(2, 6, 2, 2, 3, width, 8, 11, layer=0)
    module = randomise(FFN.build(default_option("ffn", "moe"), FFNParts(sizes, False, 0.0, nn.Identity())), 0.3)
    x = draw(1, 7, 6)
    exact = module(x, Added())
    with torch.autocast("cpu", torch.bfloat16):
        rounded = module(x, Added())
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, rtol=0.1, atol=0.05)


def test_the_balance_loss_is_trained_on_once_and_logged_with_the_figures(tiny):
    rows = np.random.default_rng(0).integers(0, 11, (2, 9))
    gradients = {}
    for balance, recomputed in itertools.product(("0", "1"), ("off", "on")):
        keys = [f"ffn.balance={balance}", f"train.activation_checkpointing={recomputed}", "train.compile=off"]
        config = tiny("ffn=moe", *keys, "train.batch_size=2", "train.device=cpu")
        step = Step(config, build_model(config, 11).train(), 3, lambda number: rows)
        loss, more, figures, _ = step.loss(rows)
        assert (more is None) == (balance == "0")
        assert set(figures) == {"option/router_entropy", "option/largest_load"} | (
            {"option/balance_loss"} if balance == "1" else set()
        )
        if more is not None:
            assert more.item() == pytest.approx(figures["option/balance_loss"].item())
        (loss if more is None else loss + more).backward()
        gradients[balance, recomputed] = step.model.blocks[0].ffn.router.weight.grad
    close(gradients["1", "on"], gradients["1", "off"])
    assert (gradients["1", "off"] - gradients["0", "off"]).abs().max() > 1e-4


# -------------------------------------------------------------------------------------------- values and normalizers


def values_of(model):
    """The values that each layer attends to, and their projections."""
    attended, projected, handles = [], [], []
    for block in model.blocks:
        core, value = block.attn.core, block.attn.value
        handles.append(core.register_forward_pre_hook(lambda m, args: attended.append(args[2].transpose(1, 2))))
        handles.append(value.register_forward_hook(lambda m, args, out: projected.append(out)))
    with torch.no_grad():
        model(TOKENS)
    return attended, [v.view_as(a) for v, a in zip(projected, attended, strict=True)]


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_value_residuals_are_half_of_the_first_layer_s_values(tiny, placement):
    model = model_of(tiny, "model.n_layers=3", "value=residual", f"placement={placement}")
    attended, projected = values_of(model)
    close(attended[0], projected[0])
    for layer in (1, 2):
        close(attended[layer], 0.5 * projected[layer] + 0.5 * projected[0])


def test_value_embeddings_are_looked_up_by_token_and_not_for_the_sink(tiny):
    model = model_of(tiny, "value=embedding", "sink_token=on")
    attended, projected = values_of(model)
    for layer, block in enumerate(model.blocks):
        own, other = block.attn.values.factors
        looked_up = block.attn.values.table.weight[TOKENS].view(2, 8, 2, 8)
        close(attended[layer][:, 1:], own * projected[layer][:, 1:] + other * looked_up)
        close(attended[layer][:, :1], own * projected[layer][:, :1])


@pytest.mark.parametrize("d_model", [32, 128])
@pytest.mark.parametrize("init", ["fan_in", "gpt2", "xavier"])
def test_embedded_values_start_at_a_standard_deviation_of_1_as_in_the_authors_code(tiny, d_model, init):
    attn = build_model(tiny("value=embedding", f"model.d_model={d_model}", f"init={init}"), 256).blocks[0].attn
    assert float(attn.values.table.weight.detach().std()) == pytest.approx(1, rel=0.03)
    if init == "fan_in":  # about as large as the projected ones
        projected = attn.value(F.rms_norm(draw(2000, d_model), (d_model,)))
        assert float(projected.detach().std()) == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("window", ["off", "3"])
@pytest.mark.parametrize("position", ["none", "alibi"])
def test_ssmax_multiplies_scores_by_the_logarithm_of_the_number_of_visible_keys(tiny, position, window):
    model = model_of(tiny, "normalizer=ssmax", f"position={position}", f"window={window}")
    core = model.blocks[0].attn.core
    q, k, v = (draw(2, 2, 8, 8, seed=seed) for seed in range(3))
    bias = model.position.score_bias(8, 0)
    distance = torch.arange(8)[:, None] - torch.arange(8)
    seen = (distance >= 0) & (distance < (8 if window == "off" else 3))
    factor = core.normalizer.s_H[:, None, None] * seen.sum(1, keepdim=True).log()
    added = torch.zeros(8, 8) if bias is None else factor * square(bias, 8)
    expected = F.scaled_dot_product_attention(factor * q, k, v, added.masked_fill(~seen, -math.inf))
    close(core(q, k, v, bias), expected)
    core.fused = False
    close(core(q, k, v, bias), expected)


def test_sigmoid_attention_with_a_bias_starts_with_rows_like_softmax(tiny):
    core = model_of(tiny, "normalizer=sigmoid", "normalizer.bias=auto", "position=none").blocks[0].attn.core
    q, k = draw(1, 2, 8, 8), draw(1, 2, 8, 8, seed=1)
    expected = torch.sigmoid(q @ k.transpose(-1, -2) / math.sqrt(8) - math.log(8)).tril()
    close(core.weights(q, k, None), expected)
    close(core.weights(0 * q, k, None)[0, 0, -1].sum(), torch.tensor(8 / 9))


# ------------------------------------------------------------------------------------------ differential attention


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_differential_attention_is_the_authors_equation_in_every_layer(tiny, kv_heads):
    model = model_of(tiny, "mixer=differential", "position=none", "model.n_heads=4", f"n_kv_heads={kv_heads}")
    x = draw(2, 8, 16)
    for layer, block in enumerate(model.blocks):
        attn = block.attn
        q = attn.query(x).view(2, 8, 4, 4).transpose(1, 2)
        k = attn.key(x).view(2, 8, kv_heads, 4).transpose(1, 2).repeat_interleave(4 // kv_heads, 1)
        v = attn.value(x).view(2, 8, kv_heads // 2, 8).transpose(1, 2).repeat_interleave(4 // kv_heads, 1)
        maps = F.scaled_dot_product_attention(q, k, v.repeat_interleave(2, 1), is_causal=True)
        start = 0.8 - 0.6 * math.exp(-0.3 * layer)
        weight = torch.exp(attn.lambda_q1 @ attn.lambda_k1) - torch.exp(attn.lambda_q2 @ attn.lambda_k2) + start
        heads = maps[:, ::2] - weight * maps[:, 1::2]
        normed = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + 1e-5) * attn.pair_gain
        expected = attn.out(((1 - start) * normed).transpose(1, 2).flatten(2))
        close(attn(x, model.context(TOKENS)), expected)


def test_the_vectors_of_lambda_start_at_a_tenth_under_every_init(tiny):
    wide = ("mixer=differential", "model.d_model=512", "model.n_heads=2")
    for init in ("gpt2", "xavier", "megatron"):
        vector = build_model(tiny(*wide, f"init={init}"), 11).blocks[0].attn.lambda_q1
        assert vector.std().item() == pytest.approx(0.1, rel=0.15)


# --------------------------------------------------------------------------------- convolutions and residual streams


def test_a_canon_layer_is_a_causal_depthwise_convolution_added_to_its_input(tiny):
    model = model_of(tiny, "conv=canon")
    for module in (model.blocks[0].attn.conv_in, model.blocks[0].ffn.conv_gate):
        width, kernel = module.weight.shape
        reference = nn.Conv1d(width, width, kernel, groups=width, padding=kernel - 1, bias=False)
        reference.weight.data = module.weight.data.flip(1)[:, None].flip(2)
        x = draw(2, 8, width)
        close(module(x), x + reference(x.transpose(1, 2))[..., :8].transpose(1, 2))


def test_every_canon_site_is_where_the_authors_code_has_it(tiny):
    model = model_of(tiny, "conv=canon", "position=none", "ffn=swiglu")
    attn, mlp, x = model.blocks[0].attn, model.blocks[0].ffn, draw(2, 8, 16)
    h = attn.conv_in(x)
    q, k, v = (
        conv(m(h))
        for conv, m in zip(
            (attn.conv_query, attn.conv_key, attn.conv_value), (attn.query, attn.key, attn.value), strict=True
        )
    )
    q, k, v = (y.view(2, 8, 2, 8).transpose(1, 2) for y in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    close(attn(x, model.context(TOKENS)), attn.out(out))
    h = mlp.conv_in(x)
    close(mlp(x, None), mlp.down(F.silu(mlp.conv_gate(mlp.gate(h))) * mlp.conv_up(mlp.up(h))))


@pytest.mark.parametrize("dynamic", ["off", "on"])
def test_hyper_connections_are_their_published_equations(tiny, dynamic):
    model = model_of(tiny, "placement=hyper", "placement.streams=3", f"placement.dynamic={dynamic}")
    stream = draw(2, 8, 3, 16)
    for block in model.blocks:
        expected = stream
        for connect, norm, branch in (
            (block.connect_attn, block.norm_attn, block.attn),
            (block.connect_ffn, block.norm_ffn, block.ffn),
        ):
            alpha, beta = connect.alpha_nm.expand(2, 8, 3, 4), connect.beta_n.expand(2, 8, 3)
            if dynamic == "on":
                normed = connect.norm(expected)
                alpha = alpha + connect.alpha_scale * torch.tanh(normed @ connect.alpha_map_Dm)
                beta = beta + connect.beta_scale * torch.tanh(normed @ connect.beta_map_D)
            mixed = torch.einsum("btnm,btnd->btmd", alpha, expected)
            out = branch(norm(mixed[:, :, 0]), model.context(TOKENS))
            expected = mixed[:, :, 1:] + torch.einsum("btd,btn->btnd", out, beta)
        close(block(stream, model.context(TOKENS)), expected)


def test_hyper_connections_start_as_pre_norm_whatever_the_number_of_streams(tiny):
    plain = build_model(tiny("init=xavier"), 11)(TOKENS)
    for streams, placement in itertools.product(("1", "2", "4"), ("mhc", "hyper")):
        model = build_model(tiny("init=xavier", f"placement={placement}", f"placement.streams={streams}"), 11)
        torch.testing.assert_close(model(TOKENS), plain, rtol=0, atol=1e-3)  # eps acts on other lengths
    reads = [block.connect_ffn.alpha_nm[:, 0].argmax().item() for block in model.blocks]
    assert reads == [1, 3]


def deepseek_v4(connection):
    """The connection of transformers' DeepSeek-V4 with the same weights, whose `comb` is the transposed mixture."""
    n, width = connection.streams, len(connection.map) // connection.streams
    sizes = {"hidden_size": width, "hc_mult": n, "hc_sinkhorn_iters": connection.iterations}
    library = DeepseekV4HyperConnection(DeepseekV4Config(**sizes, hc_eps=0.0, rms_norm_eps=1e-6))
    order = torch.cat((torch.arange(2 * n), 2 * n + torch.arange(n * n).view(n, n).T.flatten()))
    with torch.no_grad():
        library.fn.copy_(connection.map.T[order])
        library.base.copy_(connection.constant[order])
        library.scale.copy_(connection.factors)
    return library, order


@pytest.mark.parametrize("iterations", [1, 20])
def test_manifold_constrained_hyper_connections_are_those_of_deepseek_v4_in_output_and_gradients(iterations):
    connection = randomise(ManifoldConnection(16, 3, 0, iterations))
    library, order = deepseek_v4(connection)
    stream, branch = draw(2, 8, 3, 16), nn.Linear(16, 16)
    received, mixture, read = library(stream)
    expected = received[..., None] * branch(read)[..., None, :] + mixture.transpose(-1, -2) @ stream
    actual = connection(stream, branch)
    close(actual, expected)
    actual.square().sum().backward()
    expected.square().sum().backward()
    for ours, theirs in (
        (connection.map.grad.T[order], library.fn.grad),
        (connection.constant.grad[order], library.base.grad),
        (connection.factors.grad, library.scale.grad),
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


def test_manifold_constrained_hyper_connections_start_at_their_published_constants(tiny):
    model = build_model(tiny("placement=mhc"), 11)
    connections = [c for block in model.blocks for c in (block.connect_attn, block.connect_ffn)]
    for index, connection in enumerate(connections):
        read, received, mixed = connection.constant.split((4, 4, 16))
        assert read.tolist() == [3.0 if stream == index else -3.0 for stream in range(4)]
        assert not received.any() and not connection.map.any()
        assert torch.equal(mixed.view(4, 4), 6 * torch.eye(4) - 3)
        assert torch.equal(connection.factors, torch.full((3,), 0.01))


@pytest.mark.parametrize(
    ("placement", "decayed"),
    [("hyper", {"alpha_map_Dm", "beta_map_D"}), ("mhc", {"map"}), ("hyper dynamic=off", set())],
)
def test_of_a_hyper_connection_the_projections_decay_and_the_constants_do_not(tiny, placement, decayed):
    model = build_model(tiny(*f"placement={placement}".replace(" ", " placement.").split()), 11)
    names = (name for name in decay_groups(model, "matrices")["decayed"] if ".connect_" in name)
    assert {name.rpartition(".")[2] for name in names} == decayed


def test_siamese_norm_is_the_authors_block_and_end(tiny):
    model = model_of(tiny, "placement=siamese", "model.n_layers=3")
    x = y = model.embedding(TOKENS)
    context = model.context(TOKENS)
    for layer, b in enumerate(model.blocks):
        c = ((layer + 1) * 2) ** 0.5
        x = b.norm_attn_x(x)
        z = b.attn(b.norm_attn(x + b.norm_attn_y(y)), context)
        x, y = x + z / c, y + z
        x = b.norm_ffn_x(x)
        z = b.ffn(b.norm_ffn(x + b.norm_ffn_y(y)), context)
        x, y = x + z / c, y + z
    close(model.hidden(TOKENS), model.final_norm(b.norm_end_x(x) + b.norm_end_y(y)))


# ------------------------------------------------------------------------------------------------------------- nGPT


def unit(x, axis=-1):
    return x / x.norm(dim=axis, keepdim=True)


def ngpt_logits(model, tokens):
    """The authors' model (NVIDIA/ngpt, model.py) with these weights, and RoPE, as its rotation is meant to be."""
    d_model, heads, d = 16, 2, 8
    base = d_model**-0.5
    h, T = model.embedding.weight[tokens], tokens.shape[1]
    angle = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(0, d, 2) / d)

    def rotated(x):
        even, odd = x[..., ::2], x[..., 1::2]
        pairs = even * angle.cos() - odd * angle.sin(), odd * angle.cos() + even * angle.sin()
        return torch.stack(pairs, -1).flatten(-2)

    def step(h, branch, parameter):
        return unit(unit(h) + (parameter * 0.05 / base).abs() * (unit(branch) - unit(h)))

    for block in model.blocks:
        attn, mlp = block.attn, block.ffn
        q, k, v = (m(h).view(2, T, heads, d).transpose(1, 2) for m in (attn.query, attn.key, attn.value))
        length = (attn.qk_norm.length_Hd / base)[:, None]
        q, k = length * unit(rotated(q)), length * unit(rotated(k))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=d**0.5)
        h = step(h, attn.out(out.transpose(1, 2).flatten(2)), block.step_attn)
        u, gate = mlp.scale_up * d_model**0.5 * mlp.up(h), mlp.scale_gate * d_model**0.5 * mlp.gate(h)
        h = step(h, mlp.down(u * F.silu(gate)), block.step_ffn)
    return h @ model.head.weight.T * (model.head.logit_scale_V / base)


def test_ngpt_is_the_authors_model_with_rope(tiny):
    model = build_model(tiny("preset=ngpt"), 11)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.mul_(1 + 0.3 * draw(*parameter.shape))
    close(model(TOKENS), ngpt_logits(model, TOKENS))


def test_ngpt_s_weights_have_length_1_at_the_start_and_after_a_step(tiny):
    config = tiny("preset=ngpt", "train.batch_size=2", "train.device=cpu", "train.compile=off", "optim.lr=0.1")
    rows = np.random.default_rng(0).integers(0, 11, (2, 9))
    step = Step(config, build_model(config, 11).train(), 3, lambda number: rows)
    before = {name: p.detach().clone() for name, p in step.model.named_parameters()}
    for _ in range(2):
        for name, weight in step.model.named_parameters():
            if weight.ndim == 2 and "length" not in name:
                axis = 0 if name.endswith(("out.weight", "down.weight")) else 1
                close(weight.norm(dim=axis), torch.ones_like(weight.norm(dim=axis)))
        step.take(0, rows)
    assert not torch.equal(before["head.weight"], step.model.head.weight)


# ------------------------------------------------------------------------------------------------- values by layer


def test_positions_are_missing_in_the_listed_layers(tiny):
    model = build_model(tiny("model.n_layers=4", "nope_every=[0,2]"), 11)
    assert [model.position_at(layer) is model.position for layer in range(4)] == [False, True, False, True]
    assert same(tiny, ["nope_every=[1]"], ["nope_every=2"])


# ------------------------------------------------------------------------------------------------ prescriptions


def test_the_general_score_with_rotary_positions_is_a_function_of_the_distance(tiny):
    """Equal tokens everywhere: each score depends on i - j alone. With the map after the rotation it does not."""
    model = model_of(tiny, "attention=luong_general")
    attn, x = model.blocks[0].attn, draw(1, 1, 16).expand(1, 8, 16)
    q, k = (m(x).view(1, 8, 2, 8).transpose(1, 2) for m in (attn.query, attn.key))
    scores = []
    for before in (True, False):
        placed = attn.core.score.query(q) if before else q
        placed, keys = model.position.rotate(placed, k, 0)
        placed = placed if before else attn.core.score.query(placed)
        scores.append(placed @ keys.transpose(-1, -2))
    spread = [max(s.diagonal(-n, 2, 3).std(-1).max().item() for n in range(6)) for s in scores]
    assert spread[0] < 1e-5 < 1e-2 < spread[1]


# ------------------------------------------------------------------------------------------ refusals and controls


OFF = [
    ("value=residual value.own=1 value.first=0", ""),
    ("value=embedding value.own=1 value.embedding=0 value.learned=off", ""),
    ("normalizer=sigmoid normalizer.bias=0", "normalizer=sigmoid"),
    ("position=rope_yarn position.factor=1", "position=rope"),
]
EQUAL_AT_THE_START = [
    ("value=embedding value.own=1 value.embedding=0", ""),
    ("placement=hyper placement.streams=1 placement.dynamic=off", ""),
    ("head=scaled head.scale_start=1", ""),
    ("norm=rms_nonparam", "norm=rms"),
]


@pytest.mark.parametrize(("switched", "plain"), [*OFF, *EQUAL_AT_THE_START])
def test_an_option_can_be_turned_off_for_good_or_at_the_start(tiny, switched, plain):
    assert same(tiny, switched.split(), plain.split())
    configs = [tiny("init=xavier", *overrides.split()) for overrides in (switched, plain)]
    one, other = (losses(build_model(config, 11), config) for config in configs)
    assert one[0] == other[0]
    assert (one == other) is ((switched, plain) in OFF)


@pytest.mark.parametrize(
    "option", ["value=residual", "value=embedding", "ffn=moe", "placement=hyper", "placement=dual", "conv=canon"]
)
def test_recomputed_blocks_give_the_same_gradients(tiny, option):
    assert same(tiny, [option, "train.activation_checkpointing=on"], [option])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("option", ["value=residual", "ffn=moe"])
def test_a_step_with_recomputed_blocks_is_one_graph(tiny, option):
    config = tiny(option, "train.activation_checkpointing=on", "train.batch_size=2", "train.device=cpu")
    rows = np.random.default_rng(0).integers(0, 11, (2, 9))
    step = Step(config, build_model(config, 11).train(), 3, lambda number: rows)
    torch._dynamo.reset()
    tokens = torch.from_numpy(rows)
    torch.compile(step.compute, backend="eager", fullgraph=True)(tokens[:, :-1], tokens[:, 1:].flatten())

"""The gated delta rule against the recurrence that defines it, in float64, alone and between layers of attention."""

from __future__ import annotations

import pytest
import torch
from tensors import TOKENS, draw, randomise
from torch.nn import functional as F

from nexus_ablate.config.compose import compose
from nexus_ablate.kernels.delta import gated_delta_rule
from nexus_ablate.measure.counts import flops_per_token, parameters
from nexus_ablate.model import build_model, countable_model

DELTA = "mixer=gated_delta"


def recurrence(q, k, v, log_decay, beta):
    """S <- a S; S <- S + b (v - S k) k'; o = S q, token by token."""
    state, outputs = q.new_zeros(*v.shape[:2], v.shape[-1], k.shape[-1]), []
    for t in range(q.shape[2]):
        state = log_decay[:, :, t, None, None].exp() * state
        missing = v[:, :, t] - (state @ k[:, :, t, :, None])[..., 0]
        state = state + beta[:, :, t, None, None] * missing[..., :, None] * k[:, :, t, None, :]
        outputs.append((state @ q[:, :, t, :, None])[..., 0])
    return torch.stack(outputs, 2)


def inputs(T, dtype=torch.float64):
    q, k, v = (draw(2, 3, T, width, seed=seed).to(dtype) for seed, width in enumerate((4, 4, 6)))
    log_decay, beta = -draw(2, 3, T, seed=3).exp().to(dtype), draw(2, 3, T, seed=4).sigmoid().to(dtype)
    return [x.requires_grad_() for x in (q, F.normalize(k, dim=-1), v, log_decay, beta)]


@pytest.mark.parametrize(("T", "chunk"), [(1, 64), (7, 64), (64, 64), (48, 16), (50, 16), (130, 64)])
def test_the_chunks_equal_the_recurrence_and_its_gradients_in_float64(T, chunk):
    given, expected = inputs(T), inputs(T)
    weight = draw(2, 3, T, 6, seed=9).double()
    actual, reference = gated_delta_rule(*given, chunk), recurrence(*expected)
    torch.testing.assert_close(actual, reference, rtol=0, atol=1e-12)
    (actual * weight).sum().backward()
    (reference * weight).sum().backward()
    for ours, theirs in zip(given, expected, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)


def test_it_stays_finite_and_exact_where_every_decay_is_strong():
    q, k, v, log_decay, beta = inputs(130)
    actual = gated_delta_rule(q, k, v, 200 * log_decay, beta)
    torch.testing.assert_close(actual, recurrence(q, k, v, 200 * log_decay, beta), rtol=0, atol=1e-12)


def layer_reference(mixer, x):
    """The mixer's output from its own weights, in float64."""
    weights = {name: tensor.detach().double() for name, tensor in mixer.named_parameters()}
    x, H = x.double(), mixer.heads

    def projected(name):
        y, weight = x @ weights[f"{name}.weight"].mT, weights[f"conv_{name}.weight"]
        y = F.conv1d(F.pad(y.mT, (weight.shape[1] - 1, 0)), weight[:, None], groups=len(weight)).mT
        return (y * y.sigmoid()).unflatten(2, (H, -1)).transpose(1, 2)

    q, k, v = projected("query"), projected("key"), projected("value")
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    step = (x @ weights["decay.weight"].mT + weights["step_H"]).exp().log1p()
    beta = (x @ weights["strength.weight"].mT).sigmoid()
    out = recurrence(q / q.shape[-1] ** 0.5, k, v, -(weights["log_rate_H"].exp() * step).mT, beta.mT)
    out = out / (out.square().mean(-1, keepdim=True) + mixer.eps).sqrt() * weights["head_gain"]
    gate = x @ weights["gate.weight"].mT
    return (out.transpose(1, 2).flatten(2) * gate * gate.sigmoid()) @ weights["out.weight"].mT


@pytest.mark.parametrize("keys", [[], ["mixer.expand_k=1", "mixer.expand_v=1", "mixer.kernel=2", "mixer.eps=0.1"]])
def test_the_layer_equals_its_equations_written_out_in_float64(tiny, keys):
    model = randomise(build_model(tiny(DELTA, *keys), 11), 0.3)
    mixer, x = model.blocks[1].attn, draw(2, 8, 16, seed=1)
    actual = mixer(x, model.context(TOKENS))
    torch.testing.assert_close(actual.double(), layer_reference(mixer, x), rtol=0, atol=1e-6)


def test_a_hybrid_has_the_layers_of_both_models(tiny):
    """With attention in layer 1: its blocks, one after the other, are those of the two models that have one mixer."""
    sizes = ["init=xavier", "model.n_layers=3"]
    hybrid = build_model(tiny(DELTA, "mixer.layers=[0,2]", *sizes), 11)
    delta, attention = build_model(tiny(DELTA, *sizes), 11), build_model(tiny(*sizes), 11)
    context = attention.context(TOKENS)
    x = attention.embedding(TOKENS)
    for model, layer in ((delta, 0), (attention, 1), (delta, 2)):
        x = model.blocks[layer](x, context)
    assert torch.equal(hybrid.logits(hybrid.final_norm(x), hybrid.head_weight), hybrid(TOKENS))


def test_the_heads_start_in_the_published_rectangle_and_differ(tiny):
    mixer = build_model(tiny(DELTA, "model.n_heads=8", "mixer.expand_k=1"), 11).blocks[0].attn
    rates, steps = mixer.log_rate_H.exp(), F.softplus(mixer.step_H)
    assert rates.min() > 0 and rates.max() < 16 and steps.min() > 0.0009999 and steps.max() < 0.1
    assert len(set(rates.tolist())) == len(set(steps.tolist())) == 8
    assert abs(torch.corrcoef(torch.stack((rates, steps.log())))[0, 1]) < 0.4


def test_it_has_the_published_parameters_and_their_flops(tiny):
    config, plain = compose(["model=nano", DELTA]), compose(["model=nano"])
    D, H, T, L, chunk = 128, 4, 128, 4, 64
    K, V = 96, 192
    convolutions = 4 * (2 * K + V)
    own = 2 * D * K + 3 * D * V + 2 * D * H + convolutions + 2 * H + V // H
    assert own == pytest.approx(6 * D * D, rel=0.03)
    counts = [parameters(countable_model(c, 11))[1] for c in (config, plain)]
    assert counts[0] - counts[1] == L * (own - 4 * D * D)
    products = 2 * (2 * D * K + 3 * D * V + 2 * D * H)
    rule = 2 * chunk * 2 * K + chunk * (K + V) + 2 * chunk * V + 3 * 2 * K * V // H
    attention = 2 * 4 * D * D + 2 * 2 * T * D
    difference = flops_per_token(config, 11) - flops_per_token(plain, 11)
    assert difference == 3 * L * (products + rule - attention)


@pytest.mark.filterwarnings("ignore")
def test_recomputed_and_compiled_blocks_give_the_same_gradients(tiny):
    def gradient(recompute, compiled):
        config = tiny(DELTA, f"train.activation_checkpointing={recompute}", "init=xavier")
        model = build_model(config, 11)
        forward = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
        forward(TOKENS).square().sum().backward()
        return model.embedding.weight.grad

    torch._dynamo.reset()
    assert torch.equal(gradient("on", False), gradient("off", False))
    compiled, plain = gradient("off", True), gradient("off", False)
    assert (compiled - plain).norm() < 1e-5 * plain.norm()


def test_it_computes_under_autocast(tiny):
    model = build_model(tiny(DELTA, "init=xavier"), 11)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(TOKENS)
        logits.float().square().sum().backward()
    exact = model(TOKENS)
    assert (logits - exact).norm() < 0.05 * exact.norm()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())

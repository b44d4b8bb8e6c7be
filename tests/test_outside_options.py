"""Nine small options from outside the package, written from docs/adding_an_option.md: what the interface can say."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from tensors import TOKENS, draw
from torch.nn import functional as F

from nexus_ablate.axes.ffn import FFN
from nexus_ablate.axes.head import HEAD
from nexus_ablate.axes.mixer import MIXER
from nexus_ablate.axes.norm import NORM
from nexus_ablate.axes.placement import PLACEMENT
from nexus_ablate.config.compose import compose
from nexus_ablate.config.plugins import VARIABLE, add_plugins
from nexus_ablate.measure.counts import flops_per_token
from nexus_ablate.model import build_model
from nexus_ablate.optimizers import OPTIM, build_optimizer
from nexus_ablate.runs import find_runs, read_jsonl
from nexus_ablate.training.checkpoint import load_newest
from nexus_ablate.training.distributed import Place, World
from nexus_ablate.training.refusals import check_world
from nexus_ablate.training.session import train
from nexus_ablate.training.step import Step

PLUGINS = {
    "fading.py": '''
import torch
from torch import nn
from nexus_ablate.axes.mixer import MIXER, Mixer
from nexus_ablate.axes.modules import Linear

@MIXER.register("fading")
class Fading(Mixer):
    """h_t = a h_(t-1) + (1 - a) V x_t with a learned a for each channel, projected."""

    def __init__(self, parts, *, start):
        super().__init__()
        D = parts.geometry.d_model
        self.value, self.out = Linear(D, D, False, role="value"), Linear(D, D, False, role="attn_out")
        self.logit_D = nn.Parameter(torch.full((D,), start))

    def forward(self, x, context):
        keep, h, states = torch.sigmoid(self.logit_D), torch.zeros_like(x[:, 0]), []
        for v in self.value(x).unbind(1):
            h = keep * h + (1 - keep) * v
            states.append(h)
        return self.out(torch.stack(states, 1))
''',
    "mixer/fading.yaml": (
        "# A moving average: an example, published nowhere.\n"
        "name: fading\nreads: []\nstart: 1.0  # float (-inf, inf); initial logit of what is kept\n"
    ),
    "two_ahead.py": '''
import torch
from torch import nn
from torch.nn import functional as F
from nexus_ablate.axes.head import HEAD, Head

@HEAD.register("two_ahead")
class TwoAhead(Head):
    """A second head predicts the token after the next one, in training."""

    def __init__(self, geometry, width, tied, bias, scale, *, factor):
        super().__init__(geometry, width, tied, bias, scale)
        self.factor, self.second = factor, nn.Parameter(torch.empty(geometry.vocab_size, width))
        self.roles |= {"second": "head"}

    def rows(self, x, context):
        logits = x[:, :-2] @ self.second.T
        nats = F.cross_entropy(logits.flatten(0, 1).float(), context.tokens_BT[:, 2:].flatten())
        context.add_loss("two_ahead", self.factor * nats)
        return super().rows(x, context)
''',
    "head/two_ahead.yaml": (
        "# An auxiliary head for the token after the next one: an example, published nowhere.\n"
        "name: two_ahead\nfactor: 0.3  # float (0, inf); on its loss\n"
    ),
    "balanced.py": '''
import torch
from torch.nn import functional as F
from nexus_ablate.axes.ffn import FFN, FeedForward
from nexus_ablate.axes.modules import Linear

@FFN.register("balanced")
class Balanced(FeedForward):
    """Each token takes one FFN; a bias on the choice moves towards equal loads after every step."""

    def __init__(self, parts, *, experts, rate):
        super().__init__()
        g = parts.geometry
        self.name, self.rate = f"load_{g.layer}", rate
        self.router = Linear(g.d_model, experts, False, role="gate")
        self.up = torch.nn.ModuleList(Linear(g.d_model, g.d_ff, False, role="ffn_in") for _ in range(experts))
        self.down = torch.nn.ModuleList(Linear(g.d_ff, g.d_model, False, role="ffn_out") for _ in range(experts))
        self.register_buffer("bias_E", torch.zeros(experts))

    def forward(self, x, context):
        score = torch.sigmoid(self.router(x))
        chosen = F.one_hot((score + self.bias_E).argmax(-1), score.shape[-1])
        context.add_sum(self.name, chosen.sum((0, 1)).float())
        out = torch.stack([down(F.relu(up(x))) for up, down in zip(self.up, self.down)], -1)
        return (out * (chosen * score)[..., None, :]).sum(-1)

    def after_step(self, sums):
        load = sums[self.name]
        self.bias_E += self.rate * torch.sign(load.mean() - load)
''',
    "ffn/balanced.yaml": (
        "# A mixture of experts balanced by a bias. Wang et al. 2024, arXiv:2408.15664.\nname: balanced\n"
        "experts: 4  # int [2, 64]; FFNs of width d_ff\nrate: 0.001  # float (0, inf); change of the bias in a step\n"
        "refuses: {ffn_bias=on: the experts have no biases}\n"
    ),
    "over_depth.py": '''
import torch
from torch import nn
from nexus_ablate.axes.placement import PLACEMENT, Block

@PLACEMENT.register("over_depth")
class OverDepth(Block):
    """Each branch reads a softmax mixture of the embedding and all earlier outputs, by a learned query."""

    def __init__(self, parts):
        super().__init__(parts)
        self.norm_attn, self.norm_ffn, self.layer = parts.norm("attn"), parts.norm("ffn"), parts.layer
        last = parts.layer == parts.geometry.n_layers - 1
        self.queries = nn.ParameterList(torch.zeros(parts.geometry.d_model) for _ in range(3 if last else 2))

    def enter(self, x):
        return (x,)

    def residual(self, stream):
        return stream[-1]

    def mixed(self, stream, query):
        all_NBTD = torch.stack(stream)
        keys = all_NBTD / all_NBTD.square().mean(-1, keepdim=True).add(1e-6).sqrt()
        return (torch.softmax(keys @ query, 0)[..., None] * all_NBTD).sum(0)

    def leave(self, stream, final_norm, context):
        return final_norm(self.mixed(stream, self.queries[2]))

    def forward(self, stream, context):
        stream = (*stream, self.attn(self.norm_attn(self.mixed(stream, self.queries[0])), context))
        return (*stream, self.ffn(self.norm_ffn(self.mixed(stream, self.queries[1])), context))
''',
    "placement/over_depth.yaml": (
        "# Attention over depth instead of a sum: an example, published nowhere.\n"
        "name: over_depth\nprescribes: {final_norm: on}\nnorm_sites: [attn, ffn]\n"
    ),
    "median_norm.py": '''
import torch
from torch import nn
from nexus_ablate.axes.norm import NORM

@NORM.register("median_norm")
class MedianNorm(nn.Module):
    """g x / (median of |x| + eps)."""

    def __init__(self, width, bias, site, *, eps):
        super().__init__()
        self.gain, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return self.gain * x / (x.abs().median(-1, keepdim=True).values + self.eps)
''',
    "norm/median_norm.yaml": (
        "# Divides by the median magnitude: an example, published nowhere.\n"
        "name: median_norm\neps: 1.0e-3  # float (0, inf); added to the median\nrefuses: {norm_bias=on: it has none}\n"
    ),
    "latent.py": '''
import dataclasses, torch
from torch import nn
from nexus_ablate.attention_core import AttentionCore
from nexus_ablate.axes.mixer import MIXER, Mixer
from nexus_ablate.axes.modules import Linear

@MIXER.register("latent")
class Latent(Mixer):
    """Multi-head latent attention: keys and values from a narrow latent, positions on channels of their own."""

    def __init__(self, parts, *, rank):
        super().__init__()
        config, geometry = parts.config, parts.geometry
        D, H, d = geometry.d_model, geometry.n_heads, geometry.head_dim
        self.layer, self.heads, self.d = geometry.layer, H, d
        self.query = Linear(D, 2 * H * d, False, role="query")
        self.latent = Linear(D, rank, False, role="key")
        self.norm = parts.norm("attn_latent", rank)
        self.key, self.value = Linear(rank, H * d, False, role="key"), Linear(rank, H * d, False, role="value")
        self.rotary_key = Linear(D, d, False, role="key")
        self.core = AttentionCore(config, dataclasses.replace(geometry, head_dim=2 * d), None, parts.score_factor)
        self.out = Linear(H * d, D, False, role="attn_out")

    def forward(self, x, context):
        B, T, _ = x.shape
        plain_q, rotary_q = self.query(x).view(B, T, self.heads, -1).transpose(1, 2).chunk(2, -1)
        latent = self.norm(self.latent(x))
        plain_k, v = (m(latent).view(B, T, self.heads, -1).transpose(1, 2) for m in (self.key, self.value))
        rotary_k = self.rotary_key(x).view(B, T, 1, -1).transpose(1, 2)
        rotary_q, rotary_k = context.positions[self.layer].rotate(rotary_q, rotary_k, self.layer)
        q = torch.cat((plain_q, rotary_q), -1)
        k = torch.cat((plain_k, rotary_k.expand(-1, self.heads, -1, -1)), -1)
        return self.out(self.core(q, k, v, None).transpose(1, 2).flatten(2))
''',
    "mixer/latent.yaml": (
        "# Multi-head latent attention, DeepSeek-AI 2024, arXiv:2405.04434.\n"
        "name: latent\nreads: [attention, normalizer, position, model.head_dim, window, attn_scale, attn_softcap]\n"
        "rank: 8  # int [1, 65536]; of keys and values\n"
    ),
    "forgetting.py": '''
import torch
from torch.nn import functional as F
from nexus_ablate.axes.mixer import MIXER, Mixer
from nexus_ablate.axes.modules import Linear

@MIXER.register("forgetting")
class Forgetting(Mixer):
    """Softmax attention with sum_(j < l <= i) log f_l added to score (i, j), f = sigmoid(W x + b) for each head."""

    def __init__(self, parts):
        super().__init__()
        D, H, d = parts.geometry.d_model, parts.geometry.n_heads, parts.geometry.head_dim
        self.width = d
        self.query, self.key, self.value = (Linear(D, H * d, False, role=role) for role in ("query", "key", "value"))
        self.forget, self.out = Linear(D, H, True, role="gate"), Linear(H * d, D, False, role="attn_out")

    def forward(self, x, context):
        q, k, v = (f(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for f in (self.query, self.key, self.value))
        kept = F.logsigmoid(self.forget(x)).transpose(1, 2).cumsum(-1)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        bias = (kept[..., :, None] - kept[..., None, :]).masked_fill(later, -torch.inf)
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))
''',
    "mixer/forgetting.yaml": (
        "# Forgetting attention, Lin et al. 2025, arXiv:2503.02130.\nname: forgetting\nreads: [model.head_dim]\n"
    ),
    "pairs.py": '''
from torch.nn import functional as F
from nexus_ablate.axes.modules import Table
from nexus_ablate.axes.placement import PLACEMENT, Block

@PLACEMENT.register("pairs")
class Pairs(Block):
    """Pre-norm, and the first block adds an embedding of each token with the one before it, hashed to some rows."""

    def __init__(self, parts, *, rows):
        super().__init__(parts)
        self.norm_attn, self.norm_ffn, self.rows = parts.norm("attn"), parts.norm("ffn"), rows
        self.table = Table(rows, parts.geometry.d_model, role="embedding") if parts.layer == 0 else None

    def forward(self, x, context):
        if self.table is not None:
            before = F.pad(context.tokens_BT[:, :-1], (1, 0))
            x = x + self.table((36313 * context.tokens_BT + 27191 * before) % self.rows)
        x = x + self.attn(self.norm_attn(x), context)
        return x + self.ffn(self.norm_ffn(x), context)
''',
    "placement/pairs.yaml": (
        "# An embedding of pairs of tokens: an example, published nowhere.\n"
        "name: pairs\nrows: 512  # int [2, 1e9]; of its table\n"
        "prescribes: {final_norm: on}\nnorm_sites: [attn, ffn]\nrefuses: {sink_token=on: its pair has no row}\n"
    ),
    "sign.py": '''
from collections import defaultdict
import torch
from nexus_ablate.optimizers import OPTIM, Optimizer, groups_by_decay

class SignSteps:
    def __init__(self, groups, lr, beta):
        self.param_groups, self.beta = [{"lr": lr, **group} for group in groups], beta
        self.state = defaultdict(dict)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("momentum", torch.zeros_like(p)).lerp_(p.grad, 1 - self.beta)
                    p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * m.sign())

@OPTIM.register("sign")
class Sign(Optimizer):
    """w <- (1 - lr weight_decay) w - lr sign(m), m a running mean of the gradients."""

    def __init__(self, parameters, lr, fused, *, beta):
        super().__init__(parameters, SignSteps(groups_by_decay(parameters), lr, beta))
''',
    "optim/sign.yaml": (
        "# The sign of a momentum: an example, published nowhere.\n"
        "name: sign\nlr: 1.0e-3\ndecay: matrices\nschedule: cosine\nwarmup: auto\nfinal_lr: 0.1\ncooldown: 0.2\n"
        "clip: 1.0\nbeta: 0.9  # float [0, 1); decay of the mean\n"
    ),
}
TOGETHER = (
    ("mixer=fading", "head=two_ahead", "ffn=balanced", "placement=over_depth", "norm=median_norm"),
    ("mixer=forgetting", "placement=pairs", "optim=sign"),
)
OPTIONS = ["mixer=latent", *(option for options in TOGETHER for option in options)]


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    """The plugins above, as a directory outside the package; nothing of them is left behind."""
    monkeypatch.setenv(VARIABLE, "")
    for registry in (FFN, HEAD, MIXER, NORM, OPTIM, PLACEMENT):
        monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    for name, text in PLUGINS.items():
        path = tmp_path / "lab" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    add_plugins([tmp_path / "lab"])
    yield
    for name in [name for name in sys.modules if name.startswith("nexus_ablate_plugin_")]:
        del sys.modules[name]


@pytest.mark.parametrize("option", OPTIONS)
def test_it_builds_is_causal_and_every_parameter_learns(plugins, tiny, option):
    model = build_model(tiny(option, "init=xavier", "tie_embeddings=off"), 11)
    changed = TOKENS.clone()
    changed[:, 5:] = 0
    torch.testing.assert_close(model(changed)[:, :5], model(TOKENS)[:, :5])
    context = model.context(TOKENS)
    logits = model.logits(model.hidden(TOKENS, context), model.head_weight)
    torch.stack([logits.square().sum(), *context.losses.values()]).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("option", OPTIONS)
def test_its_recomputed_blocks_have_the_same_gradients(plugins, tiny, option):
    def gradient(recompute):
        model = build_model(tiny(option, "init=xavier", f"train.activation_checkpointing={recompute}"), 11)
        model(TOKENS).square().sum().backward()
        return model.embedding.weight.grad

    assert torch.equal(gradient("on"), gradient("off"))


@pytest.mark.parametrize("options", TOGETHER, ids=" ".join)
def test_they_train_together_and_in_some_layers_alone(plugins, tiny_run, tmp_path, options):
    config = compose(tiny_run(*options, "mixer.layers=[0]", "train.steps=4"))
    train(config, quiet=True)
    (path,) = find_runs([tmp_path / "runs"])
    rows = [row for row in read_jsonl(path / "metrics.jsonl") if "train/loss" in row]
    assert len(rows) == 4
    saved = load_newest(path / "checkpoints").tensors["model"]
    if "ffn=balanced" in options:
        assert all(row["option/two_ahead"] > 0 for row in rows)
        assert saved["blocks.1.ffn.bias_E"].abs().max() > 0
    assert ("blocks.0.attn.logit_D" in saved) == ("mixer=fading" in options) and "blocks.1.attn.key.weight" in saved


def biases(tiny, *overrides, steps=1):
    """The biases of the experts after some steps on the same four sequences."""
    config = tiny("ffn=balanced", "train.device=cpu", "init=xavier", *overrides)
    rows = np.random.default_rng(0).integers(0, 11, (4, 9))
    step = Step(config, build_model(config, 11).train(), 3, lambda number: rows)
    for number in range(steps):
        step.take(number, rows)
    return [block.ffn.bias_E for block in step.model.blocks]


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.batch_size=4", "train.activation_checkpointing=on"],
        ["train.batch_size=2", "train.grad_accum=2"],
        ["train.batch_size=1", "train.grad_accum=4", "train.activation_checkpointing=on"],
        ["train.batch_size=4", "train.loss=chunked"],
    ],
    ids=" ".join,
)
def test_a_state_changes_once_in_a_step_by_the_sums_over_all_its_tokens(plugins, tiny, overrides):
    plain = biases(tiny, "train.batch_size=4")
    assert all(bias.abs().max() == pytest.approx(0.001) for bias in plain)
    assert all(torch.equal(a, b) for a, b in zip(plain, biases(tiny, *overrides), strict=True))
    assert biases(tiny, *overrides, steps=2)[0].abs().max() == pytest.approx(0.002)


def test_a_step_that_float16_skips_leaves_the_state_as_it_is(plugins, tiny):
    config = tiny("ffn=balanced", "train.device=cpu", "init=xavier", "train.batch_size=4", "train.precision=fp16")
    rows = np.random.default_rng(0).integers(0, 11, (4, 9))
    step = Step(config, build_model(config, 11).train(), 3, lambda number: rows)
    step.set_loss_scale(2.0**60, 0)
    weight = step.model.embedding.weight.detach().clone()
    step.take(0, rows)
    bias = step.model.blocks[0].ffn.bias_E
    assert torch.equal(step.model.embedding.weight, weight) and not bias.any()
    step.set_loss_scale(1.0, 0)
    step.take(1, rows)
    assert not torch.equal(step.model.embedding.weight, weight) and bias.any()


def test_validation_and_other_forward_passes_leave_the_state_as_it_is(plugins, tiny):
    model = build_model(tiny("ffn=balanced"), 11).train()
    model(TOKENS)
    assert not any(block.ffn.bias_E.any() for block in model.blocks)


def test_several_processes_may_share_a_state_that_sums_change(plugins, tiny):
    check_world(tiny("ffn=balanced", "train.batch_size=4"), Place(0, 2))


def test_every_process_of_a_resumed_run_starts_with_the_state_of_the_first(plugins, tiny, monkeypatch):
    monkeypatch.setattr("nexus_ablate.training.step.DistributedDataParallel", lambda module, **_: module)
    config = tiny("ffn=balanced", "train.device=cpu", "init=xavier", "train.batch_size=4")
    messages = []
    for rank in range(2):
        world = World(Place(rank, 2), torch.device("cpu"))
        monkeypatch.setattr(world, "share", lambda data: messages.append(data) or messages[0])
        step = Step(config, build_model(config, 11), 3, lambda number: None, world)
        if world.leads:  # which has read its checkpoint
            step.model.blocks[1].ffn.bias_E.fill_(0.002)
        step.distribute(2)
        assert step.model.blocks[1].ffn.bias_E.tolist() == pytest.approx([0.002] * 4)


def test_the_recurrence_and_the_norm_are_what_they_say(plugins, tiny):
    model = build_model(tiny("mixer=fading", "mixer.start=0", "norm=median_norm"), 11)
    mixer, x = model.blocks[0].attn, draw(2, 8, 16)
    weight = torch.tensor([[0.5 ** (t - s + 1) if s <= t else 0.0 for s in range(8)] for t in range(8)])
    torch.testing.assert_close(mixer(x, model.context(TOKENS)), mixer.out(weight @ mixer.value(x)))
    x = torch.tensor([[1.0, -3.0, 2.0] * 5 + [2.0]])
    torch.testing.assert_close(model.final_norm(x), x / 2.001)


def test_forgetting_is_attention_with_a_bias_and_pairs_are_of_neighbours(plugins, tiny):
    model = build_model(tiny("mixer=forgetting", "placement=pairs", "init=xavier"), 11)
    mixer, x = model.blocks[0].attn, draw(2, 8, 16)
    heads = lambda f: f(x).unflatten(-1, (-1, mixer.width)).transpose(1, 2)  # noqa: E731
    forget = torch.sigmoid(mixer.forget(x)).transpose(1, 2)
    weight = (heads(mixer.query) @ heads(mixer.key).mT * mixer.width**-0.5).exp().tril()
    for i in range(8):
        for j in range(i):
            weight[..., i, j] *= forget[..., j + 1 : i + 1].prod(-1)
    out = (weight / weight.sum(-1, keepdim=True)) @ heads(mixer.value)
    torch.testing.assert_close(mixer(x, model.context(TOKENS)), mixer.out(out.transpose(1, 2).flatten(2)))
    swapped = TOKENS.clone()
    swapped[:, 3] += 1
    table = model.blocks[0].table.weight
    rows = [torch.autograd.grad(model(t)[:, 5].sum(), table)[0].any(-1).nonzero().flatten() for t in (TOKENS, swapped)]
    assert not torch.equal(*rows)


def test_an_optimizer_steps_by_signs_and_its_state_is_loaded(plugins, tiny):
    config = tiny("optim=sign", "weight_decay=0")
    model = build_model(config, 11)
    optimizer = build_optimizer(model, config.optim, config.weight_decay)
    optimizer.set_learning_rate(0.5)
    before = model.embedding.weight.detach().clone()
    model(TOKENS).square().sum().backward()
    sign = model.embedding.weight.grad.sign()
    optimizer.step()
    torch.testing.assert_close(model.embedding.weight, before - 0.5 * sign)
    other = build_optimizer(model, config.optim, config.weight_decay)
    other.load(optimizer.tensors())
    assert torch.equal(other.tensors()["embedding.weight/momentum"], optimizer.tensors()["embedding.weight/momentum"])


def test_attention_over_depth_starts_as_the_mean_of_the_embedding_and_all_outputs(plugins, tiny):
    model = build_model(tiny("placement=over_depth"), 11)
    context, outputs = model.context(TOKENS), [model.embedding(TOKENS)]
    for block in model.blocks:
        for branch, norm in ((block.attn, block.norm_attn), (block.ffn, block.norm_ffn)):
            outputs.append(branch(norm(torch.stack(outputs).mean(0)), context))
    expected = F.linear(model.final_norm(torch.stack(outputs).mean(0)), model.head_weight)
    torch.testing.assert_close(model(TOKENS), expected)


def test_latent_attention_is_attention_with_half_of_its_channels_rotated(plugins, tiny):
    model = build_model(tiny("mixer=latent", "init=xavier", "norm=rms"), 11)
    attn, x = model.blocks[1].attn, draw(2, 8, 16, seed=1)
    plain_q, rotary_q = attn.query(x).view(2, 8, 2, 16).transpose(1, 2).chunk(2, -1)
    latent = F.rms_norm(attn.latent(x), (8,), None, 1e-6)
    plain_k, v = (project(latent).view(2, 8, 2, 8).transpose(1, 2) for project in (attn.key, attn.value))
    rotary_k = attn.rotary_key(x)[:, None].expand(-1, 2, -1, -1)
    rotary_q, rotary_k = model.position.rotate(rotary_q, rotary_k, 1)
    q, k = torch.cat((plain_q, rotary_q), -1), torch.cat((plain_k, rotary_k), -1)
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attn(x, model.context(TOKENS)), attn.out(heads.transpose(1, 2).flatten(2)))
    assert flops_per_token(tiny("mixer=latent"), 11) != flops_per_token(tiny(), 11)

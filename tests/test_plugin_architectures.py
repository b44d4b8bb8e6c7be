"""Published architectures as plugins from outside the package: what the interfaces of options must be able to say."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from tensors import TOKENS, draw
from torch.nn import functional as F

from nexus_ablate.axes.ffn import FFN
from nexus_ablate.axes.head import HEAD
from nexus_ablate.axes.mixer import MIXER
from nexus_ablate.axes.placement import PLACEMENT
from nexus_ablate.axes.value import VALUE
from nexus_ablate.cli import main
from nexus_ablate.config.compose import compose
from nexus_ablate.config.options import conf_dir
from nexus_ablate.config.plugins import VARIABLE, add_plugins
from nexus_ablate.measure.counts import flops_per_token
from nexus_ablate.model import build_model
from nexus_ablate.runs import find_runs, read_jsonl
from nexus_ablate.training.session import train

EXAMPLES = Path(__file__).resolve().parents[1].joinpath("docs", "worked_examples.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^`my_options/(\S+)`\n\n```\w+\n(.*?)^```$", EXAMPLES, flags=re.M | re.S))
SIZES = sorted(path.stem for path in conf_dir().joinpath("model").glob("*.yaml"))

PLUGINS = {
    "resformer.py": """
from nexus_ablate.axes.value import VALUE, Value

@VALUE.register("resformer")
class Resformer(Value):
    def __init__(self, geometry, *, first):
        super().__init__()
        self.layer, self.first = geometry.layer, first

    def forward(self, v, x, context):
        if self.layer == 0:
            context.store["resformer"] = v
        return v if self.layer == 0 else (1 - self.first) * v + self.first * context.store["resformer"]
""",
    "value/resformer.yaml": "# Value residual, arXiv:2410.17897.\nname: resformer\nfirst: 0.5  # float [0, 1]; share\n",
    "difference.py": """
import math, torch
from torch import nn
from torch.nn import functional as F
from nexus_ablate.axes.mixer import MIXER
from nexus_ablate.mixers import MultiHead

@MIXER.register("difference")
class Difference(MultiHead):
    def __init__(self, parts):
        super().__init__(parts)
        self.start = 0.8 - 0.6 * math.exp(-0.3 * self.layer)
        self.q1, self.k1, self.q2, self.k2 = (nn.Parameter(torch.empty(parts.geometry.head_dim)) for _ in range(4))
        self.stds = dict.fromkeys(("q1", "k1", "q2", "k2"), 0.1)
        self.gain = nn.Parameter(torch.ones(2 * parts.geometry.head_dim))

    def attended(self, q, k, v, bias):
        wide = torch.cat((v[:, ::2], v[:, 1::2]), -1).repeat_interleave(2, 1)
        out = self.core(q, k, wide, bias)
        weight = (self.q1 @ self.k1).exp() - (self.q2 @ self.k2).exp() + self.start
        pairs = out[:, ::2] - weight * out[:, 1::2]
        return ((1 - self.start) * F.rms_norm(pairs, pairs.shape[-1:], self.gain, 1e-5)).transpose(1, 2)
""",
    "mixer/difference.yaml": "# Differential attention, arXiv:2410.05258.\nname: difference\nreads: all\n",
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
    "sphere.py": """
import torch
from torch import nn
from torch.nn import functional as F
from nexus_ablate.axes.placement import PLACEMENT, Block

@PLACEMENT.register("sphere")
class Sphere(Block):
    def __init__(self, parts, *, step):
        super().__init__(parts)
        self.a, self.b = (nn.Parameter(torch.full((parts.geometry.d_model,), step)) for _ in range(2))

    def moved(self, x, branch, step):
        x = F.normalize(x, dim=-1)
        return F.normalize(x + step.abs() * (F.normalize(branch, dim=-1) - x), dim=-1)

    def forward(self, x, context):
        x = self.moved(x, self.attn(x, context), self.a)
        return self.moved(x, self.ffn(x, context), self.b)
""",
    "placement/sphere.yaml": (
        "# nGPT's steps on the sphere, arXiv:2410.01131.\n"
        "name: sphere\nstep: 0.05  # float (0, inf); initial step\nprescribes: {final_norm: off}\n"
    ),
    "token_scale.py": """
import torch
from torch import nn
from nexus_ablate.axes.head import HEAD, Head

@HEAD.register("token_scale")
class TokenScale(Head):
    def __init__(self, geometry, width, tied, bias, scale, *, start):
        super().__init__(geometry, width, tied, bias, scale)
        self.scale_V = nn.Parameter(torch.full((geometry.vocab_size,), start))

    def scaled(self, weight):
        return weight * self.scale_V[:, None]
""",
    "head/token_scale.yaml": (
        "# nGPT's scale of each logit, arXiv:2410.01131.\n"
        "name: token_scale\nstart: 1.0  # float (0, inf); initial scale\n"
    ),
    "my_ffn.py": FILES["my_ffn.py"],
    "ffn/my_ffn.yaml": FILES["ffn/my_ffn.yaml"],
}


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    """The plugins above, as a directory outside the package; nothing of them is left behind."""
    monkeypatch.setenv(VARIABLE, "")
    for registry in (VALUE, MIXER, PLACEMENT, HEAD, FFN):
        monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    for name, text in PLUGINS.items():
        path = tmp_path / "lab" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    add_plugins([tmp_path / "lab"])
    yield
    for name in [name for name in sys.modules if name.startswith("nexus_ablate_plugin_")]:
        del sys.modules[name]


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def alike(tiny, plugin, built_in, names=None):
    """Whether a plugin's model has the logits of the built-in option's with the same weights."""
    models = [build_model(tiny("init=xavier", "model.n_layers=3", *overrides), 11) for overrides in (plugin, built_in)]
    state = models[0].state_dict()
    for old, new in (names or {}).items():
        state = {name.replace(old, new): tensor for name, tensor in state.items()}
    models[1].load_state_dict(state)
    close(models[0](TOKENS), models[1](TOKENS))


@pytest.mark.parametrize("placement", ["post", "hyper", "dual"])
def test_value_residuals_under_any_placement(plugins, tiny, placement):
    alike(tiny, ["value=resformer", f"placement={placement}"], ["value=residual", f"placement={placement}"])


def test_differential_attention_with_its_constant_of_the_depth(plugins, tiny):
    names = {f".attn.{n}": f".attn.lambda_{n}" for n in ("q1", "k1", "q2", "k2")} | {".attn.gain": ".attn.pair_gain"}
    alike(tiny, ["mixer=difference"], ["mixer=differential"], names)
    model = build_model(tiny("mixer=difference"), 11)
    assert [block.attn.start for block in model.blocks] == pytest.approx([0.2, 0.8 - 0.6 * math.exp(-0.3)])


def test_ngpt_s_steps_and_its_logit_scale(plugins, tiny):
    sphere = ["placement=sphere", "head=token_scale", "head.start=0.5", "norm=none"]
    built_in = ["placement=ngpt", "placement.scale=0.05", "head=scaled", "head.scale_start=0.5", "head.start=0.5"]
    names = {".a": ".step_attn", ".b": ".step_ffn", "scale_V": "logit_scale_V", ".step_attnttn": ".attn"}
    alike(tiny, sphere, [*built_in, "norm=none"], names)


def test_multi_head_latent_attention_is_its_definition_trains_and_is_causal(plugins, tiny):
    model = build_model(tiny("mixer=latent", "init=xavier", "norm=rms"), 11)
    attn, x = model.blocks[1].attn, draw(2, 8, 16, seed=1)
    H, d, causal = 2, 8, torch.ones(8, 8).tril().bool()
    latent = F.rms_norm(attn.latent(x), (8,), None, 1e-6)
    q = attn.query(x).view(2, 8, H, 2 * d)
    k, v, shared = attn.key(latent).view(2, 8, H, d), attn.value(latent).view(2, 8, H, d), attn.rotary_key(x)
    angle = torch.arange(8)[:, None] * 10000.0 ** (-torch.arange(0, d, 2) / d)

    def rotated(y):
        first, second = y.chunk(2, -1)
        return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1)

    heads = []
    for h in range(H):
        scores = q[:, :, h, :d] @ k[:, :, h].mT + rotated(q[:, :, h, d:]) @ rotated(shared).mT
        heads.append((scores / math.sqrt(2 * d)).masked_fill(~causal, -torch.inf).softmax(-1) @ v[:, :, h])
    close(attn(x, model.context(TOKENS)), attn.out(torch.cat(heads, -1)))
    changed = TOKENS.clone()
    changed[:, 5:] = 0
    assert torch.equal(model(changed)[:, :5], model(TOKENS)[:, :5])
    model(TOKENS).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert flops_per_token(tiny("mixer=latent"), 11) != flops_per_token(tiny(), 11)


@pytest.mark.parametrize("size", SIZES)
def test_explain_describes_a_mixture_of_experts_at_every_size(plugins, capsys, size):
    assert main(["explain", "ffn=my_ffn", f"model={size}", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["parameters"]["total"] > 0 and facts["flops_per_token"] > 0


def test_a_run_logs_the_balance_loss_and_the_router_s_entropy_and_trains_on_the_loss(plugins, tiny_run, tmp_path):
    for balance in ("0.5", "0"):
        config = compose([*tiny_run("ffn=my_ffn", f"ffn.balance={balance}", "train.steps=6", "mixer=latent")])
        train(config, quiet=True)
    rows = {}
    for path in find_runs([tmp_path / "runs"]):
        logged = [row for row in read_jsonl(path / "metrics.jsonl") if "option/balance_loss" in row]
        assert len(logged) == 6
        assert all(0 < row["option/router_entropy"] <= math.log(4) + 1e-6 for row in logged)
        rows[logged[0]["option/balance_loss"] > 0] = logged
    assert rows[True][0]["option/balance_loss"] >= 2 * 0.5 * 0.99  # two layers, each at least its factor
    assert rows[True][0]["train/loss"] == rows[False][0]["train/loss"] != rows[True][-1]["train/loss"]
    assert rows[True][-1]["train/loss"] != rows[False][-1]["train/loss"]

"""Choices that contradict each other or can't act are refused with their reason and a fix."""

from __future__ import annotations

import re

import pytest

from nexus_ablate.errors import ConfigError

NO_RULE = ("optim=muon", "optim=adafactor", "init=xavier", "attention=luong_general", "qk_norm=rms", "gate=headwise",
           "embed_scale=sqrt_d", "attn_scale=0.1", "position=transformer_xl", "kv_bias=key", "d_embed=8",
           "mixer=gated_delta")  # fmt: skip
ROTARY = ("rope", "irope", "rope_interpolated", "rope_llama3", "rope_yarn")
HYBRID = "model.n_layers=4 mixer=gated_delta mixer.layers=[0,2]"
CONTRADICTIONS = [
    ("train.steps=5 train.tokens=500", "one budget"),
    ("train.tokens=5 train.flops=500", "one budget"),
    ("train.precision=fp16 norm.fp32=off", "gradients overflow"),
    ("train.precision=fp16 norm=layer_zero norm.fp32=off", "gradients overflow"),
    ("train.compile=graphs train.grad_accum=2", "do not outlive its next replay"),
    ("norm=batch train.activation_checkpointing=on", "updated twice per step"),
    ("model.head_dim=7", "rotated in pairs"),
    ("position=none nope_every=2", "no layer has positions"),
    ("position=learned nope_every=2", "positions are in the embedding"),
    ("position=sinusoidal nope_every=2", "positions are in the embedding"),
    ("position=irope nope_every=off", "it is position=rope"),
    ("position=t5 position.buckets=32 position.max_distance=16", "half of the buckets"),
    ("nope_every=[]", "each once"),
    ("nope_every=[0,0]", "each once"),
    ("nope_every=[2]", "there is no layer 2"),
    ("nope_every=[0,1] bias=on", "no layer has positions"),
    ("norm=t5 norm_bias=on", "T5's norm has no bias"),
    ("norm=layer_nonparam norm_bias=on", "having no parameter"),
    ("norm=rms_nonparam norm_bias=on", "norm=rms_nonparam and norm_bias=on"),
    ("norm=none norm_bias=on", "there is no norm"),
    ("norm_gain_sites=[ffn]", "would change nothing"),
    ("norm.gain_init=0 norm_gain_sites=[]", "would change nothing"),
    ("norm.gain_init=0 norm_gain_sites=[fnn]", "no norm at this site"),
    ("norm.gain_init=0 norm_gain_sites=ffn", "list of text"),
    ("norm.gain_init=0 norm_gain_sites=[final] final_norm=off", "no norm at this site"),
    ("qk_norm=rms qk_norm.gain=off qk_norm.zero_centred=on", "has no centre"),
    ("qk_norm=ngpt n_kv_heads=1", "of a head share s"),
    ("gate=headwise gate.site=output", "gate.site takes"),
    ("gate=head_shared gate.site=output", "gate.site takes"),
    ("value=gated_embedding value.channels=17", "does not have"),
    ("placement=lns init=gpt2", "scaled twice"),
    ("placement=lns init=megatron", "scaled twice"),
    ("placement=lns init=mitchell", "scaled twice"),
    ("placement=lns init=small init.branch_scale=on", "scaled twice"),
    *((f"placement={name} qk_norm={norm}", "it is not HybridNorm")
      for name in ("hybridnorm", "hybridnorm_star") for norm in ("rms", "rms_full", "layer", "l2", "q_only", "k_only")),
    ("placement=hybridnorm qk_norm=qkv qk_norm.layers=[0]", "in every block"),
    ("placement=hybridnorm_star qk_norm=qkv qk_norm.layers=[0]", "in every block"),
    *((f"attention={score} position={position}", "not a function of i - j")
      for score in ("additive", "luong_concat") for position in ROTARY),
    ("mixer=differential model.n_heads=1", "subtract in pairs"),
    ("mixer=differential n_kv_heads=1", "pairs of key heads"),
    ("mixer=gated_delta placement=subln", "normed before the output"),
    ("mixer=gated_delta mixer.expand_k=0.8", "share the keys equally"),
    ("mixer=gated_delta model.n_heads=16", "share the keys equally"),
    (f"{HYBRID} window=[4,0]", "window=[4,0] would change nothing"),
    (f"{HYBRID} nope_every=[0,2]", "nope_every=[0,2] would change nothing"),
    (f"{HYBRID} position=irope nope_every=[0,2]", "nope_every=[0,2] would change nothing"),
    (f"{HYBRID} nope_every=[1,3]", "no layer has positions"),
    (f"{HYBRID} nope_every=2 position=alibi", "no layer has positions"),
    (f"{HYBRID} value=residual", "adds the values of layer 0"),
    ("model.n_layers=4 mixer=gated_delta mixer.layers=[1] value.layers=[1,2] value=residual", "values of layer 1"),
    ("model.n_layers=4 mixer=gated_delta mixer.layers=[1,3] value=gated_embedding", "would change nothing"),
    ("model.n_layers=4 value=gated_embedding value.layers=[0,2]", "would change nothing"),
    ("ffn=moe ffn.active=9", "not so many experts"),
    ("ffn=moe bias=on", "experts have no biases"),
    ("ffn=moe conv=canon", "no neighbours in time"),
    ("conv=canon conv.ffn_in=off ffn=moe", "no neighbours in time"),
    ("ffn=moe optim=muon", "takes single ones"),
    ("ffn=xielu ffn.alpha_n=0.4", "plus a positive number"),
    ("conv=canon conv.attn_in=off conv.qkv=off conv.ffn_in=off conv.ffn_hidden=off", "no site has a convolution"),
    ("ffn=gelu ffn.layers=[]", "at least one layer"),
    ("ffn=gelu ffn.layers=[1,1]", "each once"),
    ("ffn=gelu ffn.layers=[2]", "there is no layer 2"),
    ("ffn=gelu ffn.layers=[0,1]", "lists every layer"),
    ("ffn=swiglu ffn.layers=[0]", "the other layers have ffn=swiglu too"),
    ("gate.layers=[0]", "the other layers have gate=none too"),
    ("param=completep placement=post", "derived for pre-norm blocks"),
    ("param=completep init=gpt2", "divided by the depth already"),
    *((f"{option} param=mup", "no muP rule is published")
      for option in ("mixer=differential", "ffn=moe", "placement=hyper", "placement=mhc", "placement=attnres",
                     "placement=ngpt", "qk_norm=ngpt", "ffn=ngpt", "head=scaled")),
    *((f"param={param} {other}", f"param={param}") for param in ("mup", "completep") for other in NO_RULE),
]  # fmt: skip


def accepted(make, overrides):
    try:
        return bool(make(*overrides))
    except ConfigError:
        return False


@pytest.mark.parametrize(("overrides", "reason"), CONTRADICTIONS)
def test_a_contradiction_is_refused_in_three_lines_with_its_reason_and_a_fix_that_works(tiny, overrides, reason):
    with pytest.raises(ConfigError) as refused:
        tiny(*overrides.split())
    problem, got, fix = refused.value.problem, refused.value.got, refused.value.fix.split()
    assert reason in problem and got and len(refused.value.lines()) == 3
    if all(re.fullmatch(r"[\w.]+=\S+", word) for word in fix):  # others are advice in words
        names = tuple(word.partition("=")[0] for word in fix)
        kept = [word for word in overrides.split()[:-1] if not word.startswith(names)]
        assert accepted(tiny, [*overrides.split(), *fix]) or accepted(tiny, [*kept, *fix])

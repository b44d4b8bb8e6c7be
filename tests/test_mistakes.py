"""What people type, and the three lines that answer it: the last one works."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time

import pytest
from written_runs import Writer

from nexus_ablate.cli import main
from nexus_ablate.cli.verb import all_verbs, verb_names
from nexus_ablate.config.compose import compose
from nexus_ablate.config.overrides import check_overrides
from nexus_ablate.masking import mask
from nexus_ablate.study.definition import shipped_studies


def answer(capsys, *words):
    """The problem, what was given and what to try."""
    assert main(list(words)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["error", "  got", "  try"], lines
    return [line.partition(": ")[2] for line in lines]


@pytest.mark.parametrize(
    ("command", "fix"),
    [
        (["tracker=wandb", "tracker.project=my/project"], "tracker.project=project tracker.entity=my"),
        (["tracker=wandb", "tracker.project=a:b"], "tracker.project=a-b"),
        (["sync", "runs", "--project", "my/project"], "--project project --entity my"),
        (["compare", "--wandb", "my/project#2"], "--wandb my/project-2"),
        (["compare", "--wandb", "{my}/project#2"], "--wandb {my}/project-2"),
    ],
)
def test_a_project_that_w_and_b_refuses_is_named_before_anything_is_trained(capsys, command, fix):
    assert answer(capsys, *command)[2] == fix


@pytest.mark.parametrize(
    ("command", "fix"),
    [
        ("bias=On", "bias=on"),
        ("bias=yes", "bias=on"),
        ("sink_token=1", "sink_token=on"),
        ("optim.clip=OFF", "optim.clip=off"),
        ("evalute runs/scratch --evals streaming", "nexus-ablate evaluate runs/scratch --evals streaming"),
        ("norm rms --foo", "nexus-ablate norm=rms"),
        ("explain vocab_size=100 --vocab 300", "--vocab 100"),
        ("plan norms vocab_size=255", "vocab_size=auto"),
        ("study mine vary.vocab_size=300,100 seeds=0", "vocab_size=auto"),
        ("kv_bias=key normalizer=sigmoid", "kv_bias=key_value"),
        ("param=mup init.branch_scale=off", "init=gpt2 init.branch_scale=off"),
        ("position=rope_llama3 position.low_freq_factor=8", "position.low_freq_factor=1 position.high_freq_factor=4"),
        ("position=rope_yarn position.beta_slow=32", "position.beta_fast=32 position.beta_slow=1"),
        ("position.theta=[]", "position.theta=10000"),
        ("conv=canon conv.attn_in=off conv.qkv=off conv.ffn_in=off conv.ffn_hidden=off", "conv=none"),
        ("weight_decay=0 optim.groups=[head:weight_decay:2] tie_embeddings=off", "weight_decay=0.1"),
        ("gate=bondarenko model.d_model=16 model.n_heads=32 model.head_dim=4", "fewer model.n_heads"),
    ],
)
def test_what_was_meant_is_what_is_suggested(capsys, command, fix):
    assert answer(capsys, *command.split())[2] == fix


@pytest.mark.parametrize(
    ("option", "note"),
    [
        ("placement=ngpt norm=layer", "the norm axis has no effect"),
        ("window=128", "no query of 128 tokens is that far from a key"),
        ("window=[128,0]", "no query of 128 tokens is that far from a key"),
        ("nope_every=9", "with 4 layers all have positions"),
        ("optim.cooldown=0.3", "optim.schedule=cosine has no phase of cooling, so it has no effect"),
        ("optim.schedule=constant optim.final_lr=0", "keeps the peak rate, so it has no effect"),
        ("weight_decay=0 optim.decay=all", "weight_decay=0 decays nothing, so it has no effect"),
        ("data.bpe_vocab=300", "data.tokenizer=bytes is not trained, so it has no effect"),
        ("train.precision=fp32 norm.fp32=off", "train.precision=fp32 is float32 throughout, so it has no effect"),
        (
            "normalizer=clipped normalizer.gamma=-0.1 normalizer.alpha=2",
            "normalizer.gamma is given, so it has no effect",
        ),
        ("gate=bondarenko gate.hidden=4", "gate.form=linear has no hidden layer, so it has no effect"),
        ("norm=dyt norm.alpha_attn=3 placement=hybridnorm", "hybridnorm has no norm in attention, so it has no effect"),
        ("position=rope_yarn position.factor=1", "no frequency changes, so it is position=rope"),
        ("norm=none embed_norm=on", "the norm of the embedding is the identity too, so it has no effect"),
        ("param=ngpt init=gpt2 init.std=0.1", "their first standard deviation has no effect"),
        ("bias=on qkv_bias=off attn_out_bias=off ffn_bias=on", "ffn_bias are given, so it has no effect"),
        ("probe=off probe.every=5", "probe=off, so it has no effect"),
        ("norm=layer norm=rms", "norm=layer has no effect: norm=rms comes after it"),
        ("ffn=moe ffn.active=1", "so the loss gives the router no gradient"),
        ("qk_norm=rms qk_norm.after_rotation=on position=rope_yarn", "the norm removes position.attention_factor"),
        ("qk_norm=ngpt gate=headwise gate.site=query", "the norm removes a factor for a whole head"),
    ],
)
def test_an_option_without_effect_says_so(capsys, option, note):
    assert main(["explain", *option.split()]) == 0
    assert note in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "command",
    [
        "train.attention=interval(0,1)",
        "-m train.attention=interval(0,1)",
        "hydra/launcher=5",
        "-m hydra/launcher=5",
        "-m seed=range(0,0)",
        "-m seed=range(5,0)",
        "-m seed=range(0,1e8)",
        "-m seed=range(0,inf)",
        "-m seed=range(0,nan)",
        "-m seed=range(0,3,0)",
        "-m seed=range(0,9000) model.n_layers=range(1,9000)",
        "-m norm=glob(zzz*)",
        "-m hydra.sweeper.max_batch_size=-1 seed=0,1",
        "-m hydra.sweeper.max_batch_size=0 seed=0,1",
        "-m hydra.sweep.dir=/dev/null seed=0,1",
        "-m runs_dir=/proc/runs seed=0,1",
        "-m hydra/launcher=joblib hydra.launcher.n_jobs=0 seed=0,1",
        "-m hydra.launcher.n_jobs=0 hydra/launcher=joblib seed=0,1",
        "--info=..",
        "--info ..",
        "--cfg",
        "${nope}",
        "seed=${nope}",
        "runs_dir=${nope}",
        "norm=${nope}",
        "-m seed=${nope}",
        "-m seed=0,${nope}",
        "-m seed=range(0,3),5",
        "-m hydra/launcher=nosuch seed=0,1",
        "-m hydra/sweeper=nosuch seed=0,1",
        "-m norm=${nope}",
        "-m seed=0,1 train.device=cuda:99",
        "-m seed=0,1 data=files data.files=[nope.txt]",
    ],
)
def test_a_command_line_that_cannot_be_run_is_three_lines_and_makes_nothing(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    began = time.monotonic()
    answer(capsys, *shlex.split(command.replace("${", r"\${")))
    assert time.monotonic() - began < 20
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("bench nrom", "try: nexus-ablate bench norm"),
        ("bench init", "try: one of attention, conv, ffn"),
        ("bench norm --only=rmss", "try: rms"),
        ("bench norm --against=rmss", "try: rms"),
        ("bench norm --only=", "--only needs a value"),
        ("bench norm --seconds=fast", "--seconds takes a number above 0"),
        ("bench norm --seconds=0", "--seconds takes a number above 0"),
        ("bench norm --flag", "bench has no flag of this name"),
        ("bench norm --json=/not/there/x.json", "try: mkdir -p /not/there"),
        ("bench norm model.d_model=abc", "model.d_model takes int"),
        ("bench attention --only=additive train.device=cuda:7", "try: position=alibi"),
        ("explain --vocab", "--vocab needs a value"),
        ("explain --vocab 0", "--vocab takes a whole number of tokens"),
        ("explain --vocab=x", "--vocab takes a whole number of tokens"),
        ("explain --jsno", "try: --json"),
        ("explain norm=rmss", "try: norm=rms"),
        ("doctor --fix", "doctor has no flag of this name"),
        ("doctor a b", "doctor takes one directory"),
        ("--cfg job --package foo", "the configuration has no part of this name"),
        ("--cfg job --package norn.eps", "try: norm.eps"),
        ("--html x.html compare runs", "try: nexus-ablate compare --html x.html runs"),
        ("train.steps=٣漢", "try: KEY=VALUE"),  # in quotes it would be no number either
        ("init=checkpoint init.run=runs/a/b=c,d=e/s0-1234", "try: \"init.run='runs/a/b=c,d=e/s0-1234'\""),
        ("init=checkpoint \"init.run='runs/a/b=c,d=e/s0-1234'\"", "there is none here"),
        ("data=files data.files=[~/x.txt]", f"try: data.files=[{os.path.expanduser('~')}/x.txt]"),
        (f"compare {__file__}", f"try: nexus-ablate judge {__file__}, if it is a table"),
        (f"status {__file__}", "this is a file, not a directory of runs"),
        ("doctor runs_dir=x", "doctor takes one directory"),
        ("compare --html", "--html needs a value"),
        ("compare runs --htlm x", "try: --html"),
        ("compare --details", "compare needs at least one directory"),
        ("compare nowhere", "this directory does not exist"),
        ("status nosuch", "this directory does not exist"),
        ("status --wach", "try: --watch"),
        ("norm=rmss", "try: norm=rms"),
        ("nrom=rms", "try: norm=rms"),
        ("norm.epz=1", "try: norm.eps=1"),
        ("+x=1", "try: nexus-ablate list"),
        ("d_ff_ratio=-1", "try: d_ff_ratio=auto"),
        ("model.n_heads=3", "try: model.n_heads=2"),
        ("train.steps=abc", "try: train.steps=auto"),
        ("data=files", "try: data.files=[my.txt]"),
        ("data=files data.files=[nosuch.txt]", "names a file that does not exist"),
        ("--nonsense", "try: nexus-ablate train --help"),
        ("shwo x", "try: nexus-ablate show"),
        ("norm=rms --launcher joblib", "try: nexus-ablate -m seed=0,1,2 --launcher"),
        ("norm=rms,layer --cfg job", "try: nexus-ablate -m norm=rms,layer"),
        ("-m norm=rms,layer --cfg job", "try: nexus-ablate norm=layer --cfg job"),
        ("norm=layer --resolve", "--resolve is for --cfg"),
        ("plan mine vary.nrom=layer,rms", "try: vary.norm=layer"),
        ("plan norms strata.mdoel=femto,pico", "try: strata.model=femto"),
        ("norm=layer --package norm", "--package is for --cfg"),
        ("norm=layer --cfg job --info all", "a command prints one of these"),
        ("-m norm=rms,rmss", "try: norm=rms"),
        ("-m norm=derf,rms norm.shift=x", "try: norm.shift=0"),
        ("-m norm=derf,rms norm.shfit=x", "try: norm.shift=0"),
        ("-m norm.shift=glob(*)", "glob chooses among options, not values"),
        ("-m data.path=glob(*)", "glob chooses among options, not values"),
        ("-m norm=rms,layer --partition gpu", "try: --launcher slurm --partition"),
        ("-m norm=rms,layer hydra.sweeper.params={norm:rms}", "sweepers that search are not supported"),
        ("-m norm=rms,layer hydra/sweeper=optuna", "sweepers that search are not supported"),
        ("-m norm=rms,layer hydra.sweep.dir=elsewhere", "try: runs_dir=runs"),
        ("-m norm=rms,layer hydra.verbose=true", "of Hydra's keys, a multirun takes hydra/launcher"),
        ("-m norm=rms,layer hydra/sweeper=basic", "sweepers that search are not supported"),
        ("norm=rms hydra.run.dir=elsewhere", "try: runs_dir=runs"),
        ("norm=rms hydra/launcher=joblib", "one run uses none of Hydra's keys"),
        ("explain hydra/launcher=joblib", "one run uses none of Hydra's keys"),
        ("-m norm=rms,layer hydra/launcher=slrum", "try: --launcher slurm"),
        ("-m optim.lr=interval(0,1)", "a sweep is a list of 1 to 10000 values, not an interval"),
        ("-m norm=glob(nothing*)", "a multirun has no run"),
        ("-m --hydra-help", "--hydra-help is for one configuration"),
        ("study nosuch", "try: nexus-ablate list studies"),
        ("study norms --worker 2", "try: --workers"),
        ("study norms --workers 0", "--workers takes a whole number or auto"),
        ("study norms --retry all", "try: --retry failed"),
        ("study norms --time 4h", "try: --time 240"),
        ("study norms train.steps=abc", "try: train.steps=auto"),
        ("study norms data=files data.files=[nosuch.txt]", "names a file that does not exist"),
        ("study norms train.device=cuda:99", "try: train.device=auto"),
        ("study depth train.device=cuda:99", "try: train.device=auto"),
        ("study norms --cluster kubernetes", "--cluster takes slurm"),
        ("study norms --cluster slurm", "try: nexus-ablate study norms --launcher slurm"),
        ("study norms --partition gpu", "try: --launcher slurm --partition"),
        ("study norms --launcher slurm --workers 2", "--workers is for --launcher local"),
        ("study norms --launcher slurm --time 4h", "try: --time 240"),
        ("study norms --launcher slurm --time", "--time needs a value"),
        ("study norms --launcher slurm --sbatch account", "try: --sbatch account=mine"),
        ("study norms --launcher slurm --launcher slurm", "--launcher is given twice"),
        ("study norms --launcher jobli", "try: --launcher joblib"),
        ("study norms --launcher joblib --workers 2", "--workers is for --launcher local"),
        ("study norms --launcher joblib hydra/launcher=local", "the jobs are run by one launcher"),
        ("study norms --launcher joblib hydra.launcher.n_job=2", "try: --launcher joblib, without settings"),
        ("study norms hydra.launcher.n_jobs=2", "try: --launcher joblib hydra.launcher.n_jobs=2"),
        ("study norms --workers-per-gpu 2 --workers 2", "try: leave --workers out"),
        ("study norms --workers-per-gpu 2 train.device=cpu", "there is no GPU to share"),
        ("plan norm=rms", "try: norms norm=rms"),
    ],
)
def test_a_command_that_cannot_be_meant_is_answered_by_what_can(command, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    problem, _, fix = answer(capsys, *shlex.split(command))
    assert said in f"{problem}\ntry: {fix}"
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only for root")
def test_a_multirun_in_a_read_only_folder_is_three_lines(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o555)
    assert "runs_dir cannot be written" in answer(capsys, "-m", "seed=0,1")[0]


@pytest.mark.parametrize(
    "typed",
    [
        "lr=1e-3", "steps=100", "batch_size=32", "dropout=0.1", "context=512", "heads=8", "epochs=3", "train.epochs=3",
        "norm rms", "norm = rms", "norm:rms", "--norm rms", "--steps 100", "--lr=1e-3", "norm=rmsnorm",
        "norm=LayerNorm", "placement=prenorm", "placement=post_ln", "position=rotary", "qk_norm=true", "norm=RMS",
        "explain norm layer", "weight_decay=-1", "d_ff_ratio=x", "train.steps=abc", "nrom=rms", "layernorm=on",
        "position=ALiBi", "experiment=../x", "norm.epz=1e-3", "precision=bf16", "precision=bfloat16", "window=0",
        "placement=post heads=4 norm=ln", "optim.scheduler=cosine",
    ],
)  # fmt: skip
def test_the_last_line_of_a_mistake_is_an_override_that_can_be_composed(typed, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fix = answer(capsys, *shlex.split(typed))[2]
    overrides = shlex.split(fix.removeprefix("nexus-ablate ").removeprefix("explain "))
    assert all(re.fullmatch(r"[\w.]+=\S+", override) for override in overrides), fix
    compose(overrides)


@pytest.mark.parametrize(
    ("command", "got", "fix"),
    [
        ("norm=rsm optm.lr=1e-3 bias=yes", "norm=rsm optm.lr=1e-3 yes", "norm=rms optim.lr=1e-3 bias=on"),
        ("-m norm=rsm,layer seed=0,1 ffn=gel", "norm=rsm ffn=gel", "norm=rms ffn=gelu"),
        ("norm=rsm norm.epz=1 seed=-1", "norm=rsm -1", "norm=rms seed=0"),  # the keys of which norm?
        ("preset=gtp2 norm.epz=1 seed=-1", "preset=gtp2 -1", "preset=gpt2 seed=0"),
        ("optm.lr=1e-3 nothing.like=2", "optm.lr=1e-3 nothing.like=2", "optim.lr=1e-3; nexus-ablate list"),
        ("plan norms seds=0,1 norm.epz=1", "seds=0,1 norm.epz=1", "seeds=0,1 norm.eps=1"),
        ("plan mine vary.norm=layr,rms vary.ffn=gelu,relo", "norm=layr ffn=relo", "norm=layer ffn=relu"),
    ],
)
def test_all_wrong_names_of_a_command_are_named_at_once(capsys, command, got, fix):
    assert answer(capsys, *command.split())[1:] == [got, fix]


MEANT = [
    ("lr=2e-3", "optim.lr=2e-3"),
    ("heads=8", "model.n_heads=8"),
    ("save_every=10", "train.checkpoint_every=10"),
    ("--resume", "nexus-ablate status"),
    ("placement=post_ln", "placement=post"),
    ("qk_norm=true", "qk_norm=rms"),
    ("--steps 100", "nexus-ablate train.steps=100"),
    ("study=norms", "nexus-ablate study norms"),
    ("plan nrms", "norms"),
    ("plan elsewhere", "nexus-ablate list studies"),
    ("shwo", "nexus-ablate show"),
    ("report", "nexus-ablate compare"),
    ("study first_look --nope", "nexus-ablate study --help"),
    ("list nrom", "nexus-ablate list norm"),
    ("show nope", "nexus-ablate status"),
    ("data=book.txt", "data=files data.files=[book.txt]"),
    ("dataset=./my/book.txt", "data=files data.files=[./my/book.txt]"),
    ("data=roneneldan/TinyStories", "data=hub data.path=roneneldan/TinyStories"),
    ("device=gpu", "train.device=cuda"),
    ("-m device=gpu,cpu", "train.device=cuda,cpu"),
    ("train.device=GPU", "train.device=cuda"),
    ("train.precision=bfloat16", "train.precision=bf16"),
    ("-m seed=range(0,3),5", "nexus-ablate -m seed=0,1,2"),
    ("rope=false", "position=none"),
    ("nope_every=[0,1,2,3]", "position=none"),
    ("rotary=true", "position=rope"),
    ("swiglu=true", "ffn=swiglu"),
    ("wandb=off", "tracker=files"),
    ("wandb=true", "tracker=wandb"),
    ("model=124M", "model=base"),
    ("model=gpt2", "model=base"),
    ("gpt2", "nexus-ablate preset=gpt2"),
    ("swiglu", "nexus-ablate ffn=swiglu"),
    ("data=mine.parquet", "data=files data.files=[mine.parquet]"),
    ("data.path=foo.txt", "data=files data.files=[foo.txt]"),
    ("data.path=owner/name", "data=hub data.path=owner/name"),
    ("data.files=notes.txt", "data=files data.files=[notes.txt]"),
    ("data=files data.files=notes.txt", "data.files=[notes.txt]"),
    ("seed=[0,1]", "nexus-ablate -m seed=0,1"),
    ("seed=0..4", "nexus-ablate -m seed=0,1,2,3,4"),
    ("norm=rms,layer bias=on", "nexus-ablate -m norm=rms,layer bias=on"),
    ("train.steps=20k", "train.steps=20000"),
    ("train.tokens=1.5M", "train.tokens=1500000"),
    ("-m norm=all", "nexus-ablate -m 'norm=glob(*)'"),
    ("-m norm=rms,layer norm=dyt,none", "norm=rms,layer,dyt,none"),
    ("-m norm=rms,layer seed=0,1 norm=dyt", "norm=rms,layer,dyt"),
    ("-m norm=glob(*) norm=dyt", "norm=glob(*)"),
    ("-m hydra/launcher=bsic seed=0,1", "--launcher basic"),
    ("-m hydra/launcher=nosuch seed=0,1", "--launcher local"),
]
"""What people type, and the last line of the answer."""


@pytest.mark.parametrize(("typed", "suggested"), MEANT)
def test_a_suggestion_goes_by_meaning(typed, suggested, capsys):
    assert answer(capsys, *shlex.split(typed))[2] == suggested


@pytest.mark.parametrize("suggested", sorted({suggested for _, suggested in MEANT}))
def test_a_suggestion_is_accepted_when_it_is_typed(suggested, tmp_path, monkeypatch):
    """Without training: a study is planned, a run's configuration printed, and a multirun checked."""
    monkeypatch.chdir(tmp_path)
    words = shlex.split(suggested.removeprefix("nexus-ablate "))
    if words[0] == "-m" or words[0].startswith("--launcher") or re.search("[,(]", suggested):
        check_overrides([word for word in words if "=" in word], sweeps=True)
    elif words[0] in verb_names():
        words[0] = {"study": "plan"}.get(words[0], words[0])
        needs_runs = words in (["show"], ["compare"], ["status"], ["plan", "--help"])
        assert main([*words, "--help"] if needs_runs else words) == 0
    elif words[0] in shipped_studies():
        assert main(["plan", *words]) == 0
    else:
        base = ["data=files"] if suggested.startswith("data.files") else []
        assert main([*base, *words, "--cfg", "job"]) == 0


def test_epochs_are_answered_with_their_steps_once_the_tokens_of_the_text_are_counted(
    tiny_run, text_file, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    base = [word for word in tiny_run() if not word.startswith("train.steps=")]
    tokens = int(0.9 * len(text_file.read_text()))
    command = answer(capsys, *base, "epochs=3")[2]
    assert command.startswith("nexus-ablate data=files") and command.endswith(" train.steps=1")
    rest = [word for word in base if not word.startswith("data")]
    assert main([*rest, *shlex.split(command)[1:]]) == 0
    capsys.readouterr()
    config = compose(base)
    steps = round(3 * tokens / config.resolved.tokens_per_step)
    for typed in (["epochs=3"], ["train.num_epochs=3"], ["--epochs", "3"], ["epochs=3", "norm=layer"]):
        problem, _, fix = answer(capsys, *base, *typed)
        assert fix == f"train.steps={steps}", typed
    assert "(train.batch_size x train.grad_accum x model.context)" in problem
    assert main([*base, fix, "--cfg", "job"]) == 0


HABITS = {
    "norm=rmsnorm": "norm=rms",
    "norm=LayerNorm": "norm=layer",
    "--norm rms": "nexus-ablate norm=rms",
    "norm rms": "nexus-ablate norm=rms",
    "norm": "nexus-ablate list norm",
    "explain norm": "nexus-ablate list norm",
    "explain rope": "nexus-ablate explain position=rope",
    "explain anything": "nexus-ablate explain --help",
    "rope_theta=5e5": "position.theta=5e5",
    "activation=gelu": "ffn=gelu",
    "act=gelu": "ffn=gelu",
    "attention=mqa": "n_kv_heads=1",
    "mqa": "nexus-ablate n_kv_heads=1",
    "tie=true": "tie_embeddings=true",
    "lr=1e-3": "optim.lr=1e-3",
    "--lr 1e-3": "nexus-ablate optim.lr=1e-3",
    "learning_rate=3e-4": "optim.lr=3e-4",
    "optimizer=adamw": "optim=adamw",
    "steps=100": "train.steps=100",
    "max_iters=100": "train.steps=100",
    "batch_size=32": "train.batch_size=32",
    "n_layer=6": "model.n_layers=6",
    "heads=8": "model.n_heads=8",
    "block_size=256": "model.context=256",
    "model=gpt2": "model=base",
    "data=my.txt": "data=files data.files=[my.txt]",
    "data=tiny_shakespeare": "data=files data.files=[input.txt]",
    "dataset=wikitext": "data=wikitext103",
    "--gpu": "nexus-ablate train.device=cuda",
    "--cpu": "nexus-ablate train.device=cpu",
    "device=gpu": "train.device=cuda",
    "bf16=true": "train.precision=bf16",
    "--wandb": "nexus-ablate tracker=wandb",
    "project=mine": "tracker.project=mine",
    "seeds=3": "nexus-ablate -m seed=0,1,2",
    "--seeds 3": "nexus-ablate -m seed=0,1,2",
    "seed=1,2,3": "nexus-ablate -m seed=1,2,3",
    "sweep norm=rms,layer": "nexus-ablate train -m norm=rms,layer",
    "resume last": "nexus-ablate status",
    "plan first_look seeds=3": "seeds=0,1,2",
    "run mine norm=layer": "nexus-ablate train norm=layer",
    "plan first_look --gpu": "train.device=cuda",
    "report runs/mine": "nexus-ablate compare runs/mine",
    "diff last": "nexus-ablate show last",
    "compare": "nexus-ablate study first_look",
}
"""What people type who know other tools, and what is printed behind `try:`."""


@pytest.mark.parametrize(("typed", "fix"), HABITS.items(), ids=HABITS)
def test_a_habit_is_answered_with_what_it_is_called_here(typed, fix, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text("text " * 1000)
    _, got, tried = answer(capsys, *shlex.split(typed))
    assert tried == fix
    assert typed == "compare" or typed.removeprefix("plan first_look ") in got


def test_compare_without_a_directory_names_the_command_that_lists_them(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Writer(tmp_path / "runs", "mine").arm(losses=[2.0, 2.1])
    assert answer(capsys, "compare")[2] == "nexus-ablate status"
    assert main(["status"]) == 0


def test_compare_before_anything_was_trained_names_the_study(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "runs/first_look"]) == 2
    assert "try: nexus-ablate study first_look" in capsys.readouterr().err


@pytest.mark.parametrize("typed", ["optim=sophia", "gate=squeeze"])
def test_a_word_that_resembles_nothing_is_answered_with_all_names(typed, capsys):
    assert answer(capsys, typed)[2].startswith("one of ")


@pytest.mark.parametrize("typed", ["qk_norm=true", "swiglu=true", "--norm rms", "norm:rms"])
def test_an_error_repeats_what_was_typed(typed, capsys):
    assert answer(capsys, *shlex.split(typed))[1] == typed


def test_every_path_that_a_suggestion_makes_can_be_composed():
    from nexus_ablate.config.meanings import synonyms

    for group, forms in synonyms()["paths"].items():
        for form in forms.values():
            assert getattr(compose(form.format("owner/name").split()), group)


def test_every_synonym_leads_to_a_key_or_an_option(capsys):
    from nexus_ablate.cli.list import catalogue
    from nexus_ablate.config.groups import option_names
    from nexus_ablate.config.meanings import synonyms
    from nexus_ablate.config.overrides import check_overrides
    from nexus_ablate.errors import ConfigError

    groups = catalogue()
    keys = groups.keys() | groups.pop("switches").keys()
    for group, options in groups.items():
        keys |= {f"{group}.{key}" for option in options.values() for key in option["keys"]}
    for word, meant in synonyms()["keys"].items():
        assert word not in keys, word
        if meant.startswith("nexus-ablate -m "):
            check_overrides(shlex.split(meant)[2:], sweeps=True)
        elif meant.startswith("nexus-ablate "):
            assert meant.split()[1] in verb_names()
        elif "=" in meant:
            compose([meant])
        else:
            assert meant in keys, word
    for group, words in synonyms()["options"].items():
        assert not words.keys() & option_names(group), group
        for meant in words.values():
            check_overrides(shlex.split(meant) if "=" in meant else [f"{group}={meant}"], sweeps=False)
    for key, words in synonyms()["values"].items():
        for word in words:
            with pytest.raises(ConfigError):
                check_overrides([f"{key}={word}"], sweeps=False)
        for meant in words.values():
            check_overrides([f"{key}={meant}"], sweeps=False)
    for word, meant in synonyms()["verbs"].items():
        assert word not in verb_names(), word
        assert meant.split()[0] == "pytest" or meant.split()[1] in (*verb_names(), "--help"), word


def test_a_study_file_that_is_missing_is_looked_for_beside_its_name(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("question: which?\narms: [norm=layer]\n")
    problem, got, fix = answer(capsys, "plan", "mien.yaml")
    assert str(tmp_path) in problem and "mien.yaml" in got
    assert fix == "mine.yaml"
    assert "nexus-ablate list studies" in answer(capsys, "plan", "elsewhere/mine.yaml")


def test_broken_yaml_is_named_with_its_line(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("question: which?\narms: [norm=layer\nseeds: [0]\n")
    problem, _, fix = answer(capsys, "study", "mine.yaml")
    assert "mine.yaml, line 3" in problem and "line 3" in fix


def test_show_of_a_folder_names_a_run_in_it(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Writer(tmp_path / "runs", "scratch").arm(losses=[2.0, 2.1])
    fix = answer(capsys, "show", "runs/scratch/baseline")[2]
    assert (tmp_path / fix.removeprefix("nexus-ablate show ") / "status.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["doctor", "--json"], ["list"], ["list", "--json"], ["--help"], ["explain"]])
def test_a_reader_that_leaves_early_is_no_error(arguments):
    command = [sys.executable, "-m", "nexus_ablate", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode in (0, 1)  # 1 where rich meets the closed pipe


def test_every_verb_answers_a_wrong_flag_and_shows_its_help(capsys):
    for verb in all_verbs():
        assert verb.name in answer(capsys, verb.name, "--nonsense")[0]
        assert main([verb.name, "--help"]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith(f"nexus-ablate {verb.name}") and all(flag.name in shown for flag in verb.flags)


@pytest.mark.parametrize(
    "command",
    [
        "data=files data.files=[{}]",
        "data.tokenizer={}",
        "runs_dir={}",
        "compare {}",
        "compare runs --html {}",
        "judge {}",
        "study {}",
        "import {}",
        "status {}",
    ],
)
def test_a_url_is_refused_as_a_path_and_its_password_is_not_repeated(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    problem, got, _ = answer(capsys, *shlex.split(command.format("s3://user:hunter22@bucket/x.txt")))
    assert "a URL is not a path" in problem and "s3://<secret>@bucket" in got
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("url", ["https://user:hunter22@host/x", "https:/user:hunter22@host/x"])
def test_a_password_in_a_url_is_masked_also_where_it_was_taken_for_a_path(url):
    assert "hunter22" not in mask(f"cannot read {url}") and "host/x" in mask(url)

"""What people type, and the three lines that answer it: the last one works."""

from __future__ import annotations

import os
import re
import shlex
import time

import pytest
from written_runs import Writer

from nexus_ablate.cli import main
from nexus_ablate.cli.verb import all_verbs
from nexus_ablate.config.compose import compose
from nexus_ablate.config.grammar import show
from nexus_ablate.config.groups import choices_of, default_keys
from nexus_ablate.config.options import conf_yaml
from nexus_ablate.config.overrides import NO_KEY, check_overrides
from nexus_ablate.errors import STORAGE
from nexus_ablate.study.arm_overrides import key_of
from nexus_ablate.study.study import TYPED


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
        (["sync", "runs", "--wandb", "my/project#2"], "--wandb my/project-2"),
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
        ("optim.lr=1,2e-3", "optim.lr=1.2e-3"),
        ("weight_decay=0,01", "weight_decay=0.01"),
        ("bias=yes", "bias=on"),
        ("sink_token=1", "sink_token=on"),
        ("optim.clip=OFF", "optim.clip=off"),
        ("evalute runs/scratch --evals streaming", "nexus-ablate evaluate runs/scratch --evals streaming"),
        ("norm rms --foo", "nexus-ablate list norm"),
        ("plan norms vocab_size=255", "vocab_size=auto"),
        ("kv_bias=key normalizer=sigmoid", "kv_bias=key_value"),
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
        ("norm=dyt norm.alpha_attn=3 placement=rezero final_norm=on", "rezero has no norm in attention, so it has no"),
        ("norm.gain_init=0.5 placement=rezero final_norm=on", "rezero has no norm in its blocks, so it has no effect"),
        ("norm.gain_init=0.5 placement=ngpt final_norm=on", "ngpt has no norm in its blocks, so it has no effect"),
        ("qk_norm=rms qk_norm.after_rotation=on position=alibi", "alibi rotates nothing, so it has no effect"),
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
        "-m hydra/launcher=joblib hydra.launcher.n_jobs=0 seed=0,1",
        "-m hydra.launcher.n_jobs=0 hydra/launcher=joblib seed=0,1",
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
        ("bench norm=rmss", "try: nexus-ablate bench norm=rms"),
        ("bench norm --json=", "--json needs a value"),
        ("judge runs.csv --at=fast", "--at takes a number above 0"),
        ("judge runs.csv --at=0", "try: --at 3000"),
        ("bench norm --flag", "bench has no flag of this name"),
        ("bench norm --json=/not/there/x.json", "try: mkdir -p /not/there"),
        ("bench norm model.d_model=abc", "model.d_model takes int"),
        ("bench attention=additive train.device=cuda:7", "try: position=alibi"),
        ("explain --jsno", "try: --json"),
        ("doctor --fix", "doctor has no flag of this name"),
        ("doctor a b", "doctor takes one directory"),
        ("--html x.html compare runs", "try: nexus-ablate compare --html x.html runs"),
        ("--launcher slurm study norms", "try: nexus-ablate study --launcher slurm norms"),
        ("--workers 2 study norms", "the verb stands before its flags"),
        ("-v show last", "show has no flag of this name"),
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
        ("+x=1", "try: nexus-ablate list"),
        ("d_ff_ratio=-1", "try: d_ff_ratio=auto"),
        ("model.n_heads=3", "try: model.n_heads=2"),
        ("train.steps=abc", "try: train.steps=auto"),
        ("data=files", "try: data.files=[my.txt]"),
        ("data=files data.files=[nosuch.txt]", "names a file that does not exist"),
        ("--nonsense", "try: nexus-ablate train --help"),
        (
            "norm=rms --launcher slurm --workers 2 --qos high",
            "try: nexus-ablate -m norm=rms seed=0,1,2 --launcher slurm --workers 2 --sbatch qos=high",
        ),
        ("norm=rms,layer --launcher joblib", "try: nexus-ablate -m norm=rms,layer --launcher joblib"),
        ("data=files data.files=[a.txt,b.txt] --workers 2", "data.files=[a.txt,b.txt]' seed=0,1,2 --workers 2"),
        ("-m norm=rms,layer --verbose", "try: leave --verbose out"),
        ("status --watch --json", "try: leave --json out"),
        ("study norms --new a.yaml --add-seeds 3", "try: leave --add-seeds out"),
        ("study norms --new a.yaml --launcher slurm", "try: leave --launcher out"),
        ("study norms --new a.yaml --retry failed --workers 3", "try: leave --retry out"),
        ("study --new mine", "try: --new mine.yaml"),
        ("study norms --new norms.yaml", "try: --new my_study.yaml"),
        ("study --new 'my study.yaml'", "try: --new my_study.yaml"),
        ("bench norm train.compile=graphs", "try: train.compile=on"),
        ("plan mine vary.norm=rms,layr", "try: vary.norm=rms,layer"),
        ("-m norm=rms,rmss", "try: norm=rms"),
        ("-m norm=derf,rms norm.shift=x", "try: norm.shift=0"),
        ("-m norm=derf,rms norm.shfit=0", "try: norm.shift=0"),
        ("-m norm.shift=glob(*)", "glob chooses among options, not values"),
        ("-m data.path=glob(*)", "glob chooses among options, not values"),
        ("-m seed=glob(*) model=femto", "glob chooses among options, not values"),
        ("-m evals=glob(*)", "glob chooses among options, not values"),
        ("-m norm=rms,layer --partition gpu", "try: --launcher slurm --sbatch partition=gpu"),
        ("-m norm=rms,layer hydra.sweeper.params={norm:rms}", "sweepers that search are not supported"),
        ("-m norm=rms,layer hydra/sweeper=optuna", "sweepers that search are not supported"),
        ("-m norm=rms,layer hydra.sweep.dir=elsewhere", "try: runs_dir=elsewhere"),
        ("-m norm=rms,layer hydra.verbose=true", "of Hydra's keys, a multirun takes hydra/launcher"),
        ("-m norm=rms,layer hydra/sweeper=basic", "sweepers that search are not supported"),
        ("norm=rms hydra.run.dir=elsewhere", "try: runs_dir=elsewhere"),
        ("norm=rms hydra/launcher=joblib", "only -m and study use Hydra's keys"),
        ("explain hydra/launcher=joblib", "only -m and study use Hydra's keys"),
        ("plan norms hydra.launcher.n_jobs=3", "only -m and study use Hydra's keys"),
        ("bench norm=layer hydra/launcher=joblib", "only -m and study use Hydra's keys"),
        ("-m norm=rms,layer hydra/launcher=slrum", "try: --launcher slurm"),
        ("-m optim.lr=interval(0,1)", "a sweep is a list of 1 to 10000 values, not an interval"),
        ("-m norm=glob(nothing*)", "a multirun has no run"),
        ("study nosuch", "try: nexus-ablate list studies"),
        ("study norms --worker 2", "try: --workers"),
        ("study norms --workers 0", "--workers takes a whole number or auto"),
        ("study norms --retry all", "try: --retry failed"),
        ("study norms --time 4h", "try: --time 240"),
        ("study norms train.steps=abc", "try: train.steps=auto"),
        ("study norms data=files data.files=[nosuch.txt]", "names a file that does not exist"),
        ("study norms train.device=cuda:99", "try: train.device=auto"),
        ("study depth train.device=cuda:99", "try: train.device=auto"),
        ("study norms --qos=high", "try: --launcher slurm --sbatch qos=high"),
        ("study norms --launcher slurm --account", "try: --account VALUE"),
        ("study norms --launcher slurm --time 4h", "try: --time 240"),
        ("study norms --launcher slurm --time", "--time needs a value"),
        ("study norms --launcher slurm --sbatch account", "try: --sbatch account=mine"),
        ("study norms --launcher jobli", "try: --launcher joblib"),
        ("study norms --launcher joblib --workers 2", "--workers is for --launcher local"),
        ("study norms --launcher joblib hydra/launcher=local", "the jobs are run by one launcher"),
        ("study norms --launcher joblib hydra.launcher.n_job=2", "try: --launcher joblib, without settings"),
        ("study norms hydra.launcher.n_jobs=2", "try: --launcher joblib hydra.launcher.n_jobs=2"),
        ("plan norm=rms", "try: nexus-ablate plan norms norm=rms"),
    ],
)
def test_a_command_that_cannot_be_meant_is_answered_by_what_can(command, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    problem, _, fix = answer(capsys, *shlex.split(command))
    assert said in f"{problem}\ntry: {fix}"
    assert not list(tmp_path.iterdir())


def test_a_multirun_in_a_folder_that_nobody_can_write_is_three_lines(capsys):
    assert main(["-m", "runs_dir=/proc/runs", "seed=0,1"]) == STORAGE
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "error: cannot write /proc/runs" and len(lines) == 3


NO_OPTION = "has no option of this name"
NO_VERB = "this is neither a verb nor KEY=VALUE"
NO_FLAG = "train has no flag of this name"
ONE_VALUE = "a run takes one value per key"
DASHES = "an option is typed KEY=VALUE, without dashes"
VERBS = {verb.name: verb for verb in all_verbs()}
RESUMES = "nexus-ablate status  # the command of a run, typed again, resumes it"
ANSWERS = [
    ("nrom=rms", NO_KEY, "norm=rms"),
    ("norm=rsm", NO_OPTION, "norm=rms"),
    ("norm=RMS", NO_OPTION, "norm=rms"),
    ("norm=LayerNorm", NO_OPTION, "norm=layer"),
    ("optim=adm", NO_OPTION, "optim=adamw"),
    ("norm=[rms,layer]", NO_OPTION, "nexus-ablate -m norm=rms,layer"),
    ("norm.epz=1e-3", "norm=rms has no key epz", "norm.eps=1e-3"),
    ("norm.shift=0.5", "norm=rms has no key shift", "norm=derf norm.shift=0.5"),
    ("data.files=notes.txt", "data=stdlib has no key files", "data=files data.files=[notes.txt]"),
    ("data.path=owner/name", "data=stdlib has no key path", "data=hub data.path=owner/name"),
    ("norm rms", "an option is typed KEY=VALUE", "nexus-ablate list norm"),
    ("--norm rms", DASHES, "norm=rms"),
    ("--norm=rms --seed=1", DASHES, "norm=rms seed=1"),
    ("--steps 100", DASHES, "train.steps=100"),
    ("--nrom rms", DASHES, "norm=rms"),
    ("--gpu", NO_FLAG, "train.device=cuda"),
    ("shwo last", NO_VERB, "nexus-ablate show last"),
    ("explain rope", "explain takes KEY=VALUE", "position=rope"),
    ("explain norm", "an option is typed KEY=VALUE", "nexus-ablate list norm"),
    ("explain anything", "explain takes KEY=VALUE", "nexus-ablate explain --help"),
    ("list nrom", "nothing here has this name or word", "nexus-ablate list norm"),
    ("seed=-1", "seed takes int", "seed=0"),
    ("seed=99999999999", "this is too large", "seed=0"),
    ("seed=[0,1]", "seed takes int", "nexus-ablate -m seed=0,1"),
    ("seed=0,1", ONE_VALUE, "nexus-ablate -m seed=0,1"),
    ("norm=rms,layer bias=on", ONE_VALUE, "nexus-ablate -m norm=rms,layer bias=on"),
    ("weight_decay=0,1", "a decimal has a point", "weight_decay=0.1"),
    ("optim.lr=0,003", "optim.lr takes", "optim.lr=0.003"),
    ("train.steps=20k", "train.steps takes", "train.steps=20000"),
    ("qk_norm.layers=null", "qk_norm.layers takes", "qk_norm.layers=all"),
    ("value=gated_embedding value.layers=", "value.layers", "value.layers=all"),
    ("train.tokens=1.5M", "train.tokens takes", "train.tokens=1500000"),
    ("weight_decay=-1", "weight_decay takes", "weight_decay=0.1"),
    ("data=files data.files=notes.txt", "data.files takes", "data.files=[notes.txt]"),
    ("~norm", "nothing can be removed", "norm=none"),
    ("~seed", "nothing can be removed", "nexus-ablate list"),
    ("norm@placement=layer", "norm has one place", "norm=layer"),
    ("train.device=GPU", "is not a device", "train.device=cuda"),
    ("train.precision=bf16-mixed", "train.precision takes", "train.precision=bf16"),
    ("trainer.precision=bf16-mixed", NO_KEY, "train.precision=bf16"),
    ("trainer.devices=4 trainer.strategy=ddp", NO_KEY, "torchrun --nproc-per-node 4 -m nexus_ablate"),
    ("--gpus 2", DASHES, "torchrun --nproc-per-node 2 -m nexus_ablate"),
    ("--config mine.yaml", DASHES, "nexus-ablate study mine.yaml"),
    ("sweep mine.yaml", NO_VERB, "nexus-ablate study mine.yaml"),
    ("sweep norm=rms,layer", NO_VERB, "nexus-ablate -m norm=rms,layer"),
    ("--resume", NO_FLAG, RESUMES),
    ("init_from=resume", NO_KEY, RESUMES),
    ("wandb=offline", NO_KEY, "tracker=wandb_offline"),
    ("wandb=true", NO_KEY, "tracker=wandb"),
    ("wandb_log=True", NO_KEY, "tracker=wandb"),
    ("bf16=true", NO_KEY, "train.precision=bf16"),
    ("rope=false", NO_KEY, "position=none"),
    ("help explain", NO_VERB, "nexus-ablate explain --help"),
    ("hydra.run.dir=out", "of Hydra's keys", "runs_dir=out"),
    ("study=norms", "study is a verb", "nexus-ablate study norms"),
    ("import gpt2", "there is no file or directory of this name", "hf download gpt2 --local-dir gpt2"),
    ("-m seed=range(0,3),5", "a sweep is a list", "nexus-ablate -m seed=0,1,2"),
    ("-m norm=rms,layer norm=dyt,none", "norm is swept, and given twice", "norm=rms,layer,dyt,none"),
    ("seed=0,1 seed=2 bias=on", "seed is swept, and given twice", "nexus-ablate -m bias=on seed=0,1,2"),
    ("attention.layers=[]", "attention=dot has no key layers", "nexus-ablate list mixer"),
    ("placement.iterations=3", "placement=pre has no key iterations", "placement=mhc placement.iterations=3"),
    ("evals=all", "evals takes list", "nexus-ablate list evaluation"),
    ("-m norm=glob(*) norm=dyt", "norm is swept, and given twice", "norm=glob(*)"),
    ("-m hydra/launcher=bsic seed=0,1", "", "--launcher basic"),
    ("-m seed=0-4", "seed takes int", "nexus-ablate -m seed=0,1,2,3,4"),
    ("study norms --dry-run", "study has no flag of this name", "nexus-ablate plan first_look"),
    ("study norms --seeds 5", "study has no such flag", "seeds=0-4"),
    ("study norms --name mine --match=params", "study has no such flag", "name=mine match=params"),
    ("study norms --worth", "study has no such flag", "worth=on"),
    ("study norms --lr-grid auto", "study has no such flag", "lr_grid=auto"),
    ("plan norms --seeds 0-4", "plan has no such flag", "seeds=0-4"),
    ("plan norms --design grid", "plan has no such flag", "design=grid"),
    ("compare norms --latex", "compare has no flag of this name", "--md -"),
    ("sample last again", "sample takes one run", "nexus-ablate sample last"),
    ("--lr=1e-3 --seed=3", DASHES, "optim.lr=1e-3 seed=3"),
    ("--seed 0,1", DASHES, "nexus-ablate -m seed=0,1"),
]
"""What is typed, what the problem says, and the last line of the answer."""


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A working directory with the files that the tables name."""
    monkeypatch.chdir(tmp_path)
    for name in ("input.txt", "mine.txt", "notes.txt", "text.parquet", "text.jsonl"):
        (tmp_path / name).write_text("text " * 1000)
    (tmp_path / "mine.yaml").write_text("question: which?\narms: {layer: norm=layer}\n")
    (tmp_path / "runs").mkdir()
    (tmp_path / "plugin").mkdir()


def check_accepted(fix):
    """Type a suggestion, without training: a run is composed, a multirun checked, the flags of a verb are read."""
    words = shlex.split(fix, comments=True)
    if words[0] == "torchrun":
        compose(words[words.index("nexus_ablate") + 1 :])
    elif key_of(words[0]) in TYPED:
        assert main(["plan", "mine", "vary.norm=layer", "model=femto", *words]) == 0
    elif words[0].startswith("--"):  # a flag to add
        VERBS["compare" if words[0] == "--md" else "study"].parse(["norms", *words])
    elif words[:2] == ["nexus-ablate", "--plugin"]:
        assert os.path.isdir(words[2])
    elif words[:2] in (["nexus-ablate", "-m"], ["nexus-ablate", "--verbose"]):
        check_overrides(words[2:], sweeps=True)
    elif words[-1] in ("--help", "--version") or "--new" in words:
        assert main(words[1:]) == 0
    elif words[:2] == ["nexus-ablate", "study"]:
        assert main(["plan", *words[2:]]) == 0
    elif words[0] == "nexus-ablate":
        VERBS[words[1]].parse(words[2:])
    elif words[0] != "hf":
        base = ["data=files"] if words[0].startswith("data.files") else []
        is_sweep = re.search(r"[\w)],\w|\(", fix)
        check_overrides(words, sweeps=True) if is_sweep else compose([*base, *words])


@pytest.mark.parametrize(("typed", "problem", "fix"), ANSWERS)
def test_a_wrong_word_is_answered_with_one_that_is_accepted(typed, problem, fix, desk, capsys):
    said, got, tried = answer(capsys, *shlex.split(typed))
    assert problem in said
    assert tried == fix
    assert got.split()[-1] in typed
    check_accepted(tried)


FOREIGN_WORDS = conf_yaml("foreign_words")["words"]
KEPT = {  # what `*` stands for in a row, where it isn't the default value of the key
    "nexus-ablate train *": "norm=rms",
    "nexus-ablate explain *": "norm=rms",
    "nexus-ablate -m *": "norm=rms,layer",
    "nexus-ablate list *": "norm",
    "nexus-ablate * --help": "plan",
    "nexus-ablate study *": "mine.yaml",
    "nexus-ablate study *.yaml": "mine",
    "nexus-ablate judge wandb:*": "team/project",
    "nexus-ablate --plugin *": "plugin",
    "nexus-ablate -m seed=*": "0,1",
    "nexus-ablate -m norm=*": "rms,layer",
    "nexus-ablate -m position=*": "rope,alibi",
    "torchrun --nproc-per-node * -m nexus_ablate": "4",
    "data=files data.files=[*.txt]": "mine",
    "data=files data.files=[*.parquet]": "text",
    "data=files data.files=[*.jsonl]": "text",
    "data=hub data.path=*/*": "name",
    "tracker=wandb tracker.project=*": "mine",
    "tracker=wandb tracker.entity=*": "mine",
    "init=checkpoint init.run=*": "runs",
    "tracker=*": "wandb",
    "train.device=*": "cpu",
    "--workers *": "2",
    "position.theta=*": "500000.0",
}


def kept_by(meant):
    """What `*` stands for in a row with this meaning."""
    key, equals, _ = meant.partition("=*")
    if meant in KEPT or not equals:
        return KEPT.get(meant, "runs")
    default = default_keys()[key]
    return choices_of("config")[key] if default is None else show(default.default)


@pytest.mark.parametrize("row", FOREIGN_WORDS)
def test_every_foreign_word_is_answered_with_what_is_accepted(row, desk, capsys):
    meant = FOREIGN_WORDS[row]
    kept = kept_by(meant) if "*" in row else "*"
    words = shlex.split(row.replace("*", kept))
    assert answer(capsys, *words)[2] == meant.replace("*", kept).strip()
    if "init.run" not in meant and "data.path" not in meant:  # of a run, or a data set, that is not here
        check_accepted(meant.replace("*", kept))


@pytest.mark.parametrize("spelling", ["n_layer=6", "--n-layer 6", "--n_layer=6", "nLayer=6", "gpt.n_layer=6"])
def test_a_foreign_word_is_known_in_every_spelling(spelling, capsys):
    assert answer(capsys, *spelling.split())[2] == "model.n_layers=6"


def test_a_value_with_braces_is_repeated_as_it_is(capsys):
    assert answer(capsys, "nrom={a:1}")[2] == "norm={a:1}"


def test_an_interpolated_value_has_the_type_of_its_key(monkeypatch):
    monkeypatch.setenv("TASK", "3")
    assert compose(["seed=${oc.env:TASK}"]).seed == 3
    assert compose(["optim.lr=${oc.env:TASK}"]).optim.keys["lr"] == 3.0
    assert compose(["experiment=${oc.env:TASK}"]).experiment == "3"


def test_an_interpolated_value_that_a_key_does_not_take_is_named(monkeypatch, capsys):
    monkeypatch.setenv("TASK", "three")
    _, got, fix = answer(capsys, "explain", "seed=${oc.env:TASK}")
    assert (got, fix) == ("seed=${oc.env:TASK}, which is three", "seed=0")


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


def test_a_study_file_that_is_missing_is_looked_for_beside_its_name(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("question: which?\narms: {layer: norm=layer}\n")
    assert answer(capsys, "plan", "mien.yaml") == ["there is no such file", "mien.yaml", "mine.yaml"]
    assert "nexus-ablate list studies" in answer(capsys, "plan", "elsewhere/mine.yaml")


def test_broken_yaml_is_named_with_its_line(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("question: which?\narms: {layer: norm=layer\nseeds: [0]\n")
    problem, _, fix = answer(capsys, "study", "mine.yaml")
    assert "mine.yaml, line 3" in problem and "line 3" in fix


def test_show_of_a_folder_names_a_run_in_it(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Writer(tmp_path / "runs", "scratch").arm(losses=[2.0, 2.1])
    fix = answer(capsys, "show", "runs/scratch/baseline")[2]
    assert (tmp_path / fix.removeprefix("nexus-ablate show ") / "status.json").is_file()


def test_every_verb_answers_a_wrong_flag_and_shows_its_help(capsys):
    for verb in all_verbs():
        assert verb.name in answer(capsys, verb.name, "--nonsense")[0]
        assert main([verb.name, "--help"]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith(f"usage: nexus-ablate {verb.name}") and all(flag.name in shown for flag in verb.flags)


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
def test_a_url_is_no_path_and_its_password_is_not_repeated(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = answer(capsys, *shlex.split(command.format("s3://user:hunter22@bucket/x.txt")))
    assert "hunter22" not in " ".join(lines)
    assert not list(tmp_path.iterdir())

"""Command lines over every verb, its flags and the keys that it takes: what people type, and what they mistype."""

from __future__ import annotations

import contextlib
import io
import random
import re
import shlex
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from faults.mistakes import group_names, inside, key_constraints, mistakes
from nexus_ablate.cli import main
from nexus_ablate.cli.verb import OVERRIDES, Flag, Verb, all_verbs
from nexus_ablate.errors import CONFIG, escaped

LIMIT_SECONDS = 60
FLAG_VALUES = (
    *("", "0", "-1", "1", "3", "1e9", "nan", "1e400", "9" * 400, "2,3", "a,,b", "x=y", "../x", "/dev/null", "[1", "{}"),
    *(
        "None",
        "last",
        "baseline",
        "norm=layer",
        "local",
        "joblib",
        "slurm",
        "漢字",
        "\x1b[2J",
        "a b",
        "$(touch x)",
        "x" * 300,
    ),
    *(
        "report.html",
        "report.png",
        "runs",
        "runs/study",
        "table.csv",
        "norms",
        "streaming:kept:8",
        "disk",
        "lower",
        "job",
    ),
)
"""What may follow a flag; for some flags it is right."""
OVERRIDE_VALUES = (
    *(
        "",
        "0",
        "-1",
        "1",
        "2",
        "1e-3",
        "1e9",
        "nan",
        "1e400",
        "null",
        "true",
        "On",
        "auto",
        "none",
        "text",
        "1,2",
        "[1]",
    ),
    *(
        "{a:1}",
        "interval(0,1)",
        "glob(*)",
        "choice(1,2)",
        "range(3)",
        "''",
        "漢",
        "2**3",
        "3_05",
        "x" * 200,
        "s3://u:hunter22@b",
    ),
)
"""What any key may be given; for some keys it is right."""
SUBJECTS: dict[str, tuple[str, ...]] = {
    "bench": ("norm", "ffn", "init", "nrom"),
    "compare": ("runs", "runs/study", "runs/nothing", "table.csv", "", "runs/study runs/study"),
    "dashboard": ("", "norms"),
    "doctor": ("", "runs", "nothing"),
    "evaluate": ("runs/study", "last", "abc", "runs/nothing", "table.csv"),
    "explain": ("",),
    "import": ("published", "published/config.json", "runs", "nothing", ""),
    "judge": (
        "table.csv",
        "table.csv table.csv",
        "runs/study",
        "nothing.csv",
        "mine.yaml",
        "wandb:a",
        "published/config.json",
    ),
    "list": ("", "norm", "nrom", "studies", "norm ffn", "verbs"),
    "plan": ("norms", "first_look", "mine.yaml", "study", "nothing", ""),
    "sample": ("last", "runs/study", "abc", "", "nothing"),
    "show": ("last", "runs/study", "abc", "last last", "last last last", "nothing", ""),
    "status": ("", "runs", "runs/study", "study", "nothing", "table.csv"),
    "study": ("norms", "first_look", "mine.yaml", "study", "nothing", "mine vary.norm=layer,rms", ""),
    "sync": ("runs/study", "runs", "last", "nothing", ""),
    "train": ("", "-m", "-m seed=0,1"),
}
"""What may follow each verb first."""
STUDY_KEYS = (
    *("seeds=0,1", "seeds=0-7", "seeds=x", "seeds=3", "endpoints=val_bpb", "endpoints=val_loss,x", "endpoints=[[a]]"),
    *("endpoints=[{name: val_loss, delta_min: 2% compute}]", "delta_min=-1", "match=params", "match=x", "design=grid"),
    *("lr_grid=auto", "lr_grid=1e-3,3e-3", "worth=on", "worth=x", "vary.norm=layer,rms", "vary.norm=nrom"),
    *("vary.nrom=1,2", "settings.a=model=femto", "settings=1", "tuning_seeds=7", "strata.a=b", "name=a b"),
)


@dataclass(frozen=True)
class Answer:
    """What a command did: its exit status (None where it would have begun to train or measure), and what it printed."""

    status: int | None
    said: str

    @property
    def error(self) -> list[str]:
        """The three lines of the error, or fewer."""
        return self.said[self.said.rfind("error: ") :].splitlines() if "error: " in self.said else []

    @property
    def fix(self) -> str:
        return next((line.removeprefix("  try: ") for line in self.error if line.startswith("  try: ")), "")


class Begun(BaseException):
    """The command was accepted: it begins to train or to measure."""


class Stalled(BaseException):
    """The command takes too long."""


def only_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no command train, measure or ask a server: it is accepted when it begins to."""
    from nexus_ablate.bench import axis_cost
    from nexus_ablate.launch import cost, local
    from nexus_ablate.training import session

    def begin(*_: Any, **__: Any) -> None:
        raise Begun

    monkeypatch.setattr("nexus_ablate.cli.doctor.import_error", lambda modules: ("", ""))  # takes seconds
    monkeypatch.setattr(session, "train", begin)
    monkeypatch.setattr(axis_cost, "bench_axis", begin)
    monkeypatch.setattr(local.LocalPool, "run", begin)
    monkeypatch.setattr("nexus_ablate.launch.hydra.HydraLauncher.run", begin)
    monkeypatch.setattr(cost, "measured_speed", lambda config, threads: 1000.0)
    # --watch; not time.sleep itself: a library that is first imported here would keep it
    monkeypatch.setattr("nexus_ablate.cli.status.time", SimpleNamespace(sleep=begin))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)


def answer(command: list[str]) -> Answer:
    """What `nexus-ablate COMMAND` answers, in this process."""

    def stall(*_: object) -> None:
        raise Stalled

    said = io.StringIO()
    before = signal.signal(signal.SIGALRM, stall)
    signal.alarm(LIMIT_SECONDS)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            status = main(command)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    before_it, traceback, error = said.getvalue().partition("Traceback (most recent call last)")
    if f"{__name__}.{Begun.__name__}" in error:  # the command reports it, as it does every error
        return Answer(None, before_it)
    return Answer(status, before_it + traceback + error)


def command_lines(seed: int) -> Iterator[list[str]]:
    """Commands without end: a verb, its subject, up to two flags and three overrides, mostly with a mistake."""
    draw = random.Random(seed)
    wrong = mistakes(seed)
    verbs = all_verbs()
    while True:
        verb = draw.choice(verbs)
        subject = draw.choice(SUBJECTS[verb.name]).split(" ")
        words = [*([] if verb.name == "train" and draw.random() < 0.5 else [verb.name]), *filter(None, subject)]
        if OVERRIDES in verb.takes:
            words += overrides(draw, wrong, is_study=verb.name in ("study", "plan"))
        for flag in draw.sample(verb.flags, k=min(draw.choice((0, 1, 1, 2)), len(verb.flags))):
            words += flag_words(draw, flag)
        yield words


def overrides(draw: random.Random, wrong: Iterator[Any], is_study: bool) -> list[str]:
    """Up to two right overrides, and mostly a wrong one."""
    words = []
    for _ in range(draw.choice((0, 0, 1, 2))):
        group = draw.choice(sorted(group_names()))
        words.append(f"{group}={draw.choice(group_names()[group])}")
    kind = draw.random()
    if kind < 0.4:
        needs, name, _ = draw.choice(key_constraints())
        words += [*needs, f"{name}={draw.choice(OVERRIDE_VALUES)}"]
    elif kind < 0.6:
        words += next(wrong).overrides
    elif kind < 0.75:
        needs, name, constraint = draw.choice(key_constraints())
        words += [*needs, f"{name}={inside(constraint)}"]
    if is_study and draw.random() < 0.6:
        words.append(draw.choice(STUDY_KEYS))
    return words


def flag_words(draw: random.Random, flag: Flag) -> list[str]:
    """A flag as it is typed: with a value in one word or two, without one that it needs, or with one too many."""
    name = flag.short if flag.short and draw.random() < 0.3 else flag.name
    right = shlex.split(flag.typed)[1:]
    value = draw.choice(FLAG_VALUES) if draw.random() < 0.6 or not right else right[0]
    if draw.random() < 0.1:
        name = name[:-1] + draw.choice("abcx")
    if not flag.takes:
        return [name] if draw.random() < 0.9 else [f"{name}={value}"]
    return draw.choice(([name, value], [name, value], [f"{name}={value}"], [name]))


# ------------------------------------------------------------------------------------------------ what `try:` says


_PLACEHOLDER = re.compile(r"\b(?:DIR|FILE|NAME|PATH|VERB|KEY|VALUE|PROJECT|ENTITY|ARM|A,B)\b|\.\.\.")


def suggested(command: list[str], error: list[str]) -> list[str] | None:
    """The command that the `try:` of an error names; None where it is advice in words, or leaves a name to the user.

    A command stands for itself. Overrides, or a flag with its value, take the place of those in the command and of
    what was refused.
    """
    got, fix = (line.partition(": ")[2] for line in error[1:])
    fix = re.split(r", (?:[a-z]+ )|; |, --", fix)[0]
    if _PLACEHOLDER.search(fix) or fix.count("'") % 2:
        return None
    words = shlex.split(fix)
    if words[:1] == ["nexus-ablate"]:
        return words[1:]
    refused = {got, got.strip("'"), *(got.split(" ", 1) if got.startswith("--") else ())}  # `--seeds 5` is two words
    command = [word for word in command if escaped(word) not in refused and word.partition("=")[0] not in refused]
    if words and all(re.fullmatch(r"[~+]*[\w./@]+=.*", word) for word in words):
        keys = {word.partition("=")[0].lstrip("+~") for word in words}
        kept = [word for word in command if not is_replaced(word.partition("=")[0].lstrip("+~"), keys)]
        return kept + words
    if words and re.fullmatch(r"--?[a-z][a-z-]*", words[0].partition("=")[0]) and len(words) <= 2:
        return with_flag(command, words)
    return None


def is_replaced(key: str, by: set[str]) -> bool:
    """Whether an override is replaced by those of some keys: an option takes those of the one before with it."""
    return key in by or key.partition(".")[0] in by


def with_flag(command: list[str], words: list[str]) -> list[str]:
    """The command with a flag and its value, in place of the one of that name."""
    name = words[0].partition("=")[0]
    flag = next((flag for flag in verb_of(command).flags if name in (flag.name, flag.short)), None)
    kept, rest = [], list(command)
    while rest:
        word = rest.pop(0)
        if flag is None or word.partition("=")[0] not in (flag.name, flag.short):
            kept.append(word)
        elif flag.takes and "=" not in word and rest and not rest[0].startswith("--"):
            rest.pop(0)
    needs_value = flag is not None and flag.takes and len(words) == 1 and "=" not in words[0]
    return [*kept, *words, *(["1"] if needs_value else [])]


def followed(command: list[str], most: int = 8) -> list[tuple[list[str], Answer]]:
    """A command and its answer, and those of what each `try:` says, until one is accepted or is advice."""
    steps = [(command, answer(command))]
    while steps[-1][1].status == CONFIG and len(steps) <= most:
        following = suggested(steps[-1][0], steps[-1][1].error)
        if following is None:
            break
        steps.append((following, answer(following)))
    return steps


def refused_again(steps: list[tuple[list[str], Answer]]) -> list[str]:
    """The `try:` lines that led to an error which an earlier one had already answered."""
    errors = [tuple(done.error[:2]) for _, done in steps if done.status == CONFIG]
    return [steps[number][1].fix for number, error in enumerate(errors) if error in errors[number + 1 :]]


def verb_of(command: list[str]) -> Verb:
    verbs = {verb.name: verb for verb in all_verbs()}
    return verbs.get(command[0] if command else "train", verbs["train"])


def written_folder(folder: Path) -> None:
    """What the commands of `SUBJECTS` name: runs, a table, a study's file and a model's configuration."""
    from written_runs import Writer

    writer = Writer(folder / "runs", "study", steps=40)
    writer.arm(losses=[2.0, 2.02])
    writer.arm("norm=layer", losses=[1.9, 1.93])
    writer.plan(("norm=layer",), seeds=[0, 1])
    rows = [f"{arm},{seed},{2 + seed / 100}" for arm in ("baseline", "other") for seed in range(3)]
    (folder / "table.csv").write_text("\n".join(["arm,seed,val_loss", *rows, ""]))
    (folder / "mine.yaml").write_text(
        "question: is it better?\narms: {layer: norm=layer, gelu: ffn=gelu}\nseeds: [0, 1]\n"
    )
    (folder / "published").mkdir()
    config = '{"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2'
    config += ', "intermediate_size": 32, "vocab_size": 64, "architectures": ["LlamaForCausalLM"]}'
    (folder / "published" / "config.json").write_text(config)

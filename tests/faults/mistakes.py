"""Malformed command lines, generated over every group, option and key that there is: a new one is tested unasked."""

from __future__ import annotations

import functools
import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher

from nexus_ablate.config.grammar import Constraint, parse_interval
from nexus_ablate.config.options import AXES, conf_dir, option_files
from nexus_ablate.config.run_config import CLOSED_GROUPS, OPTION_GROUPS, RunConfig, keys_of


@dataclass(frozen=True)
class Mistake:
    """A command line that cannot be meant.

    Attributes:
        kind: The row of the generator.
        overrides: What is typed; the last one is wrong.
        names: What the message must name: the key as typed, and the value.
        meant: The word that was misspelt, where no other is as near; else ''.
    """

    kind: str
    overrides: tuple[str, ...]
    names: tuple[str, ...]
    meant: str = ""


@functools.cache
def group_names() -> dict[str, list[str]]:
    """The options of every group."""
    options = {group: list(option_files(group)) for group in OPTION_GROUPS}
    files = {g: sorted(path.stem for path in conf_dir().joinpath(g).glob("*.yaml")) for g in (*CLOSED_GROUPS, "preset")}
    return options | files


@functools.cache
def key_constraints() -> list[tuple[tuple[str, ...], str, Constraint]]:
    """Every key: what must be chosen for it to be there, its name, what it may hold."""
    result = [((), name, constraint) for name, constraint in keys_of(RunConfig).items()]
    for group, cls in CLOSED_GROUPS.items():
        result += [((), f"{group}.{name}", c) for name, c in keys_of(cls).items() if name != "name"]
    for group in OPTION_GROUPS:
        for name, option in option_files(group).items():
            result += [((f"{group}={name}",), f"{group}.{key}", spec.constraint) for key, spec in option.keys.items()]
    return result


def typo(word: str, draw: random.Random) -> str:
    """One edit: a letter dropped, doubled, replaced or inserted, or two neighbours swapped."""
    letters = [i for i, c in enumerate(word) if c.isalnum()]
    at = draw.choice(letters)
    other = draw.choice(string.ascii_lowercase)
    edits: list[Callable[[], str]] = [
        lambda: word[:at] + word[at + 1 :],
        lambda: word[:at] + word[at] + word[at:],
        lambda: word[:at] + other + word[at + 1 :],
        lambda: word[:at] + other + word[at:],
        lambda: word[:at] + word[at + 1 : at + 2] + word[at] + word[at + 2 :],
    ]
    return draw.choice(edits)()


def nearest(wrong: str, known: list[str]) -> list[str]:
    """The known words that are most like it."""
    ratio = {word: SequenceMatcher(None, word.lower(), wrong.lower()).ratio() for word in known}
    return [word for word in known if ratio[word] == max(ratio.values())]


def below(constraint: Constraint) -> list[str]:
    """Numbers below every interval of the constraint."""
    intervals = [interval for a in constraint.alternatives if (interval := parse_interval(a))]
    if not intervals or min(i.low for i in intervals) < -1e9:
        return []
    low = int(min(interval.low for interval in intervals))
    return [str(low - 1), str(low - 7), f"{low - 1}.5"]


def mistakes(seed: int) -> Iterator[Mistake]:
    """Mistakes without end, kind after kind."""
    draw = random.Random(seed)
    while True:
        for kind in KINDS:
            made = KINDS[kind](draw)
            if made is not None:
                yield made


def key_typo(draw: random.Random) -> Mistake | None:
    needs, name, constraint = draw.choice(key_constraints())
    head, dot, last = name.rpartition(".")
    wrong = head + dot + typo(last, draw)
    there = [n for chosen, n, _ in key_constraints() if set(chosen) <= set(needs) | DEFAULTS or n == name]
    known = [n for n in {*there, *group_names()} if not dot or n.startswith(head + dot)]
    if wrong in {n for _, n, _ in key_constraints()} or wrong in group_names():
        return None
    near = nearest(wrong, known)
    meant = name if near == [name] and len(last) > 2 else ""
    return Mistake("key typo", (*needs, f"{wrong}={inside(constraint)}"), (wrong,), meant)


def value_typo(draw: random.Random) -> Mistake | None:
    group, names = draw.choice(sorted(group_names().items()))
    name = draw.choice(names)
    wrong = typo(name, draw)
    if wrong in (*names, "") or not wrong[0].isalpha() or (group == "preset" and wrong == "none"):
        return None
    meant = name if nearest(wrong, names) == [name] and len(name) > 2 else ""
    return Mistake("value typo", (f"{group}={wrong}",), (group, wrong), meant)


def wrong_type(draw: random.Random) -> Mistake | None:
    needs, name, _ = draw.choice([key for key in key_constraints() if "text" not in key[2].text])
    value = draw.choice(("abc_xyz", "null", "{a:1}", "'1 2'"))
    return Mistake("type", (*needs, f"{name}={value}"), (name,))


def wrong_range(draw: random.Random) -> Mistake | None:
    needs, name, constraint = draw.choice([key for key in key_constraints() if below(key[2])])
    value = draw.choice(below(constraint))
    return Mistake("range", (*needs, f"{name}={value}"), (name, value))


def missing_value(draw: random.Random) -> Mistake | None:
    needs, name, _ = draw.choice([key for key in key_constraints() if key[2].text != "text"])
    return Mistake("missing", (*needs, draw.choice((f"{name}=", f"{name}"))), (name,))


def added_key(draw: random.Random) -> Mistake | None:
    word = "".join(draw.choices(string.ascii_lowercase, k=9))
    prefix = draw.choice(("+", "++", "+model.", "++train.", "+norm.", "+data."))
    return Mistake("added key", (f"{prefix}{word}=1",), (word,))


def hydra_key(draw: random.Random) -> Mistake | None:
    name = draw.choice(("output_subdir", "run.dir", "sweep.dir", "sweep.subdir", "job.name", "job.chdir", "verbose"))
    return Mistake("hydra key", (f"hydra.{name}=x",), (name,))


def incompatible(draw: random.Random) -> Mistake | None:
    pairs = [
        (f"{axis}={name}", pair)
        for axis in OPTION_GROUPS
        for name, option in option_files(axis).items()
        for pair in option.refuses
        if not pair.startswith(("window=", "nope_every=")) and not {"@", " "} & {*pair}  # a condition and no override
    ]
    pairs += [("model.n_heads=3", "model.d_model=64"), ("train.steps=5", "train.tokens=500"),
              ("n_kv_heads=3", "model.n_heads=4"), ("train.tokens=5", "train.flops=500")]  # fmt: skip
    one, other = draw.choice(pairs)
    group, _, key = other.partition("=")[0].partition(".")
    owners = (
        [name for name, option in option_files(group).items() if key in option.keys] if group in AXES and key else []
    )
    return Mistake("incompatible", (*(f"{group}={owner}" for owner in owners[:1]), one, other), (one.split("=")[0],))


def unicode(draw: random.Random) -> Mistake | None:
    text = "".join(draw.choices("éß漢字🙂٣Ωж\u202e\u200b", k=draw.randint(1, 6)))
    place = draw.choice((f"norm={text}", f"{text}=1", f"train.steps={text}", f"experiment={text}", f"model={text}"))
    return Mistake("unicode", (place,), ())


def huge(draw: random.Random) -> Mistake | None:
    long = draw.choice(("x", "9", "漢")) * draw.choice((1_000, 50_000))
    nested = "[" * 200 + "]" * 200
    place = draw.choice((f"norm={long}", f"train.steps=-{long}", f"{long}=1", f"seed={'9' * 30}", "seed=2147483648",
                         "model.d_model=99999999999", "train.steps=1e400", f"train.steps={nested}"))  # fmt: skip
    return Mistake("huge", (place,), ())


def duplicate(draw: random.Random) -> Mistake | None:
    """Two values for one choice. (Of a key given twice the last counts, as everywhere in Hydra.)"""
    group, names = draw.choice([(g, n) for g, n in sorted(group_names().items()) if len(n) > 1])
    one, other = draw.sample(names, 2)
    place = draw.choice((f"{group}={one},{other}", f"{group}=[{one},{other}]", f"+{group}={one}"))
    return Mistake("duplicate", (place,), (group,))


def target(draw: random.Random) -> Mistake | None:
    word = draw.choice(("os.system", "logging.os.system", "builtins.exec"))
    place = draw.choice((f"norm._target_={word}", f"+_target_={word}", f"norm={{_target_:{word}}}",
                         f"data.files=[{{_target_:{word}}}]", f"++model._target_={word}"))  # fmt: skip
    return Mistake("_target_", (place,), ("_target_",))


KINDS: dict[str, Callable[[random.Random], Mistake | None]] = {
    "key typo": key_typo,
    "value typo": value_typo,
    "type": wrong_type,
    "range": wrong_range,
    "missing": missing_value,
    "added key": added_key,
    "hydra key": hydra_key,
    "incompatible": incompatible,
    "unicode": unicode,
    "huge": huge,
    "duplicate": duplicate,
    "_target_": target,
}

DEFAULTS = {"norm=rms", "placement=pre", "position=rope", "attention=dot", "normalizer=softmax", "qk_norm=none",
            "gate=none", "ffn=swiglu", "init=auto", "data=stdlib", "tracker=auto"}  # fmt: skip


def inside(constraint: Constraint) -> str:
    """A value that the constraint may hold."""
    for alternative in constraint.alternatives:
        interval = parse_interval(alternative)
        if interval is not None:
            return str(int(max(interval.low, 0)) + 1) if interval.kind == "int" else "0.5"
        if alternative.startswith("list"):
            return "[1]"
    return constraint.words[0] if constraint.words else "abc"

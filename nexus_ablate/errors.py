"""The errors a user sees. Each has three lines: the problem, what was given, what to try. Never a traceback."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from difflib import get_close_matches

from nexus_ablate.masking import mask

OK = 0
BUG = 1
CONFIG = 2
DIVERGED = 3
CHECKPOINT = 4
STORAGE = 5
ALIVE = 6
PREEMPTED = 75
INTERRUPTED = 130

AGAIN = "run the same command again"
RESTORE = "restore it from a copy, or move the run directory away"


class UserError(Exception):
    """Something the user can fix, shown in three lines.

    Args:
        problem: What is wrong, with the key or path.
        got: The value, file or state that caused it.
        fix: What to try: a command, an override or a value that works.
    """

    status = CONFIG

    def __init__(self, problem: str, got: str, fix: str) -> None:
        self.problem, self.got, self.fix = mask(problem), mask(got), mask(fix)
        super().__init__(self.problem)

    def __reduce__(self):  # the three parts survive a trip between processes
        return type(self), (self.problem, self.got, self.fix)

    def lines(self) -> list[str]:
        """The message as it is shown: three printable lines."""
        parts = (("error", self.problem), ("  got", self.got or "nothing"), ("  try", self.fix))
        return [f"{label}: {printable(text)}" for label, text in parts]

    def __str__(self) -> str:
        return "\n".join(self.lines())


class ConfigError(UserError):
    """A configuration that cannot be run."""


class Diverged(UserError):
    """The loss or a gradient became non-finite."""

    status = DIVERGED


class CheckpointError(UserError):
    """No usable checkpoint where one is needed."""

    status = CHECKPOINT


class StorageError(UserError):
    """The disk refused a write that the run depends on."""

    status = STORAGE


class AlreadyRunning(UserError):
    """The same run is alive in another process."""

    status = ALIVE


class Preempted(UserError):
    """The run was asked to stop; it is saved and can be resumed."""

    status = PREEMPTED


def require_module(module: str, by: str, command: str) -> None:
    """Check that a module that not every installation has is there, without importing it.

    Args:
        by: What needs it.
        command: What installs it.

    Raises:
        ConfigError: It isn't.
    """
    try:
        is_there = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it is part of
        is_there = False
    if not is_there:
        raise ConfigError(f"{by} needs the package {module}", "it is not installed", command)


def status_of(error: BaseException) -> int:
    """The exit status of a command that an error ends."""
    return error.status if isinstance(error, UserError) else BUG


def printable(text: str, limit: int = 400) -> str:
    """`text` on one line, secrets masked, control characters escaped, cut at `limit` characters."""
    shown = escaped(mask(text))
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."


def escaped(text: str, kept: str = "") -> str:
    """`text` with its control characters escaped, but for those in `kept`."""
    return "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in text)


def described(error: BaseException) -> str:
    """`RuntimeError: message`, its first line only, as a run's status stores it."""
    return mask(f"{type(error).__name__}: {error}".splitlines()[0])


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The nearest of `known`, in any case, or '' where none is near."""
    names = {name.lower(): name for name in known}
    near = get_close_matches(word.lower(), names, 1, 0.66)  # 0.66 lets two letters of three be swapped
    return names[near[0]] if near else ""


def unknown(problem: str, word: str, known: Iterable[str], form: str = "{}", otherwise: str = "") -> ConfigError:
    """The error for a name that does not exist, with the nearest one that does.

    Args:
        form: How the name is typed: `norm={}`.
        otherwise: What to try if no name is near. Default: the names, or what they begin with if there are many.
    """
    known = sorted(known)
    typed = repr(word) if form == "{}" else form.replace("{}", word, 1)
    near = word if word in known else did_you_mean(word, known)
    if near:
        return ConfigError(problem, typed, form.replace("{}", near, 1))  # a value may contain braces
    if len(known) > 30:
        known = sorted({name.split(".")[0] for name in known})
    return ConfigError(problem, typed, otherwise or f"one of {', '.join(known)}")

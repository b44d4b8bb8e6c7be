"""Replace secrets by <secret> in everything that leaves the process: output, logs, records, reports and uploads."""

from __future__ import annotations

import contextlib
import html
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import quote

HIDDEN = "<secret>"
SHORTEST = 8
"""Fewest characters of a secret in the environment: masking shorter values would blank out ordinary words."""

_STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_Any = TypeVar("_Any")
_NAMES = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "CREDENTIALS", "_PWD", "_PAT")
# Not every *_token: sink_token is an option.
_KEY = (
    r"(?:\w+_)?(?:api_?key|access_key|secret|password|passwd|pwd|passphrase|credentials?)"
    r"|(?:\w*(?:hf|api|auth|access|github|gitlab|bot)_)?token"
)
_TYPED = (
    # With one slash too: a URL that was taken for a path is `https:/user:password@host`.
    (re.compile(r"(?P<key>\b[A-Za-z][A-Za-z0-9+.-]+:/{1,2})[^/\s'\"]+@"), rf"\g<key>{HIDDEN}@"),
    (re.compile(rf"(?i)(?P<key>(?<!\w)(?:{_KEY})=)[^\s'\"]+"), rf"\g<key>{HIDDEN}"),
    (re.compile(rf"(?i)(?P<key>--(?:{_KEY.replace('_', '[_-]')})\s)\s*\S+"), rf"\g<key>{HIDDEN}"),
    (re.compile(r"(?i)(?P<key>\bbearer\s+)\S+"), rf"\g<key>{HIDDEN}"),
    # Keys of Hugging Face, GitHub, GitLab, OpenAI, W&B, AWS and Slack start with a known prefix.
    (re.compile(r"\b(?:hf_|gh[oprsu]_|github_pat_|glpat-|sk-|wandb_v1_|AKIA|xox[abprs]-)[A-Za-z0-9_-]{16,}"), HIDDEN),
)


def mask(value: _Any, more: Iterable[str] = ()) -> _Any:
    """The value with every secret in its strings replaced by <secret>, including strings in lists and mappings.

    Secrets are the values of environment variables whose names end as in `_NAMES`, passwords in URLs, what follows
    `api_key=`, `--token` and the like, and keys with a known prefix.

    Args:
        value: A string, or plain data with strings in it; anything else is returned unchanged.
        more: Further secrets.
    """
    held = [os.environ.get(name, "") for name in os.environ if name.upper().endswith(_NAMES)]
    words = _words(frozenset([*(text for text in held if len(text) >= SHORTEST), *filter(None, more)]))
    return _masked(value, words)


def _masked(value: Any, words: re.Pattern[str] | None) -> Any:
    if isinstance(value, str):
        text = words.sub(HIDDEN, value) if words else value
        for pattern, replacement in _TYPED:
            text = pattern.sub(replacement, text)
        return text
    if isinstance(value, Mapping):
        return {key: _masked(item, words) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_masked(item, words) for item in value)
    return value


@lru_cache(maxsize=8)
def _words(secrets: frozenset[str]) -> re.Pattern[str] | None:
    """Matches each secret and each of its lines, plain and as Python, JSON, YAML, HTML, URLs and shells escape them."""
    texts = set()
    for secret in secrets:
        lines = [line.strip() for line in secret.splitlines()]
        for text in (secret.strip(), *(line for line in lines if len(line) >= SHORTEST)):
            texts |= {text, repr(text)[1:-1], json.dumps(text)[1:-1], text.replace("'", "''"), html.escape(text)}
            texts |= {quote(text), quote(text, safe=""), shlex.quote(text)}
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True)))) if texts else None


class _Masking:
    """A text stream that masks what is written to it, line by line, since a secret may come in two parts."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._line = ""

    def write(self, text: str) -> int:
        before, end, self._line = (self._line + text).rpartition("\n")
        self._stream.write(mask(before + end))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        line, self._line = self._line, ""
        self._stream.write(mask(line))
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def masked_streams() -> Iterator[None]:
    """Mask what this process prints inside the `with`: tables, tracebacks, warnings and library logs.

    A stream that is closed, as by `2>&-`, goes nowhere.
    """
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        streams = (nowhere if stream is None else stream for stream in before)
        sys.stdout, sys.stderr = (s if isinstance(s, _Masking) else _Masking(s) for s in streams)
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):  # its reader has gone, or a library closed it
                    stream.flush()
            sys.stdout, sys.stderr = before


@contextlib.contextmanager
def masked_output(log: Path | None = None) -> Iterator[None]:
    """Mask everything that this process and its children write to descriptors 1 and 2 inside the `with`, line by line.

    A process of its own masks it, so that the last words of one that crashes are kept.

    Args:
        log: The file that the output is added to. Default: where standard error goes.
    """
    before = os.dup(1), os.dup(2)
    target = before[1] if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    reading, writing = os.pipe()
    # It ends when its input does, and not by a signal to the whole group of processes or to a job.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_STOPS})
    try:
        command = [sys.executable, "-c", "from nexus_ablate.masking import mask_input; mask_input()"]
        masking = subprocess.Popen(command, stdin=reading, stdout=target)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    sys.stdout.flush()
    os.dup2(writing, 1)
    os.dup2(writing, 2)
    for descriptor in {reading, writing, target} - {before[1]}:
        os.close(descriptor)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, descriptor in zip((1, 2), before, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a child that lives longer holds the pipe
            masking.wait(2)


def mask_input() -> None:
    """Copy standard input to standard output, masked, whenever a line has ended."""
    rest = b""
    while data := os.read(0, 2**16):
        lines = (rest + data).splitlines(keepends=True)
        rest = b"" if lines[-1].endswith((b"\n", b"\r")) else lines.pop()
        _put(b"".join(lines))
    _put(rest)


def _put(text: bytes) -> None:
    masked = mask(text.decode("utf-8", "surrogateescape"))
    sys.stdout.buffer.write(masked.encode("utf-8", "surrogateescape"))
    sys.stdout.flush()

"""`nexus-ablate completion bash|zsh`: a script that makes the shell complete verbs, flags, keys, studies and runs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nexus_ablate import errors
from nexus_ablate.cli.verb import HELP_FLAG, OVERRIDES, Verb, all_verbs, one_of

LINE = "NEXUS_ABLATE_COMPLETE"
"""The variable in which the shell's script passes the command line up to the cursor."""

BASH = f"""_nexus_ablate() {{
    local line="${{COMP_LINE:0:COMP_POINT}}" word typed="" candidate
    word="${{line##* }}"
    case "$word" in *[=:]*) typed="${{word%"${{word##*[=:]}}"}}";; esac  # readline keeps what precedes = and :
    COMPREPLY=()
    while IFS= read -r candidate; do
        COMPREPLY+=("${{candidate#"$typed"}}")
    done < <({LINE}="$line" nexus-ablate completion words 2>/dev/null)
}}
complete -o default -o nospace -F _nexus_ablate nexus-ablate
"""
ZSH = f"""#compdef nexus-ablate
_nexus_ablate() {{
    local -a words_found
    words_found=("${{(@f)$({LINE}="$LBUFFER" nexus-ablate completion words 2>/dev/null)}}")
    compadd -Q -S '' -- $words_found
}}
compdef _nexus_ablate nexus-ablate
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH}

VERB = Verb(
    "completion",
    "a script that completes verbs, flags, keys, studies and runs",
    "bash|zsh",
    (("completion bash >> ~/.bashrc", ""), ("completion zsh >> ~/.zshrc", "")),
    needed="a shell",
)


def run(words: list[str], flags: dict[str, Any]) -> int:
    """Print the script of a shell, or the completions of the line that the script passes."""
    if words == ["words"]:
        for candidate in candidates(os.environ.get(LINE, "")):
            print(candidate)
    else:
        print(SCRIPTS[one_of("completion", *SCRIPTS)(words[0])], end="")
    return errors.OK


def candidates(line: str) -> list[str]:
    """The words that complete the last word of a command line, sorted; none after any error."""
    words = line.split(" ")[1:]
    *before, word = words or [""]
    try:
        return sorted({text for text in _possible([text for text in before if text], word) if text.startswith(word)})
    except (errors.UserError, OSError, ValueError):
        return []


def _possible(before: list[str], word: str) -> Iterable[str]:
    verbs = {verb.name: verb for verb in all_verbs()}
    verb = verbs.get(before[0] if before else "", verbs["train"])
    if word.startswith("-"):
        yield from (flag.name for flag in (*verb.flags, HELP_FLAG))
        return
    if not before:
        yield from verbs
    kinds = verb.takes
    position = len([text for text in before[1:] if not text.startswith("-")])
    if OVERRIDES in kinds and ("STUDY" not in kinds or position):
        yield from _overrides(before, word)
    if "STUDY" in kinds and not position:
        yield from _studies()
    if "GROUP" in kinds:
        from nexus_ablate.cli.list import catalogue

        yield from catalogue()
    if "AXIS" in kinds and not position:
        from nexus_ablate.cli.bench import SUBJECTS

        yield from SUBJECTS
    if verb.name == "completion":
        yield from SCRIPTS
    if "DIR" in kinds or "RUN" in kinds or ("STUDY" in kinds and not position):
        yield from _folders(word)


def _overrides(before: list[str], word: str) -> Iterable[str]:
    """Every `KEY=` of the options chosen before it; after it, the key's named values."""
    from nexus_ablate.config.overrides import values_of_keys

    key, equals, _ = word.partition("=")
    for name, values in values_of_keys(before).items():
        if not equals:
            yield f"{name}="
        elif name == key:
            yield from (f"{name}={value}" for value in values)


def _studies() -> Iterable[str]:
    from nexus_ablate.config.options import conf_dir

    yield from (path.stem for path in conf_dir().joinpath("studies").glob("*.yaml"))
    yield from (path.parent.name for path in Path("runs").glob("*/study.yaml"))
    yield from (path.name for path in Path().glob("*.yaml"))


def _folders(word: str) -> Iterable[str]:
    """Folders below the typed path: `runs/`, then experiments, arms and runs."""
    parent = Path(os.path.expanduser(word.rpartition("/")[0] or ("/" if word.startswith("/") else ".")))
    typed = word[: word.rfind("/") + 1]
    for path in parent.iterdir():
        if path.is_dir() and not path.name.startswith(".") and path.name != "checkpoints":
            yield f"{typed}{path.name}/"

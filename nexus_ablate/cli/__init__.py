"""The command line: one verb per file, `train` when none is named. Nothing here imports torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from nexus_ablate import errors

VERBS = {
    "train": "train one run, or a Hydra multirun with -m (the verb may be left out)",
    "list": "every option with its citation",
    "show": "one run: its result and a picture",
}

HELP = f"""nexus-ablate: ablations of transformer architecture choices that end in a verdict you can trust

  nexus-ablate norm=rms placement=pre                train one run on real text
  nexus-ablate -m norm=layer,rms seed=0,1,2          every combination (any Hydra launcher)
  nexus-ablate list norm                             the options of an axis

verbs
{chr(10).join(f"  {verb:<10} {meaning}" for verb, meaning in VERBS.items())}

  nexus-ablate VERB --help   examples of a verb
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status; the console script exits with it."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in (["-h"], ["--help"], ["help"]):
        print(HELP)
        return errors.OK
    if arguments[:1] == ["--version"]:
        from nexus_ablate import __version__

        print(__version__)
        return errors.OK
    verb = arguments.pop(0) if arguments and arguments[0] in VERBS else "train"
    try:
        if arguments[:1] and "=" not in arguments[0] and not arguments[0].startswith("-"):
            _refuse_word(verb, arguments[0])
        return importlib.import_module(f"nexus_ablate.cli.{verb}").run(arguments)
    except errors.UserError as error:
        print(error, file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return 130


def _refuse_word(verb: str, word: str) -> None:
    """A word that is neither a verb nor an override is a verb misspelt."""
    if verb == "train" and not word.startswith("~"):
        raise errors.unknown("this is neither a verb nor KEY=VALUE", word, VERBS)

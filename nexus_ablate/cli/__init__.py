"""The command line: one verb per file, `train` when none is named. Nothing here imports torch.

At its top this module imports next to nothing, so that Ctrl-C finds `main` on duty from the start.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

VERBS = {
    "train": "train one run, or a Hydra multirun with -m (the verb may be left out)",
    "list": "every option with its citation",
    "explain": "what a configuration builds: equations, norms, parameters, initial values, FLOPs; trains nothing",
    "show": "one run: its result and a picture",
    "plan": "what a study would be: arms, refusals, parameters, FLOPs, memory, time; runs nothing",
    "add-seeds": "more seeds for a study that was launched; its verdicts are exploratory from then on",
    "confirm": "the claims of a study, judged on fresh seeds alone",
    "status": "every run of some directories: how far, how good, and why not",
    "compare": "is a difference real: paired seeds, intervals, a verdict in words; --html for the report",
    "noise": "seed noise, the difference it allows to be seen, the seeds a difference needs",
    "doctor": "device, packages, disk, W&B, launchers, SLURM: what is ready, how to mend what is not",
    "evaluate": "finished runs: longer and endless text, 8-bit numbers, sinks and outliers taken away",
    "bench": "what the options of an axis, a step or a sweep cost on this machine",
    "verify-resume": "the proof on this machine that an interrupted run ends as if it had not been",
    "sync": "local runs to W&B: tracked by files, offline or cut off; again as often as you like",
    "dashboard": "the W&B workspace of a project: loss by arm, gradients, outliers, sinks, axes; a section a study",
}

HELP = f"""nexus-ablate: ablations of transformer architecture choices that end in a verdict you can trust

  nexus-ablate norm=rms placement=pre                train one run on real text
  nexus-ablate -m norm=layer,rms seed=0,1,2          every combination (any Hydra launcher)
  nexus-ablate study=norms                           what is missing of a study (docs/studies.md)
  nexus-ablate list norm                             the options of an axis
  nexus-ablate explain placement=deepnorm            what this would build
  nexus-ablate --plugin DIR norm=my_norm             an option of your own (docs/adding_an_option.md)

verbs
{chr(10).join(f"  {verb:<13} {meaning}" for verb, meaning in VERBS.items())}

  nexus-ablate VERB --help   examples of a verb
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    Args:
        argv: The arguments; by default those of the process, which then is this command's and ends with the status.
    """
    if argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    from nexus_ablate import errors
    from nexus_ablate.masking import masked_streams
    from nexus_ablate.training import signals

    signals.ends_with_this_command = argv is None
    with masked_streams():
        try:
            return _run([*(sys.argv[1:] if argv is None else argv)])
        except errors.UserError as error:
            print(error, file=sys.stderr)
            return error.status
        except KeyboardInterrupt:
            return INTERRUPTED
        except BrokenPipeError:  # `nexus-ablate list | head` has what it wanted
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return errors.OK
        except OSError as error:
            from nexus_ablate.runs.files import refused

            print(refused(error), file=sys.stderr)
            return errors.STORAGE
        except Exception:
            if _interrupted:  # some libraries turn a KeyboardInterrupt into an error of their own
                return INTERRUPTED
            import traceback

            traceback.print_exc()  # here and not by Python itself, which would not mask it
            return errors.BUG


INTERRUPTED = 128 + signal.SIGINT
_interrupted = False


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Ctrl-C: a KeyboardInterrupt; in the middle of an import, which could swallow it or abort, the end at once."""
    global _interrupted
    _interrupted = True
    while frame is not None:
        if "importlib._bootstrap" in frame.f_code.co_filename:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        frame = frame.f_back
    raise KeyboardInterrupt


def _run(arguments: list[str]) -> int:
    from nexus_ablate import errors

    arguments = _without_plugins(arguments)
    if arguments[:1] in (["-h"], ["--help"], ["help"]):
        print(HELP)
        return errors.OK
    if arguments[:1] == ["--version"]:
        from nexus_ablate import __version__

        print(__version__)
        return errors.OK
    if arguments[:1] and arguments[0] in VERBS:
        verb = arguments.pop(0)
    else:  # a multirun may name the folder of its runs, which makes it no study
        named = any(a.startswith("study=") for a in arguments) and not {"-m", "--multirun"} & set(arguments)
        verb = "study" if named else "train"
    if arguments[:1] and "=" not in arguments[0] and not arguments[0].startswith("-"):
        _refuse_word(verb, arguments[0])
    module = importlib.import_module(f"nexus_ablate.cli.{verb.replace('-', '_')}")
    if not hasattr(module, "VERB"):
        return module.run(arguments)
    if {"-h", "--help"} & set(arguments):
        print(module.VERB.help())
        return errors.OK
    return module.run(*module.VERB.parse(arguments))


def _without_plugins(arguments: list[str]) -> list[str]:
    """What follows the leading `--plugin DIR`, whose options are known from here on."""
    import shlex

    from nexus_ablate import errors
    from nexus_ablate.config.plugins import add_plugins

    directories = []
    while arguments and arguments[0].split("=")[0] == "--plugin":
        _, given, directory = arguments.pop(0).partition("=")
        if not given and not arguments:
            raise errors.ConfigError("--plugin needs a directory", "--plugin", "nexus-ablate --plugin DIR norm=my_norm")
        directories.append(directory if given else arguments.pop(0))
    if any(argument.split("=")[0] == "--plugin" for argument in arguments):
        got, fix = shlex.join(["nexus-ablate", *arguments]), "nexus-ablate --plugin DIR VERB ..."
        raise errors.ConfigError("--plugin comes before everything else", got, fix)
    add_plugins(directories)
    return arguments


def _refuse_word(verb: str, word: str) -> None:
    """A word that is neither a verb nor an override is a verb misspelt."""
    from nexus_ablate import errors

    if verb == "train" and not word.startswith("~"):
        raise errors.unknown("this is neither a verb nor KEY=VALUE", word, VERBS)

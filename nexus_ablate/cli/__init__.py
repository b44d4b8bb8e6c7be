"""The command line: one verb per file; without one, overrides are for `train`. Nothing here imports torch.

This module imports almost nothing at its top, so that `main` handles Ctrl-C from the start.
"""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType

HEAD = """nexus-ablate: ablate transformer architecture choices, with verdicts to trust

  nexus-ablate train                          the default run, on real text
  nexus-ablate norm=rms placement=pre         one run with these options
  nexus-ablate -m norm=layer,rms seed=0,1,2   every combination (Hydra)
  nexus-ablate study norms                    a study, or what is left of it
  nexus-ablate list norm                      the options of an axis
  nexus-ablate explain placement=deepnorm     what a configuration builds
  nexus-ablate --plugin DIR norm=my_norm      an option of your own
"""


def help_text() -> str:
    """The text of `nexus-ablate --help`."""
    from itertools import groupby

    from nexus_ablate.cli.verb import all_verbs

    lines = [HEAD.rstrip()]
    for kind, verbs in groupby(all_verbs(), lambda verb: verb.kind):
        lines += ["", kind]
        lines += [f"  {verb.name:<13} {verb.summary}" for verb in verbs]
    lines += ["", "  nexus-ablate VERB --help   examples of a verb", f"  {docs()}   what help calls docs/", ""]
    return "\n".join(lines)


def docs() -> str:
    """The folder of the pages that help names: inside the package in a wheel, next to it in a checkout."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    shipped = os.path.join(package, "docs")
    return shipped if os.path.isdir(shipped) else os.path.join(os.path.dirname(package), "docs")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    Args:
        argv: The arguments. Default: those of the process, which then ends with the status.
    """
    if argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    from nexus_ablate.masking import masked_streams
    from nexus_ablate.training import signals

    signals.ends_with_this_command = argv is None
    for stream in (sys.stdout, sys.stderr):
        if argv is None and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal of another encoding lacks some of our characters
    with masked_streams():
        status = _status([*(sys.argv[1:] if argv is None else argv)])
        if argv is None:
            gc.freeze()  # else the collection at exit goes through all that torch has imported
            _end_beside_wandb(status)
        return status


def _end_beside_wandb(status: int) -> None:
    """End the process at once where W&B still owes an answer: Python would abort in that thread's compiled code."""
    if any(thread.name == "wandb-mirror" for thread in threading.enumerate()):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def _status(arguments: list[str]) -> int:
    """Run the command; the exit status of what it raised."""
    from nexus_ablate import errors

    try:
        status = _run(arguments)
        sys.stdout.flush()  # here, where a closed pipe is not an error
        return status
    except errors.UserError as error:
        print(error, file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return errors.INTERRUPTED
    except BrokenPipeError:  # `nexus-ablate list | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return errors.OK
    except OSError as error:
        from nexus_ablate.runs.files import refused

        print(refused(error), file=sys.stderr)
        return errors.STORAGE
    except BaseException as error:  # a plugin may end Python itself
        if _interrupted:  # some libraries turn a KeyboardInterrupt into another error
            return errors.INTERRUPTED
        from nexus_ablate.training.memory import out_of_memory

        if out_of_memory(error):
            problem = "this configuration needs more memory than this machine has"
            print(errors.ConfigError(problem, errors.described(error), "vocab_size=auto model=nano"), file=sys.stderr)
            return errors.CONFIG
        import traceback

        traceback.print_exc()  # Python itself would print it unmasked
        return errors.BUG


_interrupted = False


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt on Ctrl-C. During an import, which could swallow it or crash, end the process at once."""
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
    from nexus_ablate.cli.verb import verb_module, verb_names

    arguments = _without_plugins(arguments)
    if arguments in ([], ["help"]) or arguments[0] in ("-h", "--help"):
        print(help_text())
        return errors.OK
    if arguments[:1] == ["--version"]:
        from nexus_ablate import __version__

        print(__version__)
        return errors.OK
    cache = os.environ.get("NEXUS_ABLATE_CACHE", "")
    if "://" in cache:
        fix = "unset NEXUS_ABLATE_CACHE, or mount what it names"
        raise errors.ConfigError("the cache is a folder on this machine, not a URL", cache, fix)
    module = verb_module(arguments.pop(0) if arguments[0] in verb_names() else "train")
    if {"-h", "--help"} & set(arguments):
        print(module.VERB.help(), end="")
        return errors.OK
    return module.run(*module.VERB.parse(arguments))


def _without_plugins(arguments: list[str]) -> list[str]:
    """The arguments without `--plugin DIR`, whose options are added."""
    import argparse

    from nexus_ablate import errors
    from nexus_ablate.config.plugins import add_plugins

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--plugin", action="append", default=[])
    try:
        found, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError:
        found, rest = argparse.Namespace(plugin=[""]), []
    if "" in found.plugin:
        fix = "nexus-ablate --plugin DIR norm=my_norm"
        raise errors.ConfigError("--plugin needs a directory", "--plugin", fix)
    add_plugins(found.plugin)
    return rest

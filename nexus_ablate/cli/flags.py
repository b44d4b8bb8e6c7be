"""Every flag of every verb, and what its value may be. A flag belongs here once, whichever verbs take it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nexus_ablate.errors import ConfigError, unknown

Flags = dict[str, Any]
"""The values of the flags that were typed, by `Flag.key`; True for a flag without a value."""


@dataclass(frozen=True)
class Flag:
    """One flag.

    Attributes:
        takes: The name of its value in the help (`FILE`); '' for a flag without a value.
        meaning: One line of help.
        read: Converts the text to the value; raises ConfigError.
        repeated: Whether it may be given several times; its value is then a list.
        short: A short name, such as `-m`.
    """

    name: str
    takes: str
    meaning: str
    read: Callable[[str], Any] = str
    repeated: bool = False
    short: str = ""

    @property
    def key(self) -> str:
        return self.name.lstrip("-").replace("-", "_")

    @property
    def example(self) -> str:
        """The flag with a value that it takes, for errors; where any text will do, with what the help calls it."""
        try:
            self.read("")
        except ConfigError as error:
            return error.fix
        return f"{self.name} {self.takes}"

    def value(self, text: str) -> Any:
        """What a text stands for behind this flag.

        Raises:
            ConfigError: It is empty, or not what the flag takes.
        """
        if not text:
            raise ConfigError(f"{self.name} needs a value", f"{self.name}=", self.example)
        return self.read(text)


# --------------------------------------------------------------------------------------------------- values of flags


def comma_separated(text: str) -> list[str]:
    """The items of a comma-separated list, without empty ones."""
    return [item for item in text.split(",") if item]


def whole(
    flag: str, example: int, unit: str = "", also: tuple[str, ...] = (), most: int = 10**9
) -> Callable[[str], Any]:
    """A reader of whole numbers from 1, or of one of the words in `also`."""

    def read(text: str) -> Any:
        if text in also:
            return text
        if not text.isdecimal() or len(text) > 10 or not 1 <= int(text) <= most:
            kind = "a whole number" if most == 10**9 else f"a whole number from 1 to {most}"
            kind = f"{kind} {unit}".rstrip() + "".join(f" or {word}" for word in also)
            raise ConfigError(f"{flag} takes {kind}", text or "nothing", f"{flag} {example}")
        return int(text)

    return read


def positive(flag: str, example: float, most: float) -> Callable[[str], float]:
    """A reader of numbers above 0 and up to `most`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value <= most:
            raise ConfigError(f"{flag} takes a number above 0, at most {most:g}", text, f"{flag} {example:g}")
        return value

    return read


def one_of(flag: str, *words: str) -> Callable[[str], str]:
    """A reader of one of some words."""

    def read(text: str) -> str:
        if text not in words:
            problem = f"{flag} takes {' or '.join(words)}"
            raise unknown(problem, text, words, f"{flag} {{}}", otherwise=f"{flag} {words[0]}")
        return text

    return read


def target(flag: str, picture: bool = False) -> Callable[[str], Path]:
    """A reader of writable files: a picture, or any file; `-` is standard output."""

    def read(text: str) -> Path:
        from nexus_ablate.report.output_files import PICTURES, check_target

        path = Path(text or "-")
        if path != Path("-") or picture:
            check_target(flag, path, PICTURES if picture else ())
        return path

    return read


def _sbatch(text: str) -> tuple[str, str]:
    """The name and the value of an option of sbatch."""
    name, equals, value = text.removeprefix("--").partition("=")
    if not equals or not name:
        raise ConfigError("--sbatch takes NAME=VALUE", text, "--sbatch account=mine")
    return name, value


def _columns(text: str) -> dict[str, str]:
    """What a table calls each figure, `seed=rng_seed,val_loss=eval/loss`."""
    columns = {}
    for item in comma_separated(text):
        name, equals, column = item.partition("=")
        if not name or not column:
            fix = "--columns seed=rng_seed,val_loss=eval/loss"
            raise ConfigError("--columns takes NAME=COLUMN,...", name + equals, fix)
        columns[name] = column
    return columns


def _evaluations(text: str) -> list[str]:
    """Evaluations, `streaming,quantization:group:16`."""
    from nexus_ablate.config.options import evaluation_name, evaluation_of

    items = comma_separated(text)
    if not items:
        problem = "--evals takes names of evaluations"
        raise ConfigError(problem, text or "nothing", "--evals extrapolation,streaming")
    return [evaluation_name(evaluation_of(item)) for item in items]


def _project(text: str) -> str:
    """`project` or `entity/project`."""
    from nexus_ablate.config.rules import check_project

    entity, slash, project = text.rpartition("/")
    if "/" in entity or not project or (slash and not entity):
        raise ConfigError("--wandb takes PROJECT or ENTITY/PROJECT", text, "--wandb nexus-ablate")
    check_project(project, f"--wandb {entity}{slash}")
    return text


def put(path: Path, text: str) -> None:
    """Write a text to the file that a flag names, or to standard output."""
    from nexus_ablate.runs import atomic_write_text

    if path == Path("-"):
        sys.stdout.write(text)
    else:
        atomic_write_text(path, text)


# ------------------------------------------------------------------------------------------------------------ the flags

MULTIRUN = Flag("--multirun", "", "train every combination of values", short="-m")
VERBOSE = Flag("--verbose", "", "also print decay, memory, outliers and attention of a run", short="-v")

LAUNCHER = Flag("--launcher", "NAME", "what runs the jobs: local, slurm, joblib, ray ... (docs/clusters.md)")
WORKERS = Flag(
    "--workers", "N", "runs at the same time (auto: one per GPU, or per core)", whole("--workers", 2, also=("auto",))
)
TIME = Flag(
    "--time", "MINUTES", "per run (240 in a job); the next launch resumes it", whole("--time", 240, "of minutes")
)
SLURM = (
    Flag("--partition", "NAME", "SLURM partition"),
    Flag("--mem-gb", "N", "memory of a job (16)", whole("--mem-gb", 16)),
    Flag("--cpus", "N", "cores of a job (4)", whole("--cpus", 4)),
    Flag("--gres", "TEXT", "devices of a job (gpu:1; none with train.device=cpu)"),
    Flag("--parallel", "N", "most jobs at the same time (256)", whole("--parallel", 256)),
    Flag("--sbatch", "K=V", "any other option of sbatch; may be repeated", _sbatch, repeated=True),
)
BACKEND = (LAUNCHER, WORKERS, TIME, *SLURM)

ADD_SEEDS = Flag("--add-seeds", "N", "more seeds for every arm of a launched study", whole("--add-seeds", 3, most=1000))
RETRY = Flag("--retry", "failed", "run failed runs again (diverged runs have a result)", one_of("--retry", "failed"))
NEW = Flag("--new", "FILE", "write the study to a YAML file instead of running it", target("--new"))

FORCE = Flag("--force", "", "replace the files that flags name")
JSON = Flag("--json", "", "for programs")
WATCH = Flag("--watch", "", "refresh the table until the last run has ended")
FORMATS = ("html", "md", "csv", "json")
OUTPUTS = (
    Flag("--details", "", "every number, condition and run that was left out"),
    *(Flag(f"--{name}", "FILE", f"save as {name} (- prints it)", target(f"--{name}")) for name in FORMATS),
    FORCE,
)
JSON_FILE = OUTPUTS[4]
BASELINE = Flag("--baseline", "ARM", "the arm that others are compared with")
ALLOW = Flag("--allow", "NAME,...", "conditions of fairness to waive", comma_separated)
WANDB = Flag("--wandb", "PROJECT", "W&B project, or ENTITY/PROJECT", _project)
PICTURE = Flag("--out", "FILE", "where to save the picture (.png, .pdf or .svg)", target("--out", picture=True))

ARM = Flag("--arm", "COLUMN,...", "the columns that name an arm (arm)", comma_separated)
ENDPOINT = Flag("--endpoint", "NAME", "the measure to judge by (val_loss)")
BETTER = Flag("--better", "WORD", "lower or higher, of an endpoint of your own", one_of("--better", "lower", "higher"))
COLUMNS = Flag("--columns", "NAME=COLUMN,...", "what the source calls the endpoint, seed, step, ...", _columns)
AT = Flag("--at", "STEP", "the step at which a log is read (the last)", positive("--at", 3000, 1e12))
DELTA_MIN = Flag("--delta-min", "D", "the smallest difference that matters", positive("--delta-min", 0.01, 1e9))

EVALS = Flag("--evals", "NAME,...", "these evaluations (all), as NAME or NAME:KEY:VALUE", _evaluations)
PROMPT = Flag("--prompt", "TEXT", "the beginning of the text")
TOKENS = Flag("--tokens", "N", "tokens to write (200)", whole("--tokens", 200, most=100_000))
TEMPERATURE = Flag(
    "--temperature", "X", "below 1 likelier tokens, above 1 more surprising ones", positive("--temperature", 1.0, 100.0)
)
SECONDS = Flag("--seconds", "S", "approximate measuring time (10)", positive("--seconds", 10, 3600))
ONLINE = Flag("--online", "", "connect to W&B and Hugging Face, and let a one-second SLURM job look for the runs")

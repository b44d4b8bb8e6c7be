"""Every flag of every verb, and what its value may be. A flag belongs here once, whichever verbs take it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nexus_ablate.errors import ConfigError, unknown
from nexus_ablate.report.output_files import PICTURES, check_target

Flags = dict[str, Any]
"""The values of the flags that were typed, by `Flag.key`; True for a flag without a value."""


@dataclass(frozen=True)
class Flag:
    """One flag.

    Attributes:
        takes: The name of its value in the help (`FILE`); '' for a flag without a value.
        meaning: One line of help.
        read: Converts the text to the value; raises ConfigError, or ValueError with what the flag takes.
        example: A value that it takes, for errors.
        repeated: Whether it may be given several times; its value is then a list.
        short: A short name, such as `-m`.
        keys: Further names: `--qos high` is this flag with `qos=high`.
    """

    name: str
    takes: str
    meaning: str
    read: Callable[[str], Any] = str
    example: str = ""
    repeated: bool = False
    short: str = ""
    keys: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return self.name.lstrip("-").replace("-", "_")

    @property
    def typed(self) -> str:
        """The flag with a value that it takes; where any text will do, with what the help calls it."""
        return f"{self.name} {self.example or self.takes}"

    def value(self, text: str) -> Any:
        """What a text stands for behind this flag.

        Raises:
            ConfigError: It is empty, or not what the flag takes.
        """
        if not text:
            raise ConfigError(f"{self.name} needs a value", f"{self.name}=", self.typed)
        try:
            return self.read(text)
        except ValueError as error:
            raise ConfigError(f"{self.name} takes {error}", text, self.typed) from None


# --------------------------------------------------------------------------------------------------- values of flags


def comma_separated(text: str) -> list[str]:
    """The items of a comma-separated list, without empty ones."""
    return [item for item in text.split(",") if item]


def whole(text: str) -> int:
    """A whole number from 1 to a million."""
    if not text.isdecimal() or not 1 <= int(text[:8]) <= 10**6:
        raise ValueError("a whole number")
    return int(text)


def _workers(text: str) -> int | str:
    """A whole number or `auto`."""
    try:
        return text if text == "auto" else whole(text)
    except ValueError:
        raise ValueError("a whole number or auto") from None


def _seeds(text: str) -> int:
    """A whole number up to a thousand."""
    if whole(text) > 1000:
        raise ValueError("a whole number up to 1000")
    return int(text)


def positive(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ValueError("a number above 0")
    return value


def _retry(text: str) -> str:
    if text != "failed":
        raise ValueError("failed")
    return text


def _better(text: str) -> str:
    if text not in ("lower", "higher"):
        raise unknown("--better takes lower or higher", text, ("lower", "higher"), "--better {}")
    return text


def target(flag: str, endings: tuple[str, ...] = ()) -> Callable[[str], Path]:
    """A reader of writable files with one of the endings, if any are given; `-` is standard output, but no picture."""

    def read(text: str) -> Path:
        path = Path(text)
        if text != "-" or endings == PICTURES:
            check_target(flag, path, endings)
        return path

    return read


def _sbatch(text: str) -> tuple[str, str]:
    """The name and the value of an option of sbatch."""
    name, _, value = text.removeprefix("--").partition("=")
    if not name or not value:
        raise ValueError("NAME=VALUE")
    return name.replace("_", "-"), value


def _columns(text: str) -> dict[str, str]:
    """What a table calls each figure, `seed=rng_seed,val_loss=eval/loss`."""
    columns = {}
    for item in comma_separated(text):
        name, _, column = item.partition("=")
        if not name or not column:
            raise ValueError("NAME=COLUMN,...")
        columns[name] = column
    return columns


def _evaluations(text: str) -> list[str]:
    """Evaluations, `streaming,quantization:group:16`."""
    from nexus_ablate.config.evaluations import evaluation_name, evaluation_of

    names = [evaluation_name(evaluation_of(item)) for item in comma_separated(text)]
    if not names:
        raise ValueError("names of evaluations")
    return names


def _project(text: str) -> str:
    """`project` or `entity/project`."""
    from nexus_ablate.config.rules import check_project

    entity, slash, project = text.rpartition("/")
    if "/" in entity or not project or (slash and not entity):
        raise ValueError("PROJECT or ENTITY/PROJECT")
    check_project(project, f"--wandb {entity}{slash}")
    return text


def refuse_beside(flag: Flag, others: Iterable[Flag], flags: Flags) -> None:
    """Check that none of the flags is given that would have no effect beside another one.

    Raises:
        ConfigError: One is.
    """
    for other in others:
        if flag.key in flags and other.key in flags:
            problem = f"{other.name} has no effect beside {flag.name}"
            raise ConfigError(problem, f"{flag.name} {other.name}", f"leave {other.name} out")


def typed_words(flag: Flag, flags: Flags) -> list[str]:
    """A flag that says how jobs run, with its values: `--workers 2`, `--sbatch qos=high --sbatch nodes=2`."""
    if not flag.repeated:
        return [flag.name, str(flags[flag.key])] if flag.key in flags else []
    words = []
    for option in flags.get(flag.key, ()):
        words += [flag.name, "=".join(option)]
    return words


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
    "--workers", "N", "runs at the same time (auto: one per GPU, or per core; jobs of SLURM: 256)", _workers, "2"
)
TIME = Flag("--time", "MINUTES", "per run (240 in a job); the next launch resumes it", whole, "240")
SLURM = (
    Flag("--mem-gb", "N", "memory of a job (16)", whole, "16"),
    Flag("--cpus", "N", "cores of a job (4)", whole, "4"),
    Flag(
        "--sbatch",
        "K=V",
        "any option of sbatch, or setup=LINE for a job's script; repeatable. --partition, --account, --qos, "
        "--constraint, --nodes and --gres (gpu:1) are taken alone",
        _sbatch,
        "account=mine",
        repeated=True,
        keys=("--partition", "--account", "--qos", "--constraint", "--gres", "--nodes"),
    ),
)
BACKEND = (LAUNCHER, WORKERS, TIME, *SLURM)

ADD_SEEDS = Flag("--add-seeds", "N", "more seeds for every arm of a launched study", _seeds, "3")
RETRY = Flag("--retry", "failed", "run failed runs again (diverged runs have a result)", _retry, "failed")
NEW = Flag(
    "--new",
    "FILE",
    "write the study to a YAML file instead of running it (- prints it)",
    target("--new", (".yaml", ".yml")),
    "my_study.yaml",
)

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
WANDB = Flag("--wandb", "PROJECT", "W&B project, or ENTITY/PROJECT", _project, "nexus-ablate")
PICTURE = Flag("--out", "FILE", "where to save the picture (.png, .pdf or .svg)", target("--out", PICTURES))

ARM = Flag("--arm", "COLUMN,...", "the columns that name an arm (arm)", comma_separated)
ENDPOINT = Flag("--endpoint", "NAME", "the measure to judge by (val_loss)")
BETTER = Flag("--better", "WORD", "lower or higher, of an endpoint of your own", _better, "lower")
COLUMNS = Flag(
    "--columns", "NAME=COLUMN,...", "what the source calls the endpoint, seed, step, ...", _columns, "seed=rng_seed"
)
AT = Flag("--at", "STEP", "the step at which a log is read (the last)", positive, "3000")
DELTA_MIN = Flag("--delta-min", "D", "the smallest difference that matters", positive, "0.01")

EVALS = Flag(
    "--evals", "NAME,...", "these evaluations (all), as NAME or NAME:KEY:VALUE", _evaluations, "extrapolation,streaming"
)
PROMPT = Flag("--prompt", "TEXT", "the beginning of the text")
SUBMIT = Flag("--submit", "", "submit a one-second SLURM job")

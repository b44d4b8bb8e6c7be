"""`nexus-ablate study NAME ...`: run a study, or its missing runs; with more seeds, or write a study's file."""

from __future__ import annotations

import shlex
from pathlib import Path

from nexus_ablate.cli.backend import backend_of
from nexus_ablate.cli.flags import ADD_SEEDS, BACKEND, FORCE, NEW, RETRY, Flags, put, refuse_beside
from nexus_ablate.cli.verb import Verb
from nexus_ablate.errors import OK, ConfigError
from nexus_ablate.masking import mask
from nexus_ablate.study.arm_overrides import in_yaml
from nexus_ablate.study.study import KEYS, STUDY_NAME, TYPED, Study, encode

VERB = Verb(
    "study",
    "run a study, or its missing runs (docs/studies.md)",
    "STUDY [KEY=VALUE ...]",
    (
        ("study norms", "a shipped study (nexus-ablate list studies)"),
        ("study path/to/mine.yaml", "your own"),
        ("study mine vary.norm=layer,rms vary.bias=on,off seeds=0-7", ""),
        ("study mine", "resume: train only the missing runs"),
        ("study mine name=mine-2 seeds=100-119", "the same question on new seeds, judged alone"),
        ("study mine --add-seeds 3", "the next three seeds for every arm; its words are exploratory"),
        ("study norms name=norms_nano model=nano", "another baseline is another study"),
        ("study norms --launcher slurm --partition gpu", "one array of jobs; returns at once"),
        ("study --new my_study.yaml", "a file with every key explained, to change"),
        ("study norms --launcher joblib hydra.launcher.n_jobs=4", "by a Hydra launcher"),
    ),
    (ADD_SEEDS, RETRY, NEW, FORCE, *BACKEND),
    "`nexus-ablate plan STUDY` shows arms and costs and runs nothing. A study is fixed by its first launch.",
    kind="studies",
)


def run(words: list[str], flags: Flags) -> int:
    """Run the study."""
    from nexus_ablate.study.definition import read_study, shipped_studies
    from nexus_ablate.training.distributed import require_one_process

    require_one_process("a study")
    refuse_beside(NEW, (ADD_SEEDS, RETRY, *BACKEND), flags)
    if "new" in flags:
        path = flags["new"]
        if path.stem in shipped_studies() or not (path == Path("-") or STUDY_NAME.fullmatch(path.stem)):
            fix = shlex.join(["--new", str(path.with_name("my_study.yaml"))])
            raise ConfigError("the file's name is the name of a new study", str(path), fix)
        study, _ = read_study(words or ["first_look"])
        put(path, study_file(study))
        if path != Path("-"):
            name = shlex.quote(str(path))
            print(f"saved to {name}; nexus-ablate plan {name} shows its arms, nexus-ablate study {name} runs it")
        return OK
    words, backend = backend_of(words, flags)

    from nexus_ablate.launch.launch import launch

    study, launch_overrides = read_study(words)
    return launch(study, launch_overrides, backend, flags.get("add_seeds", 0), "retry" in flags)


def study_file(study: Study) -> str:
    """A study as a YAML file: each key with what it takes, and those that it leaves out as comments."""
    values = mask(encode(study))
    lines = ["# A study: nexus-ablate study FILE trains what is missing of it. docs/studies.md explains the keys."]
    for key in TYPED:
        takes, example, _ = KEYS[key]
        if key in values and key != "name":
            lines += [f"# {key}: {takes}", f"{key}: {in_yaml(values[key])}"]
        elif key != "name":
            lines.append(f"# {key}: {example}  # {takes}")
    return "\n".join([*lines, ""])

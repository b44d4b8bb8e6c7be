"""`nexus-ablate study NAME ...`: run a study, or its missing runs; with more seeds, or write a study's file."""

from __future__ import annotations

import shlex
from pathlib import Path

from nexus_ablate.cli.backend import backend_of
from nexus_ablate.cli.flags import ADD_SEEDS, BACKEND, FORCE, NEW, RETRY, Flags
from nexus_ablate.cli.verb import Verb
from nexus_ablate.errors import OK

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
        ("study norms name=norms_mini model=mini", "another baseline is another study"),
        ("study norms --launcher slurm --partition gpu", "one array of jobs; returns at once"),
        ("study norms --launcher joblib hydra.launcher.n_jobs=4", "by a Hydra launcher"),
    ),
    (ADD_SEEDS, RETRY, NEW, FORCE, *BACKEND),
    "`nexus-ablate plan STUDY` shows arms and costs and runs nothing. A study is fixed by its first launch.",
    "a study",
    kind="studies",
)


def run(words: list[str], flags: Flags) -> int:
    """Run the study."""
    from nexus_ablate.training.distributed import require_one_process

    require_one_process("a study")
    if "new" in flags:
        return _write(words, flags["new"])
    words, backend = backend_of(words, flags)

    from nexus_ablate.launch.launch import launch
    from nexus_ablate.study.definition import read_study

    study, launch_overrides = read_study(words)
    return launch(study, launch_overrides, backend, flags.get("add_seeds", 0), "retry" in flags)


def _write(words: list[str], path: Path) -> int:
    """Write the study that the words describe to a file."""
    import yaml

    from nexus_ablate.masking import mask
    from nexus_ablate.study.definition import read_study
    from nexus_ablate.study.study import TYPED, encode

    study, _ = read_study(words)
    values = {key: value for key, value in mask(encode(study)).items() if key in TYPED and key != "name"}
    path.write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120), encoding="utf-8")
    print(f"saved to {path}; nexus-ablate study {shlex.quote(str(path))} runs it")
    return OK

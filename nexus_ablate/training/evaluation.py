"""A finished run evaluated from its final checkpoint; the answers go into its summary under the evaluations' names."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nexus_ablate.config.options import evaluation_name, evaluation_of
from nexus_ablate.config.resolve import from_values
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.data import TokenizedData, eval_windows, hash_tokens, prepare
from nexus_ablate.errors import CheckpointError, ConfigError
from nexus_ablate.runs import RunRecord, atomic_write_json, read_run

if TYPE_CHECKING:
    from nexus_ablate.model import GPT


def evaluate(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """Do the evaluations that the run does not have yet.

    Args:
        path: The run directory.
        names: Evaluations, as `streaming` or `streaming:kept:8`.

    Returns:
        The summary with them, by `evaluation_name`. Where one has no meaning it says so: `{"not_defined": why}`.

    Raises:
        ConfigError: The run is not finished, or its data is no longer what it was.
        CheckpointError: Its weights are gone.
    """
    from nexus_ablate.measure.evaluation import EVALUATION, NotDefined, Subject
    from nexus_ablate.training.device import choose_device, precision_context

    record = read_run(path)
    if record.state != "finished" or record.summary is None:
        raise ConfigError("only a finished run can be evaluated", f"{path}: {record.state}", "finish it first")
    wanted = {evaluation_name(option): option for option in map(evaluation_of, names)}
    missing = wanted.keys() - record.summary.keys()
    if not missing:
        return record.summary
    config, data, model = restore(record)
    device = choose_device("auto")
    subject = Subject(
        model=model.to(device),
        train=data.train,
        val=data.val["val"],
        context=config.model.context,
        eval_tokens=config.train.eval_tokens,
        period=data.period,
        precision=partial(precision_context, config.train.precision, device.type),
    )
    found: dict[str, Any] = {}
    for name in filter(missing.__contains__, wanted):
        try:
            found[name] = EVALUATION.build(wanted[name])(subject)
        except NotDefined as reason:
            found[name] = {"not_defined": str(reason)}
    summary = (read_run(path).summary or {}) | found  # read again: another process may have added its own
    atomic_write_json(path / "summary.json", summary)
    return summary


def restore(record: RunRecord) -> tuple[RunConfig, TokenizedData, GPT]:
    """Configuration, data and trained model of a run, from its config.yaml and its newest checkpoint.

    Raises:
        ConfigError: The data is no longer what the run was validated on.
        CheckpointError: There is no whole checkpoint, or its weights are not those of the model.
    """
    from nexus_ablate.model import build_model
    from nexus_ablate.training.checkpoint import load_newest

    config = from_values({key: value for key, value in (record.config or {}).items() if key != "resolved"})
    data = prepare(config.data, context=config.model.context)
    windows = eval_windows(data.val["val"], config.model.context, config.train.eval_tokens, data.period)
    if hash_tokens(windows) != (record.summary or {}).get("eval_hash"):
        fix = "restore the text that it was trained on, or train it anew"
        raise ConfigError("the validation text is not the one that this run was validated on", str(record.path), fix)
    loaded = load_newest(record.path / "checkpoints")
    if loaded is None:
        raise CheckpointError("this run has no checkpoint", str(record.path), "rerun=on trains it anew")
    model = build_model(config, data.vocab_size)
    ours, theirs = ({name: t.shape for name, t in of.items()} for of in (model.state_dict(), loaded.tensors["model"]))
    if other := sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)):
        fix = "evaluate it with the version in its env.json"
        raise CheckpointError(f"the weights in {loaded.path} are of another version", ", ".join(other[:3]), fix)
    model.load_state_dict(loaded.tensors["model"])
    return config, data, model.eval()

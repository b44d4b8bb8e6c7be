"""Evaluates a finished run from its final checkpoint and adds the results to its summary, by evaluation name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nexus_ablate.config.evaluations import evaluation_name, evaluation_of
from nexus_ablate.config.resolve import from_values
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.data import TokenizedData, eval_windows, hash_tokens, prepare
from nexus_ablate.errors import CheckpointError, ConfigError
from nexus_ablate.runs import RunRecord, atomic_write_json, read_run

if TYPE_CHECKING:
    from nexus_ablate.model import GPT


def evaluate(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """Run the evaluations that the run's summary does not have yet.

    Args:
        path: The run directory.
        names: Evaluations, as `streaming` or `streaming:kept:8`.

    Returns:
        The summary with their results by `evaluation_name`. An evaluation that isn't defined for the run has
        `{"not_defined": reason}`.

    Raises:
        ConfigError: The run is not finished, or its data has changed.
        CheckpointError: It has no whole checkpoint.
    """
    from nexus_ablate.measure.evaluation import EVALUATION, NotDefined, Subject
    from nexus_ablate.training.device import device_again, precision_context

    record = read_run(path)
    if record.state != "finished" or record.summary is None:
        fix = "nexus-ablate status" if record.state == "diverged" else "train it to the end first"
        raise ConfigError("only a finished run can be evaluated", f"{path}: {record.state}", fix)
    wanted = {evaluation_name(option): option for option in map(evaluation_of, names)}
    missing = wanted.keys() - record.summary.keys()
    if not missing:
        return record.summary
    config, data, model = restore(record)
    device = device_again(config.train.device)
    subject = Subject(
        model=model.to(device),
        data=data,
        context=config.model.context,
        eval_tokens=config.train.eval_tokens,
        precision=partial(precision_context, config.train.precision, device.type),
    )
    answers: dict[str, Any] = {}
    for name in filter(missing.__contains__, wanted):
        try:
            answers[name] = EVALUATION.build(wanted[name])(subject)
        except NotDefined as reason:
            answers[name] = {"not_defined": str(reason)}
    summary = (read_run(path).summary or {}) | answers  # read again: another process may have added results
    atomic_write_json(path / "summary.json", summary)
    return summary


def restore(record: RunRecord) -> tuple[RunConfig, TokenizedData, GPT]:
    """Configuration, data and trained model of a run, from its config.yaml and its newest checkpoint.

    Raises:
        ConfigError: The validation data has changed since the run.
        CheckpointError: There is no whole checkpoint, or its weights do not fit the model.
    """
    from nexus_ablate.model import GPT
    from nexus_ablate.training.checkpoint import load_newest
    from nexus_ablate.training.start import load_fitting

    config = from_values({key: value for key, value in (record.config or {}).items() if key != "resolved"})
    data = prepare(config.data, context=config.model.context)
    windows = eval_windows(data.val["val"], config.model.context, config.train.eval_tokens, data.period)
    if hash_tokens(windows) != (record.summary or {}).get("eval_hash"):
        fix = "restore the text that it was trained on, or retrain it with rerun=on"
        raise ConfigError("the validation text is not the one that this run was validated on", str(record.path), fix)
    loaded = load_newest(record.path / "checkpoints")
    if loaded is None:
        raise CheckpointError("this run has no checkpoint", str(record.path), "rerun=on trains it again")
    weights = loaded.tensors["model"]
    problem = f"the weights in {loaded.path} are from another version"
    fix = "evaluate it with the version in its env.json"
    model = GPT(config, data.vocab_size)  # without initial values: all of them are in the checkpoint
    try:
        load_fitting(model, weights, loaded.path)
    except ConfigError as error:
        raise CheckpointError(problem, error.got, fix) from error
    return config, data, model.eval()

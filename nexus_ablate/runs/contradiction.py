"""Whether the files of a run agree with each other and with the name of its folder."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from nexus_ablate.runs.lookup import id_of
from nexus_ablate.runs.reading import RunRecord, damaged, read_lines, read_text

_Row = TypeVar("_Row")


class _Logged(msgspec.Struct):
    """What a row of metrics.jsonl is read for here; the other measures are skipped."""

    step: int
    tokens: int
    batch_hash: str = ""
    val_loss: float | None = msgspec.field(default=None, name="val/loss")


class _EvaluatedWindow(msgspec.Struct):
    """What a row of evaluation.jsonl is read for here."""

    tokens: int
    loss: float | None


def contradiction(record: RunRecord) -> str:
    """How a run with a result contradicts itself; '' if its files agree.

    Raises:
        UserError: metrics.jsonl or evaluation.jsonl is damaged.
    """
    return next(filter(None, _contradictions(record)), "")


def end_contradiction(summary: Mapping[str, Any], last: Mapping[str, Any]) -> str:
    """How the summary of a finished run contradicts the last row of its metrics.jsonl; '' if they agree."""
    if (summary.get("batch_hash") or "") != last.get("batch_hash", ""):
        return "summary.json and metrics.jsonl end with different batches"
    for name, logged in (("steps", "step"), ("tokens", "tokens"), ("val_loss", "val/loss")):
        if name in summary and summary[name] != last.get(logged):
            return f"summary.json says {name} {summary[name]}, the last row of metrics.jsonl says {last.get(logged)}"
    loss = summary.get("val_loss")
    return f"val_loss is {loss}, and a cross-entropy is above 0" if loss is not None and loss <= 0 else ""


def _contradictions(record: RunRecord) -> Iterator[str]:
    path, env, config, summary = record.path, record.env or {}, record.config or {}, record.summary or {}
    if config.get("seed") != record.seed:
        yield f"the directory says seed {record.seed}, config.yaml says {config.get('seed')}"
    named, run_hash = id_of(path)[:8], str(env.get("run_hash"))
    if not run_hash.startswith(named):
        yield f"the directory is named {named}, env.json is of run {run_hash:.8}"
    if env.get("config_file", "") not in ("", config_file_hash(read_text(path / "config.yaml") or "")):
        yield f"config.yaml is not the configuration of run {named}"
    if not (path / "init.json").exists():
        yield "init.json is missing"
    rows = _rows(path / "metrics.jsonl", msgspec.json.Decoder(_Logged))
    for before, after in itertools.pairwise(row.step for row in rows):
        if after <= before:
            yield f"step {after} comes after step {before} in metrics.jsonl"
    if record.state != "finished":
        if record.summary is not None:
            yield f"{record.state} by status.json, but a summary.json was written at the end"
        return
    if not rows:
        yield "finished without a row in metrics.jsonl"
    last = rows[-1]
    every = (config.get("train") or {}).get("log_every")
    if every and not env.get("earlier"):  # an earlier launch may have logged at other steps
        due, logged = last.step // every + 1, sum(row.step % every == 0 for row in rows)
        if logged < due:
            yield f"metrics.jsonl has rows for {logged} of the {due} steps at which one is due"
    if summary.get("arm_hash") != env.get("arm_hash"):
        yield "summary.json and env.json are of different arms"
    yield end_contradiction(
        summary,
        {"step": last.step, "tokens": last.tokens, "val/loss": last.val_loss, "batch_hash": last.batch_hash},
    )
    steps = (config.get("resolved") or {}).get("steps")
    if steps and last.step != steps:
        yield f"finished by status.json, but metrics.jsonl ends at step {last.step} of {steps}"
    windows = _rows(path / "evaluation.jsonl", msgspec.json.Decoder(_EvaluatedWindow))
    loss = summary.get("val_loss")
    if windows and loss is not None:
        tokens = sum(window.tokens for window in windows)
        mean = math.fsum(window.tokens * (window.loss or 0.0) for window in windows) / max(tokens, 1)
        if not math.isclose(mean, loss, rel_tol=1e-5):
            yield f"summary.json says val_loss {loss}, the mean of evaluation.jsonl is {mean}"


def config_file_hash(text: str) -> str:
    """The hash of a config.yaml, which env.json keeps beside the run's own."""
    return hashlib.sha256(text.encode()).hexdigest()


def _rows(path: Path, decoder: msgspec.json.Decoder[_Row]) -> list[_Row]:
    """The rows of a log, in the form of the decoder; an empty list if there is no file."""
    rows: list[_Row] = []
    try:
        for chunk in read_lines(path):
            rows += decoder.decode_lines(chunk)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise damaged(path, str(error)) from None
    return rows

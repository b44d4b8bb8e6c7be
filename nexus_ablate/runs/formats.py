"""The files of a run as typed records, which msgspec checks when a file is read.

A key with a default may be missing, since older versions didn't write it, and keys that are not listed hold plain data.
A non-finite number is null.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from nexus_ablate.plain_data import LARGEST

Number = Annotated[float, Meta(gt=-LARGEST, lt=LARGEST)]
Positive = Annotated[float, Meta(gt=0, lt=LARGEST)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Time = Annotated[datetime, Meta(tz=True)]
Measured = Number | None
ByHead = Measured | Annotated[list[Measured], Meta(min_length=1)]
"""A number, or a number for each head."""
State = Literal["created", "running", "preempted", "finished", "diverged", "failed"]
"""Of a run, as it is written; a reader also has `lost`."""


class StatusRecord(Struct):
    """status.json.

    `exit_status` is of a failed run.
    """

    state: State
    host: str
    pid: int
    heartbeat: Time
    reason: str = ""
    traceback: str = ""
    exit_status: Count | None = None
    step: Count | None = None
    started: Time | None = None
    updated: Time | None = None


class ModelSize(Struct):
    """`model` in config.yaml."""

    d_model: Count = 0


class LearningRate(Struct):
    """`optim` in config.yaml."""

    lr: Positive | None = None


class NamedChoice(Struct):
    """A choice in config.yaml."""

    name: str = ""


class TrainingConfig(Struct):
    """`train` in config.yaml."""

    log_every: Annotated[int, Meta(ge=1)] | None = None


class ResolvedConfig(Struct):
    """`resolved` in config.yaml."""

    steps: Count | None = None
    notes: list[str] = []


class ConfigRecord(Struct):
    """config.yaml."""

    seed: Count = 0
    model: ModelSize | None = None
    optim: LearningRate | None = None
    train: TrainingConfig | None = None
    tracker: NamedChoice | None = None
    resolved: ResolvedConfig | None = None


class PluginSource(Struct):
    """A plugin in env.json."""

    sha256: str = ""


class EnvironmentRecord(Struct):
    """env.json: what a run ran in."""

    git_commit: str | None = None
    arm_hash: str | None = None
    config_hash: str | None = None
    packages: dict[str, str | None] = {}
    source: dict[str, str] | None = None
    plugins: dict[str, PluginSource] | None = None
    earlier: list[dict[str, Any]] = []


class OnsetRecord(Struct):
    """Where a capability appeared."""

    step: Count
    tokens: Count = 0


class SummaryRecord(Struct):
    """summary.json without its measures, whose names have a `/`."""

    val_loss: Measured = None
    val_bpb: Measured = None
    best_val_loss: Measured = None
    train_loss: Measured = None
    generalization_gap: Measured = None
    seconds: Number = 0.0
    seconds_eval: Number = 0.0
    seconds_probe: Number = 0.0
    seconds_checkpoint: Number = 0.0
    flops: Number = 0.0
    tokens_per_second: Number = 0.0
    flops_per_token: Number = 0.0
    peak_memory_bytes: Number = 0.0
    steps: Count = 0
    tokens: Count = 0
    params: Count = 0
    params_non_embedding: Count = 0
    train_tokens: Count = 0
    batch_hash: str | None = None
    eval_hash: str | None = None
    arm_hash: str | None = None
    unigram_bpb: Positive | None = None
    onsets: dict[str, OnsetRecord] = {}


class RowRecord(Struct):
    """A row of metrics.jsonl or probes.jsonl without its measures."""

    step: Count
    tokens: Count
    flops: Number
    seconds: Number
    batch_hash: str = ""
    nonfinite: list[str] = []


class InitialValues(Struct):
    """One parameter in init.json: the hash of the normal numbers behind its first values."""

    z: str
    shape: list[Count]


class WandbRun(Struct):
    """Where a run is on W&B. Its project is None until W&B has accepted it."""

    id: str
    project: str | None = None
    entity: str | None = None
    url: str = ""


class SubmissionRecord(Struct):
    """Jobs that were submitted to a cluster, by run."""

    jobs: dict[str, str]


class JobAnswer(Struct):
    """What a job of a cluster said when it ended."""

    reason: str = ""


INIT = dict[str, InitialValues | str]
"""init.json; an older version recorded the hash alone."""

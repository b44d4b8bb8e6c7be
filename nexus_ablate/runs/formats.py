"""The files of a run as typed records, which msgspec checks when a file is read.

A key with a default may be missing, since older versions didn't write it, and keys that are not listed hold plain data.
A non-finite number is null.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from nexus_ablate.plain_data import LARGEST

CONDITION = re.compile(r"(>=|<=) *(-?\d+(?:\.\d+)?(?:e-?\d+)?)")
"""What a study can require of its baseline."""

Number = Annotated[float, Meta(gt=-LARGEST, lt=LARGEST)]
Positive = Annotated[float, Meta(gt=0, lt=LARGEST)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Time = Annotated[datetime, Meta(tz=True)]
Measured = Number | None
ByHead = Measured | Annotated[list[Measured], Meta(min_length=1)]
"""A number, or a number for each head."""


class Status(Struct):
    """status.json."""

    state: Literal["created", "running", "preempted", "finished", "diverged", "failed"]
    host: str
    pid: int
    heartbeat: Time
    reason: str = ""
    traceback: str = ""
    step: Count | None = None
    started: Time | None = None
    updated: Time | None = None


class ModelSize(Struct):
    """`model` in config.yaml."""

    d_model: Count = 0


class Rate(Struct):
    """`optim` in config.yaml."""

    lr: Positive | None = None


class Named(Struct):
    """A choice in config.yaml."""

    name: str = ""


class Resolved(Struct):
    """`resolved` in config.yaml."""

    steps: Count | None = None
    notes: list[str] = []


class Config(Struct):
    """config.yaml."""

    seed: Count = 0
    model: ModelSize | None = None
    optim: Rate | None = None
    tracker: Named | None = None
    resolved: Resolved | None = None


class Plugin(Struct):
    """A plugin in env.json."""

    sha256: str = ""


class Environment(Struct):
    """env.json: what a run ran in."""

    git_commit: str | None = None
    arm_hash: str | None = None
    config_hash: str | None = None
    packages: dict[str, str | None] = {}
    source: dict[str, str] | None = None
    plugins: dict[str, Plugin] | None = None
    earlier: list[dict[str, Any]] = []


class Onset(Struct):
    """Where a capability appeared."""

    step: Count
    tokens: Count = 0


class Extrapolation(Struct):
    """Losses by length, of windows that overlap or not."""

    non_overlapping: dict[str, Measured] = {}
    sliding: dict[str, Measured] = {}
    not_defined: dict[str, str] | str = ""


class Streaming(Struct):
    """Losses of a stream with and without its first tokens."""

    kept_tokens: int = 0
    loss_kept: Measured = None
    loss_dropped: Measured = None
    difference: Measured = None


class Scheme(Struct):
    """A quantization scheme."""

    gap: Measured


class Quantization(Struct):
    """Losses of the quantized model."""

    loss: Measured = None
    schemes: dict[str, Scheme] = {}
    worst_block: int = 0


class Summary(Struct):
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
    onsets: dict[str, Onset] = {}
    extrapolation: Extrapolation | None = None
    streaming: Streaming | None = None
    quantization: Quantization | None = None
    intervention: dict[str, dict[str, Measured] | float | bool | str] = {}


class Row(Struct):
    """A row of metrics.jsonl or probes.jsonl without its measures."""

    step: Count
    tokens: Count
    flops: Number
    seconds: Number
    batch_hash: str = ""
    nonfinite: list[str] = []


class Initial(Struct):
    """One parameter in init.json: the hash of the normal numbers behind its first values."""

    z: str
    shape: list[Count]


class Place(Struct):
    """Where a run was sent in W&B."""

    id: str
    project: str
    entity: str | None = None


class Submission(Struct):
    """Jobs that were submitted to a cluster, by run."""

    jobs: dict[str, str]


class JobAnswer(Struct):
    """What a job of a cluster said when it ended."""

    reason: str = ""


INIT = dict[str, Initial | str]
PLACE = Place
SUBMISSION = Submission
JOB_ANSWER = JobAnswer

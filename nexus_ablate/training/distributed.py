"""One run on several processes: each processes its rows of the same global batch, and gradients are averaged.

Only the first process owns the run directory, measures and saves; the others take the same steps (follower.py). The
loss equals that of one process with the same global batch, up to the order of additions. Dropout is the exception: each
process draws its own masks.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from nexus_ablate.errors import AGAIN, BUG, ConfigError, Diverged, Preempted, UserError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from nexus_ablate.config.run_config import RunConfig
    from nexus_ablate.training.signals import StopRequest

BUCKET_BYTES = 25 * 2**20
"""Least bytes of a bucket of gradients; the default of DistributedDataParallel."""
BEAT_SECONDS = 2.0
LOST_SECONDS = 40.0
"""After this long without a heartbeat a process counts as lost, and all others end."""
PREPARING = 10
"""Factor on LOST_SECONDS before training: training a tokenizer can block a process's threads."""
ENDING_SECONDS = 5.0
"""Time that a process has to end by itself after another one has failed."""
STOP_EVERY = 10
"""Steps between checks for a stop request on a GPU; each check waits for the GPU."""


@dataclass(frozen=True)
class Place:
    """Rank and number of processes, from torchrun or SLURM."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int | None = None
    address: str = ""
    port: int = 0


def place() -> Place:
    """Read the place of this process from torchrun's variables, or from SLURM's if MASTER_ADDR is set too.

    Raises:
        ConfigError: The variables are incomplete or not numbers.
    """
    variables = os.environ
    try:
        if "RANK" in variables and int(variables.get("WORLD_SIZE", 1)) > 1:
            local = int(variables.get("LOCAL_RANK", 0)), int(variables.get("LOCAL_WORLD_SIZE", 1))
            names = ("RANK", "WORLD_SIZE")
        elif int(variables.get("SLURM_NTASKS", 1)) > 1 and "SLURM_PROCID" in variables and "MASTER_ADDR" in variables:
            local = int(variables.get("SLURM_LOCALID", 0)), None
            names = ("SLURM_PROCID", "SLURM_NTASKS")
        else:
            return Place()
        rank, size = (int(variables[name]) for name in names)
        return Place(rank, size, *local, variables["MASTER_ADDR"], int(variables.get("MASTER_PORT", 29500)))
    except (KeyError, ValueError) as error:
        raise ConfigError("the launcher's environment variables are incomplete", repr(error), "use torchrun") from None


def require_one_process(command: str) -> None:
    """Refuse to run `command` under torchrun or in connected SLURM tasks: only a single run can be distributed.

    Raises:
        ConfigError: There are several processes.
    """
    if (size := place().size) > 1:
        fix = "start it without torchrun; several processes are for one run"
        raise ConfigError(f"{command} starts processes of its own", f"{size} processes", fix)


class Lost(UserError):
    """Another process of the run ended, so this one ends too."""

    status = BUG


class World:
    """The processes of this run. With a single process every method does nothing.

    Attributes:
        stop: The stop request of this process; set when training begins.
    """

    def __init__(self, place: Place, device: torch.device) -> None:
        self.place, self.device = place, device
        self.stop: StopRequest | None = None
        self._vigil: _Vigil | None = None
        self._in_step = False  # all processes call the same exchanges in the same order
        self._stop_requested: torch.Tensor | None = None  # above 0: a process received a stop signal before this step

    @property
    def size(self) -> int:
        return self.place.size

    @property
    def leads(self) -> bool:
        return self.place.rank == 0

    def enter(self) -> None:
        """Wait for the other processes."""
        from torch import distributed
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[reportPrivateImportUsage]

        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun holds the store
        address, wait = (self.place.address, self.place.port, self.size), timedelta(minutes=10)
        store = TCPStore(*address, is_master=self.leads and not agent, timeout=wait)
        watched = TCPStore(*address, is_master=False, timeout=wait)  # its own connection, so no exchange can block it
        distributed.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            store=PrefixStore("run", store),
            rank=self.place.rank,
            world_size=self.size,
            timeout=timedelta(days=1),  # the first process may validate for long; lost processes are detected by _Vigil
            device_id=self.device if self.device.type == "cuda" else None,
        )
        self._vigil = _Vigil(PrefixStore("vigil", watched), self.place)

    def leave(self, error: BaseException | None) -> None:
        """End together with the other processes; after an error of this one alone, report it to them and end now."""
        from torch import distributed

        assert self._vigil is not None
        shared = isinstance(error, Preempted) or (isinstance(error, Diverged) and self.device.type == "cpu")
        if error is None or (shared and self._in_step):
            self.call(distributed.barrier)
            self._vigil.close()
            distributed.destroy_process_group()
        else:
            self._vigil.report(error)
            self._vigil.close()

    def agree_to_train(self, train: bool = True) -> bool:
        """Whether there is something to train, as decided by the first process."""
        self._in_step = bool(self.share([float(train)], [])[0])
        if self._vigil is not None:
            self._vigil.patience = 1
        return self._in_step

    def share(self, numbers: list[float], tensors: list[torch.Tensor]) -> list[float]:
        """Broadcast the first process's numbers and tensors to all. Returns the numbers."""
        if self.size == 1:
            return numbers
        import torch
        from torch import distributed

        shared = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        for tensor in [shared, *tensors]:
            sent = tensor.detach().to(self.device)  # an optimizer may keep its step on the CPU
            self.call(distributed.broadcast, sent, 0)
            if sent.device != tensor.device:
                tensor.detach().copy_(sent)
        return shared.tolist()

    def rows(self, batch: np.ndarray) -> np.ndarray:
        """This process's rows of the global batch."""
        share = len(batch) // self.size
        return batch[self.place.rank * share : (self.place.rank + 1) * share]

    def average(self, tensors: list[torch.Tensor]) -> None:
        """Replace each tensor by its mean over the processes, in one exchange that also shares stop requests."""
        if self.size == 1:
            return
        import torch
        from torch import distributed

        stop_flag = torch.full((1,), float(bool(self.stop and self.stop.signal_name)), device=self.device)
        flat = torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors] + [stop_flag])
        self.call(distributed.all_reduce, flat)
        flat /= self.size
        self._stop_requested = flat[-1]
        parts = flat[:-1].split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.detach().copy_(part.view_as(tensor))

    def stopping(self, step: int) -> bool:
        """Whether all processes stop after this step; the same result in each process."""
        if self._stop_requested is None:
            return bool(self.stop and self.stop.signal_name)
        return (self.device.type == "cpu" or step % STOP_EVERY == 0) and float(self._stop_requested) > 0

    def call(self, exchange: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call a function of torch.distributed.

        Raises:
            Lost: It failed, because another process has ended.
        """
        try:
            return exchange(*arguments, **named)
        except RuntimeError as error:
            assert self._vigil is not None
            raise Lost(
                f"process {self.place.rank} of {self.size} ends", self._vigil.cause() or str(error), AGAIN
            ) from None


def own_gpu(place: Place) -> torch.device:
    """The GPU of this process when a machine runs several.

    Raises:
        ConfigError: The machine has fewer GPUs than processes.
    """
    import torch

    gpus = torch.cuda.device_count()
    if place.local_size is not None and place.local_size > gpus:
        raise ConfigError("each process needs a GPU", f"{place.local_size} processes, {gpus} GPUs", "start fewer")
    device = torch.device("cuda", place.local_rank % gpus)  # SLURM may show each task only its own GPU
    torch.cuda.set_device(device)
    return device


@contextmanager
def join(place: Place, device: torch.device) -> Iterator[World]:
    """Connect the processes of a run, and disconnect them at the end."""
    if place.size == 1:
        yield World(place, device)
        return
    world = World(place, own_gpu(place) if device.type == "cuda" and device.index is None else device)
    world.enter()
    try:
        yield world
    except BaseException as error:
        world.leave(error)
        raise
    world.leave(None)


class Reduction:
    """Averages gradients over the processes in buckets, while the backward pass computes further gradients.

    A bucket is exchanged as soon as its gradients and all earlier buckets' exist, so all processes exchange the same
    buckets in the same order. Li et al. 2020, arXiv:2006.15704, section 3.2. With one process it does nothing.
    """

    def __init__(self, world: World, parameters: list[torch.nn.Parameter]) -> None:
        self._world = world
        self._buckets: list[list[torch.nn.Parameter]] = []
        self._sent: list[tuple[torch.Tensor, list[torch.Tensor], Any]] = []
        self._missing: list[int] = []
        self._active = False
        if world.size == 1:
            return
        size = BUCKET_BYTES
        for parameter in reversed(parameters):  # the last layers' gradients come first
            if size >= BUCKET_BYTES:
                self._buckets.append([])
                size = 0
            self._buckets[-1].append(parameter)
            size += parameter.nbytes
        for number, bucket in enumerate(self._buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, number))

    def begin(self) -> None:
        """Exchange the gradients of the next backward pass, the last one of a step."""
        self._missing = [len(bucket) for bucket in self._buckets]
        self._active = True

    def finish(self) -> None:
        """Wait until every gradient is the mean over the processes."""
        self._active = False
        for bucket in self._buckets[len(self._sent) :]:  # they have a parameter without a gradient
            self._send(bucket)
        for flat, gradients, exchange in self._sent:
            if not gradients:
                continue
            self._world.call(exchange.wait)
            flat /= self._world.size
            parts = flat.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        self._sent = []

    def _arrived(self, number: int, parameter: torch.nn.Parameter) -> None:
        if not self._active:
            return
        self._missing[number] -= 1
        while len(self._sent) < len(self._buckets) and not self._missing[len(self._sent)]:
            self._send(self._buckets[len(self._sent)])

    def _send(self, bucket: list[torch.nn.Parameter]) -> None:
        import torch
        from torch import distributed

        gradients = [parameter.grad.detach() for parameter in bucket if parameter.grad is not None]
        flat = torch.cat([gradient.reshape(-1).float() for gradient in gradients]) if gradients else torch.empty(0)
        exchange = self._world.call(distributed.all_reduce, flat, async_op=True) if gradients else None
        self._sent.append((flat, gradients, exchange))


class _Vigil:
    """Detects processes that ended or hang; an exchange on a GPU would wait for them forever.

    Each process increments a counter in a shared store. One thread increments and reads the counters. A second thread,
    which doesn't use the store and so cannot hang with it, ends this process after a time-out or another's failure.

    Attributes:
        patience: Factor on LOST_SECONDS.
    """

    def __init__(self, store: Any, place: Place) -> None:
        self._store, self._place = store, place
        self._heard = time.monotonic()
        self._failed_at: float | None = None
        self._cause = ""
        self._closed = threading.Event()
        self.patience = PREPARING
        for target in (self._beat, self._watch):
            threading.Thread(target=target, name=f"vigil{target.__name__}", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def report(self, error: BaseException) -> None:
        """Report to all processes that this one has failed."""
        reason = error.problem if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        if not isinstance(error, Lost):
            self._store.set("failed", f"process {self._place.rank}: {reason}"[:500])

    def cause(self) -> str:
        """The error of the process that failed first; waits briefly for it to arrive."""
        end = time.monotonic() + 2 * BEAT_SECONDS
        while not self._cause and time.monotonic() < end:
            time.sleep(0.05)
        return self._cause

    def _beat(self) -> None:
        counts = dict.fromkeys(range(self._place.size), "")
        changed = dict.fromkeys(counts, time.monotonic())
        number = 0
        while not self._closed.wait(BEAT_SECONDS / 2 if number else 0):
            number += 1
            try:
                self._store.set(str(self._place.rank), str(number))
                for rank in counts:
                    count = self._store.get(str(rank)).decode() if self._store.check([str(rank)]) else ""
                    if count != counts[rank]:
                        counts[rank], changed[rank] = count, time.monotonic()
                if not self._cause and self._store.check(["failed"]):
                    self._cause = self._store.get("failed").decode(errors="replace")
                    self._failed_at = time.monotonic()
            except RuntimeError as error:  # the process that holds the store is gone
                self._cause = self._cause or f"the shared store is gone: {error}".splitlines()[0]
                self._failed_at = self._failed_at or time.monotonic()
                return
            self._heard = min(changed.values())

    def _watch(self) -> None:
        while not self._closed.wait(BEAT_SECONDS / 2):
            now = time.monotonic()
            lost = now - self._heard > self.patience * LOST_SECONDS and self._failed_at is None
            failed = self._failed_at is not None and now - self._failed_at > ENDING_SECONDS
            if lost or failed:
                why = self._cause or f"no heartbeat from another process for {now - self._heard:.0f} seconds"
                message = Lost(f"process {self._place.rank} of {self._place.size} ends", why, AGAIN)
                print(message, file=sys.stderr, flush=True)
                os._exit(BUG)


def check_world(config: RunConfig, place: Place) -> None:
    """Check that a run can be distributed over the processes.

    Raises:
        ConfigError: The batch size is not divisible by them, or the model computes statistics over the batch.
    """
    if place.size == 1:
        return
    if config.train.batch_size % place.size:
        fix = f"a batch size that is a multiple of {place.size}; adjust train.grad_accum to keep the tokens per step"
        got = f"{config.train.batch_size} sequences, {place.size} processes"
        raise ConfigError("train.batch_size must be divisible by the number of processes", got, fix)
    from nexus_ablate.model import countable_model

    model = countable_model(config)
    statistics = model.state_dict().keys() - dict(model.named_parameters()).keys()
    if statistics:
        problem = f"norm={config.norm.name} computes statistics over the batch, and each process only sees a part of it"
        raise ConfigError(problem, f"{place.size} processes", "train it in one process, or with another norm")

"""One run on several processes: each takes its rows of the same global batch, and gradients are averaged.

The first process alone owns the run directory, measures and saves; the others take the same steps (follower.py). The
loss is that of one process at the same global batch, up to the order of additions. Dropout is the exception: each
process draws masks of its own.
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
from typing import TYPE_CHECKING, Any

from nexus_ablate.errors import AGAIN, BUG, ConfigError, Diverged, Preempted, UserError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from nexus_ablate.config.run_config import RunConfig
    from nexus_ablate.training.signals import StopRequest

BEAT_SECONDS = 2.0
LOST_SECONDS = 40.0
"""A process that has not been heard of for so long is lost, and with it the run: all others end."""
PREPARING = 10
"""How much longer it may be silent before training: a tokenizer may keep its threads from running."""
ENDING_SECONDS = 5.0
"""What a process has left to end by itself after another one has failed."""
STOP_EVERY = 10
"""Steps between questions whether to stop on a GPU, which would otherwise be waited for at each step."""


@dataclass(frozen=True)
class Place:
    """Which of how many processes this is, as torchrun or SLURM says."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int | None = None
    address: str = ""
    port: int = 0


def place() -> Place:
    """From the variables of torchrun; else from those of SLURM tasks where MASTER_ADDR says that they belong together.

    Raises:
        ConfigError: They do not fit together.
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
        raise ConfigError("the variables of the launcher are not complete", repr(error), "use torchrun") from None


def require_one_process(what: str) -> None:
    """Refuse what is not one run under torchrun or in SLURM tasks that belong together.

    Raises:
        ConfigError: There are several processes.
    """
    if (size := place().size) > 1:
        fix = "start it without torchrun; several processes are for one run"
        raise ConfigError(f"{what} starts processes of its own", f"{size} processes", fix)


class Lost(UserError):
    """Another process of the run ended, and with it this one."""

    status = BUG


class World:
    """The processes of this run; of one alone, nothing here does anything.

    Attributes:
        stop: Set by a signal to this process; given when training begins.
    """

    def __init__(self, place: Place, device: torch.device) -> None:
        self.place, self.device = place, device
        self.stop: StopRequest | None = None
        self._vigil: _Vigil | None = None
        self._in_step = False  # the same exchanges follow one another in all processes
        self._asked: torch.Tensor | None = None  # more than 0: some process was asked to stop before this step

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
        watched = TCPStore(*address, is_master=False, timeout=wait)  # a connection that no exchange can block
        distributed.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            store=PrefixStore("run", store),
            rank=self.place.rank,
            world_size=self.size,
            timeout=timedelta(days=1),  # a process that lives is waited for, however long the first one validates
            device_id=self.device if self.device.type == "cuda" else None,
        )
        self._vigil = _Vigil(PrefixStore("vigil", watched), self.place)

    def leave(self, error: BaseException | None) -> None:
        """End together with the others; after an error that they do not share, at once and telling them."""
        from torch import distributed

        assert self._vigil is not None
        shared = isinstance(error, Preempted) or (isinstance(error, Diverged) and self.device.type == "cpu")
        if error is None or (shared and self._in_step):
            self._call(distributed.barrier)
            self._vigil.close()
            distributed.destroy_process_group()
        else:
            self._vigil.tell(error)
            self._vigil.close()

    def agree_to_train(self, train: bool = True) -> bool:
        """Whether the first process says that there is something to train."""
        self._in_step = bool(self.share([float(train)], [])[0])
        if self._vigil is not None:
            self._vigil.patience = 1
        return self._in_step

    def share(self, numbers: list[float], tensors: list[torch.Tensor]) -> list[float]:
        """Give the first process's numbers and tensors to all."""
        if self.size == 1:
            return numbers
        import torch
        from torch import distributed

        shared = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        for tensor in [shared, *tensors]:
            sent = tensor.detach().to(self.device)  # an optimizer may keep its step on the CPU
            self._call(distributed.broadcast, sent, 0)
            if sent.device != tensor.device:
                tensor.detach().copy_(sent)
        return shared.tolist()

    def rows(self, batch: np.ndarray) -> np.ndarray:
        """This process's rows of a batch that all of them have."""
        share = len(batch) // self.size
        return batch[self.place.rank * share : (self.place.rank + 1) * share]

    def average(self, tensors: list[torch.Tensor]) -> None:
        """Replace each tensor by its mean over the processes, in one exchange that also says who was asked to stop."""
        if self.size == 1:
            return
        import torch
        from torch import distributed

        asked = torch.full((1,), float(bool(self.stop and self.stop.asked)), device=self.device)
        flat = torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors] + [asked])
        self._call(distributed.all_reduce, flat)
        flat /= self.size
        self._asked = flat[-1]
        parts = flat[:-1].split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.detach().copy_(part.view_as(tensor))

    def stopping(self, step: int) -> bool:
        """Whether all processes stop after this step; the answer is the same in each."""
        if self._asked is None:
            return bool(self.stop and self.stop.asked)
        return (self.device.type == "cpu" or step % STOP_EVERY == 0) and float(self._asked) > 0

    def _call(self, exchange: Callable[..., Any], *arguments: Any) -> None:
        try:
            exchange(*arguments)
        except RuntimeError as error:
            assert self._vigil is not None
            raise Lost(
                f"process {self.place.rank} of {self.size} ends", self._vigil.cause() or str(error), AGAIN
            ) from None


def own_gpu(place: Place) -> torch.device:
    """The GPU of a process among several of a machine.

    Raises:
        ConfigError: There are fewer GPUs than processes.
    """
    import torch

    gpus = torch.cuda.device_count()
    if place.local_size is not None and place.local_size > gpus:
        raise ConfigError("each process needs a GPU", f"{place.local_size} processes, {gpus} GPUs", "start fewer")
    device = torch.device("cuda", place.local_rank % gpus)  # SLURM may show each task its own GPU alone
    torch.cuda.set_device(device)
    return device


@contextmanager
def join(place: Place, device: torch.device) -> Iterator[World]:
    """The processes of a run, from the first that waits for the others to the last."""
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


class _Vigil:
    """Notices that a process is gone or hangs, which an exchange on a GPU would wait for without end.

    Each process counts in a store that all can read. One thread counts and reads; another, which touches no store and
    so cannot hang with it, ends this process when nothing was heard for too long or another one has failed.

    Attributes:
        patience: By how much LOST_SECONDS is multiplied.
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

    def tell(self, error: BaseException) -> None:
        """Say to all that this process has failed."""
        reason = error.problem if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        if not isinstance(error, Lost):
            self._store.set("failed", f"process {self._place.rank}: {reason}"[:500])

    def cause(self) -> str:
        """What the process that failed first said; waits a moment for it."""
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
                self._cause = self._cause or f"the store of the processes is gone: {error}".splitlines()[0]
                self._failed_at = self._failed_at or time.monotonic()
                return
            self._heard = min(changed.values())

    def _watch(self) -> None:
        while not self._closed.wait(BEAT_SECONDS / 2):
            now = time.monotonic()
            lost = now - self._heard > self.patience * LOST_SECONDS and self._failed_at is None
            failed = self._failed_at is not None and now - self._failed_at > ENDING_SECONDS
            if lost or failed:
                why = self._cause or f"another process was not heard of for {now - self._heard:.0f} seconds"
                message = Lost(f"process {self._place.rank} of {self._place.size} ends", why, AGAIN)
                print(message, file=sys.stderr, flush=True)
                os._exit(BUG)


def check_world(config: RunConfig, place: Place) -> None:
    """That a run can be spread over the processes there are.

    Raises:
        ConfigError: The batch cannot be divided, or the model takes statistics over it.
    """
    if place.size == 1:
        return
    if config.train.batch_size % place.size:
        fix = f"a batch size that is a multiple of {place.size}; train.grad_accum may make up for it"
        raise ConfigError("train.batch_size must be divisible by the processes", f"{config.train.batch_size}", fix)
    from nexus_ablate.model import meta_model

    model = meta_model(config)
    statistics = model.state_dict().keys() - dict(model.named_parameters()).keys()
    if statistics:
        what = f"norm={config.norm.name} takes statistics over the batch, of which each process sees a part"
        raise ConfigError(what, f"{place.size} processes", "train it in one process, or with another norm")

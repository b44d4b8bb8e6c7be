"""One run on several processes under torchrun: each processes its rows of the same global batch.

DistributedDataParallel averages the gradients. The first process owns the run directory, measures and saves; the others
take the same steps (follower.py). The loss equals that of one process with the same global batch, up to the order of
additions. Dropout is the exception: each process draws its own masks. torchrun ends all processes if one fails.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from nexus_ablate.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from nexus_ablate.training.signals import StopRequest

STOP_EVERY = 10
"""Steps between checks for a stop request on a GPU; each check waits for the GPU."""
LONGEST_WAIT = timedelta(hours=2)
"""For the first process, which validates, probes and saves alone. torchrun notices a process that has ended at once."""


@dataclass(frozen=True)
class Place:
    """Rank and number of the processes of a run, and of those on this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def place() -> Place:
    """The place of this process, from torchrun's environment variables; a single process without them.

    Raises:
        ConfigError: The variables are incomplete or not numbers.
    """
    if "RANK" not in os.environ:
        return Place()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    try:
        return Place(*(int(os.environ[name]) for name in names))
    except (KeyError, ValueError) as error:
        raise ConfigError("torchrun's environment variables are incomplete", repr(error), "use torchrun") from None


def require_one_process(command: str) -> None:
    """Refuse to run `command` under torchrun: only a single run can be distributed.

    Raises:
        ConfigError: There are several processes.
    """
    if (size := place().size) > 1:
        fix = "start it without torchrun; several processes are for one run"
        raise ConfigError(f"{command} starts processes of its own", f"{size} processes", fix)


class World:
    """The processes of a run. With a single process every method is trivial.

    Attributes:
        stop: The stop request of this process; set when training begins.
        has_shared: Whether `share` has been called.
    """

    def __init__(self, place: Place, device: torch.device) -> None:
        self.place, self.device = place, device
        self.stop: StopRequest | None = None
        self.has_shared = False
        self._stop_requested: torch.Tensor | None = None  # above 0: a process received a stop signal before this step

    @property
    def size(self) -> int:
        return self.place.size

    @property
    def leads(self) -> bool:
        return self.place.rank == 0

    def share(self, data: bytes) -> bytes:
        """The first process's bytes, in every process. Nothing is pickled."""
        self.has_shared = True
        if self.size == 1:
            return data
        import torch
        from torch import distributed

        length = torch.tensor(len(data), device=self.device)
        distributed.broadcast(length, src=0)
        shared = torch.zeros(int(length), dtype=torch.uint8, device=self.device)
        if self.leads and data:
            shared.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        distributed.broadcast(shared, src=0)
        return shared.cpu().numpy().tobytes()

    def rows(self, batch: np.ndarray) -> np.ndarray:
        """This process's rows of the global batch."""
        share = len(batch) // self.size
        return batch[self.place.rank * share : (self.place.rank + 1) * share]

    def average(self, numbers: torch.Tensor) -> torch.Tensor:
        """The mean of a vector over the processes; the same exchange shares stop requests."""
        import torch
        from torch import distributed

        stop_flag = float(bool(self.stop and self.stop.signal_name))
        shared = torch.cat([numbers, numbers.new_tensor([stop_flag])])
        distributed.all_reduce(shared)
        self._stop_requested = shared[-1]
        return shared[:-1] / self.size

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over the processes."""
        if self.size > 1:
            from torch import distributed

            distributed.all_reduce(tensor)
        return tensor

    def stopping(self, step: int) -> bool:
        """Whether all processes stop after this step; the same result in each process."""
        if self._stop_requested is None:
            return bool(self.stop and self.stop.signal_name)
        return (self.device.type == "cpu" or step % STOP_EVERY == 0) and float(self._stop_requested) > 0


@contextmanager
def join(place: Place, device: torch.device) -> Iterator[World]:
    """Connect the processes of a run, and disconnect them at the end.

    Raises:
        ConfigError: The machine has fewer GPUs than processes.
    """
    if place.size == 1:
        yield World(place, device)
        return
    import torch
    from torch import distributed

    on_gpu = device.type == "cuda"
    if on_gpu:
        gpus = torch.cuda.device_count()
        if place.local_size > gpus:
            raise ConfigError("each process needs a GPU", f"{place.local_size} processes, {gpus} GPUs", "start fewer")
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if on_gpu else "gloo", timeout=LONGEST_WAIT)
    try:
        yield World(place, device)
    finally:
        distributed.destroy_process_group()

"""Coordination of a group of ranks: rank 0 decides, all follow.

Whether warm-up has ended, which window comes next, when to stop: each such value is rank 0's and is
broadcast over a CPU (gloo) group, so that no rank ever waits in a collective that another skipped.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steptune.tuner.emulation import HOST_VARIABLE, ranks_per_device
from steptune.tuner.network.choices_log import VARIABLES as NCCL_LOG_VARIABLES
from steptune.tuner.training.hosts import emulate_for_nccl
from steptune.tuner.trials.host_networks import enter_host_network
from steptune.tuner.trials.messages import Channel

if TYPE_CHECKING:
    import torch


GROUP_TIMEOUT = timedelta(hours=1)
"""Timeout of the process groups, longer than any phase. At the phase's deadline the parent ends a rank that hangs;
NCCL's watchdog would abort the process instead, which looks like a crash.
"""


class Coordinator:
    """Process groups of a trial or of the guard's reference, and the broadcast of decisions.

    Args:
        keeps_nccl_log: True to have NCCL log its choices on rank 0 into the directory.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        channel: Channel,
        directory: Path,
        device: torch.device,
        *,
        keeps_nccl_log: bool = False,
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self._channel = channel
        self.group: Any = None
        if keeps_nccl_log and rank == 0 and device.type == "cuda":
            os.environ.update(NCCL_LOG_VARIABLES, NCCL_DEBUG_FILE=str(directory / "nccl.log"))
        if num_ranks > 1:
            self._join(directory, device)

    def _join(self, directory: Path, device: torch.device) -> None:
        import torch
        import torch.distributed as dist

        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # as torchrun does: ranks that all take all cores wait for one another
        enter_host_network(self.rank, self.num_ranks)
        directory.mkdir(parents=True, exist_ok=True)
        store = self._meeting_place(directory)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            sharing = ranks_per_device(torch.cuda.device_count())
            emulate_for_nccl(self.rank, self.num_ranks, per_device=sharing)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.num_ranks, timeout=GROUP_TIMEOUT)
        self.group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)

    def _meeting_place(self, directory: Path) -> Any:
        """Return the store for the rendezvous: a file on one host, or a TCP port of the first of several hosts."""
        from torch._C._distributed_c10d import FileStore, TCPStore

        if HOST_VARIABLE not in os.environ:
            return FileStore(str(directory / "rendezvous"), self.num_ranks)
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return TCPStore(address, port, self.num_ranks, is_master=self.rank == 0, wait_for_workers=False)

    def agree(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        if self.group is None:
            return value
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def total(self, values: Sequence[float]) -> list[float]:
        """Return each value summed over the ranks."""
        return self._reduced(values, "sum")

    def most(self, values: Sequence[float]) -> list[float]:
        """Return the maximum of each value over the ranks, after waiting for all ranks."""
        return self._reduced(values, "max")

    def _reduced(self, values: Sequence[float], operation: str) -> list[float]:
        if self.group is None:
            return list(values)
        import torch
        import torch.distributed as dist

        reduced = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(reduced, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[operation], group=self.group)
        return [float(value) for value in reduced.tolist()]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order, on rank 0; return an empty list on the others."""
        if self.group is None:
            return [value]
        import torch.distributed as dist

        values: list[Any] | None = [None] * self.num_ranks if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return values or []

    def send(self, message: Any) -> None:
        """Send a message to the parent from rank 0; do nothing on other ranks."""
        if self.rank == 0:
            self._channel.send(message)

    def next_command(self) -> bytes:
        """Return the parent's next command, on every rank.

        Raises:
            EOFError: The server is gone.
        """
        line = self._channel.receive() if self.rank == 0 else None
        line = self.agree(line)
        if line is None:
            raise EOFError("the trial server closed the channel")
        return bytes(line)

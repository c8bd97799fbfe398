"""Regions of host time, by thread: intervals in which the loader, the optimizer, the backward pass or the like runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from steptune.tuner.profiling.intervals import EMPTY, Intervals, Ints, contains, union
from steptune.tuner.profiling.trace import Kind, Trace

LOADER = (
    r"(DataLoader|DataPipe).*(__next__|#)|^enumerate\(\w*(DataLoader|DataPipe|WebLoader)\)|^steptune\.data_wait$|"
    r"(train|val|predict)_dataloader_next$|\b(data_fetch|next_batch|fetch_batch|get_batch|batch_fetch)(er)?$|"
    r"^(dataloader|data_loader|dataloading|data_loading|data)(_iter)?[ _.]?(next|wait|load|fetch)$"
)
"""Names under which PyTorch, Lightning, torchdata, torchtitan and custom loops mark the wait for a batch."""
OPTIMIZER = r"^Optimizer\.(step|zero_grad)#|^optimizer\.|^steptune\.optimizer$"
RESTART = r"^steptune\.epoch_restart$"
BACKWARD = r"^autograd::engine::evaluate_function|Backward\d*$|AccumulateGrad$"
SYNC_CALLS = r"(Device|Stream|Event)Synchronize|^(cuda|hip)Memcpy$"
"""Pattern for calls in which the host waits for the device. cudaStreamWaitEvent is not one: only the stream waits."""
ALLOCATION_CALLS = r"^(cuda|hip)(Malloc|Free|HostAlloc|HostRegister|MallocAsync|MemCreate|MemMap)"
BLOCKING_OPERATORS = r"^aten::(item|_local_scalar_dense|nonzero|is_nonzero)$"
HOST = (Kind.ANNOTATION, Kind.OPERATOR)


class Region:
    """Intervals of host time of one kind, by thread.

    Args:
        rows: Rows of the events that span these intervals.
        start: Beginning of each interval; by default that of its event.
    """

    def __init__(self, trace: Trace, rows: Ints, start: Ints | None = None) -> None:
        self.rows = rows
        self._start = trace.host.start[rows] if start is None else start
        self._trace = trace
        self._unions: dict[int, Intervals] = {}

    def on(self, thread: int) -> Intervals:
        """Return the disjoint intervals on one thread."""
        if thread not in self._unions:
            host = self._trace.host
            here = host.thread[self.rows] == thread
            rows, start = self.rows[here], self._start[here]
            self._unions[thread] = union(start, host.end[rows]) if len(rows) else (EMPTY, EMPTY)
        return self._unions[thread]

    def contains(self, thread: npt.NDArray[np.integer], time: Ints) -> npt.NDArray[np.bool_]:
        """Return a mask of the given moments, each on the given thread; True if the moment is inside the region."""
        inside = np.zeros(len(time), dtype=bool)
        for number in np.unique(self._trace.host.thread[self.rows]).tolist():
            here = thread == number
            inside[here] = contains(self.on(number), time[here])
        return inside


class Regions:
    """Regions of a trace's host threads: waits for data, optimizer steps, backward passes and similar activities.

    Attributes:
        optimizer: Steps of the optimizer. With a closure (as in Lightning) a step runs the forward and backward pass
            too: time before the end of the last backward operator is no update.
        recompute: Operators of the forward pass that run inside the backward pass, as in activation checkpointing.
            They have a sequence number, because gradients are enabled, but name no forward thread; operators of the
            backward pass itself that have a number do name one.
    """

    def __init__(self, trace: Trace) -> None:
        def region(pattern: str, *kinds: Kind) -> Region:
            return Region(trace, trace.host_rows(pattern, *(kinds or HOST)))

        self.loader = region(LOADER)
        self.restart = region(RESTART)
        self.backward = region(BACKWARD)
        updates = trace.host_rows(OPTIMIZER, *HOST)
        self.optimizer = Region(trace, updates, self._after_closures(trace, updates))
        self.allocation = region(ALLOCATION_CALLS, Kind.RUNTIME)
        blocking = trace.host_rows(BLOCKING_OPERATORS, *HOST)
        calls = trace.host_rows(SYNC_CALLS, Kind.RUNTIME)
        self.synchronisation = Region(trace, np.sort(np.concatenate([calls, blocking])))
        self.recompute = Region(trace, self._recomputed(trace))

    def _after_closures(self, trace: Trace, updates: Ints) -> Ints:
        """Return the end of the backward pass inside each optimizer step, on whatever thread that pass ran."""
        host, backward = trace.host, self.backward.rows
        order = np.argsort(host.end[backward], kind="stable")
        began, ended = host.start[backward][order], host.end[backward][order]
        start: Ints = host.start[updates].copy()
        last = np.searchsorted(ended, host.end[updates], side="right") - 1
        waiting = np.arange(len(updates))
        while len(waiting := waiting[last[waiting] >= 0]):
            waiting = waiting[ended[last[waiting]] > start[waiting]]
            inside = began[last[waiting]] >= start[waiting]
            found, waiting = waiting[inside], waiting[~inside]
            start[found] = ended[last[found]]
            last[waiting] -= 1  # it began before the step: one that ended earlier may lie inside
        return start

    def _recomputed(self, trace: Trace) -> Ints:
        host = trace.host
        rows = np.flatnonzero((host.kind == Kind.OPERATOR) & (host.sequence >= 0) & (host.forward_thread == 0))
        rows = rows[self.backward.contains(host.thread[rows], host.start[rows])]
        return rows[~trace.names_matching(BACKWARD)[host.name[rows]]]


def joined(regions: Sequence[Region], thread: int) -> Intervals:
    """Return the disjoint intervals on one thread that any of the regions covers."""
    parts = [region.on(thread) for region in regions]
    return union(np.concatenate([start for start, _ in parts]), np.concatenate([end for _, end in parts]))

"""Memory by class of tensor: parameters, gradients, optimizer state, activations, temporary memory, and the rest.

The running job knows the addresses of its parameters, gradients and states. Each other block that was allocated in the
window is classified by its lifetime: one allocated outside the backward pass and still in use when that begins is an
activation; one that the backward pass allocates and leaves behind is a gradient; others are temporary. The rest existed
before: memory in no class and, on a device, memory that the window neither allocated nor freed.

PyTorch's own classes (`torch.profiler._memory_profiler`) follow every operator's arguments, in Python: several seconds
for a step of 10,000 allocations, which is too long for each trial.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from msgspec import structs

from steptune.tuner.profiling.intervals import Ints
from steptune.tuner.profiling.trace import Kind, MemoryPoint, Trace
from steptune.tuner.trace_records import MemoryClass, MemoryStats

if TYPE_CHECKING:
    import torch

PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, TEMPORARY, OTHER = CLASSES = (
    "parameters",
    "gradients",
    "optimizer state",
    "activations",
    "temporary",
    "other",
)
BACKWARD = "autograd::engine::evaluate_function"
MAX_POINTS = 300
BEFORE, BEYOND = np.iinfo(np.int64).min, np.iinfo(np.int64).max


@dataclass(frozen=True, kw_only=True)
class Block:
    """Memory block of a tensor that the job knows."""

    device: str
    kind: str
    address: int
    num_bytes: int


def known_blocks(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Block, ...]:
    """Return the memory of parameters, buffers, gradients and the optimizer's states, each storage once."""
    import torch

    parameters = [*model.parameters(), *(p for group in optimizer.param_groups for p in group["params"])]
    states = [value for state in optimizer.state.values() if isinstance(state, dict) for value in state.values()]
    tensors = {
        PARAMETERS: [*parameters, *model.buffers()],
        GRADIENTS: [parameter.grad for parameter in parameters],
        STATE: states,
    }
    found: dict[tuple[str, int], Block] = {}
    for kind, members in tensors.items():
        for tensor in members:
            if not isinstance(tensor, torch.Tensor):
                continue
            try:
                # Of a tensor that is sharded across ranks, the part of this one.
                storage = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).untyped_storage()
            except (RuntimeError, ValueError):  # a sparse tensor has no storage, nor has a lazy module's before a call
                continue
            if storage.nbytes() and tensor.device.type in ("cpu", "cuda"):
                device = "cpu" if tensor.device.type == "cpu" else f"cuda:{tensor.device.index}"
                block = Block(device=device, kind=kind, address=storage.data_ptr(), num_bytes=storage.nbytes())
                found.setdefault((device, block.address), block)
    return tuple(found.values())


def with_classes(
    stats: Sequence[MemoryStats], trace: Trace, before: Sequence[Block], after: Sequence[Block]
) -> tuple[MemoryStats, ...]:
    """Return the allocator's statistics with the memory of each class.

    Args:
        trace: A window in which every allocation was recorded.
        before, after: Known blocks at the beginning and the end of the window; if either is empty, `stats` is returned
            as is.
    """
    if not before and not after:
        return tuple(stats)
    backward = _backward_passes(trace)
    found = []
    for one in stats:
        points = [point for point in trace.memory if point.device == one.device and point.address]
        lives = _lives(points, _of(before, one.device), _of(after, one.device), backward)
        found.append(_classified(one, lives, points))
    return tuple(found)


def _of(blocks: Sequence[Block], device: str) -> dict[int, Block]:
    return {block.address: block for block in blocks if block.device == device}


def _backward_passes(trace: Trace) -> Ints:
    """Return the starts and ends of backward passes, int64 of shape (passes, 2); no other operator runs between the
    parts of a pass.
    """
    host, names = trace.host, np.array([name.startswith(BACKWARD) for name in trace.names], dtype=bool)
    operators = host.kind == Kind.OPERATOR
    parts = np.flatnonzero(operators & names[host.name])
    if not len(parts):
        return np.zeros((0, 2), dtype=np.int64)
    ends = np.maximum.accumulate(host.end[parts])
    starts = host.start[parts]
    others = host.start[operators]
    inside = np.searchsorted(starts, others, side="right") - 1
    others = np.sort(others[(inside < 0) | (others > ends[np.maximum(inside, 0)])])
    following = np.searchsorted(others, ends)
    first = np.concatenate(([True], np.searchsorted(others, starts[1:]) > following[:-1]))
    # What is taken back before anything else runs was the pass's own.
    until = np.append(others, trace.span[1])[following[np.concatenate((first[1:], [True]))]]
    return np.stack([starts[first], until], axis=1).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class _Life:
    kind: str
    start: int
    end: int
    num_bytes: int


def _lives(
    points: Sequence[MemoryPoint], before: Mapping[int, Block], after: Mapping[int, Block], backward: Ints
) -> list[_Life]:
    """Return every known block, and every block that the window allocated or freed, with the beginning and end of its
    life.
    """
    given: dict[int, tuple[int, int]] = {}
    lives = []

    def ended(address: int, num_bytes: int, end: int) -> None:
        start, size = given.pop(address, (BEFORE, num_bytes))
        known = before.get(address) if start == BEFORE else after.get(address) if end == BEYOND else None
        kind = known.kind if known is not None else _kind(start, end, backward)
        lives.append(_Life(kind=kind, start=start, end=end, num_bytes=size))

    touched = set()
    for point in points:
        touched.add(point.address)
        if point.num_bytes >= 0:
            given[point.address] = point.time, point.num_bytes
        else:
            ended(point.address, -point.num_bytes, point.time)
    for address, (_, size) in list(given.items()):
        ended(address, size, BEYOND)
    for address, block in before.items():
        # The profiler does not see that a CPU takes back what it gave before the window: that is not there after.
        if address not in touched and address in after:
            lives.append(_Life(kind=block.kind, start=BEFORE, end=BEYOND, num_bytes=block.num_bytes))
    return lives


def _kind(start: int, end: int, backward: Ints) -> str:
    """Return the class of a block that the job does not know, by its lifetime."""
    if start == BEFORE:
        return OTHER
    within = (backward[:, 0] <= start) & (start <= backward[:, 1])
    if within.any():
        return GRADIENTS if end > backward[within, 1].min() else TEMPORARY
    return ACTIVATIONS if ((start < backward[:, 0]) & (backward[:, 0] < end)).any() else TEMPORARY


def _classified(stats: MemoryStats, lives: Sequence[_Life], points: Sequence[MemoryPoint]) -> MemoryStats:
    times = np.array([point.time for point in points], dtype=np.int64)
    if not len(times):
        return stats
    sizes = np.zeros((len(times), len(CLASSES)), dtype=np.int64)
    for life in lives:
        first = 0 if life.start == BEFORE else int(np.searchsorted(times, life.start))
        last = int(np.searchsorted(times, life.end)) if life.end != BEYOND else len(times)
        column = CLASSES.index(life.kind)
        sizes[first, column] += life.num_bytes
        if last < len(times):
            sizes[last, column] -= life.num_bytes
    sizes = np.maximum(0, np.cumsum(sizes, axis=0))
    if stats.device != "cpu":  # a CPU's total counts from the beginning of the window
        total = np.array([point.allocated_bytes for point in points], dtype=np.int64)
        sizes[:, -1] += np.maximum(0, total - sizes.sum(axis=1))
    peak = int(sizes.sum(axis=1).argmax())
    classes = [
        MemoryClass(name=name, peak_bytes=int(sizes[:, column].max()), at_peak_bytes=int(sizes[peak, column]))
        for column, name in enumerate(CLASSES)
    ]
    rows = np.unique(np.append(np.linspace(0, len(times) - 1, min(len(times), MAX_POINTS)).astype(np.int64), peak))
    origin = int(times[0])
    series = tuple((int(times[row]) - origin, *map(int, sizes[row])) for row in rows.tolist())
    return structs.replace(stats, classes=tuple(classes), class_timeline=series)

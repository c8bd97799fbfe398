"""A simulated machine that trains: programs with causes that can be left out, their true step times and their traces.

It shares no code with the analysis: hosts dispatch, streams run in order, ranks meet in collectives, workers make
batches, and a profiler costs the host time for every event that it records. The truth of "without X" is the same
program, unprofiled, run without X.

Times are microseconds, as traces have them.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAIN, COMPUTE, COMMUNICATION = 1, 7, 20
QUEUE = 1024
LATENCY, BETWEEN, CALL = 6.0, 1.0, 2.5
IN_A_GRAPH = 0.35
"""Between operations of a replayed CUDA graph, microseconds: 0.26 and 0.42 in two captures of an H200."""
HAND_OVER = 120.0


@dataclass(frozen=True, kw_only=True)
class Do:
    """One thing that a host does.

    Attributes:
        kind: "launch", "read" (a value of the device), "copy" (blocking, of pageable memory), "pause", "batch",
            "reduce" (launch a collective), "join" (compute waits for the collectives) or "allocate".
        host, device: How long the host, and the device, are at it.
        cause: What it belongs to: left out with it.
        stays: What the host still needs for it where the cause is gone.
    """

    kind: str
    host: float = 0.0
    device: float = 0.0
    name: str = "aten::mm"
    cause: str = ""
    stays: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A simulated machine.

    Attributes:
        noise: Relative spread of what hosts do; a fifth of it for kernels.
        event_cost: What the profiler adds to a host for every event.
        kernel_cost: How much longer kernels last under the profiler, relatively.
        contention: How much slower kernels are beside a collective, relatively.
        workers: Processes that make batches; 0: the main process does.
        batch: How long making one batch takes.
        clocks: By rank: how far its clock is off.
    """

    noise: float = 0.08
    event_cost: float = 0.8
    kernel_cost: float = 0.01
    contention: float = 0.2
    workers: int = 0
    batch: float = 0.0
    clocks: tuple[float, ...] = (0.0,)


Program = Callable[[int, int], Sequence[Do]]
"""Operations of a rank in a step."""


@dataclass
class Rank:
    """The state of one rank while it runs."""

    number: int
    machine: Machine
    random: random.Random
    profiled: bool
    free_launches: bool = False
    time: float = 0.0
    ends: dict[int, float] = field(default_factory=dict)
    starts: list[float] = field(default_factory=list)
    joined: float = 0.0
    collective: tuple[float, float] = (0.0, 0.0)
    ready: list[float] = field(default_factory=list)
    taken: list[float] = field(default_factory=list)
    correlation: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    marks: list[float] = field(default_factory=list)
    finished: list[float] = field(default_factory=list)

    def varied(self, value: float, noise: float | None = None) -> float:
        spread = self.machine.noise if noise is None else noise
        return value * math.exp(self.random.gauss(0.0, spread) - spread**2 / 2)

    def spend(self, host: float, num_events: int = 0) -> None:
        self.time += host + (num_events * self.machine.event_cost if self.profiled else 0.0)

    def record(self, category: str, name: str, start: float, end: float, thread: int = MAIN, **args: Any) -> None:
        if self.profiled:
            event = {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start, "tid": thread}
            self.events.append({**event, "pid": 100 + self.number, "args": args})

    def record_inner(self, name: str, outer: float, called: float) -> None:
        """Record the operator that another one holds: the other one was recorded first."""
        begin = min(outer + 0.5 + self.machine.event_cost, called)
        self.record("cpu_op", name, begin, self.time - 0.2)

    def enqueue(self, stream: int, length: float, after: float = 0.0, between: float = BETWEEN) -> tuple[float, float]:
        """When an operation of a stream that was just launched begins and ends."""
        begin = max(self.time + LATENCY, self.ends.get(stream, -math.inf) + between, after)
        low, high = self.collective
        if stream == COMPUTE:
            beside = max(0.0, min(high, begin + length) - max(low, begin))
            length += self.machine.contention * beside
        end = begin + length
        self.ends[stream] = end
        self.starts.append(begin)
        return begin, end

    def call(self, name: str, length: float) -> float:
        """A call that launches: it blocks while the queue is full."""
        if len(self.starts) >= QUEUE:
            self.time = max(self.time, self.starts[-QUEUE])
        begin = self.time
        self.spend(self.varied(length), 1)
        self.correlation += 1
        return begin

    def kernel_time(self, device: float) -> float:
        return self.varied(device, self.machine.noise / 5) * (1 + self.machine.kernel_cost * self.profiled)


Meeting = Generator[tuple[float, float], float, None]


def running(rank: Rank, program: Program, num_steps: int, without: frozenset[str]) -> Meeting:
    """One rank's steps: yields when it arrives in a collective and the network's time, is sent the end."""
    for step in range(num_steps):
        begin = rank.time
        rank.marks.append(begin)
        for do in program(rank.number, step):
            if do.cause in without and do.cause:
                if do.stays:
                    rank.spend(rank.varied(do.stays))
                continue
            yield from _ACTIONS[do.kind](rank, do)
        rank.record("user_annotation", f"ProfilerStep#{step}", begin, rank.time)
        rank.finished.append(max([rank.time, *rank.ends.values()]))


def _launch(rank: Rank, do: Do, *, stream: int = COMPUTE, kernel: str = "") -> Meeting:
    begin = rank.time
    if rank.free_launches:
        rank.enqueue(stream, rank.kernel_time(do.device), rank.joined, IN_A_GRAPH)
        return
    rank.spend(rank.varied(do.host), 2)
    called = rank.call("cudaLaunchKernel", CALL)
    start, end = rank.enqueue(stream, rank.kernel_time(do.device), rank.joined)
    rank.record("cuda_runtime", "cudaLaunchKernel", called, rank.time, correlation=rank.correlation)
    rank.spend(1.0, 0)
    rank.record("cpu_op", do.name, begin, rank.time)
    rank.record_inner("aten::inner", begin, called)
    at = {"device": rank.number, "stream": stream, "correlation": rank.correlation}
    rank.record("kernel", kernel or _kernel(do.name), start, end, 1000 + stream, **at)
    return
    yield


def _kernel(name: str) -> str:
    return {"aten::mm": "nvjet_sm90_tst_128x64", "optimizer": "multi_tensor_apply_kernel"}.get(
        name, "elementwise_kernel"
    )


def _copied(rank: Rank, name: str, device: float, *, blocks: bool) -> tuple[float, float]:
    called = rank.call("cudaMemcpyAsync", CALL + 1)
    start, end = rank.enqueue(COMPUTE, device, rank.joined)
    if blocks:
        rank.time = max(rank.time, end + 4.0)
    rank.record("cuda_runtime", "cudaMemcpyAsync", called, rank.time, correlation=rank.correlation)
    at = {"device": rank.number, "stream": COMPUTE, "correlation": rank.correlation, "bytes": 4}
    rank.record("gpu_memcpy", name, start, end, 1000 + COMPUTE, **at)
    return start, end


def _read(rank: Rank, do: Do) -> Meeting:
    begin = rank.time
    rank.spend(rank.varied(do.host or 6.0), 2)
    copied = rank.time
    _, end = _copied(rank, "Memcpy DtoH (Device -> Pageable)", 1.5, blocks=False)
    called = rank.time
    rank.spend(2.0, 1)
    rank.time = max(rank.time, end + 6.0)
    rank.record("cuda_runtime", "cudaStreamSynchronize", called, rank.time, correlation=rank.correlation + 10**6)
    rank.spend(1.0)
    rank.record("cpu_op", "aten::item", begin, rank.time)
    rank.record_inner("aten::_local_scalar_dense", begin, copied)
    return
    yield


def _copy(rank: Rank, do: Do) -> Meeting:
    begin = rank.time
    rank.spend(rank.varied(do.host or 8.0), 1)
    _copied(rank, "Memcpy HtoD (Pageable -> Device)", do.device, blocks=True)
    rank.record("cpu_op", "aten::copy_", begin, rank.time)
    return
    yield


def _pause(rank: Rank, do: Do) -> Meeting:
    rank.spend(rank.varied(do.host))
    return
    yield


def _allocate(rank: Rank, do: Do) -> Meeting:
    begin = rank.time
    rank.spend(rank.varied(do.host), 1)
    rank.record("cuda_runtime", "cudaMalloc", begin, rank.time, correlation=-1)
    return
    yield


def _batch(rank: Rank, do: Do) -> Meeting:
    machine, begin = rank.machine, rank.time
    number = len(rank.taken)
    if machine.workers:
        before = rank.ready[number - machine.workers] if number >= machine.workers else 0.0
        slot = rank.taken[number - 2 * machine.workers] if number >= 2 * machine.workers else 0.0
        rank.ready.append(max(before, slot) + rank.varied(machine.batch))
        rank.spend(rank.varied(HAND_OVER), 1)
        rank.time = max(rank.time, rank.ready[number])
    else:
        rank.spend(rank.varied(machine.batch), 1)
    rank.taken.append(rank.time)
    kind = "_MultiProcessingDataLoaderIter" if machine.workers else "_SingleProcessDataLoaderIter"
    rank.record("user_annotation", f"enumerate(DataLoader)#{kind}.__next__", begin, rank.time)
    return
    yield


def _reduce(rank: Rank, do: Do) -> Meeting:
    begin = rank.time
    rank.spend(rank.varied(do.host or 15.0), 2)
    waited = rank.time
    rank.spend(1.0, 2)
    rank.record("cuda_runtime", "cudaEventRecord", waited, waited + 0.4, correlation=-1)
    rank.record("cuda_runtime", "cudaStreamWaitEvent", waited + 0.5, rank.time, correlation=-1)
    called = rank.call("cudaLaunchKernelExC", CALL)
    after = rank.ends.get(COMPUTE, 0.0) + BETWEEN
    start = max(rank.time + LATENCY, rank.ends.get(COMMUNICATION, 0.0) + BETWEEN, after)
    end = yield start, rank.varied(do.device, rank.machine.noise / 5)
    rank.ends[COMMUNICATION] = end
    rank.starts.append(start)
    rank.collective = start, end
    rank.record("cuda_runtime", "cudaLaunchKernelExC", called, rank.time, correlation=rank.correlation)
    rank.record("cpu_op", "c10d::allreduce_", begin, rank.time)
    at = {"device": rank.number, "stream": COMMUNICATION, "correlation": rank.correlation}
    rank.record("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", start, end, 1000 + COMMUNICATION, **at)


def _join(rank: Rank, do: Do) -> Meeting:
    begin = rank.time
    rank.spend(1.0, 1)
    rank.joined = rank.ends.get(COMMUNICATION, 0.0) + BETWEEN
    rank.record("cuda_runtime", "cudaStreamWaitEvent", begin, rank.time, correlation=-1)
    return
    yield


_ACTIONS: Mapping[str, Callable[[Rank, Do], Meeting]] = {
    "launch": _launch,
    "read": _read,
    "copy": _copy,
    "pause": _pause,
    "allocate": _allocate,
    "batch": _batch,
    "reduce": _reduce,
    "join": _join,
}


def run(
    program: Program,
    machine: Machine,
    num_steps: int,
    *,
    num_ranks: int = 1,
    seed: int = 0,
    profiled: bool = False,
    without: frozenset[str] = frozenset(),
) -> list[Rank]:
    """Let all ranks run to their ends: they meet in the order of their collectives."""
    ranks = [
        Rank(number, machine, random.Random(f"{seed} {number} {profiled}"), profiled) for number in range(num_ranks)
    ]
    for rank in ranks:
        rank.free_launches = "launches" in without
    runs = [running(rank, program, num_steps, without) for rank in ranks]
    arrived = [next(one, None) for one in runs]
    while all(one is not None for one in arrived):
        end = max(start for start, _ in arrived) + max(network for _, network in arrived)
        following = []
        for one in runs:
            try:
                following.append(one.send(end))
            except StopIteration:
                following.append(None)
        arrived = following
    assert all(one is None for one in arrived), "ranks have different numbers of collectives"
    return ranks


def step_time(program: Program, machine: Machine, *, num_steps: int = 60, warm: int = 10, **options: Any) -> float:
    """Mean unprofiled step time in the steady state."""
    ranks = run(program, machine, num_steps, **options)
    return max((rank.finished[-1] - rank.finished[warm]) / (num_steps - 1 - warm) for rank in ranks)


def write_traces(
    directory: Path,
    program: Program,
    machine: Machine,
    *,
    num_steps: int,
    warm: int = 5,
    num_ranks: int = 1,
    seed: int = 0,
) -> list[Path]:
    """The Kineto traces of some steps after a warm-up, one a rank."""
    total = warm + num_steps
    ranks = run(program, machine, total, num_ranks=num_ranks, seed=seed, profiled=True)
    paths = []
    for rank in ranks:
        clock = machine.clocks[rank.number % len(machine.clocks)] + 1e6
        low = rank.marks[warm]
        # The profiler records host events from its beginning on, and what devices run then, whenever it was launched.
        kept = [one for one in rank.events if one["ts"] >= low or (one["tid"] >= 1000 and one["ts"] + one["dur"] > low)]
        events = [{**one, "ts": round(one["ts"] + clock, 3), "dur": round(max(one["dur"], 0.001), 3)} for one in kept]
        top: dict[str, Any] = {"traceEvents": events}
        if num_ranks > 1:
            top["distributedInfo"] = {"backend": "nccl", "rank": rank.number, "world_size": num_ranks}
        path = directory / f"rank{rank.number}.json"
        path.write_text(json.dumps(top))
        paths.append(path)
    return paths

"""A second simulated machine, event by event: hosts of several threads, devices of unlike speed, full queues.

It shares no code with the analysis or with `machine`. Host threads are generators that run until they wait for a
moment that is not known yet; an operation begins when its launch, its stream and the streams that it waits for allow
it, and a collective ends when all of its ranks have come. The truth of "without X" is the same program run without X.

Times are microseconds, as traces have them.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LATENCY, BETWEEN, CALL, RETURN = 7.5, 0.9, 3.2, 7.0
QUEUE = 1024
EVENT = 1.1
NOISE, KERNEL_NOISE = 0.1, 0.015
COMPUTE, COPIES, NETWORK = 7, 14, 20
AUTOGRAD, DEVICES = 99, 5000


@dataclass(eq=False)
class Moment:
    """A moment that becomes known; `waiting` are threads and operations that it lets go on."""

    end: float | None = None
    start: float = 0.0
    waiting: list[Callable[[], None]] = field(default_factory=list)

    def happens(self, start: float, end: float) -> None:
        self.start, self.end = start, end
        waiting, self.waiting = self.waiting, []
        for go_on in waiting:
            go_on()


Running = Generator[tuple[Moment, float], None, Any]
"""A host thread: yields what it waits for, and how long it takes to return from that."""
Without = frozenset[str]


@dataclass(frozen=True, kw_only=True)
class Program:
    """Program of every rank.

    Attributes:
        threads: By name: a thread from its host, the number of steps, and the causes that are left out.
        slow: How much longer each rank's kernels take, without causes.
    """

    threads: dict[str, Callable[[Host, int, Without], Running]]
    num_ranks: int = 1
    slow: Callable[[int, Without], float] = lambda rank, without: 1.0


class World:
    """Moments in order, and the collectives in which ranks meet."""

    def __init__(self, *, profiled: bool, seed: int) -> None:
        self.profiled, self.seed = profiled, seed
        self.begun: set[Moment] = set()
        self.met: dict[int, list[tuple[Moment, float]]] = {}
        self._runnable: list[tuple[float, int, Host, Running]] = []
        self._count = itertools.count()

    def schedule(self, host: Host, running: Running) -> None:
        heapq.heappush(self._runnable, (host.time, next(self._count), host, running))

    def run(self) -> None:
        while self._runnable:
            _, _, host, running = heapq.heappop(self._runnable)
            for moment, returning in running:
                if moment.end is None:
                    moment.waiting.append(lambda m=moment, r=returning, h=host, g=running: self._resume(m, r, h, g))
                    break
                host.time = max(host.time, moment.end + returning)

    def _resume(self, moment: Moment, returning: float, host: Host, running: Running) -> None:
        host.time = max(host.time, moment.end + returning)
        self.schedule(host, running)


@dataclass
class Rank:
    """One process: its streams, the launches so far, and what a profiler recorded."""

    number: int
    slow: float
    last: dict[int, Moment] = field(default_factory=dict)
    launched: list[Moment] = field(default_factory=list)
    awaited: dict[int, list[Moment]] = field(default_factory=dict)
    moments: dict[tuple[str, int], Moment] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    marks: list[float] = field(default_factory=list)
    finished: list[Moment] = field(default_factory=list)
    num_collectives: int = 0

    def moment(self, name: str, number: int) -> Moment:
        return self.moments.setdefault((name, number), Moment())


class Host:
    """One thread of a process."""

    def __init__(self, world: World, rank: Rank, thread: int, name: str) -> None:
        self.world, self.rank, self.thread, self.time = world, rank, thread, 0.0
        self.random = random.Random(f"{world.seed} {rank.number} {name} {world.profiled}")

    def work(self, length: float, num_events: int = 0) -> None:
        self.time += length * self.random.gammavariate(NOISE**-2, NOISE**2) if length else 0.0
        if self.world.profiled:
            self.time += num_events * EVENT * self.random.uniform(0.7, 1.3)

    def record(
        self, category: str, name: str, start: float, end: float, thread: int | None = None, **args: Any
    ) -> None:
        if self.world.profiled:
            event = {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start, "args": args}
            self.rank.events.append({**event, "pid": 10 + self.rank.number, "tid": thread or self.thread})

    def annotate(self, name: str, start: float) -> None:
        self.record("user_annotation", name, start, self.time)

    def launch(
        self, length: float, stream: int, *, category: str = "kernel", name: str = "gemm", ranks: int = 0
    ) -> Running:
        """Launch an operation, or wait until the queue has a place for it; ranks meet in a collective of theirs."""
        rank, begin = self.rank, self.time
        if len(rank.launched) >= QUEUE:
            early = rank.launched[-QUEUE]
            if early.end is None or early.start > self.time:
                yield early, 0.0 if early.end is None else early.start - early.end
        self.work(CALL, 1)
        correlation, done = len(rank.launched) + 1, Moment()
        call = "cudaLaunchKernel" if category == "kernel" else "cudaMemcpyAsync"
        self.record("cuda_runtime", call, begin, self.time, correlation=correlation)
        place = {"device": rank.number, "stream": stream, "correlation": correlation}
        done.waiting.append(lambda: self.record(category, name, done.start, done.end, DEVICES + stream, **place))
        before = [*rank.awaited.pop(stream, []), *([rank.last[stream]] if stream in rank.last else [])]
        rank.last[stream] = done
        rank.launched.append(done)
        if not ranks:
            length *= rank.slow * self.random.gauss(1, KERNEL_NOISE)
        self._begin(done, self.time + LATENCY, before, length, ranks)
        return done

    def _begin(self, done: Moment, issued: float, before: Sequence[Moment], length: float, ranks: int) -> None:
        """Let an operation begin once those before it have ended, and end once its ranks have met."""
        world, rank = self.world, self.rank
        rank.num_collectives += ranks > 0
        number = rank.num_collectives

        def begins() -> None:
            if done in world.begun or any(one.end is None for one in before):
                return
            world.begun.add(done)
            start = max([issued, *(one.end + BETWEEN for one in before)])
            if not ranks:
                done.happens(start, start + length)
                return
            here = world.met.setdefault(number, [])
            here.append((done, start))
            if len(here) == ranks:
                end = max(start for _, start in here) + length
                for one, arrived in here:
                    one.happens(arrived, end)

        for one in before:
            if one.end is None:
                one.waiting.append(begins)
        begins()

    def operator(self, host: float, device: float, stream: int = COMPUTE, name: str = "aten::linear") -> Running:
        """Run an operator that calls another one, which launches a kernel."""
        outer = self.time
        self.work(0.6, 1)
        inner = self.time
        self.work(0.75 * host, 1)
        yield from self.launch(device, stream)
        self.work(0.25 * host)
        self.record("cpu_op", f"{name}_inner", inner, self.time)
        self.work(0.4)
        self.record("cpu_op", name, outer, self.time)

    def let_wait(self, stream: int, other: int) -> None:
        """Let a stream wait for what another one has."""
        for call in ("cudaEventRecord", "cudaStreamWaitEvent"):
            begin = self.time
            self.work(0.8, 1)
            self.record("cuda_runtime", call, begin, self.time)
        if other in self.rank.last:
            self.rank.awaited.setdefault(stream, []).append(self.rank.last[other])


def stepping(step: Callable[[Host, int, Without], Running]) -> Callable[[Host, int, Without], Running]:
    """Return the thread that runs steps."""

    def run(host: Host, num_steps: int, without: Without) -> Running:
        for number in range(num_steps):
            begin = host.time
            host.rank.marks.append(begin)
            yield from step(host, number, without)
            host.annotate(f"ProfilerStep#{number}", begin)
            host.rank.finished.append(host.rank.last[COMPUTE])

    return run


def layers(host: Host, count: int, host_us: float, device_us: float, *, buckets: int = 0, ranks: int = 0) -> Running:
    """Run a forward and a backward pass, which reduces gradients in buckets, and the optimizer's step."""
    for _ in range(count):
        yield from host.operator(host_us, device_us)
    own, host.thread = host.thread, AUTOGRAD
    for number in range(2 * count):
        yield from host.operator(host_us, device_us, name="autograd::engine::evaluate_function: MmBackward0")
        if buckets and (number + 1) % (2 * count // buckets) == 0:
            host.let_wait(NETWORK, COMPUTE)
            yield from host.launch(400.0, NETWORK, name="ncclDevKernel_AllReduce_Sum_f32_RING_LL", ranks=ranks)
    host.thread = own
    if buckets:
        host.let_wait(COMPUTE, NETWORK)
    begin = host.time
    for _ in range(count // 4):
        yield from host.operator(host_us, device_us, name="aten::_foreach_mul_")
    host.annotate("Optimizer.step#AdamW.step", begin)


def copying(length_us: float, device_us: float, ahead: int = 2) -> Callable[[Host, int, Without], Running]:
    """Return a thread that copies batches ahead, on a stream of its own, and waits for each copy."""

    def run(host: Host, num_steps: int, without: Without) -> Running:
        for number in range(num_steps):
            if number >= ahead:
                yield host.rank.moment("used", number - ahead), 5.0
            host.work(length_us)
            begin = host.time
            copied = yield from host.launch(
                device_us, COPIES, category="gpu_memcpy", name="Memcpy HtoD (Pinned -> Device)"
            )
            host.record("cpu_op", "aten::copy_", begin, host.time)
            begin = host.time
            host.work(1.5, 1)
            yield copied, RETURN
            host.record("cuda_runtime", "cudaEventSynchronize", begin, host.time)
            host.rank.moment("copied", number).happens(host.time, host.time)

    return run


def taken(host: Host, number: int) -> Running:
    """Take a batch that a thread has copied."""
    yield host.rank.moment("copied", number), 10.0
    host.rank.moment("used", number).happens(host.time, host.time)


def run(program: Program, num_steps: int, *, profiled: bool, without: Iterable[str] = (), seed: int = 1) -> list[Rank]:
    world, gone = World(profiled=profiled, seed=seed), frozenset(without)
    ranks = [Rank(number, program.slow(number, gone)) for number in range(program.num_ranks)]
    for rank in ranks:
        for thread, (name, begun) in enumerate(program.threads.items(), 1):
            host = Host(world, rank, thread, name)
            world.schedule(host, begun(host, num_steps, gone))
    world.run()
    assert all(len(rank.finished) == num_steps for rank in ranks), "a thread waits for ever"
    return ranks


def step_time(program: Program, *, without: Sequence[str] = (), num_steps: int = 50, warm: int = 14) -> float:
    """Return the mean unprofiled step time in the steady state."""
    ranks = run(program, num_steps, profiled=False, without=without)
    return max((rank.finished[-1].end - rank.finished[warm].end) / (num_steps - 1 - warm) for rank in ranks)


def write_traces(directory: Path, program: Program, *, num_steps: int = 10, warm: int = 6) -> list[Path]:
    """Write the traces of some steps after a warm-up, one a rank, and return their paths."""
    paths = []
    for rank in run(program, warm + num_steps, profiled=True):
        low, clock = rank.marks[warm], 1e6 + 2500 * rank.number
        kept = [e for e in rank.events if e["ts"] >= low or (e["tid"] >= DEVICES and e["ts"] + e["dur"] > low)]
        events = [{**e, "ts": round(e["ts"] + clock, 3), "dur": round(max(e["dur"], 0.001), 3)} for e in kept]
        top: dict[str, Any] = {"traceEvents": events}
        if program.num_ranks > 1:
            top["distributedInfo"] = {"backend": "nccl", "rank": rank.number, "world_size": program.num_ranks}
        path = directory / f"rank{rank.number}.json"
        path.write_text(json.dumps(top))
        paths.append(path)
    return paths

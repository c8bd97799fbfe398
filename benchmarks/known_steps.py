"""Training steps with causes of lost time that can be left out: the pairs of `known_answers.py`.

Three families of models in three kinds of step. On a GPU the batch makes the kind: it grows until the device works so
many times as long on a step as its dispatch takes. Batches are random numbers. Of a read of the device only the wait is
left out: the value is computed on both sides. A pause is so many times as long as the step without it.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from known_models import FAMILIES
from torch import nn

from steptune.tuner.profiling.replay.answers import DISPATCH, STALLS, SYNCHRONISATION

Act = Callable[[torch.Tensor], object]
NUM_BATCHES = 4
LEAST_GROWTH, MOST_GROWTH = 1.2, 3.0
LARGEST_BATCH = 1 << 17
LEAST_PAUSE_S = 0.002
KINDS = {"launch-bound": 0.0, "balanced": 1.15, "compute-bound": 3.0}
"""Least time that the device works on a step over the time in which the host dispatches it."""
CYCLES_PER_S = 2e9
"""No device counts faster: a wait of so many cycles lasts at least a second."""
DISPATCHES = 9


class Step:
    """A training step of a family, in bfloat16 autocast on a GPU.

    Attributes:
        host_s: Time in which the host dispatches a step to an idle device.
        device_s: Time that the device works on a step that was dispatched before it began; 0 on a CPU.
        step_s: Time of one of many steps.
    """

    def __init__(self, family: str, kind: str, device: torch.device, *, small: bool) -> None:
        torch.manual_seed(0)
        model, self._shape = FAMILIES[family](small)
        self.device, self._cuda = device, device.type == "cuda"
        self.model = model.to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True, capturable=self._cuda)
        self._number = 0
        self._resize(2 << list(KINDS).index(kind) if small else 8)
        while not small and self.device_s < KINDS[kind] * self.host_s:
            if self.batch > LARGEST_BATCH:
                raise RuntimeError(
                    f"a batch of {self.batch} samples keeps the device busy {self.device_s / self.host_s:.2f} times as "
                    f"long as its dispatch takes; {kind} requires {KINDS[kind]}: use a wider model"
                )
            # Doubling the batch does not quite double the device's time: no step is larger than it must be.
            growth = min(MOST_GROWTH, max(LEAST_GROWTH, KINDS[kind] * self.host_s / self.device_s))
            self._resize(-(-int(growth * self.batch) // 8) * 8)

    def synchronise(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self.device)

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        self._number += 1
        return self._batches[self._number % NUM_BATCHES]

    def train(self, batch: tuple[torch.Tensor, torch.Tensor], place: str = "", act: Act | None = None) -> None:
        """One update; at a place of it ("forward", "backward", "gradients", "end") something else is done."""
        at = {place: act} if act is not None else {}
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._cuda):
            hidden = self.model[0](batch[0])
            if "forward" in at:
                at["forward"](hidden)
            loss = nn.functional.cross_entropy(self.model[1:](hidden), batch[1])
        if "backward" in at:
            at["backward"](loss)
        loss.backward()
        if "gradients" in at:
            at["gradients"](nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))
        self.optimizer.step()
        if "end" in at:
            at["end"](loss.detach())

    def as_graph(self) -> Callable[[], None]:
        """The step recorded as a CUDA graph: every batch is copied, then the graph replayed."""
        if not self._cuda:
            raise ValueError(f"a CUDA graph requires a CUDA device, not {self.device}")
        static = tuple(tensor.clone() for tensor in self.next_batch())
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.train(static)
        torch.cuda.current_stream().wait_stream(side)
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.train(static)

        def step() -> None:
            for target, source in zip(static, self.next_batch(), strict=True):
                target.copy_(source)
            graph.replay()

        return step

    def _resize(self, batch: int) -> None:
        self.batch = batch
        self._batches = [
            (torch.randn(batch, *self._shape, device=self.device), torch.randint(10, (batch,), device=self.device))
            for _ in range(NUM_BATCHES)
        ]
        for _ in range(3):
            self.train(self.next_batch())
        self.synchronise()
        self.host_s = statistics.median(self._dispatch_s() for _ in range(DISPATCHES))
        self.device_s = min(self._busy_s() for _ in range(3)) if self._cuda else 0.0
        self.step_s = statistics.median(self.seconds(lambda: self.train(self.next_batch()), 3, 1) for _ in range(3))

    def seconds(self, act: Callable[[], None], count: int, num_warm: int) -> float:
        """Time of one of some steps that follow others of their kind: the host has its usual lead."""
        self.synchronise()
        for _ in range(num_warm):
            act()
        began = self._mark()
        for _ in range(count):
            act()
        ended = self._mark()
        self.synchronise()
        if isinstance(began, float):
            return (ended - began) / count
        return began.elapsed_time(ended) / 1e3 / count

    def _mark(self) -> Any:
        """A moment of the device, on a CPU of the clock."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _dispatch_s(self) -> float:
        began = time.perf_counter()
        self.train(self.next_batch())
        took = time.perf_counter() - began
        self.synchronise()
        return took

    def _busy_s(self) -> float:
        torch.cuda._sleep(int(2 * self.host_s * CYCLES_PER_S))
        began = self._mark()
        self.train(self.next_batch())
        ended = self._mark()
        self.synchronise()
        return began.elapsed_time(ended) / 1e3


def _nothing(value: torch.Tensor) -> None:
    pass


def _read(value: torch.Tensor) -> float:
    return value.item()


def _mean(value: torch.Tensor) -> torch.Tensor:
    return value.detach().float().mean()


def _mask(value: torch.Tensor) -> torch.Tensor:
    """True for the first half of the numbers in the order of a permutation: their number is known to the host."""
    flat = value.detach().flatten()[:1024]
    return flat.argsort() < len(flat) // 2


def _sleep(step_s: float) -> Act:
    pause_s = max(LEAST_PAUSE_S, 0.6 * step_s)
    return lambda value: time.sleep(pause_s)


def _add(count: int) -> int:
    total = 0
    for number in range(count):
        total += number * number
    return total


def _loop(step_s: float) -> Act:
    count = _as_long_as(max(LEAST_PAUSE_S, 1.2 * step_s), _add, 100_000)
    return lambda value: _add(count)


def _collection(step_s: float) -> Act:
    """Collects garbage among so many living objects that it takes 0.9 of a step."""
    gc.collect()
    gc.freeze()
    living = [[number] for number in range(100_000)]
    count = _as_long_as(max(LEAST_PAUSE_S, 0.9 * step_s), lambda count: gc.collect(), len(living))
    living = [[number] for number in range(count)]
    return lambda value: len(living) + gc.collect()


def _as_long_as(pause_s: float, act: Callable[[int], object], count: int) -> int:
    """How often something is done in a time, from how long a number of times takes."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        act(count)
        times.append(time.perf_counter() - began)
    return max(1, round(count * pause_s / min(times)))


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A cause of lost time.

    Attributes:
        rule: Finding that names it.
        edit: Question to the replay that leaves it out.
        place: Of the step at which it acts; empty where it is how the whole step is launched.
        act: What is done there, by the time of a step without it, in seconds.
        instead: Done there on the other side.
    """

    rule: str
    edit: str
    place: str = ""
    act: Callable[[float], Act] = lambda step_s: _nothing
    instead: Act = _nothing

    def sides(self, step: Step) -> tuple[Callable[[], None], Callable[[], None]]:
        """The step with the cause and without it."""
        if not self.place:
            return lambda: step.train(step.next_batch()), step.as_graph()
        act = self.act(step.step_s)
        return (
            lambda: step.train(step.next_batch(), self.place, act),
            lambda: step.train(step.next_batch(), self.place, self.instead),
        )


def _synchronisation(place: str, act: Act, instead: Act) -> Cause:
    return Cause(rule="synchronisation", edit=SYNCHRONISATION, place=place, act=lambda step_s: act, instead=instead)


def _stall(act: Callable[[float], Act]) -> Cause:
    return Cause(rule="host_stall", edit=STALLS, place="backward", act=act)


CAUSES = {
    "item early": _synchronisation("forward", lambda value: _mean(value).item(), _mean),
    "item late": _synchronisation("end", _read, _nothing),
    "norm": _synchronisation("gradients", _read, _nothing),
    "nonzero": _synchronisation(
        "forward",
        lambda value: torch.nonzero(_mask(value)),
        lambda value: torch.nonzero_static(mask := _mask(value), size=len(mask) // 2),
    ),
    "sleep": _stall(_sleep),
    "loop": _stall(_loop),
    "collection": _stall(_collection),
    "cuda graph": Cause(rule="launch_bound", edit=DISPATCH),
}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A step with a cause and without it."""

    kind: str
    cause: str
    family: str

    @property
    def name(self) -> str:
        return f"{self.kind}: {self.cause}"


def _pairs() -> tuple[Pair, ...]:
    """Each kind with each cause; families take turns, so that each has every kind and most causes."""
    families = list(FAMILIES)
    return tuple(
        Pair(kind=kind, cause=cause, family=families[(row + column) % len(families)])
        for row, kind in enumerate(KINDS)
        for column, cause in enumerate(CAUSES)
    )


PAIRS = _pairs()

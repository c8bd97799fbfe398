"""Programs with known causes: what analysers are asked, and what is true.

A pair is a program with a cause and the same program without it. `SETS` are two: "development" was looked at while the
replay was written, "held out" has other parameters and was looked at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from counterfactuals.machine import Do, Machine, Program


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A program and the cause that is to be left out.

    Attributes:
        cause: "synchronisation", "stalls", "loader", "late_ranks" or "launches".
    """

    name: str
    cause: str
    program: Program
    machine: Machine
    num_ranks: int = 1
    num_steps: int = 6
    seed: int = 0


Extra = Callable[[int, int, int], list[Do]]
"""Further operations of a rank in a step, before its operation number n."""


def none(rank: int, step: int, number: int) -> list[Do]:
    return []


def training(
    *, host: float, device: float, operations: int, buckets: int = 0, network: float = 0.0, extra: Extra = none
) -> Program:
    """A step: a batch, forward pass, backward pass (with collectives), an optimizer."""

    def step(rank: int, number: int) -> list[Do]:
        found = [Do(kind="batch", cause="loader", stays=20.0)]
        every = max(1, operations // 2 // buckets) if buckets else 0
        for place in range(operations):
            found += extra(rank, number, place)
            found.append(Do(kind="launch", host=host, device=device))
            in_backward = place - operations // 2
            if buckets and in_backward >= 0 and in_backward % every == every - 1 and in_backward // every < buckets:
                found.append(Do(kind="reduce", device=network / buckets))
        if buckets:
            found.append(Do(kind="join"))
        found += extra(rank, number, operations)
        found += [Do(kind="launch", host=2 * host, device=3 * device, name="optimizer") for _ in range(6)]
        found += extra(rank, number, operations + 1)
        return found

    return step


def _at(places: set[int], what: Do, *, every: int = 1, rank: int | None = None, rotating: int = 0) -> Extra:
    def extra(own: int, step: int, place: int) -> list[Do]:
        late = rank is None or own == (step % rotating if rotating else rank)
        return [what] if place in places and step % every == 0 and late else []

    return extra


SETS = {
    "development": (
        *(120, 6, Machine(event_cost=0.8, noise=0.08), 0),
        {"host": (16.0, 6.0), "even": (16.0, 19.0), "device": (12.0, 45.0)},
    ),
    "held out": (
        *(170, 8, Machine(event_cost=1.1, noise=0.06), 1000),
        {"host": (21.0, 9.0), "even": (20.0, 25.0), "device": (14.0, 60.0)},
    ),
}
"""Operations, steps, the machine, the number before the first seed; host and device time of an operation by regime."""


def pairs(kind: str) -> Iterator[Pair]:
    """All pairs of a set.

    Args:
        kind: "development" or "held out".
    """
    count, steps, machine, seed, regimes = SETS[kind]
    for regime, (host, device) in regimes.items():
        build = partial(training, host=host, device=device, operations=count)
        scale = count * max(host, device)
        make = partial(Pair, machine=machine, num_steps=steps)
        read = Do(kind="read", cause="synchronisation", stays=1.0)
        for where, places in (("early", {count // 8}), ("middle", {count // 2}), ("late", {count + 1})):
            seed += 1
            yield make(
                name=f"{regime}: read {where}",
                cause="synchronisation",
                program=build(extra=_at(places, read)),
                seed=seed,
            )
        seed += 1
        many = set(range(10, count, 30))
        yield make(name=f"{regime}: reads", cause="synchronisation", program=build(extra=_at(many, read)), seed=seed)
        for part in (0.1, 0.4, 1.2):
            seed += 1
            pause = Do(kind="pause", host=max(1500.0, part * scale), cause="stalls", stays=10.0)
            yield make(
                name=f"{regime}: pause {part}", cause="stalls", program=build(extra=_at({count // 3}, pause)), seed=seed
            )
        seed += 1
        collection = Do(kind="pause", host=2500.0 + 0.5 * scale, cause="stalls", stays=10.0)
        program = build(extra=_at({count // 5}, collection, every=3))
        yield make(name=f"{regime}: pause in every third step", cause="stalls", program=program, seed=seed)
        both = _both(
            _at({count // 4}, read),
            _at({count // 2}, Do(kind="pause", host=0.5 * scale + 1500, cause="stalls", stays=10.0)),
        )
        for cause in ("synchronisation", "stalls"):
            seed += 1
            yield make(name=f"{regime}: read and pause", cause=cause, program=build(extra=both), seed=seed)
        for workers, part in ((0, 0.1), (0, 0.8), (1, 1.6), (2, 1.5), (2, 4.0), (6, 9.0)):
            seed += 1
            loads = Machine(**{**_fields(machine), "workers": workers, "batch": part * scale})
            yield make(
                name=f"{regime}: {workers} workers {part}", cause="loader", program=build(), machine=loads, seed=seed
            )
        seed += 1
        yield make(name=f"{regime}: launches", cause="launches", program=build(), seed=seed)
    for regime in ("host", "even", "device"):
        host, device = regimes[regime]
        scale = count * max(host, device)
        for buckets in (1, 4, 20):
            for rotating in (False, True):
                for ranks, part in ((2, 0.3), (4, 0.8)):
                    seed += 1
                    pause = Do(kind="pause", host=max(1500.0, part * scale), cause="late_ranks", stays=10.0)
                    late = _at({count // 3}, pause, rank=1, rotating=ranks if rotating else 0)
                    program = training(
                        host=host, device=device, operations=count, buckets=buckets, network=0.2 * scale, extra=late
                    )
                    clocks = tuple(float(1000 * number) for number in range(ranks))
                    yield Pair(
                        name=f"{regime}: {ranks} ranks, {'rotating' if rotating else 'fixed'}, {buckets} buckets",
                        cause="late_ranks",
                        program=program,
                        machine=Machine(**{**_fields(machine), "clocks": clocks}),
                        num_ranks=ranks,
                        num_steps=steps if steps % ranks == 0 else steps + ranks - steps % ranks,
                        seed=seed,
                    )


def _both(*extras: Extra) -> Extra:
    return lambda rank, step, place: [do for extra in extras for do in extra(rank, step, place)]


def _fields(machine: Machine) -> dict:
    return {name: getattr(machine, name) for name in machine.__dataclass_fields__}

"""End times of compute and communication tasks: an event simulation of one rank.

A rank has two lanes. Each runs its tasks one after the other, in the order in which they were issued, and a task
begins only after the tasks in its `after` have ended. While both lanes run, compute loses a share of its speed to the
communication beside it (`contention`): kernels of collectives take multiprocessors and memory bandwidth.

With less communication no task ends later: as long as compute has come equally far in two simulations that differ in
the cost of communication only, the one with less of it is never the busier one.

An assumption: all communication shares one lane, so that an all-gather never overtakes a reduce-scatter, nor do
exchanges inside a host run beside those between hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class Lane(StrEnum):
    """Resource that a task occupies."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task of compute or of communication.

    Attributes:
        work_ns: Time that it takes by itself.
        after: Indices of earlier tasks in the list that must end first.
    """

    lane: Lane
    work_ns: float
    after: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Simulated times of a step's tasks.

    Attributes:
        ends_ns: End time of every task, from the beginning of the step.
        work_ns: Total time of each lane's tasks by themselves.
        slowed_ns: Time by which concurrent communication prolonged compute.
    """

    ends_ns: tuple[float, ...]
    work_ns: dict[Lane, float]
    slowed_ns: float

    @property
    def step_ns(self) -> float:
        return max(self.ends_ns, default=0.0)

    @property
    def exposed_ns(self) -> float:
        """Time that communication adds to the step."""
        return max(0.0, self.step_ns - self.work_ns[Lane.COMPUTE])


def in_turn(tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks without overlap: each waits for the one before it."""
    return [replace(task, after=(number - 1,) if number else ()) for number, task in enumerate(tasks)]


def simulate(tasks: Sequence[Task], contention: float = 0.0) -> Timeline:
    """Simulate the tasks of one rank, and return when each of them ends.

    Args:
        contention: Share of its speed that compute loses while communication runs, from 0 to less than 1.
    """
    assert 0 <= contention < 1, f"contention must be in [0, 1), got {contention}"
    queues = {lane: [number for number, task in enumerate(tasks) if task.lane is lane] for lane in Lane}
    places = dict.fromkeys(Lane, 0)
    left_ns = [task.work_ns for task in tasks]
    ends_ns: list[float | None] = [None] * len(tasks)
    now_ns = slowed_ns = 0.0
    for _ in tasks:  # one of them ends in every round
        heads = [queue[places[lane]] for lane, queue in queues.items() if places[lane] < len(queue)]
        running = {tasks[n].lane: n for n in heads if all(ends_ns[before] is not None for before in tasks[n].after)}
        assert running, "a task must not wait for one that was issued later"
        speeds = dict.fromkeys(Lane, 1.0)
        if len(running) == len(Lane):
            speeds[Lane.COMPUTE] = 1 - contention
        lane, passed_ns = min(((at, left_ns[n] / speeds[at]) for at, n in running.items()), key=lambda item: item[1])
        now_ns += passed_ns
        for other, number in running.items():
            left_ns[number] = max(0.0, left_ns[number] - passed_ns * speeds[other])
        slowed_ns += passed_ns * (1 - speeds[Lane.COMPUTE])
        ends_ns[running[lane]] = now_ns
        places[lane] += 1
    return Timeline(
        ends_ns=tuple(end for end in ends_ns if end is not None),
        work_ns={lane: sum(task.work_ns for task in tasks if task.lane is lane) for lane in Lane},
        slowed_ns=slowed_ns,
    )

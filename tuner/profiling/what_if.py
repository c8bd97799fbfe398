"""Step times if something were different: bounds for the first screen, not promises.

Where the steps can be replayed, what their graph of dependencies can show is simulated (`replay`): those are
estimates. Every other scenario is a formula over the exclusive categories of a breakdown; what it removes cannot come
back elsewhere in the model, in reality it often does (a loader that waited 58.7 ms of a step gave 35 ms when workers
took over). So its result is the most that can be had, to be measured.

Sources: Amdahl (1967) for what is removed; reference section 9 of the field notes for the others: a replayed
graph leaves the device's own time; accumulation divides what happens once per optimizer step; of a larger
batch, only what grows with samples grows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from steptune.tuner.costs.categories import COMPUTE, HOST_CATEGORIES, Category
from steptune.tuner.profiling.replay.answers import INPUT, LAUNCHES, ROOFLINE, SYNCHRONISATION, saved_share
from steptune.tuner.records import Breakdown, StepFacts
from steptune.tuner.trace_records import WhatIf

ACCUMULATION = 4
LARGER_BATCH = 2
WORTHWHILE = 0.01
"""A scenario that gains less is not shown."""
FIXED = (*HOST_CATEGORIES, Category.OPTIMIZER, Category.COMMUNICATION)
"""Costs of a step that do not depend on its batch: launches, the optimizer, the gradients' way to the other ranks."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One thing that could be different.

    Attributes:
        saved_ns: Nanoseconds that a step of the same samples would take less, from its categories.
        devices: Kinds of device on which it makes sense.
        applies: Whether it is not so already.
        replayed: Name of the replay's edit that is the same.
    """

    name: str
    saved_ns: Callable[[Breakdown], float]
    devices: tuple[str, ...] = ("cpu", "cuda")
    applies: Callable[[StepFacts], bool] = lambda facts: True
    replayed: str = ""


def _hidden_communication(breakdown: Breakdown) -> float:
    """Communication that held compute up, at most the compute that hides nothing yet."""
    exposed = breakdown.removable_ns(Category.COMMUNICATION)
    hidden = breakdown.overlapped.get(Category.COMMUNICATION.value, 0) / breakdown.num_steps
    return min(exposed, max(0.0, breakdown.removable_ns(*COMPUTE, Category.RECOMPUTE) - hidden))


def _without_stalls(breakdown: Breakdown, *categories: str) -> float:
    """Time that is gone with these categories, without stalls: those are no launches, and stay."""
    stalled = breakdown.stalled_share * breakdown.removable_ns(Category.HOST) if Category.HOST in categories else 0.0
    return breakdown.removable_ns(*categories) - stalled


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        name="batches were always ready on the device",
        saved_ns=lambda b: b.removable_ns(Category.DATA_WAIT, Category.EPOCH_RESTART, Category.COPY_H2D),
        replayed=INPUT,
    ),
    Scenario(
        name="the host never waited for the device",
        saved_ns=lambda b: b.removable_ns(Category.SYNCHRONISATION),
        devices=("cuda",),
        replayed=SYNCHRONISATION,
    ),
    Scenario(
        name="the step were one replayed graph: no Python, no launches",
        saved_ns=lambda b: _without_stalls(b, *HOST_CATEGORIES),
        devices=("cuda",),
        applies=lambda facts: not facts.cuda_graphs,
        replayed=LAUNCHES,
    ),
    Scenario(
        name="kernels with a known floor ran at their roofline, which is a bound",
        # Only a simulation tells what faster kernels leave of the step.
        saved_ns=lambda b: 0.0,
        devices=("cuda",),
        replayed=ROOFLINE,
    ),
    Scenario(name="communication were hidden behind compute", saved_ns=_hidden_communication),
    Scenario(
        name=f"gradients were exchanged and applied every {ACCUMULATION}th step",
        saved_ns=lambda b: (
            (1 - 1 / ACCUMULATION) * b.removable_ns(Category.COMMUNICATION, Category.OPTIMIZER, Category.OPTIMIZER_HOST)
        ),
    ),
    Scenario(
        name=f"the batch were {LARGER_BATCH} times as large",
        saved_ns=lambda b: (1 - 1 / LARGER_BATCH) * _without_stalls(b, *FIXED),
    ),
    Scenario(name="nothing were computed again", saved_ns=lambda b: b.removable_ns(Category.RECOMPUTE)),
)


def what_ifs(breakdown: Breakdown) -> tuple[WhatIf, ...]:
    """The scenarios that would save something, the largest gain first; none of a bad capture."""
    if breakdown.quality.problems:
        return ()
    step_ns = sum(breakdown.per_step_ns.values())
    kind = "cpu" if breakdown.device == "cpu" else "cuda"
    found = []
    for scenario in SCENARIOS:
        share = saved_share(breakdown.replay, scenario.replayed) if scenario.replayed else None
        saved_ns = scenario.saved_ns(breakdown) if share is None else share * step_ns
        # A step that would all but vanish only waited: such a gain is no number.
        left_ns = step_ns - saved_ns
        if kind not in scenario.devices or not scenario.applies(breakdown.facts):
            continue
        if saved_ns >= WORTHWHILE * step_ns > 0 and left_ns > WORTHWHILE * step_ns:
            found.append(
                WhatIf(
                    scenario=scenario.name,
                    step_time_ns=round(left_ns),
                    gain=step_ns / left_ns,
                    replayed=share is not None,
                )
            )
    return tuple(sorted(found, key=lambda one: -one.gain))

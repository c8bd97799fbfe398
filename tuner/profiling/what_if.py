"""Step times under hypothetical changes: bounds for a first screening, not promises.

If the steps can be replayed, scenarios that their dependency graph covers are simulated (`replay`): those are
estimates. Every other scenario is a formula over the exclusive categories of a breakdown; time that it removes cannot
come back elsewhere in the model, but in reality often does (removing a wait of 58.7 ms per step for the loader saved 35
ms when workers took over). So its result is an upper bound, to be measured.

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
"""Minimum relative gain for which a scenario is shown."""
FIXED = (*HOST_CATEGORIES, Category.OPTIMIZER, Category.COMMUNICATION)
"""Categories whose cost per step does not depend on the batch size: launches, the optimizer, sending gradients to other
ranks.
"""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One hypothetical change of the step.

    Attributes:
        saved_ns: Nanoseconds saved in a step of the same samples, from its categories.
        devices: Kinds of device to which it applies.
        applies: True unless the step already is as after the change.
        replayed: Name of the equivalent edit of the replay.
    """

    name: str
    saved_ns: Callable[[Breakdown], float]
    devices: tuple[str, ...] = ("cpu", "cuda")
    applies: Callable[[StepFacts], bool] = lambda facts: True
    replayed: str = ""


def _hidden_communication(breakdown: Breakdown) -> float:
    """Return the communication that delayed compute and could be hidden behind compute: at most the compute time that
    hides no communication yet.
    """
    exposed = breakdown.removable_ns(Category.COMMUNICATION)
    hidden = breakdown.overlapped.get(Category.COMMUNICATION.value, 0) / breakdown.num_steps
    return min(exposed, max(0.0, breakdown.removable_ns(*COMPUTE, Category.RECOMPUTE) - hidden))


def _without_stalls(breakdown: Breakdown, *categories: str) -> float:
    """Return the time saved if these categories vanished. Stalls remain, because they are not launches."""
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
        name="every kernel with a known roofline ran at it (an upper bound)",
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
    Scenario(name="no activations were recomputed", saved_ns=lambda b: b.removable_ns(Category.RECOMPUTE)),
)


def what_ifs(breakdown: Breakdown) -> tuple[WhatIf, ...]:
    """Return the scenarios that would save something, the largest gain first; none for a bad capture."""
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

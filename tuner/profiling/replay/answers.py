"""Questions to a replay: the steps without their synchronisations, stalls, batches, launches or late ranks.

Where the recorded steps cannot be replayed, the answer says why and states no time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import reduce

import numpy as np

from steptune.tuner.costs.categories import COMPUTING
from steptune.tuner.profiling.intervals import Ints
from steptune.tuner.profiling.replay import ranks as several
from steptune.tuner.profiling.replay.calibration import (
    Cost,
    Levels,
    at_level,
    calibrated,
    cost_at,
    levels,
    with_unprofiled_pace,
)
from steptune.tuner.profiling.replay.chain import ALLOCATION, BATCH, SYNC
from steptune.tuner.profiling.replay.graph import LEAST_STEPS, Graph
from steptune.tuner.profiling.replay.scenarios import (
    stalls,
    without_allocation,
    without_blocking_copies,
    without_input,
    without_launches,
    without_loader,
    without_stalls,
    without_synchronisation,
)
from steptune.tuner.profiling.replay.simulate import step_time_ns
from steptune.tuner.records import Breakdown, Replay

MOST_ERROR = 0.05
"""Largest error of a replay of the unchanged steps."""
MOST_UNEXPLAINED = 0.05
LEAST_KNOWN = 0.95
MOST_DIFFERENCE = 0.02
"""Share of the step by which a wait in the simulated steps may differ from that in all steps."""
SYNCHRONISATION, STALLS, LOADER, INPUT, ALLOCATIONS, COPIES, LAUNCHES, DISPATCH, LATE_RANKS, ROOFLINE = (
    "synchronisation",
    "stalls",
    "loader",
    "input",
    "allocation",
    "copies",
    "launches",
    "dispatch",
    "late_ranks",
    "roofline",
)
"""Questions. `launches` leaves stalls and waits where they are; `dispatch` is the cost of launches once those are gone.
"""
HINDRANCES = (STALLS, SYNCHRONISATION, INPUT, ALLOCATIONS)
"""Causes that hide the host's launches as a reason for a wait."""
CAUGHT_UP = (SYNCHRONISATION, STALLS)
FAR_APART = 0.1
"""Difference between levels of cost below which the answers are equal."""
NO_LAUNCHES = "no marked steps with work that they launch are recorded"
Edit = Callable[[Graph], Graph]


def replay(graph: Graph, unprofiled_ns: float | None = None, *, workers: bool = False) -> Replay:
    """Duration of one rank's steps without each cause.

    Args:
        unprofiled_ns: Time of a step without the profiler; without it the profiler's cost is not taken off.
        workers: Worker processes make the batches.
    """
    refusal = refused(graph)
    error = abs(step_time_ns(graph, usual_delays=True) / graph.recorded_ns - 1) if not refusal else 1.0
    if not refusal and error > MOST_ERROR:
        refusal = f"the replay of the unchanged steps takes {1 + error:.2f} times what was recorded"
    if refusal:
        return Replay(recorded_ns=round(graph.recorded_ns), refusal=refusal)
    recorded, found = graph, Levels()
    if unprofiled_ns:
        found = levels(lambda level: step_time_ns(at_level(recorded, level)), unprofiled_ns)
    graph = _unprofiled(recorded, found.taken, unprofiled_ns)
    whole = step_time_ns(graph)
    edits = _edits(graph, workers=workers)
    saved = {cause: 1 - step_time_ns(edit(graph)) / whole for cause, edit in edits.items()}
    unhindered = _unhindered(graph, edits)
    saved[DISPATCH] = (step_time_ns(unhindered) - step_time_ns(without_launches(unhindered))) / whole
    cost = cost_at(recorded, found.taken)
    return Replay(
        recorded_ns=round(graph.recorded_ns),
        step_time_ns=round(whole),
        error=error,
        event_cost_ns=round(cost.event_ns) if unprofiled_ns else None,
        host_slowdown=round(cost.slowdown, 3) if unprofiled_ns else None,
        unprofiled_error=abs(whole / unprofiled_ns - 1) if unprofiled_ns else None,
        saved={cause: max(0.0, share) for cause, share in saved.items()},
        uncertain=_uncertain(recorded, found, edits, unprofiled_ns) if unprofiled_ns else {},
    )


def _unprofiled(graph: Graph, level: float, unprofiled_ns: float | None) -> Graph:
    """The graph without the profiler's cost of a level, at the pace of the unprofiled steps."""
    graph = at_level(graph, level)
    return with_unprofiled_pace(graph, step_time_ns, unprofiled_ns) if unprofiled_ns else graph


def _uncertain(graph: Graph, found: Levels, edits: Mapping[str, Edit], unprofiled_ns: float | None) -> dict[str, float]:
    """Half of what lies between the saved shares at both ends of the costs that agree with the unprofiled step.

    Of causes that only cost something as long as the host catches up: what they cost depends on its pace.
    """
    causes = [cause for cause in CAUGHT_UP if cause in edits]
    if not causes or found.largest - found.least < FAR_APART:
        return {}
    ends = [_unprofiled(graph, level, unprofiled_ns) for level in (found.least, found.largest)]
    wholes = [step_time_ns(end) for end in ends]
    shares = {c: [1 - step_time_ns(edits[c](e)) / t for e, t in zip(ends, wholes, strict=True)] for c in causes}
    return {cause: round(abs(least - largest) / 2, 4) for cause, (least, largest) in shares.items()}


def saved_at(graph: Graph, replay: Replay, unprofiled_ns: float | None, nodes: Ints) -> float:
    """Share of the step that is saved if the host does not wait in some nodes.

    Args:
        replay: Of this graph, without a refusal.
    """
    graph = as_replayed(graph, replay, unprofiled_ns)
    return max(0.0, 1 - step_time_ns(without_synchronisation(graph, nodes)) / step_time_ns(graph))


def as_replayed(graph: Graph, replay: Replay, unprofiled_ns: float | None) -> Graph:
    """The graph whose steps a replay timed: without the profiler's cost, at the pace of the unprofiled steps.

    Args:
        replay: Of this graph, without a refusal.
    """
    graph = calibrated(graph, cost_of(replay))
    return with_unprofiled_pace(graph, step_time_ns, unprofiled_ns) if unprofiled_ns else graph


def cost_of(replay: Replay) -> Cost:
    """The profiler's cost that a replay takes off."""
    return Cost(event_ns=replay.event_cost_ns or 0.0, slowdown=replay.host_slowdown or 1.0)


def saved_share(replay: Replay | None, cause: str) -> float | None:
    """Share of the step that is saved without a cause; None where the steps cannot be replayed, or do not show it."""
    return None if replay is None or not_replayed(replay, cause) else replay.saved[cause]


def saved_range(replay: Replay | None, cause: str) -> tuple[float, float] | None:
    """Share of the step saved without a cause; None where the steps cannot be replayed or do not show it."""
    if replay is None or replay.refusal or cause not in replay.saved:
        return None
    share, error = replay.saved[cause], replay.unprofiled_error or 0.0
    return (share, share) if error <= MOST_ERROR else (max(0.0, share - error), min(1.0, share + error))


def not_replayed(replay: Replay, cause: str) -> str:
    """Minimum and maximum share saved without a cause: one figure, or a range where the replay deviates from the
    unprofiled step. None where nothing was replayed.
    """
    if replay.refusal:
        return replay.refusal
    if replay.unprofiled_error is not None and replay.unprofiled_error > MOST_ERROR:
        return f"the replay misses the time of the unprofiled step by {replay.unprofiled_error:.0%}"
    return "" if cause in replay.saved else "the replayed steps do not show it"


def of_all_steps(replay: Replay, breakdown: Breakdown, num_replayed: int) -> Replay:
    """Extend the replay of a window's first steps to all; refused where they differ in their waits.

    Args:
        breakdown: Of all steps.
    """
    if replay.refusal or not breakdown.steps or num_replayed >= breakdown.num_steps:
        return replay
    first, whole = _waits(breakdown, num_replayed), _waits(breakdown, breakdown.num_steps)
    shares = {
        name: abs(first.get(name, 0.0) - time) / breakdown.step_time_ns * breakdown.num_steps
        for name, time in whole.items()
    }
    name = max(shares, key=lambda name: shares[name], default="")
    if not name or shares[name] <= MOST_DIFFERENCE:
        return replay
    why = f"only the first {num_replayed} of {breakdown.num_steps} steps were simulated, and the others differ"
    said = name.replace("_", " ")
    return Replay(recorded_ns=replay.recorded_ns, refusal=f"{why}: {said} by {shares[name]:.0%} of the step")


def _waits(breakdown: Breakdown, num_steps: int) -> dict[str, float]:
    """Nanoseconds per step of the first steps by what does not compute, and in stalls."""
    steps = breakdown.steps[:num_steps]
    names = {name for step in breakdown.steps for name in step} - set(COMPUTING)
    waits = {name: sum(step.get(name, 0) for step in steps) / num_steps for name in sorted(names)}
    if breakdown.stalls is not None and breakdown.stalls.steps:
        stalled = breakdown.stalls.steps
        mean = breakdown.stalls.idle_ns / len(stalled)
        waits["stalls"] = mean * sum(step <= num_steps for step in stalled) / num_steps
    return waits


def refused(graph: Graph) -> str:
    """Reason why the steps cannot be replayed; empty where they can."""
    operations = graph.operations
    if graph.recorded_ns <= 0:
        return "the steps take no time"
    if graph.num_steps < LEAST_STEPS:
        return "a single step shows no steady state"
    if operations.known < LEAST_KNOWN:
        return f"the launches of {1 - operations.known:.0%} of the device's time are not recorded"
    if operations.unexplained > MOST_UNEXPLAINED:
        return f"for {operations.unexplained:.0%} of the time operations start later than anything recorded explains"
    return ""


def _edits(graph: Graph, *, workers: bool) -> Mapping[str, Edit]:
    """The causes that the steps have."""
    kinds = set(np.unique(graph.chain.kind).tolist())
    found: dict[str, Edit] = {}
    if SYNC in kinds:
        found[SYNCHRONISATION] = without_synchronisation
    if graph.chain.waits:
        found[COPIES] = without_blocking_copies
        found[SYNCHRONISATION] = without_synchronisation
    if len(stalls(graph.chain)):
        found[STALLS] = without_stalls
    if BATCH in kinds:
        found[LOADER] = lambda g: without_loader(g, in_main_process=not workers)
    if ALLOCATION in kinds:
        found[ALLOCATIONS] = without_allocation
    found[INPUT] = lambda g: without_input(g, in_main_process=not workers)
    found[LAUNCHES] = without_launches
    return found


def _unhindered(graph: Graph, edits: Mapping[str, Edit]) -> Graph:
    return reduce(lambda edited, edit: edit(edited), [edits[c] for c in HINDRANCES if c in edits], graph)


def replay_ranks(graphs: Mapping[int, Graph], unprofiled_ns: float | None = None, *, workers: bool = False) -> Replay:
    """Duration of the steps of all ranks if none is late, and what launches cost them.

    Args:
        graphs: By rank.
        workers: Worker processes make the batches.
    """
    recorded = max(graph.recorded_ns for graph in graphs.values())
    refusal = next((reason for reason in map(refused, graphs.values()) if reason), "")
    if recorded <= 0:
        return Replay(recorded_ns=0, refusal=refusal)
    try:
        joint = several.meet([graphs[rank] for rank in sorted(graphs)])
    except several.UnlikeRanksError as reason:
        return Replay(recorded_ns=round(recorded), refusal=refusal or str(reason))
    error = abs(several.step_time_ns(joint, usual_delays=True) / recorded - 1)
    if error > MOST_ERROR:
        refusal = refusal or f"the replay of the unchanged steps takes {1 + error:.2f} times what was recorded"
    if refusal:
        return Replay(recorded_ns=round(recorded), refusal=refusal)

    recorded_ranks = joint

    def at(level: float) -> several.Ranks:
        return _of_each(recorded_ranks, lambda graph: at_level(graph, level))

    level = levels(lambda c: several.step_time_ns(at(c)), unprofiled_ns).taken if unprofiled_ns else 0.0
    joint = at(level)
    costs = [cost_at(graph, level) for graph in recorded_ranks.graphs]
    whole = several.step_time_ns(joint)
    punctual = several.without_late_ranks(joint)
    unhindered = _of_each(punctual, lambda graph: _unhindered(graph, _edits(graph, workers=workers)))
    launched = several.step_time_ns(unhindered) - several.step_time_ns(_of_each(unhindered, without_launches))
    saved = {
        LATE_RANKS: 1 - several.step_time_ns(punctual) / whole,
        LAUNCHES: 1 - several.step_time_ns(_of_each(joint, without_launches)) / whole,
        DISPATCH: launched / whole,
    }
    return Replay(
        recorded_ns=round(recorded),
        step_time_ns=round(whole),
        error=error,
        event_cost_ns=round(max(cost.event_ns for cost in costs)) if unprofiled_ns else None,
        host_slowdown=round(max(cost.slowdown for cost in costs), 3) if unprofiled_ns else None,
        unprofiled_error=abs(whole / unprofiled_ns - 1) if unprofiled_ns else None,
        saved={cause: max(0.0, share) for cause, share in saved.items()},
    )


def _of_each(ranks: several.Ranks, edit: Edit) -> several.Ranks:
    """All ranks with one edit."""
    return replace(ranks, graphs=tuple(map(edit, ranks.graphs)))

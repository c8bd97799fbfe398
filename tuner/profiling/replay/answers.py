"""Answers of a replay: step times without synchronisations, stalls, waits for batches, launches or late ranks.

If the recorded steps cannot be replayed, the answer gives the reason and no time.
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
"""Maximum relative error of a replay of the unchanged steps."""
MOST_UNEXPLAINED = 0.05
LEAST_KNOWN = 0.95
MOST_DIFFERENCE = 0.02
"""Maximum difference between the mean time of a wait in the simulated steps and its mean time in all steps, as a share
of the step.
"""
SYNCHRONISATION, STALLS, LOADER, INPUT, ALLOCATIONS, COPIES, LAUNCHES, DISPATCH, LATE_RANKS, ROOFLINE, EXTRA = (
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
    "extra_work",
)
"""Names of the causes that a replay can remove. Removing `launches` leaves stalls and waits in place; `dispatch` is the
cost of launches once stalls and waits are removed.
"""
HINDRANCES = (STALLS, SYNCHRONISATION, INPUT, ALLOCATIONS)
"""Causes that make the host wait and so hide the cost of its launches."""
CAUGHT_UP = (SYNCHRONISATION, STALLS)
FAR_APART = 0.1
"""Minimum width of the range of profiler costs that agree with the unprofiled step; a narrower range gives no
uncertainty.
"""
NO_LAUNCHES = "the trace has no marked steps with recorded launches"
Edit = Callable[[Graph], Graph]


def replay(graph: Graph, unprofiled_ns: float | None = None, *, workers: bool = False) -> Replay:
    """Replay one rank's steps: unchanged, and once with each cause removed.

    Args:
        unprofiled_ns: Time of a step without the profiler; if None, the profiler's cost is not subtracted.
        workers: True if worker processes make the batches.
    """
    refusal = refused(graph)
    error = abs(step_time_ns(graph, usual_delays=True) / graph.recorded_ns - 1) if not refusal else 1.0
    if not refusal and error > MOST_ERROR:
        refusal = f"the replay of the unchanged steps misses the recorded step time by {error:.0%}"
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
    """Return the graph as it would be without the profiler: the profiler's cost at the given level is subtracted, and
    batches come at the pace of the unprofiled steps.
    """
    graph = at_level(graph, level)
    return with_unprofiled_pace(graph, step_time_ns, unprofiled_ns) if unprofiled_ns else graph


def _uncertain(graph: Graph, found: Levels, edits: Mapping[str, Edit], unprofiled_ns: float | None) -> dict[str, float]:
    """Return the uncertainty of the saving from removing each cause: half the difference between the savings at the
    lowest and the highest profiler cost that agree with the unprofiled step. Savings are shares of the step.

    Only causes from which the host can catch up are covered: their cost depends on the host's pace.
    """
    causes = [cause for cause in CAUGHT_UP if cause in edits]
    if not causes or found.largest - found.least < FAR_APART:
        return {}
    ends = [_unprofiled(graph, level, unprofiled_ns) for level in (found.least, found.largest)]
    wholes = [step_time_ns(end) for end in ends]
    shares = {c: [1 - step_time_ns(edits[c](e)) / t for e, t in zip(ends, wholes, strict=True)] for c in causes}
    return {cause: round(abs(least - largest) / 2, 4) for cause, (least, largest) in shares.items()}


def saved_at(graph: Graph, replay: Replay, unprofiled_ns: float | None, nodes: Ints) -> float:
    """Return the share of the step that is saved if the host does not wait at the given nodes of its chain.

    Args:
        replay: Replay of this graph, without a refusal.
    """
    graph = as_replayed(graph, replay, unprofiled_ns)
    return max(0.0, 1 - step_time_ns(without_synchronisation(graph, nodes)) / step_time_ns(graph))


def as_replayed(graph: Graph, replay: Replay, unprofiled_ns: float | None) -> Graph:
    """Return the graph of the steps as a replay timed it: without the profiler's cost, and with batches at the pace of
    the unprofiled steps.

    Args:
        replay: Replay of this graph, without a refusal.
    """
    graph = calibrated(graph, cost_of(replay))
    return with_unprofiled_pace(graph, step_time_ns, unprofiled_ns) if unprofiled_ns else graph


def cost_of(replay: Replay) -> Cost:
    """Return the profiler's cost that a replay subtracts."""
    return Cost(event_ns=replay.event_cost_ns or 0.0, slowdown=replay.host_slowdown or 1.0)


def saved_share(replay: Replay | None, cause: str) -> float | None:
    """Return the share of the step that removing a cause saves; None if the replay was refused, misses the unprofiled
    step time, or lacks the cause.
    """
    return None if replay is None or not_replayed(replay, cause) else replay.saved[cause]


def saved_range(replay: Replay | None, cause: str) -> tuple[float, float] | None:
    """Return the minimum and maximum share of the step that removing a cause saves: equal, or a range if the replayed
    step time deviates from the unprofiled one. None if nothing was replayed.
    """
    if replay is None or replay.refusal or cause not in replay.saved:
        return None
    share, error = replay.saved[cause], replay.unprofiled_error or 0.0
    return (share, share) if error <= MOST_ERROR else (max(0.0, share - error), min(1.0, share + error))


def not_replayed(replay: Replay, cause: str) -> str:
    """Return the reason why a replay gives no single figure for a cause; empty if it does."""
    if replay.refusal:
        return replay.refusal
    if replay.unprofiled_error is not None and replay.unprofiled_error > MOST_ERROR:
        return f"the replayed step time differs from the unprofiled one by {replay.unprofiled_error:.0%}"
    return "" if cause in replay.saved else "the replayed steps show no such cost"


def of_all_steps(replay: Replay, breakdown: Breakdown, num_replayed: int) -> Replay:
    """Extend the replay of a window's first steps to all steps; refuse if the waits of the first steps differ from
    those of all.

    Args:
        breakdown: Breakdown of all steps.
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
    why = f"only the first {num_replayed} of {breakdown.num_steps} steps were simulated, but the other steps differ"
    said = name.replace("_", " ")
    return Replay(recorded_ns=replay.recorded_ns, refusal=f"{why}: {said} by {shares[name]:.0%} of the step")


def _waits(breakdown: Breakdown, num_steps: int) -> dict[str, float]:
    """Return, for the first steps, the nanoseconds per step of stalls and of each category other than compute."""
    steps = breakdown.steps[:num_steps]
    names = {name for step in breakdown.steps for name in step} - set(COMPUTING)
    waits = {name: sum(step.get(name, 0) for step in steps) / num_steps for name in sorted(names)}
    if breakdown.stalls is not None and breakdown.stalls.steps:
        stalled = breakdown.stalls.steps
        mean = breakdown.stalls.idle_ns / len(stalled)
        waits["stalls"] = mean * sum(step <= num_steps for step in stalled) / num_steps
    return waits


def refused(graph: Graph) -> str:
    """Return the reason why the steps cannot be replayed; empty if they can."""
    operations = graph.operations
    if graph.recorded_ns <= 0:
        return "the steps have zero length"
    if graph.num_steps < LEAST_STEPS:
        return "a single step shows no steady state"
    if operations.known < LEAST_KNOWN:
        return f"no launch is recorded for {1 - operations.known:.0%} of the device's time"
    if operations.unexplained > MOST_UNEXPLAINED:
        return (
            f"for {operations.unexplained:.0%} of the time, operations are delayed, but no recorded event explains why"
        )
    return ""


def _edits(graph: Graph, *, workers: bool) -> Mapping[str, Edit]:
    """Return the edits of the graph that remove causes, for those causes that occur in the steps."""
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
    """Replay the steps of all ranks: unchanged, without late ranks, and without the cost of launches.

    Args:
        graphs: Graph of each rank.
        workers: True if worker processes make the batches.
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
        refusal = refusal or f"the replay of the unchanged steps misses the recorded step time by {error:.0%}"
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
    """Return the ranks with one edit applied to all of their graphs."""
    return replace(ranks, graphs=tuple(map(edit, ranks.graphs)))

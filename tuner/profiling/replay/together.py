"""Savings from removing several causes together: what each cause saves in addition to the causes removed before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from itertools import accumulate

from msgspec import structs

from steptune.tuner.profiling.replay import ranks as several
from steptune.tuner.profiling.replay.answers import (
    ALLOCATIONS,
    DISPATCH,
    LATE_RANKS,
    LAUNCHES,
    LOADER,
    STALLS,
    SYNCHRONISATION,
    Edit,
    as_replayed,
    cost_of,
)
from steptune.tuner.profiling.replay.calibration import calibrated, own_cost
from steptune.tuner.profiling.replay.graph import Graph
from steptune.tuner.profiling.replay.scenarios import (
    without_allocation,
    without_launches,
    without_loader,
    without_stalls,
    without_synchronisation,
)
from steptune.tuner.profiling.replay.simulate import step_time_ns
from steptune.tuner.records import Replay

EDITED: tuple[str, ...] = (LATE_RANKS, STALLS, SYNCHRONISATION, LOADER, ALLOCATIONS, DISPATCH)
"""Causes in the order in which they are removed from the graphs. Late ranks can only be found before stalls are
removed, and stalls before launches are removed.
"""


def name_of(causes: Sequence[str] | frozenset[str]) -> str:
    """Return the name of a set of causes in `Replay.together`."""
    return "+".join(cause for cause in EDITED if cause in causes)


def with_together(
    replay: Replay, graph: Graph, unprofiled_ns: float | None, causes: Sequence[str], *, workers: bool
) -> Replay:
    """Return the replay of one rank with joint savings: of the first cause, of the first two, of the first three, and
    so on.

    Args:
        replay: Replay of this graph, without a refusal.
        workers: True if worker processes make the batches.
    """
    graph = as_replayed(graph, replay, unprofiled_ns)
    edits = _edits(workers=workers)

    def time_without(gone: frozenset[str]) -> float:
        return step_time_ns(reduce(lambda edited, name: edits[name](edited), _ordered(gone, edits), graph))

    return _having(replay, [cause for cause in causes if cause in edits], time_without)


def with_ranks_together(replay: Replay, graphs: Mapping[int, Graph], causes: Sequence[str], *, workers: bool) -> Replay:
    """Return the replay of all ranks with joint savings as in `with_together`: each cause is removed from all ranks.

    Args:
        graphs: Graph of each rank.
        replay: Replay of all these graphs, without a refusal.
    """
    largest = cost_of(replay)
    most_ns = max(graph.chain.recording_ns for graph in graphs.values())
    ranks = [graphs[rank] for rank in sorted(graphs)]
    joint = several.meet([calibrated(graph, own_cost(graph, largest, most_ns)) for graph in ranks])
    edits = _edits(workers=workers)

    def time_without(gone: frozenset[str]) -> float:
        left = several.without_late_ranks(joint) if LATE_RANKS in gone else joint
        for name in _ordered(gone, edits):
            left = dataclasses.replace(left, graphs=tuple(map(edits[name], left.graphs)))
        return several.step_time_ns(left)

    return _having(replay, [cause for cause in causes if cause in EDITED], time_without)


def saved_without(replay: Replay, causes: frozenset[str]) -> float | None:
    """Return the share of the step that removing all of these causes saves.

    If this set was not simulated, return the least saved by any simulated set that includes it; None if no such set
    was simulated.
    """
    if not causes:
        return 0.0
    known = {frozenset(name.split("+")): share for name, share in replay.together.items()}
    alone = {cause: LAUNCHES if cause == DISPATCH else cause for cause in EDITED}
    known |= {frozenset({cause}): replay.saved[name] for cause, name in alone.items() if name in replay.saved}
    return min((share for gone, share in known.items() if gone >= causes), default=None)


def _edits(*, workers: bool) -> Mapping[str, Edit]:
    return {
        STALLS: without_stalls,
        SYNCHRONISATION: without_synchronisation,
        LOADER: partial(without_loader, in_main_process=not workers),
        ALLOCATIONS: without_allocation,
        DISPATCH: without_launches,
    }


def _ordered(gone: frozenset[str], edits: Mapping[str, Edit]) -> list[str]:
    return [name for name in EDITED if name in gone and name in edits]


def _having(replay: Replay, causes: Sequence[str], time_without: Callable[[frozenset[str]], float]) -> Replay:
    sets = accumulate((frozenset({cause}) for cause in causes), frozenset[str].union)
    unknown = [gone for gone in sets if len(gone) > 1 or saved_without(replay, gone) is None]
    if not unknown:
        return replay
    whole = time_without(frozenset())
    shares = {name_of(gone): max(0.0, 1 - time_without(gone) / whole) for gone in unknown}
    return structs.replace(replay, together={**replay.together, **shares})

"""Edits of a graph, each of which removes one cause of delay from the steps. The gains of two edits do not add up;
measure them together by applying both edits to one graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from steptune.tuner.costs.categories import PRIORITY, Category
from steptune.tuner.profiling.intervals import Ints, median
from steptune.tuner.profiling.replay.chain import ALLOCATION, BATCH, HAND_OVER_NS, LAUNCH, SYNC, Chain
from steptune.tuner.profiling.replay.graph import Graph
from steptune.tuner.profiling.replay.operations import INFERRED_NS
from steptune.tuner.profiling.stalls import LEAST_NS, MOST_NS, PACES

Floats = npt.NDArray[np.float64]
SYNC_CALL_NS = 2_000.0
"""Maximum duration, in nanoseconds, of a synchronising call that has nothing to wait for."""
GRAPH_AFTER_NS = 400.0
"""Gap between operations of a CUDA graph, in nanoseconds: medians of 260 and 420 ns in two captures of an H200, against
1000 and 1120 ns between launched operations in the queue.
"""

BY_NODE = "kind", "row", "start", "end", "step", "gap", "length", "silent", "gap_events", "length_events", "returns"
BY_OPERATION = "row", "start", "end", "stream", "duration", "latency", "ahead", "after", "collective", "category"
"""Names of the columns with one value per node of the chain, and of those with one value per operation."""


def _with(graph: Graph, chain: Chain) -> Graph:
    return replace(graph, chain=chain)


def pace_ns(chain: Chain) -> float:
    """Return the median time between two launches."""
    launches = chain.kind == LAUNCH
    return median(chain.gap[launches]) if launches.any() else 0.0


def stalls(chain: Chain) -> Ints:
    """Return the nodes that follow a host stall: a gap without launches that is too long to be operator dispatch.

    Work of an optimizer's step before its launches does not count: it has a separate category.
    """
    limit = float(np.clip(PACES * pace_ns(chain), LEAST_NS, MOST_NS))
    found: Ints = np.flatnonzero(chain.gap * chain.silent > limit)
    return found


def without_synchronisation(graph: Graph, nodes: Ints | None = None) -> Graph:
    """Return the graph in which the host never waits for the device, except for copies to it from pageable memory.

    Args:
        nodes: Nodes that do not wait; by default all.
    """
    chain, category = graph.chain, graph.operations.category
    first = np.searchsorted(graph.operations.node, np.arange(len(chain) + 1))

    def stays(node: int) -> bool:
        return bool(chain.kind[node] == LAUNCH and category[first[node]] == PRIORITY[Category.COPY_H2D])

    length = chain.length.copy()
    chosen = np.ones(len(chain), dtype=bool) if nodes is None else np.isin(np.arange(len(chain)), nodes)
    syncs = (chain.kind == SYNC) & chosen
    length[syncs] = np.minimum(length[syncs], SYNC_CALL_NS)
    waits = {node: streams for node, streams in chain.waits.items() if not chosen[node] or stays(node)}
    return _with(graph, chain.having(length=length, waits=waits))


def without_stalls(graph: Graph) -> Graph:
    """Return the graph in which every stall lasts as long as the usual time between two launches."""
    chain = graph.chain
    gap = chain.gap.copy()
    gap[stalls(chain)] = pace_ns(chain)
    return _with(graph, chain.having(gap=gap, tail=min(chain.tail, max(LEAST_NS, pace_ns(chain)))))


def without_loader(graph: Graph, *, in_main_process: bool) -> Graph:
    """Return the graph in which every batch is ready when the host asks for it."""
    chain = graph.chain
    length = chain.length.copy()
    batches = chain.kind == BATCH
    if batches.any():
        least = 0.0 if in_main_process else min(HAND_OVER_NS, float(length[batches].min()))
        length[batches] = np.minimum(length[batches], least)
    return _with(graph, chain.having(length=length, period=0.0))


def without_allocation(graph: Graph) -> Graph:
    """Return the graph in which no call allocates or frees memory."""
    chain = graph.chain
    return _with(graph, chain.having(length=np.where(chain.kind == ALLOCATION, 0.0, chain.length)))


def without_blocking_copies(graph: Graph) -> Graph:
    """Return the graph in which copies to the device come from pinned memory: the host does not wait for them."""
    chain, category = graph.chain, graph.operations.category
    first = np.searchsorted(graph.operations.node, np.arange(len(chain) + 1))
    gone = {
        node
        for node in chain.waits
        if chain.kind[node] == LAUNCH and category[first[node]] == PRIORITY[Category.COPY_H2D]
    }
    waits = {node: streams for node, streams in chain.waits.items() if node not in gone}
    return _with(graph, chain.having(waits=waits))


def without_input(graph: Graph, *, in_main_process: bool) -> Graph:
    """Return the graph in which every batch is on the device when the host asks for it, without copies."""
    graph = without_blocking_copies(without_loader(graph, in_main_process=in_main_process))
    copies = graph.operations.category == PRIORITY[Category.COPY_H2D]
    operations = replace(graph.operations, duration=np.where(copies, 0.0, graph.operations.duration))
    return replace(graph, operations=operations)


def without_steps(graph: Graph, steps: Sequence[int]) -> Graph:
    """Return the graph without the given steps.

    Args:
        steps: Numbers of the steps that are left out, from 0.
    """
    chain, operations = graph.chain, graph.operations
    nodes = np.flatnonzero(~np.isin(chain.step, steps))
    rows = np.flatnonzero(np.isin(operations.node, nodes))
    node_of = {node: number for number, node in enumerate(nodes.tolist())}
    row_of = {row: number for number, row in enumerate(rows.tolist())}
    depends = {
        row_of[row]: tuple(row_of[other] for other in others if other in row_of)
        for row, others in operations.depends.items()
        if row in row_of
    }
    return replace(
        graph,
        num_steps=graph.num_steps - len(steps),
        chain=replace(
            chain,
            **{name: getattr(chain, name)[nodes] for name in BY_NODE},
            waits={node_of[node]: streams for node, streams in chain.waits.items() if node in node_of},
        ),
        operations=replace(
            operations,
            **{name: getattr(operations, name)[rows] for name in BY_OPERATION},
            node=np.searchsorted(nodes, operations.node[rows]),
            depends={row: others for row, others in depends.items() if others},
            group=(),
        ),
    )


def at_floors(graph: Graph, floor_ns: Floats) -> Graph:
    """Return the graph with each operation's duration capped at its floor (its least possible time).

    Args:
        floor_ns: Least time by row of `trace.work`.
    """
    operations = graph.operations
    duration = np.minimum(operations.duration, floor_ns[operations.row])
    return replace(graph, operations=replace(operations, duration=duration))


def without_launches(graph: Graph) -> Graph:
    """Return the graph in which launches cost the host nothing, as in a CUDA graph; stalls, batches, allocations and
    waits stay.
    """
    chain, operations = graph.chain, graph.operations
    gap = np.zeros(len(chain))
    long = stalls(chain)
    gap[long] = chain.gap[long]
    length = np.where(chain.kind == LAUNCH, 0.0, chain.length)
    tail = chain.tail if chain.tail > LEAST_NS else 0.0
    after = np.where(operations.after <= INFERRED_NS, np.minimum(operations.after, GRAPH_AFTER_NS), operations.after)
    return replace(
        graph,
        chain=chain.having(gap=gap, length=length, tail=tail, queue=0),
        operations=replace(operations, after=after),
    )

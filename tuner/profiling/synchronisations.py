"""Calls in which the host waits for the device, by place, and the share of the step that each place costs.

A wait costs the host its lead, and the device idles later. So its cost is not its length: the steps
are simulated without the waits of one place. Costs of several places do not add up.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from steptune.tuner.profiling.capture import Capture
from steptune.tuner.profiling.replay.answers import SYNCHRONISATION, saved_at, saved_share
from steptune.tuner.profiling.replay.chain import SYNC
from steptune.tuner.profiling.replay.graph import Graph
from steptune.tuner.profiling.source_lines import SourceLines
from steptune.tuner.profiling.trace import Kind
from steptune.tuner.records import Replay
from steptune.tuner.trace_records import Synchronisation

MOST_PLACES = 5
"""Maximum number of places that are simulated: those where the host waits longest."""
NOTABLE = 0.005
"""Minimum saving of all waits together, as a share of the step, for the places to be simulated individually."""
MARKS = r"^(ProfilerStep|Optimizer\.)"
Place = tuple[str, str, str]


def synchronisations(
    capture: Capture,
    source: SourceLines,
    graph: Graph,
    replay: Replay,
    unprofiled_step_time_ns: int | None,
) -> tuple[Synchronisation, ...]:
    """Return the places of the simulated steps in which the host waits, the most expensive first."""
    chain, host = graph.chain, capture.trace.host
    places: defaultdict[Place, list[int]] = defaultdict(list)
    for node in np.flatnonzero(chain.kind == SYNC).tolist():
        places[_place(capture, source, int(chain.row[node]))].append(node)
    waits = {
        place: int((host.end[chain.row[nodes]] - host.start[chain.row[nodes]]).sum()) for place, nodes in places.items()
    }
    longest = sorted(places, key=lambda place: -waits[place])[:MOST_PLACES]
    together = saved_share(replay, SYNCHRONISATION)
    saved: dict[Place, float] = {}
    if together is not None and together >= NOTABLE:
        saved = {place: saved_at(graph, replay, unprofiled_step_time_ns, np.array(places[place])) for place in longest}
    found = [
        Synchronisation(
            call=call,
            source=line,
            module=module,
            count=len(places[call, line, module]),
            wait_ns=waits[call, line, module],
            num_steps=graph.num_steps,
            saved_share=saved.get((call, line, module), None if together is None else 0.0),
        )
        for call, line, module in longest
    ]
    return tuple(sorted(found, key=lambda one: -(one.saved_share or 0.0)))


def _place(capture: Capture, source: SourceLines, row: int) -> Place:
    """Return the outermost operator around a call (`aten::item`), or the call itself, with source line and module."""
    host, names = capture.trace.host, capture.trace.names
    start, thread = host.start[row], host.thread[row]
    around = (host.kind == Kind.OPERATOR) & (host.thread == thread) & (host.start <= start) & (host.end > start)
    # Traces before 2022 have marks of steps as operators.
    rows = np.flatnonzero(around & ~capture.trace.names_matching(MARKS)[host.name])
    if len(rows) == 0:
        return names[host.name[row]], source.at(int(start), int(thread)), ""
    outer, inner = int(rows[0]), int(rows[-1])
    return names[host.name[outer]], source.of(outer), source.modules.name(inner)

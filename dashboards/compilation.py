"""Compilation in a trial: graph breaks, recompilations, and functions that the compiler gave up on."""

from __future__ import annotations

from typing import NamedTuple

from steptune.dashboards import units
from steptune.tuner.records import Compilation


class CompiledRow(NamedTuple):
    """A kind of event during compilation, with its reason and its count."""

    what: str
    times: int
    reason: str
    place: str


def get_compilation_info(compilation: Compilation | None) -> list[CompiledRow]:
    """Return the most frequent events of each kind; empty where nothing was compiled."""
    if compilation is None:
        return []
    kinds = (
        ("graph break", compilation.graph_breaks),
        ("compiled again", compilation.recompilations),
        ("no CUDA graph", compilation.cudagraph_skips),
    )
    return [CompiledRow(what, e.count, e.reason, e.place) for what, events in kinds for e in events]


def compilation_sentence(compilation: Compilation) -> str:
    """State the counts in words: `24 graphs, no graph break, 22 recompilations, 4 s of compilation`."""
    parts = [
        units.counted(compilation.num_graphs, "graph"),
        units.counted(compilation.num_graph_breaks, "graph break")
        if compilation.num_graph_breaks
        else "no graph break",
        units.counted(compilation.num_recompilations, "recompilation"),
        *(
            [f"compilation given up {units.counted(compilation.num_given_up, 'time')}"]
            if compilation.num_given_up
            else []
        ),
        *(
            [f"{units.counted(compilation.num_cudagraph_skips, 'graph')} run without CUDA graphs"]
            if compilation.num_cudagraph_skips
            else []
        ),
        *(
            [f"{units.counted(compilation.late_graphs, 'graph')} compiled after the warm-up"]
            if compilation.late_graphs
            else []
        ),
        f"{units.duration(compilation.seconds)} of compilation",
    ]
    return ", ".join(parts)

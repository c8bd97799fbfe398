"""Record of torch.compile in a trial."""

from __future__ import annotations

from steptune.tuner.records.base import Record


class CompilationEvent(Record):
    """Event during compilation of the model, with its number of occurrences.

    Attributes:
        reason: Reason that TorchDynamo or Inductor states.
        place: Function or line; empty where none is stated.
        count: Number of occurrences.
    """

    reason: str
    place: str
    count: int


class Compilation(Record):
    """Record of torch.compile in a trial.

    Attributes:
        num_graphs: Graphs that were compiled.
        num_graph_breaks: Places where a graph ended and Python took over.
        graph_breaks: The most frequent graph breaks.
        num_recompilations: Recompilations because a guard of an earlier compilation failed.
        recompilations: The most frequent recompilations, with the guard that failed.
        num_cudagraph_skips: Graphs that were to run as CUDA graphs but do not.
        cudagraph_skips: Reasons for these skips.
        seconds: Time spent compiling.
        cache_hits: Graphs found in the study's cache.
        cache_misses: Graphs not found in the study's cache.
    """

    num_graphs: int
    num_graph_breaks: int = 0
    graph_breaks: tuple[CompilationEvent, ...] = ()
    num_recompilations: int = 0
    recompilations: tuple[CompilationEvent, ...] = ()
    num_given_up: int = 0
    """Number of times that TorchDynamo gave up on a function after too many recompilations and ran it uncompiled."""
    num_cudagraph_skips: int = 0
    cudagraph_skips: tuple[CompilationEvent, ...] = ()
    late_graphs: int = 0
    """Graphs compiled after the warm-up, during the measurement."""
    seconds: float = 0.0
    cache_hits: int = 0
    cache_misses: int = 0

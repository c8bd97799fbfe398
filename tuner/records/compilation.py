"""Record of torch.compile in a trial."""

from __future__ import annotations

from steptune.tuner.records.base import Record


class CompilationEvent(Record):
    """Event during compilation of the model, with its number of occurrences.

    Attributes:
        reason: What TorchDynamo or Inductor says.
        place: Function or line; empty where it does not say.
        count: How often.
    """

    reason: str
    place: str
    count: int


class Compilation(Record):
    """Record of torch.compile in a trial.

    Attributes:
        num_graphs: Graphs that were compiled.
        num_graph_breaks: Places where a graph had to end and Python went on.
        graph_breaks: The most frequent of them.
        num_recompilations: Compilations because a guard of an earlier one failed.
        recompilations: The most frequent of them, with the guard.
        num_cudagraph_skips: Graphs that were asked to be CUDA graphs, and are not.
        cudagraph_skips: Why.
        seconds: Spent compiling.
        cache_hits: Graphs that were found in the study's cache.
        cache_misses: Graphs that were not.
    """

    num_graphs: int
    num_graph_breaks: int = 0
    graph_breaks: tuple[CompilationEvent, ...] = ()
    num_recompilations: int = 0
    recompilations: tuple[CompilationEvent, ...] = ()
    num_given_up: int = 0
    """Times that a function was compiled so often that it runs as it is from then on."""
    num_cudagraph_skips: int = 0
    cudagraph_skips: tuple[CompilationEvent, ...] = ()
    late_graphs: int = 0
    """Graphs that were compiled after the warm-up, in the midst of what was measured."""
    seconds: float = 0.0
    cache_hits: int = 0
    cache_misses: int = 0

"""Record of torch.compile in this process: graphs, breaks, and recompilations with reasons and source lines.

TorchDynamo keeps records of its own; they are read here and nowhere else. A function that was compiled too often is
given up: from then on it runs as it is, however fast the figures of a trial then look.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import psutil

from steptune.tuner.records import Compilation, CompilationEvent

if TYPE_CHECKING:
    import torch

NUM_EVENTS = 10
"""Maximum number of recorded events of each kind, the most frequent first."""
NUM_METRICS = 1024
"""Number of compilations for which TorchDynamo keeps metrics in this process; its default is 64."""
REASON_LENGTH = 300
CLOSING_S = 0.2
"""Maximum seconds to wait for a pool of compile workers to close. A pool that has started closes in a few milliseconds.
"""
_GIVEN_UP = "recompile limit exceeded"
_SKIPPING = "skipping cudagraphs"


def compile_in_place(module: torch.nn.Module, mode: str, dynamic: bool | None) -> None:
    """Compile a module in place, even one of torch's own classes.

    TorchDynamo begins no graph in a frame of torch's own code, so `module.compile()` alone does nothing
    for an `nn.Sequential` of torch's own layers or an `nn.TransformerEncoderLayer`: their forward pass
    gets a frame of Steptune's.
    """
    watch_compilation()
    forward = module.forward
    if forward.__module__.partition(".")[0] == "torch":

        def framed(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

        module.forward = framed
    module.compile(mode=mode, dynamic=dynamic)


def compile_apart(what: str) -> None:
    """Separate the cache entries of everything compiled from here on, by adding to the cache keys a setting that torch
    omits.

    Which back end `scaled_dot_product_attention` calls is decided when a graph is traced, and is no part of the keys of
    AOTAutograd's and Inductor's caches: without this a candidate gets the back end that another one was compiled with.
    """
    from torch.compiler import config

    if what not in config.cache_key_tag.split(";"):
        config.cache_key_tag = ";".join(filter(None, (config.cache_key_tag, what)))


def allow_recompilations(num_blocks: int) -> None:
    """Raise TorchDynamo's recompilation limit for repeated blocks, which share one code object.

    By default TorchDynamo compiles 8 variants of a code object. Blocks differ in guarded values (a layer's index, a
    cache) and in training mode: each may need two variants.
    """
    import torch._dynamo

    wanted = 8 + 2 * num_blocks
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, wanted)
    torch._dynamo.config.accumulated_recompile_limit = max(torch._dynamo.config.accumulated_recompile_limit, 4 * wanted)


def watch_compilation() -> None:
    """Start recording all compilations, and why CUDA graphs were skipped."""
    import torch._dynamo.utils
    import torch._logging

    torch._dynamo.utils.set_compilation_metrics_limit(NUM_METRICS)
    for artifact in ("cudagraphs", "perf_hints"):
        logger = logging.getLogger(f"torch._inductor.cudagraph_utils.__{artifact}")
        if _SKIPS not in logger.handlers:
            logger.addHandler(_SKIPS)


def end_compile_workers() -> None:
    """End Inductor's worker processes; Inductor starts new ones when it needs them again.

    Their start keeps a core busy for some ten seconds, long after the first steps where the code comes from a cache.
    Meanwhile every parallel region on the CPU waits for the thread that shares that core: collating a batch of 128
    images took 1 s instead of 5 ms on a machine of 16 cores.
    """
    module = sys.modules.get("torch._inductor.async_compile")
    if module is None:
        return
    for pool in tuple(module._pool_set):
        closing = threading.Thread(target=pool.shutdown)
        closing.start()
        closing.join(CLOSING_S)
        if closing.is_alive() and hasattr(pool, "process"):
            _kill_family(pool.process.pid)  # it listens once it has started, and it is not needed any more
        closing.join()
    module.after_fork()


def _kill_family(pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        for process in (*parent.children(recursive=True), parent):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


class _Skips(logging.Handler):
    """Log handler that records why Inductor ran compiled code without CUDA graphs. Inductor reports the reasons only in
    its log.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.reasons: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if _SKIPPING in text:
            self.reasons[_shortened(text.partition(_SKIPPING)[2].removeprefix(" due to "))] += 1


_SKIPS = _Skips()


def num_graphs() -> int:
    """Return how many graphs torch.compile has created in this process so far (0 if it was never used)."""
    utils = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["stats"]["unique_graphs"]) if utils is not None else 0


def compilation(late_graphs: int = 0) -> Compilation | None:
    """Return the record of compilation so far; None where nothing was compiled.

    Args:
        late_graphs: Number of graphs created after the warm-up.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None or not (utils.counters["frames"]["total"] or num_graphs()):
        return None
    metrics = utils.get_compilation_metrics()
    recompiled = [m for m in metrics if m.recompile_reason and m.co_name]
    unimplemented = {**utils.counters["unimplemented"], **utils.counters["graph_break"]}
    given_up = sum(count for text, count in unimplemented.items() if _GIVEN_UP in text)
    skips = int(utils.counters["inductor"]["cudagraph_skips"])
    return Compilation(
        num_graphs=num_graphs(),
        num_graph_breaks=int(sum(utils.counters["graph_break"].values())),
        graph_breaks=_counted((r.reason, _innermost(r.user_stack)) for r in utils.graph_break_reasons),
        num_recompilations=len(recompiled),
        recompilations=_counted(
            (_guard(m.recompile_reason), f"{m.co_name} ({m.co_filename}, line {m.co_firstlineno})") for m in recompiled
        ),
        num_given_up=given_up,
        num_cudagraph_skips=skips,
        cudagraph_skips=tuple(
            CompilationEvent(reason=reason, place="", count=count)
            for reason, count in _SKIPS.reasons.most_common(NUM_EVENTS)
        ),
        late_graphs=late_graphs,
        seconds=sum(m.entire_frame_compile_time_s or 0.0 for m in metrics),
        cache_hits=int(utils.counters["inductor"]["fxgraph_cache_hit"]),
        cache_misses=int(utils.counters["inductor"]["fxgraph_cache_miss"]),
    )


def _counted(pairs: Iterable[tuple[str, str]]) -> tuple[CompilationEvent, ...]:
    counts = Counter((_shortened(reason), place) for reason, place in pairs)
    return tuple(
        CompilationEvent(reason=reason, place=place, count=count)
        for (reason, place), count in counts.most_common(NUM_EVENTS)
    )


def _innermost(stack: Iterable[Any]) -> str:
    frames = list(stack)
    return f"{frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line or ''}".rstrip(": ") if frames else ""


def _guard(reason: str) -> str:
    """Return a guard without its compilation's number: `0/3: L['self'].index == 3 # ...`."""
    return re.sub(r"^\s*(-\s*)?\d+/\d+:\s*", "", reason.strip().partition("\n")[0])


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= REASON_LENGTH else f"{line[:REASON_LENGTH]}…"

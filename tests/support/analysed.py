"""Small traces of a training loop, and analyses made by hand."""

from pathlib import Path
from typing import Any

from trace_events import Event, copy, launched, note, operator, runtime, step, write_trace

from steptune.tuner.costs.categories import CATEGORIES
from steptune.tuner.records import Breakdown, CaptureQuality, GapSite, KernelStats
from steptune.tuner.trace_records import GapStats, RankAnalysis, TraceAnalysis

STEP_US = 1000
GEMM, ADAM = "ampere_sgemm_128x64_nn", "multi_tensor_apply_kernel<FusedAdam>"


def loop_events(num_steps: int = 3, *, wait_us: int = 400, gemm_us: int = 300, origin_us: int = 5000) -> list[Event]:
    """Steps of one millisecond: waits for data, copies the batch, multiplies, updates, idles."""
    events: list[Event] = []
    for number in range(num_steps):
        at, link = origin_us + number * STEP_US, 10 * number
        events += [
            step(number, at, at + STEP_US),
            note("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at, at + wait_us),
            runtime("cudaMemcpyAsync", at + wait_us, at + wait_us + 5, link + 1),
            copy("Memcpy HtoD (Pageable -> Device)", at + wait_us + 5, at + wait_us + 25, link + 1),
            operator("aten::mm", at + wait_us + 10, at + wait_us + 20),
            *launched(GEMM, at + wait_us + 12, at + wait_us + 30, at + wait_us + 30 + gemm_us, link + 2),
            note("Optimizer.step#AdamW.step", at + wait_us + 40, at + wait_us + 60),
            *launched(ADAM, at + wait_us + 45, at + wait_us + 30 + gemm_us, at + wait_us + 60 + gemm_us, link + 3),
        ]
    return events


def write_loop(path: Path, *, rank: int | None = None, num_ranks: int = 2, **options: Any) -> Path:
    top = {} if rank is None else {"distributedInfo": {"rank": rank, "world_size": num_ranks, "backend": "nccl"}}
    return write_trace(path, loop_events(**options), **top)


def make_breakdown(steps: list[dict[str, int]], **fields: Any) -> Breakdown:
    """Make a breakdown of these steps, given in nanoseconds by category."""
    totals = {i.category.value: sum(s.get(i.category.value, 0) for s in steps) for i in CATEGORIES}
    given = {
        "rank": 0,
        "device": "cuda:0",
        "quality": CaptureQuality(num_events=100, num_steps=len(steps)),
        **fields,
    }
    return Breakdown(
        num_steps=len(steps), step_time_ns=sum(totals.values()), categories=totals, steps=tuple(steps), **given
    )


def make_kernel(name: str, count: int, total_ns: int, category: str = "compute_matmul") -> KernelStats:
    return KernelStats(
        name=name,
        category=category,
        count=count,
        total_ns=total_ns,
        share=0.1,
        mean_ns=total_ns // count,
        max_ns=total_ns,
        tensor_cores=False,
    )


def make_gaps(*sites: GapSite) -> GapStats:
    return GapStats(
        count=sum(site.count for site in sites),
        total_ns=sum(site.total_ns for site in sites),
        median_ns=0,
        p99_ns=0,
        histogram={},
        time_ns={},
        longest=(),
        sites=sites,
    )


def make_rank(breakdown: Breakdown, **fields: Any) -> RankAnalysis:
    given = {"file": f"rank{breakdown.rank}.json", "num_ranks": 1, "device_names": {"cuda:0": "A100"}, **fields}
    return RankAnalysis(
        rank=breakdown.rank, framing="chunked", num_events=100, num_lost=0, breakdowns=(breakdown,), **given
    )


def make_analysis(*ranks: RankAnalysis, **fields: Any) -> TraceAnalysis:
    return TraceAnalysis(ranks=ranks, **fields)

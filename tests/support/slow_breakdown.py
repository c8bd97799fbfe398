"""The definition of a breakdown, written as slowly and plainly as it reads.

Works on the events of a trace file, not on the product's columns; time is cut at every boundary of
every event, and each piece is asked for its category. Only the name tables are the product's.
"""

import gzip
import json
import re
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from steptune.tuner.costs.categories import (
    COMPUTE,
    PRIORITY,
    Category,
    classify_copy,
    classify_kernel,
    classify_operator,
)
from steptune.tuner.profiling import gaps, steps
from steptune.tuner.profiling import regions as product

HOST_KINDS = ("cpu_op", "operator", "user_annotation")
RUNTIME_KINDS = ("cuda_runtime", "cuda_driver", "runtime")
KERNEL_KINDS = ("kernel",)
COPY_KINDS = ("gpu_memcpy", "gpu_memset", "memcpy", "memset")
_kernel_category = cache(classify_kernel)
STICKY = (Category.OPTIMIZER, Category.DATA_WAIT, Category.EPOCH_RESTART)


@dataclass(frozen=True)
class Span:
    kind: str
    name: str
    start: int
    end: int
    thread: tuple[str, str]
    correlation: int
    device: int
    collective: str
    forward_again: bool
    """Recorded with gradients on, outside the autograd engine's own operators."""

    def covers(self, start: int, end: int) -> bool:
        return self.start <= start and end <= self.end and self.end > self.start


def read_spans(path: Path) -> list[Span]:
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    return [_span(e) for e in json.loads(text, parse_float=Decimal)["traceEvents"] if e.get("ph") == "X"]


def _span(event: dict[str, Any]) -> Span:
    args = event.get("args") or {}
    start = int(Decimal(event["ts"]) * 1000)
    return Span(
        kind=str(event.get("cat", "")).lower(),
        name=event["name"],
        start=start,
        end=start + int(Decimal(event.get("dur", 0)) * 1000),
        thread=(str(event["pid"]), str(event["tid"])),
        correlation=int(args.get("correlation", -1)),
        device=int(args.get("device", 0)),
        collective=str(args.get("Collective name", "")),
        forward_again="Sequence number" in args
        and args.get("Fwd thread id") == 0
        and not re.search(product.BACKWARD, event["name"]),
    )


def _of(spans: list[Span], kinds: tuple[str, ...], pattern: str = "") -> list[Span]:
    return [s for s in spans if s.kind in kinds and _found(pattern, s.name)]


@cache
def _found(pattern: str, name: str) -> bool:
    return re.search(pattern, name) is not None


def _stretch(spans: list[Span]) -> tuple[int, int, tuple[str, str]]:
    """From where the first marked step begins on the device to the end of the last and of all device work
    launched in any; a last step that was cut off is left out.
    """
    marks = sorted(_of(spans, HOST_KINDS, r"^ProfilerStep#\d+$"), key=lambda s: (s.start, -s.end))
    thread = marks[0].thread
    marks = [m for m in marks if m.thread == thread]
    calls = _calls(spans)
    every = _of(spans, KERNEL_KINDS + COPY_KINDS)
    launched: list[list[Span]] = [[] for _ in marks]
    for work in every:
        call = calls.get(work.correlation)
        if call:
            inside = [n for n, m in enumerate(marks) if m.start <= call.start < m.end]
            if inside:
                launched[inside[-1]].append(work)
    first = marks[0].start
    if launched[0]:
        first_own = min(w.start for w in launched[0])
        starts = [(w, calls.get(w.correlation)) for w in every]
        earlier = [w.end for w, call in starts if (call.start < first if call else w.start < first_own)]
        first = max([first, *earlier]) if max(earlier, default=0) <= first_own else first
    ends = [max([m.end, *(w.end for w in works)]) for m, works in zip(marks, launched, strict=True)]
    counts = [len(works) for works in launched]
    if len(marks) > 1 and counts[-1] < steps.COMPLETE * np.median(counts[:-1]):
        # The one before it ends where the dropped one begins, if its work is done by then.
        done = max((w.end for w in launched[-2]), default=0) <= marks[-1].start
        last = max(*ends[:-1], marks[-1].start) if done else max(ends[:-1])
        return first, max(first, last), thread
    return first, max(ends), thread


def _calls(spans: list[Span]) -> dict[int, Span]:
    calls = sorted(_of(spans, RUNTIME_KINDS), key=lambda s: (s.start, -s.end))
    return {call.correlation: call for call in calls if call.correlation >= 0}


def device_breakdown(spans: list[Span], device: int) -> Counter[str]:
    low, high, main = _stretch(spans)
    calls = _calls(spans)
    work = [s for s in _of(spans, KERNEL_KINDS + COPY_KINDS) if s.device == device]
    work = sorted((s for s in work if s.end > low and s.start < high), key=lambda s: (s.start, -s.end))
    optimizer = _updates(spans)
    again = _recomputing(spans)
    classes = {id(s): _device_category(s, calls, optimizer, again) for s in work}
    latency = _latency(work, calls)
    blame = _host_reasons(spans)
    work = [s for s in work if s.end > s.start]  # what took no time ends no gap
    changes = sorted([(s.start, 1, s) for s in work] + [(s.end, -1, s) for s in work], key=lambda c: (c[0], c[1]))
    edges = sorted({low, high, *(min(max(c[0], low), high) for c in changes)})
    starts = [s.start for s in work]
    totals: Counter[str] = Counter()
    active: Counter[Category] = Counter()
    position = 0
    gap_start = None
    for start, end in pairwise(edges):
        while position < len(changes) and changes[position][0] <= start:
            _, change, span = changes[position]
            active[classes[id(span)]] += change
            position += 1
        running = [category for category, count in active.items() if count > 0]
        if running:
            totals[min(running, key=lambda c: PRIORITY[c])] += end - start
            gap_start = None
            continue
        gap_start = start if gap_start is None else gap_start
        following = bisect_left(starts, end)
        next_work = work[following] if following < len(work) else None
        _share_gap(totals, blame, calls, latency, gap_start, start, end, next_work, main)
    return totals


def _latency(work: list[Span], calls: dict[int, Span]) -> int:
    """Ninth decile of the latency of launches that found the device with nothing left to do."""
    delays = []
    for number, span in enumerate(work):
        call = calls.get(span.correlation)
        busy_until = max((s.end for s in work[:number]), default=0)
        if call and span.kind in KERNEL_KINDS and call.start >= busy_until and span.start > call.start:
            delays.append(span.start - call.start)
    if not delays:
        return gaps.USUAL_LATENCY_NS
    return int(np.clip(np.quantile(delays, gaps.LATENCY_QUANTILE), *gaps.LATENCY_RANGE_NS))


def _recomputing(spans: list[Span]) -> list[Span]:
    """Operators of the forward pass that begin while the same thread runs the backward pass."""
    backward = _of(spans, HOST_KINDS, product.BACKWARD)
    again = [s for s in _of(spans, ("cpu_op", "operator")) if s.forward_again]
    return [s for s in again if any(b.thread == s.thread and b.start <= s.start < b.end for b in backward)]


def _updates(spans: list[Span]) -> list[Span]:
    """Steps of optimizers, without what comes before the end of a backward pass inside them: that is their closure."""
    backward = _of(spans, HOST_KINDS, product.BACKWARD)
    updates = []
    for update in _of(spans, HOST_KINDS, product.OPTIMIZER):
        inside = [b.end for b in backward if update.start <= b.start and b.end <= update.end]
        updates.append(replace(update, start=max([update.start, *inside])))
    return updates


def _share_gap(totals, blame, calls, latency, gap_start, start, end, next_work, main) -> None:
    """One idle piece, up to the work that ends it."""
    call = calls.get(next_work.correlation) if next_work else None
    if next_work and not call:
        totals[Category.UNKNOWN] += end - start
        return
    cut = max(call.start, gap_start) if call else end
    thread = call.thread if call else main
    own, main_s = (
        [(category, s) for category, s in blame.get(who, []) if s.start < end and s.end > start]
        for who in (thread, main)
    )
    reasons = own + main_s
    latency_end = max(call.start + latency, cut) if call else cut
    edges = {start, end, cut, cut + latency, latency_end} | {edge for _, s in reasons for edge in (s.start, s.end)}
    for a, b in pairwise(sorted(e for e in edges if start <= e <= end)):
        if a < cut:
            found = [category for category, s in own if s.covers(a, b)]
            found = found or [category for category, s in main_s if s.covers(a, b)]
            totals[found[0] if found else Category.HOST] += b - a
        else:
            after = Category.DISPATCH if a < cut + latency else Category.QUEUED
            totals[Category.LAUNCH_LATENCY if a < latency_end else after] += b - a


def _device_category(span: Span, calls: dict[int, Span], optimizer: list[Span], again: list[Span]) -> Category:
    if span.collective:
        return Category.PIPELINE_BUBBLE if span.collective in ("send", "recv") else Category.COMMUNICATION
    category = classify_copy(span.name) if span.kind in COPY_KINDS else _kernel_category(span.name)
    call = calls.get(span.correlation)
    if category in COMPUTE and call:
        if "GraphLaunch" in call.name and "multi_tensor_apply" in span.name:  # a graph's phases are not on the host
            return Category.OPTIMIZER
        for found, regions in ((Category.OPTIMIZER, optimizer), (Category.RECOMPUTE, again)):
            if any(a.thread == call.thread and a.start <= call.start < a.end for a in regions):
                return found
    return category


def _host_reasons(spans: list[Span]) -> dict[tuple[str, str], list[tuple[Category, Span]]]:
    """Per thread what may be blamed for a gap, the first to win first."""
    ordered = [
        *((Category.EPOCH_RESTART, s) for s in _of(spans, HOST_KINDS, product.RESTART)),
        *((Category.DATA_WAIT, s) for s in _of(spans, HOST_KINDS, product.LOADER)),
        *((Category.SYNCHRONISATION, s) for s in _of(spans, RUNTIME_KINDS, product.SYNC_CALLS)),
        *((Category.SYNCHRONISATION, s) for s in _of(spans, HOST_KINDS, product.BLOCKING_OPERATORS)),
        *((Category.ALLOCATION, s) for s in _of(spans, RUNTIME_KINDS, product.ALLOCATION_CALLS)),
        *((Category.OPTIMIZER_HOST, s) for s in _updates(spans)),
    ]
    threads: dict[tuple[str, str], list[tuple[Category, Span]]] = {}
    for category, span in ordered:
        threads.setdefault(span.thread, []).append((category, span))
    for span in _outermost(_of(spans, HOST_KINDS + RUNTIME_KINDS + ("overhead", "python_function"))):
        threads.setdefault(span.thread, []).append((Category.HOST, span))
    return threads


def _outermost(spans: list[Span]) -> list[Span]:
    """Spans of each thread without those that lie inside another: what they cover is covered."""
    kept: dict[tuple[str, str], Span] = {}
    found = []
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        last = kept.get(span.thread)
        if last is None or span.end > last.end:
            found.append(span)
            kept[span.thread] = span
    return found


def cpu_breakdown(spans: list[Span]) -> Counter[str]:
    """For operators that nest: the innermost one that says what it is; what the loader and the optimizer
    contain is theirs, but for what begins in the optimizer's closure; host time under another thread's
    collective is communication.
    """
    low, high, thread = _stretch(spans)
    host = _of(spans, HOST_KINDS)
    own = sorted((s for s in host if s.thread == thread), key=lambda s: (s.start, -s.end))
    again = _recomputing(spans)
    updates = [s for s in _updates(spans) if s.thread == thread]
    pairs = [s for s in host if re.search(r"^(gloo|nccl):(send|recv)", s.name)]
    collectives = [s for s in host if re.search(r"^(gloo|nccl):", s.name) and s not in pairs]
    edges = sorted({low, high, *(min(max(e, low), high) for s in host for e in (s.start, s.end))})
    totals: Counter[str] = Counter()
    for start, end in pairwise(edges):
        category = Category.HOST
        operators = [s for s in own if s.covers(start, end)]
        for span in operators:
            if category == Category.OPTIMIZER and not _inside(updates, span.start):
                category = Category.HOST
            found = _cpu_category(span.name)
            if found is not None and category not in STICKY:
                category = found
        innermost = operators[-1] if operators else None
        if category == Category.OPTIMIZER and not _inside(updates, start):
            category = Category.HOST
        if category in COMPUTE and any(a.thread == thread and a.start <= innermost.start < a.end for a in again):
            category = Category.RECOMPUTE
        dispatching = any(s.kind != "user_annotation" for s in operators)
        if category == Category.HOST and not dispatching and any(c.covers(start, end) for c in collectives):
            category = Category.COMMUNICATION
        elif category == Category.HOST and not dispatching and any(p.covers(start, end) for p in pairs):
            category = Category.PIPELINE_BUBBLE
        totals[category] += end - start
    return totals


def _inside(spans: list[Span], time: int) -> bool:
    return any(span.start <= time < span.end for span in spans)


def _cpu_category(name: str) -> Category | None:
    if re.search(product.LOADER, name):
        return Category.DATA_WAIT
    if re.search(product.RESTART, name):
        return Category.EPOCH_RESTART
    if re.search(product.OPTIMIZER, name):
        return Category.OPTIMIZER
    if name.startswith("ProfilerStep#"):
        return Category.HOST
    return classify_operator(name) or (Category.OTHER_COMPUTE if name.startswith("aten::") else None)

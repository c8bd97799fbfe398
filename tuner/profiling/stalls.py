"""Stalls: intervals without launches that are too long for the host to be dispatching operators.

Dispatch produces launches (on a CPU: operators) at a steady pace, microseconds to tens of microseconds apart. A sleep,
a lock, a garbage collection, a checkpoint or a Python loop leaves one long silence. Both make the device wait for the
host, but only dispatch becomes shorter with a CUDA graph, compilation or larger batches.

A silence is a stretch between two launches of a process, on any of its threads: forward and backward
passes take turns. Time of the loader, a synchronisation, an allocation or the optimizer's step is excluded: those
have separate categories.
"""

from __future__ import annotations

import re

import numpy as np

from steptune.tuner.costs.categories import PRIORITY, Category
from steptune.tuner.profiling.capture import Capture
from steptune.tuner.profiling.intervals import Intervals, Ints, cover, distinct, median, pieces, union
from steptune.tuner.profiling.regions import joined
from steptune.tuner.profiling.segments import Segments
from steptune.tuner.profiling.threads import threads_beside
from steptune.tuner.profiling.trace import Kind
from steptune.tuner.records import Stall, Stalls

LEAST_NS, MOST_NS = 1_000_000, 10_000_000
"""Limits, in nanoseconds, for the length of an interval without launches. Below the first, the interval is no stall,
because healthy steps have such intervals around an optimizer or a compiled region; above the second, it always is a
stall, because no host takes that long to dispatch one operator.
"""
PACES = 25
"""Minimum duration of a stall, as a multiple of the usual time between two launches. In nine captures of healthy steps
on an H100 and an H200, the 99th percentile of these times was 4 to 14 times the usual one.
"""
NAMED = 0.6
"""Minimum share of a stall that an event must cover for the stall to be named after it."""
WIDEST_ANNOTATION = 3.0
"""Maximum duration of an annotation that names a stall, as a multiple of the stall."""
SAYS_NOTHING = r"^ProfilerStep#|^PyTorch Profiler|^autograd::engine::evaluate"
KEPT = 10

_FRAME = re.compile(r"(?P<file>.*\.pyx?)\(\d+\): (?P<function>.*)")
_NO_CAUSE = re.compile(r"^nn\.Module: |(^|/)torch/utils/checkpoint\.py\(")
"""Pattern for events that do not show the cause of a stall even if their names match `FUNCTIONS` or `EVENTS`: a module
can have any name, and activation checkpointing writes no file.
"""


def _patterns(*pairs: tuple[str, str]) -> tuple[tuple[str, re.Pattern[str]], ...]:
    return tuple((cause, re.compile(pattern, re.IGNORECASE)) for cause, pattern in pairs)


FUNCTIONS = _patterns(
    ("collection", r"(^|/)gc\.py: |: (gc_)?collect$"),
    (
        "compilation",
        r"(^|/)(convert_frame|compile_fx)\.py: |"
        r"(^|/)(torch/_(dynamo|inductor|functorch)|triton)/.*: (\w+_|_)?compile(_\w+)?$",
    ),
    (
        "checkpoint",
        r": _?(async_|torch_)?save(_\w*(checkpoint|state|model|pretrained)\w*)?$|: (write_|dump_)?checkpoint$",
    ),
    ("checkpoint", r": state_dict$"),
    ("evaluation", r": _?(eval|evaluate|validate|validation)(_\w+)?$"),
    ("lock or sleep", r": (sleep|acquire|wait)$"),
    ("logging", r"(^|/)logging/__init__\.py: |: (print|log|log_metrics|add_scalars?)$"),
)
"""Kinds of stalls, each with a pattern for the Python function ("file: function") that causes it; the first match
counts, and folders are ignored.
"""
EVENTS = _patterns(
    ("profiler", r"^(Buffer Flush|Activity Buffer Request|Instrumentation|Resource)$"),
    ("collection", r"Python GC|\bgc\.collect|built-in function collect\b"),
    (
        "compilation",
        r"CachingAutotuner|\(dynamo_timed\)|\bcompile_fx|"
        r"(dynamo|inductor|triton|aot_autograd|Torch-Compiled Region).*compil",
    ),
    ("checkpoint", r"\bsave\b|\bcheckpoint\b|save_checkpoint|torch_save|\bstate_dict"),
    ("evaluation", r"\b(eval|evaluate|validate|validation)(_\w+)?\b"),
    ("lock or sleep", r"\b(sleep|acquire|wait)\b"),
    ("logging", r"\b(print|logging|log_metrics|add_scalar|wandb|tensorboard|tqdm)\b"),
)
"""Kinds of stalls, each with a pattern for the name of any other event that causes it: an event of the profiler, an
operator, an annotation or a built-in function.
"""


def cause_of(name: str) -> str:
    """Return the kind of a stall, by the event that names it; empty if unknown."""
    if _NO_CAUSE.search(name):
        return ""
    frame = _FRAME.fullmatch(name)
    said = f"{frame['file']}: {frame['function']}" if frame else name
    return next((cause for cause, pattern in (FUNCTIONS if frame else EVENTS) if pattern.search(said)), "")


def find_stalls(capture: Capture, segments: Segments, device: int | None) -> Stalls:
    """Find the stalls of the steps.

    Args:
        segments: Segments of the device, or of the CPU.
        device: Number of the device; None on a CPU.
    """
    host_time = segments.category == PRIORITY[Category.HOST]
    idle = union(segments.start[host_time], segments.end[host_time])
    start, end = idle if device is None else _silences(capture, device)
    length = end - start
    pace = median(length) if len(length) else 0.0
    limit_ns = int(np.clip(PACES * pace, LEAST_NS, MOST_NS))
    long = length > limit_ns
    start, end = start[long], end[long]
    waited = np.zeros(len(start), dtype=np.int64)
    low, high, whole, _ = pieces(start, end, idle)
    np.add.at(waited, whole, high - low)
    felt = np.flatnonzero(waited > 0)
    steps = capture.steps
    begins = steps.host_starts if len(steps.host_starts) else steps.boundaries
    step = np.clip(np.searchsorted(begins, start, side="right"), 1, len(steps))
    longest = felt[np.argsort(-waited[felt], kind="stable")][:KEPT]
    return Stalls(
        limit_ns=limit_ns,
        idle_ns=int(waited.sum()),
        steps=tuple(np.unique(step[felt]).tolist()),
        longest=tuple(
            Stall(
                step=int(step[number]),
                length_ns=int(end[number] - start[number]),
                idle_ns=int(waited[number]),
                name=_name(capture, device, int(start[number]), int(end[number])),
            )
            for number in longest.tolist()
        ),
    )


def _silences(capture: Capture, device: int) -> Intervals:
    """Return the intervals between launches in the steps, excluding time that has a category of its own."""
    host, launches, regions = capture.trace.host, capture.launches, capture.regions
    calls = distinct(launches.row[launches.row >= 0])
    calls = calls[~np.isin(host.thread[calls], threads_beside(capture))]
    own = (regions.restart, regions.loader, regions.synchronisation, regions.allocation, regions.optimizer)
    threads = _threads(capture, device)
    others = [joined(own, thread) for thread in threads]
    busy = [(host.start[calls], host.end[calls]), *others]
    start, end, owner = cover(capture.steps.span, busy)
    return start[owner < 0], end[owner < 0]


def _threads(capture: Capture, device: int | None) -> list[int]:
    """Return the thread that runs the steps, and those that launch the device's work in turns with it."""
    found = {capture.steps.thread}
    if device is not None:
        launched = (capture.launches.row >= 0) & (capture.trace.work.device == device)
        found |= set(np.unique(capture.launches.thread[launched]).tolist())
    return sorted(found - set(threads_beside(capture)))


def _name(capture: Capture, device: int | None, start: int, end: int) -> str:
    """Return the name of the shortest event that covers most of a stall; empty if there is none. Events of the profiler
    are preferred, then operators, then annotations, then Python functions.
    """
    host = capture.trace.host
    covered = np.minimum(host.end, end) - np.maximum(host.start, start)
    silent = capture.trace.names_matching(SAYS_NOTHING)
    rows = np.flatnonzero((covered >= NAMED * (end - start)) & np.isin(host.thread, _threads(capture, device)))
    for kind in (Kind.OVERHEAD, Kind.OPERATOR, Kind.ANNOTATION, Kind.PYTHON):
        named = rows[host.kind[rows] == kind]
        named = named[~silent[host.name[named]]]
        lengths = host.end[named] - host.start[named]
        if kind == Kind.ANNOTATION:
            fits = lengths <= WIDEST_ANNOTATION * (end - start)
            named, lengths = named[fits], lengths[fits]
        if len(named):
            return str(capture.trace.names[int(host.name[named[int(lengths.argmin())]])])
    return ""


def listed(steps: Ints | tuple[int, ...], most: int = 5) -> str:
    """Format the numbers of steps: "2, 5 and 8"."""
    numbers = [str(number) for number in steps]
    if len(numbers) > most:
        return f"{', '.join(numbers[:most])} and {len(numbers) - most} more"
    return " and ".join([", ".join(numbers[:-1]), numbers[-1]] if len(numbers) > 1 else numbers)

"""Translation of other profilers' events to those of torch.profiler.

The rest of the analysis knows one kind of trace. So a reader of another format adds its events here, in
nanoseconds, and gets an ordinary trace. A step is a range whose name marks it as one (`step_names`).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from steptune.tuner.profiling.captures.step_names import StepRange, chosen_steps
from steptune.tuner.profiling.columns import Columns
from steptune.tuner.profiling.events import NO_ARGS, Args, Event, Header
from steptune.tuner.profiling.trace import TRANSLATED, Trace, TraceError
from steptune.tuner.wording import counted

PIECE = 100_000
MOST_EVENTS = 20_000_000
"""Maximum number of events: a capture of this size needs about 4 GB; captures of a few steps have a hundredth of this
number.
"""
MOST_SAID = 120
"""Maximum number of characters quoted from a file."""
Thread = tuple[int | str, int | str]


@contextmanager
def written_as(what: str, remedy: str) -> Iterator[None]:
    """Convert errors about contents that the format does not allow (a text in place of a time, a missing field) into
    refusals.

    Args:
        what: The capture in words, with the versions that are read.

    Raises:
        TraceError: The block failed on such a value.
    """
    try:
        yield
    except TraceError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, csv.Error) as error:
        said = f"{type(error).__name__}: {error}"[:MOST_SAID]
        raise TraceError(f"it does not have the format of {what} ({said}): {remedy}") from None


class Translation:
    """Translation of another profiler's events.

    Args:
        what: The capture in words: "an export of Nsight Systems".
        mark: Instruction for the user on how to mark steps.
    """

    def __init__(self, what: str, mark: str) -> None:
        self._what = what
        self._mark = mark
        self._columns = Columns()
        self._pending: list[Event] = []
        self._ranges: list[StepRange] = []
        self._base_ns: int | None = None
        self._count = {"ranges": 0, "operations": 0}

    def host(self, kind: str, name: str, start_ns: int, end_ns: int, thread: Thread, *, correlation: int = -1) -> None:
        """Add an event of a host thread.

        Args:
            kind: "cuda_runtime", "cpu_op", "python_function" or "user_annotation".
        """
        args = Args(correlation=correlation) if correlation >= 0 else NO_ARGS
        self._take(kind, name, start_ns, end_ns, thread, args)

    def annotation(self, name: str, start_ns: int, end_ns: int, thread: Thread, step: int | None = None) -> None:
        """Add a range that the program annotated.

        Args:
            step: Number of the step, if the format marks the range as one.
        """
        self._count["ranges"] += 1
        self._ranges += StepRange.of(name, start_ns, end_ns, thread, step)
        self.host("user_annotation", name, start_ns, end_ns, thread)

    def operation(self, kind: str, name: str, start_ns: int, end_ns: int, args: Args) -> None:
        """Add an operation of a device.

        Args:
            kind: "kernel", "gpu_memcpy" or "gpu_memset".
        """
        self._count["operations"] += 1
        self._take(kind, name, start_ns, end_ns, (f"device {args.device}", f"stream {args.stream}"), args)

    def trace(
        self, *, devices: list[dict[str, Any]] | None = None, epoch_ns: int = 0, distributed: Mapping[str, int] = {}
    ) -> Trace:
        """Return the trace of all added events.

        Args:
            devices: Devices in torch.profiler's form.
            epoch_ns: Where the capture's clock begins, as nanoseconds since 1970.

        Raises:
            TraceError: The events contain no steps.
        """
        steps = chosen_steps(self._ranges)
        if not steps:
            ranges, operations = (counted(count, noun[:-1]) for noun, count in self._count.items())
            raise TraceError(
                f"it is {self._what} ({operations} on devices, {ranges} with a name), but no steps are marked: no "
                f"range is named step or iteration. {self._mark}"
            )
        for number, step in enumerate(steps):
            self.host("user_annotation", f"ProfilerStep#{number}", step.start_ns, step.end_ns, step.thread)
        self._flush()
        header = Header(
            device_properties=devices or [],
            distributed=dict(distributed) or None,
            base_time_ns=epoch_ns + (self._base_ns or 0),
        )
        note = f"read from {self._what}; advice is worded for PyTorch"
        return self._columns.finish(header, framing=TRANSLATED, num_lost=0, is_whole=True, losses=[note])

    def _take(self, kind: str, name: str, start_ns: int, end_ns: int, thread: Thread, args: Args) -> None:
        if self._base_ns is None:
            self._base_ns = start_ns
        # Relative times are small enough that a float of microseconds holds every nanosecond.
        start_us, length_us = (start_ns - self._base_ns) / 1000, (end_ns - start_ns) / 1000
        self._pending.append(
            Event(ph="X", cat=kind, name=name, ts=start_us, dur=length_us, pid=thread[0], tid=thread[1], args=args)
        )
        if len(self._pending) >= PIECE:
            self._flush()

    def _flush(self) -> None:
        self._columns.take(self._pending)
        self._pending.clear()
        if self._columns.num_events > MOST_EVENTS:
            raise TraceError(
                f"it is {self._what} with more than {MOST_EVENTS:,} events: record or export a shorter trace (ten "
                "steps are enough)"
            )

"""A trace of any length: a real one, repeated, in the layout in which torch.profiler writes.

    python benchmarks/repeated_trace.py TRACE.json.gz OUT.json.gz 1000000 [once]

Each repetition follows the one before: its times are shifted, and correlations, ids of operators, flows
and autograd nodes, and numbers of steps go on counting, as in a capture that ran on. Names are those of
the original, so a repeated trace has fewer different ones than a real trace of its size.

With `once`, only the first repetition marks its steps: analysers whose cost grows with events times
steps are then as fast as on a capture of a few long steps.
"""

from __future__ import annotations

import gzip
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from isal import igzip

SEPARATOR = "\n  },\n  {"
GAP_NS = 50_000
COUNTED = {
    "correlation": re.compile(r'(?<="correlation": )\d+'),
    "operator": re.compile(r'(?<="External id": )\d+'),
    "flow": re.compile(r'(?<="id": )\d+'),
    "node": re.compile(r'(?<="Sequence number": )\d+'),
    "step": re.compile(r"(?<=ProfilerStep#)\d+"),
}
TIME = re.compile(r'(?<="ts": )[\d.]+')
DURATION = re.compile(r'(?<="dur": )[\d.]+')
NUMBER = re.compile("|".join(f"({pattern.pattern})" for pattern in (TIME, *COUNTED.values())))


def repeat(source: Path, target: Path, num_events: int, *, mark_once: bool = False) -> int:
    """Writes a trace of at least `num_events` events; returns how many it has.

    Args:
        source: A compressed trace as Kineto lays it out.
    """
    text = gzip.decompress(source.read_bytes()).decode()
    start = text.index("{", text.index('"traceEvents"')) + 1
    end = text.rindex("}", start, text.rindex("]"))
    events = text[start:end].removesuffix("\n  ").split(SEPARATOR)
    # Metadata and marks of the whole capture are there once.
    repeated = [e for e in events if re.search(r'"ph": "[Xsf]"', e) and '"cat": "Trace"' not in e]
    once = [e for e in events if not (re.search(r'"ph": "[Xsf]"', e) and '"cat": "Trace"' not in e)]
    num_copies = max(1, -(-(num_events - len(once)) // len(repeated)))
    with igzip.open(target, "wb", compresslevel=1) as file:
        file.write((text[:start] + SEPARATOR.join(once)).encode())
        for number, copy in enumerate(_copies(repeated, num_copies)):
            unmarked = mark_once and number > 0
            file.write((SEPARATOR + (copy.replace("ProfilerStep#", "Step ") if unmarked else copy)).encode())
        file.write(("\n  " + text[end:]).encode())
    return len(once) + num_copies * len(repeated)


def _copies(events: list[str], num_copies: int) -> Iterator[str]:
    """The events, again and again, each time later."""
    body = SEPARATOR.join(events)
    starts = [_nanoseconds(time) for event in events for time in TIME.findall(event)]
    lasts = [
        _nanoseconds(time[0]) + (_nanoseconds(duration[0]) if (duration := DURATION.findall(event)) else 0)
        for event in events
        if (time := TIME.findall(event))
    ]
    period = max(lasts) - min(starts) + GAP_NS
    strides = [period, *(_stride(pattern, body) for pattern in COUNTED.values())]
    literals, numbers = [], []
    position = 0
    for match in NUMBER.finditer(body):
        literals.append(body[position : match.start()])
        group = (match.lastindex or 1) - 1
        value = match.group()
        numbers.append((_nanoseconds(value) if group == 0 else int(value), strides[group], group == 0))
        position = match.end()
    rest = body[position:]
    for copy in range(num_copies):
        values = (
            f"{(value + copy * stride) // 1000}.{(value + copy * stride) % 1000:03}"
            if is_time
            else str(value + copy * stride)
            for value, stride, is_time in numbers
        )
        yield "".join(part for pair in zip(literals, values, strict=True) for part in pair) + rest


def _stride(pattern: re.Pattern[str], text: str) -> int:
    numbers = [int(number) for number in pattern.findall(text)]
    return max(numbers) - min(numbers) + 1 if numbers else 0


def _nanoseconds(microseconds: str) -> int:
    whole, _, part = microseconds.partition(".")
    return int(whole) * 1000 + int((part + "000")[:3])


if __name__ == "__main__":
    print(repeat(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), mark_once="once" in sys.argv[4:]))

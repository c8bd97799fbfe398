"""Asks Steptune the questions of `trace_analysis.py`.

    python steptune_questions.py TRACE.json.gz

Linking is the join of launches and kernels; the breakdown holds the answers on busy time, gaps and
overlap, each with its cause, for every step. Prints times and peak memory as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from stamp import peak_memory_bytes

from steptune.tuner.costs.categories import COMPUTING
from steptune.tuner.profiling.breakdown import breakdown_of
from steptune.tuner.profiling.capture import link
from steptune.tuner.profiling.device_time import device_time
from steptune.tuner.profiling.reader import read_trace


def main() -> None:
    clock = [time.perf_counter()]
    trace = read_trace(Path(sys.argv[1]))
    clock.append(time.perf_counter())
    capture = link(trace)
    clock.append(time.perf_counter())
    breakdowns = [
        breakdown_of(capture, f"cuda:{device}", device_time(capture, device)[0]) for device in capture.device_numbers
    ]
    clock.append(time.perf_counter())
    first = breakdowns[0]
    compute_ns = sum(first.categories.get(category, 0) for category in COMPUTING)
    report = {
        "seconds": {
            name: end - start for name, start, end in zip(("load", "link", "breakdown"), clock, clock[1:], strict=False)
        },
        "peak_bytes": peak_memory_bytes(),
        "compute_percent": round(100 * compute_ns / first.step_time_ns, 2),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()

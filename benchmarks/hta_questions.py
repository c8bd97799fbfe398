"""Asks HTA (`traceinsight`) the questions of `trace_analysis.py`; runs in HTA's own environment.

    python hta_questions.py TRACE.json.gz

Loading includes HTA's join of launches and kernels on their correlation. Prints times and peak memory as JSON.
"""

from __future__ import annotations

import json
import logging
import resource
import sys
import time
import warnings
from importlib.metadata import version

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)

from hta.trace_analysis import TraceAnalysis  # noqa: E402


def main() -> None:
    seconds, clock = {}, time.perf_counter()

    def done(stage: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        seconds[stage], clock = now - clock, now

    analysis = TraceAnalysis(trace_files={0: sys.argv[1]})
    done("load")
    temporal = analysis.get_temporal_breakdown(visualize=False)
    done("temporal")
    analysis.get_idle_time_breakdown(ranks=[0], visualize=False)
    done("idle")
    analysis.get_comm_comp_overlap(visualize=False)
    done("overlap")
    report = {
        "seconds": seconds,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "compute_percent": float(temporal["compute_time_pctg"].iloc[0]),
        "versions": {name: version(name) for name in ("traceinsight", "pandas", "numpy")},
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()

"""How much memory does `steptune analyze` take, as users run it, beside HTA in `trace_analysis.py`?

    python benchmarks/analyze_memory.py

`trace_analysis.py` asks both for what both answer. The command answers more (kernels, operators, gaps, queues,
collectives, memory, a diagnosis); here its process is run once a trace, and the peak of its memory is read.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from stamp import RESULTS, stamp
from trace_analysis import CACHE, MIB, TRACES, machine, repeated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=TRACES / "h200_swin_t_launch_bound.json.gz")
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--out", type=Path, default=RESULTS / "analyze_memory.json")
    arguments = parser.parse_args()
    arguments.cache.mkdir(parents=True, exist_ok=True)
    beside = json.loads((RESULTS / "trace_analysis.json").read_text())["sizes"]
    rows = []
    for size, once in ((200_000, False), (1_000_000, False), (1_000_000, True)):
        path, num_events = repeated(arguments.source, arguments.cache, size, mark_once=once)
        marked = "in the first repetition" if once else "all"
        hta = next(r["hta"]["peak_mib"] for r in beside if (r["num_events"], r["steps_marked"]) == (num_events, marked))
        peak = peak_mib([sys.executable, "-m", "steptune.service.cli.main", "analyze", str(path), "--json"])
        rows.append(
            {
                "num_events": num_events,
                "steps_marked": marked,
                "num_runs": 1,
                "peak_mib": peak,
                "hta_peak_mib": hta,
                "memory_share": round(peak / hta, 3),
            }
        )
        print(rows[-1], flush=True)
    report = {
        "question": "peak memory of `steptune analyze`, beside HTA's in trace_analysis.json",
        **stamp("python benchmarks/analyze_memory.py"),
        "hardware": machine(),
        "source": arguments.source.name,
        "sizes": rows,
    }
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")


def peak_mib(command: list[str]) -> int:
    """Return the peak resident memory of a command in MiB; its output is discarded."""
    child = os.posix_spawnp(
        command[0], command, os.environ, file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    )
    _, status, used = os.wait4(child, 0)
    if status:
        raise RuntimeError(f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}")
    return used.ru_maxrss * 1024 // MIB


if __name__ == "__main__":
    main()

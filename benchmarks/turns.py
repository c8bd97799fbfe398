"""How far does a configuration differ from itself: measured one after the other, and in turns?

    python benchmarks/turns.py

Two processes of the same configuration, the same seconds of windows. "Apart": one after the other, as
most tuners compare candidates. "In turns": both alive, a window of each in every round, as Steptune does.
The spread of the ratio (which is 1 in truth) is what a gain has to exceed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path

from engine import Engine, engine
from stamp import RESULTS, hardware, stamp

from steptune.tuner.estimates import log_rate, log_ratio
from steptune.tuner.records import BASELINE, MeasureSettings, Purpose, StudySettings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="examples/digits_vit.py:DigitsViT")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--cap", type=float, default=2.0, help="seconds of windows of a pair")
    parser.add_argument("--out", type=Path, default=RESULTS / "turns.json")
    arguments = parser.parse_args()
    with engine(arguments.workload, StudySettings()) as ready:
        machine = hardware(ready.space.environment)
        rows = [compare(ready, arguments.cap) for _ in range(arguments.repeats)]
    report = {
        "question": "log ratio of a configuration to itself",
        **stamp(" ".join(["python", "benchmarks/turns.py", *sys.argv[1:]])),
        "hardware": machine,
        "workload": arguments.workload,
        "cap_s": arguments.cap,
        "apart": spread([row[0] for row in rows]),
        "in_turns": spread([row[1] for row in rows]),
    }
    print(json.dumps({key: report[key] for key in ("apart", "in_turns")}))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")


def compare(ready: Engine, cap_s: float) -> tuple[float, float]:
    """Log ratios of two starts of the baseline: apart, and in turns."""
    half = MeasureSettings(cap_s=cap_s / 2, half_width=0.0)
    first, second = (ready.run([BASELINE], [Purpose.CONFIRM], half)[0] for _ in range(2))
    apart = log_rate(first).mean - log_rate(second).mean
    whole = MeasureSettings(cap_s=cap_s, half_width=0.0)
    one, other = ready.run([BASELINE, BASELINE], [Purpose.CONFIRM] * 2, whole)
    paired = log_ratio(one, other)
    if paired is None:
        raise RuntimeError("the two starts share no round")
    print(f"apart {apart:+.4f}   in turns {paired.mean:+.4f}", flush=True)
    return apart, paired.mean


def spread(values: list[float]) -> dict:
    return {
        "sd": round(statistics.stdev(values), 5),
        "median_absolute": round(statistics.median(abs(v) for v in values), 5),
        "largest": round(max(abs(v) for v in values), 5),
        "implied_5_percent_gains": sum(abs(v) > math.log(1.05) for v in values),
        "values": [round(v, 5) for v in values],
    }


if __name__ == "__main__":
    main()

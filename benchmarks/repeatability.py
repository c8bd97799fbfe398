"""Do confirmations repeat: does a second one fall where the first one said that it would?

    python benchmarks/repeatability.py

Every confirmation states, beside its interval for the gain, a prediction interval: where a further
confirmation of the same size falls in 95 % of cases. Here one candidate is confirmed again and again
against the baseline, in fresh processes and random order, by the code of the search. For every ordered
pair of confirmations it is counted whether the second's gain lies in the first's prediction interval.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from pathlib import Path

from engine import Engine, engine
from stamp import RESULTS, hardware, stamp

from steptune.tuner.records import BASELINE, Candidate, Gain, MeasureSettings, Purpose, StudySettings
from steptune.tuner.search.confirmation import judge, plan_blocks

WORKLOADS = {
    "zoo:synthetic": Candidate(choices={"data_loading": {"num_workers": 1}}),
    "examples/digits_vit.py:DigitsViT": Candidate(choices={"optimizer_implementation": {"implementation": "fused"}}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10, help="confirmations of each workload")
    parser.add_argument("--blocks", type=int, default=5, help="starts of each side in one confirmation")
    parser.add_argument("--cap", type=float, default=4.0, help="seconds of windows in one block; 4: a two-minute study")
    parser.add_argument("--out", type=Path, default=RESULTS / "repeatability.json")
    arguments = parser.parse_args()
    rows, machine = [], {}
    for workload, candidate in WORKLOADS.items():
        with engine(workload, StudySettings()) as ready:
            machine = hardware(ready.space.environment)
            gains = [
                confirm(ready, candidate, arguments.blocks, arguments.cap, number)
                for number in range(arguments.repeats)
            ]
        rows.append({"workload": workload, "candidate": candidate.label, **summary(gains)})
        print(json.dumps({k: v for k, v in rows[-1].items() if k != "gains"}), flush=True)
    pairs = sum(row["pairs"] for row in rows)
    report = {
        "question": "share of confirmations inside the prediction interval of another one of the same candidate",
        **stamp(" ".join(["python", "benchmarks/repeatability.py", *sys.argv[1:]])),
        "hardware": machine,
        "blocks": arguments.blocks,
        "cap_s": arguments.cap,
        "share_inside": round(sum(row["inside"] for row in rows) / pairs, 4),
        "workloads": rows,
    }
    print(f"{report['share_inside']:.1%} of {pairs} pairs lie inside")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")


def confirm(ready: Engine, candidate: Candidate, num_blocks: int, cap_s: float, number: int) -> Gain:
    """One confirmation, as the driver does it."""
    measure = MeasureSettings(cap_s=cap_s)
    blocks = []
    for block in plan_blocks(BASELINE, [candidate], num_blocks, seed=number):
        order = list(block.order)
        results = ready.run(order, [Purpose.CONFIRM] * len(order), measure, block.number)
        blocks.append({result.candidate.key: result for result in results if result.ok})
    (finalist,) = judge(BASELINE, [candidate], blocks)
    if finalist.gain is None:
        raise RuntimeError(f"{candidate.label} could not be confirmed: {[len(block) for block in blocks]} good results")
    gain = finalist.gain
    print(f"{number:3d}  {gain.ratio:.4f}x  [{gain.interval.low:.4f}, {gain.interval.high:.4f}]", flush=True)
    return gain


def summary(gains: list[Gain]) -> dict:
    pairs = [(first, second) for first in gains for second in gains if first is not second]
    inside = sum(first.prediction.low <= second.ratio <= first.prediction.high for first, second in pairs)
    following = list(itertools.pairwise(gains))
    return {
        "confirmations": len(gains),
        "pairs": len(pairs),
        "inside": inside,
        "next_inside": sum(a.prediction.low <= b.ratio <= a.prediction.high for a, b in following),
        "next_of": len(following),
        "median_ratio": round(statistics.median(gain.ratio for gain in gains), 4),
        "sd_of_log_ratio": round(statistics.stdev(math.log(gain.ratio) for gain in gains), 5),
        "median_half_width": round(
            statistics.median(math.log(gain.interval.high / gain.interval.low) / 2 for gain in gains), 5
        ),
        "gains": [[round(g.ratio, 5), round(g.prediction.low, 5), round(g.prediction.high, 5)] for g in gains],
    }


if __name__ == "__main__":
    main()

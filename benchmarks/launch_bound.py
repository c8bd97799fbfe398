"""Gain of a study on a step that waits for kernel launches.

    python benchmarks/launch_bound.py                      # both workloads, 4 minutes of tuning each
    python benchmarks/launch_bound.py --small              # a dry run; a CPU has no kernel gaps

`resnet`: ResNet-50 on six images, whose step keeps gaps of a tenth even recorded. `rows`: a deep network of wide layers
on 32 rows; its normalisations and activations are written out, and its update is fused already.

Kernel gaps are what no operator, copy or input accounts for: host, launch latency, dispatch, queue, synchronisation,
allocation, the optimizer's host. Their share of the step, before and after; one JSON line is appended to the
results file.
"""

from __future__ import annotations

from collections.abc import Mapping

from bound_rows import measure_rows, parser_of
from stamp import ROOT
from tuned import Tuned

from steptune.tuner.costs.categories import CATEGORIES

WORKLOAD = ROOT / "benchmarks" / "workloads" / "launch_bound.py"
FULL = {"resnet": f"{WORKLOAD}:LaunchBound", "rows": f"{WORKLOAD}:Rows"}
SMALL = {
    "resnet": f"{WORKLOAD}:LaunchBound?batch=4&images=32&image_size=32&hidden_sizes=16,32&depths=1,1",
    "rows": f"{WORKLOAD}:Rows?rows=256&width=64&depth=3",
}
GAPS = tuple(info.category.value for info in CATEGORIES if info.group in ("gaps", "unknown"))
WANTED_BEFORE, WANTED_AFTER = 0.50, 0.05


def gaps(shares: Mapping[str, float]) -> float | None:
    """Share of the step in gaps; None without a profile that can be trusted."""
    return round(sum(shares.get(name, 0.0) for name in GAPS), 4) if shares else None


def look(name: str, study: Tuned, found: dict) -> dict:
    return {"gaps_before": gaps(found["shares_before"]), "gaps_after": gaps(found["shares_after"])}


def verdict(row: dict) -> str:
    before, after = row["gaps_before"], row["gaps_after"]
    if before is None or after is None:
        return f"{row['gain']} times as fast; no profile of both sides can be trusted: NOT reached"
    reached = before > WANTED_BEFORE and after < WANTED_AFTER
    return (
        f"kernel gaps {before:.1%} of the step before (wanted above {WANTED_BEFORE:.0%}), {after:.1%} after (wanted "
        f"below {WANTED_AFTER:.0%}), {row['gain']} times as fast: {'reached' if reached else 'NOT reached'}"
    )


def main() -> None:
    arguments = parser_of(__doc__, FULL, "launch_bound.jsonl").parse_args()
    measure_rows("launch_bound.py", arguments, SMALL if arguments.small else FULL, look, verdict)


if __name__ == "__main__":
    main()

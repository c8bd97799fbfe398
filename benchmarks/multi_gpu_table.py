"""The table of several GPUs: what its rows have to show, whether they did, and which are missing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from by_hand_rows import reached
from multi_gpu_rows import DDP, ROWS

NETWORKS = ("one", "two", "two_25gbit")
WANTED = {("two", "lossy", "vit_large"): 2.5, ("two", "", "vit_large"): 1.5}
"""Times DDP's default."""
WANTED_LARGEST = 2.2
MOST_EXPOSED = 0.10
"""Exposed communication of a step on one host."""
PLANNED = {
    ("one", ""): [row.name for row in ROWS],
    ("two", ""): ["vit_large"],
    ("two", "lossy"): [row.name for row in ROWS if row.per_gpu],
}
"""Rows that the table is to have, by network and consent; it shows others, too, once they are measured."""


def best_by_hand(line: dict) -> tuple[str, dict] | None:
    """The column against which ours is slowest."""
    found = [(name, column) for name, column in line.get("by_hand", {}).items() if column.get("ratio")]
    return min(found, key=lambda pair: pair[1]["ratio"], default=None)


def verdicts(line: dict) -> dict[str, bool]:
    """Requirements of a row, and whether it meets them."""
    best, default = best_by_hand(line), line.get("by_hand", {}).get(DDP, {})
    shown: dict[str, bool] = {}
    if best is not None:
        shown["at least the best by hand"] = reached(best[1])
    wanted = WANTED.get((line["network"], line["allow"], line["row"]))
    if line["row"] == "vit_huge_largest":
        wanted = WANTED_LARGEST
    if wanted is not None and default.get("ratio"):
        shown[f"{wanted} times DDP's default"] = default["ratio"] >= wanted
    if line["network"] == "one" and "exposed_communication" in line:
        shown["exposed communication below 10 %"] = line["exposed_communication"] < MOST_EXPOSED
    return shown


def summary(lines: Sequence[dict]) -> str:
    """A table for each network and consent, and what is missing; tables of their own where ranks shared a device."""
    text = []
    for shared in (False, True):
        for network, allow in itertools.product(NETWORKS, ("", "lossy")):
            of_table = [
                line for line in lines if (line["network"], line["allow"], _shared(line)) == (network, allow, shared)
            ]
            last = {line["row"]: line for line in of_table}
            planned = () if shared else PLANNED.get((network, allow), ())
            shown = [row.name for row in ROWS if row.name in {*last, *planned}]
            if shown:
                where = ", ranks share a device" if shared else ""
                text.append(f"{network}, allowed: {allow or 'nothing'}{where}")
                text += [told_row(name, last.get(name)) for name in shown]
    return "\n".join(text)


def _shared(line: dict) -> bool:
    return int(line.get("ranks_per_device", 1)) > 1


def told_row(name: str, line: dict | None) -> str:
    """One row, or that it is missing."""
    if line is None:
        return f"  {name:16} missing"
    if "impossible" in line:
        return f"  {name:16} impossible: {line['impossible']}"
    best, default = best_by_hand(line), line["by_hand"].get(DDP, {})
    if best is None:
        return f"  {name:16} missing: no by-hand figure to compare with"
    ratio = default.get("ratio")
    parts = [
        f"  {name:16} {line['ranks']} ranks, {line['beside']['units_per_s'] or 0:10.0f} {line['unit']}s/s",
        f"{best[1]['ratio']:.3f} {best[1]['interval'] or ''} of {best[0]}",
        f"{ratio:.2f} of DDP" if ratio else "no figure of DDP",
        f"{line['exposed_communication']:.1%} exposed",
        f"{line['trials']} trials in {line['tuning_s']:.0f} s",
        f"guard {line['guard_verdicts']['passed']} of {sum(line['guard_verdicts'].values())}",
        f"peaks {line['beside']['peak_mib_by_rank']} MiB",
    ]
    if "hours_per_imagenet_epoch" in line:
        parts.append(f"{line['hours_per_imagenet_epoch']:.3f} h per epoch of ImageNet")
    missed = [goal for goal, shown in verdicts(line).items() if not shown]
    return ", ".join(parts) + (f": NOT {'; NOT '.join(missed)}" if missed else ": reached")

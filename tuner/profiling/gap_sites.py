"""Gaps of a device, grouped by cause and by the kernel that ends the gap."""

from __future__ import annotations

import numpy as np

from steptune.tuner.costs.categories import CATEGORIES
from steptune.tuner.profiling.gaps import Gaps
from steptune.tuner.profiling.trace import Trace
from steptune.tuner.records import GapSite


def gap_sites(trace: Trace, gaps: Gaps, top: int | None = None) -> tuple[GapSite, ...]:
    """Return the groups of gaps: all, or the `top` groups with the most time. The times of all groups sum to the time
    of the gaps.
    """
    next_row = gaps.next_row[gaps.piece_gap]
    names = np.where(next_row >= 0, trace.work.name[next_row].astype(np.int64), len(trace.names))
    keys, site, count = np.unique(
        names * len(CATEGORIES) + gaps.piece_category, return_inverse=True, return_counts=True
    )
    total = np.zeros(len(keys), dtype=np.int64)
    np.add.at(total, site, gaps.piece_end - gaps.piece_start)
    order = np.argsort(-total, kind="stable")[:top]
    sites = []
    for number in order.tolist():
        name, category = divmod(int(keys[number]), len(CATEGORIES))
        sites.append(
            GapSite(
                category=CATEGORIES[category].category.value,
                kernel_after=trace.names[name] if name < len(trace.names) else "",
                count=int(count[number]),
                total_ns=int(total[number]),
            )
        )
    return tuple(sites)

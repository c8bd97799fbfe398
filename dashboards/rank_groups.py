"""Rows for groups of ranks: ranks that spend their steps in a similar way form a group.

A run of a thousand ranks has a handful of kinds of ranks: the majority, stragglers, those of another pipeline stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

MOST_ROWS = 16
"""Maximum number of ranks that are shown one by one."""
ALIKE = 0.05
"""Maximum difference, as a share of the step, between a rank's times and those of the first rank of its group. The
times are those of each kind of work, and the wait for other ranks.
"""
_SHARES = ["compute", "communication", "input", "gaps"]


def grouped_ranks(ranks: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `trace_info.get_ranks_info`; if there are many ranks, return one row of medians for each group
    of similar ranks. Stragglers have groups of their own.

    The rank of a group is its members, as "0–4, 8–63 (61)".
    """
    if len(ranks) <= MOST_ROWS:
        return ranks
    places = ranks[_SHARES].assign(waits=(ranks["wait_ns"] / ranks["step_ns"]).fillna(0.0)).to_numpy(np.float64)
    group = np.full(len(ranks), -1)
    stragglers = ranks["straggler"].to_numpy(bool)
    while (group < 0).any():
        first = int(np.argmax(group < 0))
        alike = (np.abs(places - places[first]) <= ALIKE).all(axis=1) & (stragglers == stragglers[first])
        group[alike & (group < 0)] = first
    rows = []
    for first in np.unique(group).tolist():
        members = ranks[group == first]
        row = members.median(numeric_only=True)
        named = _named(sorted(set(members["rank"].tolist())))
        rows.append({**row, "rank": named, "device": "", "straggler": bool(stragglers[first])})
    return type(ranks)(rows, columns=ranks.columns)


def grouped_variation(variation: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `trace_info.get_variation_info`; if there are many devices, return one row for all of them."""
    if len(variation) <= MOST_ROWS:
        return variation
    row = {
        "device": f"{len(variation)} devices",
        "num_steps": int(variation["num_steps"].median()),
        "min_ns": variation["min_ns"].min(),
        "median_ns": variation["median_ns"].median(),
        "max_ns": variation["max_ns"].max(),
        "cv": variation["cv"].max(),
    }
    return type(variation)([row], columns=variation.columns)


def named_devices(names: Sequence[str]) -> str:
    """Return the names of the devices as text; for many devices, only the first name, the last name and the number of
    devices.
    """
    return ", ".join(names) if len(names) <= MOST_ROWS else f"{names[0]} to {names[-1]} ({len(names)})"


def _named(numbers: Sequence[int]) -> str:
    """Format ranks as ranges, with their number: "0–4, 8–63 (61)"."""
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    runs = [str(low) if low == high else f"{low}–{high}" for low, high in zip(starts, ends, strict=True)]
    shown = ", ".join([*runs[:4], "…"] if len(runs) > 5 else runs)
    return shown if len(numbers) == 1 else f"{shown} ({len(numbers)})"

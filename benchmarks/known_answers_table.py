"""Table of `known_answers.py`: a line a pair, and how many of them reach what is wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from known_steps import PAIRS, Pair

COSTS, WITHIN, WANTED = 0.02, 0.05, 0.85


def error_of(row: Mapping) -> float:
    """Share of the step by which the statement misses the middle of the truth; of a range, its farther end."""
    return max(abs(end - row["true"]) for end in row["stated"])


def interval(row: Mapping) -> tuple[float, float]:
    """Ends between which the truth lies."""
    return row["true"] - row["half_width"], row["true"] + row["half_width"]


def summary(rows: Sequence[Mapping]) -> str:
    """A line a pair, and how many of them reach what is wanted."""
    last = {row["pair"]: row for row in rows if "error" in row or "half_width" in row}
    lines = [_line(pair, last.get(pair.name)) for pair in PAIRS]
    good = [row for row in last.values() if "error" not in row]
    if not good:
        return "\n".join([*lines, "no pair was measured"])
    return "\n".join([*lines, *_judged(good)])


def _judged(rows: Sequence[Mapping]) -> list[str]:
    errors = [error_of(row) for row in rows]
    replayed = [abs(row["replayed"] - row["true"]) for row in rows if row["replayed"] is not None]
    widths = [row["half_width"] for row in rows]
    costly = [row for row in rows if interval(row)[0] > COSTS]
    undecided = [row["pair"] for row in rows if interval(row)[0] <= COSTS < interval(row)[1]]
    named = f"named first, of those that cost more than {COSTS:.0%}"
    surely = sum(error_of(row) + row["half_width"] <= WITHIN for row in rows)
    reached = sum(row["bound"] >= interval(row)[1] for row in rows)
    missed = [row["pair"] for row in rows if row["bound"] < interval(row)[0]]
    return [
        f"{len(rows)} of {len(PAIRS)} pairs; findings miss the saved share by {_quantiles(errors)}",
        f"a true share is known within {_quantiles(widths)}",
        f"{len(replayed)} replays miss it by {_quantiles(replayed)}" if replayed else "nothing was replayed",
        _counted(f"within {WITHIN:.0%} of the step", sum(error <= WITHIN for error in errors), len(rows)),
        f"the same wherever in its interval the truth lies: {surely} of {len(rows)}",
        _counted(named, sum(row["place"] == 1 for row in costly), len(costly)),
        f"the same among findings that state a saving: {sum(_leads(row) for row in costly)} of {len(costly)}",
        f"named at all: {sum(row['place'] is not None for row in costly)} of {len(costly)}",
        f"may cost more than {COSTS:.0%}, or less: {', '.join(undecided) or 'none'}",
        f"bound reaches the upper end of the truth: {reached} of {len(rows)}",
        f"bound below the lower end of it: {', '.join(missed) or 'none'}",
    ]


def _leads(row: Mapping) -> bool:
    """Say whether the finding of the cause is the first of those that state a saving, not just a share."""
    return next((f["rule"] for f in row["findings"] if f["saves"]), None) == row["rule"]


def _line(pair: Pair, row: Mapping | None) -> str:
    head = f"{pair.name:26} {pair.family:13}"
    if row is None or "error" in row:
        return f"{head} {'missing' if row is None else row['error']}"
    low, high = row["stated"]
    said = f"{low:.1%}" if low == high else f"{low:.1%} to {high:.1%}"
    first = next((finding["rule"] for finding in row["findings"]), "nothing")
    why = f"; not replayed: {row['not_replayed']}" if row["not_replayed"] else ""
    saves = f"saves {row['true']:6.1%} +- {row['half_width']:.1%}"
    return f"{head} {row['with_ms']:8.2f} ms, {saves}, said {said}, first {first}{why}"


def _quantiles(errors: Sequence[float]) -> str:
    median, high = np.quantile(errors, [0.5, 0.9]) * 100
    return f"{median:.1f} points at the median, {high:.1f} at the 90th percentile"


def _counted(name: str, count: int, total: int) -> str:
    verdict = "reached" if count >= WANTED * total else "NOT reached"
    return f"{name}: {count} of {total} (wanted {WANTED:.0%}): {verdict}"

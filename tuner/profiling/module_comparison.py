"""Comparison of the modules of two runs, and the changes in them."""

from __future__ import annotations

from collections.abc import Iterator

from steptune.tuner.trace_records import ModuleDifference, ModuleStats, TraceAnalysis

MORE = 1.05
"""Minimum ratio of one run's count, or number of bytes, to the other run's for a change to be reported."""
NUM_NAMED = 2
"""Maximum number of kernels that the description of a change names for each of the two runs."""
LONGEST_NAME = 60


def compare_modules(before: TraceAnalysis, after: TraceAnalysis, top: int) -> tuple[ModuleDifference, ...]:
    """Return the modules with the largest changes in their own operators' time, the largest first; none if either run
    has no call stacks.
    """
    first, second = _modules(before), _modules(after)
    if not first or not second:
        return ()
    empty = ModuleStats(name="", count=0, forward_ns=0, backward_ns=0, own_ns=0)
    steps = [side.ranks[0].breakdowns[0].num_steps for side in (before, after)]
    found = []
    for name in first.keys() | second.keys():
        one, other = first.get(name, empty), second.get(name, empty)
        found.append(
            ModuleDifference(
                name=name,
                before_ns=one.own_ns / steps[0],
                after_ns=other.own_ns / steps[1],
                before_count=one.num_launches / steps[0],
                after_count=other.num_launches / steps[1],
                cause=_cause(name, first, second, (steps[0], steps[1])),
            )
        )
    changed = [difference for difference in found if difference.change_ns]
    return tuple(sorted(changed, key=lambda one: (-abs(one.change_ns), one.name))[:top])


def _modules(analysis: TraceAnalysis) -> dict[str, ModuleStats]:
    """Return the modules of the first rank."""
    return {module.name: module for module in analysis.ranks[0].modules}


def _cause(name: str, first: dict[str, ModuleStats], second: dict[str, ModuleStats], steps: tuple[int, int]) -> str:
    if name not in second:
        return "not there after"
    if name not in first:
        return "not there before"
    found = list(_changes(first[name], second[name], steps))
    return "; ".join(found) or "the same kernels take a different time"


def _changes(one: ModuleStats, other: ModuleStats, steps: tuple[int, int]) -> Iterator[str]:
    """Yield the changes of a module, the most informative first."""
    if one.dtypes and other.dtypes and one.dtypes != other.dtypes:
        yield f"computes matmuls in {' and '.join(other.dtypes)} instead of {' and '.join(one.dtypes)}"
    gone = [name for name in one.kernels if name not in other.kernels]
    new = [name for name in other.kernels if name not in one.kernels]
    if gone or new:
        yield f"other kernels: {_named(new)} instead of {_named(gone)}"
    launches = one.num_launches / steps[0], other.num_launches / steps[1]
    if max(launches) > MORE * min(launches):
        yield f"{launches[1]:.3g} launches a step instead of {launches[0]:.3g}"
    if one.num_bytes and other.num_bytes:
        ratio = other.num_bytes / steps[1] / (one.num_bytes / steps[0])
        if not 1 / MORE <= ratio <= MORE:
            yield f"moves {ratio:.2f} times the bytes"


def _named(kernels: list[str]) -> str:
    if not kernels:
        return "none"
    shown = [name if len(name) <= LONGEST_NAME else name[:LONGEST_NAME] + "…" for name in kernels[:NUM_NAMED]]
    more = f" and {len(kernels) - NUM_NAMED} more" if len(kernels) > NUM_NAMED else ""
    return ", ".join(shown) + more

"""Difference between two runs: categories with confidence intervals, and the kernels and gaps that explain it.

All figures are per step and device, the mean over the ranks of a run and their devices, so that kernels and gaps add up
to what categories show.

Every step is a sample: intervals are Welch's, on the steps' own times. Steps of one run share whatever
was peculiar to that run, so an interval says whether the runs differ beyond the noise of their steps,
not whether two other runs would.

Source: Welch, "The generalization of Student's problem when several different population variances
are involved", Biometrika 34 (1947).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from msgspec import structs

from steptune.tuner.costs.categories import INFO
from steptune.tuner.errors import SteptuneError
from steptune.tuner.estimates import plain_mean, student_quantile
from steptune.tuner.profiling.lanes import MAX_CELLS
from steptune.tuner.profiling.module_comparison import compare_modules
from steptune.tuner.profiling.tiles import with_at_most
from steptune.tuner.records import Breakdown
from steptune.tuner.trace_records import (
    Comparison,
    Difference,
    GapDifference,
    KernelDifference,
    RankAnalysis,
    TraceAnalysis,
)
from steptune.tuner.wording import counted

STEP = "step"
LEVEL = 0.95
NO_INTERVAL = "each side has one step: no interval can be computed"
NO_INTERVAL_ONE_SIDE = "{side} has one step: no interval can be computed"

AS_PROFILED = "steps and categories exclude the profiler's overhead; kernels and gaps include it"

_Key = tuple[str, str]
_D = TypeVar("_D", bound=KernelDifference)


class ComparisonError(SteptuneError):
    """Error for two sides that cannot be compared."""


def compare(
    before: TraceAnalysis, after: TraceAnalysis, *, labels: tuple[str, str] = ("before", "after"), top: int = 20
) -> Comparison:
    """Compare the traces of two runs.

    Kernels are compared as far as both analyses list them: analyse with a large `top`.
    """
    compared = compare_breakdowns(_breakdowns(before), _breakdowns(after), labels=labels)
    return Comparison(
        **{name: getattr(compared, name) for name in ("before", "after", "num_steps", "step", "categories")},
        kernels=largest(_kernels(before), _kernels(after), KernelDifference, top),
        gaps=largest(_gaps(before), _gaps(after), GapDifference, top),
        modules=compare_modules(before, after, top),
        notes=(*_different_runs(before, after, labels), *compared.notes, *_bases(before, after)),
    )


def shortened(analysis: TraceAnalysis, top: int, max_cells: int = MAX_CELLS) -> TraceAnalysis:
    """Return a shortened analysis, which suffices for printing: at most `top` rows in each list, and at most
    `max_cells` cells in each lane of the timeline. `compare` and pages need more.
    """

    def cut(rank: RankAnalysis) -> RankAnalysis:
        gaps = {
            device: structs.replace(stats, longest=stats.longest[:top], sites=stats.sites[:top])
            for device, stats in rank.gaps.items()
        }
        return structs.replace(
            rank,
            gaps=gaps,
            kernels=rank.kernels[:top],
            operators=rank.operators[:top],
            modules=rank.modules[:top],
            lanes=tuple(with_at_most(lane, max_cells) for lane in rank.lanes),
        )

    return structs.replace(analysis, ranks=tuple(cut(rank) for rank in analysis.ranks))


def compare_breakdowns(
    before: Sequence[Breakdown], after: Sequence[Breakdown], *, labels: tuple[str, str] = ("before", "after")
) -> Comparison:
    """Compare categories only, for instance of two trials. Ranks and devices of a run are averaged.

    Step times are unprofiled ones if both sides know them, else profiled ones.

    Raises:
        ComparisonError: A side has no breakdown, or its capture cannot be trusted.
    """
    for label, side in zip(labels, (before, after), strict=True):
        if not side:
            raise ComparisonError(f"{label} has no breakdown: profile it first")
    rescaled = all(b.rescaled for b in (*before, *after))
    steps = [_steps(side, rescaled=rescaled) for side in (before, after)]
    # In the order of the table: a name of another version comes last.
    names = [n for n in INFO if any(n in step for side in steps for step in side)]
    names += sorted({n for side in steps for step in side for n in step} - set(names))
    categories = [difference(name, *([step.get(name, 0.0) for step in side] for side in steps)) for name in names]
    totals = [[sum(step.values()) for step in side] for side in steps]
    notes = _different_kinds(before, after, labels)
    if not rescaled and any(b.rescaled for b in (*before, *after)):
        notes.append("the step time without the profiler is known for only one side, so both sides show profiled times")
    counts = len(steps[0]), len(steps[1])
    if counts[0] != counts[1]:
        notes.append(
            f"the sides have {counts[0]} and {counted(counts[1], 'step')}: each shows the mean over its own steps"
        )
    if max(counts) == 1:
        notes.append(NO_INTERVAL)
    elif min(counts) == 1:
        notes.append(NO_INTERVAL_ONE_SIDE.format(side=labels[counts.index(1)]))
    distrust = [
        f"{label} cannot be trusted: {problem}"
        for label, side in zip(labels, (before, after), strict=True)
        for problem in dict.fromkeys(problem for b in side for problem in b.quality.problems)
    ]
    notes += distrust
    step = difference(STEP, *totals)
    if distrust:
        step, *categories = (structs.replace(d, low_ns=None, high_ns=None) for d in (step, *categories))
    return Comparison(
        before=labels[0],
        after=labels[1],
        num_steps=counts,
        step=step,
        categories=tuple(sorted(categories, key=lambda d: -abs(d.change_ns))),
        notes=tuple(notes),
        trusted=not distrust,
    )


def _different_kinds(before: Sequence[Breakdown], after: Sequence[Breakdown], labels: tuple[str, str]) -> list[str]:
    """Return a note if one side ran on a CPU and the other on a device: categories then differ in meaning."""
    kinds = [{"a CPU" if b.device == "cpu" else "a GPU" for b in side} for side in (before, after)]
    if kinds[0] == kinds[1]:
        return []
    said = [f"{label} ran on {' and '.join(sorted(kind))}" for label, kind in zip(labels, kinds, strict=True)]
    return [
        f"different kinds of device: {', '.join(said)}. On a CPU, operators are timed; on a GPU, kernels and the "
        "gaps between them are. Only step times can be compared"
    ]


def _breakdowns(analysis: TraceAnalysis) -> list[Breakdown]:
    return [breakdown for rank in analysis.ranks for breakdown in rank.breakdowns]


def _steps(breakdowns: Sequence[Breakdown], *, rescaled: bool) -> list[dict[str, float]]:
    """Return nanoseconds by category for each step, as the mean over ranks and devices."""
    sides = [_scaled_steps(b) if rescaled else [_floats(step) for step in _own_steps(b)] for b in breakdowns]
    # Ranks step together; what only some of them recorded has no counterpart.
    count = min(len(steps) for steps in sides)
    names = {name for steps in sides for step in steps for name in step}
    return [
        {name: statistics.fmean(steps[number].get(name, 0.0) for steps in sides) for name in names}
        for number in range(count)
    ]


def _own_steps(breakdown: Breakdown) -> Sequence[dict[str, int]]:
    """Return the time of each category in each recorded step. An older record has only the mean of its steps, which is
    returned as one step.
    """
    if breakdown.steps:
        return breakdown.steps
    return [{name: value // breakdown.num_steps for name, value in breakdown.categories.items()}]


def _scaled_steps(breakdown: Breakdown) -> list[dict[str, float]]:
    """Return the time of each category in each step, scaled so that its mean matches the category's time in the
    unprofiled step.
    """
    steps = _own_steps(breakdown)
    means = {name: statistics.fmean(step.get(name, 0) for step in steps) for name in breakdown.rescaled}
    return [
        {
            name: step.get(name, 0) * value / means[name] if means[name] else float(value)
            for name, value in breakdown.rescaled.items()
        }
        for step in steps
    ]


def _floats(step: dict[str, int]) -> dict[str, float]:
    return {name: float(value) for name, value in step.items()}


def difference(name: str, before: Sequence[float], after: Sequence[float]) -> Difference:
    """Return the means of the steps on both sides, and Welch's interval of their difference."""
    first, second = plain_mean(before), plain_mean(after)
    low = high = None
    if min(len(before), len(after)) > 1:
        change = second.mean - first.mean
        variances = first.standard_error**2, second.standard_error**2
        half_width = 0.0
        if sum(variances) > 0:
            degrees = sum(variances) ** 2 / sum(
                variance**2 / estimate.degrees for variance, estimate in zip(variances, (first, second), strict=True)
            )
            half_width = student_quantile((1 + LEVEL) / 2, degrees) * math.sqrt(sum(variances))
        low, high = change - half_width, change + half_width
    return Difference(name=name, before_ns=first.mean, after_ns=second.mean, low_ns=low, high_ns=high)


# --- what explains it --------------------------------------------------------------------------


def _per_step(
    analysis: TraceAnalysis, rows: Callable[[RankAnalysis], Iterable[tuple[_Key, int, int]]]
) -> dict[_Key, tuple[float, float]]:
    """Return the time and the number of kernels or of gaps, per step and device, by name and category."""
    totals: dict[_Key, tuple[float, float]] = {}
    num_devices = len(_breakdowns(analysis))
    for rank in analysis.ranks:
        share = 1 / (rank.breakdowns[0].num_steps * num_devices)
        for key, time_ns, count in rows(rank):
            time, number = totals.get(key, (0.0, 0.0))
            totals[key] = time + time_ns * share, number + count * share
    return totals


def _kernels(analysis: TraceAnalysis) -> dict[_Key, tuple[float, float]]:
    return _per_step(analysis, lambda rank: (((k.name, k.category), k.total_ns, k.count) for k in rank.kernels))


def _gaps(analysis: TraceAnalysis) -> dict[_Key, tuple[float, float]]:
    return _per_step(
        analysis,
        lambda rank: (
            ((site.kernel_after, site.category), site.total_ns, site.count)
            for stats in rank.gaps.values()
            for site in stats.sites
        ),
    )


def largest(
    before: dict[_Key, tuple[float, float]], after: dict[_Key, tuple[float, float]], record: type[_D], top: int
) -> tuple[_D, ...]:
    """Return the kernels or gaps whose time per step changed most, by name and category."""
    differences = []
    for key in before.keys() | after.keys():
        (before_ns, before_count), (after_ns, after_count) = before.get(key, (0.0, 0.0)), after.get(key, (0.0, 0.0))
        differences.append(
            record(
                name=key[0],
                category=key[1],
                before_ns=before_ns,
                after_ns=after_ns,
                before_count=before_count,
                after_count=after_count,
            )
        )
    changed = [d for d in differences if d.before_ns != d.after_ns]
    return tuple(sorted(changed, key=lambda d: (-abs(d.change_ns), d.name, d.category))[:top])


def _different_runs(before: TraceAnalysis, after: TraceAnalysis, labels: tuple[str, str]) -> list[str]:
    """Return reasons why two runs are hard to compare."""
    devices = [sorted({name for rank in side.ranks for name in rank.device_names.values()}) for side in (before, after)]
    on_gpu = [any(b.device != "cpu" for b in _breakdowns(side)) for side in (before, after)]
    notes = []
    if all(devices) and devices[0] != devices[1]:
        notes.append(f"different devices: {', '.join(devices[0])} and {', '.join(devices[1])}")
    unnamed = [label for label, names, gpu in zip(labels, devices, on_gpu, strict=True) if gpu and not names]
    if unnamed and all(on_gpu):
        notes.append(
            f"devices are not named in {' and '.join(unnamed)}: whether both sides ran on the same kind is unknown"
        )
    sizes = [side.ranks[0].num_ranks for side in (before, after)]
    if sizes[0] != sizes[1]:
        notes.append(f"runs of {counted(sizes[0], 'rank')} and of {counted(sizes[1], 'rank')}")
    return notes


def _bases(before: TraceAnalysis, after: TraceAnalysis) -> list[str]:
    """Describe how the figures were obtained, if that is not obvious."""
    notes = []
    counts = [len(_breakdowns(side)) for side in (before, after)]
    if max(counts) > 1:
        notes.append(
            f"all figures, including kernels and gaps, are per step and device: means over {counts[0]} and "
            f"{counted(counts[1], 'device')}"
        )
    sides = (before, after)
    explained = any(rank.kernels or rank.gaps for side in sides for rank in side.ranks)
    if explained and all(b.rescaled for side in sides for b in _breakdowns(side)):
        notes.append(AS_PROFILED)
    return notes

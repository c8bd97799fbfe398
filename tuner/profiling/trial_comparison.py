"""Difference between two trials: the measured step times, and the parts of their profiles that explain it.

A trial is one process start: its windows and profiled steps share whatever was peculiar to that start, so the intervals
say whether these two starts differ beyond their own noise. To tell whether the configurations differ takes several
starts, as in a study's confirmation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import structs

from steptune.tuner.estimates import restart_s_per_step
from steptune.tuner.profiling.comparison import (
    AS_PROFILED,
    STEP,
    ComparisonError,
    compare_breakdowns,
    difference,
    largest,
)
from steptune.tuner.records import Environment, GapSite, KernelStats, TrialResult
from steptune.tuner.trace_records import Comparison, GapDifference, KernelDifference

ONE_START = "each configuration ran once: further runs may differ by more than the intervals show"

_Rows = dict[tuple[str, str], tuple[float, float]]


def compare_trials(
    before: TrialResult, after: TrialResult, *, labels: tuple[str, str] = ("before", "after"), top: int = 20
) -> Comparison:
    """Compare two trials.

    Kernels and gaps are those of the first rank, as far as both profiles list them: a profile keeps those with the
    most time, so an entry that only one side lists counts only if the other would have listed it.

    Raises:
        ComparisonError: A trial was not profiled.
    """
    for label, trial in zip(labels, (before, after), strict=True):
        if not trial.breakdowns:
            reason = f"it failed ({trial.failure.message})" if trial.failure else "it was measured, but not profiled"
            raise ComparisonError(f"{label} has no breakdown, because {reason}: compare a trial that has one")
    compared = compare_breakdowns(before.breakdowns, after.breakdowns, labels=labels)
    windows = [_step_times(trial) for trial in (before, after)]
    notes = [*compared.notes, ONE_START]
    if max(len(before.breakdowns), len(after.breakdowns)) > 1:
        notes.append("categories are means over the ranks; kernels and gaps are those of the first rank")
    sizes = [_samples_per_step(trial) for trial in (before, after)]
    if all(sizes) and sizes[0] != sizes[1]:
        notes.append(
            f"a step has {sizes[0]:g} samples on one side and {sizes[1]:g} on the other: compare samples per second"
        )
    kernels, gaps = ([rows(trial) for trial in (before, after)] for rows in (_kernels, _gaps))
    if all(trial.breakdowns[0].rescaled for trial in (before, after)) and any((*kernels, *gaps)):
        notes.append(AS_PROFILED)
    return structs.replace(
        compared,
        measured=difference(STEP, *windows) if all(windows) else None,
        kernels=largest(*_comparable(*kernels), KernelDifference, top),
        gaps=largest(*_comparable(*gaps), GapDifference, top),
        notes=tuple(notes),
    )


def different_hardware(before: Environment | None, after: Environment | None) -> list[str]:
    """Return notes if two studies ran on different hardware or software."""
    if before is None or after is None or before.hardware == after.hardware:
        return []
    one, other = before.hardware, after.hardware
    if one.label != other.label:
        return [f"different hardware: {one.label} and {other.label}"]
    changed = sorted(n for n in {*one.versions, *other.versions} if one.versions.get(n) != other.versions.get(n))
    versions = [f"{n} {one.versions.get(n, 'none')} and {other.versions.get(n, 'none')}" for n in changed]
    return [f"different machines of the same kind{': ' if versions else ''}{', '.join(versions)}"]


def _step_times(trial: TrialResult) -> list[float]:
    """Return one step time per window, weighted so that their mean is the total time divided by the number of all
    steps.

    The scatter of the values is that of this ratio (Cochran, "Sampling Techniques", chapter 6): a window of few steps
    weighs less. For windows of equally many steps the values are their step times. Epoch restarts are included, as
    everywhere.
    """
    windows = trial.clean_windows
    if not windows:
        return []
    restart_ns = 1e9 * restart_s_per_step(trial)
    num_steps = sum(window.num_steps for window in windows) / len(windows)
    mean = sum(window.duration_ns for window in windows) / (num_steps * len(windows))
    return [restart_ns + mean + (window.duration_ns - mean * window.num_steps) / num_steps for window in windows]


def _samples_per_step(trial: TrialResult) -> float:
    """Return the mean number of samples per step; 0 without windows."""
    num_steps = sum(window.num_steps for window in trial.clean_windows)
    return sum(window.num_samples for window in trial.clean_windows) / num_steps if num_steps else 0.0


def _kernels(trial: TrialResult) -> _Rows:
    stats: Sequence[KernelStats] = trial.profile.kernels if trial.profile else ()
    return _per_step(trial, (((k.name, k.category), k.total_ns, k.count) for k in stats))


def _gaps(trial: TrialResult) -> _Rows:
    sites: Sequence[GapSite] = trial.profile.gap_sites if trial.profile else ()
    return _per_step(trial, (((s.kernel_after, s.category), s.total_ns, s.count) for s in sites))


def _per_step(trial: TrialResult, rows: Iterable[tuple[tuple[str, str], int, int]]) -> _Rows:
    num_steps = trial.breakdowns[0].num_steps
    return {key: (time_ns / num_steps, count / num_steps) for key, time_ns, count in rows}


def _comparable(before: _Rows, after: _Rows) -> tuple[_Rows, _Rows]:
    """Drop rows that only one list contains and that may merely be missing from the other, because each list contains
    only the rows with the most time.
    """
    return _known(before, after), _known(after, before)


def _known(rows: _Rows, other: _Rows) -> _Rows:
    end = min((time_ns for time_ns, _ in other.values()), default=0.0)
    return {key: row for key, row in rows.items() if key in other or row[0] > end}

"""Summary of a trial, computed once when the trial completes, and the view of a trial that pages and REST read."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from steptune.tuner.estimates import log_rate, log_ratio, step_time_ns, units_per_s
from steptune.tuner.records import Trial, TrialResult


class TrialFigures(NamedTuple):
    """Measurements of one trial over its clean windows.

    Attributes:
        step_time_ns: Time of a step, epoch restarts included; None without clean windows.
        units_per_s: Samples or tokens per second, epoch restarts included; None without clean windows.
        num_windows: Number of clean windows.
        gain: Speed over the reference's; None where either was not measured.
    """

    step_time_ns: float | None
    units_per_s: float | None
    num_windows: int
    gain: float | None


class TrialView(NamedTuple):
    """A trial with its stored summary.

    Attributes:
        trial: Trial with its result.
        figures: Summary of the result.
    """

    trial: Trial
    figures: TrialFigures


def figures_of(result: TrialResult, references: Sequence[TrialResult]) -> TrialFigures:
    """Compute the step time, rate and gain of a trial from its result.

    Args:
        references: Measured runs of the reference, including those that took turns with the trial.
    """
    windows = result.clean_windows
    level = statistics.fmean(log_rate(r).mean for r in references) if references else math.nan
    gain = gain_over(result, references, level)
    return TrialFigures(
        step_time_ns=step_time_ns(result) if windows else None,
        units_per_s=units_per_s(result) if windows else None,
        num_windows=len(windows),
        gain=gain if math.isfinite(gain) else None,
    )


def gain_over(result: TrialResult | None, references: Sequence[TrialResult], level: float) -> float:
    """Return the ratio of a trial's speed to the reference's; NaN if the trial was not measured. If a run of the
    reference took turns with the trial, the two are compared round by round; otherwise the trial is compared with the
    mean of all runs of the reference.

    Args:
        level: Mean logarithm of the rates of the references.
    """
    if result is None or not result.ok or not references:
        return math.nan
    in_turns = [r for r in references if r.group == result.group and r.candidate != result.candidate]
    paired = log_ratio(result, in_turns[0]) if in_turns else None
    if paired is not None:
        return math.exp(paired.mean)
    return math.exp(log_rate(result).mean - level)

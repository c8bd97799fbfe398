"""Outcome of one trial, in a sentence and a few facts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from steptune.dashboards import units
from steptune.dashboards.headline import Fact
from steptune.dashboards.windows import get_spread
from steptune.tuner.records import (
    Decision,
    FailureKind,
    MeasureSettings,
    Phase,
    Purpose,
    Recommendation,
    SampleUnit,
    TrialResult,
    TrialState,
)
from steptune.tuner.speeds import Method, speed_of
from steptune.tuner.trial_figures import TrialFigures, TrialView

PHASES = {
    Phase.BUILD: "during the build",
    Phase.GUARD: "during the guard's check",
    Phase.WARM_UP: "during the warm-up",
    Phase.MEASURE: "during the measurement",
    Phase.PROFILE: "during profiling",
    Phase.REPORT: "during the report",
}
FAILURES = {
    FailureKind.OUT_OF_MEMORY: "Out of memory",
    FailureKind.UNSUPPORTED: "Unsupported",
    FailureKind.NUMERICS: "Training differs from the reference",
    FailureKind.TIMEOUT: "Timed out",
    FailureKind.CRASH: "Crashed",
    FailureKind.WORKLOAD_ERROR: "Error in the workload",
    FailureKind.INFRASTRUCTURE: "Error in the infrastructure",
}


class TrialHeadline(NamedTuple):
    """Headline of a trial. `tone` is "good", "neutral" or "warning"."""

    tone: str
    title: str
    sentence: str
    facts: tuple[Fact, ...]


def get_trial_headline(
    view: TrialView,
    unit: SampleUnit,
    decisions: Sequence[Decision] = (),
    recommendation: Recommendation | None = None,
) -> TrialHeadline:
    """Return the headline of a trial: the rate that it measured, or else the reason why it has none.

    Args:
        decisions: Decisions of its study; those that rest on this trial are shown.
        recommendation: Recommendation of its study, which states the speed of the trial's configuration.
    """
    trial, figures = view
    own = [decision for decision in decisions if trial.trial_id in decision.trial_ids]
    result = trial.result
    if trial.state is TrialState.RUNNING:
        return TrialHeadline("neutral", "Running", "The trial is running; its results appear here when it ends.", ())
    if result is None:
        return TrialHeadline("warning", "Lost", "The trial has no results: its process or its worker died.", ())
    facts = _facts(result, figures, own, recommendation)
    if result.failure is not None:
        failure = result.failure
        title = f"{FAILURES[failure.kind]} {PHASES[failure.phase]}"
        rank = f" (rank {failure.rank})" if failure.rank else ""
        signal = f" Signal {failure.signal} ended the process." if failure.signal else ""
        return TrialHeadline("warning", title, f"{failure.message}{rank}.{signal}", facts)
    if result.guard is not None and not result.guard.passed:
        return TrialHeadline(
            "warning", "Rejected: training differs from the reference", f"{result.guard.reason}.", facts
        )
    if figures.units_per_s is None:
        sentence = (
            "Other programs used the machine in every window, or the trial reached a limit before its first valid "
            "window."
        )
        voids = [window.void for window in result.windows if window.void]
        if voids:
            sentence = f"Every window is void, the last one because {voids[-1]}."
        return TrialHeadline("warning", "Not measured: no valid timing window", sentence, facts)
    sentence = f"{_told(own[-1])}." if own else "No decision of the study depends on this trial alone."
    return TrialHeadline(
        "good" if own and own[-1].verdict in ("accepted", "confirmed") else "neutral",
        units.rate(figures.units_per_s, unit),
        sentence,
        facts,
    )


def _told(decision: Decision) -> str:
    return f"{units.words(decision.verdict).capitalize()}: {decision.reason}".rstrip(".")


def _facts(
    result: TrialResult, figures: TrialFigures, decisions: Sequence[Decision], recommendation: Recommendation | None
) -> tuple[Fact, ...]:
    return tuple(
        fact
        for fact in (
            _step_fact(result, figures),
            _estimate_fact(result, decisions),
            _configuration_fact(result, recommendation),
            _limit_fact(decisions),
            _guard_fact(result),
            _memory_fact(result),
            _device_fact(result),
            _time_fact(result),
            _compile_fact(result),
            _repeats_fact(result),
            Fact("Isolation", result.isolation, f"{result.interpreter} interpreter"),
        )
        if fact is not None
    )


def _step_fact(result: TrialResult, figures: TrialFigures) -> Fact | None:
    spread = get_spread(result)
    if spread is None or figures.step_time_ns is None:
        return None
    width = f"± {units.percent(spread.half_width)} within this run, " if math.isfinite(spread.half_width) else ""
    void = f", {spread.num_void} void" if spread.num_void else ""
    restart = (
        f"; restarting the epoch takes {units.milliseconds(spread.restart_ms)} of the step" if spread.restart_ms else ""
    )
    counted = units.counted(figures.num_windows, "window")
    contended = "; other programs used the machine" if result.contended else ""
    return Fact("Step", units.milliseconds(figures.step_time_ns / 1e6), f"{width}{counted}{void}{contended}{restart}")


def _estimate_fact(result: TrialResult, decisions: Sequence[Decision]) -> Fact | None:
    """State the estimate on which a decision relied, from this run and the runs interleaved with it. If the machine was
    busy, no estimate is stated, because other load slows the compared runs unequally.
    """
    gains = [d.measured_gain for d in decisions if d.measured_gain is not None and math.isfinite(d.measured_gain)]
    if not gains or not result.clean_windows or result.purpose in (Purpose.CONFIRM, Purpose.CONTRIBUTION):
        return None
    load = statistics.median(window.foreign_cpu_share for window in result.clean_windows)
    if result.contended or load > MeasureSettings().foreign_cpu_share:
        return Fact("Search estimate", "not stated", f"other programs used {units.percent(load)} of the cores")
    note = "speed of this run relative to its companion run, not the configuration's final speed"
    return Fact("Search estimate", f"this run: {units.ratio(1 + gains[-1])}", note)


def _configuration_fact(result: TrialResult, recommendation: Recommendation | None) -> Fact | None:
    """State the speed of the trial's configuration, as given by the study's recommendation."""
    speed = None if recommendation is None else speed_of(recommendation, result.candidate)
    if speed is None or speed.method is Method.REFERENCE:
        return None
    interval = f"; 95 % interval {units.ratio_interval(speed.interval)}" if speed.interval else ""
    return Fact("Its configuration", units.ratio(speed.ratio), f"{speed.told}{interval}")


def _limit_fact(decisions: Sequence[Decision]) -> Fact | None:
    bounds = [decision.predicted_bound for decision in decisions if decision.predicted_bound is not None]
    if not bounds or math.isinf(limit := units.gain_limit(bounds[-1])):
        return None
    return Fact("Predicted", f"at most {units.ratio(limit)}", "from the breakdown, before the trial ran")


def _guard_fact(result: TrialResult) -> Fact | None:
    if result.guard is None:
        return Fact("Guard", "not checked", "this run repeats a candidate that was checked")
    word = "same training" if result.guard.passed else "rejected"
    return Fact("Guard", word, result.guard.reason)


def _memory_fact(result: TrialResult) -> Fact | None:
    if not result.peak_memory_bytes:
        return None
    on_device = any(peak.device_bytes for peak in result.memory)
    ranks = f", the largest of {len(result.memory)} ranks" if len(result.memory) > 1 else ""
    return Fact("Peak memory", units.memory(result.peak_memory_bytes), ("device" if on_device else "resident") + ranks)


def _repeats_fact(result: TrialResult) -> Fact | None:
    if not result.repeated:
        return None
    reasons = (f"{attempt.failure.message} ({PHASES[attempt.failure.phase]})" for attempt in result.repeated)
    return Fact("Repeated", units.counted(len(result.repeated), "earlier run"), "; ".join(reasons))


def _device_fact(result: TrialResult) -> Fact | None:
    """State the clock, power and temperature of the first rank's device in the last window, as its driver reports them,
    and which readings were not available.
    """
    unread = "; ".join(f"not measured: {text}" for text in result.unmeasured)
    readings = [window.device for window in result.windows if window.device is not None]
    if not readings:
        return Fact("Device state", "not measured", unread) if unread else None
    last = readings[-1]
    figures = (
        (last.sm_clock_mhz, "MHz"),
        (None if last.power_w is None else round(last.power_w), "W"),
        (last.temperature_c, "°C"),
    )
    value = ", ".join(f"{figure} {unit}" for figure, unit in figures if figure is not None)
    limits = f"clock limited by: {', '.join(last.limits)}" if last.limits else "clock not throttled"
    return Fact("Device state", value or "not measured", "; ".join(part for part in (limits, unread) if part))


def _time_fact(result: TrialResult) -> Fact | None:
    if not result.duration_ns:
        return None
    longest = sorted(result.phases_ns.items(), key=lambda item: -item[1])[:2]
    note = ", ".join(f"{units.words(name)} {units.duration(ns / 1e9)}" for name, ns in longest)
    return Fact("Took", units.duration(result.duration_ns / 1e9), note)


def _compile_fact(result: TrialResult) -> Fact | None:
    if result.startup is None or not result.startup.compile_ns:
        return None
    cache = "nothing was cached" if result.startup.compile_cold else "from a warm cache"
    return Fact("Compilation", units.duration(result.startup.compile_ns / 1e9), cache)

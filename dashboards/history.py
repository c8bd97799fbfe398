"""History of the search, trial by trial."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from steptune.dashboards import theme, units
from steptune.dashboards.figures import Figure
from steptune.dashboards.sources import TrialSource
from steptune.dashboards.starts import reference_results, results
from steptune.tuner.estimates import log_rate, units_per_s
from steptune.tuner.records import Decision, Purpose, SampleUnit, Trial, TrialResult, TrialState
from steptune.tuner.trial_figures import gain_over

NUM_HOVERS = 4096
"""Maximum number of hover texts that a process caches. When the page of a running study is rendered again, most of its
trials are the same as before.
"""


@dataclass(frozen=True, kw_only=True)
class Look:
    """Colour and shape of an outcome; the shape is for readers who cannot tell the colours apart."""

    colour: str
    symbol: str
    title: str


LOOKS: dict[str, Look] = {
    "baseline": Look(colour=theme.NEUTRAL, symbol="square", title="today's settings"),
    "accepted": Look(colour=theme.GOOD, symbol="circle", title="accepted"),
    "confirmed": Look(colour=theme.GOOD, symbol="diamond", title="confirmation"),
    "no_gain": Look(colour=theme.MUTED, symbol="circle", title="no gain"),
    "inconclusive": Look(colour=theme.NEUTRAL, symbol="circle-open", title="inconclusive"),
    "no_effect": Look(colour=theme.NEUTRAL, symbol="triangle-down-open", title="had no effect"),
    "guard_rejected": Look(colour=theme.BAD, symbol="star-triangle-up", title="training differs from the reference"),
    "contended": Look(
        colour=theme.NEUTRAL, symbol="square-x-open", title="not measured: other programs used the machine"
    ),
    "failed": Look(colour=theme.BAD, symbol="x", title="failed"),
    "running": Look(colour=theme.MUTED, symbol="hourglass-open", title="running"),
    "measured": Look(colour=theme.NEUTRAL, symbol="circle-open-dot", title="measured"),
}


class HistoryRow(NamedTuple):
    """One trial of the history."""

    number: int
    trial_id: str
    label: str
    """Description of the change that the trial tests."""
    candidate: str
    """All settings that differ from today's."""
    purpose: str
    outcome: str
    """Outcome of the trial: a key of `LOOKS`."""
    gain: float
    """Speed of this run divided by the speed of today's settings; NaN if this run was not measured. Today's speed is
    taken from the reference run that took turns with this run or, without one, from all reference runs. The study may
    state another ratio for the configuration.
    """
    units_per_s: float
    note: str
    """Description of what went wrong; empty where nothing did."""


def get_history_info(source: TrialSource, study_id: str) -> list[HistoryRow]:
    """Return one row per trial, in the order in which they began."""
    trials = source.trials(study_id)
    references = _references(trials)
    level = statistics.fmean(log_rate(r).mean for r in references) if references else math.nan
    verdicts = {trial_id: d for d in source.decisions(study_id) for trial_id in d.trial_ids}
    return [
        HistoryRow(
            trial.sequence,
            trial.trial_id,
            _changed(trial, verdicts.get(trial.trial_id)),
            trial.candidate.label,
            trial.purpose.value,
            outcome_of(trial, verdicts.get(trial.trial_id)),
            gain_over(trial.result, references, level),
            units_per_s(trial.result) if trial.result and trial.result.clean_windows else math.nan,
            note_on(trial),
        )
        for trial in trials
    ]


def _changed(trial: Trial, decision: Decision | None) -> str:
    return (decision and units.moves_label(decision.moves)) or trial.candidate.label


def _references(trials: Sequence[Trial]) -> list[TrialResult]:
    """Return the measured runs of the reference, including those of the confirmations."""
    starts = reference_results(trials)
    return [r for r in results(trials) if r.ok and starts and r.candidate == starts[0].candidate]


def outcome_of(trial: Trial, decision: Decision | None) -> str:
    """Return the outcome of a trial: its failure, else the verdict of the decision for which it was run."""
    if trial.state is TrialState.RUNNING:
        return "running"
    if trial.result is None or trial.result.failure is not None:
        return "guard_rejected" if decision and decision.verdict == "guard_rejected" else "failed"
    if trial.result.guard is not None and not trial.result.guard.passed:
        return "guard_rejected"
    if trial.candidate.is_baseline:
        return "baseline"
    if trial.purpose is Purpose.CONFIRM:
        return "confirmed"
    if trial.purpose is Purpose.CONTRIBUTION:
        return "measured"
    verdict = decision.verdict if decision else "measured"
    return verdict if verdict in LOOKS else "measured"


def note_on(trial: Trial) -> str:
    """Return a remark to show beside a trial's figures; often empty."""
    result = trial.result
    if trial.state is TrialState.LOST:
        return "lost: the trial's process died with the search"
    if result is None:
        return ""
    if result.failure is not None:
        kind, phase = units.words(result.failure.kind.value), units.words(result.failure.phase.value)
        return f"{kind} in {phase}: {result.failure.message}"
    if result.guard is not None and not result.guard.passed:
        return result.guard.reason
    return "other programs used the machine while it was measured" if result.contended else ""


def plot_history(info: Sequence[HistoryRow], unit: SampleUnit) -> Figure:
    """Plot each trial's speedup over today's settings; mark trials without a speed on the axis."""
    figure = theme.new_figure(height=340)
    gains = [row.gain for row in info if not math.isnan(row.gain)]
    floor, ceiling = min(1.0, *gains, 1.0), max(1.0, *gains, 1.0)
    room = 0.12 * max(ceiling - floor, 0.4)
    figure.add_hline(y=1, line={"color": theme.NEUTRAL, "width": 1, "dash": "dot"})
    for outcome, look in LOOKS.items():
        rows = [row for row in info if row.outcome == outcome]
        if not rows:
            continue
        figure.add_scatter(
            name=look.title,
            mode="markers",
            x=[row.number for row in rows],
            y=[floor - room if math.isnan(row.gain) else row.gain for row in rows],
            marker={
                "color": look.colour,
                "symbol": look.symbol,
                "size": 10,
                "line": {"width": 1.5, "color": look.colour},
            },
            customdata=[_hover(row, unit) for row in rows],
            hovertemplate="%{customdata}<extra>%{fullData.name}</extra>",
        )
    figure.update_xaxes(title={"text": "trial"}, showgrid=False, range=[0.3, len(info) + 0.7], tickformat="d")
    if len(info) <= 12:
        figure.update_xaxes(dtick=1)
    figure.update_yaxes(
        title={"text": "speed of each run, today's settings = 1×"},
        ticksuffix="×",
        range=[floor - 2 * room, ceiling + room],
    )
    return figure


@functools.lru_cache(NUM_HOVERS)
def _hover(row: HistoryRow, unit: SampleUnit) -> str:
    speed = (
        ""
        if math.isnan(row.gain)
        else f"this run: <b>{units.ratio(row.gain)}</b>, {units.rate(row.units_per_s, unit)}<br>"
    )
    note = f"<br>{theme.wrapped(row.note)}" if row.note else ""
    return f"trial {row.number}, {units.words(row.purpose)}<br>{speed}{theme.wrapped(row.label)}{note}"

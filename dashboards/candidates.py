"""Every configuration that was run: its speed, its memory, and whether it may be used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from steptune.dashboards import theme, units
from steptune.dashboards.effects import Effects
from steptune.dashboards.figures import Figure
from steptune.dashboards.history import LOOKS, Look, outcome_of
from steptune.dashboards.sources import TrialSource
from steptune.dashboards.starts import NEAREST, RECOMMENDED, TODAY, leading_candidate
from steptune.tuner.records import Candidate, Decision, FailureKind, Trial, TrialState

OUT_OF_MEMORY = "out_of_memory"


class CandidateRow(NamedTuple):
    """One configuration, and the results of its trials."""

    key: str
    label: str
    candidate: Candidate
    name: str
    """Role of the configuration: "today", "recommended", "best so far" or empty."""
    outcome: str
    """Outcome of the configuration: a key of `history.LOOKS`, or "out_of_memory"."""
    num_starts: int
    gain: float
    """Speed-up over today's settings; NaN where it was not measured."""
    low: float
    high: float
    """Upper end of the gain's 95 % interval; `low` is the lower end."""
    method: str
    """Method by which the gain was measured."""
    peak_memory_bytes: float
    """Largest peak memory of any run, in bytes; NaN where unknown."""
    on_front: bool
    """True for a configuration on the Pareto front: no other one is faster while it uses less memory."""
    note: str
    number: int
    """Number of a trial of this configuration, for the export; 0 where the configuration may not be used."""


def get_candidates_info(source: TrialSource, study_id: str, effects: Effects) -> list[CandidateRow]:
    """Return one row per candidate, in the order of their first runs."""
    verdicts = {trial_id: d for d in source.decisions(study_id) for trial_id in d.trial_ids}
    by_candidate: dict[str, list[Trial]] = {}
    for trial in source.trials(study_id):
        by_candidate.setdefault(trial.candidate.key, []).append(trial)
    leading = leading_candidate(source, study_id)
    rows = [_row(trials, verdicts, effects, leading) for trials in by_candidate.values()]
    return [row._replace(on_front=best) for row, best in zip(rows, _on_front(rows), strict=True)]


def _row(
    trials: Sequence[Trial], verdicts: dict[str, Decision], effects: Effects, leading: tuple[str, Any] | None
) -> CandidateRow:
    candidate = trials[0].candidate
    outcome = _outcome(trials, verdicts)
    gain = effects.speed(candidate)
    is_reference = candidate == effects.reference
    peaks = [t.result.peak_memory_bytes for t in trials if t.result is not None and t.result.peak_memory_bytes]
    notes = [t.result.failure.message for t in trials if t.result is not None and t.result.failure is not None]
    name = (
        (TODAY if candidate.is_baseline else NEAREST)
        if is_reference
        else leading[0]
        if leading is not None and leading[1] == candidate
        else ""
    )
    return CandidateRow(
        candidate.key,
        candidate.label,
        candidate,
        name,
        outcome,
        sum(1 for t in trials if t.result is not None),
        1.0 if is_reference and gain.method else gain.value,
        math.nan if is_reference else gain.low,
        math.nan if is_reference else gain.high,
        "" if is_reference else gain.method,
        float(max(peaks)) if peaks else math.nan,
        False,
        notes[-1] if notes and outcome in ("failed", OUT_OF_MEMORY) else "",
        next((t.sequence for t in trials if t.result is not None and t.result.ok), 0)
        if outcome != "guard_rejected"
        else 0,
    )


def _outcome(trials: Sequence[Trial], verdicts: dict[str, Decision]) -> str:
    """Return a candidate's most relevant outcome: the reason why it may not be used, else the latest verdict."""
    outcomes = [outcome_of(trial, verdicts.get(trial.trial_id)) for trial in trials]
    if "guard_rejected" in outcomes:
        return "guard_rejected"
    worked = [o for o, t in zip(outcomes, trials, strict=True) if t.result is not None and t.result.failure is None]
    if worked:
        return "accepted" if "accepted" in worked else worked[-1]
    failures = [t.result.failure.kind for t in trials if t.result is not None and t.result.failure is not None]
    if FailureKind.OUT_OF_MEMORY in failures:
        return OUT_OF_MEMORY
    return "failed" if failures or trials[-1].state is not TrialState.RUNNING else "running"


def _on_front(info: Sequence[CandidateRow]) -> list[bool]:
    points = [(row.gain, row.peak_memory_bytes) for row in info]
    usable = [
        (row.gain, row.peak_memory_bytes)
        for row in info
        if row.gain == row.gain and row.peak_memory_bytes == row.peak_memory_bytes and row.outcome != "guard_rejected"
    ]

    def is_beaten(gain: float, memory: float) -> bool:
        return any(g >= gain and m <= memory and (g, m) != (gain, memory) for g, m in usable)

    return [point in usable and not is_beaten(*point) for point in points]


_MEMORY_LOOKS = {
    **{name: look for name, look in LOOKS.items() if name not in ("running", "contended")},
    OUT_OF_MEMORY: Look(colour=theme.BAD, symbol="triangle-right", title="out of memory"),
}


def plot_memory(info: Sequence[CandidateRow]) -> Figure:
    """Draw speed against peak memory. Configurations without a speed are on the lower edge, and those that ran out of
    memory on the right edge.
    """
    figure = theme.new_figure(height=360)
    gains = [row.gain for row in info if not math.isnan(row.gain)]
    peaks_gib = [row.peak_memory_bytes / (1 << 30) for row in info if not math.isnan(row.peak_memory_bytes)]
    floor = min(1.0, *gains, 1.0) - 0.12 * max(max(1.0, *gains, 1.0) - min(1.0, *gains, 1.0), 0.4)
    edge = max(peaks_gib) * 1.06 if peaks_gib else 1.0
    _add_front(figure, sorted((row for row in info if row.on_front), key=lambda row: row.peak_memory_bytes))
    for outcome, look in _MEMORY_LOOKS.items():
        rows = [row for row in info if row.outcome == outcome]
        placed = [row for row in rows if outcome == OUT_OF_MEMORY or not math.isnan(row.peak_memory_bytes)]
        if placed:
            _add_markers(figure, placed, look, floor=floor, edge=edge)
    for row in info:
        if row.name and not math.isnan(row.gain) and not math.isnan(row.peak_memory_bytes):
            figure.add_annotation(
                x=row.peak_memory_bytes / (1 << 30),
                y=row.gain,
                text=f"<b>{row.name}</b>",
                showarrow=False,
                yshift=16 if row.name == RECOMMENDED else -16,
            )
    spread = max(peaks_gib) / min(peaks_gib) if peaks_gib else 1.0
    figure.update_xaxes(title={"text": "peak memory, GiB"}, rangemode="normal" if 1 < spread <= 2 else "tozero")
    figure.update_yaxes(title={"text": "speed, today's settings = 1×"}, ticksuffix="×")
    return figure


def _add_front(figure: Figure, front: Sequence[CandidateRow]) -> None:
    """Draw the Pareto front as steps: no other configuration beats those on the front in both speed and memory."""
    if len(front) > 1:
        figure.add_scatter(
            name="Pareto front of speed and memory",
            mode="lines",
            x=[row.peak_memory_bytes / (1 << 30) for row in front],
            y=[row.gain for row in front],
            line={"color": theme.GOOD, "width": 1.5, "dash": "dot", "shape": "hv"},
            hoverinfo="skip",
        )


def _add_markers(figure: Figure, placed: Sequence[CandidateRow], look: Look, *, floor: float, edge: float) -> None:
    """Add the markers of all configurations with one outcome to the figure.

    Args:
        floor: Speed at which configurations without a speed are drawn.
        edge: Memory in GiB at which configurations without a peak are drawn.
    """
    figure.add_scatter(
        name=look.title,
        mode="markers",
        x=[edge if math.isnan(row.peak_memory_bytes) else row.peak_memory_bytes / (1 << 30) for row in placed],
        y=[floor if math.isnan(row.gain) else row.gain for row in placed],
        marker={
            "color": look.colour,
            "symbol": look.symbol,
            "size": 10,
            "line": {"width": 1.5, "color": look.colour},
        },
        customdata=[_hover(row) for row in placed],
        hovertemplate="%{customdata}<extra>%{fullData.name}</extra>",
    )


def _hover(row: CandidateRow) -> str:
    speed = "not measured" if math.isnan(row.gain) else units.ratio(row.gain)
    how = f"<br>{row.method}" if row.method else ""
    memory = "" if math.isnan(row.peak_memory_bytes) else f", {units.memory(row.peak_memory_bytes)}"
    note = f"<br>{theme.wrapped(row.note)}" if row.note else ""
    return f"<b>{speed}</b>{memory}{how}<br>{theme.wrapped(row.label)}{note}"

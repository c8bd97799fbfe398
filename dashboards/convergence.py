"""Progress of the search over time, against its budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from steptune.dashboards import theme, units
from steptune.dashboards.effects import Effects
from steptune.dashboards.figures import Figure
from steptune.dashboards.history import LOOKS, HistoryRow
from steptune.dashboards.sources import TrialSource


class ConvergenceRow(NamedTuple):
    """A trial that ended."""

    number: int
    label: str
    outcome: str
    spent_s: float
    """Time of all trials until the end of this one, in seconds. The time of interleaved trials is added once."""
    gain: float
    """Speedup of this run over today's settings."""
    best: float
    """Speedup, over today's settings, of the configuration that was accepted at that time, as in the other tables; NaN
    before any configuration was accepted.
    """
    best_label: str


def get_convergence_info(
    source: TrialSource, study_id: str, history: Sequence[HistoryRow], effects: Effects
) -> list[ConvergenceRow]:
    """Return one row for each trial that ended, in order.

    The curve shows the accepted configuration, not the best of many noisy trials.
    """
    accepted = _accepted(source, study_id, history, effects)
    rows = []
    spent_s = 0.0
    best, best_label = math.nan, ""
    groups: set[str] = set()
    for trial, row in zip(source.trials(study_id), history, strict=True):
        if trial.result is None:
            continue
        if trial.group not in groups:
            groups.add(trial.group)
            spent_s += trial.result.duration_ns / 1e9
        if row.outcome == "baseline" and math.isnan(best):
            best, best_label = 1.0, "today's settings"
        if trial.trial_id in accepted:
            best, best_label = accepted[trial.trial_id]
        rows.append(ConvergenceRow(row.number, row.label, row.outcome, spent_s, row.gain, best, best_label))
    return rows


def _accepted(
    source: TrialSource, study_id: str, history: Sequence[HistoryRow], effects: Effects
) -> dict[str, tuple[float, str]]:
    """Return the speedup and name of each accepted configuration; the key is the last trial of the decision that
    accepted it.
    """
    numbers = {row.trial_id: row.number for row in history}
    found = {}
    for decision in source.decisions(study_id):
        ids = [i for i in decision.trial_ids if i in numbers]
        if decision.verdict != "accepted" or decision.candidate is None or not ids:
            continue
        speed = effects.speed(decision.candidate).value
        if not math.isnan(speed):
            label = units.moves_label(decision.moves) or decision.candidate.label
            found[max(ids, key=lambda i: numbers[i])] = (speed, label)
    return found


def plot_convergence(info: Sequence[ConvergenceRow], budget_s: float) -> Figure:
    """Draw accepted configurations as a line and each trial as a marker; also draw the budget if the search came near
    it.
    """
    figure = theme.new_figure(height=320)
    unit, size = ("hours", 3600.0) if budget_s > 3 * 3600 else ("minutes", 60.0) if budget_s > 180 else ("seconds", 1.0)
    accepted = [row for row in info if not math.isnan(row.best)]
    figure.add_scatter(
        name="accepted so far",
        mode="lines",
        x=[row.spent_s / size for row in accepted],
        y=[row.best for row in accepted],
        line={"color": theme.GOOD, "width": 3, "shape": "hv"},
        customdata=[theme.wrapped(row.best_label) for row in accepted],
        text=[units.ratio(row.best) for row in accepted],
        hovertemplate="<b>%{text}</b><br>%{customdata}<extra></extra>",
    )
    for outcome, look in LOOKS.items():
        rows = [row for row in info if row.outcome == outcome and not math.isnan(row.gain)]
        if not rows or outcome == "baseline":
            continue
        figure.add_scatter(
            name=look.title,
            mode="markers",
            x=[row.spent_s / size for row in rows],
            y=[row.gain for row in rows],
            marker={"color": look.colour, "symbol": look.symbol, "size": 7, "line": {"width": 1, "color": look.colour}},
            customdata=[theme.wrapped(row.label) for row in rows],
            hovertemplate="this run: <b>%{y:.2f}×</b><br>%{customdata}<extra>%{fullData.name}</extra>",
        )
    spent = info[-1].spent_s if info else 0.0
    if budget_s <= 1.6 * spent:
        figure.add_vline(x=budget_s / size, line={"color": theme.NEUTRAL, "width": 1, "dash": "dash"})
        figure.add_annotation(
            x=budget_s / size, y=1, yref="paper", text="budget", showarrow=False, xanchor="right", xshift=-4
        )
    figure.update_xaxes(title={"text": f"{unit} in trials"}, rangemode="tozero", showgrid=False)
    figure.update_yaxes(title={"text": "speed, today's settings = 1×"}, ticksuffix="×")
    return figure

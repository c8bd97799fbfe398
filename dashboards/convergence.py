"""How far the search had come when, against what it may spend."""

from __future__ import annotations

import math
import statistics

import pandas as pd

from steptune.dashboards import theme, units
from steptune.dashboards.figures import Figure
from steptune.dashboards.frames import rows_of
from steptune.dashboards.history import LOOKS
from steptune.dashboards.sources import TrialSource

COLUMNS = ("number", "label", "outcome", "spent_s", "gain", "best", "best_label")


def get_convergence_info(source: TrialSource, study_id: str, history: pd.DataFrame) -> pd.DataFrame:
    """One row a trial that ended, in order: `spent_s` is the time of all trials until its end (those that took turns
    count once), `gain` its own speed over today's settings, `best` that of what had been accepted by then.

    The search is judged by what it had accepted, not by the best of many noisy trials.
    """
    accepted = _accepted(source, study_id, history)
    rows = []
    spent_s = 0.0
    best, best_label = math.nan, ""
    groups: set[str] = set()
    for trial, row in zip(source.trials(study_id), rows_of(history), strict=True):
        if trial.result is None:
            continue
        if trial.group not in groups:
            groups.add(trial.group)
            spent_s += trial.result.duration_ns / 1e9
        if row.outcome == "baseline" and math.isnan(best):
            best, best_label = 1.0, "today's settings"
        if trial.trial_id in accepted:
            best, best_label = accepted[trial.trial_id]
        rows.append((row.number, row.label, row.outcome, spent_s, row.gain, best, best_label))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _accepted(source: TrialSource, study_id: str, history: pd.DataFrame) -> dict[str, tuple[float, str]]:
    """By the last trial of a decision that accepted something: the speed and the name of what it accepted."""
    gains = dict(zip(history["trial_id"], history["gain"], strict=True))
    numbers = dict(zip(history["trial_id"], history["number"], strict=True))
    found = {}
    for decision in source.decisions(study_id):
        known = [gains[i] for i in decision.trial_ids if i in gains and not math.isnan(gains[i])]
        if decision.verdict == "accepted" and known:
            last = max((i for i in decision.trial_ids if i in numbers), key=lambda i: numbers[i])
            label = units.moves_label(decision.moves) or (decision.candidate.label if decision.candidate else "")
            found[last] = (statistics.geometric_mean(known), label)
    return found


def plot_convergence(info: pd.DataFrame, budget_s: float) -> Figure:
    """What was accepted as a line, each trial as a mark, and the budget where it comes near."""
    figure = theme.new_figure(height=320)
    unit, size = ("hours", 3600.0) if budget_s > 3 * 3600 else ("minutes", 60.0) if budget_s > 180 else ("seconds", 1.0)
    best = info[info["best"].notna()]
    figure.add_scatter(
        name="accepted so far",
        mode="lines",
        x=list(best["spent_s"] / size),
        y=list(best["best"]),
        line={"color": theme.GOOD, "width": 3, "shape": "hv"},
        customdata=[theme.wrapped(label) for label in best["best_label"]],
        hovertemplate="<b>%{y:.2f}×</b><br>%{customdata}<extra></extra>",
    )
    for outcome, look in LOOKS.items():
        rows = info[(info["outcome"] == outcome) & info["gain"].notna()]
        if rows.empty or outcome == "baseline":
            continue
        figure.add_scatter(
            name=look.title,
            mode="markers",
            x=list(rows["spent_s"] / size),
            y=list(rows["gain"]),
            marker={"color": look.colour, "symbol": look.symbol, "size": 7, "line": {"width": 1, "color": look.colour}},
            customdata=[theme.wrapped(row.label) for row in rows_of(rows)],
            hovertemplate="<b>%{y:.2f}×</b><br>%{customdata}<extra>%{fullData.name}</extra>",
        )
    spent = float(info["spent_s"].max()) if len(info) else 0.0
    if budget_s <= 1.6 * spent:
        figure.add_vline(x=budget_s / size, line={"color": theme.NEUTRAL, "width": 1, "dash": "dash"})
        figure.add_annotation(
            x=budget_s / size, y=1, yref="paper", text="budget", showarrow=False, xanchor="right", xshift=-4
        )
    figure.update_xaxes(title={"text": f"{unit} in trials"}, rangemode="tozero", showgrid=False)
    figure.update_yaxes(title={"text": "speed, today's settings = 1×"}, ticksuffix="×")
    return figure

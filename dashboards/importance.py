"""Which strategies matter on this workload.

With few noisy trials, most of them around the best configuration, measures that need many independent samples (fANOVA,
permutation of a forest) say little. So importance is a contrast between configurations that were run and are the same
but for one strategy: the speed of the best of them over that of the worst, in the search's own Gaussian model of all
trials (`tuner.search.effects`), which shrinks what few trials say towards "no effect". Of several such sets of
configurations one that has today's choice counts, then the one with the most choices, then the nearest to what leads.
Where a strategy was only ever changed together with others there is none; then it is the model's estimate of its
choices alone, with a wide interval.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go

from dashboards import theme, units
from dashboards.effects import Effects
from dashboards.frames import rows_of
from dashboards.sources import TrialSource
from dashboards.starts import leading_candidate
from tuner.records import BASELINE, Candidate, choice_label

COLUMNS = ("strategy", "best", "worst", "ratio", "low", "high", "num_trials", "paired")
METHOD = (
    "Speed of the best configuration over the worst, of those that were run and differ in this strategy only, in the "
    "search's Gaussian model of all trials"
)


def get_importance_info(source: TrialSource, study_id: str, effects: Effects) -> pd.DataFrame:
    """One row a strategy of which a choice was measured, the most important first: `best` and `worst` choice, the
    `ratio` of their speeds with its 95 % interval, the trials that had a choice of it, and whether configurations that
    differ in nothing else were run (`paired`).
    """
    measured: dict[str, Candidate] = {}
    counts: dict[str, int] = {}
    for trial in source.trials(study_id):
        if trial.candidate.key in effects.measured and trial.result is not None and trial.result.ok:
            measured[trial.candidate.key] = trial.candidate
            for name in trial.candidate.choices:
                counts[name] = counts.get(name, 0) + 1
    leading = leading_candidate(source, study_id)
    near = leading[1] if leading is not None else effects.reference
    rows = [_row(name, list(measured.values()), near, counts[name], effects) for name in counts]
    rows.sort(key=lambda row: -row[3])
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _row(
    name: str, measured: Sequence[Candidate], near: Candidate, num_trials: int, effects: Effects
) -> tuple[str, str, str, float, float, float, int, bool]:
    same = _same_but(name, measured, near)
    compared = same or [BASELINE, *_alone(name, measured)]
    ordered = sorted(compared, key=lambda candidate: effects.ratio(candidate, compared[0]).value)
    worst, best = ordered[0], ordered[-1]
    value, low, high = effects.ratio(best, worst)
    return name, _label(best, name), _label(worst, name), value, low, high, num_trials, bool(same)


def _same_but(name: str, measured: Sequence[Candidate], near: Candidate) -> list[Candidate]:
    """Those that are the same but for one strategy; empty where there are no two."""
    sets: dict[str, list[Candidate]] = {}
    for candidate in measured:
        sets.setdefault(candidate.with_choice(name, {}).key, []).append(candidate)
    several = [found for found in sets.values() if len(found) > 1]

    def weight(found: list[Candidate]) -> tuple[bool, int, int]:
        has_today = any(name not in candidate.choices for candidate in found)
        return has_today, len(found), -_distance(found[0], near, name)

    return max(several, key=weight, default=[])


def _distance(candidate: Candidate, other: Candidate, name: str) -> int:
    """In how many other strategies two differ."""
    names = {*candidate.choices, *other.choices} - {name}
    return sum(candidate.choices.get(n) != other.choices.get(n) for n in names)


def _alone(name: str, measured: Sequence[Candidate]) -> list[Candidate]:
    found = [Candidate(choices={name: c.choices[name]}) for c in measured if name in c.choices]
    return list({candidate.key: candidate for candidate in found}.values())


def _label(candidate: Candidate, name: str) -> str:
    return choice_label(candidate.choices[name]) if name in candidate.choices else "as today"


def plot_importance(info: pd.DataFrame) -> go.Figure:
    """A bar a strategy with its interval."""
    figure = theme.new_figure(height=92 + 34 * max(1, len(info)), showlegend=False, bargap=0.35)
    figure.add_bar(
        orientation="h",
        y=[theme.plain(units.words(name)) for name in info["strategy"]],
        x=list(info["ratio"] - 1),
        base=1,
        error_x={
            "type": "data",
            "symmetric": False,
            "array": list(info["high"] - info["ratio"]),
            "arrayminus": list(info["ratio"] - info["low"]),
            "color": theme.NEUTRAL,
            "thickness": 1.5,
            "width": 4,
        },
        marker={"color": [theme.GOOD if low > 1 else theme.MUTED for low in info["low"]]},
        customdata=[
            f"<b>{units.ratio(row.ratio)}</b> ({units.ratio(row.low)} to {units.ratio(row.high)})<br>"
            f"best: {theme.wrapped(row.best)}<br>worst: {theme.wrapped(row.worst)}"
            for row in rows_of(info)
        ],
        hovertemplate="%{customdata}<extra></extra>",
    )
    figure.update_xaxes(title={"text": "best choice over worst"}, ticksuffix="×")
    figure.update_yaxes(autorange="reversed", showgrid=False, ticklabelstandoff=8)
    return figure

"""Which strategies matter on this workload.

With few noisy trials, most of them beside the best configuration, measures that need many independent samples (fANOVA,
permutation of a forest) say little. So importance is a contrast in the search's own Gaussian model of the logarithms
of speeds (`tuner.search.effects`): all trials sharpen the main effect of each choice, and the importance of a
strategy is the speed of the best choice of it that was run over that of the worst, everything else as today.
The interval is the posterior's; where it reaches down to one, nothing is known to matter.
"""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from dashboards import theme, units
from dashboards.effects import Effects
from dashboards.sources import TrialSource
from tuner.records import BASELINE, Candidate, choice_label

COLUMNS = ("strategy", "best", "worst", "ratio", "low", "high", "num_trials")
METHOD = (
    "Contrast of the best and the worst choice that was run, everything else as today, in the search's Gaussian model "
    "of main effects over all trials"
)


def get_importance_info(source: TrialSource, study_id: str, effects: Effects) -> pd.DataFrame:
    """One row a strategy of which a choice was measured, the most important first: `best` and `worst` choice, the
    `ratio` of their speeds with its 95 % interval, and the trials that had a choice of it.
    """
    choices: dict[str, dict[str, Candidate]] = {}
    counts: dict[str, int] = {}
    for trial in source.trials(study_id):
        if trial.candidate.key not in effects.measured or trial.result is None or not trial.result.ok:
            continue
        for name, choice in trial.candidate.choices.items():
            alone = Candidate(choices={name: choice})
            choices.setdefault(name, {})[alone.key] = alone
            counts[name] = counts.get(name, 0) + 1
    rows = [_row(name, list(found.values()), counts[name], effects) for name, found in choices.items()]
    return pd.DataFrame(sorted(rows, key=lambda row: -row[3]), columns=list(COLUMNS))


def _row(
    name: str, alone: list[Candidate], num_trials: int, effects: Effects
) -> tuple[str, str, str, float, float, float, int]:
    ordered = sorted([BASELINE, *alone], key=lambda candidate: effects.ratio(candidate, BASELINE).value)
    worst, best = ordered[0], ordered[-1]
    ratio = effects.ratio(best, worst)
    return name, _label(best, name), _label(worst, name), *ratio, num_trials


def _label(candidate: Candidate, name: str) -> str:
    return choice_label(candidate.choices[name]) if name in candidate.choices else "as today"


def plot_importance(info: pd.DataFrame) -> go.Figure:
    """A bar a strategy with its interval."""
    figure = theme.new_figure(height=92 + 34 * max(1, len(info)), showlegend=False, bargap=0.35)
    sure = info["low"] > 1
    figure.add_bar(
        orientation="h",
        y=[theme.plain(units.words(name)) for name in info["strategy"]],
        x=list(info["ratio"] - 1),
        base=1,
        error_x={
            "type": "data",
            "symmetric": False,
            "array": list(info["high"] - info["ratio"]),
            "arrayminus": list((info["ratio"] - info["low"]).clip(upper=info["ratio"] - 1 + 0.02)),
            "color": theme.NEUTRAL,
            "thickness": 1.5,
            "width": 4,
        },
        marker={"color": [theme.GOOD if known else theme.MUTED for known in sure]},
        customdata=[
            f"<b>{units.ratio(row.ratio)}</b> ({units.ratio(row.low)} to {units.ratio(row.high)})<br>"
            f"best: {theme.wrapped(row.best)}<br>worst: {theme.wrapped(row.worst)}"
            for row in info.itertuples()
        ],
        hovertemplate="%{customdata}<extra></extra>",
    )
    figure.update_xaxes(title={"text": "speed of the best choice over the worst"}, ticksuffix="×")
    figure.update_yaxes(autorange="reversed", showgrid=False, ticklabelstandoff=8)
    return figure

"""What each part of the recommendation gains by itself."""

from __future__ import annotations

import math

import pandas as pd

from steptune.dashboards import theme, units
from steptune.dashboards.figures import Figure
from steptune.dashboards.sources import TrialSource
from steptune.tuner.records import choice_label

COLUMNS = ("strategy", "label", "gain", "low", "high", "limit", "numerics", "reason")


def get_gains_info(source: TrialSource, study_id: str) -> pd.DataFrame:
    """One row an accepted part, as the recommendation lists them; empty without a recommendation.

    `gain` is the part's own gain as a ratio of speeds, `low` and `high` its interval (NaN where there
    is none), `limit` the ratio that its bound allowed (NaN where there is no bound).
    """
    recommendation = source.recommendation(study_id)
    rows = [
        (
            part.strategy,
            choice_label(part.choice),
            part.gain,
            part.interval.low if part.interval else math.nan,
            part.interval.high if part.interval else math.nan,
            math.nan if part.bound is None else units.gain_limit(part.bound),
            part.numerics.value,
            part.reason,
        )
        for part in (recommendation.parts if recommendation else ())
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def plot_gains(info: pd.DataFrame) -> Figure:
    """A dot with its interval for each part, and a tick where its bound was."""
    figure = theme.new_figure(height=110 + 46 * len(info))
    names = [theme.plain(units.words(name)) for name in info["strategy"]]
    figure.add_vline(x=1, line={"color": theme.NEUTRAL, "width": 1, "dash": "dot"})
    figure.add_scatter(
        name="own gain, 95 % interval",
        mode="markers",
        x=list(info["gain"]),
        y=names,
        error_x={
            "type": "data",
            "symmetric": False,
            "array": list((info["high"] - info["gain"]).fillna(0)),
            "arrayminus": list((info["gain"] - info["low"]).fillna(0)),
            "color": theme.GOOD,
            "thickness": 2,
            "width": 5,
        },
        marker={"color": theme.GOOD, "size": 11},
        customdata=[
            f"<b>{units.ratio(gain)}</b> {theme.wrapped(label)}"
            for gain, label in zip(info["gain"], info["label"], strict=True)
        ],
        hovertemplate="%{customdata}<extra></extra>",
    )
    limits = info[info["limit"].map(math.isfinite)]
    if len(limits):
        figure.add_scatter(
            name="the most that its bound allowed",
            mode="markers",
            x=list(limits["limit"]),
            y=[theme.plain(units.words(name)) for name in limits["strategy"]],
            marker={"color": theme.NEUTRAL, "symbol": "line-ns-open", "size": 16, "line": {"width": 2}},
            hovertemplate="at most %{x:.2f}×<extra></extra>",
        )
    figure.update_xaxes(title={"text": "speed, without this part = 1×"}, ticksuffix="×")
    figure.update_yaxes(autorange="reversed", showgrid=False, ticklabelstandoff=8)
    return figure

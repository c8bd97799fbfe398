"""Known contributions of the recommendation's parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from steptune.dashboards import theme, units
from steptune.dashboards.figures import Figure
from steptune.dashboards.sources import TrialSource
from steptune.tuner.records import Part, Recommendation, choice_label
from steptune.tuner.speeds import contribution_of, unclear_contribution


class GainRow(NamedTuple):
    """One part of a recommendation."""

    strategy: str
    label: str
    gain: float
    """Contribution as a ratio of speeds; NaN where the interval does not exclude 1."""
    low: float
    high: float
    """Upper end of the 95 % interval of the contribution; NaN where that was not measured."""
    method: str
    """Method by which the contribution was measured; empty where unknown."""
    limit: float
    """Upper limit of the gain, predicted before the trial, as a ratio of speeds; NaN if none was predicted."""
    numerics: str
    reason: str


def get_gains_info(source: TrialSource, study_id: str) -> list[GainRow]:
    """Return one row for each accepted part, in the order of the recommendation; an empty list if there is no
    recommendation.
    """
    recommendation = source.recommendation(study_id)
    if recommendation is None:
        return []
    return [
        GainRow(
            part.strategy,
            choice_label(part.choice),
            *_contribution(recommendation, part),
            math.nan if part.bound is None else units.gain_limit(part.bound),
            part.numerics.value,
            part.reason,
        )
        for part in recommendation.parts
    ]


def _contribution(recommendation: Recommendation, part: Part) -> tuple[float, float, float, str]:
    speed = contribution_of(recommendation, part)
    if speed is None or speed.interval is None:
        unclear = unclear_contribution(recommendation, part)
        return math.nan, *((math.nan, math.nan) if unclear is None else (unclear.low, unclear.high)), ""
    return speed.ratio, speed.interval.low, speed.interval.high, speed.told


def plot_gains(info: Sequence[GainRow], quantity: str = "speed") -> Figure:
    """Draw a dot with its interval for each part with a known contribution, and a tick at the predicted upper limit.

    Args:
        quantity: Quantity of which the gains are ratios.
    """
    info = [row for row in info if not math.isnan(row.gain)]
    figure = theme.new_figure(height=110 + 46 * len(info))
    names = [theme.plain(units.words(row.strategy)) for row in info]
    figure.add_vline(x=1, line={"color": theme.NEUTRAL, "width": 1, "dash": "dot"})
    figure.add_scatter(
        name="contribution, 95 % interval",
        mode="markers",
        x=[row.gain for row in info],
        y=names,
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [row.high - row.gain for row in info],
            "arrayminus": [row.gain - row.low for row in info],
            "color": theme.GOOD,
            "thickness": 2,
            "width": 5,
        },
        marker={"color": theme.GOOD, "size": 11},
        customdata=[f"<b>{units.ratio(row.gain)}</b> {theme.wrapped(row.label)}" for row in info],
        hovertemplate="%{customdata}<extra></extra>",
    )
    limited = [row for row in info if math.isfinite(row.limit)]
    if limited:
        figure.add_scatter(
            name="upper bound, predicted before the trial",
            mode="markers",
            x=[row.limit for row in limited],
            y=[theme.plain(units.words(row.strategy)) for row in limited],
            marker={"color": theme.NEUTRAL, "symbol": "line-ns-open", "size": 16, "line": {"width": 2}},
            hovertemplate="at most %{x:.2f}×<extra></extra>",
        )
    figure.update_xaxes(title={"text": f"{quantity}, without this part = 1×"}, ticksuffix="×")
    figure.update_yaxes(autorange="reversed", showgrid=False, ticklabelstandoff=8)
    return figure

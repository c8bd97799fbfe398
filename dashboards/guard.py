"""Evidence that a trial's training was the same as the reference's: the losses of both, side by side."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from steptune.dashboards import theme
from steptune.dashboards.figures import Figure
from steptune.tuner.records import GuardVerdict

if TYPE_CHECKING:
    import pandas as pd


def get_guard_info(guard: GuardVerdict) -> pd.DataFrame:
    """Return one row per step: `step`, `loss`, `reference`, `difference`; NaN where one of the two losses is
    missing.
    """
    import pandas as pd

    count = max(len(guard.losses), len(guard.reference_losses))

    def at(values: tuple[float, ...], place: int) -> float:
        return values[place] if place < len(values) else math.nan

    rows = [(place + 1, at(guard.losses, place), at(guard.reference_losses, place)) for place in range(count)]
    info = pd.DataFrame(rows, columns=["step", "loss", "reference"])
    return info.assign(difference=info["loss"] - info["reference"])


def plot_guard(info: pd.DataFrame) -> Figure:
    """Draw both loss curves; where they coincide, the candidate trains as the reference does."""
    figure = theme.new_figure(height=280)
    for name, column, line, size in (
        ("reference", "reference", {"color": theme.NEUTRAL, "width": 5}, 8),
        ("this trial", "loss", {"color": theme.GOOD, "width": 1.8, "dash": "dot"}, 6),
    ):
        figure.add_scatter(
            name=name,
            x=list(info["step"]),
            y=[None if not math.isfinite(value) else value for value in info[column]],
            mode="lines+markers",
            line=line,
            marker={"size": size},
            hovertemplate="step %{x}: <b>%{y:.6g}</b><extra>%{fullData.name}</extra>",
        )
    figure.update_xaxes(title={"text": "step"}, showgrid=False, dtick=max(1, len(info) // 10))
    figure.update_yaxes(title={"text": "loss"})
    return figure

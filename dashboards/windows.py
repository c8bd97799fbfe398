"""Measured windows of a trial: their spread, and the reasons why windows are void."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from steptune.dashboards import theme
from steptune.dashboards.figures import Figure
from steptune.tuner.estimates import log_rate, restart_s_per_step
from steptune.tuner.records import TrialResult

if TYPE_CHECKING:
    import pandas as pd


COLUMNS = (
    *("number", "round", "num_steps", "step_ms", "p20_ms", "p50_ms", "p80_ms", "rate", "foreign", "queue"),
    *("void", "marked"),
)


class Spread(NamedTuple):
    """Spread of a trial's valid windows. `half_width` is half the width of the 95 % interval of the run's rate, as a
    share of the rate; NaN or infinite with fewer than two windows.
    """

    num_void: int
    restart_ms: float
    """Milliseconds per step that epoch restarts take."""
    half_width: float


def get_windows_info(result: TrialResult) -> pd.DataFrame:
    """Return one row per window, in time order: step times in milliseconds, units per second, the share of the cores
    that other programs used, and the loader's queue at the start and end. Further columns state why a window is void,
    or why it is valid although the machine was not quiet.
    """
    import pandas as pd

    rows = [
        (
            number,
            window.round,
            window.num_steps,
            window.step_time_ns / 1e6,
            window.step_p20_ns / 1e6,
            window.step_p50_ns / 1e6,
            window.step_p80_ns / 1e6,
            window.units_per_s,
            window.foreign_cpu_share,
            f"{window.queue_depth_start} → {window.queue_depth_end}",
            window.void or "",
            window.marked or "",
        )
        for number, window in enumerate(result.windows, 1)
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def get_spread(result: TrialResult) -> Spread | None:
    """Return the spread of the valid windows; None if there are none."""
    clean = result.clean_windows
    if not clean:
        return None
    return Spread(
        num_void=len(result.windows) - len(clean),
        restart_ms=restart_s_per_step(result) * 1e3,
        half_width=log_rate(result).half_width(),
    )


def plot_windows(info: pd.DataFrame) -> Figure:
    """Draw each valid window as a dot, with a whisker from the 20th to the 80th percentile of its step times. A void
    window leaves a gap; the table states the reason.
    """
    figure = theme.new_figure(height=280, showlegend=False)
    clean = info[info["void"] == ""]
    if len(clean):
        figure.add_scatter(
            name="counts",
            x=list(clean["number"]),
            y=list(clean["step_ms"]),
            mode="markers",
            marker={"symbol": "circle", "size": 10, "color": theme.GOOD, "line": {"width": 2, "color": theme.GOOD}},
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [max(0.0, high - mid) for high, mid in zip(clean["p80_ms"], clean["step_ms"], strict=True)],
                "arrayminus": [max(0.0, mid - low) for low, mid in zip(clean["p20_ms"], clean["step_ms"], strict=True)],
                "color": theme.GOOD,
                "thickness": 1.2,
                "width": 3,
            },
            customdata=list(clean["num_steps"]),
            hovertemplate="window %{x}: <b>%{y:.3f} ms</b> a step over %{customdata} steps<extra></extra>",
        )
        figure.add_hline(y=clean["step_ms"].mean(), line={"color": theme.NEUTRAL, "width": 1, "dash": "dot"})
    figure.update_xaxes(
        title={"text": "window"}, dtick=max(1, len(info) // 12), showgrid=False, range=[0.5, max(1, len(info)) + 0.5]
    )
    figure.update_yaxes(title={"text": "ms per step"})
    return figure

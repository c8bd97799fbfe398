"""Prediction of a study's training on more hosts: curves by family of communication methods, and a table of all
methods.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from steptune.dashboards import theme, units
from steptune.dashboards.figures import Figure
from steptune.dashboards.frames import rows_of
from steptune.dashboards.templating import figures_json
from steptune.tuner.prediction.forecast import Extrapolation
from steptune.tuner.records import SampleUnit

if TYPE_CHECKING:
    import pandas as pd


COLUMNS = ("family", "label", "num_hosts", "num_ranks", "step_ms", "units_per_s", "efficiency")
WAY_COLUMNS = ("label", "family", "step_ns", "exposed_ns", "units_per_s", "efficiency", "numerics")
CHECK_COLUMNS = ("sequence", "label", "num_ranks", "num_hosts", "measured_ns", "predicted_ns", "error")


@dataclass(frozen=True, kw_only=True)
class Look:
    """Colour and marker shape of a curve; the shape is for readers who cannot tell the colours apart."""

    colour: str
    symbol: str
    dash: str


LOOKS = {
    "flat": Look(colour=theme.NEUTRAL, symbol="circle", dash="solid"),
    "hierarchical": Look(colour=theme.GOOD, symbol="square", dash="dash"),
    "compressed": Look(colour=theme.BAD, symbol="diamond", dash="dot"),
    "sharded": Look(colour=theme.CATEGORY_COLOURS["recompute"], symbol="triangle-up", dash="dashdot"),
}
"""Colours and marker shapes of the curves, by family of communication methods."""


def get_scaling_info(found: Extrapolation) -> pd.DataFrame:
    """Return one row for each family of communication methods and each number of hosts, with the fastest method of the
    family.
    """
    import pandas as pd

    rows = [
        (
            forecast.family,
            forecast.label,
            forecast.num_hosts,
            forecast.num_ranks,
            forecast.step_time_ns / 1e6,
            forecast.units_per_s,
            forecast.efficiency,
        )
        for forecast in found.curves
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def get_ways_info(found: Extrapolation) -> pd.DataFrame:
    """Return one row for each communication method on all hosts, the fastest first."""
    import pandas as pd

    rows = [
        (
            forecast.label,
            forecast.family,
            forecast.step_time_ns,
            forecast.exposed_ns,
            forecast.units_per_s,
            forecast.efficiency,
            forecast.numerics.value,
        )
        for forecast in found.forecasts
    ]
    return pd.DataFrame(rows, columns=list(WAY_COLUMNS))


def get_checks_info(found: Extrapolation) -> pd.DataFrame:
    """Return one row for each measured configuration; `error` is relative to the measured step time."""
    import pandas as pd

    rows = [tuple(getattr(check, name) for name in CHECK_COLUMNS) for check in found.checks]
    return pd.DataFrame(rows, columns=list(CHECK_COLUMNS))


def plot_step_times(info: pd.DataFrame) -> Figure:
    """Plot milliseconds per step over the number of hosts."""
    figure = _curves(info, "step_ms", lambda row: f"{units.milliseconds(row.step_ms)} a step")
    figure.update_yaxes(title={"text": "ms per step"}, rangemode="tozero")
    return figure


def plot_throughput(info: pd.DataFrame, unit: SampleUnit) -> Figure:
    """Plot samples or tokens per second over the number of hosts, with a line for linear scaling from the smallest
    number of hosts.
    """
    figure = _curves(info, "units_per_s", lambda row: units.rate(row.units_per_s, unit))
    fewest = info[info["num_hosts"] == info["num_hosts"].min()]
    per_host = fewest["units_per_s"].max() / fewest["num_hosts"].min()
    hosts = sorted(set(info["num_hosts"]))
    figure.add_scatter(
        name="in proportion",
        mode="lines",
        x=hosts,
        y=[per_host * number for number in hosts],
        line={"color": theme.MUTED, "width": 1, "dash": "dot"},
        hoverinfo="skip",
    )
    figure.update_yaxes(title={"text": f"{unit.value}s per second"}, type="log")
    return figure


def plot_efficiency(info: pd.DataFrame) -> Figure:
    """Plot efficiency over the number of hosts: the step time of one rank without communication, as a share of the
    predicted step time.
    """
    figure = _curves(info, "efficiency", lambda row: units.percent(row.efficiency))
    figure.update_yaxes(title={"text": "efficiency"}, tickformat=".0%", rangemode="tozero")
    return figure


def _curves(info: pd.DataFrame, column: str, told: Any) -> Figure:
    figure = theme.new_figure(height=320)
    for family, look in LOOKS.items():
        rows = info[info["family"] == family]
        if rows.empty:
            continue
        figure.add_scatter(
            name=family,
            mode="lines+markers",
            x=list(rows["num_hosts"]),
            y=list(rows[column]),
            line={"color": look.colour, "width": 2, "dash": look.dash},
            marker={"color": look.colour, "symbol": look.symbol, "size": 9},
            customdata=[
                f"<b>{told(row)}</b><br>{units.counted(row.num_hosts, 'host')}, "
                f"{units.counted(row.num_ranks, 'rank')}<br>{theme.plain(row.label)}"
                for row in rows_of(rows)
            ],
            hovertemplate="%{customdata}<extra>%{fullData.name}</extra>",
        )
    hosts = sorted(set(info["num_hosts"]))
    figure.update_xaxes(
        title={"text": "hosts"}, type="log", tickvals=hosts, ticktext=[str(number) for number in hosts], showgrid=False
    )
    return figure


def scaling_context(found: Extrapolation, unit: SampleUnit) -> dict[str, Any]:
    """Return the context of the template `scaling.html` for a prediction."""
    info = get_scaling_info(found)
    figures = {}
    if info["num_hosts"].nunique() > 1:
        figures = {
            "step_times": plot_step_times(info),
            "throughput": plot_throughput(info, unit),
            "efficiency": plot_efficiency(info),
        }
    return {
        "found": found,
        "unit": unit,
        "curves": rows_of(info),
        "ways": rows_of(get_ways_info(found)),
        "checks": rows_of(get_checks_info(found)),
        "figures": figures_json(figures),
    }

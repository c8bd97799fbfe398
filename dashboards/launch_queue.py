"""Launch queue of each stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptune.dashboards import theme
from steptune.dashboards.figures import Figure
from steptune.tuner.trace_records import RankAnalysis

if TYPE_CHECKING:
    import pandas as pd


LINES = (theme.GOOD, theme.BAD, "#00566e", theme.NEUTRAL)
MAX_STREAMS = len(LINES)


def get_queue_info(rank: RankAnalysis) -> pd.DataFrame:
    """Return one row for each change of a launch queue's depth: `stream` (with its device where there are several),
    `ms`, and the new `depth`.
    """
    import pandas as pd

    several = len(rank.queues) > 1
    rows = [
        (f"{device} stream {queue.stream}" if several else f"stream {queue.stream}", time_ns / 1e6, depth)
        for device, queues in rank.queues.items()
        for queue in queues
        for time_ns, depth in queue.timeline
    ]
    return pd.DataFrame(rows, columns=["stream", "ms", "depth"])


def plot_queue(info: pd.DataFrame) -> Figure:
    """Draw the depth of the launch queues over time, one line for each of the streams with the most launches."""
    streams = list(dict.fromkeys(info["stream"]))[:MAX_STREAMS]
    figure = theme.new_figure(height=250, showlegend=len(streams) > 1)
    for stream, colour in zip(streams, LINES, strict=False):
        rows = info[info["stream"] == stream]
        figure.add_scatter(
            name=theme.plain(str(stream)),
            x=list(rows["ms"]),
            y=list(rows["depth"]),
            mode="lines",
            line={"color": colour, "width": 1.4, "shape": "hv"},
            hovertemplate="%{x:.3f} ms: <b>%{y}</b> waiting<extra>%{fullData.name}</extra>",
        )
    figure.update_xaxes(title={"text": "milliseconds since the start of the first step"}, showgrid=False)
    figure.update_yaxes(title={"text": "launched, not started"}, rangemode="tozero")
    return figure

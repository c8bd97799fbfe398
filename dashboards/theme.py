"""Colours and common style of figures.

Every category has one colour, in every figure. Groups share a hue that stays apart from the others'
for red-green colour blindness: compute is blue, communication yellow, input and output orange. Gaps have several, since
their causes are what a reader looks for: violet where the host is late, brown, wine and lime for the others. Any two
categories may stand side by side in a chart, so any two differ by at least 16 in CIELAB for normal and red-green-blind
vision, and by at least 11 for blue-yellow blindness; any two causes of gaps by 20 and more. Neighbours
of a stacked bar differ in lightness, so that they stay apart in a black-and-white print, and every colour stands out
from the light and the dark background. tests/unit/test_dashboards.py checks all of this.

Figures have no background, and texts and grid lines take their colours from the page (see
static/page.css), so that one figure serves light, dark and print.
"""

from __future__ import annotations

import functools
import html
from typing import Any

from steptune.dashboards.figures import Figure
from steptune.tuner.costs.categories import CATEGORIES, GROUPS, INFO, CategoryInfo

CATEGORY_COLOURS: dict[str, str] = {
    "compute_matmul": "#1256b2",
    "compute_attention": "#23aff9",
    "compute_normalisation": "#001950",
    "compute_reduction": "#76a6d1",
    "compute_elementwise": "#6776c0",
    "compute_other": "#a0c5ce",
    "optimizer": "#004972",
    "recompute": "#9bd7fd",
    "copy_on_device": "#2c7695",
    "communication": "#f3e242",
    "pipeline_bubble": "#909050",
    "copy_host_to_device": "#e4ac59",
    "copy_device_to_host": "#8c431f",
    "data_wait": "#e77412",
    "epoch_restart": "#fcc89f",
    "synchronisation": "#846f52",
    "allocation": "#d4fb7f",
    "optimizer_host": "#2f019c",
    "host": "#4724f9",
    "launch_latency": "#9f61fa",
    "dispatch": "#471800",
    "queued": "#7b0a43",
    "unknown": "#f4f1ea",
}
BOTTLENECK_COLOURS: dict[str, str] = {
    "input": CATEGORY_COLOURS["data_wait"],
    "communication": CATEGORY_COLOURS["communication"],
    "host": CATEGORY_COLOURS["host"],
    "synchronisation": CATEGORY_COLOURS["optimizer_host"],
    "optimizer": CATEGORY_COLOURS["optimizer"],
    "compute": CATEGORY_COLOURS["compute_elementwise"],
}
"""Colours of the bottlenecks that `steptune.tuner.costs.categories.bottleneck` names; each bottleneck has the colour of
one of its categories.
"""
GOOD, NEUTRAL, BAD, MUTED = "#1f6fd1", "#8a8f98", "#cc4b1c", "#b3b8c0"

_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif"


def categories_in_order() -> list[CategoryInfo]:
    """Return the categories in the order of stacked bars and legends: sorted by group, and within a group as in
    `CATEGORIES`.
    """
    return [info for group in GROUPS for info in CATEGORIES if info.group == group]


def category_colour(category: str) -> str:
    return CATEGORY_COLOURS.get(category, CATEGORY_COLOURS["unknown"])


def category_title(category: str) -> str:
    """Return the title of a category; the name itself for a category that this version does not know."""
    return INFO[category].title if category in INFO else category


def kind_title(category: str) -> str:
    """Return the title of a category without the prefix "exposed": "communication" for "exposed communication"."""
    return category_title(category).removeprefix("exposed ")


def category_group(category: str) -> str:
    return INFO[category].group if category in INFO else "unknown"


def text_colour_on(colour: str) -> str:
    """Return the text colour on a background: white if its contrast is at least 4 to 1 (WCAG), else black."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#ffffff" if 1.05 / (luminance + 0.05) > 4 else "#111111"


def plain(text: str) -> str:
    """Escape a text for a figure, where Plotly would otherwise interpret tags."""
    return html.escape(text, quote=False)


@functools.lru_cache(4096)
def wrapped(text: str, width: int = 60) -> str:
    """Wrap a text into lines for a figure's hover."""
    import textwrap

    return "<br>".join(plain(line) for line in textwrap.wrap(text, width) or [""])


def new_figure(height: int, **layout: Any) -> Figure:
    """Create an empty figure in the common style."""
    common: dict[str, Any] = {
        "template": {"data": {"scatter": [{"type": "scatter"}]}},
        "height": height,
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": _FONT, "size": 13, "color": "#3b414b"},
        "hoverlabel": {
            "bgcolor": "#20252d",
            "bordercolor": "#59626f",
            "font": {"color": "#f5f6f8", "size": 13},
            "align": "left",
        },
        "legend": {
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 1.02,
            "yanchor": "bottom",
            "traceorder": "normal",
        },
        "dragmode": False,
    }
    axis = {
        "automargin": True,
        "fixedrange": True,
        "zeroline": False,
        "gridcolor": "#d5d9df",
        "ticks": "",
        "title": {"font": {"size": 12}},
    }
    return Figure(layout={"xaxis": axis, "yaxis": axis, **common, **layout})

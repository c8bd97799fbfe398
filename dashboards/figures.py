"""Figures as plain data for plotly.js.

The objects of Plotly for Python check every name and every value each time, which took a third of the time of a
study's page. Nothing is checked here: tests hand every figure to Plotly, which knows the allowed names and values.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import numpy as np

_ESCAPED = ((b"<", rb"\u003c"), (b">", rb"\u003e"), (b"/", rb"\u002f"))
"""Characters that would close the HTML element around a figure, with their escapes."""


class Props(dict[str, Any]):
    """Properties by name, also readable as attributes; a property that is not set reads as None."""

    def __getattr__(self, name: str) -> Any:
        value = self.get(name)
        return Props(value) if type(value) is dict else value


class Figure:
    """A figure of traces and a layout. Methods change it in place; those that can be chained also return it."""

    def __init__(self, layout: dict[str, Any]) -> None:
        self.data: list[Props] = []
        self.layout = Props(layout)

    def add_bar(self, **trace: Any) -> None:
        self._add("bar", trace)

    def add_scatter(self, **trace: Any) -> None:
        self._add("scatter", trace)

    def add_heatmap(self, **trace: Any) -> None:
        self._add("heatmap", trace)

    def add_treemap(self, **trace: Any) -> None:
        self._add("treemap", trace)

    def add_icicle(self, **trace: Any) -> None:
        self._add("icicle", trace)

    def add_hline(self, y: float, line: dict[str, Any]) -> None:
        """Add a horizontal line across the whole figure."""
        self._append(
            "shapes",
            {"type": "line", "line": line, "x0": 0, "x1": 1, "xref": "x domain", "yref": "y", "y0": y, "y1": y},
        )

    def add_vline(self, x: float, line: dict[str, Any]) -> None:
        """Add a vertical line from bottom to top."""
        self._append(
            "shapes",
            {"type": "line", "line": line, "y0": 0, "y1": 1, "yref": "y domain", "xref": "x", "x0": x, "x1": x},
        )

    def add_annotation(self, **annotation: Any) -> None:
        self._append("annotations", annotation)

    def update_xaxes(self, **axis: Any) -> None:
        self.update_layout(xaxis=axis)

    def update_yaxes(self, **axis: Any) -> None:
        self.update_layout(yaxis=axis)

    def update_layout(self, **layout: Any) -> Figure:
        """Update the layout: objects are merged, all other values are replaced."""
        self.layout = Props(_merged(self.layout, layout))
        return self

    def to_dict(self) -> dict[str, Any]:
        return {"data": self.data, "layout": self.layout}

    def to_json(self) -> str:
        """Return the figure as JSON that is safe inside an HTML element; NaN and infinity become null."""
        return in_element(self.to_dict())

    def _add(self, kind: str, trace: dict[str, Any]) -> None:
        self.data.append(Props(trace, type=kind))

    def _append(self, name: str, item: dict[str, Any]) -> None:
        self.layout[name] = [*self.layout.get(name, ()), Props(item)]


def in_element(value: object) -> str:
    """Return JSON that is safe inside an HTML element."""
    text = msgspec.json.encode(value, enc_hook=_plain)
    for character, escape in _ESCAPED:
        text = text.replace(character, escape)
    return text.decode()


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    both = {
        name: _merged(old[name], value) if isinstance(value, dict) and isinstance(old.get(name), dict) else value
        for name, value in new.items()
    }
    return {**old, **both}


def _plain(value: object) -> object:
    """Convert numpy values to JSON types: arrays of floats to base64, which plotly.js decodes, and all others to plain
    Python values.
    """
    if isinstance(value, np.ndarray) and value.dtype.str in ("<f4", "<f8"):
        shape = {"shape": ", ".join(map(str, value.shape))} if value.ndim > 1 else {}
        return {"dtype": value.dtype.str[1:], "bdata": base64.b64encode(value.tobytes()).decode(), **shape}
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"a figure cannot contain a value of type {type(value).__name__}")

"""Rendering of pages from Jinja2 templates.

Every page extends `page.html`, which needs `site` (`dashboards.site.Site`), `title`, `scripts` (names of files in
`dashboards/static`, run after `page.js`) and, where the page has figures, `figures`: JSON by name, shown by
`{{ figure(figures, name, label) }}` of `macros.html`. What several pages show is a macro. A page that may stand inside
another extends `layout` instead: `page.html` or `embedded.html`; ids in it begin with `anchor`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Mapping
from typing import Any

import jinja2
from jinja2.runtime import Macro
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from steptune.dashboards import theme, units
from steptune.dashboards.figures import Figure
from steptune.dashboards.finding_gain import finding_gain
from steptune.dashboards.site import Site, asset_text

NUM_ROWS = 4096
"""Maximum number of rendered table rows, some hundred bytes each, that a process caches."""


def render(template: str, site: Site, **context: Any) -> str:
    """Render a page as HTML."""
    text = templates().get_template(template).render(site=site, **{**_DEFAULTS, **context})
    return text.encode("utf-8", "replace").decode()  # names of files may hold what is no text


_DEFAULTS: dict[str, Any] = {
    "scripts": (),
    "figures": {},
    "current": "",
    "layout": "page.html",
    "anchor": "",
}


def figures_json(figures: Mapping[str, Figure]) -> dict[str, Markup]:
    """Return figures as JSON for a page, with characters escaped that would close the element around them."""
    return {name: Markup(figure.to_json()) for name, figure in figures.items()}


class _Call:
    """A macro call; calls with the same arguments are equal, so that results can be cached."""

    __slots__ = ("key", "macro")

    def __init__(self, macro: Macro, arguments: tuple[Hashable, ...]) -> None:
        self.key = macro.name, arguments
        self.macro: Macro | None = macro

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Call) and other.key == self.key


def kept(macro: Macro, *arguments: Hashable) -> Markup:
    """Return the result of a macro, cached by its arguments. The macro must depend on nothing else, and its name must
    be unique.
    """
    return _called(_Call(macro, arguments))


@functools.lru_cache(NUM_ROWS)
def _called(call: _Call) -> Markup:
    macro, call.macro = call.macro, None  # it holds all that the page shows
    assert macro is not None
    return Markup(macro(*call.key[1]))


@functools.cache
def templates() -> jinja2.Environment:
    """Return the template environment, with the filters that the pages use."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("steptune.dashboards"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        ratio=units.ratio,
        ratio_interval=units.ratio_interval,
        ratio_to=units.ratio_range,
        percent=units.percent,
        finding_gain=finding_gain,
        memory=units.memory,
        message_size=units.message_size,
        rate=units.rate,
        duration=units.duration,
        words=units.words,
        significant=units.significant,
        known=lambda value: value == value,
        finite=math.isfinite,
        change=units.change,
        counted=units.counted,
        short_time=units.short_time,
        short_time_change=units.short_time_change,
        kernel_name=units.kernel_name,
        per_second=units.per_second,
        place_name=units.place_name,
        gain_limit=units.gain_limit,
        thousands="{:,}".format,
        category_title=theme.category_title,
        kind_title=theme.kind_title,
        category_colour=theme.category_colour,
    )
    environment.globals.update(
        kept=kept, asset_text=lambda name: Markup(asset_text(name)), plotly_js=lambda: Markup(get_plotlyjs())
    )
    return environment

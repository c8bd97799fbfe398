"""Pages as Jinja2 templates.

Every page extends `page.html`, which needs `site` (`dashboards.site.Site`), `title`, `scripts` (names of files in
`dashboards/static`, run after `page.js`) and, where the page has figures, `figures`: JSON by name, shown by
`{{ figure(figures, name, label) }}` of `macros.html`. What several pages show is a macro. A page that may stand inside
another extends `layout` instead: `page.html` or `embedded.html`; ids in it begin with `anchor`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from steptune.dashboards import theme, units
from steptune.dashboards.figures import Figure
from steptune.dashboards.site import Site, asset_text


def render(template: str, site: Site, **context: Any) -> str:
    """A page as HTML."""
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
    """Figures as they stand in a page: Plotly escapes what would end the element around them."""
    return {name: Markup(figure.to_json()) for name, figure in figures.items()}


@functools.cache
def templates() -> jinja2.Environment:
    """The pages, with the filters that they use."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("steptune.dashboards"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        ratio=units.ratio,
        percent=units.percent,
        memory=units.memory,
        message_size=units.message_size,
        rate=units.rate,
        duration=units.duration,
        words=units.words,
        significant=units.significant,
        known=lambda value: value == value,
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
        asset_text=lambda name: Markup(asset_text(name)), plotly_js=lambda: Markup(get_plotlyjs())
    )
    return environment

"""Summary of a study on a terminal: the same facts, in the same order, as in the report."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from steptune.dashboards import units
from steptune.dashboards.breakdown import CategoryTime, get_breakdown_info
from steptune.dashboards.effects import Effects
from steptune.dashboards.headline import get_headline_info
from steptune.dashboards.sources import TrialSource
from steptune.dashboards.story import NotTriedRow, TriedRow, get_not_tried_info, get_tried_info
from steptune.dashboards.theme import category_colour
from steptune.service.cli.console import short_name
from steptune.service.tables import plain_table
from steptune.tuner.records import Recommendation, choice_label
from steptune.tuner.speeds import contribution_of, needed_by, unclear_contribution

BAR_WIDTH = 48
SHADES = "█▓▒░"
SHOWN_CHOICES = 3
_VERDICTS = {"accepted": "green", "confirmed": "green", "failed": "red", "guard_rejected": "red"}
_TONES = {"good": "green", "neutral": "blue", "warning": "yellow"}


def print_summary(console: Console, source: TrialSource, study_id: str) -> None:
    """Print the headline, the breakdown, accepted changes, other trials, and the choices that were not tried."""
    recommendation = source.recommendation(study_id)
    console.print(_headline(source, study_id))
    breakdown = get_breakdown_info(source, study_id)
    if breakdown:
        console.print(_breakdown(breakdown, coloured=console.color_system is not None and not console.no_color))
    if recommendation is not None and recommendation.parts:
        console.print(_parts(recommendation))
    tried = get_tried_info(source, study_id, Effects(source.trials(study_id), recommendation))
    if tried:
        console.print(_tried(tried))
    left_out = get_not_tried_info(source, study_id)
    if left_out:
        console.print(_not_tried(left_out))


def _headline(source: TrialSource, study_id: str) -> RenderableType:
    info = get_headline_info(source, study_id)
    tone = _TONES[info.tone]
    title = Text(f"{info.figure} {info.title}".strip(), style=f"bold {tone}")
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    for fact in info.facts:
        value = Text(fact.value)
        if fact.note:
            value.append(f"  {fact.note}", style="dim")
        facts.add_row(fact.name, value)
    return Panel(
        Group(title, Text(info.sentence), Text(), facts),
        border_style=tone,
        title=escape(short_name(source.get_study(study_id).workload)),
    )


def _breakdown(info: Sequence[CategoryTime], *, coloured: bool) -> RenderableType:
    """Return stacked bars on one scale, and a table of the categories side by side; without colours, bars are
    shaded.
    """
    steps_ms: dict[str, dict[str, float]] = {}
    titles: dict[str, str] = {}
    for row in info:
        steps_ms.setdefault(row.configuration, {})[row.category] = row.ms_per_step
        titles[row.category] = row.title
    longest = max(sum(step.values()) for step in steps_ms.values())
    first = next(iter(steps_ms.values()))
    order = sorted(titles, key=lambda name: -first.get(name, 0.0))
    fills = {category: "█" if coloured else SHADES[number % len(SHADES)] for number, category in enumerate(order)}
    bars = Table.grid(padding=(0, 2, 0, 0))
    for name, step in steps_ms.items():
        bar = Text()
        for category in order:
            width = round(step.get(category, 0.0) / longest * BAR_WIDTH)
            bar.append(fills[category] * width, style=category_colour(category))
        bars.add_row(Text(name, style="bold", no_wrap=True), bar, units.milliseconds(sum(step.values())))
    table = plain_table("step breakdown")
    for name in steps_ms:
        table.add_column(name, justify="right", no_wrap=True)
    for category in order:
        label = Text(f"{fills[category]} ", style=category_colour(category)).append(titles[category], style="default")
        values = (step.get(category) for step in steps_ms.values())
        table.add_row(label, *("–" if value is None else units.milliseconds(value) for value in values))
    return Group(Text(), bars, Text(), table)


def _parts(recommendation: Recommendation) -> RenderableType:
    table = _figures("contribution", "95 % interval", "numerics", "change, and why", title="Recommended changes")
    for part in recommendation.parts:
        known = contribution_of(recommendation, part)
        stated = unclear_contribution(recommendation, part) if known is None else known.interval
        interval = "" if stated is None else units.ratio_interval(stated)
        change = Text(f"{part.strategy}: {choice_label(part.choice)}", style="bold")
        if known is not None and known.together:
            change.append(f"\ncontribution {needed_by(known.together)}", style="dim not bold")
        change.append(f"\n{part.reason}", style="dim not bold")
        unknown = "none proven" if stated is not None else ""
        table.add_row(unknown if known is None else units.ratio(known.ratio), interval, part.numerics.value, change)
    return Group(Text(), table)


def _figures(*names: str, title: str) -> Table:
    """Return a table with columns of figures that never wrap, then one column of text that takes the remaining
    width.
    """
    table = plain_table(*names, title=title)
    for column in table.columns[:-1]:
        column.no_wrap = True
    return table


def _tried(info: Sequence[TriedRow]) -> RenderableType:
    table = _figures("verdict", "speed", "at most", "change, and why", title="What was tried")
    for row in info:
        verdict = Text(units.words(row.verdict), style=_VERDICTS.get(row.verdict, ""))
        speed = "" if math.isnan(row.gain) else units.ratio(row.gain)
        limit = units.ratio(row.limit) if math.isfinite(row.limit) else ""
        change = Text(row.changed).append(f"\n{row.reason}" if row.reason else "", style="dim")
        table.add_row(verdict, speed, limit, change)
    return Group(Text(), table)


def _not_tried(info: Sequence[NotTriedRow]) -> RenderableType:
    table = _figures("strategy", "reason, and choices", title="Untried choices")
    last = ""
    for row in info:
        choices = row.choices
        shown = "; ".join(choices[:SHOWN_CHOICES])
        more = f" and {len(choices) - SHOWN_CHOICES} more" if len(choices) > SHOWN_CHOICES else ""
        strategy, last = ("" if row.strategy == last else row.strategy), row.strategy
        table.add_row(strategy, Text(row.reason).append(f": {shown}{more}", style="dim"))
    return Group(Text(), table)

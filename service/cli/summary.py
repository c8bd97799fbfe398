"""A study's answer on a terminal: the same facts, in the same order, as the report."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dashboards import units
from dashboards.breakdown import get_breakdown_info
from dashboards.headline import get_headline_info
from dashboards.sources import TrialSource
from dashboards.story import get_not_tried_info, get_tried_info
from dashboards.theme import category_colour
from tuner.records import Part, Recommendation, choice_label

BAR_WIDTH = 48
SHOWN_CHOICES = 3
_VERDICTS = {"accepted": "green", "confirmed": "green", "failed": "red", "guard_rejected": "red"}
_TONES = {"good": "green", "neutral": "blue", "warning": "yellow"}


def print_summary(console: Console, source: TrialSource, study_id: str) -> None:
    """Prints headline, breakdown, accepted changes, what else was tried, and what was not."""
    recommendation = source.recommendation(study_id)
    console.print(_headline(source, study_id))
    breakdown = get_breakdown_info(source, study_id)
    if len(breakdown):
        console.print(_breakdown(breakdown))
    if recommendation is not None and recommendation.parts:
        console.print(_parts(recommendation))
    tried = get_tried_info(source, study_id)
    if len(tried):
        console.print(_tried(tried))
    left_out = get_not_tried_info(source, study_id)
    if len(left_out):
        console.print(_not_tried(left_out))


def _headline(source: TrialSource, study_id: str) -> RenderableType:
    info = get_headline_info(source, study_id)
    tone = _TONES[info.tone]
    title = Text(f"{info.figure} {info.title}".strip(), style=f"bold {tone}")
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    for fact in info.facts:
        value = Text(fact.value)
        if fact.note:
            value.append(f"  {fact.note}", style="dim")
        facts.add_row(fact.name, value)
    return Panel(
        Group(title, Text(info.sentence), Text(), facts), border_style=tone, title=source.get_study(study_id).workload
    )


def _breakdown(info: pd.DataFrame) -> RenderableType:
    """Stacked bars on one scale, and a table of the categories side by side."""
    rows = _records(info)
    steps_ms: dict[str, dict[str, float]] = {}
    titles: dict[str, str] = {}
    for row in rows:
        steps_ms.setdefault(row["configuration"], {})[row["category"]] = row["ms_per_step"]
        titles[row["category"]] = row["title"]
    longest = max(sum(step.values()) for step in steps_ms.values())
    bars = Table.grid(padding=(0, 1))
    for name, step in steps_ms.items():
        bar = Text()
        for category, value in step.items():
            bar.append("█" * round(value / longest * BAR_WIDTH), style=category_colour(category))
        bars.add_row(Text(name, style="bold"), bar, units.milliseconds(sum(step.values())))
    table = Table(box=None, padding=(0, 2), header_style="dim")
    table.add_column("where the step goes")
    for name in steps_ms:
        table.add_column(name, justify="right")
    first = next(iter(steps_ms.values()))
    for category in sorted(titles, key=lambda name: -first.get(name, 0.0)):
        label = Text("■ ", style=category_colour(category)).append(titles[category], style="default")
        values = (step.get(category) for step in steps_ms.values())
        table.add_row(label, *("–" if value is None else units.milliseconds(value) for value in values))
    return Group(Text(), bars, Text(), table)


def _records(info: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a frame, by column name."""
    return [{str(name): value for name, value in row.items()} for row in info.to_dict("records")]


def _parts(recommendation: Recommendation) -> RenderableType:
    table = Table(title="Recommended changes", title_justify="left", box=None, padding=(0, 2), header_style="dim")
    for name in ("change", "own gain", "95 % interval", "numerics", "because"):
        table.add_column(name, overflow="fold")
    for part in recommendation.parts:
        table.add_row(_change(part), units.ratio(part.gain), _interval(part), part.numerics.value, part.reason)
    return Group(Text(), table)


def _change(part: Part) -> Text:
    return Text(part.strategy, style="bold").append(f"  {choice_label(part.choice)}", style="default")


def _interval(part: Part) -> str:
    return units.ratio_interval(part.interval) if part.interval else ""


def _tried(info: pd.DataFrame) -> RenderableType:
    table = Table(title="What was tried", title_justify="left", box=None, padding=(0, 2), header_style="dim")
    for name in ("changed", "verdict", "measured", "could gain", "why"):
        table.add_column(name, overflow="fold")
    for row in _records(info):
        verdict = Text(units.words(row["verdict"]), style=_VERDICTS.get(row["verdict"], ""))
        measured = "" if math.isnan(row["gain"]) else units.ratio(row["gain"])
        limit = "" if math.isnan(row["limit"]) else f"≤ {units.ratio(row['limit'])}"
        table.add_row(Text(row["changed"]), verdict, measured, limit, Text(row["reason"]))
    return Group(Text(), table)


def _not_tried(info: pd.DataFrame) -> RenderableType:
    table = Table(title="What was not tried", title_justify="left", box=None, padding=(0, 2), header_style="dim")
    for name in ("strategy", "choices", "why not"):
        table.add_column(name, overflow="fold")
    for row in _records(info):
        choices = row["choices"]
        shown = "; ".join(choices[:SHOWN_CHOICES])
        more = f" and {len(choices) - SHOWN_CHOICES} more" if len(choices) > SHOWN_CHOICES else ""
        table.add_row(row["strategy"], Text(shown + more), Text(row["reason"]))
    return Group(Text(), table)

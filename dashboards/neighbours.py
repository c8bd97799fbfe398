"""Speed of the configurations that differ from the recommended one in a single choice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from steptune.dashboards import theme, units
from steptune.dashboards.candidates import CandidateRow
from steptune.dashboards.effects import Effects
from steptune.dashboards.figures import Figure
from steptune.dashboards.history import LOOKS
from steptune.dashboards.sources import TrialSource
from steptune.dashboards.starts import leading_candidate
from steptune.tuner.records import Candidate, choice_label


class NeighbourRow(NamedTuple):
    """A configuration that differs from the leading one in a single strategy."""

    strategy: str
    here: str
    """Choice of the strategy in the leading configuration."""
    there: str
    """Choice of the strategy in the other configuration."""
    ratio: float
    """Speed of the other configuration divided by that of the leading one; NaN where it was not measured."""
    low: float
    high: float
    """Upper end of the 95 % interval of the ratio."""
    outcome: str
    num_starts: int


def get_neighbours_info(
    source: TrialSource, study_id: str, effects: Effects, candidates: Sequence[CandidateRow]
) -> list[NeighbourRow]:
    """Return one row for each configuration that was run and differs from the leading one in a single strategy; empty
    while no configuration leads.
    """
    leading = leading_candidate(source, study_id)
    if leading is None:
        return []
    rows = []
    for row in candidates:
        strategy = _single_difference(leading[1], row.candidate)
        if strategy is None:
            continue
        measured = not math.isnan(row.gain) and leading[1].key in effects.measured
        is_without = row.candidate.choices.get(strategy, {}) == effects.reference.choices.get(strategy, {})
        left_out = effects.without_part(strategy) if is_without else None
        ratio = left_out or effects.ratio(row.candidate, leading[1])
        rows.append(
            NeighbourRow(
                strategy,
                _label(leading[1], strategy),
                _label(row.candidate, strategy),
                *(ratio[:3] if measured else (math.nan,) * 3),
                row.outcome,
                row.num_starts,
            )
        )
    return sorted(rows, key=lambda row: row.strategy)


def _single_difference(one: Candidate, other: Candidate) -> str | None:
    names = [n for n in {*one.choices, *other.choices} if one.choices.get(n) != other.choices.get(n)]
    return names[0] if len(names) == 1 else None


def _label(candidate: Candidate, strategy: str) -> str:
    choice = candidate.choices.get(strategy)
    return choice_label(choice) if choice else "as today"


def plot_neighbours(info: Sequence[NeighbourRow]) -> Figure:
    """Draw a dot with its interval for each neighbour; the line is the leading configuration."""
    known = [row for row in info if not math.isnan(row.ratio)]
    figure = theme.new_figure(height=96 + 34 * max(1, len(known)), showlegend=False)
    names = [theme.plain(f"{units.words(row.strategy)}: {row.there}") for row in known]
    names = [name if len(name) <= 58 else f"{name[:57]}…" for name in names]
    figure.add_vline(x=1, line={"color": theme.GOOD, "width": 1.5})
    figure.add_scatter(
        mode="markers",
        x=[row.ratio for row in known],
        y=list(range(len(known))),
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [row.high - row.ratio for row in known],
            "arrayminus": [row.ratio - row.low for row in known],
            "color": theme.NEUTRAL,
            "thickness": 2,
            "width": 5,
        },
        marker={
            "size": 10,
            "color": [LOOKS[row.outcome].colour if row.outcome in LOOKS else theme.NEUTRAL for row in known],
            "symbol": [LOOKS[row.outcome].symbol if row.outcome in LOOKS else "circle" for row in known],
            "line": {"width": 1.5, "color": theme.NEUTRAL},
        },
        customdata=[
            f"<b>{units.ratio(row.ratio)}</b> of the recommended speed with {theme.wrapped(row.there)}"
            f"<br>instead of {theme.wrapped(row.here)}"
            for row in known
        ],
        hovertemplate="%{customdata}<extra></extra>",
    )
    figure.update_xaxes(title={"text": "speed, recommended configuration = 1×"}, ticksuffix="×")
    figure.update_yaxes(
        tickvals=list(range(len(known))), ticktext=names, autorange="reversed", showgrid=False, ticklabelstandoff=8
    )
    return figure

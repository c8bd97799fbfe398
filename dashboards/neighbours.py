"""How the speed moves one step beside each choice of the recommendation."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from steptune.dashboards import theme, units
from steptune.dashboards.effects import Effects
from steptune.dashboards.figures import Figure
from steptune.dashboards.frames import rows_of
from steptune.dashboards.history import LOOKS
from steptune.dashboards.sources import TrialSource
from steptune.dashboards.starts import leading_candidate
from steptune.tuner.records import Candidate, choice_label

COLUMNS = ("strategy", "here", "there", "ratio", "low", "high", "outcome", "num_starts")


def get_neighbours_info(source: TrialSource, study_id: str, effects: Effects, candidates: pd.DataFrame) -> pd.DataFrame:
    """One row for each configuration that was run and differs from the leading one in a single strategy.

    `here` is that strategy's choice in the leading configuration and `there` in the other; `ratio` is the other's speed
    over the leading one's with its 95 % interval, NaN where it was not measured. Empty before anything leads.
    """
    leading = leading_candidate(source, study_id)
    rows: list[tuple[Any, ...]] = []
    for row in rows_of(candidates) if leading is not None else ():
        assert leading is not None
        strategy = _single_difference(leading[1], row.candidate)
        if strategy is None:
            continue
        measured = not math.isnan(row.gain) and leading[1].key in effects.measured
        ratio = effects.ratio(row.candidate, leading[1])
        rows.append(
            (
                strategy,
                _label(leading[1], strategy),
                _label(row.candidate, strategy),
                *(ratio if measured else (math.nan,) * 3),
                row.outcome,
                row.num_starts,
            )
        )
    rows.sort(key=lambda row: str(row[0]))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _single_difference(one: Candidate, other: Candidate) -> str | None:
    names = [n for n in {*one.choices, *other.choices} if one.choices.get(n) != other.choices.get(n)]
    return names[0] if len(names) == 1 else None


def _label(candidate: Candidate, strategy: str) -> str:
    choice = candidate.choices.get(strategy)
    return choice_label(choice) if choice else "as today"


def plot_neighbours(info: pd.DataFrame) -> Figure:
    """A dot with its interval a neighbour; the line is the leading configuration."""
    known = info[info["ratio"].notna()]
    figure = theme.new_figure(height=96 + 34 * max(1, len(known)), showlegend=False)
    names = [theme.plain(f"{units.words(row.strategy)}: {row.there}") for row in rows_of(known)]
    names = [name if len(name) <= 58 else f"{name[:57]}…" for name in names]
    figure.add_vline(x=1, line={"color": theme.GOOD, "width": 1.5})
    figure.add_scatter(
        mode="markers",
        x=list(known["ratio"]),
        y=list(range(len(known))),
        error_x={
            "type": "data",
            "symmetric": False,
            "array": list(known["high"] - known["ratio"]),
            "arrayminus": list(known["ratio"] - known["low"]),
            "color": theme.NEUTRAL,
            "thickness": 2,
            "width": 5,
        },
        marker={
            "size": 10,
            "color": [LOOKS[o].colour if o in LOOKS else theme.NEUTRAL for o in known["outcome"]],
            "symbol": [LOOKS[o].symbol if o in LOOKS else "circle" for o in known["outcome"]],
            "line": {"width": 1.5, "color": theme.NEUTRAL},
        },
        customdata=[
            f"<b>{units.ratio(row.ratio)}</b> of its speed with {theme.wrapped(row.there)}"
            f"<br>instead of {theme.wrapped(row.here)}"
            for row in rows_of(known)
        ],
        hovertemplate="%{customdata}<extra></extra>",
    )
    figure.update_xaxes(title={"text": "speed, this configuration = 1×"}, ticksuffix="×")
    figure.update_yaxes(
        tickvals=list(range(len(known))), ticktext=names, autorange="reversed", showgrid=False, ticklabelstandoff=8
    )
    return figure

"""Importance of strategies on this workload.

With few noisy trials, most of them around the best configuration, measures that need many independent samples (fANOVA,
permutation of a forest) say little. So importance is a contrast of pairs of configurations that were run and differ in
one strategy only: two choices that such a pair compares, or a chain of pairs, have a ratio of speeds, by the search's
own Gaussian model of all trials (`tuner.search.effects`), which shrinks what few trials say towards "no effect". Of
several chains the one with the smallest variance counts. The importance of a strategy is the ratio of its best choice
to its worst. Where a strategy was only ever changed together with others there are no pairs; then it is the model's
estimate of its choices alone, with a wide interval.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from steptune.dashboards import theme, units
from steptune.dashboards.effects import NORMAL_QUANTILE, Effects
from steptune.dashboards.figures import Figure
from steptune.dashboards.sources import TrialSource
from steptune.tuner.records import BASELINE, Candidate, choice_label

TODAY = "as today"
METHOD = (
    "Speed of the best choice divided by that of the worst, estimated by the search's Gaussian model of all trials; "
    "the estimate uses only pairs (or chains of pairs) of measured configurations that differ in this strategy alone"
)


class Edge(NamedTuple):
    """Comparison of two choices: the logarithm of the ratio of their speeds, and its variance."""

    value: float
    variance: float


Known = dict[tuple[str, str], Edge]
"""Comparisons of choices, by pair of choices; each ratio is the speed of the first choice over that of the second."""


class ImportanceRow(NamedTuple):
    """A strategy with at least one measured choice."""

    strategy: str
    best: str
    worst: str
    ratio: float
    """Speed of the best choice over the worst."""
    low: float
    high: float
    """Upper end of the 95 % interval of the speed ratio."""
    num_trials: int
    """Number of trials that set a choice of the strategy."""
    paired: bool
    """True where two configurations that differ in this strategy alone were run."""


def get_importance_info(source: TrialSource, study_id: str, effects: Effects) -> list[ImportanceRow]:
    """Return one row for each strategy with a measured choice, the most important first."""
    measured: dict[str, Candidate] = {}
    counts: dict[str, int] = {}
    for trial in source.trials(study_id):
        if trial.candidate.key in effects.measured and trial.result is not None and trial.result.ok:
            measured[trial.candidate.key] = trial.candidate
            for name in trial.candidate.choices:
                counts[name] = counts.get(name, 0) + 1
    found = [_row(name, list(measured.values()), counts[name], effects) for name in counts]
    rows = [row for row in found if row is not None]
    return sorted(rows, key=lambda row: -row.ratio)


def _row(name: str, measured: Sequence[Candidate], num_trials: int, effects: Effects) -> ImportanceRow | None:
    """Build the row of a strategy; None if no two of its choices were compared."""
    known = _chained(_pairs(name, measured, effects))
    paired = bool(known)
    if not paired and BASELINE.key not in effects.measured:
        return None
    if not paired:
        known = _pairs(name, [BASELINE, *_alone(name, measured)], effects)
    root = TODAY if any(TODAY in pair for pair in known) else next(iter(known))[0]
    speeds = {root: 0.0, **{one: edge.value for (one, other), edge in known.items() if other == root}}
    best, worst = max(speeds, key=lambda label: speeds[label]), min(speeds, key=lambda label: speeds[label])
    edge = known.get((best, worst), Edge(0.0, 0.0))
    half = NORMAL_QUANTILE * math.sqrt(edge.variance)
    value, low, high = (math.exp(edge.value + shift) for shift in (0.0, -half, half))
    return ImportanceRow(name, best, worst, value, low, high, num_trials, paired)


def _pairs(name: str, measured: Sequence[Candidate], effects: Effects) -> Known:
    """Compare every two choices of a strategy, from two configurations that differ in nothing else. If there are
    several such pairs of configurations, use the comparison with the smallest variance.
    """
    same: dict[str, list[Candidate]] = {}
    for candidate in measured:
        same.setdefault(candidate.with_choice(name, {}).key, []).append(candidate)
    known: Known = {}
    for one, other in itertools.chain.from_iterable(itertools.permutations(found, 2) for found in same.values()):
        ratio = effects.ratio(one, other)
        if math.isnan(ratio.low):  # an answer of an older version that states no interval
            ratio = effects.modelled(one, other)
        edge = Edge(math.log(ratio.value), (math.log(ratio.high / ratio.low) / (2 * NORMAL_QUANTILE)) ** 2)
        pair = _label(one, name), _label(other, name)
        if pair not in known or edge.variance < known[pair].variance:
            known[pair] = edge
    return known


def _chained(known: Known) -> Known:
    """Add the pairs of choices that are connected only by a chain of comparisons (Floyd-Warshall). Variances along a
    chain add up.
    """
    labels = list(dict.fromkeys(label for pair in known for label in pair))
    found = dict(known)
    for middle, one, other in itertools.product(labels, repeat=3):
        if (
            (one, other) not in known
            and len({middle, one, other}) == 3
            and (one, middle) in found
            and (middle, other) in found
        ):
            first, second = found[one, middle], found[middle, other]
            chain = Edge(first.value + second.value, first.variance + second.variance)
            if (one, other) not in found or chain.variance < found[one, other].variance:
                found[one, other] = chain
    return found


def _alone(name: str, measured: Sequence[Candidate]) -> list[Candidate]:
    found = [Candidate(choices={name: c.choices[name]}) for c in measured if name in c.choices]
    return list({candidate.key: candidate for candidate in found}.values())


def _label(candidate: Candidate, name: str) -> str:
    return choice_label(candidate.choices[name]) if name in candidate.choices else TODAY


def plot_importance(info: Sequence[ImportanceRow]) -> Figure:
    """Draw one bar per strategy, with its interval."""
    figure = theme.new_figure(height=92 + 34 * max(1, len(info)), showlegend=False, bargap=0.35)
    figure.add_bar(
        orientation="h",
        y=[theme.plain(units.words(row.strategy)) for row in info],
        x=[row.ratio - 1 for row in info],
        base=1,
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [row.high - row.ratio for row in info],
            "arrayminus": [row.ratio - row.low for row in info],
            "color": theme.NEUTRAL,
            "thickness": 1.5,
            "width": 4,
        },
        marker={"color": [theme.GOOD if row.low > 1 else theme.MUTED for row in info]},
        customdata=[
            f"<b>{units.ratio(row.ratio)}</b> ({units.ratio(row.low)} to {units.ratio(row.high)})<br>"
            f"best: {theme.wrapped(row.best)}<br>worst: {theme.wrapped(row.worst)}"
            for row in info
        ],
        hovertemplate="%{customdata}<extra></extra>",
    )
    figure.update_xaxes(title={"text": "speed, worst choice = 1×"}, ticksuffix="×")
    figure.update_yaxes(autorange="reversed", showgrid=False, ticklabelstandoff=8)
    return figure

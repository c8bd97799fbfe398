"""Speed of a configuration: one value with its interval, and the method, time and load of its measurement.

Terminal, pages, REST, report and exports render what `answer_of` and `speed_of` return; none works out a speed of its
own. A confirmation measures finalists anew, so its figures replace those of the search for the same configuration.
The ratio that a single run shows is another quantity: it has another name and is shown with that run only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

from msgspec.structs import replace

from steptune.tuner.objectives import parse_objective
from steptune.tuner.records import Candidate, Gain, Interval, Part, Recommendation, Record, Verdict
from steptune.tuner.wording import counted

WIDEST = 4.0
"""Maximum ratio of an interval's upper end to its lower end for a gain to count as conclusive: at this ratio the
interval reaches from half of the estimate to twice the estimate.
"""


class Method(StrEnum):
    """Method by which a speed was measured."""

    REFERENCE = "reference"
    CONFIRMED = "confirmed"
    SEARCHED = "search estimate"
    LEFT_OUT = "left out"


class Speed(Record):
    """Speed of a configuration, as a ratio to the speed of the reference.

    Attributes:
        ratio: The estimate; 1.0 is the reference's speed.
        interval: Interval of the ratio; None for the reference, and where none is known.
        method: How it was measured.
        num_blocks: Number of paired comparisons of new runs; 0 for an estimate of the search.
        measured_at: When the study ended (ISO 8601, UTC).
        foreign_cpu_share: Share of the cores that other programs used during the windows (median).
        together: For the contribution of a part: other parts that were left out with it, because they need it.
    """

    ratio: float
    interval: Interval | None
    method: Method
    num_blocks: int = 0
    measured_at: str = ""
    foreign_cpu_share: float = 0.0
    together: tuple[str, ...] = ()

    @property
    def told(self) -> str:
        """Method in words, with the number of blocks."""
        beside = f", {needed_by(self.together)}" if self.together else ""
        if self.method is Method.CONFIRMED:
            return f"confirmed in {counted(self.num_blocks, 'block')}{beside}"
        if self.method is Method.LEFT_OUT:
            return f"measured by leaving it out, in {counted(self.num_blocks, 'block')}{beside}"
        return str(self.method.value)


def needed_by(together: Sequence[str]) -> str:
    """Return `with cuda_graph, which needs it`: the parts that a contribution includes beside its own; empty without
    any.
    """
    return f"with {' and '.join(together)}, which {'needs' if len(together) == 1 else 'need'} it" if together else ""


def is_wide(interval: Interval) -> bool:
    """Say whether an interval is too wide for its estimate to be conclusive."""
    return interval.high > WIDEST * interval.low


def proven_gain(recommendation: Recommendation) -> float | None:
    """Return the speed-up that the recommendation claims; None unless its verdict is "faster"."""
    if recommendation.verdict is not Verdict.FASTER or recommendation.gain is None:
        return None
    return recommendation.gain.ratio


def answer_of(recommendation: Recommendation) -> Speed:
    """Return the speed of the recommended configuration."""
    r = recommendation
    if r.candidate.is_baseline:
        return _made(r, 1.0, None, Method.REFERENCE)
    if r.gain is not None:
        return _confirmed(r, r.gain)
    if r.verdict is Verdict.ENABLES_TRAINING and r.units_per_s == r.baseline_units_per_s:
        return _made(r, 1.0, None, Method.REFERENCE)  # the nearest settings that fit, which all else is compared with
    ratio = r.units_per_s / r.baseline_units_per_s if r.baseline_units_per_s else 1.0
    if (
        r.search_interval is not None and not parse_objective(r.objective).is_rate
    ):  # of which its middle is the estimate
        ratio = math.sqrt(r.search_interval.low * r.search_interval.high)
    return _made(r, ratio, r.search_interval, Method.SEARCHED)


def speed_of(recommendation: Recommendation, candidate: Candidate) -> Speed | None:
    """Return the speed of a configuration if the recommendation names it; None otherwise."""
    r = recommendation
    if candidate == r.candidate:
        return answer_of(r)
    if candidate.is_baseline and r.verdict is not Verdict.ENABLES_TRAINING:
        return _made(r, 1.0, None, Method.REFERENCE)
    if candidate == r.unproven_candidate and r.unproven_gain is not None:
        return _confirmed(r, r.unproven_gain)
    for other in r.alternatives:
        if other.candidate == candidate:
            if other.confirmed is not None:
                return _confirmed(r, other.confirmed)
            return _made(r, other.gain, other.interval, Method.SEARCHED)
    return None


def contribution_of(recommendation: Recommendation, part: Part) -> Speed | None:
    """Return the speed of the recommendation relative to the same settings without one part. None if that was not
    measured, if its interval includes 1, or if the recommendation claims no gain.
    """
    speed = measured_contribution(recommendation, part)
    interval = None if speed is None else speed.interval
    return speed if interval is not None and not interval.low <= 1.0 <= interval.high else None


def unclear_contribution(recommendation: Recommendation, part: Part) -> Interval | None:
    """Return the interval of a part's measured contribution if the interval includes 1; else None."""
    speed = measured_contribution(recommendation, part)
    return None if speed is None or contribution_of(recommendation, part) is not None else speed.interval


def measured_contribution(recommendation: Recommendation, part: Part) -> Speed | None:
    """Return the measured contribution of a part, whatever its interval; None if it was not measured, or if the
    recommendation claims no gain.

    A part without which nothing of the answer is left contributes the whole gain over today's settings. If the
    reference has other settings, because today's do not fit into memory, the recommendation may differ from it in more
    than its parts.
    """
    if recommendation.verdict not in (Verdict.FASTER, Verdict.ENABLES_TRAINING):
        return None
    if {part.strategy, *part.together} >= {p.strategy for p in recommendation.parts} and (
        recommendation.verdict is Verdict.FASTER
    ):
        return replace(answer_of(recommendation), together=part.together)
    if part.gain is not None and part.num_blocks:
        speed = _made(recommendation, part.gain, part.interval, Method.LEFT_OUT, part.num_blocks)
        return replace(speed, together=part.together)
    return None


def _confirmed(recommendation: Recommendation, gain: Gain) -> Speed:
    return _made(recommendation, gain.ratio, gain.interval, Method.CONFIRMED, gain.num_blocks)


def _made(
    recommendation: Recommendation, ratio: float, interval: Interval | None, method: Method, num_blocks: int = 0
) -> Speed:
    return Speed(
        ratio=ratio,
        interval=interval,
        method=method,
        num_blocks=num_blocks,
        measured_at=recommendation.created_at,
        foreign_cpu_share=recommendation.foreign_cpu_share,
    )

"""The speed of a configuration: one value, one interval, and how, when and under which load it was measured.

Terminal, pages, REST, report and exports render what `answer_of` and `speed_of` return; none works out a speed of its
own. A confirmation measures finalists anew, so its figures replace those of the search for the same configuration.
What a single run shows is another quantity: it is named so, and stays with that run.
"""

from __future__ import annotations

import math
from enum import StrEnum

from steptune.tuner.objectives import parse_objective
from steptune.tuner.records import Candidate, Gain, Interval, Part, Recommendation, Record, Verdict
from steptune.tuner.wording import counted

WIDEST = 4.0
"""Upper over lower end of an interval beyond which a gain is inconclusive: it reaches from half of the estimate to
twice that, so that no digit is known."""


class Method(StrEnum):
    """The way in which a speed was measured."""

    REFERENCE = "reference"
    CONFIRMED = "confirmed"
    SEARCHED = "search estimate"
    LEFT_OUT = "left out"


class Speed(Record):
    """Speed of a configuration over that of the reference.

    Attributes:
        ratio: The estimate; 1.0 is the reference's speed.
        interval: Of the ratio; None of the reference, and where none is known.
        method: How it was measured.
        num_blocks: Paired comparisons of new runs behind it; 0 of an estimate of the search.
        measured_at: When the study ended (ISO 8601, UTC).
        foreign_cpu_share: Share of the cores that other programs used meanwhile, the median over windows.
    """

    ratio: float
    interval: Interval | None
    method: Method
    num_blocks: int = 0
    measured_at: str = ""
    foreign_cpu_share: float = 0.0

    @property
    def told(self) -> str:
        """The method in words, with its size."""
        if self.method is Method.CONFIRMED:
            return f"confirmed in {counted(self.num_blocks, 'block')}"
        if self.method is Method.LEFT_OUT:
            return f"measured by leaving it out, in {counted(self.num_blocks, 'block')}"
        return str(self.method.value)


def is_wide(interval: Interval) -> bool:
    """Return True where an interval says too little of its estimate."""
    return interval.high > WIDEST * interval.low


def proven_gain(recommendation: Recommendation) -> float | None:
    """Ratio that the answer claims; None unless the verdict is that it is faster."""
    if recommendation.verdict is not Verdict.FASTER or recommendation.gain is None:
        return None
    return recommendation.gain.ratio


def answer_of(recommendation: Recommendation) -> Speed:
    """Speed of the recommended configuration."""
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
    """Speed of a configuration that the answer of its study names; None of any other."""
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
    """Speed with a part over the speed without it, everything else as recommended; None where that was not measured or
    its interval does not exclude 1, and where the answer claims nothing.
    """
    speed = measured_contribution(recommendation, part)
    interval = None if speed is None else speed.interval
    return speed if interval is not None and not interval.low <= 1.0 <= interval.high else None


def unclear_contribution(recommendation: Recommendation, part: Part) -> Interval | None:
    """Interval of a contribution that was measured and is not told from none; None of any other."""
    speed = measured_contribution(recommendation, part)
    return None if speed is None or contribution_of(recommendation, part) is not None else speed.interval


def measured_contribution(recommendation: Recommendation, part: Part) -> Speed | None:
    """Contribution as it was measured, whatever its interval; None where it was not, or the answer claims nothing.

    An only part contributes what the answer gains over today's settings; over others, which had to give way, the answer
    may differ in more than its parts.
    """
    if recommendation.verdict not in (Verdict.FASTER, Verdict.ENABLES_TRAINING):
        return None
    if len(recommendation.parts) == 1 and recommendation.verdict is Verdict.FASTER:
        return answer_of(recommendation)
    if part.gain is not None and part.num_blocks:
        return _made(recommendation, part.gain, part.interval, Method.LEFT_OUT, part.num_blocks)
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

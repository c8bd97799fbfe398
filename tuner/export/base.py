"""Base of exporters: the recommendation in the format of one tool.

One target is one file in this folder and one entry in `EXPORTERS`. A format that has comments opens
with a header (what was measured, the version it is for, how to use it, what it leaves out); one that
has none leaves that to `version`, `usage` and `not_expressible`, which are shown beside the text.

The contract tests in tests/contracts/test_exporters.py hold for every entry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from steptune.tuner.export.carried import carried
from steptune.tuner.objectives import PLAIN, parse_objective
from steptune.tuner.records import Recommendation, Verdict
from steptune.tuner.speeds import answer_of, proven_gain
from steptune.tuner.wording import ratio, ratio_range
from steptune.tuner.workloads.reference import COMMAND


class Exporter(ABC):
    """Exporter to one target.

    Attributes:
        name: Name by which a user selects it.
        summary: One-line description.
        version: Library, and its version, for which the text is written.
        usage: One line: how to use the exported file.
        comment: Beginning of a comment in this format; None where there are no comments.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    version: ClassVar[str]
    usage: ClassVar[str]
    comment: ClassVar[str | None] = None

    @abstractmethod
    def file_name(self, recommendation: Recommendation) -> str:
        """Return the file name that the target expects, or else a default name."""

    @abstractmethod
    def export(self, recommendation: Recommendation) -> str:
        """Return the text of the file; equal recommendations give equal text.

        Raises:
            RecommendationError: The format cannot hold this recommendation at all.
        """

    def refusal(self, recommendation: Recommendation) -> str | None:
        """Return the reason why the format cannot hold this recommendation, and the way out; None if the format can
        hold it.
        """
        return None

    def how_to_use(self, recommendation: Recommendation) -> str:
        """Return one line on how to use the exported file of this recommendation."""
        return self.usage

    def not_expressible(self, recommendation: Recommendation) -> tuple[str, ...]:
        """Return one sentence for each setting that the target cannot express. The export never approximates such a
        setting.
        """
        return ()

    def lost(self, recommendation: Recommendation) -> tuple[str, ...]:
        """Return the strategies that the target can express only in part, or not at all."""
        return ()

    def otherwise(self, recommendation: Recommendation) -> tuple[str, ...]:
        """Return the strategies that the target applies differently than the measured run did."""
        return ()

    def carries(self, recommendation: Recommendation) -> str:
        """Return a clause that says how much of the gain remains in the exported file; empty if no gain is claimed."""
        return carried(recommendation, self.lost(recommendation), self.otherwise(recommendation))

    def header(self, recommendation: Recommendation) -> str:
        """Return the comment lines at the beginning of the text."""
        lines = [
            f"Steptune for {recommendation.workload.removeprefix(COMMAND)}: {headline(recommendation)}.",
            f"For {self.version}. {self.usage}",
            *([f"This {carries.replace('×', 'x')}."] if (carries := self.carries(recommendation)) else []),
            *(f"Not expressed here: {sentence}" for sentence in self.not_expressible(recommendation)),
        ]
        return "".join(f"{self.comment} {one_line(line)}\n" for line in lines)


def headline(recommendation: Recommendation) -> str:
    """Return the recommendation's claim as a clause, such as its gain over today's settings with the interval."""
    speed = answer_of(recommendation)
    interval = ""
    if speed.interval is not None:
        told = ratio_range(speed.interval.low, speed.interval.high, "x")
        interval = f"{speed.interval.level:.0%} interval {told}"
    if proven_gain(recommendation) is not None:
        return f"{ratio(speed.ratio, 'x')} {_claim(recommendation)} ({interval})"
    if recommendation.verdict is Verdict.INCONCLUSIVE and not recommendation.candidate.is_baseline:
        return f"inconclusive: the gain of these settings is uncertain ({interval})"
    if recommendation.of_trial is not None:
        return f"the settings of trial {recommendation.of_trial}, chosen by hand; their gain is not confirmed"
    better = parse_objective(recommendation.objective).better
    return {
        Verdict.FASTER: f"{better} than today's settings",
        Verdict.NO_SIGNIFICANT_GAIN: (
            "no significant gain was found; these are today's settings, or settings of the same speed"
        ),
        Verdict.ENABLES_TRAINING: "makes the training fit into memory; with today's settings it does not fit",
        Verdict.UNCONFIRMED: "the best settings seen, whose gain is not confirmed",
        Verdict.INCONCLUSIVE: "gains could not be distinguished from noise; these are today's settings",
        Verdict.NOT_SEARCHED: "no candidate was tried; these are today's settings",
    }[recommendation.verdict]


def _claim(recommendation: Recommendation) -> str:
    """Return the words that follow the gain's ratio, such as `the speed of today's settings`."""
    objective = parse_objective(recommendation.objective)
    return "the speed of today's settings" if objective == PLAIN else objective.compared


def one_line(text: str) -> str:
    """Return text for a comment: without line breaks or control characters, which would end it."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())

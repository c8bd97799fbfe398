"""The steps of a search: what it asks for next, and the story of what came of it."""

from __future__ import annotations

from steptune.tuner.records.base import Record
from steptune.tuner.records.choices import Candidate, Move
from steptune.tuner.records.trials import Purpose


class Suggestion(Record):
    """The next trial (or group of trials) and why."""

    candidate: Candidate
    purpose: Purpose
    stage: str
    reason: str
    moves: tuple[Move, ...] = ()
    bound: float | None = None
    """The most the candidate could save, as a share of the incumbent's step."""
    replicate: int = 0
    """0 for the first start of this candidate for this purpose."""
    companion: Candidate | None = None
    """Candidate that it is compared with; run in turns with it where both fit."""


class Decision(Record):
    """One row of the story of a search: what was tried or not, why, and what came of it.

    Attributes:
        sequence: Its place in the search.
        stage: Of the search.
        reason: For people.
        candidate: What was tried, or would have been.
        moves: How it differs from the incumbent.
        trial_ids: The trials behind it.
        predicted_bound: The most it could have gained, as a share of the incumbent's step.
        measured_se: Standard error of `measured_gain`.
    """

    sequence: int
    stage: str
    verdict: str
    """"accepted", "no_gain", "inconclusive", "failed", "contended" (others used the machine),
    "guard_rejected", "no_effect", "measured", "confirmed", "not_confirmed", "not_tried"."""
    reason: str
    candidate: Candidate | None = None
    moves: tuple[Move, ...] = ()
    trial_ids: tuple[str, ...] = ()
    predicted_bound: float | None = None
    measured_gain: float | None = None
    """Rate over the incumbent's rate at that time, less one."""
    measured_se: float | None = None

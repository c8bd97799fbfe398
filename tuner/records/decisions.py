"""The steps of a search: its suggestions for the next trial, and its decisions."""

from __future__ import annotations

from steptune.tuner.records.base import Record
from steptune.tuner.records.choices import Candidate, Move
from steptune.tuner.records.trials import Purpose


class Suggestion(Record):
    """The next trial (or group of trials) of a search, and the reason for it."""

    candidate: Candidate
    purpose: Purpose
    stage: str
    reason: str
    moves: tuple[Move, ...] = ()
    bound: float | None = None
    """Upper limit on what the candidate could save, as a share of the incumbent's step."""
    replicate: int = 0
    """Index of this run among the runs of the candidate for this purpose, from 0."""
    companion: Candidate | None = None
    """Candidate with which the suggested one is compared; the two take turns if both fit into memory."""


class Decision(Record):
    """One entry of a search's record: the trial that was run or omitted, the reason, and the outcome.

    Attributes:
        sequence: Position in the search.
        stage: Stage of the search.
        reason: Reason, in a readable form.
        candidate: Candidate that was tried, or would have been.
        moves: Moves by which it differs from the incumbent.
        trial_ids: Trials that the decision rests on.
        predicted_bound: Upper limit on its gain, as a share of the incumbent's step.
        measured_se: Standard error of `measured_gain`.
    """

    sequence: int
    stage: str
    verdict: str
    """Outcome: "accepted", "no_gain", "inconclusive", "failed", "contended" (others used the machine),
    "guard_rejected", "no_effect", "measured", "confirmed", "not_confirmed" or "not_tried"."""
    reason: str
    candidate: Candidate | None = None
    moves: tuple[Move, ...] = ()
    trial_ids: tuple[str, ...] = ()
    predicted_bound: float | None = None
    measured_gain: float | None = None
    """Ratio of the candidate's rate to the incumbent's at the time, minus one."""
    measured_se: float | None = None

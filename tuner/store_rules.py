"""Rules for every store: records as text, times, short study ids, and refusals.

A record is kept as JSON and validated by msgspec when it is read. The standard library writes and
parses the text, because msgspec writes NaN and infinity as null: the loss of a run that diverged
must come back as it was. The text is ASCII, so every database can store the text of a traceback.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec

from steptune.tuner.errors import StoreError, StudyNotFoundError
from steptune.tuner.records import Decision, Recommendation, Record, Trial, TrialResult, TrialState
from steptune.tuner.wording import near

AnyRecord = TypeVar("AnyRecord", bound=Record)

BUDGET_CHANGED = "budget_changed"
"""Kind of the event for a changed budget."""
NUM_IDS_SHOWN = 5
NUM_PAST_STUDIES = 50
"""Maximum number of past studies from which a new study learns: the newest ones."""
NUM_PAST_DECISIONS = 1_000


def encode(record: Record) -> str:
    """Return the complete record as JSON."""
    return json.dumps(msgspec.to_builtins(record), separators=(",", ":"))


def decode(text: str, kind: type[AnyRecord]) -> AnyRecord:
    """Decode a record from the text that `encode` returned for it.

    Raises:
        StoreError: The text is not such a record.
    """
    try:
        return msgspec.convert(json.loads(text), kind)
    except ValueError as error:  # msgspec's and json's errors both are
        raise StoreError(
            f"a stored {kind.__name__} cannot be read ({error}); "
            "read it with the version of Steptune that wrote it, or start a new study"
        ) from error


def recommended(recommendation: Recommendation) -> tuple[str, dict[str, Any]]:
    """Return the kind and the data of the event that announces a study's recommendation."""
    return "recommended", {"verdict": recommendation.verdict.value}


def copy_of(record: AnyRecord) -> AnyRecord:
    """Return a deep copy of a record."""
    return decode(encode(record), type(record))


def parse_time(text: str) -> datetime:
    """Parse a record's time as an aware time in UTC.

    Raises:
        StoreError: The text is not an ISO 8601 time with a zone.
    """
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        time = datetime.min
    if time.tzinfo is None:
        raise StoreError(f"{text!r} is not a time with a time zone: write it like 2026-11-21T12:00:00+00:00")
    return time.astimezone(UTC)


def number(value: float | None) -> float | None:
    """Return a number that a database can compare, or None for NaN."""
    return None if value is None or math.isnan(value) else value


def check_begins(trial: Trial) -> None:
    """Assert that a new trial has the state running and no result; the result is recorded when the trial completes."""
    assert trial.state is TrialState.RUNNING, f"trial {trial.trial_id} must begin as running, got {trial.state}"
    assert trial.result is None, f"trial {trial.trial_id} must begin without a result"


def state_after(result: TrialResult) -> TrialState:
    """Return the state of a trial with this result: failed if the trial ended early, else completed, even if the guard
    rejected it.
    """
    return TrialState.COMPLETED if result.failure is None else TrialState.FAILED


def in_order(decisions: Sequence[Decision]) -> list[Decision]:
    """Return the decisions sorted by their `sequence`.

    Raises:
        StoreError: Two decisions have the same `sequence`.
    """
    ordered = sorted(decisions, key=lambda decision: decision.sequence)
    for first, second in itertools.pairwise(ordered):
        if first.sequence == second.sequence:
            raise StoreError(f"two decisions have the number {first.sequence}: number them in the order of the search")
    return ordered


def fits(study_id: str, text: str) -> bool:
    """Say whether `text` matches this study id, in full or abbreviated."""
    return bool(text) and (study_id.startswith(text) or study_id.endswith(text))


def only_match(text: str, matches: Sequence[str], newest: Sequence[str]) -> str:
    """Return the only id that matches `text`.

    Args:
        newest: Ids of the newest studies, for the message.

    Raises:
        StudyNotFoundError: No id matches, or more than one does.
    """
    if len(matches) == 1:
        return matches[0]
    if matches:
        shown = ", ".join(sorted(matches)[:NUM_IDS_SHOWN])
        raise StudyNotFoundError(f"{text!r} matches {len(matches)} studies ({shown}): write more of the id")
    if not newest:
        raise StudyNotFoundError(f"there is no study {text!r}, and no other study yet: start one with `steptune tune`")
    ends = (end for known in newest for end in (known, known[-len(text) :], known[: len(text)]))
    close = near(text, ["last", *ends]) if text else []
    meant = f": did you mean {close[0]!r}?" if close else ""
    shown = ", ".join(newest[:NUM_IDS_SHOWN])
    raise StudyNotFoundError(f"no study's id begins or ends with {text!r}{meant}; the newest here: {shown}")


def unknown_study(study_id: str) -> StudyNotFoundError:
    return StudyNotFoundError(f"there is no study {study_id!r} in this store; create it before writing to it")


def study_repeated(study_id: str) -> StoreError:
    return StoreError(f"study {study_id!r} exists already; a new study needs a new id")


def trial_repeated(trial: Trial) -> StoreError:
    return StoreError(
        f"trial {trial.trial_id!r}, number {trial.sequence} of study {trial.study_id!r}, cannot begin, because its "
        "id or number is already in use: check whether another process runs this study"
    )


def no_such_trial(trial_id: str) -> StoreError:
    return StoreError(f"there is no trial {trial_id!r}: give its whole id, or STUDY:NUMBER")


def unknown_trial(trial_id: str) -> StoreError:
    return StoreError(f"there is no trial {trial_id!r} in this store; begin it first")


def completion_refused(trial_id: str, state: TrialState | None) -> StoreError:
    """Return the error for a result that cannot be recorded; `state` is None for an unknown trial."""
    if state is None:
        return unknown_trial(trial_id)
    return StoreError(f"trial {trial_id!r} is already {state.value}: a result is recorded once, for a running trial")

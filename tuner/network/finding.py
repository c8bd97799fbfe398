"""Finding of a network check, with its severity."""

from __future__ import annotations

from enum import StrEnum

from steptune.tuner.records import Record


class Level(StrEnum):
    """Severity of a finding. `unknown` means that the setting could not be examined, not that it is fine."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"
    UNKNOWN = "unknown"


class NetworkFinding(Record):
    """Finding about one inspected setting.

    Attributes:
        subject: Name of the check.
        found: Observed state.
        effect: Effect on training; empty where all is well.
        fix: Remedy; empty where none is needed.
    """

    level: Level
    subject: str
    found: str
    effect: str = ""
    fix: str = ""


def ok(subject: str, found: str) -> NetworkFinding:
    return NetworkFinding(level=Level.OK, subject=subject, found=found)


def note(subject: str, found: str, *, effect: str = "", fix: str = "") -> NetworkFinding:
    return NetworkFinding(level=Level.NOTE, subject=subject, found=found, effect=effect, fix=fix)


def problem(subject: str, found: str, *, effect: str, fix: str) -> NetworkFinding:
    return NetworkFinding(level=Level.PROBLEM, subject=subject, found=found, effect=effect, fix=fix)


def unknown(subject: str, found: str, *, fix: str) -> NetworkFinding:
    return NetworkFinding(
        level=Level.UNKNOWN, subject=subject, found=found, effect="not examined, so it may be wrong", fix=fix
    )

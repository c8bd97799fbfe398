"""Failures of runs of a script, from the end of its process and its log."""

from __future__ import annotations

import signal
from pathlib import Path

from steptune.tuner.records import Failure, FailureKind, Phase
from steptune.tuner.scripts.launch import Ended

MEMORY_SIGNS = ("out of memory", "OutOfMemoryError", "Cannot allocate memory", "can't allocate memory")
LOG_BYTES = 1 << 16
NATIVE_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


def last_line_of(said: str) -> str:
    """Return the last line of output, preferably the script's own: `steptune.enable` may write after the script's
    error.
    """
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    own = [line for line in lines if not line.startswith("steptune: ")]
    return (own or lines or [""])[-1]


def crash_of(status: int) -> int | None:
    """Return the signal of a native crash from an exit status; None for any other end.

    Args:
        status: As in a shell, 128 and the signal; or as a frozen copy reports it, the negative signal.
    """
    return next((found for found in NATIVE_CRASHES if status in (128 + found, -found)), None)


def failure_of(ended: Ended, log: Path) -> Failure:
    """Return the failure of a run of the command that gave no result, in the script's own words if the script reported
    an error.
    """
    tail = _tail(log)
    last = last_line_of(tail)
    if ended.timed_out:
        return Failure(kind=FailureKind.TIMEOUT, phase=Phase.BUILD, message="the script exceeded its time limit")
    refusal = next((record.refusal for record in ended.records if record.refusal), "")
    if refusal:
        lines = [line for line in refusal.splitlines() if line.strip()]
        return Failure(
            kind=FailureKind.UNSUPPORTED,
            phase=Phase.BUILD,
            message=lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}",
            traceback=refusal,
        )
    if any(sign in tail for sign in MEMORY_SIGNS):
        return Failure(kind=FailureKind.OUT_OF_MEMORY, phase=Phase.WARM_UP, message=last, traceback=tail)
    if ended.status:
        message = f"the command ended with status {ended.status}: {last}"
        return Failure(
            kind=FailureKind.WORKLOAD_ERROR,
            phase=Phase.BUILD,
            message=message,
            traceback=tail,
            signal=crash_of(ended.status),
        )
    return Failure(
        kind=FailureKind.WORKLOAD_ERROR,
        phase=Phase.MEASURE,
        message="the script ended before enough of its steps were timed: let it train longer",
    )


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""

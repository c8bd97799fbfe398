"""Comparison of the calls in a script's guarded steps: rates of dropout, bounds of clipping, steps of schedulers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from steptune.tuner.scripts.agent.calls import DROPOUT

Seen = dict[str, Any]


def differing_call(wanted: Sequence[Seen], found: Sequence[Seen], *, is_compiled: bool) -> str:
    """Describe the first step in which candidate and reference make different calls; empty where no step differs."""
    for number, (reference, candidate) in enumerate(zip(wanted, found, strict=True), start=1):
        ours, theirs = (Counter(calls_of(step, is_compiled=is_compiled)) for step in (reference, candidate))
        missing, more = ", ".join((ours - theirs).elements()), ", ".join((theirs - ours).elements())
        if missing or more:
            return f"step {number} calls {more or 'nothing'} in place of {missing or 'nothing'}"
    return ""


def calls_of(step: Seen, *, is_compiled: bool) -> list[str]:
    """Return the calls of a step; for compiled code, without calls of dropout, which cannot be observed there."""
    return [call for call in step["calls"] if not (is_compiled and call.startswith(DROPOUT))]

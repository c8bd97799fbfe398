"""Guarded runs of small loops in this process, with the marks that the hooks of a script would make."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from steptune.tuner.records import GuardVerdict
from steptune.tuner.scripts.agent.guard_watch import GuardWatch
from steptune.tuner.scripts.guard_files import NUM_AUDITS, NUM_STEPS, NUM_WIDE, JudgeRequest
from steptune.tuner.scripts.judge import judge

FP32, BF16 = 2.0**-24, 2.0**-8


class Loop(Protocol):
    """Loop that trains until its guard has seen enough.

    Attributes:
        dtype: Dtype of autocast; None without.
    """

    @property
    def dtype(self) -> torch.dtype | None: ...

    def run(self, guard: GuardWatch) -> None: ...


class Bench:
    """Guarded runs of loops, each held to the same runs of a correct one.

    Args:
        own: Today's loop.
        roundoffs: Unit roundoffs of the candidates.
        noises: Seeds of the disturbed runs, whose number is that of runs for each roundoff.
    """

    def __init__(
        self, folder: Path, own: Loop, roundoffs: Sequence[float] = (FP32, BF16), noises: Sequence[int] = (4, 5)
    ) -> None:
        self.folder, self.own = folder, own
        self.own_roundoff = BF16 if own.dtype else FP32
        self._is_in_fp32 = own.dtype is None and BF16 in roundoffs  # as for scripts that set autocast themselves
        self._number = itertools.count()
        self.today = self._run("today", own, None)
        self.repeated = self._run("repeated", own, self.today.parent)
        self.disturbed = {
            str(unit): tuple(
                str(self._run(f"disturbed-{unit}-{noise}", own, self.today.parent, unit, noise)) for noise in noises
            )
            for unit in sorted({self.own_roundoff, *roundoffs})
        }

    def _run(self, name: str, loop: Loop, reference: Path | None, disturb: float = 0.0, noise: int = 0) -> Path:
        settings: dict[str, Any] = {
            "steps": NUM_STEPS,
            "audits": NUM_AUDITS,
            "wide": NUM_WIDE if self._is_in_fp32 else 0,
            "outputs": not disturb and (BF16 if loop.dtype else FP32) > self.own_roundoff,  # as the runner asks
            "seed": 0,
            "disturb": disturb,
            "noise": noise,
            "reference": str(reference) if reference else None,
        }
        target = self.folder / name / "guard-0.pt"
        target.parent.mkdir()
        guard = GuardWatch(settings, target, (0,))
        try:
            loop.run(guard)
        finally:
            guard.give_back()
        return target

    def verdict(self, loop: Loop) -> GuardVerdict:
        """Judge a loop as a candidate for today's."""
        candidate = self._run(f"candidate-{next(self._number)}", loop, self.today.parent)
        return judge(
            JudgeRequest(
                reference=str(self.today),
                repeated=str(self.repeated),
                disturbed=self.disturbed,
                candidate=str(candidate),
                unit_roundoff=BF16 if loop.dtype else FP32,
                own_roundoff=self.own_roundoff,
                device="cpu",
            )
        )


def failed(verdict: GuardVerdict) -> set[str]:
    """Return the names of the checks that a candidate did not pass."""
    return {check.name for check in verdict.checks if not check.passed}

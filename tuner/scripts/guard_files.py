"""Files of a script's guard, and the process that judges them, because the parent of a study never loads torch."""

from __future__ import annotations

from pathlib import Path

import msgspec

from steptune.tuner.records import GuardVerdict
from steptune.tuner.records.base import Record
from steptune.tuner.scripts.own_process import OwnProcess

NUM_STEPS, NUM_AUDITS, NUM_WIDE = 3, 2, 2
"""Numbers of guarded steps: consecutive steps, steps that each begin from the reference's weights, and further steps of
the second kind in FP32 if a precision changes.
"""
SEEN = "guard-0.pt"
"""Name of the file with the first rank's guarded steps."""


class JudgeRequest(Record):
    """Request to judge a candidate: the file of its run, and files of the runs to compare it with.

    Attributes:
        reference: File of the run that candidates are compared with.
        repeated: File of another run of today's settings.
        disturbed: Files of runs that were disturbed by a unit roundoff, by that roundoff (as text).
        candidate: File of the candidate's run.
        unit_roundoff: Unit roundoff of the candidate's arithmetic.
        own_roundoff: Unit roundoff of today's arithmetic.
        device: "cpu" or "cuda".
        is_compiled: Whether the candidate compiles, so that not all of its calls are seen.
    """

    reference: str
    repeated: str
    disturbed: dict[str, tuple[str, ...]]
    candidate: str
    unit_roundoff: float
    own_roundoff: float
    device: str
    is_compiled: bool = False
    num_steps: int = NUM_STEPS
    num_audits: int = NUM_AUDITS


class Judge(OwnProcess):
    """Process that judges candidates; it loads torch once."""

    def __init__(self) -> None:
        super().__init__("steptune.tuner.scripts.judge:main", "the guard could not judge a trial")

    def verdict(self, request: JudgeRequest) -> GuardVerdict:
        """Judge a candidate.

        Raises:
            RunnerError: The process failed.
        """
        return msgspec.msgpack.decode(self.call(msgspec.msgpack.encode(request)), type=GuardVerdict)


class ReferenceRuns:
    """Runs that candidates are compared with, kept in a study's directory."""

    def __init__(self, directory: Path) -> None:
        self.folder = directory / "guarded"  # `reference` in versions that saw less of a step

    @property
    def reference(self) -> Path:
        """Folder of the reference's data that candidates read: weights, batches, and hashes of the batches."""
        return self.folder / "today"

    @property
    def is_made(self) -> bool:
        """True once two runs of the current settings are complete, so that candidates can be judged."""
        return (self.reference / SEEN).exists() and (self.repeated / SEEN).exists()

    @property
    def repeated(self) -> Path:
        return self.folder / "repeated"

    def disturbed(self, unit_roundoff: float, number: int) -> Path:
        return self.folder / f"disturbed-{unit_roundoff.hex()}-{number}"

    def request(
        self, candidate: Path, unit_roundoff: float, own_roundoff: float, device: str, *, is_compiled: bool
    ) -> JudgeRequest:
        """Return the request to judge a candidate's file."""
        disturbed: dict[str, tuple[str, ...]] = {}
        for path in sorted(self.folder.glob("disturbed-*")):
            unit = str(float.fromhex(path.name.split("-", 1)[1].rpartition("-")[0]))
            disturbed[unit] = (*disturbed.get(unit, ()), str(path / SEEN))
        return JudgeRequest(
            reference=str(self.reference / SEEN),
            repeated=str(self.repeated / SEEN),
            disturbed=disturbed,
            candidate=str(candidate),
            unit_roundoff=unit_roundoff,
            own_roundoff=own_roundoff,
            device=device,
            is_compiled=is_compiled,
        )

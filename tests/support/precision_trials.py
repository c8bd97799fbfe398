"""Trials of precision levels on the training that leaves float16, on either kind of device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trial_builders import QUICK, reference

from steptune.tuner.guard.curves import Protocol
from steptune.tuner.records import BASELINE, Candidate, FailureKind, Purpose, TrialResult, TrialSpec, new_id
from steptune.tuner.strategies import strategy_named
from steptune.tuner.strategies.api import BF16_ROUNDOFF, FP16_ROUNDOFF, FP32_ROUNDOFF
from steptune.tuner.strategies.combine import complete_choices
from steptune.tuner.trials.guard_protocol import MAX_REPEATS
from steptune.tuner.trials.reference import ReferenceRequest
from steptune.tuner.trials.runner import LocalRunner

NUM_STEPS = 4
LAST_IN_RANGE = 2
CANDIDATES = {
    (level, dtype): Candidate(choices={"precision": {"level": level, "dtype": dtype}})
    for level in ("O1", "O2")
    for dtype in ("float16", "bfloat16")
}


class PrecisionTrials:
    """A runner of `Overflowing` whose reference is made."""

    def __init__(self, directory: Path, device: str) -> None:
        self._workload = reference("overflowing", "Overflowing")
        self._directory = directory
        self._device = device
        self._runner = LocalRunner(workload=self._workload, directory=directory, device=device)

    def __enter__(self) -> PrecisionTrials:
        self._facts = self._runner.inspect()
        self._runner.make_reference(
            ReferenceRequest(
                workload=self._workload,
                study_directory=str(self._directory),
                choices=complete_choices(BASELINE, self._facts),
                device=self._device,
                protocol=Protocol(num_pointwise=NUM_STEPS, num_curve=0, num_horizon=0, randomness="none"),
                unit_roundoffs=(FP32_ROUNDOFF, FP16_ROUNDOFF, BF16_ROUNDOFF),
            )
        )
        return self

    def __exit__(self, *_: Any) -> None:
        self._runner.close()

    def run(self, candidate: Candidate) -> TrialResult:
        choices = complete_choices(candidate, self._facts)
        spec = TrialSpec(
            trial_id=new_id(),
            workload=self._workload,
            candidate=candidate,
            choices=choices,
            study_directory=str(self._directory),
            device=self._device,
            unit_roundoff=strategy_named("precision").unit_roundoff(choices["precision"]),
            profile=False,
        )
        return self._runner.run([spec], [Purpose.EXPLORE], QUICK, new_id(), lambda progress: None)[0]

    def check_rejected(self, candidate: Candidate) -> None:
        result = self.run(candidate)
        assert not result.ok
        assert result.failure is not None
        assert result.failure.kind is FailureKind.NUMERICS
        assert result.guard is not None
        assert not result.guard.passed
        assert result.guard.skipped_steps >= MAX_REPEATS

    def check_passed(self, candidate: Candidate) -> None:
        result = self.run(candidate)
        assert result.failure is None, result.failure
        assert result.ok
        assert result.guard is not None
        assert result.guard.skipped_steps == 0
        assert result.guard.num_steps == NUM_STEPS > LAST_IN_RANGE

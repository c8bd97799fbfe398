"""A mean over masked tokens, accumulated over micro-batches in bfloat16: weighted by tokens, or rejected."""

from __future__ import annotations

from pathlib import Path

import pytest
from trial_builders import prepare

from steptune.tuner.records import Candidate, FailureKind

TRAININGS = Path(__file__).parents[1] / "support" / "guarded_trainings.py"
ACCUMULATED = Candidate(
    choices={"precision": {"level": "O1", "dtype": "bfloat16"}, "micro_batch": {"num_micro_batches": 2}}
)


@pytest.mark.parametrize(("name", "passes"), [("Masked", True), ("MaskedBySamples", False)])
def test_losses_of_tokens_are_weighted_right_or_rejected(tmp_path: Path, name: str, passes: bool) -> None:
    study = prepare(f"{TRAININGS}:{name}", tmp_path)
    try:
        (result,) = study.run(study.spec(ACCUMULATED, unit_roundoff=2.0**-8, profile=False))
    finally:
        study.runner.close()
    assert result.guard is not None
    assert result.guard.passed is passes
    if not passes:
        assert result.failure is not None
        assert result.failure.kind is FailureKind.NUMERICS
        assert "gradients" in [check.name for check in result.guard.checks if not check.passed]

"""A pipeline in a whole trial: guarded, measured on all ranks, profiled, and shown to have taken effect."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_workloads
from trial_builders import prepare

from steptune.tuner.records import Candidate

pytestmark = pytest.mark.xdist_group("ranks")


def test_a_trial_of_a_pipeline_runs_to_its_end(tmp_path: Path) -> None:
    study = prepare(f"{tiny_workloads.__file__}:Everything", tmp_path, num_ranks=2)
    candidate = Candidate(choices={"parallel_mesh": {"pipeline": 2, "micro_batches": 4}})
    try:
        (result,) = study.run(study.spec(candidate))
    finally:
        study.runner.close()
    assert study.facts.model.chain_refusal == ""
    assert result.failure is None, result.failure
    assert result.guard is not None
    assert result.guard.passed
    assert result.guard.losses == pytest.approx(result.guard.reference_losses, rel=1e-5)
    effect = next(effect for effect in result.effects if effect.strategy == "parallel_mesh")
    assert effect.took, effect.detail
    assert [peak.rank for peak in result.memory] == [0, 1]
    for breakdown in result.breakdowns:
        assert sum(breakdown.categories.values()) == breakdown.step_time_ns
        assert breakdown.categories["pipeline_bubble"] > 0

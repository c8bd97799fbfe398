"""CUDA inside a sandbox."""

import pytest
from isolated import few_resources, isolated_study
from trial_builders import reference


@pytest.mark.parametrize("level", ["limits", "bubblewrap"])
def test_a_trial_on_the_device_runs(level: str) -> None:
    """The probe calls cuInit; a level that cannot is skipped, and says so."""
    roomy = few_resources(num_tasks=10_000, disk_bytes=4 << 30, temporary_bytes=1 << 30)
    with isolated_study(level, reference("regression", "Regression"), resources=roomy, device="cuda") as study:
        [result] = study.run(study.spec(device="cuda", guard=False, profile=False))
    assert result.ok, result.failure
    assert result.memory[0].allocated_bytes

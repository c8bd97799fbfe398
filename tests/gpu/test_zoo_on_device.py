"""Every entry of the zoo on the device: looked at, its modules preloaded into the server, and a guarded trial."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from trial_builders import QUICK
from zoo_references import SMALL

from steptune.tuner.guard.curves import Protocol
from steptune.tuner.records import BASELINE, Purpose, TrialSpec, new_id
from steptune.tuner.strategies.api import FP32_ROUNDOFF, TF32_ROUNDOFF
from steptune.tuner.strategies.combine import complete_choices
from steptune.tuner.trials.reference import ReferenceRequest
from steptune.tuner.trials.runner import LocalRunner
from steptune.tuner.workloads.zoo import ZOO


@pytest.mark.parametrize("entry", ZOO, ids=lambda entry: entry.name)
def test_is_looked_at_and_trained(entry, tmp_path: Path) -> None:
    """The model is initialised on the device where it may be; forked trials use CUDA all the same, and train from the
    state that was saved.
    """
    absent = [name for name in entry.needs if importlib.util.find_spec(name) is None]
    if absent:
        pytest.skip(f"needs {', '.join(absent)}")
    workload = SMALL[entry.name]
    runner = LocalRunner(workload=workload, directory=tmp_path, device="cuda")
    try:
        facts = runner.inspect()
        choices = complete_choices(BASELINE, facts)
        runner.make_reference(
            ReferenceRequest(
                workload=workload,
                study_directory=str(tmp_path),
                choices=choices,
                device="cuda",
                protocol=Protocol(num_pointwise=3, num_curve=3, num_horizon=0, randomness=facts.randomness),
                unit_roundoffs=(FP32_ROUNDOFF, TF32_ROUNDOFF),
            )
        )
        spec = TrialSpec(
            trial_id=new_id(),
            workload=workload,
            candidate=BASELINE,
            choices=choices,
            study_directory=str(tmp_path),
            device="cuda",
            unit_roundoff=TF32_ROUNDOFF,
        )
        (result,) = runner.run([spec], [Purpose.EXPLORE], QUICK, new_id(), lambda progress: None)
        assert result.failure is None, result.failure
        assert result.ok, result.guard
        assert result.memory[0].allocated_bytes
    finally:
        runner.close()

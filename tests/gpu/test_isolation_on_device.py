"""CUDA inside a sandbox."""

import json
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from isolated import few_resources, isolated_study, python_for
from trial_builders import reference

from steptune.service.isolation import SandboxRequest, level_named
from steptune.tuner.trials.connection import server_environment
from steptune.tuner.trials.study_files import StudyFiles

SEEN = """
import json, torch
print(json.dumps([str(torch.cuda.get_device_properties(n).uuid) for n in range(torch.cuda.device_count())]))
"""


@pytest.mark.parametrize("level", ["limits", "bubblewrap"])
def test_a_trial_on_the_device_runs(level: str) -> None:
    """The probe calls cuInit; a level that cannot is skipped, and says so."""
    roomy = few_resources(num_tasks=10_000, disk_bytes=4 << 30, temporary_bytes=1 << 30)
    with isolated_study(level, reference("regression", "Regression"), resources=roomy, device="cuda") as study:
        [result] = study.run(study.spec(device="cuda", guard=False, profile=False))
    assert result.ok, result.failure
    assert result.memory[0].allocated_bytes


@pytest.mark.parametrize("gpus", [(0,), (1,), (0, 1)])
def test_only_the_claimed_gpus_are_in_sight(gpus: tuple[int, ...]) -> None:
    """Another's GPU cannot even be opened; those in sight are counted from 0."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    present = [str(torch.cuda.get_device_properties(number).uuid) for number in range(2)]
    assert seen_in_a_sandbox(gpus) == [present[number] for number in gpus]


def seen_in_a_sandbox(gpus: tuple[int, ...]) -> list[str]:
    level = level_named("bubblewrap")
    python = python_for(level)
    with tempfile.TemporaryDirectory(prefix="st-") as folder:
        Path(folder).chmod(0o755)
        directory = Path(folder) / "study"
        directory.mkdir()
        StudyFiles(directory).make_folders()
        roomy = few_resources(num_tasks=10_000, temporary_bytes=1 << 30)
        request = SandboxRequest(
            study_directory=directory, workload="zoo:synthetic", python=python, resources=roomy, gpus=gpus
        )
        with level.sandbox(request) as sandbox:
            environment = server_environment(sandbox, Path(sandbox.temporary or directory))
            done = subprocess.run(
                [*sandbox.prefix, python, "-c", SEEN],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=120,
            )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)

"""Workers of the service with GPUs, whose trials are in a sandbox."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from marked import none_left
from sites import Site

from steptune.service.isolation import Available, level_named
from steptune.tuner.records import StudyState

WORKLOAD = "zoo:synthetic?batch=64&load_ms=0.1&compute_ms=1&length=4096"


@pytest.fixture
def site() -> Iterator[Site]:
    """In a folder that the sandbox's user may pass through."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    probed = level_named("bubblewrap").probe()
    if not isinstance(probed, Available):
        pytest.skip(probed.reason)
    folder = Path(tempfile.mkdtemp(prefix="st-"))
    folder.chmod(0o755)
    site = Site(folder)
    yield site
    site.close()
    shutil.rmtree(folder)


def checked(site: Site, study_id: str, num_gpus: int) -> list[str]:
    """The GPUs that a completed study had, of all its trials, as its places name them."""
    assert site.await_state(study_id, StudyState.COMPLETED).message == ""
    study = site.store.get_study(study_id)
    assert study.environment is not None
    assert len(study.environment.hardware.devices) == num_gpus
    results = [trial.result for trial in site.store.trials(study_id)]
    assert results
    assert all(result.ok and result.isolation == "bubblewrap" for result in results), results
    assert all(memory.allocated_bytes for result in results for memory in result.memory)
    assert {len(result.memory) for result in results} == {num_gpus}
    return sorted({result.place for result in results})


def test_two_studies_run_side_by_side_each_on_its_own_gpu(site: Site) -> None:
    studies = [site.submit(WORKLOAD, required_device_kind="cuda") for _ in range(2)]
    for number in range(2):
        site.worker("--gpus", str(number), "--cpus", f"{4 * number}-{4 * number + 3}", isolation="bubblewrap")
    (first,), (second,) = (checked(site, study_id, 1) for study_id in studies)
    assert first != second
    for process in site.processes:
        process.terminate()
        assert process.wait(timeout=60) == 0, site.log()
    none_left(site.mark)


def test_a_study_of_two_ranks_has_both_gpus(site: Site) -> None:
    """Its ranks meet on the loopback device, where the sandbox has no network."""
    study_id = site.submit(WORKLOAD, required_device_kind="cuda", num_devices=2)
    worker = site.worker("--once", isolation="bubblewrap")
    checked(site, study_id, 2)
    assert worker.wait(timeout=60) == 0, site.log()
    none_left(site.mark)

"""`steptune submit -- python train.py`: a script that a worker of a service tunes, or is refused in words."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import ROOT, Steptune
from running import Running, written

from steptune.tuner.records import StudyState

SCRIPT = ROOT / "tests" / "frontdoor" / "scripts" / "plain.py"
DEEP_CHECK = """
import os
import helper
assert os.environ["WIDTH"] == "16", "the variable was not sent"
assert "LEFT_HERE" not in os.environ, "a variable was sent that nobody named"
assert open("data/classes.bin").read() == "4", "the data is not there"
"""
QUICK = ("--budget", "90s", "--trials", "2", "--only", "data_loading", "--foreign-load", "100")
pytestmark = pytest.mark.xdist_group("submitted scripts")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("service")
    running = Running(folder, f"sqlite:///{folder}/steptune.db")
    with running.process("serve", "--port", "0", "--no-worker", log="serve.log") as log:
        running.url = written(log, r"Steptune serves (http://\S+)/api/v1")
        running.token = written(log, r"(stp_\S+)")
        yield running


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(DEEP_CHECK + SCRIPT.read_text())
    (folder / "helper.py").write_text("import numpy\n")
    (folder / "data").mkdir()
    (folder / "data" / "classes.bin").write_text("4")
    (folder / "last.pt").write_bytes(b"weights")
    return folder


def submitted(service: Running, project: Path, *arguments: str, status: int = 0, **variables: str):
    own = {"STEPTUNE_URL": service.url, "STEPTUNE_TOKEN": service.token, **variables}
    return Steptune(project)("submit", *arguments, status=status, variables=own)


def test_a_worker_that_isolates_trials_leaves_it_alone(service: Running, project: Path) -> None:
    """And who waits is told why."""
    study_id = submitted(service, project, *QUICK, "--", "python", "train.py").out.strip()
    with service.process("worker", "--once", "--isolation", "limits", log="limits.log"):
        pass
    with service.client() as client:
        found = client.study(study_id)
        assert found.state is StudyState.QUEUED
        assert found.queue.num_claims == 0
        client.cancel(study_id)


def test_a_script_is_tuned_by_a_worker(service: Running, project: Path) -> None:
    """With its sources, the variable that was named, and the data that was."""
    given = (*QUICK, "--env", "WIDTH", "--data", "data", "--", "python", "train.py", "--steps", "4000")
    ended = submitted(service, project, *given, WIDTH="16", LEFT_HERE="1")
    study_id = ended.out.strip()
    assert "not uploaded: last.pt" in ended.err
    with service.process("worker", "--once", "--isolation", "none", log="worker.log"), service.client() as client:
        study = client.wait(study_id, timeout_s=600)
        log = (service.folder / "worker.log").read_text()
        assert study.state is StudyState.COMPLETED, f"{study.message}\n{log}"
        assert study.workload == "-- python train.py --steps 4000"
        assert client.recommendation(study_id).num_ranks == 1
        trials = list(client.trials(study_id))
        assert {trial.candidate.label for trial in trials} >= {"baseline"}
        assert study.facts.script is not None
    assert not (service.folder / "data" / "studies" / study_id / "source").exists()


def test_what_a_worker_cannot_run_fails_in_words(service: Running, project: Path) -> None:
    shutil.copy(SCRIPT, project)
    ranks = ("--ranks", "2", "--device", "cpu")
    refused = {
        ("--data", "/nowhere/at/all", "--", "python", "train.py"): "the worker has no /nowhere/at/all: mount it there",
        (*ranks, "--", "python", "plain.py"): "trains on 1 ranks, but 2 were requested",
        ("--", "python", "absent.py"): "No such file or directory",
    }
    said = {submitted(service, project, *QUICK, *arguments).out.strip(): words for arguments, words in refused.items()}
    with service.process("worker", "--isolation", "none", log="refusing.log"), service.client() as client:
        for study_id, words in said.items():
            study = client.wait(study_id, timeout_s=300)
            assert study.state is StudyState.FAILED
            assert words in study.message


def test_hosts_and_limits_of_memory_are_refused_by_the_interface(service: Running, project: Path) -> None:
    study_id = submitted(service, project, *QUICK, "--", "python", "train.py").out.strip()
    with service.client() as client:
        workload_id = client.study(study_id).workload_id
        client.cancel(study_id)
        for given in (
            {"num_hosts": 2, "num_ranks": 2, "device": "cpu"},
            {"constraints": {"memory_limit_bytes": 1 << 30}},
        ):
            with pytest.raises(Exception, match="for a script"):
                client.submit(workload_id=workload_id, **given)

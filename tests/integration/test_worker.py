"""Workers as processes: what they do with a study, when they are told to stop, and when they are cut off."""

import gzip
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest
from marked import commands, left_in, marked, none_left, wait_until
from sites import ROOT, Site
from sqlalchemy import update

from steptune.service.artifacts import open_artifacts
from steptune.service.connections import writing
from steptune.service.directories import remove_directories
from steptune.service.models import QueueEntryRow
from steptune.service.progress import EVENT, Picture
from steptune.service.settings import Settings
from steptune.service.worker.machine import host_id, parse_numbers
from steptune.service.worker.supervisor import Supervisor
from steptune.tuner.errors import ChoiceError
from steptune.tuner.records import StudyState, TrialState

pytestmark = pytest.mark.xdist_group("worker")

CORES = sorted(os.sched_getaffinity(0))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.close()


def ended(process: subprocess.Popen[bytes]) -> int:
    return process.wait(timeout=600)


class TestRunning:
    def test_a_study_is_run_to_its_answer_and_everything_of_it_is_kept(self, site: Site) -> None:
        study_id = site.submit(trials=5, finalists=1)
        assert ended(site.worker("--once", "--name", "ada")) == 0, site.log()
        entry = site.entry(study_id)
        assert entry.state is StudyState.COMPLETED, site.log()
        assert (entry.worker_id, entry.lease_until, entry.num_claims) == (None, None, 1)
        assert entry.device_seconds > 0
        assert site.store.recommendation(study_id) is not None
        trials = site.store.trials(study_id)
        assert {trial.result.place for trial in trials} == {entry.place}
        assert entry.place.startswith(host_id())
        kinds = {(artifact.trial_id, artifact.kind) for artifact in site.store.artifacts(study_id)}
        assert {trial_id for trial_id, kind in kinds if kind == "log"} == {trial.trial_id for trial in trials}
        assert {"trace", "timeline", "analysis", "lanes"} <= {kind for _, kind in kinds}
        self.check_events(site, study_id)
        none_left(site.mark)
        assert left_in(site.temporary) == []

    @staticmethod
    def check_events(site: Site, study_id: str) -> None:
        events = site.store.events(study_id)
        states = [event.data["state"] for event in events if event.kind == "state"]
        assert states == ["queued", "running", "completed"]
        picture = Picture()
        views = [picture.after(event.data) for event in events if event.kind == EVENT]
        assert [view.num_trials for view in views] == sorted(view.num_trials for view in views)
        last = views[-1]
        assert last.stage == "done"
        assert last.baseline_units_per_s is not None
        assert last.decisions[-1] in site.store.decisions(study_id)
        assert last.findings

    def test_an_uploaded_file_is_run_and_named_as_its_user_named_it(self, site: Site) -> None:
        """The folder in which a worker unpacked it is nobody's business. What it prints is kept."""
        source = (ROOT / "tests/workloads/regression.py").read_bytes() + b"\nprint('hello from user code')\n"
        study_id = submit_upload(site, source, "regression.py:Regression")
        assert ended(site.worker("--once")) == 0
        entry = site.entry(study_id)
        assert entry.state is StudyState.COMPLETED, entry.message
        study = site.store.get_study(study_id)
        recommendation = site.store.recommendation(study_id)
        assert study.workload == study.facts.reference == recommendation.workload == "regression.py:Regression"
        assert not (site.folder / "data/studies" / study_id / "source").exists()
        logs = [artifact for artifact in site.store.artifacts(study_id) if artifact.kind == "log"]
        with open_artifacts(site.settings).open(logs[0].digest) as packed:
            assert b"hello from user code" in gzip.decompress(packed.read())

    def test_a_broken_workload_fails_with_its_message_and_is_not_tried_again(self, site: Site) -> None:
        study_id = submit_upload(site, b"class Broken:\n    pass\n", "broken.py:Broken")
        assert ended(site.worker("--once")) == 0
        entry = site.entry(study_id)
        assert (entry.state, entry.num_claims) == (StudyState.FAILED, 1)
        assert "Broken" in entry.message
        assert remove_directories(site.store.engine, site.folder / "data", grace_s=-1) == 1
        assert list((site.folder / "data" / "studies").iterdir()) == []


def submit_upload(site: Site, content: bytes, entry: str) -> str:
    from steptune.service.models import UserRow, WorkloadSourceRow

    kept = open_artifacts(site.settings).put([content])
    now = datetime.now(UTC)
    with writing(site.store.engine) as session:
        session.add(UserRow(user_id="ada", name="ada", scopes="submit", created_at=now))
        session.flush()
        source = {"source_id": "source", "owner_id": "ada", "kind": "file", "name": "it", "entry": entry}
        session.add(WorkloadSourceRow(**source, digest=kept.digest, size_bytes=kept.size_bytes, created_at=now))
    return site.submit(entry, digest=kept.digest, source_id="source", owner_id="ada")


class TestStopping:
    @pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
    def test_told_to_stop_it_ends_the_trials_that_run_and_another_goes_on_elsewhere(self, site: Site) -> None:
        """On another core the baseline is measured once more."""
        first, second, *_ = CORES
        study_id = site.submit()
        process = site.worker("--cpus", str(first))
        site.await_trials(study_id, 1)
        process.send_signal(signal.SIGTERM)
        assert ended(process) == 0, site.log()
        entry = site.entry(study_id)
        assert (entry.state, entry.lease_until) == (StudyState.QUEUED, None)
        kept = site.store.trials(study_id)
        assert {trial.state for trial in kept} == {TrialState.COMPLETED}, "what ran could end"
        none_left(site.mark)
        assert ended(site.worker("--cpus", str(second), "--once")) == 0
        assert site.entry(study_id).state is StudyState.COMPLETED, site.log()
        trials = site.store.trials(study_id)
        assert trials[: len(kept)] == kept
        places = list(dict.fromkeys(trial.result.place for trial in trials))
        assert places == [f"{host_id()} core {first}", f"{host_id()} core {second}"]
        there = [trial.purpose.value for trial in trials if trial.result.place == places[1]]
        assert there[:2] == ["moved", "moved"]

    def test_a_second_signal_gives_the_study_back_at_once(self, site: Site) -> None:
        study_id = site.submit()
        process = site.worker()
        site.await_trials(study_id, 1)
        process.send_signal(signal.SIGINT)
        assert ended(process) == 0, site.log()
        assert site.entry(study_id).state is StudyState.QUEUED
        assert site.entry(study_id).num_lost == 0
        none_left(site.mark)

    def test_a_cancelled_study_recommends_the_best_so_far(self, site: Site) -> None:
        study_id = site.submit(trials=200)
        site.worker()
        site.await_trials(study_id, 4)
        site.queue.cancel(study_id)
        site.await_state(study_id, StudyState.CANCELLED)
        assert site.store.recommendation(study_id).certificate.ended == "interrupted"

    def test_a_paused_study_stops_and_goes_on_when_resumed(self, site: Site) -> None:
        study_id = site.submit(trials=200)
        site.worker()
        site.await_trials(study_id, 1)
        site.queue.pause(study_id)
        site.await_state(study_id, StudyState.PAUSED)
        assert site.store.recommendation(study_id) is None
        num_complete = site.num_complete(study_id)
        site.queue.resume(study_id)
        site.await_trials(study_id, num_complete + 1)
        assert site.entry(study_id).num_claims == 2


class TestDying:
    def test_a_killed_worker_leaves_no_process_and_another_goes_on(self, site: Site) -> None:
        study_id = site.submit()
        first = site.worker()
        site.await_trials(study_id, 1)
        kept = [trial for trial in site.store.trials(study_id) if trial.state is TrialState.COMPLETED]
        first.kill()
        first.wait()
        none_left(site.mark)
        end_lease(site, study_id)
        assert ended(site.worker("--once")) == 0
        entry = site.entry(study_id)
        assert (entry.state, entry.num_claims) == (StudyState.COMPLETED, 2)
        assert all(trial in site.store.trials(study_id) for trial in kept)

    def test_a_killed_trial_server_costs_the_study_nothing(self, site: Site) -> None:
        study_id = site.submit()
        site.worker("--once")
        site.await_trials(study_id, 1)
        servers = [pid for pid, command in commands(site.mark).items() if "steptune.tuner.trials.server" in command]
        min(map(psutil.Process, servers), key=lambda process: process.create_time()).kill()
        entry = site.await_state(study_id, StudyState.COMPLETED)
        assert entry.num_claims == 1, "another server goes on"
        assert all(trial.result.failure is None for trial in site.store.trials(study_id))

    def test_a_worker_whose_lease_was_taken_kills_its_trials_and_writes_nothing(self, site: Site) -> None:
        study_id = site.submit(trials=200)
        site.worker()
        site.await_trials(study_id, 2)
        with writing(site.store.engine) as session:
            taken = update(QueueEntryRow).where(QueueEntryRow.study_id == study_id)
            session.execute(taken.values(fence=QueueEntryRow.fence + 1, worker_id=None, version=99))
        wait_until(lambda: "no longer holds" in site.log(), "the worker notices", deadline_s=240)
        wait_until(lambda: len(marked(site.mark)) == 1, "nothing but the worker runs")
        before = (site.entry(study_id), site.store.trials(study_id), site.store.events(study_id))
        assert before[0].version == 99
        time.sleep(1.0)  # nothing can be waited for where nothing may happen
        assert (site.entry(study_id), site.store.trials(study_id), site.store.events(study_id)) == before

    def test_a_worker_that_sleeps_through_its_lease_has_lost_it(self, site: Site) -> None:
        """A suspended machine does so: what it measures when it wakes up is another's."""
        study_id = site.submit(trials=200)
        process = site.worker()
        site.await_trials(study_id, 1)
        end_lease(site, study_id, lambda: process.send_signal(signal.SIGSTOP))
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: "no longer holds" in site.log() or "could not be reached" in site.log(), "it notices")


def end_lease(site: Site, study_id: str, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Ends the lease, as time would; a worker that is alive would extend it. It cannot write meanwhile: a statement has
    begun the transaction.
    """
    with writing(site.store.engine) as session:
        entry = session.get_one(QueueEntryRow, study_id)
        meanwhile()
        entry.lease_until = datetime.now(UTC) - timedelta(seconds=1)


class TestPlaces:
    def test_cores_that_are_not_there_are_refused(self, site: Site) -> None:
        assert ended(site.worker("--cpus", "4096")) == 2
        assert "got [4096]" in " ".join(site.log().split())


@pytest.mark.parametrize(("text", "numbers"), [("0", (0,)), ("0-3,6", (0, 1, 2, 3, 6)), ("2, 1", (1, 2))])
def test_numbers_of_cores_are_lists_and_ranges(text, numbers):
    assert parse_numbers(text) == numbers


@pytest.mark.parametrize("text", ["", "a", "3-1", "-1", "1-", "0,,1"])
def test_what_is_no_list_of_numbers_is_refused(text):
    with pytest.raises(ChoiceError, match="not a list of numbers"):
        parse_numbers(text)


class TestSupervisor:
    def test_a_worker_that_dies_is_started_again_and_ends_with_its_supervisor(self, site: Site, monkeypatch) -> None:
        for name, value in site.environment().items():
            monkeypatch.setenv(name, value)
        supervisor = Supervisor(site.settings, ["--isolation", "none"])
        supervisor.start()
        wait_until(lambda: site.queue.workers(), "a worker arrives", deadline_s=240)
        first = supervisor.pid
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: supervisor.pid not in (first, None), "another is started", deadline_s=240)
        wait_until(lambda: len(site.queue.workers()) == 2, "it arrives", deadline_s=240)
        supervisor.stop(60)
        none_left(site.mark)
        assert site.queue.workers()[0].state == "gone"

    def test_the_servers_own_secrets_are_not_the_workers(self, monkeypatch) -> None:
        secrets = {
            "STEPTUNE_METRICS_TOKEN": "metrics-secret",
            "steptune_oidc_client_secret": "oidc-secret",
            "STEPTUNE_PROXY_SECRET": "5a" * 32,
            "STEPTUNE_PROXY_USER_HEADER": "X-User",
        }
        for name, value in secrets.items():
            monkeypatch.setenv(name, value)
        supervisor = Supervisor(Settings(database_url="sqlite:///mine.db"))
        assert supervisor._environment["STEPTUNE_DATABASE_URL"] == "sqlite:///mine.db"
        assert not set(secrets.values()) & set(supervisor._environment.values())
        for name in list(secrets):
            monkeypatch.delenv(name)
        for name, value in supervisor._environment.items():
            monkeypatch.setenv(name, value)
        assert Settings().database_url == "sqlite:///mine.db"  # what is left contradicts nothing

    def test_it_ends_when_its_parent_is_killed(self, site: Site) -> None:
        script = (
            "import time; from steptune.service.settings import Settings; "
            "from steptune.service.worker.supervisor import Supervisor; "
            "Supervisor(Settings(_env_file=None), ['--isolation', 'none']).start(); time.sleep(600)"
        )
        parent = subprocess.Popen([sys.executable, "-c", script], env=site.environment(), cwd=site.folder)
        site.processes.append(parent)
        wait_until(lambda: site.queue.workers(), "a worker arrives", deadline_s=240)
        parent.kill()
        parent.wait()
        none_left(site.mark)

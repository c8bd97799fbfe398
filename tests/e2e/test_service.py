"""The whole service as a team runs it: PostgreSQL, a server, a worker that is another process, a client."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import httpx
import msgspec
import pytest
from command import WORKLOADS
from marked import wait_until
from running import START_S, Running, written

from steptune.service.client import AccessRefusedError, Client, InvalidRequestError, NotFoundError
from steptune.service.connections import create_engine_for
from steptune.service.queue import StudyQueue
from steptune.tuner.records import Recommendation, StudyState

SUBMITTED = "zoo:synthetic?load_ms=20&compute_ms=2&batch=4"
LIMITS = {"budget_s": 240.0, "max_trials": 4, "only": ["data_loading"], "foreign_cpu_share": 100.0}
"""Few trials end it, not the clock: the machine may be busy."""

pytestmark = pytest.mark.xdist_group("service")


@pytest.fixture(scope="module")
def service(postgres_server, tmp_path_factory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("service")
    running = Running(folder, postgres_server.create(folder.name.replace("-", "_")))
    message = running("serve", "--port", "0", status=2).error
    assert "run `steptune db upgrade`" in message
    running("db", "upgrade")
    with running.process("serve", "--port", "0", "--no-worker", log="serve.log") as log:
        running.url = written(log, r"Steptune serves (http://\S+)/api/v1")
        assert written(log, r"(stp_\S+)")
        running("user", "create", "ada", "--scopes", "read submit")
        running.token = running("token", "create", "--user", "ada", "--json").json["token"]
        with running.process("worker", "--name", "w1", log="worker.log"):
            yield running


@pytest.fixture(scope="module")
def study_id(service) -> str:
    """A study that was submitted with the client and waited for."""
    with service.client() as client:
        submitted = client.submit(SUBMITTED, title="synthetic", **LIMITS)
        ended = client.wait(submitted.study_id, timeout_s=800)
        assert ended.state is StudyState.COMPLETED, f"{ended.message}\n{(service.folder / 'worker.log').read_text()}"
        return submitted.study_id


@pytest.fixture
def client(service) -> Iterator[Client]:
    with service.client() as client:
        yield client


def test_the_server_is_ready_and_says_who_asks(service, client):
    assert httpx.get(f"{service.url}/readyz").json() == {"status": "ready"}
    assert client.me().name == "ada"


def test_events_tell_the_story_from_queued_to_completed(client, study_id):
    """Once each and in order; whoever comes back with a number gets the rest, and nothing twice."""
    events = list(client.events(study_id))
    numbers = [event.sequence for event in events]
    assert numbers == sorted(set(numbers))
    states = [event.data["state"] for event in events if event.kind == "state"]
    assert states[0] == "queued"
    assert states[-1] == "completed"
    assert "running" in states
    assert {"progress", "trials_ended", "recommended"} <= {event.kind for event in events}
    middle = numbers[len(numbers) // 2]
    assert [event.sequence for event in client.events(study_id, after=middle)] == [n for n in numbers if n > middle]


def test_the_breakdown_of_a_trial_sums_to_its_steps(client, study_id):
    trials = list(client.trials(study_id))
    assert [trial.sequence for trial in trials] == sorted(trial.sequence for trial in trials)
    broken_down = [breakdown for trial in trials if (breakdown := client.breakdown(trial.trial_id)).devices]
    assert broken_down
    for breakdown in broken_down:
        for device in breakdown.devices:
            assert sum(category.ns for category in device.categories) == device.step_time_ns
    assert client.trial(trials[0].trial_id).attempts[0].worker_id
    assert next(client.windows(trials[0].trial_id)).num_steps > 0


def test_a_kept_trace_can_be_downloaded_and_analysed(service, client, study_id, tmp_path):
    """The analyser reads what the worker kept and the server gives."""
    kept = {artifact.kind: artifact for artifact in client.artifacts(study_id)}
    assert set(kept) == {"analysis", "lanes", "timeline", "trace", "log"}
    traced = kept["trace"]
    path = client.download(traced.artifact_id, tmp_path / "trace.json.gz")
    assert service.steptune("analyze", path, "--json").json


@pytest.mark.parametrize(
    ("name", "file", "begins"), [("csv", "trials.csv", b"trial_id,"), ("optuna", "optuna_study.log", b"{")]
)
def test_a_whole_study_is_exported_from_afar(service, client, study_id, tmp_path, name, file, begins):
    service.remote("export", study_id, "--format", name, "--output", str(tmp_path))
    assert (tmp_path / file).read_bytes() == client.study_file(study_id, name)
    assert (tmp_path / file).read_bytes().startswith(begins)


def test_the_exported_recommendation_can_be_applied(service, client, study_id, tmp_path):
    """The command line writes from afar the file that `steptune.apply` reads in a plain script."""
    recommendation = client.recommendation(study_id)
    assert isinstance(recommendation, Recommendation)
    service.remote("export", study_id, "--output", str(tmp_path))
    exported = json.loads((tmp_path / "steptune.json").read_text())
    assert msgspec.to_builtins(recommendation.candidate)["choices"] == exported["candidate"]["choices"]
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, steptune\n"
        "from steptune.tuner.workloads.zoo.synthetic import Synthetic\n"
        "job = steptune.apply(sys.argv[1], Synthetic(load_ms=20, compute_ms=2, batch=4))\n"
        "loss = job.step(next(iter(job.loader)))\n"
        "print(job.loader.num_workers, float(loss) > 0)\n"
    )
    ended = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "steptune.json")],
        env=service.steptune.environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=800,
    )
    num_workers = recommendation.choices["data_loading"]["num_workers"]
    assert ended.stdout.split() == [str(num_workers), "True"]


def test_a_file_is_sent_and_tuned_from_the_command_line(service, client):
    """Progress is one line for each thing that happened; the answer ends it."""
    limits = ("--budget", "240s", "--trials", "2", "--only", "data_loading", "--foreign-load", "100")
    ended = service.remote("submit", f"{WORKLOADS / 'flawed.py'}:Fine", *limits, "--watch")
    assert "sent flawed.py" in ended.err
    states = [line for line in ended.err.splitlines() if line in ("queued", "running", "completed")]
    assert states == ["queued", "running", "completed"]
    [study] = [line.split()[1] for line in ended.err.splitlines() if line.startswith("study ")]
    assert study in ended.out
    assert f"page {service.url}/studies/{study}" in ended.err
    found = client.study(study)
    assert (found.state, found.workload) == (StudyState.COMPLETED, "flawed.py:Fine")
    assert found.num_trials["completed"] >= 1
    listed = service.remote("studies", "--json").json
    assert listed[0]["study_id"] == study
    assert service.token not in ended.out + ended.err


def test_a_study_that_nobody_can_run_waits_says_why_and_is_cancelled(service, client):
    """Its hardware is absent; the worker, once it is there, goes on with others."""
    study = client.submit("zoo:synthetic", hardware="a machine that is not here")
    absent = "a machine that is not here"
    wait_until(lambda: absent in client.study(study.study_id).queue.waits_for, "it says what it waits for")
    assert service.remote("pause", study.study_id, "--json").json["state"] == "paused"
    assert service.remote("continue", study.study_id, "--json").json["state"] == "queued"
    assert service.remote("cancel", study.study_id, "--json").json["state"] == "cancelled"
    assert [event.data["state"] for event in client.events(study.study_id)][-1] == "cancelled"
    client.delete(study.study_id)
    with pytest.raises(NotFoundError, match="there is no study"):
        client.study(study.study_id)


REFUSALS: dict[str, tuple[Callable[[Client], object], type[Exception], str]] = {
    "an unknown strategy": (lambda c: c.submit("zoo:synthetic", only=["magic"]), InvalidRequestError, "magic"),
    "an unknown zoo entry": (lambda c: c.submit("zoo:nothing"), InvalidRequestError, "nothing"),
    "a file on the service's machine": (lambda c: c.submit("/etc/passwd.py:A"), InvalidRequestError, "upload it"),
    "a study that is not there": (lambda c: c.study("0" * 26), NotFoundError, "there is no study"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_reach_the_caller_with_the_way_out(client, case):
    ask, kind, message = REFUSALS[case]
    with pytest.raises(kind, match=message) as refused:
        ask(client)
    assert refused.value.problem.request_id


def test_a_wrong_token_is_refused_and_not_shown(service, tmp_path):
    with service.client("stp_wrong") as client, pytest.raises(AccessRefusedError):
        client.me()
    path = tmp_path / "token"
    path.write_text("stp_wrong\n")
    message = service.steptune.refused("studies", "--url", service.url, "--token-file", str(path))
    assert "stp_wrong" not in message


def test_a_backup_of_the_running_service_has_the_study(service, study_id, postgres_server, tmp_path):
    """Made while server and worker have the database open."""
    path = tmp_path / "backup.tar"
    assert service("db", "backup", str(path), "--json").json["num_artifacts"] > 0
    restored = postgres_server.create("restored")
    variables = {"STEPTUNE_DATABASE_URL": restored, "STEPTUNE_DATA_DIRECTORY": str(tmp_path / "data")}
    service.steptune("db", "restore", str(path), variables=variables)
    assert study_id in service.steptune("list", "--json", variables=variables).out


def test_one_command_is_a_working_service(tmp_path):
    """The worker beside the server says goodbye when the server is told to stop."""
    alone = Running(tmp_path, f"sqlite:///{tmp_path}/steptune.db")
    with alone.process("serve", "--port", "0", log="serve.log") as log:
        alone.url = written(log, r"Steptune serves (http://\S+)/api/v1")
        with alone.client(written(log, r"(stp_\S+)")) as client:
            deadline = time.monotonic() + START_S
            while not any(worker.state == "idle" for worker in client.workers()):
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
    engine = create_engine_for(alone.variables["STEPTUNE_DATABASE_URL"])
    assert [worker.state for worker in StudyQueue(engine).workers()] == ["gone"]
    engine.dispose()

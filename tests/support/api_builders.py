"""The service for tests: an application on a migrated database, users with tokens, and a study with everything."""

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import msgspec
from builders import (
    failed_result,
    sample_decision,
    sample_recommendation,
    sample_result,
    sample_study,
    sample_trial,
)
from msgspec.structs import replace
from sqlalchemy import update
from starlette.testclient import TestClient

from steptune.service.api.context import Services
from steptune.service.app import create_app
from steptune.service.connections import writing
from steptune.service.database import migrate
from steptune.service.models import QueueEntryRow, StudyRow
from steptune.service.settings import Settings
from steptune.service.settings.scopes import Scope
from steptune.service.store import SqlStudyStore
from steptune.tuner.records import StudyState, Trial, TrialState, new_id
from steptune.tuner.trace_records import Lane
from steptune.tuner.trials.analysis_files import lanes_text

API = "/api/v1"
TIMELINE = [{"rank": 0, "device": "cuda:0", "step_boundaries_ns": [0, 9], "end_ns": [9], "time_ns": [{"compute": 9}]}]
TRACE = b'{"traceEvents": []}'
LOG = b"epoch 1\nepoch 2\n"
LANE = Lane(
    device="cuda:0",
    kind="stream",
    label="stream 7",
    names=("gemm", "relu"),
    categories=("compute_matmul", "compute_elementwise"),
    start_ns=(0, 60),
    length_ns=(40, 40),
    name=(0, 1),
    category=(0, 1),
    count=(1, 1),
    busy_ns=(40, 40),
)
CONTENT = {"trace": TRACE, "timeline": msgspec.json.encode(TIMELINE), "lanes": lanes_text([LANE]), "log": LOG}


class Served:
    """An application that a test talks to."""

    def __init__(self, app, http: TestClient) -> None:
        self.app = app
        self.http = http
        self.services: Services = app.state.services
        self._tokens: dict[str, tuple[str, str]] = {}

    def token(self, name: str = "ada", scopes: str = "read submit", *, days: float | None = 30) -> str:
        """A token of a user, who is made on first use."""
        access = self.app.state.access
        wanted = [Scope(scope) for scope in scopes.split()]
        if name not in self._tokens:
            user = access.users.create(name, wanted)
            _, bearer = access.tokens.issue(user.user_id, name="", scopes=wanted, days=days)
            self._tokens[name] = user.user_id, bearer.text
        return self._tokens[name][1]

    def user_id(self, name: str) -> str:
        return self._tokens[name][0]

    def __call__(self, method: str, path: str, *, user: str = "ada", scopes: str = "read submit", **arguments):
        """A request with a token of this user."""
        headers = {"Authorization": f"Bearer {self.token(user, scopes)}", **arguments.pop("headers", {})}
        return self.http.request(method, f"{API}{path}", headers=headers, **arguments)

    def submit(self, *, user: str = "ada", headers: dict[str, str] | None = None, **body):
        answer = self("POST", "/studies", user=user, json={"workload": "zoo:synthetic", **body}, headers=headers or {})
        assert answer.status_code == 201, answer.text
        return answer.json()


@contextmanager
def served(url: str, folder, **settings) -> Iterator[Served]:
    settings = {"requests_per_minute": 1_000_000, "failed_logins_per_minute": 1_000_000, **settings}
    app = create_app(Settings(_env_file=None, database_url=url, data_directory=folder / "data", **settings))
    with TestClient(app, base_url="http://service", client=("127.0.0.1", 50000), follow_redirects=False) as http:
        yield Served(app, http)


def sqlite_url(folder) -> str:
    url = f"sqlite:///{folder}/steptune.db"
    migrate(url)
    return url


def fill(service: Served, *, user: str = "ada", state: StudyState = StudyState.COMPLETED) -> tuple[str, list[str]]:
    """A study of a user with three trials (complete, failed, running), and all that can be asked of it.

    Returns:
        Its id, and those of its trials.
    """
    service.token(user)
    engine = service.services.engine
    store = SqlStudyStore(engine)
    study = sample_study(study_id=new_id(), state=state)
    store.create_study(study)
    with writing(engine) as session:
        session.execute(
            update(StudyRow).where(StudyRow.study_id == study.study_id).values(owner_id=service.user_id(user))
        )
        session.add(QueueEntryRow(study_id=study.study_id, queued_at=datetime.now(UTC)))
    trials = [_trial(study.study_id, sequence) for sequence in (1, 2, 3)]
    store.begin_trials(trials)
    complete = replace(sample_result(), trial_id=trials[0].trial_id)
    store.complete_trials([complete, replace(failed_result(), trial_id=trials[1].trial_id)])
    store.replace_decisions(study.study_id, [sample_decision(1), sample_decision(2)])
    store.save_recommendation(replace(sample_recommendation(), study_id=study.study_id))
    for kind in ("queued", "started", "completed"):
        store.add_event(study.study_id, "state", {"state": kind})
    for kind, content in CONTENT.items():
        packed = content if kind == "log" else gzip.compress(content)
        kept = service.services.artifacts.put([packed])
        store.add_artifact(study.study_id, trials[0].trial_id, kind, kept.digest, kept.size_bytes)
    return study.study_id, [trial.trial_id for trial in trials]


def _trial(study_id: str, sequence: int) -> Trial:
    return replace(
        sample_trial(), study_id=study_id, trial_id=new_id(), sequence=sequence, state=TrialState.RUNNING, result=None
    )

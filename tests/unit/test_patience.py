"""A store whose database ends in a commit: nobody knows then whether it took place."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from builders import sample_study, sample_trial

from steptune.service.connections import create_engine_for
from steptune.service.fencing import Lease
from steptune.service.store import SqlStudyStore
from steptune.service.worker import keeper as keepers
from steptune.service.worker.clock import now_s
from steptune.service.worker.keeper import LeaseKeeper
from steptune.service.worker.patience import patient
from steptune.tuner.errors import StoreUnavailableError
from steptune.tuner.protocols import StudyStore

LEASE = Lease(study_id="study", worker_id="worker", fence=1)
TRIAL = sample_trial(study_id="study")
WRITES: dict[str, Callable[[StudyStore], Any]] = {
    "add_event": lambda store: store.add_event("study", "progress", {"elapsed_s": 0.1, "findings": ({"a": 1},)}),
    "add_artifact": lambda store: store.add_artifact("study", None, "log", "ab" * 32, 10),
    "begin_trials": lambda store: store.begin_trials([TRIAL]),
}


@pytest.fixture
def store(sqlite_url: str) -> Iterator[SqlStudyStore]:
    store = SqlStudyStore(create_engine_for(sqlite_url))
    store.create_study(sample_study(study_id="study"))
    yield store
    store.close()


def cut_off(store: SqlStudyStore, method: str, *, committed: bool) -> None:
    """The first answer to a method never comes."""
    real = getattr(store, method)
    calls: list[int] = []

    def cut(*arguments: Any, **named: Any) -> None:
        calls.append(len(calls))
        if len(calls) > 1 or committed:
            real(*arguments, **named)
        if len(calls) == 1:
            raise StoreUnavailableError("the server closed the connection")

    setattr(store, method, cut)


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("method", WRITES)
def test_what_was_cut_off_is_written_once(store: SqlStudyStore, monkeypatch, method: str, committed: bool) -> None:
    monkeypatch.setattr(keepers, "RETRY_S", 0.0)
    keeper = LeaseKeeper(None, LEASE, lease_s=60, heartbeat_s=10, claimed_s=now_s(), kill=lambda: None)
    cut_off(store, method, committed=committed)
    WRITES[method](patient(store, keeper, store.get_study("study")))
    found = (store.events("study"), store.artifacts("study"), store.trials("study"))
    assert [len(records) for records in found] == [method == name for name in WRITES]


def test_the_same_event_may_happen_twice(store: SqlStudyStore) -> None:
    keeper = LeaseKeeper(None, LEASE, lease_s=60, heartbeat_s=10, claimed_s=now_s(), kill=lambda: None)
    asked = patient(store, keeper, store.get_study("study"))
    for _ in range(2):
        asked.add_event("study", "progress", {})
    assert len(store.events("study")) == 2

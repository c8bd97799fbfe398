"""Store that retries while its database is unavailable. A restart of the database server loses nothing while the
study's lease lasts.

Each method of a store is one transaction. If the connection breaks in a commit, its outcome is unknown; so the
transaction is repeated, and a row that already exists with exactly the same content was written the first time.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

from msgspec.structs import replace

from steptune.service.store import SqlStudyStore
from steptune.service.worker.keeper import LeaseKeeper
from steptune.tuner.errors import StoreError, StoreUnavailableError
from steptune.tuner.protocols import StudyStore
from steptune.tuner.records import Recommendation, Study, Trial, TrialResult
from steptune.tuner.store_rules import encode


def patient(store: SqlStudyStore, keeper: LeaseKeeper, study: Study) -> StudyStore:
    """Return the store of one study, which retries until the database answers or the lease is over.

    Its callers refer to the workload by its path on this machine; it stores the user's reference.
    """
    return cast(StudyStore, _PatientStore(store, keeper, study))


class _PatientStore:
    def __init__(self, store: SqlStudyStore, keeper: LeaseKeeper, study: Study) -> None:
        self._store = store
        self._keeper = keeper
        self._study_id = study.study_id
        self._workload = study.workload

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)

        @functools.wraps(method)
        def ask(*arguments: Any, **named: Any) -> Any:
            return self._keeper.persist(lambda: method(*arguments, **named))

        return ask

    def update_study(self, study: Study) -> None:
        facts = None if study.facts is None else replace(study.facts, reference=self._workload)
        self._keeper.persist(lambda: self._store.update_study(replace(study, facts=facts)))

    def save_recommendation(self, recommendation: Recommendation, **changes: Any) -> None:
        named = replace(recommendation, workload=self._workload)
        self._keeper.persist(lambda: self._store.save_recommendation(named, **changes))

    def begin_trials(self, trials: Sequence[Trial]) -> None:
        self._once(lambda: self._store.begin_trials(trials), lambda stored: all(trial in stored for trial in trials))

    def complete_trials(self, results: Sequence[TrialResult]) -> None:
        wanted = {encode(result) for result in results}
        self._once(
            lambda: self._store.complete_trials(results),
            lambda stored: wanted <= {encode(trial.result) for trial in stored if trial.result is not None},
        )

    def add_event(self, study_id: str, kind: str, data: dict[str, Any]) -> None:
        attempts = itertools.count()
        self._keeper.persist(lambda: self._store.add_event(study_id, kind, data, again=next(attempts) > 0))

    def _once(self, write: Callable[[], None], is_written: Callable[[list[Trial]], bool]) -> None:
        interrupted = False

        def attempt() -> None:
            nonlocal interrupted
            try:
                write()
            except StoreUnavailableError:
                interrupted = True
                raise
            except StoreError:
                if not interrupted or not is_written(self._store.trials(self._study_id)):
                    raise

        self._keeper.persist(attempt)

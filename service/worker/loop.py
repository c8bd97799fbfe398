"""A worker: claims a study, runs it under its lease, gives it back, and again."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from contextlib import suppress
from typing import Any

from msgspec.structs import replace
from sqlalchemy import Engine

from service.artifacts import open_artifacts
from service.housekeeping import keep_house
from service.isolation import Level
from service.places import CUDA, VISIBLE_DEVICES
from service.progress import EVENT, Publisher
from service.queue import Claim, StudyQueue, WorkerOffer, open_queue
from service.running import isolated_runner
from service.settings import Settings
from service.store import SqlStudyStore
from service.studies import MIN_TASK_DEADLINE_S, keep_profiles, remove_working_files
from service.worker.keeper import LeaseKeeper
from service.worker.patience import patient
from service.worker.sources import fetch_source
from tuner.errors import LeaseLost, RunnerError, SteptuneError, StorageFull, StoreError, StoreUnavailable
from tuner.protocols import StudyStore
from tuner.records import Study, StudyState
from tuner.search.driver import StudyDriver, StudyInterrupt, StudyView
from tuner.trials.processes import child_pids, kill_tree
from tuner.trials.runner import LocalRunner

logger = logging.getLogger("steptune.worker")

HOUSE_S = 3600.0
"""Between two times that a worker removes what is expired."""
LOOK_S = 0.2
"""How often a worker that waits looks whether it was told to stop."""


class Worker:
    """Runs studies one after the other until it is told to stop. The process is its own: all its children are trials.

    Args:
        engine: Of the service's database, its schema checked.
        offer: What this worker has.
        level: How trials are isolated.
        once: Stop when there is nothing to claim.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        offer: WorkerOffer,
        level: Level,
        *,
        python: str = sys.executable,
        once: bool = False,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._offer = offer
        self._level = level
        self._python = python
        self._once = once
        self._queue: StudyQueue = open_queue(engine, settings)
        self._artifacts = open_artifacts(settings)
        self._keeper: LeaseKeeper | None = None
        self._runner: LocalRunner | None = None
        self._stop_at_s: float | None = None
        self._house_at_s = 0.0
        self._beat_at_s = 0.0

    def stop(self, *, within_s: float) -> None:
        """No further study; the trials that run may end within this time, then the study is given back.

        Called from signal handlers: sets values and takes no lock.
        """
        self._stop_at_s = min(time.monotonic() + within_s, self._stop_at_s or float("inf"))
        if self._keeper is not None:
            self._keeper.drain(self._stop_at_s)

    def run(self) -> None:
        """Until it is told to stop."""
        self._register()
        logger.info("worker %s: %s", self._offer.worker_id, self._offer.profile.label)
        while self._stop_at_s is None:
            claimed_s = time.monotonic()
            claim = self._next()
            if claim is not None:
                self._work(claim, claimed_s)
            elif self._once:
                break
            else:
                self._wait(self._settings.poll_s)
        try:
            self._queue.leave(self._offer.worker_id)
        except StoreError as error:
            logger.warning("could not say goodbye: %s", error)

    # --- between studies -------------------------------------------------------------------------

    def _next(self) -> Claim | None:
        self._keep_house()
        try:
            if time.monotonic() >= self._beat_at_s:
                if not self._queue.beat(self._offer.worker_id, "idle"):
                    self._queue.register(self._offer)
                self._beat_at_s = time.monotonic() + self._settings.heartbeat_s
            return self._queue.claim(self._offer)
        except StoreUnavailable as error:
            logger.warning("waiting for the database: %s", error)
            return None

    def _keep_house(self) -> None:
        """Now and then; whatever comes of it, studies go first the next time."""
        if time.monotonic() < self._house_at_s:
            return
        self._house_at_s = time.monotonic() + HOUSE_S
        try:
            report = keep_house(self._engine, self._artifacts, self._settings)
        except StoreError as error:
            logger.warning("could not remove what is expired: %s", error)
        else:
            logger.info("removed what is expired: %s", report)

    def _register(self) -> None:
        while self._stop_at_s is None:
            try:
                self._queue.register(self._offer)
                break
            except StoreUnavailable as error:
                logger.warning("waiting for the database: %s", error)
                self._wait(self._settings.poll_s)

    def _wait(self, seconds: float) -> None:
        self._say_alive()
        end = time.monotonic() + seconds
        while self._stop_at_s is None and (left := end - time.monotonic()) > 0:
            time.sleep(min(LOOK_S, left))

    def _say_alive(self) -> None:
        if self._settings.alive_file is not None:
            with suppress(OSError):  # a full disk must not end a study
                self._settings.alive_file.touch()

    # --- a study ---------------------------------------------------------------------------------

    def _work(self, claim: Claim, claimed_s: float) -> None:
        """Runs a study and ends the claim; whatever happens, the worker goes on."""
        study_id = claim.lease.study_id
        logger.info("study %s: claim %d on %s", study_id, claim.lease.fence, claim.place)
        settings = self._settings
        with LeaseKeeper(
            self._queue,
            claim.lease,
            lease_s=settings.lease_s,
            heartbeat_s=settings.heartbeat_s,
            claimed_s=claimed_s,
            kill=self._kill,
            on_beat=self._say_alive,
        ) as keeper:
            self._keeper = keeper
            if self._stop_at_s is not None:
                keeper.drain(self._stop_at_s)
            try:
                state, message, lost = self._outcome(claim, keeper)
                keeper.persist(lambda: self._queue.release(claim.lease, state, message, lost=lost))
                logger.info("study %s: %s %s", study_id, state.value, message)
            except StoreError as error:
                logger.warning("study %s: %s", study_id, error)
            finally:
                self._keeper = self._runner = None
                for pid in child_pids():  # what a killed trial server left
                    kill_tree(pid)

    def _outcome(self, claim: Claim, keeper: LeaseKeeper) -> tuple[StudyState, str, bool]:
        """What becomes of the study: its state, the message, and whether it broke down by no fault of its own.

        Raises:
            LeaseLost: The study is another worker's, or nobody's.
        """
        try:
            state = self._run(claim, keeper)
            return state, "", False
        except StudyInterrupt as interrupt:
            return interrupt.state, "", False
        except KeyboardInterrupt:
            return StudyState.CANCELLED, "before the baseline was measured", False
        except LeaseLost:
            raise
        except (RunnerError, StoreError) as error:
            keeper.check_lease()  # processes that were killed because the lease was lost are no fault of the machine
            if isinstance(error, StorageFull):
                logger.error("%s", error)
            return StudyState.QUEUED, str(error), True
        except SteptuneError as error:
            return StudyState.FAILED, str(error), False
        except Exception as error:
            keeper.check_lease()
            logger.exception("study %s broke down", claim.lease.study_id)
            return StudyState.QUEUED, f"{type(error).__name__}: {error}", True

    def _run(self, claim: Claim, keeper: LeaseKeeper) -> StudyState:
        directory = (self._settings.data_directory / "studies" / claim.lease.study_id).absolute()
        reference = fetch_source(claim.source, claim.study, self._artifacts, directory / "source")
        study = replace(claim.study, workload=reference, directory=str(directory))
        base = SqlStudyStore(self._engine, lease=claim.lease)
        store = patient(base, keeper, claim.study)
        self._show_devices(claim)
        with isolated_runner(
            workload=reference,
            directory=directory,
            settings=self._settings,
            level=self._level,
            python=self._python,
            device=study.settings.device or self._offer.profile.device_kind,
            num_ranks=study.settings.num_ranks,
            seed=study.settings.seed,
            memory_limit_bytes=study.settings.memory_limit_bytes,
            task_deadline_s=study.settings.phase_timeout_s or max(MIN_TASK_DEADLINE_S, study.settings.budget_s),
            check=keeper.check,
        ) as runner:
            self._runner = runner
            driver = StudyDriver(
                study,
                store,
                runner,
                on_change=_Watcher(study, store, self._keep),
                before_trials=keeper.check_between_trials,
                place=claim.place,
                other_hardware=claim.other_hardware,
            )
            driver.run()
        try:
            self._keep(study, store)
        except LeaseLost:
            raise
        except StoreError as error:  # the answer is there, and counts for more than its traces
            logger.error("study %s: not all of its traces could be kept: %s", study.study_id, error)
        state = store.get_study(study.study_id).state
        remove_working_files(study)
        shutil.rmtree(directory / "source", ignore_errors=True)
        return state

    def _keep(self, study: Study, store: StudyStore) -> None:
        recommendation = store.recommendation(study.study_id)
        keep_profiles(study, store, recommendation, self._artifacts, logs=True)

    def _show_devices(self, claim: Claim) -> None:
        """Trials see the GPUs that were claimed, and no others."""
        if self._offer.gpus:
            gpus = [str(slot.number) for slot in claim.slots if slot.kind == CUDA]
            os.environ[VISIBLE_DEVICES] = ",".join(gpus)

    def _kill(self) -> None:
        if self._runner is not None:
            self._runner.kill()


class _Watcher:
    """Publishes what goes on, and keeps files of trials when these are complete."""

    def __init__(self, study: Study, store: StudyStore, keep: Any) -> None:
        self._study = study
        self._store = store
        self._keep = keep
        self._publish = Publisher(lambda data: store.add_event(study.study_id, EVENT, data))
        self._num_trials = 0

    def __call__(self, view: StudyView) -> None:
        if view.num_trials != self._num_trials:
            self._num_trials = view.num_trials
            self._keep(self._study, self._store)
        self._publish(view)

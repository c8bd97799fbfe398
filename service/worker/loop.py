"""Main loop of a worker: claim a study, run it under its lease, release it, and repeat."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from sqlalchemy import Engine

from steptune.service.artifacts import open_artifacts
from steptune.service.connections import FULL_ERRNOS
from steptune.service.directories import mark, remove_tree
from steptune.service.housekeeping import keep_house
from steptune.service.isolation import Level
from steptune.service.isolation.users import take_back
from steptune.service.on_ray.hosts import Cluster, Reservation, reserved_hosts
from steptune.service.places import CUDA, VISIBLE_DEVICES, this_place
from steptune.service.progress import EVENT, Publisher
from steptune.service.queue import Claim, StudyQueue, WorkerOffer, open_queue
from steptune.service.queue.records import AND, SCRIPT
from steptune.service.running import isolated_runner
from steptune.service.settings import Settings
from steptune.service.store import SqlStudyStore
from steptune.service.studies import MIN_TASK_DEADLINE_S, keep_profiles, remove_working_files
from steptune.service.worker.clock import now_s
from steptune.service.worker.keeper import LeaseKeeper
from steptune.service.worker.patience import patient
from steptune.service.worker.rests import Rests
from steptune.service.worker.scripts import prepare_script
from steptune.service.worker.sources import fetch_source
from steptune.service.worker.waits import TURN_S, Waits
from steptune.tuner.errors import (
    HostsUnavailableError,
    IsolationUnavailableError,
    LeaseLostError,
    RunnerError,
    SteptuneError,
    StorageFullError,
    StoreError,
    StoreUnavailableError,
)
from steptune.tuner.protocols import StudyStore, TrialRunner
from steptune.tuner.records import Study, StudyState
from steptune.tuner.search.driver import StudyDriver
from steptune.tuner.search.view import StudyInterrupt, StudyView
from steptune.tuner.trials.host_group import HostGroup
from steptune.tuner.trials.processes import child_pids, kill_tree
from steptune.tuner.trials.runner import LocalRunner

logger = logging.getLogger("steptune.worker")

HOUSE_S = 3600.0
"""Seconds between two housekeeping runs of an idle worker."""
HOUSE_LATE_S = 24 * 3600.0
"""Maximum seconds for which a busy worker may delay housekeeping, which then precedes the next study."""
GIVE_WAY_S = 5.0
"""Seconds between checks for another study that could run, while a worker's own study waits for hosts."""
ALONE_S = 60.0
"""Seconds after which the wait for hosts starts anew if no other study of the service holds hosts."""
LOOKS_PER_S = 20.0
"""Maximum polls of the queue per second by all idle workers together: the more workers, the less often each polls."""
LONGEST_POLL_S = 15.0
"""Maximum seconds between polls of a worker: it may be the only one that can run a new study."""
PROGRESS_S = 10.0
"""Seconds between progress events; news of the search is sent at once."""
LOOK_S = 0.2
"""Seconds after which a waiting worker checks again whether it must stop."""
_PASSING = (StoreUnavailableError, StorageFullError)
"""Transient errors, which never count as a failure of the worker: a full disk is cleared, and a store becomes reachable
again.
"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of a worker's attempt to run a study.

    Attributes:
        waits: Whether a cluster has not provided its hosts yet.
        failed: Whether the worker or its environment failed, not the study.
        lost: Whether the failure is not transient: after too many in a row the study is given up.
    """

    state: StudyState
    message: str = ""
    waits: bool = False
    failed: bool = False
    lost: bool = False


class Worker:
    """Worker that runs one study after the other until it is stopped. All child processes are trials.

    Args:
        engine: Engine of the service's database, its schema checked.
        offer: Devices and hardware of this worker.
        level: Isolation level of trials.
        once: Stop when there is nothing to claim.
        cluster: Cluster that reserves the hosts of every study; None for this machine, whose devices the queue knows.
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
        cluster: Cluster | None = None,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._offer = offer
        self._level = level
        self._python = python
        self._once = once
        self._cluster = cluster
        self._queue: StudyQueue = open_queue(engine, settings)
        self._artifacts = open_artifacts(settings)
        self._keeper: LeaseKeeper | None = None
        self._runner: LocalRunner | None = None
        self._stop_at_s: float | None = None
        self._house_at_s = now_s() + random.uniform(0, HOUSE_S)  # workers that start together do not all do it now
        self._beat_at_s = 0.0
        self._poll_s = settings.poll_s
        self._rests = Rests()
        self._waits = Waits()
        self._give_way_at_s = 0.0
        self._held_place = ""
        self._can_be_met = False
        self._asked_at_s = self._alone_at_s = 0.0

    def stop(self, *, within_s: float) -> None:
        """Stop once the running trials have ended, for which they have `within_s` seconds; then return the study to the
        queue.

        Called from signal handlers: sets values and takes no lock.
        """
        self._stop_at_s = min(now_s() + within_s, self._stop_at_s or float("inf"))
        if self._keeper is not None:
            self._keeper.drain(self._stop_at_s)

    def run(self) -> None:
        """Run studies until stopped."""
        self._register()
        logger.info("worker %s: %s", self._offer.worker_id, self._offer.profile.label)
        while self._stop_at_s is None:
            self._keep_house(late_s=HOUSE_LATE_S)
            claim, claimed_s = self._next()
            if claim is not None:
                self._work(claim, claimed_s)
                self._rest()
                continue
            self._keep_house()
            if self._once and not self._rests.owners() and not self._waits.studies:
                break
            self._wait(min(self._poll_s, self._rests.next_s()))
        try:
            self._queue.leave(self._offer.worker_id)
        except StoreError as error:
            logger.warning("failed to deregister the worker: %s", error)

    # --- between studies -------------------------------------------------------------------------

    def _next(self) -> tuple[Claim | None, float]:
        """Claim a study, if there is one. Return the claim and the time just before it was made, from which the lease
        counts.
        """
        try:
            self._beat()
            found = self._claim(self._waits.studies)
            for study_id in self._waits.due:
                if found[0] is not None:
                    break
                found = self._claim(self._waits.studies - {study_id})
                if found[0] is None:
                    self._waits.forget(study_id)
            return found
        except _PASSING as error:
            logger.warning("waiting for the database: %s", error)
            return None, now_s()

    def _claim(self, leaving: frozenset[str]) -> tuple[Claim | None, float]:
        claimed_s = now_s()
        return self._queue.claim(self._offer, resting=self._rests.owners(), leaving=leaving), claimed_s

    def _beat(self) -> None:
        if now_s() >= self._beat_at_s:
            if not self._queue.beat(self._offer.worker_id, "idle"):
                self._queue.register(self._offer)
            self._beat_at_s = now_s() + self._settings.heartbeat_s
            self._poll_s = max(self._settings.poll_s, min(LONGEST_POLL_S, self._queue.num_idle() / LOOKS_PER_S))

    def _rest(self) -> None:
        """Pause claiming for a while if this machine seems faulty."""
        while self._stop_at_s is None and (left := self._rests.left_s()) > 0:
            self._wait(min(left, self._settings.poll_s))
            try:
                self._beat()
            except _PASSING as error:
                logger.warning("waiting for the database: %s", error)

    def _keep_house(self, *, late_s: float = 0.0) -> None:
        """Do housekeeping if it has been due for `late_s` seconds."""
        if now_s() < self._house_at_s + late_s:
            return
        self._house_at_s = now_s() + HOUSE_S
        try:
            report = keep_house(self._engine, self._artifacts, self._settings)
        except StoreError as error:
            logger.warning("failed to remove expired data: %s", error)
        else:
            logger.info("removed expired data: %s", report)

    def _register(self) -> None:
        while self._stop_at_s is None:
            try:
                self._queue.register(self._offer)
                break
            except _PASSING as error:
                logger.warning("waiting for the database: %s", error)
                self._wait(self._settings.poll_s)

    def _wait(self, seconds: float) -> None:
        self._say_alive()
        end = now_s() + seconds
        while self._stop_at_s is None and (left := end - now_s()) > 0:
            time.sleep(min(LOOK_S, left))

    def _say_alive(self) -> None:
        if self._settings.alive_file is not None:
            with suppress(OSError):  # a full disk must not end a study
                self._settings.alive_file.touch()

    # --- a study ---------------------------------------------------------------------------------

    def _work(self, claim: Claim, claimed_s: float) -> None:
        """Run a study and end the claim; the worker continues whatever happens."""
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
                end = self._outcome(claim, keeper)
                given = {"failed": end.failed, "lost": end.lost}
                keeper.persist(lambda: self._queue.release(claim.lease, end.state, end.message, **given))
                logger.info("study %s: %s %s", study_id, end.state.value, end.message)
                self._learn(claim, end)
            except StoreError as error:
                logger.warning("study %s: %s", study_id, error)
                self._rests.learn(claim.owner_id, failed=not isinstance(error, LeaseLostError))
            finally:
                self._keeper = self._runner = None
                for pid in child_pids():  # what a killed trial server left
                    kill_tree(pid)

    def _learn(self, claim: Claim, end: Outcome) -> None:
        if end.waits:  # the cluster is busy, which says nothing of this machine or the study
            self._waits.add(claim.lease.study_id)
            return
        self._waits.forget(claim.lease.study_id)
        self._rests.learn(claim.owner_id, failed=end.failed)

    def _outcome(self, claim: Claim, keeper: LeaseKeeper) -> Outcome:
        """Run a study, and return its outcome.

        Raises:
            LeaseLostError: The study belongs to another worker, or to none.
        """
        try:
            return Outcome(state=self._run(claim, keeper))
        except StudyInterrupt as interrupt:
            return Outcome(state=interrupt.state)
        except KeyboardInterrupt:
            return Outcome(state=StudyState.CANCELLED, message="no new recommendation was found")
        except LeaseLostError:
            raise
        except HostsUnavailableError as error:
            keeper.check_lease()
            why = str(error)
            if not self._can_be_met:  # nobody leaves hosts to a study whose cluster does not answer
                keeper.persist(lambda: self._queue.say_waiting(claim.lease, why))
            return Outcome(state=StudyState.QUEUED, message=why, waits=True)
        except (RunnerError, StoreError, IsolationUnavailableError) as error:
            keeper.check_lease()  # processes that were killed because the lease was lost are no fault of the machine
            logger.error("study %s: %s", claim.lease.study_id, error)
            return _given_back(error, str(error))
        except SteptuneError as error:
            return Outcome(state=StudyState.FAILED, message=str(error))
        except Exception as error:
            keeper.check_lease()
            logger.exception("study %s failed with an unexpected error", claim.lease.study_id)
            return _given_back(error, f"{type(error).__name__}: {error}")

    def _run(self, claim: Claim, keeper: LeaseKeeper) -> StudyState:
        directory = (self._settings.data_directory / "studies" / claim.lease.study_id).absolute()
        mark(self._engine, self._settings.data_directory, claim.lease.study_id)
        if directory.exists():
            take_back(directory)
        reference = fetch_source(claim.source, claim.study, self._artifacts, directory / "source")
        study = replace(claim.study, workload=reference, directory=str(directory))
        base = SqlStudyStore(self._engine, lease=claim.lease)
        store = patient(base, keeper, claim.study)
        watcher = _Watcher(study, store, self._keep)
        self._show_devices(claim)
        is_script = claim.source is not None and claim.source.kind == SCRIPT
        # Trials of a script take no turns with the baseline: an earlier claim's say nothing of the machine's load now.
        since = f" claim {claim.lease.fence}" if is_script else ""
        with (
            self._hosts(claim, study, keeper, watcher.say) as (hosts, check),
            self._trials(claim, study, check, hosts) as (study, runner),
        ):
            driver = StudyDriver(
                study,
                store,
                runner,
                on_change=watcher,
                before_trials=keeper.check_between_trials,
                place=lambda: self._place(claim, keeper, hosts) + since,
                other_hardware=claim.other_hardware,
            )
            driver.run()
        watcher.keep_files()  # the last time: the answer is there, and counts for more than its traces
        state = store.get_study(study.study_id).state
        remove_working_files(study)
        remove_tree(directory / "source")
        return state

    @contextlib.contextmanager
    def _trials(
        self, claim: Claim, study: Study, check: Callable[[], None], hosts: HostGroup | None
    ) -> Iterator[tuple[Study, TrialRunner]]:
        """Open the runner of a study's trials, and yield the study and the runner. For a script, the inspection sets
        some of the study's fields.
        """
        directory, settings = Path(study.directory), study.settings
        if claim.source is not None and claim.source.kind == SCRIPT:
            study, scripts = prepare_script(study, directory / "source", self._level, check, self._python)
            with contextlib.closing(scripts):
                yield study, scripts
            return
        with isolated_runner(
            workload=study.workload,
            directory=directory,
            settings=self._settings,
            level=self._level,
            python=self._python,
            owner=claim.owner_id,
            device=settings.device or self._offer.profile.device_kind,
            num_ranks=settings.num_ranks,
            seed=settings.seed,
            memory_limit_bytes=settings.memory_limit_bytes,
            task_deadline_s=settings.phase_timeout_s or max(MIN_TASK_DEADLINE_S, settings.budget_s),
            check=check,
            hosts=hosts,
        ) as runner:
            self._runner = runner
            yield study, runner

    @contextlib.contextmanager
    def _hosts(
        self, claim: Claim, study: Study, keeper: LeaseKeeper, say: Callable[[str], None]
    ) -> Iterator[tuple[HostGroup | None, Callable[[], None]]]:
        """Yield all hosts of a study (None if there is only one), and the function by which the runner checks them."""
        if self._cluster is None:
            yield None, keeper.check
            return
        device = study.settings.device or self._offer.profile.device_kind  # the worker's, whatever else the node has
        asked = replace(study, settings=replace(study.settings, device=device))
        self._held_place, said = "", ""
        group: HostGroup | None = None
        self._can_be_met = False
        self._asked_at_s = self._alone_at_s = now_s()

        def check_waiting(found: Reservation) -> None:
            nonlocal said
            keeper.check_between_trials()
            self._can_be_met = found.can_be_met
            self._offer = replace(self._offer, cluster=found.cluster or self._offer.cluster)
            if self._held_place:  # it runs, and a host is lost
                self._place(claim, keeper, group)
                return
            lack = found.lack
            if not lack:  # Ray has not answered yet, or has given all
                return
            if lack != said:
                said = lack
                met, cluster = found.can_be_met, found.cluster
                keeper.persist(lambda: self._queue.say_waiting(claim.lease, lack, cluster=cluster, can_be_met=met))
            self._give_way(claim, lack)

        with reserved_hosts(
            self._cluster, asked, self._settings, self._level, say, keeper.check, check_waiting, timeout_s=None
        ) as found:
            group = found[0]
            self._place(claim, keeper, group)
            yield found

    def _give_way(self, claim: Claim, lack: str) -> None:
        """Stop waiting for hosts if another study can run now or goes first, or if another worker is idle. The idle
        worker may be able to start this study, because a study always uses its worker's host.

        Raises:
            HostsUnavailableError: One of these is the case.
        """
        now = now_s()
        if now < self._give_way_at_s:
            return
        self._give_way_at_s = now + GIVE_WAY_S
        with suppress(StoreUnavailableError):
            if self._queue.holds_hosts(self._offer.cluster):
                self._alone_at_s = now
            elif now >= self._alone_at_s + ALONE_S:
                self._queue.wait_anew(claim.lease)
            if now >= self._asked_at_s + TURN_S and self._queue.num_idle():
                raise HostsUnavailableError(lack)
            resting, leaving = self._rests.owners(), self._waits.recent
            if self._queue.gives_way(self._offer, resting=resting, leaving=leaving, without=claim.lease.study_id):
                raise HostsUnavailableError(lack)

    def _place(self, claim: Claim, keeper: LeaseKeeper, hosts: HostGroup | None) -> str:
        """Return the devices on which a study measures: those of its claim, or those that a cluster has reserved. The
        queue records the reserved devices.

        Raises:
            HostsUnavailableError: The study may not start now, although its hosts are reserved.
        """
        if self._cluster is None:
            return claim.place
        place = AND.join([this_place(), *(hosts.places if hosts is not None else ())])
        if place != self._held_place:
            cluster = self._offer.cluster
            refusal = keeper.persist(lambda: self._queue.begin(claim.lease, place, cluster=cluster))
            if refusal:
                raise HostsUnavailableError(f"the hosts are available, but the study still waits for {refusal}")
            self._held_place = place
        return place

    def _keep(self, study: Study, store: StudyStore) -> None:
        recommendation = store.recommendation(study.study_id)
        keep_profiles(study, store, recommendation, self._artifacts, logs=True)

    def _show_devices(self, claim: Claim) -> None:
        """Show trials only the GPUs that were claimed."""
        if self._offer.gpus:
            gpus = [str(slot.number) for slot in claim.slots if slot.kind == CUDA]
            os.environ[VISIBLE_DEVICES] = ",".join(gpus)

    def _kill(self) -> None:
        if self._runner is not None:
            self._runner.kill()


def _given_back(error: Exception, message: str) -> Outcome:
    passes = isinstance(error, _PASSING) or (isinstance(error, OSError) and error.errno in FULL_ERRNOS)
    return Outcome(state=StudyState.QUEUED, message=message, failed=True, lost=not passes)


class _Watcher:
    """Publisher of a study's progress, which also stores the files of trials when these are complete."""

    def __init__(self, study: Study, store: StudyStore, keep: Any) -> None:
        self._study = study
        self._store = store
        self._keep = keep
        self._publish = Publisher(lambda data: store.add_event(study.study_id, EVENT, data), PROGRESS_S)
        self._num_trials = 0

    def __call__(self, view: StudyView) -> None:
        if view.num_trials != self._num_trials:
            self._num_trials = view.num_trials
            self.keep_files()
        self._publish(view)

    def say(self, text: str) -> None:
        """Publish the reason why the study waits, before any trial runs."""
        logger.info("study %s: %s", self._study.study_id, text)
        settings = self._study.settings
        self._publish(
            StudyView(
                budget_s=settings.budget_s,
                max_trials=settings.max_trials,
                stage="waiting for hosts",
                activity=text,
                num_trials=self._num_trials,
            )
        )

    def keep_files(self) -> None:
        """Store the files that can be stored now; failures are retried with the next trial.

        Raises:
            LeaseLostError: The lease is over.
        """
        try:
            self._keep(self._study, self._store)
        except LeaseLostError:
            raise
        except (StoreError, OSError) as error:
            logger.warning("study %s: failed to store some of its files: %s", self._study.study_id, error)

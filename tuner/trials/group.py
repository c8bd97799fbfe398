"""Group of trials that run at the same time and take turns in measurement windows.

Machines are shared and their speed drifts within seconds, so figures taken one after the other
differ by more than the effects that are looked for. Trials of a group are started one after the other
and, once all are warm, measured in rounds: in each round every trial takes one window, in random
order and for the same time, while the others wait. What drifts more slowly than a round cancels in
ratios within rounds. A group of one is an ordinary trial.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from steptune.tuner.estimates import trimmed_mean
from steptune.tuner.protocols import Progress, ProgressListener
from steptune.tuner.records import (
    Attempt,
    Breakdown,
    Compilation,
    Effect,
    GuardVerdict,
    MeasureSettings,
    MemoryPeak,
    Purpose,
    TrialProfile,
    TrialResult,
    TrialSpec,
    Window,
)
from steptune.tuner.trials.jobs import STARTING, Job, JobBoard
from steptune.tuner.trials.messages import (
    Finish,
    FromRank,
    Guarded,
    MeasureRestart,
    PhaseBegan,
    Profile,
    Profiled,
    Ready,
    Reported,
    RestartMeasured,
    TakeWindow,
    WindowTaken,
)

PATIENCE = 3
"""Maximum time in which a group must complete two valid rounds, as a multiple of the setting `cap_s` (taken as at least
1 s). After that, the group is ended.
"""


class Member:
    """Trial of a group, and its messages so far."""

    def __init__(self, spec: TrialSpec, purpose: Purpose, job: Job) -> None:
        self.spec = spec
        self.purpose = purpose
        self.job = job
        self.ready: Ready | None = None
        self.windows: list[Window] = []
        self.guard: GuardVerdict | None = None
        self.restart_ns: int | None = None
        self.breakdowns: tuple[Breakdown, ...] = ()
        self.profile: TrialProfile | None = None
        self.memory: list[MemoryPeak] = []
        self.effects: tuple[Effect, ...] = ()
        self.compilation: Compilation | None = None
        self.unmeasured: tuple[str, ...] = ()
        self.trace: str | None = None

    @property
    def alive(self) -> bool:
        return self.ready is not None and self.job.failure is None and not self.job.ended

    @property
    def clean(self) -> dict[int, Window]:
        return {w.round: w for w in self.windows if w.void is None}

    @property
    def by_round(self) -> dict[int, Window]:
        return {w.round: w for w in self.windows}

    def count_all_windows(self) -> None:
        """Accept void windows as valid. Each keeps the reason why it was void in its field `marked`."""
        self.windows = [w if w.void is None else replace(w, void=None, marked=w.void) for w in self.windows]

    def take_in(self, message: FromRank) -> None:
        match message:
            case Guarded():
                self.guard = message.verdict
            case Ready():
                self.ready = message
            case WindowTaken():
                self.windows.append(message.window)
            case RestartMeasured():
                self.restart_ns = message.epoch_restart_ns
            case Profiled():
                self.breakdowns, self.profile, self.trace = message.breakdowns, message.profile, message.trace
            case Reported():
                self.memory.append(message.memory)
                self.unmeasured = tuple(dict.fromkeys((*self.unmeasured, *message.unmeasured)))
                if message.memory.rank == 0:
                    self.effects, self.compilation = message.effects, message.compilation

    def result(
        self, group: str, wanted_windows: int, isolation: str, repeated: tuple[Attempt, ...] = ()
    ) -> TrialResult:
        return TrialResult(
            trial_id=self.spec.trial_id,
            candidate=self.spec.candidate,
            purpose=self.purpose,
            group=group,
            windows=tuple(self.windows),
            startup=self.ready.startup if self.ready else None,
            epoch_restart_ns=self.restart_ns,
            steps_per_epoch=self.ready.steps_per_epoch if self.ready else None,
            memory=tuple(sorted(self.memory, key=lambda peak: peak.rank)),
            breakdowns=self.breakdowns,
            profile=self.profile,
            guard=self.guard,
            effects=self.effects,
            compilation=self.compilation,
            failure=self.job.failure,
            unmeasured=self.unmeasured,
            contended=self.job.failure is None and len(self.clean) < wanted_windows,
            interpreter="fresh" if self.spec.environment_variables else "forked",
            isolation=isolation,
            phases_ns=dict(self.job.phases_ns),
            repeated=repeated,
        )


class GroupRun:
    """Run of one group to its end.

    Args:
        start: Function that starts the job of a spec.
        before_windows: Function that is called with the jobs of all running trials once they are warm.
    """

    def __init__(
        self,
        board: JobBoard,
        start: Callable[[TrialSpec], Job],
        settings: MeasureSettings,
        listener: ProgressListener,
        seed: int,
        before_windows: Callable[[Sequence[Job]], None] = lambda jobs: None,
    ) -> None:
        self._board = board
        self._start = start
        self._settings = settings
        self._listener = listener
        self._random = random.Random(seed)
        self._before_windows = before_windows
        self.members: list[Member] = []

    def run(self, specs: Sequence[TrialSpec], purposes: Sequence[Purpose]) -> None:
        for spec, purpose in zip(specs, purposes, strict=True):
            member = Member(spec, purpose, self._start(spec))
            self.members.append(member)
            self._say(member, "starting")
            self._await(member, Ready)
        if alive := self._alive():
            self._before_windows([member.job for member in alive])
        self._measure()
        for member in self._alive():
            self._request(member, MeasureRestart(), RestartMeasured)
        for member in self._alive():
            if member.spec.profile and member.windows:
                self._say(member, "profiling")
                self._request(member, Profile(unprofiled_step_time_ns=_mean_step_ns(member)), Profiled)
        for member in self._alive():
            self._board.tell(member.job, Finish())
            while (message := self._board.next_message(member.job)) is not None:
                member.take_in(message)

    # --- rounds -------------------------------------------------------------------------------

    def _measure(self) -> None:
        self._take_rounds()
        if not self._settings.quiet_machine and len(self._rounds(clean=True)) < self._settings.min_rounds:
            for member in self.members:
                member.count_all_windows()

    def _take_rounds(self) -> None:
        settings = self._settings
        began = time.monotonic()
        for number in range(settings.max_rounds):
            alive = self._alive()
            if len(alive) < min(2, len(self.members)):
                return  # nothing is left to compare with
            steps = {member.spec.trial_id: self._num_steps(member) for member in alive}
            self._random.shuffle(alive)
            for member in alive:
                self._take_window(member, number, steps[member.spec.trial_id], stride=max(steps.values()))
            rounds = self._counted_rounds()
            if len(rounds) >= settings.min_rounds and self._precise(rounds):
                return
            elapsed_s = time.monotonic() - began
            if elapsed_s > (settings.cap_s if len(rounds) >= 2 else PATIENCE * max(1.0, settings.cap_s)):
                return

    def _counted_rounds(self) -> list[int]:
        """Return the rounds on a quiet machine, if there are enough of them or if only such rounds are accepted. Else
        return all rounds: trials that take turns are compared under the same load.
        """
        clean = self._rounds(clean=True)
        accepts = not self._settings.quiet_machine and len(clean) < self._settings.min_rounds
        return self._rounds(clean=False) if accepts else clean

    def _rounds(self, *, clean: bool) -> list[int]:
        """Return the rounds in which every running trial took a window."""
        taken = [set(member.clean if clean else member.by_round) for member in self._alive()]
        return sorted(set.intersection(*taken)) if taken else []

    def _num_steps(self, member: Member) -> int:
        """Return the number of steps in a window of the intended duration. Equal durations make both sides of a ratio
        equally precise.
        """
        assert member.ready is not None
        return max(1, math.ceil(self._settings.window_s * 1e9 / max(1, member.ready.step_time_ns)))

    def _take_window(self, member: Member, number: int, num_steps: int, *, stride: int) -> None:
        """Take one window. All windows of a round begin at the same batch, which was in no window of the last round."""
        assert member.ready is not None
        positions = member.ready.num_positions
        position = number * stride % positions if positions else -1
        self._say(member, f"window {number + 1}")
        limit = self._settings.foreign_cpu_share
        command = TakeWindow(round=number, position=position, num_steps=num_steps, foreign_limit=limit)
        self._request(member, command, WindowTaken)

    def _precise(self, rounds: Sequence[int]) -> bool:
        """Say whether these rounds give a precise ratio of each trial's rate to the first trial's, or a precise rate of
        a single trial.
        """
        first, *others = self.members
        if not others:
            rates = [math.log(first.by_round[r].units_per_s) for r in rounds]
            return trimmed_mean(rates).half_width() < self._settings.half_width
        for member in others:
            both = [r for r in rounds if r in first.by_round and r in member.by_round]
            if not both:
                return False
            ratios = [math.log(member.by_round[r].units_per_s / first.by_round[r].units_per_s) for r in both]
            if member.alive and trimmed_mean(ratios).half_width() >= self._settings.half_width:
                return False
        return True

    # --- messages -----------------------------------------------------------------------------

    def _alive(self) -> list[Member]:
        return [member for member in self.members if member.alive]

    def _request(self, member: Member, command: object, answer: type[FromRank]) -> None:
        self._board.tell(member.job, command)
        self._await(member, answer)

    def _await(self, member: Member, answer: type[FromRank]) -> None:
        """Process messages until the expected message has come or the job has ended."""
        while (message := self._board.next_message(member.job)) is not None:
            member.take_in(message)
            if isinstance(message, answer):
                member.job.pause()
                return
            if isinstance(message, PhaseBegan) and message.phase in STARTING:
                self._say(member, message.phase.value.replace("_", " "))

    def _say(self, member: Member, text: str) -> None:
        self._listener(Progress(trial_id=member.spec.trial_id, text=text, phase=member.job.phase.value))


def _mean_step_ns(member: Member) -> int:
    windows = list(member.clean.values()) or member.windows
    return sum(w.duration_ns for w in windows) // sum(w.num_steps for w in windows)

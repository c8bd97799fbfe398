"""Runs of a script: each run repeats its command, or continues from the frozen copy of its process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steptune.tuner.records import TrialSpec
from steptune.tuner.scripts.copies import CopyError, FrozenCopy
from steptune.tuner.scripts.failures import failure_of
from steptune.tuner.scripts.launch import Ended, ran_script
from steptune.tuner.scripts.look import Look, same_for_all

FORK_LOOKS, FORK_MORE_S = 2.0, 30.0
"""Time limit of a trial from a frozen copy: a multiple of the inspection's time, plus a number of seconds."""
START_LOOKS = 4.0
"""Minimum time limit of a run of the command, as a multiple of the inspection's time."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """Way to start a script.

    Attributes:
        variables: Environment variables.
        texts: Other texts of files in its view, by their path below the folder.
        anew: Whether the command is started, not a trial from the frozen copy.
    """

    command: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    anew: bool = True


class ScriptStarts:
    """Runs of an inspected command, from the beginning or from its frozen copy.

    Args:
        look: Inspection of the command.
        variables: Environment variables of every run.
        check: Called several times a second during a run; an exception from it ends the run.
    """

    def __init__(
        self, look: Look, *, seed: int, variables: Mapping[str, str] | None, check: Callable[[], None] | None
    ) -> None:
        self.look = look
        self.seed = seed
        self._variables = dict(variables or {})
        self.check = check

    def task(
        self, changes: Mapping[str, Any], guard: dict[str, Any] | None, measure: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Return the task of a trial as plain values."""
        script = self.look.script
        none = {"warm_up_s": 0.0, "window_s": 0.0, "min_rounds": 1, "max_rounds": 1, "half_width": 1.0, "cap_s": 0.0}
        return {
            "pattern": self.look.record.step.optimizers,
            "loader": script.loader_number,
            "loader_place": script.places.get("loader", ""),
            "models": script.models,
            "changes": dict(changes),
            "seed": self.seed,
            "guard": guard,
            "only_guard": False,
            "num_losses": 0,
            "measure": measure or {**none, "profile": False, "queue": 0},
        }

    @contextlib.contextmanager
    def ran(self, trial: Mapping[str, Any], way: Start, log: Path, longest_s: float | None) -> Iterator[Ended]:
        """Run a trial; its record and traces exist until the context ends."""
        copy = self.look.copy
        if copy is not None and not way.anew:
            try:
                limit_s = longest_s if trial["changes"].get("compile") else self.longest_fork_s(longest_s)
                with copy.ran(self._for_copy(copy, trial), log, limit_s, self.check) as ended:
                    yield ended
                return
            except CopyError as error:
                self.lose_copy(str(error))
        with self._started(trial, way, log, longest_s) as ended:
            yield ended

    def _started(
        self, trial: Mapping[str, Any], way: Start, log: Path, longest_s: float | None, frozen_seed: int | None = None
    ) -> contextlib.AbstractContextManager[Ended]:
        return ran_script(
            way.command,
            trial=trial,
            variables={**same_for_all(), **self._variables, **way.variables},
            texts=way.texts,
            frozen_seed=frozen_seed,
            folder=self.look.folder,
            log=log,
            longest_s=longest_s,
            check=self.check,
        )

    def longest_s(self, spec: TrialSpec, way: Start) -> float:
        """Return the time limit of a trial."""
        deadlines = spec.deadlines
        starting = deadlines.build_s + deadlines.guard_s + deadlines.warm_up_s
        if way.anew:  # what is usual may be known of forks only
            starting = max(starting, START_LOOKS * self.look.seconds)
        if deadlines.starting_s is not None:
            starting = min(starting, deadlines.starting_s)
        return starting + deadlines.measure_s + deadlines.profile_s + deadlines.report_s

    def _for_copy(self, copy: FrozenCopy, trial: Mapping[str, Any]) -> dict[str, Any]:
        """Return a trial's task, with the paths of its files as the frozen copy sees them."""
        guard = trial["guard"]
        if guard is None or guard["reference"] is None:
            return dict(trial)
        return {**trial, "guard": {**guard, "reference": str(copy.shared(Path(guard["reference"])))}}

    def longest_fork_s(self, longest_s: float | None) -> float:
        """Return the time limit of a trial that starts from the frozen copy and compiles nothing. It is shorter than
        that of a run of the command, so that a hang is found early.
        """
        longest = FORK_LOOKS * self.look.seconds + FORK_MORE_S
        return longest if longest_s is None else min(longest, longest_s)

    def lose_copy(self, reason: str) -> None:
        """Give up the frozen copy: each further trial runs the command from its beginning."""
        self.look.close()
        self.look.why_no_copy = reason

    def frozen(self, way: Start, log: Path) -> Look:
        """Start the command in the given way, run it up to its first steps, and return the inspection with a frozen
        copy.

        Raises:
            CopyError: The run leaves no copy, or does not train.
        """
        look, began_ns = self.look, time.perf_counter_ns()
        with contextlib.ExitStack() as kept:
            started = self._started(
                self.task({}, None, None), way, log, START_LOOKS * look.seconds, frozen_seed=self.seed
            )
            ended = kept.enter_context(started)
            record = next((record for record in ended.records if record.complete), None)
            if record is None:
                raise CopyError(failure_of(ended, log).message)
            copy = FrozenCopy(ended.folder, record, began_ns, look.folder)
            found = Look(way.command, look.folder, look.record, look.analysis, look.seconds)
            found.keep(copy, kept.pop_all())
        return found

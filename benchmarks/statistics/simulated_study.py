"""A search and its confirmation on simulated starts, by the product's own `ConfirmationRun`.

What runs trials, keeps time and proposes finalists is simulated; how many blocks there are, in which order, when they
end, and what is said of them is the product's.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from noise import Noise

from steptune.tuner.estimates import log_rate
from steptune.tuner.records import BASELINE, Candidate, MeasureSettings, Purpose, StudySettings, TrialResult
from steptune.tuner.search.confirmation import Finalist
from steptune.tuner.search.confirmation_run import ConfirmationRun
from steptune.tuner.search.preparation import MIN_CAP_S
from steptune.tuner.trials.fake import known_window

STEP_NS = 1e7
NUM_OTHERS = 3
"""Candidates of the search that do not reach the confirmation unless luck helps them."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One study.

    Attributes:
        gain: True gain of the best candidate; of a second one it is half of that, of the others none.
        blocks: Blocks that are asked for.
        time_for: Blocks that there is time for.
        finalists: Candidates that the confirmation may have.
        long_search: Whether the baseline was started four times and the winner twice, or twice and once.
        in_turns: Whether trials of a block take turns.
    """

    gain: float
    blocks: int
    time_for: int
    finalists: int = 1
    long_search: bool = True
    in_turns: bool = False


@dataclass
class Machine:
    """Runs trials: stands for the runner of groups."""

    noise: Noise
    log_gains: dict[str, float]
    in_turns: bool
    measure: MeasureSettings = field(default_factory=MeasureSettings)
    elapsed_s: float = 0.0
    _count: int = 0

    def together(self, candidates: list[Candidate]) -> list[list[Candidate]]:
        return [list(candidates)] if self.in_turns else [[candidate] for candidate in candidates]

    def run(
        self, candidates: list[Candidate], purposes: list[Purpose], replicate: int, longest_s: float | None = None
    ) -> list[TrialResult]:
        self._count += 1
        self.elapsed_s += MIN_CAP_S
        phase = "confirm" if purposes[0] is Purpose.CONFIRM else f"search {self._count}"
        arms = [int(c.choices["arm"]["number"]) if c.choices else 0 for c in candidates]
        return [
            TrialResult(
                trial_id=f"{self._count}-{arm}",
                candidate=candidate,
                purpose=purpose,
                group=str(self._count),
                windows=(known_window(0, STEP_NS * math.exp(-self.log_gains[candidate.key] - noise)),),
            )
            for candidate, purpose, arm, noise in zip(
                candidates, purposes, arms, self.noise.starts(arms, (phase, replicate)), strict=True
            )
        ]


class Search:
    """A search that has ended, as far as the confirmation asks about it."""

    def __init__(self, machine: Machine, candidates: list[Candidate], case: Case) -> None:
        self.reference, self.decisions = BASELINE, ()
        self.knowledge: Any = SimpleNamespace(results={}, noise_sd=self._noise_sd, start_s=lambda candidate: 0.0)
        self._machine = machine
        self._start(BASELINE, Purpose.BASELINE)
        for number, candidate in enumerate(candidates):
            self._start(candidate, Purpose.EXPLORE)
            if number % 2 and case.long_search:
                self._start(BASELINE, Purpose.BASELINE)
        self._ranking = sorted(candidates, key=lambda candidate: -self._mean(candidate))
        self._start(self._ranking[0], Purpose.REPLICATE) if case.long_search else None
        self._start(BASELINE, Purpose.BASELINE)

    def finalists(self, count: int) -> list[Candidate]:
        return self._ranking[:count]

    def baseline_results(self) -> list[TrialResult]:
        return self.knowledge.results[BASELINE.key]

    def _start(self, candidate: Candidate, purpose: Purpose) -> None:
        self.knowledge.results.setdefault(candidate.key, []).extend(self._machine.run([candidate], [purpose], 0))

    def _mean(self, candidate: Candidate) -> float:
        return statistics.fmean(log_rate(result).mean for result in self.knowledge.results[candidate.key])

    def difference(self, candidate: Candidate, other: Candidate) -> Any:
        mean = self._mean(candidate) - self._mean(other)
        return SimpleNamespace(mean=mean, ratio=math.exp(mean))

    def _noise_sd(self, *candidates: Candidate) -> float:
        rates = [log_rate(result).mean for result in self.baseline_results()]
        return statistics.stdev(rates)


def confirmed(case: Case, noise: Noise, seed: int) -> tuple[list[Finalist], dict[str, float]]:
    """Finalists as the confirmation judges them, and true log gains by candidate key."""
    candidates = [Candidate(choices={"arm": {"number": 1 + n}}) for n in range(2 + NUM_OTHERS)]
    gains = (math.log(case.gain), math.log(case.gain) / 2, *[0.0] * NUM_OTHERS)
    log_gains = {BASELINE.key: 0.0, **{c.key: gain for c, gain in zip(candidates, gains, strict=True)}}
    machine = Machine(noise, log_gains, case.in_turns)
    search = Search(machine, candidates, case)
    settings = StudySettings(confirm_blocks=case.blocks, num_finalists=case.finalists, seed=seed)
    groups = machine.together([BASELINE, *search.finalists(case.finalists)])
    left_s = (case.time_for + 0.5) * MIN_CAP_S * len(groups)
    run = ConfirmationRun(search, machine, ledger(), settings, View(machine, left_s), place="")  # type: ignore[arg-type]
    run.run()
    return run.judged(), log_gains


def ledger() -> Any:
    return SimpleNamespace(
        find=lambda candidate, purpose, number: None,
        first_block=lambda purpose: 0,
        counted=lambda result: result,
        num_trials=0,
    )


class View:
    """Time of the study: all starts take as long as the shortest ones do."""

    def __init__(self, machine: Machine, left_s: float) -> None:
        self._machine = machine
        self.budget_s = machine.elapsed_s + left_s
        self.num_trials = 0

    @property
    def elapsed_s(self) -> float:
        return self._machine.elapsed_s

    @property
    def left_s(self) -> float:
        return self.budget_s - self.elapsed_s

    def say(self, **changes: str) -> None:
        """Nobody listens."""

"""Space of a study: every legal choice, and the reason for each excluded one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from steptune.tuner.costs.bounds import Situation, jointly, total
from steptune.tuner.errors import ChoiceError
from steptune.tuner.records import Candidate, Choice, Environment, Move, Numerics, StudySettings, WorkloadFacts
from steptune.tuner.strategies import STRATEGIES, Strategy, strategy_named
from steptune.tuner.strategies.api import NeedsWorkload, Outside, Supported, Unsupported, Way, needs_cuda, needs_ranks
from steptune.tuner.strategies.combine import (
    complete_choices,
    conflict,
    environment_variables,
    normalise,
    numerics_of,
    unit_roundoff_of,
)
from steptune.tuner.strategies.cuda_graph.choice import CudaGraphSetting
from steptune.tuner.strategies.knobs import KNOBS, is_knob, with_knobs
from steptune.tuner.wording import no_such

NEEDS_WORKLOAD = "needs a Workload: "
"""Prefix of the reason why a choice is not tried in a training script's own loop."""


@dataclass(frozen=True, kw_only=True)
class Exclusion:
    """Choice that is not tried, with the reason."""

    move: Move
    reason: str


class Space:
    """Legal moves of one workload on one machine under one user's consent."""

    def __init__(
        self,
        environment: Environment,
        workload: WorkloadFacts,
        settings: StudySettings,
        strategies: Sequence[Strategy] = STRATEGIES,
    ) -> None:
        self.environment = environment
        self.workload = workload
        self.settings = settings
        self.strategies = with_knobs(strategies, workload)
        check_names(settings.only, settings.skip, self.strategies)
        self._of_hardware = [
            found for found in (needs_cuda(environment), needs_ranks(environment)) if found != Supported()
        ]
        """Reasons for refusing choices that need other hardware. Adding a `Workload` would not make these choices
        possible.
        """
        moves: list[Move] = []
        self.excluded: list[Exclusion] = []
        for strategy in self.strategies:
            for move, reason in self._judge(strategy):
                if reason is None:
                    moves.append(move)
                else:
                    self.excluded.append(Exclusion(move=move, reason=reason))
        self.moves = tuple(moves)

    def _judge(self, strategy: Strategy) -> Iterable[tuple[Move, str | None]]:
        seen: set[str] = set()
        for choice in strategy.choices(self.environment, self.workload):
            alone = Candidate(choices={strategy.name: strategy.difference(choice, self.workload)})
            candidate = normalise(alone, self.workload, self.strategies)
            if candidate.is_baseline or candidate.key in seen:
                continue
            seen.add(candidate.key)
            move = Move(strategy=strategy.name, choice=candidate.choices.get(strategy.name, {}))
            yield move, self._objection(strategy, choice)

    def _objection(self, strategy: Strategy, choice: Choice) -> str | None:
        settings = self.settings
        if settings.only and not _is_among(strategy.name, settings.only):
            return "left out by --only"
        if _is_among(strategy.name, settings.skip):
            return "left out by --skip"
        support = strategy.supports(choice, self.environment, self.workload)
        numerics = strategy.numerics(choice)
        needs_consent = numerics.needs_consent and numerics not in settings.allow
        if self.workload.script is not None and not needs_consent:
            outside = strategy.outside(choice, self.workload.script)
            if isinstance(outside, NeedsWorkload) and support not in self._of_hardware:
                return f"{NEEDS_WORKLOAD}{outside.reason}"
        if isinstance(support, Unsupported):
            return support.reason
        if needs_consent:
            return f"is {numerics.value}: allow it with --allow {numerics.value}"
        return None

    # --- candidates ---------------------------------------------------------------------------

    def combine(self, candidate: Candidate, moves: Iterable[Move]) -> Candidate | None:
        """Return the candidate with these moves made, or None where the combination cannot be run."""
        for move in moves:
            candidate = candidate.with_choice(move.strategy, move.choice)
        candidate = normalise(candidate, self.workload, self.strategies)
        if conflict(candidate, self.environment, self.workload, self.strategies) is not None:
            return None
        return candidate

    def why_impossible(self, candidate: Candidate, move: Move) -> str | None:
        """Return the reason why a move cannot be made on a candidate, or None."""
        moved = normalise(candidate.with_choice(move.strategy, move.choice), self.workload, self.strategies)
        return conflict(moved, self.environment, self.workload, self.strategies)

    def complete(self, candidate: Candidate) -> dict[str, Choice]:
        return complete_choices(candidate, self.workload, self.strategies)

    def numerics(self, candidate: Candidate) -> Numerics:
        return numerics_of(candidate, self.workload, self.strategies)

    def unit_roundoff(self, candidate: Candidate) -> float:
        return unit_roundoff_of(candidate, self.environment, self.workload, self.strategies)

    def unit_roundoffs(self) -> tuple[float, ...]:
        """Return the unit roundoffs of all arithmetics that a candidate may compute with, finest first."""
        found = {self.unit_roundoff(Candidate())}
        for move in self.moves:
            candidate = self.combine(Candidate(), [move])
            if candidate is not None:
                found.add(self.unit_roundoff(candidate))
        return tuple(sorted(found))

    def rounds_bias_corrections(self) -> bool:
        """Say whether any candidate may keep its step count on the device, and so compute bias corrections in FP32
        instead of Python's FP64.
        """
        return any(move.strategy == CudaGraphSetting.strategy for move in self.moves)

    def strategy(self, name: str) -> Strategy:
        return strategy_named(name, self.strategies)

    def trial_cost_s(self, candidate: Candidate) -> float:
        """Return the expected extra seconds of a candidate's trial compared with an ordinary trial, before any is
        measured. Both the candidate's choices and those that the user has already made count.
        """
        complete = self.complete(candidate)
        own_s = sum(
            strategy.cost_s(complete[strategy.name], self.workload)
            for strategy in self.strategies
            if strategy.name in candidate.choices or strategy.name in self.workload.current
        )
        return own_s + self._starting_s(candidate, complete)

    def _starting_s(self, candidate: Candidate, complete: Mapping[str, Choice]) -> float:
        """Return the additional seconds of a training script's trial if one of the candidate's choices needs a new
        process; else 0.
        """
        workload, script = self.workload, self.workload.script
        if script is None or not workload.fork_spares_ns:
            return 0.0
        ways = (self.strategy(name).outside(complete[name], script) for name in candidate.choices)
        starts = any(isinstance(outside, Outside) and outside.way is Way.START for outside in ways)
        starts = starts or bool(environment_variables(complete, self.strategies))
        return workload.fork_spares_ns / 1e9 if starts else 0.0

    def compiles_again(self, candidate: Candidate, compiled: Candidate) -> bool:
        """Say whether a candidate needs its own compilation although the candidate `compiled` is already compiled."""
        names = candidate.choices.keys() | compiled.choices.keys()
        return any(
            self.strategy(name).recompiles
            for name in names
            if candidate.choices.get(name) != compiled.choices.get(name)
        )

    def is_same_model(self, candidate: Candidate, other: Candidate) -> bool:
        """Say whether the code compiled for one candidate serves the other."""
        return not self.compiles_again(candidate, other)

    # --- bounds -------------------------------------------------------------------------------

    def bound(self, move: Move, situation: Situation) -> float:
        """Return the maximum saving of a move, as a share of the incumbent's step."""
        strategy = self.strategy(move.strategy)
        return strategy.bound(situation, strategy.complete(move.choice, self.workload))

    def joint_bound(self, moves: Iterable[Move], situation: Situation) -> float:
        """Return the maximum saving of several moves together, as a share of the incumbent's step. In each category,
        only the largest saving of a single move counts.
        """
        found = []
        for move in moves:
            strategy = self.strategy(move.strategy)
            found.append(strategy.savings(situation, strategy.complete(move.choice, self.workload)))
        return total(jointly(*found))

    def memory_ladder(self) -> list[Candidate]:
        """Return candidates that need less memory and lose no information: single choices, then pairs, each from the
        least to the most intrusive, with expensive trials last.

        One of them becomes the reference where the baseline does not fit.
        """
        saving = [m for m in self.moves if self.strategy(m.strategy).memory and not self._needs_consent(m)]
        by_strategy: dict[str, list[Move]] = {}
        for move in saving:
            by_strategy.setdefault(move.strategy, []).append(move)
        names = list(by_strategy)
        pairs = [
            (m, n)
            for first, second in ((a, b) for a in names for b in names if a < b)
            for n in by_strategy[second]
            for m in by_strategy[first]
        ]
        ladder: list[Candidate] = []
        rungs: tuple[Sequence[Sequence[Move]], ...] = ([[move] for move in saving], pairs)
        for moves in rungs:
            rung = [self.combine(Candidate(), together) for together in moves]
            found = [candidate for candidate in rung if candidate is not None and not candidate.is_baseline]
            ladder += sorted(found, key=self.trial_cost_s)
        return ladder

    def _needs_consent(self, move: Move) -> bool:
        return self.numerics(Candidate(choices={move.strategy: move.choice})).needs_consent


def check_names(only: Iterable[str], skip: Iterable[str], strategies: Sequence[Strategy] | None = None) -> None:
    """Refuse names of strategies that do not exist, or that are both to be tried and to be skipped.

    Args:
        strategies: Strategies of the study; None while its workload, which may have knobs, is not known.

    Raises:
        ChoiceError: A name is unknown, or is both to be tried and to be skipped; the message lists the names that
            exist.
    """
    both = sorted(set(only) & set(skip))
    if both:
        raise ChoiceError(f"{', '.join(both)}: named in both --only and --skip; name each strategy in one of them")
    known = [strategy.name for strategy in (STRATEGIES if strategies is None else strategies)]
    for name in (*only, *skip):
        if name not in [*known, KNOBS] and not (strategies is None and is_knob(name)):
            raise ChoiceError(no_such("strategy", name, known))
    if strategies is not None and list(only) == [KNOBS] and not any(map(is_knob, known)):
        raise ChoiceError("only knobs are to be tried, but the workload defines none: set Workload.knobs")


def _is_among(strategy: str, names: Iterable[str]) -> bool:
    return strategy in names or (KNOBS in names and is_knob(strategy))

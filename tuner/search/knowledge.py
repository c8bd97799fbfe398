"""Knowledge of a search so far: results, costs, profiles, and what they imply."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from statistics import fmean

from steptune.tuner.costs.bounds import Situation
from steptune.tuner.estimates import log_rate, log_ratio
from steptune.tuner.objectives import parse_objective
from steptune.tuner.records import Candidate, Choice, Move, TrialResult
from steptune.tuner.search.calm import is_calm
from steptune.tuner.search.effects import Difference, EffectModel, Observation, uncontradicted
from steptune.tuner.search.memory_model import memory_model, pieces_of
from steptune.tuner.search.profile_evidence import profile_log_ratio
from steptune.tuner.search.space import Space
from steptune.tuner.search.starts import cold_compile_s, usual_start_s, warm_compile_s
from steptune.tuner.strategies.situations import situation_of

WORTHWHILE = 0.01
"""Smallest gain that a study looks for, as a share of the rate."""
UNKNOWN_WINDOW_ERROR = 0.05


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of a suggestion: its result, and the result of the companion trial that took turns with it, if any."""

    result: TrialResult
    companion: TrialResult | None = None

    @property
    def spent_s(self) -> float:
        return (self.result.duration_ns + (self.companion.duration_ns if self.companion else 0)) / 1e9

    @property
    def repeated_s(self) -> float:
        """Total seconds of the runs that had to be repeated."""
        return sum(attempt.duration_ns for attempt in self.result.repeated) / 1e9


@dataclass(frozen=True, kw_only=True)
class Priors:
    """Prior knowledge from earlier studies."""

    past_winners: tuple[Candidate, ...] = ()
    past_shares: tuple[dict[str, float], ...] = ()
    """Shares of the step by category in the study of each past winner, measured with the settings before tuning."""
    realisation: dict[str, float] = field(default_factory=dict)
    """Mean ratio of measured gain to the maximum possible gain, by strategy."""
    audits: int = 0
    audit_violations: int = 0


class Knowledge:
    """Outcomes of a study's trials, and what they imply for candidates and moves."""

    def __init__(self, space: Space, reference: Candidate) -> None:
        self.space = space
        self.objective = parse_objective(space.settings.objective)
        self.reference = reference
        self.results: dict[str, list[TrialResult]] = {}
        self.num_trials = 0
        self.spent_s = 0.0
        self._observations: list[Observation] = []
        self._costs: dict[str, list[float]] = {}
        self._cold_s: dict[str, float] = {}
        self._situations: dict[str, Situation] = {}
        self._profiled_in: dict[str, str] = {}
        self._profiled_pairs: set[tuple[str, str]] = set()
        self._model: EffectModel | None = None
        self._memory = memory_model(space, space.settings)

    # --- taking in ----------------------------------------------------------------------------

    def take_in(self, outcome: Outcome, compared_with: Candidate | None = None) -> None:
        result, companion = outcome.result, outcome.companion
        self.num_trials += 1
        self.spent_s += outcome.spent_s + outcome.repeated_s
        self._note_cost(outcome)
        self.results.setdefault(result.candidate.key, []).append(result)
        self._memory.take_in(result, pieces_of(self.space, result.candidate))
        if not result.ok:
            return
        self._look_at_profile(result)
        paired = log_ratio(result, companion) if companion is not None and companion.ok else None
        if paired is not None and companion is not None:
            self._observe(result.candidate, paired.mean, paired.standard_error, companion.candidate)
            self._observe_rate(companion, companion=True)
        else:
            self._observe_rate(result)
        if compared_with is not None and compared_with != result.candidate:
            self._observe_profiles(result.candidate, compared_with)

    def _note_cost(self, outcome: Outcome) -> None:
        """Record a trial's cost as it would be with a warm compilation cache, and its seconds of cold compilation."""
        key, cold_s = outcome.result.candidate.key, cold_compile_s(outcome.result)
        self._costs.setdefault(key, []).append(outcome.spent_s - cold_s + warm_compile_s(cold_s))
        self._cold_s[key] = max(cold_s, self._cold_s.get(key, 0.0))

    def take_in_beside(self, result: TrialResult) -> None:
        """Learn from a run that the search did not request: its time and rate count, but the run does not count against
        the limit of trials.
        """
        self.spent_s += result.duration_ns / 1e9
        self.results.setdefault(result.candidate.key, []).append(result)
        self._memory.take_in(result, pieces_of(self.space, result.candidate))
        if result.ok:
            self._look_at_profile(result)
            self._observe_rate(result)

    def _look_at_profile(self, result: TrialResult) -> None:
        choices = self.space.complete(result.candidate)
        situation = situation_of(result, self.space.workload, self.space.environment, choices)
        if situation is not None and not situation.breakdown.quality.problems:
            self._situations[result.candidate.key] = situation
            self._profiled_in[result.candidate.key] = result.place

    def _observe_rate(self, result: TrialResult, *, companion: bool = False) -> None:
        rate = log_rate(result)
        error = rate.standard_error
        self._observe(result.candidate, rate.mean, error, None, place=result.place, companion=companion)

    def _observe_profiles(self, candidate: Candidate, reference: Candidate) -> None:
        """Learn from the profiles of a pair of candidates, once: further profiles add nothing, and profiles of two
        machines are not comparable.
        """
        if not self.objective.is_rate:  # profiles are of the step's time
            return
        pair = (candidate.key, reference.key)
        ours, theirs = self._situations.get(candidate.key), self._situations.get(reference.key)
        if ours is None or theirs is None or pair in self._profiled_pairs:
            return
        if self._profiled_in[candidate.key] != self._profiled_in[reference.key]:
            return
        evidence = profile_log_ratio(self.space, ours, theirs)
        if evidence is not None:
            self._profiled_pairs.add(pair)
            self._observe(candidate, *evidence, reference, noisy=False)

    def _observe(
        self,
        candidate: Candidate,
        value: float,
        error: float,
        reference: Candidate | None,
        *,
        noisy: bool = True,
        place: str = "",
        companion: bool = False,
    ) -> None:
        self._model = None
        self._observations.append(
            Observation(
                candidate=candidate,
                value=value,
                order=len(self._observations) + 1,
                reference=reference,
                standard_error=error if error < 1.0 else UNKNOWN_WINDOW_ERROR,
                noisy=noisy,
                calm=self.is_calm(candidate),
                reference_calm=reference is not None and self.is_calm(reference),
                place=place,
                companion=companion,
            )
        )

    def is_calm(self, candidate: Candidate) -> bool:
        """Say whether a candidate's profile shows a device that hardly ever waited for the host."""
        situation = self._situations.get(candidate.key)
        return situation is not None and is_calm(situation)

    # --- candidates ---------------------------------------------------------------------------

    @property
    def model(self) -> EffectModel:
        """Effect model of the observations, without profiles that contradict measurements. Rates of companion trials
        count only if some trials were measured alone: they link those trials to the ratios, and would otherwise only
        add drift.
        """
        if self._model is None:
            alone = any(o.reference is None and not o.companion for o in self._observations)
            self._model = EffectModel(uncontradicted([o for o in self._observations if alone or not o.companion]))
        return self._model

    def difference(self, candidate: Candidate, reference: Candidate) -> Difference:
        return self.model.difference(candidate, reference)

    def was_run(self, candidate: Candidate) -> bool:
        return candidate.key in self.results

    def failed(self, candidate: Candidate) -> bool:
        """Say whether a candidate was run and none of its runs counted."""
        return self.was_run(candidate) and not any(result.ok for result in self.results[candidate.key])

    def had_no_effect(self, candidate: Candidate) -> bool:
        """Say whether a choice of the candidate was observed not to take effect: the rate then belongs to another
        configuration.
        """
        return any(without_effect(result, candidate) for result in self.results.get(candidate.key, []))

    def measured(self) -> list[Candidate]:
        """Return the candidates other than the reference with at least one good result."""
        good = [results for results in self.results.values() if any(result.ok for result in results)]
        return [results[0].candidate for results in good if results[0].candidate != self.reference]

    def _out_of_memory(self) -> list[tuple[Candidate, dict[str, Choice]]]:
        """Return the candidates that ran out of memory, each with its choices that occur in no successful run: alone or
        together, these choices need too much memory.
        """
        every = [result for results in self.results.values() for result in results]
        ran = [result.candidate.choices for result in every if result.ok]
        return [
            (r.candidate, {n: c for n, c in r.candidate.choices.items() if not any(o.get(n) == c for o in ran)})
            for r in every
            if r.ran_out_of_memory
        ]

    def known_to_fail(self, candidate: Candidate) -> bool:
        """Say whether earlier results imply that this candidate fails: one of its choices is blamed for a failure, it
        needs at least as much memory as a candidate that ran out of memory, or its micro-batches will not fit.
        """
        if self.will_not_fit(candidate) is not None or self._too_large(candidate):
            return True
        return any(self._to_blame(move) for move in candidate.moves)

    def will_not_fit(self, candidate: Candidate) -> str | None:
        """Return the reason why a candidate's micro-batches do not fit into memory; None where they may fit, or did."""
        if any(result.ok for result in self.results.get(candidate.key, [])):
            return None
        return self._memory.why_not(candidate, pieces_of(self.space, candidate))

    def _to_blame(self, move: Move) -> bool:
        """Say whether a move is to blame for a failure: it never succeeded, and it failed, for a reason other than
        memory, in a candidate whose other choices are all known to run.
        """
        with_it = self._results_with(move)
        if any(result.ok for result in with_it):
            return False
        return any(
            not result.ok
            and not result.ran_out_of_memory
            and self._names(result) in (None, move.strategy)
            and all(
                any(other.ok for other in self._results_with(Move(strategy=name, choice=choice)))
                for name, choice in result.candidate.choices.items()
                if name != move.strategy
            )
            for result in with_it
        )

    def _names(self, result: TrialResult) -> str | None:
        """Return the strategy of the candidate that a failure names by its exception; None if it names none."""
        return next((n for n in result.candidate.choices if self.space.strategy(n).raised(result.failure)), None)

    def _too_large(self, candidate: Candidate) -> bool:
        """Say whether an earlier failure shows that a candidate is too large: the candidate contains the choices that
        made the earlier one run out of memory, and its other choices need at least as much memory as the earlier one's.
        """
        for failed, never_ran in self._out_of_memory():
            suspects = never_ran or failed.choices
            if not suspects or any(candidate.choices.get(name) != choice for name, choice in suspects.items()):
                continue
            beside = _without(candidate, suspects)
            unknown = any(
                self.space.strategy(name).memory and not self._results_with(Move(strategy=name, choice=choice))
                for name, choice in beside.choices.items()
            )
            needed = self.expected_memory_bytes(_without(failed, suspects))
            if not unknown and self.expected_memory_bytes(beside) >= needed:
                return True
        return False

    def _results_with(self, move: Move) -> list[TrialResult]:
        every = (result for results in self.results.values() for result in results)
        return [result for result in every if result.candidate.choices.get(move.strategy) == move.choice]

    def peak_memory_bytes(self, candidate: Candidate) -> int:
        """Return a candidate's largest measured peak memory, in bytes; 0 while it was not measured."""
        return max((r.peak_memory_bytes for r in self.results.get(candidate.key, []) if r.ok), default=0)

    def likely_peak_bytes(self, candidate: Candidate) -> float | None:
        """Return a candidate's peak memory on one rank, in bytes: the largest measured, else the expected one; None if
        too little is known.
        """
        seen = max((r.peak_memory_bytes for r in self.results.get(candidate.key, [])), default=0)
        return seen or self._memory.expected_bytes(candidate, pieces_of(self.space, candidate))

    def expected_memory_bytes(self, candidate: Candidate) -> float:
        """Return a candidate's measured memory, or else the reference's memory plus the measured additions of the
        candidate's choices.
        """
        measured = self.peak_memory_bytes(candidate)
        if measured:
            return measured
        base = self.peak_memory_bytes(self.reference)
        return base + sum(self._added_memory_bytes(name, choice) for name, choice in candidate.choices.items())

    def _added_memory_bytes(self, name: str, choice: Choice) -> float:
        """Return the memory that a choice adds, from two measured candidates that differ only in this choice; 0 without
        such a pair.
        """
        for results in self.results.values():
            candidate = results[0].candidate
            without = candidate.with_choice(name, {})
            ours, theirs = self.peak_memory_bytes(candidate), self.peak_memory_bytes(without)
            if candidate.choices.get(name) == choice and ours and theirs:
                return ours - theirs
        return 0.0

    def expected_cost_s(self, candidate: Candidate, incumbent: Candidate) -> float:
        """Return the expected seconds of one trial: as measured for this candidate, else the incumbent's plus the cost
        of its choices, with compilation where the model changes.
        """
        own = self._costs.get(candidate.key)
        if own:
            return sum(own) / len(own)
        base = self._costs.get(incumbent.key) or self._costs.get(self.reference.key) or [1.0]
        usual, added = self.space.trial_cost_s(incumbent), self.space.trial_cost_s(candidate)
        if not self.space.compiles_again(candidate, incumbent):
            return sum(base) / len(base) + max(0.0, added - usual)
        return sum(base) / len(base) + added * max(1.0, self._slowness(incumbent))

    def _slowness(self, incumbent: Candidate) -> float:
        """Return the ratio of measured to expected compilation time on this machine, from the incumbent or the
        reference.
        """
        expected_s = {c.key: self.space.trial_cost_s(c) for c in (incumbent, self.reference)}
        ratios = (self._cold_s.get(key, 0.0) / seconds for key, seconds in expected_s.items() if seconds)
        return max(ratios, default=1.0)

    def start_s(self, candidate: Candidate) -> float:
        """Return the seconds from the request of a trial to its first window, if its model is already compiled and
        there is no guard.
        """
        return usual_start_s(self.results.get(candidate.key, []))

    def own_situation(self, candidate: Candidate) -> Situation | None:
        """Return the situation (breakdown of the step, choices, workload, machine) from this candidate's own profile;
        None while it has no reliable profile.
        """
        return self._situations.get(candidate.key)

    # --- bounds and noise ---------------------------------------------------------------------

    def situation(self, candidate: Candidate) -> Situation | None:
        """Return the situation of a candidate, or of the reference while the candidate has no profile."""
        return self._situations.get(candidate.key) or self._situations.get(self.reference.key)

    def bound(self, move: Move, incumbent: Candidate) -> float:
        """Return the maximum share of the incumbent's step that a move could save; 1 while nothing was profiled."""
        situation = self.situation(incumbent)
        if not situation:
            return 1.0
        return min(1.0, self.space.bound(move, situation) + self._compile_share([move], incumbent))

    def joint_bound(self, moves: Iterable[Move], incumbent: Candidate) -> float:
        """Return the maximum share of the incumbent's step that several moves together could save; 1 while nothing was
        profiled.
        """
        situation = self.situation(incumbent)
        if not situation:
            return 1.0
        moves = tuple(moves)
        return min(1.0, self.space.joint_bound(moves, situation) + self._compile_share(moves, incumbent))

    def _compile_share(self, moves: Iterable[Move], incumbent: Candidate) -> float:
        """Return the share of the step that moves could save by avoiding the incumbent's compilation, if the objective
        counts compilation; else 0.
        """
        if self.objective.is_rate or not any(self.space.strategy(move.strategy).recompiles for move in moves):
            return 0.0
        good = [result for result in self.results.get(incumbent.key, []) if result.ok and result.startup]
        return max((self.objective.compile_share(result) for result in good), default=0.0)

    def noise(self, incumbent: Candidate) -> float:
        """Return the smallest gain over an incumbent that can be detected with two runs of each of the two
        configurations.
        """
        return self.model.smallest_detectable(calm=self.is_calm(incumbent)) if self._observations else 0.05

    def noise_sd(self, *candidates: Candidate) -> float:
        """Return the standard deviation of the noise between runs of these candidates: the square root of their mean
        variance.
        """
        return math.sqrt(fmean(self.model.noise_of(calm=self.is_calm(candidate)) ** 2 for candidate in candidates))

    def threshold(self, incumbent: Candidate) -> float:
        """Return the minimum gain that must be possible for a trial to be worthwhile: half the smallest detectable
        gain, at least `WORTHWHILE` and at most 5 %.
        """
        return max(WORTHWHILE, min(0.05, self.noise(incumbent) / 2))

    # --- moves --------------------------------------------------------------------------------

    def was_tried(self, move: Move) -> bool:
        """Say whether a candidate with this choice was run, alone or with other choices."""
        return any(results[0].candidate.choices.get(move.strategy) == move.choice for results in self.results.values())

    def untried(self, incumbent: Candidate) -> list[tuple[Move, float]]:
        """Return the legal single moves that were never run, each with the maximum share of the incumbent's step that
        it could save.
        """
        return [(m, self.bound(m, incumbent)) for m in self.space.moves if not self.was_tried(m)]


def _without(candidate: Candidate, names: Container[str]) -> Candidate:
    return Candidate(choices={name: choice for name, choice in candidate.choices.items() if name not in names})


def without_effect(result: TrialResult, candidate: Candidate) -> str:
    """Describe the candidate's choices that did not take effect, with the observation; empty where all did."""
    missing = (effect for effect in result.effects if not effect.took and effect.strategy in candidate.choices)
    return "; ".join(f"{effect.strategy} had no effect: {effect.detail}" for effect in missing)

"""Opponents: what people would use instead, behind the interface of a search. Random search and Optuna's samplers are
in `tuner/search/plain_searches.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from steptune.tuner.estimates import log_rate
from steptune.tuner.records import BASELINE, Move, TrialResult
from steptune.tuner.search.evidence import WHOLE, Evidence
from steptune.tuner.search.gaussian import StepModel
from steptune.tuner.search.history import History, Proposal
from steptune.tuner.search.model_search import ModelSearch


class PlainGaussian(ModelSearch):
    """The additive Gaussian process with expected improvement, without any profile, bound or expectation."""

    def suggest(self, history: History) -> list[Proposal]:
        return super().suggest(self.blind(history))

    @staticmethod
    def blind(history: History) -> History:
        """The same history of a search that was never profiled."""
        return _Blind(**{name: getattr(history, name) for name in History.__dataclass_fields__})


class _Blind(History):
    @property
    def evidence(self) -> Evidence:  # type: ignore[override]
        starts = [replace_breakdowns(result) for result in self.starts]
        return Evidence(self.grid, self.knowledge, starts, {})

    @property
    def model(self) -> StepModel:  # type: ignore[override]
        if "_plain" not in self.__dict__:
            evidence = self.evidence
            assert evidence.categories == [WHOLE]
            self.__dict__["_plain"] = StepModel(evidence.prior(self.incumbent), evidence.measured())
        return self.__dict__["_plain"]


def replace_breakdowns(result: TrialResult) -> TrialResult:
    return msgspec.structs.replace(result, breakdowns=())


class Greedy:
    """One change at a time, the largest bound first; what is faster stays."""

    def __init__(self) -> None:
        self._best, self._fastest = BASELINE, -np.inf

    def update(self, results: Sequence[TrialResult]) -> None:
        for result in results:
            if result.ok and log_rate(result).mean > self._fastest:
                self._best, self._fastest = result.candidate, log_rate(result).mean

    def suggest(self, history: History) -> list[Proposal]:
        base = self._best if history.knowledge.was_run(self._best) else history.grid.reference
        found = []
        for move in history.space.moves:
            candidate = history.space.combine(base, [move])
            if candidate is not None and not history.knowledge.was_run(candidate) and candidate != base:
                found.append((history.knowledge.bound(move, base), candidate))
        found.sort(key=lambda pair: -pair[0])
        return [Proposal(candidate=candidate) for _, candidate in found]


class ExpertList:
    """A list of nine settings, those that usually help most first: kept where faster."""

    def __init__(self) -> None:
        self._best, self._fastest, self._done = BASELINE, -np.inf, 0

    def update(self, results: Sequence[TrialResult]) -> None:
        for result in results:
            self._done += result.candidate != BASELINE
            if result.ok and log_rate(result).mean > self._fastest:
                self._best, self._fastest = result.candidate, log_rate(result).mean

    def suggest(self, history: History) -> list[Proposal]:
        for move in list(self._settings(history))[:9]:
            candidate = history.space.combine(self._best, [move])
            if candidate is not None and candidate != self._best and not history.knowledge.was_run(candidate):
                return [Proposal(candidate=candidate)]
        return []

    def _settings(self, history: History) -> Iterator[Move]:
        """One setting of each parameter, ordered by the part of today's step that it usually saves."""
        best: dict[str, tuple[float, Move]] = {}
        for move in history.space.moves:
            usual = history.space.strategy(move.strategy).usual_realisation
            value = usual * history.knowledge.bound(move, history.grid.reference)
            if value > best.get(move.strategy, (0.0, move))[0]:
                best[move.strategy] = (value, move)
        return (move for _, move in sorted(best.values(), key=lambda pair: -pair[0]))

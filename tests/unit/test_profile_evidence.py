"""Evidence of profiles on a change: none where a device waits for its host, and none that measurements deny."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from builders import sample_environment, sample_facts
from msgspec import structs
from profiled import breakdown_of, situation

from steptune.tuner.costs.bounds import Situation
from steptune.tuner.costs.categories import Category as C
from steptune.tuner.records import Breakdown, Candidate, Choice, StudySettings
from steptune.tuner.search.calm import is_calm
from steptune.tuner.search.effects import EffectModel, Observation, uncontradicted
from steptune.tuner.search.profile_evidence import profile_log_ratio
from steptune.tuner.search.space import Space

FUSED: Choice = {"implementation": "fused"}
FLASH: Choice = {"backend": "flash"}
BASE, OTHER = Candidate(), Candidate(choices={"attention_backend": FLASH})


def evidence(before: Breakdown, after: Breakdown, kind: str, **choices: Choice) -> tuple[float, float] | None:
    space = Space(sample_environment(kind), sample_facts(current={}), StudySettings())
    return profile_log_ratio(space, profiled(after, kind, choices), profiled(before, kind, {}))


def profiled(breakdown: Breakdown, kind: str, choices: dict[str, Choice]) -> Situation:
    return situation(breakdown, device_kind=kind, choices=choices)


class TestAStepThatWaitsForItsHost:
    """Kernels take 40 % of a step that is as long as its launches: halved, they leave it as long as it was."""

    BEFORE = breakdown_of({C.MATMUL: 0.3, C.OPTIMIZER: 0.1, C.HOST: 0.3, C.LAUNCH_LATENCY: 0.3}, device="cuda:0")
    AFTER = breakdown_of({C.MATMUL: 0.15, C.OPTIMIZER: 0.1, C.HOST: 0.375, C.LAUNCH_LATENCY: 0.375}, device="cuda:0")
    CALM = breakdown_of({C.MATMUL: 0.75, C.OPTIMIZER: 0.2, C.HOST: 0.05}, device="cuda:0")

    def test_gains_nothing_by_what_its_kernels_save(self) -> None:
        assert evidence(self.BEFORE, self.AFTER, "cuda", attention_backend=FLASH) is None

    @pytest.mark.parametrize(("before", "after"), [(BEFORE, CALM), (CALM, AFTER)])
    def test_is_not_compared_with_one_that_does_not(self, before: Breakdown, after: Breakdown) -> None:
        assert evidence(before, after, "cuda", attention_backend=FLASH) is None


@pytest.mark.parametrize(("kind", "device"), [("cuda", "cuda:0"), ("cpu", "cpu")])
def test_a_category_that_was_halved_is_seen_where_nothing_waits(kind: str, device: str) -> None:
    """The update takes 0.2 of a millisecond, then half of that: 0.9 ms are left."""
    before = breakdown_of({C.MATMUL: 0.75, C.OPTIMIZER: 0.2, C.HOST: 0.05}, device=device)
    categories = {**before.categories, C.OPTIMIZER.value: before.categories[C.OPTIMIZER.value] // 2}
    after = structs.replace(before, categories=categories, step_time_ns=sum(categories.values()))
    found = evidence(before, after, kind, optimizer_implementation=FUSED)
    assert found is not None
    assert found[0] == pytest.approx(math.log(1 / 0.9))


class TestCalm:
    BUSY = breakdown_of({C.MATMUL: 0.95, C.HOST: 0.05})
    WAITS = breakdown_of({C.MATMUL: 0.6, C.HOST: 0.4})

    def test_is_a_device_that_hardly_waits(self) -> None:
        assert is_calm(situation(self.BUSY, device_kind="cuda"))
        assert not is_calm(situation(self.WAITS, device_kind="cuda"))

    @pytest.mark.parametrize("breakdown", [BUSY, WAITS])
    def test_all_steps_of_a_cpu_are_of_one_class(self, breakdown: Breakdown) -> None:
        """Nothing waits for the host there: it is what computes."""
        assert not is_calm(situation(breakdown, device_kind="cpu"))


class TestWhatMeasurementsDeny:
    RATES = tuple(
        Observation(candidate=candidate, value=7 + noise, order=order, standard_error=0.002)
        for order, (candidate, noise) in enumerate(
            [(BASE, 0.01), (BASE, -0.01), (OTHER, 0.0), (BASE, 0.0), (OTHER, -0.01)], start=1
        )
    )

    def said(self, value: float) -> Observation:
        return Observation(candidate=OTHER, reference=BASE, value=value, order=6, standard_error=0.03, noisy=False)

    def test_a_profile_that_claims_half_as_much_again_does_not_count(self) -> None:
        left = uncontradicted([*self.RATES, self.said(0.5)])
        assert left == list(self.RATES)
        assert EffectModel(left).difference(OTHER, BASE).mean == pytest.approx(0.0, abs=0.02)

    def test_a_profile_that_agrees_sharpens_the_comparison(self) -> None:
        left = uncontradicted([*self.RATES, replace(self.said(0.01), standard_error=0.005)])
        assert len(left) == len(self.RATES) + 1
        without = EffectModel(self.RATES).difference(OTHER, BASE)
        assert EffectModel(left).difference(OTHER, BASE).sd < without.sd

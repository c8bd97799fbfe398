"""Trials of other recipes: larger batches, batches by length, other optimizers, another layout of the parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest
from trial_builders import Prepared, prepare, reference

from steptune.tuner.records import Candidate, FailureKind, TrialResult

pytestmark = pytest.mark.xdist_group("recipes")

TEXTS = reference("texts", "Reading")


one_and_two_ranks = pytest.mark.parametrize("study", [1, 2], indirect=True, ids=["one_rank", "two_ranks"])


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Prepared]]:
    """The study of a number of ranks, prepared once."""
    with ExitStack() as stack:

        @cache
        def prepared(num_ranks: int) -> Prepared:
            made = prepare(TEXTS, tmp_path_factory.mktemp("study"), num_ranks=num_ranks, num_horizon=64)
            stack.callback(made.runner.close)
            return made

        yield prepared


@pytest.fixture
def study(request: pytest.FixtureRequest, studies: Callable[[int], Prepared]) -> Prepared:
    return studies(getattr(request, "param", 1))


def run(study: Prepared, *, lossy: bool, guard: bool = True, **choices: dict[str, object]) -> TrialResult:
    candidate = Candidate(choices=choices)  # type: ignore[arg-type]
    (result,) = study.run(study.spec(candidate, lossy=lossy, guard=guard, profile=False))
    return result


def effect(result: TrialResult, strategy: str) -> str:
    (found,) = [e for e in result.effects if e.strategy == strategy]
    assert found.took, found.detail
    return found.detail


class TestFacts:
    def test_padding_limit_and_odd_sizes_are_found(self, study: Prepared) -> None:
        facts = study.facts
        assert facts.dataset.padding_share is not None
        assert 0.3 < facts.dataset.padding_share < 0.9
        assert facts.max_global_batch == 32
        assert facts.sampling == "shuffled"
        assert facts.model.unaligned_linears == {"8": 2, "64": 0}
        assert not facts.model.has_class_token
        assert facts.model.unaligned_flops == {"8": 1.0, "64": 0.0}


class TestLargerBatch:
    @one_and_two_ranks
    def test_its_windows_count_every_sample_and_its_epochs_have_fewer_steps(self, study: Prepared) -> None:
        """So that rates, in samples or tokens per second, are compared and not steps."""
        plain = study.run_baseline()
        result = run(study, lossy=True, larger_global_batch={"factor": 4, "rule": "sqrt"})
        assert result.failure is None, result.failure
        for window in result.clean_windows:
            assert window.num_samples == 4 * window.num_steps * study.facts.global_batch
        assert (plain.steps_per_epoch, result.steps_per_epoch) == (64, 16)
        assert result.guard is not None
        assert result.guard.passed, result.guard.reason
        effect(result, "larger_global_batch")

    def test_windows_begin_with_the_same_samples_as_the_baselines(self, study: Prepared) -> None:
        """Tokens of a window of n steps are those of the baseline's 4 n steps from the same position."""
        from steptune.tuner.trials.study_files import StudyFiles
        from steptune.tuner.workloads.loading import load_workload

        result = run(study, lossy=True, guard=False, larger_global_batch={"factor": 4, "rule": "none"})
        assert result.failure is None, result.failure
        lengths = load_workload(TEXTS).dataset().lengths
        order = StudyFiles(study.directory).order(0, 1)
        assert order is not None
        for window in result.clean_windows:
            start = window.position // 4 * 4
            batches = [order.batches[(start + k) % len(order.batches)] for k in range(4 * window.num_steps)]
            assert window.num_units == sum(lengths[index] for batch in batches for index in batch)

    def test_it_can_be_cut_into_pieces(self, study: Prepared) -> None:
        result = run(
            study,
            lossy=True,
            guard=False,
            larger_global_batch={"factor": 4, "rule": "sqrt"},
            micro_batch={"num_micro_batches": 4},
        )
        assert result.failure is None, result.failure
        effect(result, "micro_batch")


class TestLengthBalancing:
    @one_and_two_ranks
    def test_windows_span_whole_pools_with_less_padding(self, study: Prepared) -> None:
        result = run(study, lossy=True, guard=False, length_balancing={"pool_batches": 16})
        assert result.failure is None, result.failure
        for window in result.clean_windows:
            assert window.num_steps % 16 == 0
            assert window.num_samples == window.num_steps * study.facts.global_batch
        before, after = map(int, re.findall(r"(\d+)%", effect(result, "length_balancing")))
        assert after < before / 2

    def test_the_guard_sees_that_no_sample_is_lost(self, study: Prepared) -> None:
        result = run(study, lossy=True, length_balancing={"pool_batches": 16}, larger_global_batch={"factor": 2})
        assert result.guard is not None
        checks = {check.name: check for check in result.guard.checks}
        assert checks["same samples as in the original order"].passed
        assert checks["loss horizon"].passed, checks["loss horizon"].detail


class TestOptimizers:
    @pytest.mark.parametrize("algorithm", ["adafactor", "sm3", "lamb"])
    def test_one_that_trains_as_far_passes(self, study: Prepared, algorithm: str) -> None:
        result = run(study, lossy=True, optimizer_algorithm={"algorithm": algorithm})
        assert result.failure is None, result.failure
        effect(result, "optimizer_algorithm")

    def test_one_at_a_rate_that_is_not_its_own_is_rejected(self, study: Prepared) -> None:
        """LARS multiplies Adam's rate by a thousandth: nothing is learnt, and the guard says how much is missing."""
        result = run(study, lossy=True, optimizer_algorithm={"algorithm": "lars"})
        assert result.failure is not None
        assert result.failure.kind is FailureKind.NUMERICS
        assert "of the reference's fall in loss" in result.failure.message


class TestSameTraining:
    """Choices that need no consent, judged step by step."""

    @one_and_two_ranks
    def test_contiguous_parameters(self, study: Prepared) -> None:
        choice = {"implementation": "fused", "contiguous": True}
        result = run(study, lossy=False, optimizer_implementation=choice)
        assert result.failure is None, result.failure
        assert result.guard is not None
        assert {check.kind for check in result.guard.checks} == {"pointwise", "update", "gradient", "state"}
        assert result.guard.passed, result.guard.reason
        effect(result, "optimizer_implementation")

    def test_padded_products(self, study: Prepared) -> None:
        result = run(study, lossy=False, model_recipe={"pad_multiple": 8})
        assert result.failure is None, result.failure
        effect(result, "model_recipe")

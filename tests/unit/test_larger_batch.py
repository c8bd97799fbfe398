"""Larger global batches: the rate of learning, what they could save, and the limit of the user."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import sample_breakdown, sample_environment, sample_facts
from msgspec.structs import replace
from tiny_workloads import Line

from steptune.tuner.costs.bounds import Situation, compute_floor_ns
from steptune.tuner.costs.categories import Category
from steptune.tuner.errors import WorkloadRejectedError
from steptune.tuner.records import Calibration, Candidate, Choice, StudySettings
from steptune.tuner.search.space import Space
from steptune.tuner.strategies import STRATEGIES, strategy_named
from steptune.tuner.strategies.combine import make_plan, normalise
from steptune.tuner.strategies.situations import computation_of
from steptune.tuner.training.assemble import assemble
from steptune.tuner.workloads.validation import validate

STRATEGY = strategy_named("larger_global_batch")


def choices(**changed: Choice) -> dict[str, Choice]:
    return {s.name: {**s.defaults, **changed.get(s.name, {})} for s in STRATEGIES}


class TwoGroups(Line):
    """A scheduler that halves, over two groups with other rates."""

    def model(self) -> torch.nn.Module:
        return torch.nn.Sequential(super().model(), torch.nn.Linear(1, 1))

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        first, *others = [p for _, p in named_parameters]
        return torch.optim.SGD([{"params": [first], "lr": 0.4}, {"params": others}], lr=0.1)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 0.5**count)


class TestRate:
    @pytest.mark.parametrize(("rule", "expected"), [("linear", [1.6, 0.4]), ("sqrt", [0.8, 0.2]), ("none", [0.4, 0.1])])
    def test_every_group_is_scaled_before_the_schedule_is_made(self, rule: str, expected: list[float]) -> None:
        plan = make_plan(choices(larger_global_batch={"factor": 4, "rule": rule}))
        job = assemble(TwoGroups(), plan, device=torch.device("cpu"), batch_sampler=None)
        assert [group["lr"] for group in job.optimizer.param_groups] == pytest.approx(expected)
        job.scheduler.optimizer.step()
        job.scheduler.step()
        assert [group["lr"] for group in job.optimizer.param_groups] == pytest.approx([rate / 2 for rate in expected])

    @pytest.mark.parametrize(("optimizer", "rule"), [("SGD", "linear"), ("AdamW", "sqrt"), ("Adafactor", "sqrt")])
    def test_the_rule_is_that_of_the_optimizer(self, optimizer: str, rule: str) -> None:
        facts = sample_facts(max_global_batch=4 * sample_facts().global_batch)
        facts = replace(facts, optimizer=replace(facts.optimizer, name=optimizer))
        assert {choice["rule"] for choice in STRATEGY.choices(sample_environment("cpu"), facts)} == {rule}

    def test_the_mean_over_the_larger_batch_is_the_step(self) -> None:
        """One step of factor 3 is the step of the whole data's mean gradient, at the scaled rate."""
        plan = make_plan(choices(larger_global_batch={"factor": 3, "rule": "linear"}))
        job = assemble(Line(), plan, device=torch.device("cpu"))
        (batch,) = list(job)
        assert len(batch[0]) == 12
        job.step(batch)
        model = Line().model()
        (model(batch[0]).squeeze(1) - batch[1] - 1).square().mean().backward()
        torch.testing.assert_close(job.model.weight, model.weight - 3 * 0.1 * model.weight.grad)


class TestSpace:
    def facts(self, limit: int | None) -> Any:
        facts = sample_facts(current={}, global_batch=64, max_global_batch=limit, custom_step=False)
        return replace(facts, dataset=replace(facts.dataset, length=10**6))

    def factors(self, limit: int | None) -> list[Any]:
        settings = StudySettings(allow=("recipe",), only=(STRATEGY.name,))  # type: ignore[arg-type]
        space = Space(sample_environment("cpu"), self.facts(limit), settings)
        return [move.choice["factor"] for move in space.moves]

    @pytest.mark.parametrize(
        ("limit", "expected"),
        [(None, []), (64, []), (127, []), (128, [2]), (640, [2, 4, 8, 10]), (1024, [2, 4, 8, 16])],
    )
    def test_has_powers_of_two_up_to_the_limit_and_the_limit(self, limit: int | None, expected: list[int]) -> None:
        assert self.factors(limit) == expected

    def test_is_empty_without_consent(self) -> None:
        space = Space(sample_environment("cpu"), self.facts(640), StudySettings(only=(STRATEGY.name,)))
        assert space.moves == ()
        reasons = {e.reason for e in space.excluded if e.move.strategy == STRATEGY.name}
        assert reasons == {"is recipe: allow it with --allow recipe"}

    def test_a_rule_without_a_factor_is_no_candidate(self) -> None:
        candidate = Candidate(choices={STRATEGY.name: {"rule": "sqrt"}})
        assert normalise(candidate, self.facts(640)).is_baseline


class TestBound:
    def situation(self, **changed: Choice) -> Situation:
        """A quarter each: the optimizer, the host, data, and compute at half of its roofline."""
        shares = {Category.OPTIMIZER: 25, Category.HOST: 25, Category.DATA_WAIT: 25, Category.MATMUL: 25}
        facts = sample_facts()
        facts = replace(facts, batch_bytes=0, model=replace(facts.model, flops_per_step=125, num_parameters=0))
        environment = replace(
            sample_environment("cpu"), num_ranks=1, calibration=Calibration(matmul_flops_per_s={"float32": 1e10})
        )
        breakdown = sample_breakdown(
            categories={c.value: n for c, n in shares.items()},
            num_steps=1,
            step_time_ns=100,
            rescaled={},
            unprofiled_step_time_ns=None,
        )
        return Situation(
            breakdown=breakdown,
            workload=facts,
            environment=environment,
            choices=choices(**changed),
            computation=computation_of(changed),
        )

    def test_is_what_more_samples_can_share(self) -> None:
        """Twice the samples save a half of 25 + 25 paid once a step and 12.5 above the roofline."""
        bound = STRATEGY.bound(self.situation(), {"factor": 2, "rule": "sqrt"})
        assert bound == pytest.approx(0.625 / 2)
        assert STRATEGY.bound(self.situation(), {"factor": 8, "rule": "sqrt"}) == pytest.approx(0.625 * 7 / 8)

    def test_counts_from_the_incumbents_batch(self) -> None:
        """Which computes as many times more: its floor is 25 of 25, so the two fixed parts are left."""
        situation = self.situation(larger_global_batch={"factor": 2, "rule": "sqrt"})
        assert compute_floor_ns(situation) == 2 * compute_floor_ns(self.situation())
        assert STRATEGY.bound(situation, {"factor": 8, "rule": "sqrt"}) == pytest.approx(0.5 * 3 / 4)
        assert STRATEGY.bound(situation, {"factor": 2, "rule": "sqrt"}) == 0.0


class TestWorkload:
    @pytest.mark.parametrize("limit", [3, "many"])
    def test_a_limit_below_todays_batch_is_refused(self, limit: Any) -> None:
        class Limited(Line):
            max_global_batch = limit

        with pytest.raises(WorkloadRejectedError, match=r"Limited.max_global_batch is .*at least global_batch \(4\)"):
            validate(Limited())

    @pytest.mark.parametrize("rate", [0.0, -1, "fast"])
    def test_a_rate_that_is_none_is_refused(self, rate: Any) -> None:
        class Rated(Line):
            learning_rates = {"lars": rate}  # noqa: RUF012

        with pytest.raises(WorkloadRejectedError, match=r"Rated.learning_rates\['lars'\] is .*: it must be a positive"):
            validate(Rated())

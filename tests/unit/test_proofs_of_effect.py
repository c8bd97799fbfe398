"""Proofs of effect that fail where a setting is set and its effect is absent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_workloads import Everything

from steptune.tuner.records import Choice
from steptune.tuner.strategies import STRATEGIES, strategy_named
from steptune.tuner.strategies.combine import make_plan
from steptune.tuner.strategies.optimizer_algorithm.strategy import ALGORITHMS
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.job import TrainingJob

DEFAULTS: dict[str, Choice] = {strategy.name: dict(strategy.defaults) for strategy in STRATEGIES}
ALGORITHM, BATCH = strategy_named("optimizer_algorithm"), strategy_named("larger_global_batch")


class Simple(Everything):
    max_global_batch = 32

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named_parameters], lr=0.01)


class Tokens(Simple):
    """Batches of one row, whose tensors do not count samples."""

    def batch_transform(self, batch: Any) -> Any:
        return batch

    @property
    def collate(self) -> Any:
        return lambda samples: [torch.stack(column)[None] for column in zip(*samples, strict=True)]

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, [column[0] for column in batch])


def job_of(workload: Simple, **choices: Choice) -> TrainingJob:
    torch.manual_seed(0)
    plan = make_plan({**DEFAULTS, **{name: {**DEFAULTS[name], **choice} for name, choice in choices.items()}})
    return assemble(workload, plan, device=torch.device("cpu"))


def step(job: TrainingJob) -> TrainingJob:
    job.step(next(iter(job.loader)))
    return job


class TestAlgorithm:
    @pytest.mark.parametrize("name", ALGORITHMS)
    def test_that_whose_step_ran_took(self, name: str) -> None:
        job = step(job_of(Simple(), optimizer_algorithm={"algorithm": name}))
        assert ALGORITHM.took_effect(ALGORITHM.evidence(job), {"algorithm": name}).took
        others = [other for other in ALGORITHMS if other != name]
        assert not any(ALGORITHM.took_effect(ALGORITHM.evidence(job), {"algorithm": other}).took for other in others)

    @pytest.mark.parametrize("name", ALGORITHMS)
    def test_one_that_never_stepped_did_not(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        job = job_of(Simple(), optimizer_algorithm={"algorithm": name})
        other = torch.optim.SGD(job.model.parameters(), lr=0.01)
        monkeypatch.setattr(job.optimizer, "step", other.step)
        assert not ALGORITHM.took_effect(ALGORITHM.evidence(step(job)), {"algorithm": name}).took


class TestLargerBatch:
    @pytest.mark.parametrize("workload", [Simple, Tokens])
    @pytest.mark.parametrize("rule", ["linear", "sqrt", "none"])
    def test_a_step_that_took_in_more_at_its_rate_took(self, workload: type[Simple], rule: str) -> None:
        choice: Choice = {"factor": 2, "rule": rule}
        effect = BATCH.took_effect(BATCH.evidence(step(job_of(workload(), larger_global_batch=choice))), choice)
        assert effect.took
        assert effect.detail == "a step processed 16 samples"

    @pytest.mark.parametrize("workload", [Simple, Tokens])
    def test_a_loader_that_gives_today_s_batches_did_not(self, workload: type[Simple]) -> None:
        choice: Choice = {"factor": 2, "rule": "linear"}
        job = job_of(workload(), larger_global_batch=choice)
        job.loader = job_of(workload()).loader
        effect = BATCH.took_effect(BATCH.evidence(step(job)), choice)
        assert not effect.took
        assert effect.detail == "a step processed 8 samples; expected 16 samples"

    def test_a_step_that_was_given_a_part_did_not(self) -> None:
        choice: Choice = {"factor": 2, "rule": "linear"}
        job = job_of(Simple(), larger_global_batch=choice)
        job.step([column[:8] for column in next(iter(job.loader))])
        assert not BATCH.took_effect(BATCH.evidence(job), choice).took

    def test_a_rate_that_stayed_did_not(self) -> None:
        choice: Choice = {"factor": 2, "rule": "linear"}
        job = step(job_of(Simple(), larger_global_batch=choice))
        for group in job.optimizer.param_groups:
            group["lr"] = 0.01
        effect = BATCH.took_effect(BATCH.evidence(job), choice)
        assert not effect.took
        assert effect.detail == "rule is none, not linear"

    def test_today_s_batches_took_whatever_their_tensors_count(self) -> None:
        for workload in (Simple(), Tokens()):
            job = step(job_of(workload))
            assert BATCH.took_effect(BATCH.evidence(job), DEFAULTS["larger_global_batch"]).took

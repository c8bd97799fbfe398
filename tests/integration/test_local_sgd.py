"""local_sgd: ranks that step alone train as the same steps in one process do, and have one model where it counts."""

import copy
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from builders import sample_environment, sample_facts
from rank_jobs import Trained, build, emulated, train
from ranks import Ranks
from tiny_workloads import Everything, TinyViT
from torch import nn
from trial_builders import prepare, reference

from steptune.tuner.errors import WorkloadRejectedError
from steptune.tuner.records import Candidate, GuardCheck
from steptune.tuner.strategies import Supported, Unsupported, strategy_named
from steptune.tuner.strategies.combine import conflict, normalise
from steptune.tuner.training.job import TrainingJob

pytestmark = pytest.mark.xdist_group("ranks")

EVERY, WARM_UP, NUM_STEPS = 4, 3, 15
"""Averages after the seventh, eleventh and last step."""
LOCAL = {"local_sgd": {"every": EVERY, "warm_up_steps": WARM_UP}}
INSIDE = {"local_sgd": {"every": EVERY, "warm_up_steps": WARM_UP, "inside": True}}


class Normalised(Everything):
    """With batch statistics, momentum and clipping."""

    max_grad_norm = 0.5

    def model(self) -> nn.Module:
        layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 36, 4)]
        return nn.Sequential(*layers)

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named_parameters], lr=0.1, momentum=0.9)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)


class Plain(Everything):
    """Without anything that is each rank's own."""

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named_parameters], lr=0.1)


def steps(job: TrainingJob, batches: list[Any]) -> list[float]:
    losses = torch.stack([job.step(batch) for batch in batches]).double()
    dist.all_reduce(losses)
    return (losses / dist.get_world_size()).tolist()


def own_parameters(job: TrainingJob) -> list[torch.Tensor]:
    model: Any = job.model
    return [p.detach().clone() for p in model.module.parameters()]


def watched(rank: int, make_workload: type, choices: dict[str, Any]) -> dict[str, Any]:
    """Losses, and after every step whether ranks agree: all of them, and those next to each other."""
    job = build(rank, make_workload(), choices)
    losses, agree, pairs = [], [], []
    for batch in itertools.islice(job.loader, NUM_STEPS):
        losses += steps(job, [batch])
        flat = torch.cat([p.flatten() for p in own_parameters(job)])
        everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, flat)
        agree.append(all(torch.equal(one, everyone[0]) for one in everyone))
        pairs.append(torch.equal(flat, everyone[rank ^ 1]))
    return {"losses": losses, "agree": agree, "pairs": pairs, "state": job.state_dict()}


def average(tensors: Iterable[Iterable[torch.Tensor]]) -> None:
    """Over the workers; whole numbers stay as they are."""
    for together in zip(*tensors, strict=True):
        if together[0].is_floating_point():
            mean = torch.stack(together).mean(0)
            for value in together:
                value.copy_(mean)


class Simulated:
    """Two workers in one process: the definition, the slow way.

    Args:
        num_ranks: How many share every batch; the first half of them is one worker.
    """

    def __init__(self, workload: Everything, num_ranks: int) -> None:
        torch.manual_seed(0)
        self.workload = workload
        self.num_ranks = num_ranks
        self.models = [workload.model() for _ in range(2)]
        for model in self.models[1:]:
            model.load_state_dict(self.models[0].state_dict())
        self.optimizers = [workload.optimizer(iter(model.named_parameters())) for model in self.models]
        self.schedulers = [workload.scheduler(optimizer) for optimizer in self.optimizers]

    def step(self, batch: Any, number: int) -> float:
        if number <= WARM_UP:  # DDP sends the first rank's statistics to all
            for value, other in zip(*(model.buffers() for model in self.models), strict=True):
                other.copy_(value)
        ranks = [[leaf[rank :: self.num_ranks] for leaf in batch] for rank in range(self.num_ranks)]
        half = self.num_ranks // 2
        parts = [[torch.cat(leaves) for leaves in zip(*both, strict=True)] for both in (ranks[:half], ranks[half:])]
        losses = [self.workload.loss(model, part) for model, part in zip(self.models, parts, strict=True)]
        for loss in losses:
            loss.backward()
        if number <= WARM_UP:
            average([p.grad for p in model.parameters()] for model in self.models)
        for model, optimizer, scheduler in zip(self.models, self.optimizers, self.schedulers, strict=True):
            if self.workload.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.workload.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
        if number > WARM_UP and (number - WARM_UP) % EVERY == 0:
            average(model.state_dict().values() for model in self.models)
        return sum(float(loss.detach()) for loss in losses) / len(losses)


def simulated(workload: Everything, num_ranks: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    workers = Simulated(workload, num_ranks)
    data = workload.dataset()
    indices = [list(range(n * 8 % 32, n * 8 % 32 + 8)) for n in range(NUM_STEPS)]
    batches = [[leaf[chosen] for leaf in data.tensors] for chosen in indices]
    losses = [workers.step(batch, number + 1) for number, batch in enumerate(batches)]
    return losses, workers.models[0].state_dict()


class TestTraining:
    @pytest.mark.parametrize("workload", [Plain, Everything])
    def test_is_that_of_workers_who_step_alone_and_average(self, ranks: Ranks, workload: type[Everything]) -> None:
        losses, state = simulated(workload(), 2)
        for found in ranks.run(2, watched, workload, LOCAL):
            assert found["losses"] == pytest.approx(losses, rel=2e-5)
            for name, value in state.items():
                torch.testing.assert_close(found["state"][name], value, rtol=1e-3, atol=1e-4)

    def test_averages_statistics_and_keeps_momentum_clipping_and_schedule(self, ranks: Ranks) -> None:
        losses, state = simulated(Normalised(), 2)
        (first, second) = ranks.run(2, watched, Normalised, LOCAL)
        assert first["losses"] == pytest.approx(losses, rel=2e-5)
        for name, value in state.items():
            torch.testing.assert_close(first["state"][name], value, rtol=1e-3, atol=1e-4)
            assert torch.equal(first["state"][name], second["state"][name])

    def test_ranks_part_after_the_warm_up_and_agree_after_every_average(self, ranks: Ranks) -> None:
        averaged = {7, 11, 15}
        for found in ranks.run(2, watched, Everything, LOCAL):
            assert found["agree"] == [number <= WARM_UP or number in averaged for number in range(1, NUM_STEPS + 1)]

    def test_with_gradients_averaged_inside_hosts_only_hosts_part(self, ranks: Ranks) -> None:
        losses, _ = simulated(Everything(), 4)
        for found in ranks.run(4, emulated, 2, watched, Everything, INSIDE):
            assert found["losses"] == pytest.approx(losses, rel=2e-5)
            assert found["agree"] == [number <= WARM_UP or number in {7, 11, 15} for number in range(1, NUM_STEPS + 1)]
            assert all(found["pairs"]), "ranks 0 and 1 share a host, and 2 and 3"

    def test_in_the_warm_up_is_ordinary_training_bit_for_bit(self, ranks: Ranks) -> None:
        later = {"local_sgd": {"every": 2, "warm_up_steps": 100}}
        for found, plain in zip(
            ranks.run(2, watched, Normalised, later), ranks.run(2, watched, Normalised, {}), strict=True
        ):
            assert found["losses"] == plain["losses"]

    @pytest.mark.parametrize(
        "others",
        [
            {"precision": {"level": "O2", "dtype": "bfloat16"}},
            {"precision": {"level": "O3", "dtype": "bfloat16"}},
            {"optimizer_implementation": {"contiguous": True}},
            {"memory_format": {"layout": "channels_last"}},
            {"micro_batch": {"num_micro_batches": 2}},
            {"ddp_buckets": {"static_graph": True, "bucket_views": True}},
            {"ddp_buckets": {"find_unused": True}},
        ],
        ids=lambda others: "-".join(str(value) for value in next(iter(others.values())).values()),
    )
    def test_goes_with_others_and_ranks_agree_after_averages(self, ranks: Ranks, others: dict[str, Any]) -> None:
        for found in ranks.run(2, watched, Partly, {**LOCAL, **others}):
            assert [n + 1 for n, agree in enumerate(found["agree"]) if agree][WARM_UP:] == [7, 11, 15]
        trained: Trained = ranks.run(2, train, Partly, {**LOCAL, **others})[0]
        for name in ("local_sgd", *others):
            assert trained.effects[name][0], trained.effects[name][1]

    def test_between_averages_nothing_is_sent(self, ranks: Ranks) -> None:
        """Four local steps have the all-reduce of one average; ordinary ones have that of a bucket each, and the
        broadcasts of two formats of buffers.
        """
        assert ranks.run(2, collectives, {}) == [{"allreduce": 4, "broadcast": 8}] * 2
        assert ranks.run(2, collectives, LOCAL) == [{"allreduce": 1}] * 2


class Partly(Everything):
    """A layer that is not trained, and a scalar."""

    def model(self) -> nn.Module:
        model = TinyViT()
        model.patchify.requires_grad_(False)
        return model


def collectives(rank: int, choices: dict[str, Any]) -> dict[str, int]:
    """Number of calls by kind in the fourth step and the three after it."""
    job = build(rank, Normalised(), choices)
    batches = list(itertools.islice(job.loader, WARM_UP + EVERY))
    for batch in batches[:WARM_UP]:
        job.step(batch)
    with torch.profiler.profile() as profile:
        for batch in batches[WARM_UP:]:
            job.step(batch)
    counts: dict[str, int] = {}
    for event in profile.key_averages():
        if event.key.startswith("gloo:"):
            name = event.key.removeprefix("gloo:").replace("all_reduce", "allreduce")
            counts[name] = counts.get(name, 0) + event.count
    return counts


def checkpointed(rank: int, make_workload: type, num_steps: int) -> dict[str, Any]:
    """A checkpoint, what this rank has itself, and losses that follow in this job and in one that is built from it."""
    job = build(rank, make_workload(), LOCAL)
    batches = list(itertools.islice(job.loader, num_steps + 8))
    steps(job, batches[:num_steps])
    own = own_parameters(job)
    checkpoint = copy.deepcopy(
        {"model": job.state_dict(), "optimizer": job.optimizer_state_dict(), "rank": job.rank_state_dict()}
    )
    unchanged = all(torch.equal(one, other) for one, other in zip(own, own_parameters(job), strict=True))
    straight = steps(job, batches[num_steps:])

    class Restored(make_workload):  # type: ignore[misc, valid-type]
        def model(self) -> nn.Module:
            model: nn.Module = super().model()
            model.load_state_dict(checkpoint["model"])
            return model

    again = build(rank, Restored(), LOCAL)
    again.load_optimizer_state_dict(checkpoint["optimizer"])
    again.load_rank_state_dict(checkpoint["rank"])
    first = copy.deepcopy(checkpoint)
    return {
        **first,
        "own": own,
        "unchanged": unchanged,
        "straight": straight,
        "again": steps(again, batches[num_steps:]),
    }


class TestCheckpoints:
    def test_between_averages_have_the_average_of_all_and_leave_ranks_as_they_are(self, ranks: Ranks) -> None:
        first, second = ranks.run(2, checkpointed, Everything, 9)
        assert first["unchanged"]
        assert second["unchanged"]
        pairs = zip(first["own"], second["own"], strict=True)
        averages = [torch.stack([one, other]).mean(0) for one, other in pairs]
        for found in (first, second):
            for value, average in zip(found["model"].values(), averages, strict=True):
                torch.testing.assert_close(value, average)
        assert not torch.equal(first["own"][0], second["own"][0])
        states, others = first["optimizer"]["state"], second["optimizer"]["state"]
        assert all(torch.equal(states[n][name], others[n][name]) for n in states for name in states[n])
        assert {float(values["step"]) for values in states.values()} == {9.0}

    def test_at_an_average_go_on_bit_for_bit_without_a_state_of_the_optimizers(self, ranks: Ranks) -> None:
        """The count of steps goes along: in a new warm-up nothing would be local."""
        for found in ranks.run(2, checkpointed, Plain, 11):
            assert found["rank"]["kept"] == {"num_steps": 11}
            assert found["again"] == found["straight"]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"sharding": {"mode": "full"}}, "needs the whole model"),
        ({"sharding": {"mode": "zero1"}}, "needs the whole model"),
        ({"gradient_compression": {"method": "bf16"}}, "sends no gradients that could be compressed"),
        ({"hierarchical_allreduce": {"levels": 2}}, "inside=True"),
        ({"precision": {"level": "O1", "dtype": "float16"}}, "would skip different steps"),
        ({"precision": {"level": "O1", "dtype": "bfloat16"}}, None),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_go_together_is_refused(other: dict[str, Any], reason: str | None) -> None:
    found = conflict(Candidate(choices={**LOCAL, **other}), sample_environment(), sample_facts(current={}))
    assert (found is None) == (reason is None)
    assert reason is None or reason in str(found)


@pytest.mark.parametrize(
    ("choice", "environment", "facts", "reason"),
    [
        ({"every": 4}, {"num_ranks": 1}, {}, "requires more than one rank"),
        ({"every": 4}, {}, {"custom_step": True}, "training_step"),
        ({"every": 4, "inside": True}, {}, {}, "leaves no local step"),
        ({"every": 4, "inside": True}, {"num_ranks": 4, "num_hosts": 4}, {}, "4 ranks on 4 hosts"),
        ({"every": 4, "inside": True}, {"num_ranks": 4, "num_hosts": 2}, {}, None),
        ({"every": 4}, {}, {}, None),
    ],
)
def test_is_tried_where_ranks_can_step_alone(
    choice: dict[str, Any], environment: dict[str, Any], facts: dict[str, Any], reason: str | None
) -> None:
    strategy = strategy_named("local_sgd")
    support = strategy.supports(
        {**strategy.defaults, **choice},
        sample_environment(**environment),
        sample_facts(**{"current": {}, "custom_step": False, **facts}),
    )
    assert support == Supported() if reason is None else isinstance(support, Unsupported) and reason in support.reason


def test_without_local_steps_its_parameters_mean_nothing() -> None:
    candidate = Candidate(choices={"local_sgd": {"every": 1, "inside": True, "warm_up_steps": 9}})
    assert normalise(candidate, sample_facts(current={})).choices == {}


def test_a_job_that_reached_no_average_is_noticed() -> None:
    strategy = strategy_named("local_sgd")
    choice = {**strategy.defaults, "every": 8}
    effect = strategy.took_effect({**choice, "steps": 11, "averages": 0}, choice)
    assert (effect.took, effect.detail) == (False, "0 averages in 7 local steps after 4")


class Alone(Everything):
    current: ClassVar = {"local_sgd": {"every": 4}}


def test_todays_ranks_cannot_step_alone(tmp_path: Path) -> None:
    from steptune.tuner.trials.inspection import InspectRequest, inspect_workload

    class Ignored:
        def send(self, message: Any) -> None:
            pass

    request = InspectRequest(workload=f"{__name__}:Alone", study_directory=str(tmp_path), num_ranks=2)
    with pytest.raises(WorkloadRejectedError, match="lets ranks step independently"):
        inspect_workload(request, 0, 1, Ignored())  # type: ignore[arg-type]


def test_a_trial_is_judged_and_measured_in_its_local_steps(tmp_path: Path) -> None:
    """Its loss over the horizon judges it, and windows that span whole rounds measure it."""
    study = prepare(reference("regression", "Regression"), tmp_path, num_ranks=2, num_horizon=24)
    candidate = Candidate(choices={"local_sgd": {"every": 7}})
    try:
        (result,) = study.run(study.spec(candidate, lossy=True))
    finally:
        study.runner.close()
    assert result.failure is None, result.failure
    assert result.guard is not None
    checks: dict[str, GuardCheck] = {check.name: check for check in result.guard.checks}
    assert checks.keys() == {"loss horizon"}
    assert checks["loss horizon"].passed
    assert result.clean_windows
    assert all(window.num_steps % 7 == 0 for window in result.clean_windows)
    (effect,) = [effect for effect in result.effects if effect.strategy == "local_sgd"]
    assert effect.took, effect.detail

"""parallel_mesh: laid over ranks by products, layers or experts, a model trains as in one process."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from mesh_workloads import PIPELINE, SCHEDULES, Bert, Experts, Gpt2, Small, Vit, mesh
from rank_jobs import Trained, build, train, train_alone
from ranks import RankFailed, Ranks
from torch.utils.data import Subset

from steptune.tuner.training.job import TrainingJob
from steptune.tuner.training.mesh import layer_costs

pytestmark = pytest.mark.xdist_group("ranks")


class Clipped(Small):
    max_grad_norm = 0.1


TOLERANCE = 2e-5
"""Limit for a loss near four after 20 updates of AdamW, each with some hundred roundings of FP32 in another order."""


def evenly(rank: int, function: Callable[..., Any], *args: Any) -> Any:
    """Run a rank where every block takes the same time: a busy machine's clock cuts a pipeline anywhere."""
    with mock.patch.object(layer_costs, "_now", side_effect=itertools.count()):
        return function(rank, *args)


def check(found: list[Trained], alone: Trained, *, rel: float = TOLERANCE) -> None:
    for trained in found:
        took, detail = trained.effects["parallel_mesh"]
        assert took, detail
        assert trained.losses == pytest.approx(alone.losses, rel=rel)
        assert trained.state.keys() == alone.state.keys()
        for name, value in alone.state.items():
            torch.testing.assert_close(trained.state[name], value, rtol=2e-3, atol=2e-3, msg=name)


class Partly(Small):
    """A block, and what comes before all of them, that are not trained."""

    def model(self) -> Any:
        model = super().model()
        model.transformer.wpe.requires_grad_(False)
        model.transformer.h[0].requires_grad_(False)
        return model


class Frozen(Small):
    """Workload with parts that are not trained: what comes before the blocks, and all but the last of them."""

    num_trained = 1
    fields: ClassVar[dict[str, Any]] = {"tie_word_embeddings": False}

    def model(self) -> Any:
        model = super().model()
        frozen = (model.transformer.wte, model.transformer.wpe, *model.transformer.h[: 4 - self.num_trained])
        for part in frozen:
            part.requires_grad_(False)
        model.transformer.h[0].ln_1.bias.requires_grad_(self.num_trained == 2)
        return model


class HalfFrozen(Frozen):
    num_trained = 2


class Grouped(Small):
    """Decay of matrices only, and a rate that falls."""

    max_grad_norm = 0.5

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        named = list(named_parameters)
        groups = [
            {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=1e-3)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


class Uneven(Small):
    """Batches of 8 and, at the end of every epoch, of 5."""

    drop_last = False

    def dataset(self) -> Any:
        return Subset(super().dataset(), range(21))


class Dropping(Small):
    fields: ClassVar[dict[str, Any]] = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}


each_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda choice: choice["schedule"])
KINDS = [{"tensor": 2}, PIPELINE]
each_kind = pytest.mark.parametrize("choice", KINDS, ids=lambda choice: next(iter(choice)))


class TestTensor:
    @pytest.mark.parametrize("workload", [Gpt2, Bert, Vit, Clipped])
    def test_is_the_training_of_one_process(self, ranks: Ranks, workload: type) -> None:
        check(ranks.run(2, evenly, train, workload, mesh(tensor=2)), train_alone(workload))


class TestPipeline:
    @each_schedule
    def test_is_the_training_of_one_process(self, ranks: Ranks, schedule: dict[str, Any]) -> None:
        """The token embedding is the last product too: both ends of the pipeline train it."""
        check(ranks.run(2, evenly, train, Gpt2, mesh(pipeline=2, **schedule)), train_alone(Gpt2))

    @pytest.mark.parametrize("workload", [Bert, Vit])
    def test_of_other_models(self, ranks: Ranks, workload: type) -> None:
        check(ranks.run(2, evenly, train, workload, mesh(**PIPELINE)), train_alone(workload))

    def test_that_begins_with_what_is_not_trained(self, ranks: Ranks) -> None:
        """Layers before the first trained block get no gradient; a stage without one has nothing to update."""
        check(ranks.run(2, evenly, train, HalfFrozen, mesh(**PIPELINE)), train_alone(HalfFrozen))
        with pytest.raises(RankFailed, match="rank 0 of the pipeline would have no trainable parameter"):
            ranks.run(2, evenly, train, Frozen, mesh(**PIPELINE))


class TestBoth:
    @pytest.mark.parametrize(
        "choice",
        [
            {"tensor": 2},
            {"tensor": 4},
            PIPELINE,
            {"pipeline": 2, "schedule": "interleaved", "micro_batches": 2},
            {"pipeline": 4, "schedule": "1f1b", "micro_batches": 4},
            {"pipeline": 2, "tensor": 2, "micro_batches": 4},
        ],
        ids=lambda choice: "-".join(f"{name}{value}" for name, value in choice.items()),
    )
    def test_on_four_ranks_with_data_parallelism_for_the_rest(self, ranks: Ranks, choice: dict[str, Any]) -> None:
        check(ranks.run(4, evenly, train, Grouped, mesh(**choice)), train_alone(Grouped))

    @each_kind
    @pytest.mark.parametrize("workload", [Clipped, Grouped, Partly, Uneven])
    def test_with_clipping_groups_frozen_parameters_or_a_shorter_last_batch(
        self, ranks: Ranks, workload: type, choice: dict[str, Any]
    ) -> None:
        check(ranks.run(2, evenly, train, workload, mesh(**choice)), train_alone(workload))

    @each_kind
    def test_with_dropout_copies_stay_the_same(self, ranks: Ranks, choice: dict[str, Any]) -> None:
        """Masks are others than in one process; those of what all ranks compute are the same on all of them."""
        first, second = ranks.run(2, evenly, train, Dropping, mesh(**choice))
        assert first.losses == pytest.approx(train_alone(Dropping).losses, rel=0.1)
        for name, value in first.state.items():
            assert torch.equal(value, second.state[name]), name

    @each_kind
    @pytest.mark.parametrize(
        "other",
        [
            {"activation_checkpointing": {"every": 1}},
            {"precision": {"level": "O1", "dtype": "bfloat16"}},
            {"device_prefetch": {"ahead": False}, "optimizer_implementation": {"implementation": "foreach"}},
        ],
        ids=lambda other: next(iter(other)),
    )
    def test_with_other_strategies(self, ranks: Ranks, choice: dict[str, Any], other: dict[str, Any]) -> None:
        """Against the same in one process, in bfloat16 within some of its roundings."""
        alone = train_alone(Gpt2, other, 5)
        trained: Trained = ranks.run(2, evenly, train, Gpt2, {**mesh(**choice), **other}, 5)[0]
        tolerance = 5 * 2.0**-8 if "precision" in other else TOLERANCE
        assert trained.losses == pytest.approx(alone.losses, rel=tolerance)
        for name in ("parallel_mesh", *other):
            assert trained.effects[name][0], trained.effects[name][1]


class Crowded(Experts):
    """With too little room, and the loss that balances them."""

    def __init__(self) -> None:
        super().__init__()
        self._shape = replace(self._shape, capacity_factor=0.5)
        self._balance = 0.1


class FewSamples(Crowded):
    """Batches of 8 and of 5, of which one rank has 3 and the other 2."""

    drop_last = False

    def dataset(self) -> Any:
        return Subset(super().dataset(), range(21))


class TestExperts:
    @pytest.mark.parametrize(("num_ranks", "degree"), [(2, 2), (4, 2), (4, 4)])
    def test_is_the_training_of_one_process(self, ranks: Ranks, num_ranks: int, degree: int) -> None:
        """Where no token is dropped; the norm that gradients are clipped to is that of all experts."""
        check(ranks.run(num_ranks, evenly, train, Experts, mesh(expert=degree)), train_alone(Experts))

    @pytest.mark.parametrize("workload", [Crowded, FewSamples])
    def test_drops_what_data_parallelism_drops(self, ranks: Ranks, workload: type) -> None:
        """Every rank routes its own tokens, by its own capacity."""
        plain = ranks.run(2, evenly, train, workload, {})[0]
        check(ranks.run(2, evenly, train, workload, mesh(expert=2)), plain)

    def test_of_micro_batches_is_that_of_the_whole(self, ranks: Ranks) -> None:
        choices = {**mesh(expert=2), "micro_batch": {"num_micro_batches": 2}}
        check(ranks.run(2, evenly, train, Experts, choices), train_alone(Experts))


def steps(job: TrainingJob, count: int) -> list[float]:
    losses = torch.stack([job.step(batch) for batch in itertools.islice(job.loader, count)]).double()
    if dist.is_initialized():
        dist.all_reduce(losses)
        losses /= dist.get_world_size()
    return losses.tolist()


def saved(rank: int, choice: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint after three steps."""
    job = build(rank, Grouped(), mesh(**choice))
    steps(job, 3)
    return {"model": job.state_dict(), "optimizer": job.optimizer_state_dict()}


def continued(rank: int, choice: dict[str, Any], checkpoint: dict[str, Any]) -> list[float]:
    """From a checkpoint."""

    class Restored(Grouped):
        def model(self) -> Any:
            model = super().model()
            model.load_state_dict(checkpoint["model"])
            return model

    job = build(rank, Restored(), mesh(**choice))
    job.load_optimizer_state_dict(copy.deepcopy(checkpoint["optimizer"]))  # torch goes on in the tensors it is given
    return steps(job, 3)


@each_kind
def test_checkpoints_move_from_and_to_one_process(ranks: Ranks, choice: dict[str, Any]) -> None:
    of_one, of_ranks = saved(0, {}), ranks.run(2, evenly, saved, choice)
    for other in of_ranks:
        assert other["model"].keys() == of_one["model"].keys()
        assert [g["params"] for g in other["optimizer"]["param_groups"]] == [
            g["params"] for g in of_one["optimizer"]["param_groups"]
        ]
        for number, state in of_one["optimizer"]["state"].items():
            for name, value in state.items():
                torch.testing.assert_close(other["optimizer"]["state"][number][name], value, rtol=1e-3, atol=1e-4)
    expected = continued(0, {}, of_one)
    assert continued(0, {}, of_ranks[1]) == pytest.approx(expected, rel=TOLERANCE)
    for losses in ranks.run(2, evenly, continued, choice, of_one):
        assert losses == pytest.approx(expected, rel=TOLERANCE)

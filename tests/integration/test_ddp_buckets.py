"""ddp_buckets: which buckets there are, unused and frozen parameters, accumulation, compilation."""

import itertools
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from builders import sample_breakdown, sample_environment, sample_facts
from msgspec.structs import replace
from rank_jobs import Trained, build, train, train_alone
from ranks import RankFailed, Ranks
from tiny_workloads import Everything, Products, TinyViT
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from steptune.tuner.costs.bounds import Situation
from steptune.tuner.costs.categories import Category
from steptune.tuner.hardware import find_compiler
from steptune.tuner.records import Candidate, ModelFacts
from steptune.tuner.strategies import Supported, Unsupported, strategy_named
from steptune.tuner.strategies.combine import conflict

pytestmark = pytest.mark.xdist_group("ranks")

MIB = 2**20
TWO = sample_environment("cpu")
MODEL = ModelFacts(num_parameters=3000, parameter_bytes=12_000, num_parameter_tensors=30, num_blocks=2)
LARGE = sample_facts(model=replace(MODEL, parameter_bytes=10**9), current={}, custom_step=False, batch_splittable=True)


class Layers(Everything):
    """Six layers of one MiB each."""

    def model(self) -> nn.Module:
        layers = [nn.Linear(512, 512, bias=False) for _ in range(6)]
        return nn.Sequential(nn.Flatten(), nn.Linear(192, 512, bias=False), *layers, nn.Linear(512, 4, bias=False))


class Unused(Everything):
    """A layer that no loss sees, and one that is not trained."""

    def model(self) -> nn.Module:
        model = TinyViT()
        model.unused = nn.Linear(4, 4)
        model.patchify.requires_grad_(False)
        return model


def sizes(rank: int, choice: dict[str, Any]) -> list[int]:
    """Sizes of the buckets once DDP has laid them out in the order in which gradients come."""
    job = build(rank, Layers(), {"ddp_buckets": choice})
    for batch in itertools.islice(job.loader, 3):
        job.step(batch)
    return strategy_named("ddp_buckets").evidence(job)["buckets"]


class TestSizes:
    def test_the_first_bucket_and_the_others_have_their_own(self, ranks: Ranks) -> None:
        """From the end of the model: a layer is put into a bucket while that is below its size."""
        first, *others = ranks.run(2, sizes, {"bucket_cap_mb": 3, "first_bucket_mb": 2})[0]
        assert 2 * MIB <= first < 3 * MIB
        assert [size // MIB for size in others[:-1]] == [3] * (len(others) - 1)

    def test_by_default_they_are_those_of_pytorch(self, ranks: Ranks) -> None:
        own, told = (ranks.run(2, sizes, choice)[0] for choice in ({}, {"bucket_cap_mb": 25, "first_bucket_mb": 1}))
        assert own == told
        assert own[0] < 2 * MIB

    def test_those_that_make_the_same_buckets_are_not_tried(self) -> None:
        strategy = strategy_named("ddp_buckets")
        of_40_mib = replace(LARGE, model=replace(LARGE.model, parameter_bytes=40 * MIB))
        tried = {
            choice["bucket_cap_mb"]
            for choice in strategy.choices(TWO, of_40_mib)
            if strategy.supports(choice, TWO, of_40_mib) == Supported()
        }
        assert tried == {1, 5, 25, 50}
        small = strategy.supports({**strategy.defaults, "bucket_cap_mb": 5}, TWO, replace(LARGE, model=MODEL))
        assert small == Unsupported("no effect: all gradients already fit into the first bucket")


class TestUnusedParameters:
    @pytest.mark.parametrize("choice", [{"find_unused": True}, {"static_graph": True}], ids=lambda c: next(iter(c)))
    def test_train_as_in_one_process(self, ranks: Ranks, choice: dict[str, Any]) -> None:
        """A gradient of zeros in place of none would let weight decay change the layer."""
        alone = train_alone(Unused)
        trained: Trained = ranks.run(2, train, Unused, {"ddp_buckets": choice})[0]
        assert trained.losses == pytest.approx(alone.losses, rel=2e-5)
        for name in ("unused.weight", "patchify.weight"):
            assert torch.equal(trained.state[name], alone.state[name])

    def test_are_looked_for_where_the_first_step_showed_them(self, ranks: Ranks, tmp_path: Any) -> None:
        from steptune.tuner.trials.inspection import InspectRequest, inspect_workload

        class Ignored:
            def send(self, message: Any) -> None:
                pass

        for num_ranks, wanted in ((1, {}), (2, {"ddp_buckets": {"find_unused": True}})):
            request = InspectRequest(
                workload=f"{__name__}:Unused", study_directory=str(tmp_path / str(num_ranks)), num_ranks=num_ranks
            )
            facts = inspect_workload(request, 0, 1, Ignored())  # type: ignore[arg-type]
            assert facts.model.num_unused_parameters == 2
            assert facts.current == wanted

    def test_a_choice_that_does_not_look_for_them_is_refused(self) -> None:
        facts = replace(
            LARGE,
            model=replace(LARGE.model, num_unused_parameters=2),
            current={"ddp_buckets": {"find_unused": True}},
        )
        strategy = strategy_named("ddp_buckets")
        for choice in strategy.choices(TWO, facts):
            looks = choice["find_unused"] or choice["static_graph"]
            support = strategy.supports(choice, TWO, facts)
            assert isinstance(support, Supported) or not looks or "buckets" in support.reason
            if not looks:
                assert isinstance(support, Unsupported)
                assert "2 parameters get no gradient" in support.reason


class Counting:
    """A communication hook that counts the buckets it reduces."""

    def __init__(self) -> None:
        self.num_reduced = 0

    def __call__(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self.num_reduced += 1
        return allreduce_hook(None, bucket)


def reductions(rank: int, num_pieces: int) -> int:
    """All-reduces of one step."""
    job = build(rank, Everything(), {"micro_batch": {"num_micro_batches": num_pieces}})
    hook = Counting()
    job.model.register_comm_hook(None, hook.__call__)  # type: ignore[operator]
    job.step(next(iter(job.loader)))
    return hook.num_reduced


class TestAccumulation:
    def test_only_the_last_micro_batch_is_reduced(self, ranks: Ranks) -> None:
        assert ranks.run(2, reductions, 4) == ranks.run(2, reductions, 1) == [1, 1]

    @pytest.mark.parametrize("views", [False, True])
    def test_trains_as_one_process_with_the_whole_batch(self, ranks: Ranks, views: bool) -> None:
        choices = {"micro_batch": {"num_micro_batches": 2}, "ddp_buckets": {"bucket_views": views}}
        trained: Trained = ranks.run(2, train, Everything, choices)[0]
        assert trained.losses == pytest.approx(train_alone(Everything).losses, rel=2e-5)

    def test_does_not_go_with_a_static_graph(self) -> None:
        """The first backward pass would fail inside PyTorch."""
        candidate = Candidate(choices={"ddp_buckets": {"static_graph": True}, "micro_batch": {"num_micro_batches": 2}})
        assert "records its static graph in the first backward pass" in str(conflict(candidate, TWO, LARGE))


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("scope", ["whole", "regional"])
def test_a_compiled_model_trains_as_one_process(ranks: Ranks, scope: str) -> None:
    """The user's module is compiled, not DDP around it, which is PyTorch's own code: TorchDynamo skips that."""
    choices = {
        "compile": {"mode": "default", "scope": scope},
        "ddp_buckets": {"static_graph": True, "bucket_views": True},
    }
    trained: Trained = ranks.run(2, train, Products, choices, 5)[0]
    assert trained.losses == pytest.approx(train_alone(Products, num_steps=5).losses, rel=2e-5)
    assert trained.effects["compile"][0], trained.effects["compile"][1]
    assert trained.effects["ddp_buckets"][0]


def test_only_what_a_choice_changes_bounds_it() -> None:
    """One millisecond in each category, of which there are 23."""
    shares = dict.fromkeys(Category, 1_000_000)
    breakdown = sample_breakdown(
        categories=shares, step_time_ns=sum(shares.values()), rescaled={}, unprofiled_step_time_ns=None
    )
    strategy = strategy_named("ddp_buckets")

    def bound(today: dict[str, Any], **changes: Any) -> float:
        choices = {"ddp_buckets": {**strategy.defaults, **today}}
        situation = Situation(breakdown=breakdown, workload=LARGE, environment=TWO, choices=choices)
        return len(shares) * strategy.bound(situation, {**choices["ddp_buckets"], **changes})

    assert bound({}, bucket_cap_mb=5) == pytest.approx(1)
    assert bound({}, bucket_views=True) == pytest.approx(3)
    assert bound({}, static_graph=True) == pytest.approx(1)
    assert bound({"find_unused": True}, find_unused=False) == pytest.approx(3)


def fail(rank: int) -> None:
    """One rank raises while the other waits for it."""
    if rank == 1:
        raise ValueError("out of step")
    dist.barrier()


def test_a_rank_that_raises_is_told_and_the_next_group_is_whole(ranks: Ranks) -> None:
    """The harness of these tests: nothing that goes wrong on a rank is lost."""
    with pytest.raises(RankFailed, match="out of step"):
        ranks.run(2, fail)
    assert ranks.run(2, reductions, 1) == [1, 1]


def die(rank: int) -> None:
    os._exit(3)


def test_a_rank_that_dies_is_told_and_the_next_group_is_whole(ranks: Ranks) -> None:
    """The one that dies first may do so while the other still joins the group, which then fails there."""
    with pytest.raises(RankFailed, match=r"rank [01]: died without a word"):
        ranks.run(2, die)
    assert ranks.run(2, reductions, 1) == [1, 1]

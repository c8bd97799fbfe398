"""hierarchical_allreduce: two emulated hosts with two ranks each average as one group does."""

import itertools

import pytest
import torch
import torch.distributed as dist
from builders import sample_environment, sample_facts
from rank_jobs import Trained, build, emulated, train, train_alone
from ranks import RankFailed, Ranks
from tiny_workloads import Everything, TinyViT
from torch import nn

from steptune.tuner.emulation import HOSTS_VARIABLE, num_emulated_hosts
from steptune.tuner.errors import PlatformError
from steptune.tuner.records import Candidate
from steptune.tuner.strategies import strategy_named
from steptune.tuner.strategies.combine import conflict
from steptune.tuner.training.communication import hierarchy_of
from steptune.tuner.training.compression.lane import Lane
from steptune.tuner.training.hierarchy import Hierarchy
from steptune.tuner.training.hosts import host_of_ranks, make_levels, members_of

pytestmark = pytest.mark.xdist_group("ranks")

TWO_LEVELS = {"hierarchical_allreduce": {"levels": 2}}


class Wide(Everything):
    def model(self) -> nn.Module:
        return TinyViT(width=64)


def average(rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """In two levels, and flat."""
    hierarchy = Hierarchy(make_levels(), Lane(torch.device("cpu")), None)
    torch.manual_seed(rank)
    values = torch.randn(size)
    flat = values.clone()
    dist.all_reduce(flat)
    hierarchy.average(values, 0)
    return values, flat / dist.get_world_size()


def places(rank: int) -> tuple[list[int], list[int]]:
    """The ranks inside and between."""
    levels = make_levels()
    return dist.get_process_group_ranks(levels.inside), dist.get_process_group_ranks(levels.between)


def sent_between(rank: int) -> tuple[float, int, int]:
    """How many times fewer bytes, of how many, and of how many gradients in all."""
    choices = {**TWO_LEVELS, "gradient_compression": {"method": "bf16"}}
    job = build(rank, Wide(), choices)
    for batch in itertools.islice(job.loader, 1):
        job.step(batch)
    hierarchy = hierarchy_of(job.model)
    assert hierarchy is not None
    assert hierarchy.compression is not None
    return (
        hierarchy.compression.factor,
        hierarchy.compression.dense_bytes,
        sum(4 * p.numel() for p in job.model.parameters()),
    )


class TestAverage:
    @pytest.mark.parametrize("size", [1000, 1001, 1])
    def test_is_that_of_all_ranks(self, ranks: Ranks, size: int) -> None:
        """The tensor may or may not be cut into as many parts as a host has ranks."""
        answers = ranks.run(4, emulated, 2, average, size)
        for values, flat in answers:
            assert torch.equal(values, answers[0][0]), "all ranks have the same"
            torch.testing.assert_close(values, flat, rtol=1e-6, atol=1e-6)

    def test_trains_as_one_process_does(self, ranks: Ranks) -> None:
        alone = train_alone(Wide)
        trained: Trained
        for trained in ranks.run(4, emulated, 2, train, Wide, TWO_LEVELS):
            assert trained.losses == pytest.approx(alone.losses, rel=2e-5)
            assert trained.effects["hierarchical_allreduce"] == (True, "2 hosts with 2 ranks each")

    def test_many_buckets_and_micro_batches_keep_their_order(self, ranks: Ranks) -> None:
        """Their reductions overlap the backward pass and one another's."""
        choices = {
            **TWO_LEVELS,
            "ddp_buckets": {"bucket_cap_mb": 1, "bucket_views": True},
            "micro_batch": {"num_micro_batches": 2},
        }
        trained: Trained = ranks.run(4, emulated, 2, train, Wide, choices)[0]
        assert trained.losses == pytest.approx(train_alone(Wide).losses, rel=2e-5)


class TestHosts:
    def test_ranks_are_grouped_by_host_and_by_their_place_on_it(self, ranks: Ranks) -> None:
        assert ranks.run(4, emulated, 2, places) == [
            ([0, 1], [0, 2]),
            ([0, 1], [1, 3]),
            ([2, 3], [0, 2]),
            ([2, 3], [1, 3]),
        ]

    def test_ranks_that_are_interleaved_over_hosts_are_found(self) -> None:
        assert members_of(["b", "a", "b", "a"]) == [(0, 2), (1, 3)]

    def test_without_emulation_all_ranks_here_share_a_host(self, ranks: Ranks) -> None:
        assert len(set(ranks.run(2, real_hosts)[0])) == 1

    def test_hosts_of_different_size_are_refused(self, ranks: Ranks) -> None:
        with pytest.raises(RankFailed, match="the same number of ranks on every host, got 2, 1"):
            ranks.run(3, emulated, 2, places)

    @pytest.mark.parametrize("text", ["none", "0", "-1", ""])
    def test_a_number_that_is_none_is_refused(self, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
        monkeypatch.setenv(HOSTS_VARIABLE, text)
        with pytest.raises(PlatformError, match="must be a number of hosts"):
            num_emulated_hosts()


def real_hosts(rank: int) -> list[str]:
    return host_of_ranks()


class TestCompression:
    @pytest.mark.parametrize("method", ["fp16", "bf16", "int8", "one_bit"])
    def test_between_hosts_trains(self, ranks: Ranks, method: str) -> None:
        choices = {**TWO_LEVELS, "gradient_compression": {"method": method}}
        trained: Trained = ranks.run(4, emulated, 2, train, Wide, choices)[0]
        assert sum(trained.losses[-4:]) < sum(trained.losses[:4])
        for name in choices:
            assert trained.effects[name][0], trained.effects[name][1]

    def test_is_of_the_parts_that_go_between_hosts(self, ranks: Ranks) -> None:
        """Each of two ranks of a host sends half of the gradients, in half as many bytes."""
        for factor, dense_bytes, gradient_bytes in ranks.run(4, emulated, 2, sent_between):
            assert factor == 2.0
            assert dense_bytes == pytest.approx(gradient_bytes / 2, rel=1e-3)

    @pytest.mark.parametrize("method", ["powersgd", "dgc"])
    def test_of_whole_tensors_is_refused(self, method: str) -> None:
        candidate = Candidate(choices={**TWO_LEVELS, "gradient_compression": {"method": method}})
        facts = sample_facts(current={}, custom_step=False)
        assert "needs whole gradient tensors" in str(conflict(candidate, sample_environment(), facts))


@pytest.mark.parametrize(
    ("num_ranks", "num_hosts", "reason"),
    [
        (1, 1, "requires more than one rank"),
        (4, 1, "all ranks are on one host"),
        (4, 3, "same number of ranks on every host: 4 ranks on 3 hosts"),
        (2, 2, "at least 2 ranks on each host, got 1"),
        (4, 2, None),
    ],
)
def test_is_tried_where_hosts_have_several_ranks(num_ranks: int, num_hosts: int, reason: str | None) -> None:
    environment = sample_environment(num_ranks=num_ranks, num_hosts=num_hosts)
    support = strategy_named("hierarchical_allreduce").supports({"levels": 2}, environment, sample_facts(current={}))
    assert reason is None or reason in support.reason
    assert (reason is None) == (not hasattr(support, "reason"))

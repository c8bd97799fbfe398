"""Ranks that a launcher dealt out to hosts in turn: what Steptune makes of them goes host by host."""

import warnings
from unittest.mock import patch

import pytest
import torch.distributed as dist
from rank_jobs import build, train, train_alone
from tiny_workloads import Everything

from steptune.tuner.export.apply import check_order
from steptune.tuner.training.hosts import make_levels, ring_group

pytestmark = pytest.mark.xdist_group("ranks")

TWO_LEVELS = {"hierarchical_allreduce": {"levels": 2}}


def dealt_out(rank, function, *args):
    """On two hosts, the even ranks on one of them."""
    with patch("steptune.tuner.training.hosts.platform.node", lambda: f"host{rank % 2}"):
        return function(rank, *args)


def groups(rank):
    levels = make_levels()
    return tuple(dist.get_process_group_ranks(group) for group in (ring_group(), levels.inside, levels.between))


def reducing_group(rank, choices):
    """In the order in which a ring goes through it, and this rank's place in that."""
    job = build(rank, Everything(), choices)
    if "sharding" in choices:
        (mesh,) = {parameter.device_mesh for parameter in job.model.parameters()}
        return mesh.mesh.tolist(), mesh.get_local_rank()
    return dist.get_process_group_ranks(job.model.process_group), dist.get_rank(job.model.process_group)


def test_groups_go_host_by_host(ranks):
    whole = [0, 2, 1, 3]
    assert ranks.run(4, dealt_out, groups) == [
        (whole, [0, 2], [0, 1]),
        (whole, [1, 3], [0, 1]),
        (whole, [0, 2], [2, 3]),
        (whole, [1, 3], [2, 3]),
    ]


def without_other_orders(rank):
    """Ring group and warnings of a torch whose groups are always sorted."""

    def new_group(ranks=None, timeout=None, backend=None):
        raise AssertionError("a sorted group would be no other")

    with patch("torch.distributed.new_group", new_group), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        group = ring_group()
    return group is dist.group.WORLD, [str(warning.message) for warning in caught]


def test_where_torch_sorts_every_group_it_stays_as_launched_and_says_so(ranks):
    for is_default, (message,) in ranks.run(2, one_by_one, without_other_orders):
        assert is_default
        assert "cannot reorder ranks within a process group: start ranks host by host" in message


def one_by_one(rank, function):
    """With the hosts of three ranks, of which the first and the last are on one."""
    with patch("steptune.tuner.training.hosts.host_of_ranks", lambda: ["a", "b", "a"]):
        return function(rank)


def warned(rank):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_order(rank, "gloo")
    return [str(warning.message) for warning in caught if warning.category is UserWarning]


def test_who_applies_a_recommendation_is_told_once(ranks):
    first, *others = ranks.run(4, dealt_out, warned)
    assert len(first) == 1
    assert "are on hosts 0, 1, 0, 1: a ring in this order has up to 2 edges out of one host (1 is enough)" in first[0]
    assert "--distribution=block" in first[0]
    assert others == [[], [], []]
    assert ranks.run(4, warned) == [[]] * 4


def test_ranks_in_order_keep_the_default_group(ranks):
    assert ranks.run(4, is_default) == [True] * 4


def is_default(rank):
    return ring_group() is dist.group.WORLD


@pytest.mark.parametrize("choices", [{}, {"sharding": {"mode": "full"}}], ids=["ddp", "fsdp"])
def test_gradients_are_reduced_in_that_order(ranks, choices):
    assert ranks.run(4, dealt_out, reducing_group, choices) == [([0, 2, 1, 3], place) for place in (0, 2, 1, 3)]


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"sharding": {"mode": "full"}},
        TWO_LEVELS,
        {"gradient_compression": {"method": "bf16"}},
        {"gradient_compression": {"method": "int8"}},
    ],
    ids=["ddp", "fsdp", "two levels", "bf16", "int8"],
)
def test_it_is_the_same_training(ranks, choices):
    """Rounding, or what 16 and 8 bits leave."""
    tolerance = 0.05 if "gradient_compression" in choices else 1e-5
    alone = train_alone(Everything, num_steps=5)
    for trained in ranks.run(4, dealt_out, train, Everything, choices, 5):
        assert trained.losses == pytest.approx(alone.losses, rel=tolerance)

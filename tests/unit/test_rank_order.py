"""In which order ranks are placed on hosts, and what it costs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptune.tuner.network.collective_costs import num_crossing
from steptune.tuner.network.finding import Level
from steptune.tuner.network.rank_order import examine_order, is_in_order, numbered, ring_order


@pytest.mark.parametrize(
    ("hosts", "order"),
    [
        (("a", "a", "b", "b"), (0, 1, 2, 3)),
        (("a", "b", "a", "b"), (0, 2, 1, 3)),
        (("b", "a", "a", "b"), (0, 3, 1, 2)),
        (("a", "b", "c", "a", "b", "c"), (0, 3, 1, 4, 2, 5)),
        (("a",), (0,)),
    ],
)
def test_ranks_of_a_host_follow_one_another(hosts, order):
    assert ring_order(hosts) == order
    assert is_in_order(hosts) == (order == tuple(range(len(hosts))))


@given(st.lists(st.integers(0, 4), min_size=2, max_size=16))
def test_in_ring_order_a_host_is_left_once(hosts):
    order = ring_order(hosts)
    assert sorted(order) == list(range(len(hosts)))
    assert num_crossing([hosts[rank] for rank in order]) == (len(set(hosts)) > 1)


def test_hosts_are_numbered_as_they_come():
    assert numbered(["b", "a", "b", "c"]) == (0, 1, 0, 2)


class TestFinding:
    def test_in_order_it_says_how_many_are_where(self):
        assert examine_order(("a", "a"), "gloo").found == "2 ranks on one host"
        assert examine_order((0, 0, 1, 1), "nccl").level is Level.OK

    def test_interleaved_ranks_are_a_problem_that_says_its_cost_and_its_fix(self):
        found = examine_order(("a", "b", "c") * 2, "gloo")
        assert found.level is Level.PROBLEM
        assert (
            found.found
            == "ranks 0 to 5 are on hosts 0, 1, 2, 0, 1, 2: a ring in this order has up to 2 edges out of one host (1 "
            "is enough)"
        )
        assert "2 times as many bytes" in found.effect
        assert "--distribution=block" in found.fix

    def test_nccl_lays_its_rings_by_hosts_itself(self):
        found = examine_order(("a", "b", "a", "b"), "nccl")
        assert found.level is Level.NOTE
        assert "except with NCCL" in found.effect

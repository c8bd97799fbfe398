"""Costs of collectives on given links."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptune.tuner.network.collective_costs import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    bus_bytes_per_s,
    bus_factor,
    flat_all_to_all_ns,
    flat_ring_ns,
    num_crossing,
    ring_ns,
    two_level_all_reduce_ns,
)
from steptune.tuner.records import Link

MB = 10**6
US = 1_000
FAST = Link(kind="NV18", latency_ns=2 * US, bytes_per_s=100e9, call_ns=10 * US)
SLOW = Link(kind="network", latency_ns=30 * US, bytes_per_s=1e9, call_ns=20 * US)
ONE_BYTE_PER_NS = Link(kind="loopback", latency_ns=100, bytes_per_s=1e9)
IN_ORDER, INTERLEAVED = (0, 0, 1, 1), (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("name", "size", "factor"),
    [
        ("all_reduce", 4, 1.5),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 8, 0.875),
        ("all_to_all", 2, 0.5),
        ("broadcast", 8, 1.0),
        ("send", 2, 1.0),
        ("all_reduce", 1, 0.0),
    ],
)
def test_bus_factors(name, size, factor):
    assert bus_factor(name, size) == factor


@pytest.mark.parametrize(
    ("collective", "expected_ns"),
    [(ALL_REDUCE, 6 * (100 + 1000)), (REDUCE_SCATTER, 3 * 1100), (ALL_GATHER, 3 * 1100), (ALL_TO_ALL, 3 * 1100)],
)
def test_a_ring_passes_chunks_in_steps(collective, expected_ns):
    """4000 bytes over 4 ranks at a byte per nanosecond: chunks of 1000, 100 ns of latency each."""
    assert ring_ns(collective, 4000, 4, ONE_BYTE_PER_NS) == expected_ns


def test_a_call_costs_its_constant_part_once():
    link = Link(kind="loopback", latency_ns=100, bytes_per_s=1e9, call_ns=7)
    assert ring_ns(ALL_REDUCE, 4000, 4, link) == 7 + 6 * 1100


def test_nobody_to_exchange_with_costs_nothing():
    assert ring_ns(ALL_REDUCE, MB, 1, SLOW) == 0
    assert flat_ring_ns(ALL_REDUCE, MB, (0,), None, None) == 0
    assert flat_all_to_all_ns(MB, (0,), None, None) == 0


def test_bus_bandwidth_of_a_ring_without_latency_is_that_of_the_link():
    link = Link(kind="loopback", latency_ns=0, bytes_per_s=3e9)
    for collective in (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL):
        duration_ns = ring_ns(collective, 10 * MB, 8, link)
        assert bus_bytes_per_s(collective, 10 * MB, 8, duration_ns) == pytest.approx(3e9)


def test_a_flat_ring_on_one_host_is_a_ring():
    assert flat_ring_ns(ALL_REDUCE, MB, (0, 0, 0), FAST, None) == pytest.approx(ring_ns(ALL_REDUCE, MB, 3, FAST))


def test_a_flat_ring_goes_at_the_pace_of_its_slowest_link():
    assert flat_ring_ns(ALL_REDUCE, MB, IN_ORDER, FAST, SLOW) == pytest.approx(ring_ns(ALL_REDUCE, MB, 4, SLOW))


def test_interleaved_ranks_double_the_traffic_between_hosts():
    large = 1000 * MB
    in_order, interleaved = (flat_ring_ns(ALL_REDUCE, large, h, FAST, SLOW) for h in (IN_ORDER, INTERLEAVED))
    assert (num_crossing(IN_ORDER), num_crossing(INTERLEAVED)) == (1, 2)
    assert interleaved / in_order == pytest.approx(2, rel=1e-3)


@pytest.mark.parametrize(
    ("host_of_rank", "expected"),
    [((0, 0), 0), ((0, 1), 1), ((0, 0, 0, 1, 1, 1), 1), ((0, 1, 2, 0, 1, 2), 2), ((0, 1) * 4, 4), ((0, 0, 1, 0), 1)],
)
def test_edges_of_the_ring_that_leave_a_host(host_of_rank, expected):
    assert num_crossing(host_of_rank) == expected


def test_two_levels_send_each_byte_between_hosts_about_once():
    """2 hosts of 2 ranks: a host sends half the message twice, a flat ring three quarters twice. 1.5 times as much."""
    network = Link(kind="network", latency_ns=0, bytes_per_s=1e9)
    endless = Link(kind="NV18", latency_ns=0, bytes_per_s=1e18)
    flat = flat_ring_ns(ALL_REDUCE, 100 * MB, IN_ORDER, endless, network)
    levels = two_level_all_reduce_ns(100 * MB, 2, 2, endless, network)
    assert levels == pytest.approx(0.1e9, rel=1e-6)
    assert flat / levels == pytest.approx(1.5, rel=1e-6)


def test_two_levels_of_compressed_parts_send_less_between_hosts_only():
    network = Link(kind="network", latency_ns=0, bytes_per_s=1e9)
    whole = two_level_all_reduce_ns(100 * MB, 2, 2, ONE_BYTE_PER_NS, network)
    half = two_level_all_reduce_ns(100 * MB, 2, 2, ONE_BYTE_PER_NS, network, sent_part=0.5)
    inside = sum(ring_ns(c, 100 * MB, 2, ONE_BYTE_PER_NS) for c in (REDUCE_SCATTER, ALL_GATHER))
    assert half - inside == pytest.approx((whole - inside) / 2)


def test_two_levels_pay_for_three_calls():
    """Where both links are the same, the constant parts of two more calls are all that differs for nothing sent."""
    link = Link(kind="loopback", latency_ns=0, bytes_per_s=1e9, call_ns=50 * US)
    assert flat_ring_ns(ALL_REDUCE, 0, IN_ORDER, link, link) == 50 * US
    assert two_level_all_reduce_ns(0, 2, 2, link, link) == 150 * US


def test_an_all_to_all_shares_the_network_of_its_host():
    """2 hosts of 2 ranks: a rank sends half of its message to the other host, where both ranks' share the way out."""
    network = Link(kind="network", latency_ns=0, bytes_per_s=1e9)
    assert flat_all_to_all_ns(4000, IN_ORDER, ONE_BYTE_PER_NS, network) == pytest.approx(4000)
    assert flat_all_to_all_ns(4000, (0, 0, 0, 0), ONE_BYTE_PER_NS, None) == ring_ns(
        ALL_TO_ALL, 4000, 4, ONE_BYTE_PER_NS
    )


HOSTS = st.lists(st.integers(0, 3), min_size=2, max_size=12)


@given(HOSTS, st.floats(0, 1e9), st.sampled_from([ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER]))
def test_no_order_of_ranks_is_faster_than_that_of_their_hosts(hosts, message_bytes, collective):
    slower = flat_ring_ns(collective, message_bytes, hosts, FAST, SLOW)
    assert flat_ring_ns(collective, message_bytes, sorted(hosts), FAST, SLOW) <= slower
    assert num_crossing(sorted(hosts)) == (len(set(hosts)) > 1)


@given(HOSTS, st.floats(1, 1e9))
def test_a_ring_is_what_its_steps_add_up_to(hosts, message_bytes):
    """Against a walk along the edges: what leaves a host in a step shares its network, a step ends with its last."""
    ranks = len(hosts)
    chunk = message_bytes / ranks
    edges = [(hosts[rank], hosts[(rank + 1) % ranks]) for rank in range(ranks)]
    leaving = {host: sum(a == host != b for a, b in edges) for host in hosts}
    slowest_ns = max(
        FAST.latency_ns + chunk / FAST.bytes_per_s * 1e9
        if a == b
        else SLOW.latency_ns + leaving[a] * chunk / SLOW.bytes_per_s * 1e9
        for a, b in edges
    )
    call_ns = max(FAST.call_ns if a == b else SLOW.call_ns for a, b in edges)
    expected_ns = call_ns + 2 * (ranks - 1) * slowest_ns
    assert math.isclose(flat_ring_ns(ALL_REDUCE, message_bytes, hosts, FAST, SLOW), expected_ns, rel_tol=1e-9)

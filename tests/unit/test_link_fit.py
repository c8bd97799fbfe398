"""A link is found again from collectives that were timed on it."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptune.tuner.errors import RunnerError
from steptune.tuner.network.collective_costs import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, ring_ns
from steptune.tuner.network.link_fit import fit_link
from steptune.tuner.records import CollectiveTiming, Link

SIZES = tuple(4**power << 10 for power in range(1, 9))
COLLECTIVES = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)


def timings_on(link: Link, num_ranks: int, *, num_sharing: int = 1, noise: float = 0.0, seed: int = 0):
    """Timings as the model has them, each off by up to a share that is drawn."""
    draw = random.Random(seed)
    return [
        CollectiveTiming(
            collective=collective,
            num_ranks=num_ranks,
            message_bytes=size,
            duration_ns=round(
                ring_ns(collective, size, num_ranks, link, num_sharing) * (1 + draw.uniform(-noise, noise))
            ),
        )
        for collective in COLLECTIVES
        for size in SIZES
    ]


LINKS = st.builds(
    Link,
    kind=st.just("network"),
    latency_ns=st.floats(5e3, 1e5),
    bytes_per_s=st.floats(5e7, 1e11),
    call_ns=st.floats(0, 5e5),
)
SEEN = st.builds(
    Link,
    kind=st.just("network"),
    latency_ns=st.floats(5e3, 5e4),
    bytes_per_s=st.floats(5e7, 5e10),
    call_ns=st.floats(0, 1e5),
)
"""Their bandwidth is what the largest messages take, whatever the noise."""


@given(LINKS, st.sampled_from([2, 4, 8]), st.integers(1, 8))
def test_latency_bandwidth_and_call_come_back(link, num_ranks, num_sharing):
    found = fit_link(timings_on(link, num_ranks, num_sharing=num_sharing), kind="network", num_sharing=num_sharing)
    assert found.bytes_per_s == pytest.approx(link.bytes_per_s, rel=0.01)
    assert found.latency_ns == pytest.approx(link.latency_ns, rel=0.01)
    assert found.call_ns == pytest.approx(link.call_ns, rel=0.01, abs=0.01 * link.latency_ns)
    assert found.fit_residual < 1e-3


@given(SEEN, st.sampled_from([2, 4, 8]), st.integers(0, 10**6))
def test_noise_of_measurement_moves_costs_little(link, num_ranks, seed):
    """Each time is off by up to 10 %; what the fit predicts for any message is not off by much more.

    Latency and call alone are not compared: with two ranks, noise moves what one of them has to the other.
    """
    found = fit_link(timings_on(link, num_ranks, noise=0.1, seed=seed), kind="network")
    for size in SIZES:
        assert ring_ns(ALL_REDUCE, size, num_ranks, found) == pytest.approx(
            ring_ns(ALL_REDUCE, size, num_ranks, link), rel=0.2
        )
    assert 0 < found.fit_residual < 0.2


def test_a_point_that_was_disturbed_counts_little():
    link = Link(kind="network", latency_ns=50e3, bytes_per_s=1e9, call_ns=0)
    timings = timings_on(link, 4)
    disturbed = [
        CollectiveTiming(
            collective=t.collective, num_ranks=4, message_bytes=t.message_bytes, duration_ns=3 * t.duration_ns
        )
        if number in (3, 11)
        else t
        for number, t in enumerate(timings)
    ]
    found = fit_link(disturbed, kind="network")
    assert found.bytes_per_s == pytest.approx(1e9, rel=0.05)
    assert found.latency_ns + found.call_ns == pytest.approx(50e3, rel=0.2)
    assert found.fit_residual > 0.1


def test_the_points_are_kept():
    timings = timings_on(Link(kind="network", latency_ns=50e3, bytes_per_s=1e9), 2)
    assert fit_link(timings, kind="loopback").timings == tuple(timings)


def test_one_size_tells_no_bandwidth():
    timing = CollectiveTiming(collective=ALL_REDUCE, num_ranks=2, message_bytes=1024, duration_ns=1000)
    with pytest.raises(RunnerError, match="at least 2 message sizes"):
        fit_link([timing, timing], kind="network")


def test_where_time_does_not_grow_bandwidth_is_not_without_end():
    """Noise can hide what bytes cost: 10 us for any message. Ten times the rate of the largest is taken."""
    timings = [
        CollectiveTiming(collective=ALL_GATHER, num_ranks=2, message_bytes=size, duration_ns=10_000) for size in SIZES
    ]
    assert fit_link(timings, kind="network").bytes_per_s == pytest.approx(10 * SIZES[-1] / 2 / 10e-6, rel=1e-6)

"""Scenarios: bounds on a step that is different in one thing."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiled import STEP_NS, breakdown_of

from steptune.tuner.costs.categories import Category as C
from steptune.tuner.profiling.what_if import ACCUMULATION, SCENARIOS, what_ifs


def gains(breakdown) -> dict[str, float]:
    return {one.scenario: one.gain for one in what_ifs(breakdown)}


def named(word: str) -> str:
    (name,) = [scenario.name for scenario in SCENARIOS if word in scenario.name]
    return name


def test_a_loader_that_never_keeps_the_step_waiting_saves_its_share() -> None:
    found = gains(breakdown_of({C.DATA_WAIT: 0.4, C.COPY_H2D: 0.1}, device="cuda:0", rest=C.MATMUL))
    assert found == {named("batches"): pytest.approx(2.0)}


def test_a_graph_leaves_the_device_s_own_time_and_what_it_waits_for() -> None:
    """Waiting for data and for other ranks stays, and so does the way from one queued kernel to the next."""
    shares = {C.HOST: 0.3, C.LAUNCH_LATENCY: 0.15, C.OPTIMIZER_HOST: 0.05, C.DATA_WAIT: 0.1, C.DISPATCH: 0.1}
    breakdown = breakdown_of(shares, device="cuda:0", rest=C.MATMUL)
    assert gains(breakdown)[named("graph")] == pytest.approx(2.0)
    assert named("graph") not in gains(msgspec.structs.replace(breakdown, device="cpu"))


def test_no_more_communication_can_hide_than_there_is_compute_that_hides_none() -> None:
    shares = {C.COMMUNICATION: 0.5, C.MATMUL: 0.3}
    breakdown = breakdown_of(shares, device="cuda:0", rest=C.UNKNOWN)
    assert gains(breakdown)[named("hidden")] == pytest.approx(1 / 0.7)
    busy = msgspec.structs.replace(breakdown, overlapped={"communication": int(0.2 * STEP_NS)})
    assert gains(busy)[named("hidden")] == pytest.approx(1 / 0.9)


def test_accumulation_divides_what_happens_once_per_optimizer_step() -> None:
    shares = {C.COMMUNICATION: 0.2, C.OPTIMIZER: 0.2}
    breakdown = breakdown_of(shares, device="cuda:0", rest=C.MATMUL)
    assert gains(breakdown)[named("exchanged")] == pytest.approx(1 / (1 - 0.4 * (1 - 1 / ACCUMULATION)))


def test_of_a_larger_batch_only_what_grows_with_samples_grows() -> None:
    breakdown = breakdown_of({C.HOST: 0.5}, device="cuda:0", rest=C.MATMUL)
    assert gains(breakdown)[named("batch were")] == pytest.approx(1 / 0.75)


def test_a_bad_capture_promises_nothing() -> None:
    assert what_ifs(breakdown_of({C.DATA_WAIT: 0.9}, problems=("98% of the launches have no device work",))) == ()


@given(shares=st.dictionaries(st.sampled_from(list(C)), st.floats(0, 0.04)), cuda=st.booleans())
def test_no_scenario_makes_a_step_longer_or_vanish(shares: dict[C, float], cuda: bool) -> None:
    breakdown = breakdown_of(shares, device="cuda:0" if cuda else "cpu", rest=C.MATMUL)
    for one in what_ifs(breakdown):
        assert 1 <= one.step_time_ns <= STEP_NS
        assert one.gain == pytest.approx(STEP_NS / one.step_time_ns, rel=0.01)

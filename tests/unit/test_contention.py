"""The share of the processor that others used."""

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptune.tuner.hardware import usable_cores
from steptune.tuner.trials.contention import TICKS_OF_ERROR, CpuReading, foreign_share, read_cpu

RESOLUTION_S = TICKS_OF_ERROR / os.sysconf("SC_CLK_TCK")
seconds = st.floats(0, 1e6)


def reading(busy: float, own: float, at: float) -> CpuReading:
    return CpuReading(busy_s=busy, own_s=own, at_s=at)


class TestShare:
    def test_is_what_the_own_session_did_not_use(self) -> None:
        before, after = reading(100, 50, 0), reading(100 + 4 + RESOLUTION_S, 53, 10)
        assert foreign_share(before, after) == pytest.approx(1 / (10 * usable_cores()))

    def test_what_other_ranks_used_is_not_foreign(self) -> None:
        before, after = reading(0, 0, 0), reading(8 + RESOLUTION_S, 2, 10)
        assert foreign_share(before, after, own_s=8.0) == pytest.approx(0)
        assert foreign_share(before, after) > 0

    def test_a_busy_session_alone_is_no_contention(self) -> None:
        cores = usable_cores()
        assert foreign_share(reading(0, 0, 0), reading(10 * cores, 10 * cores, 10)) == 0

    def test_less_than_the_counters_can_tell_is_nothing(self) -> None:
        """In a window of 50 ms three ticks of 10 ms would look like half a core."""
        assert foreign_share(reading(0, 0, 0), reading(RESOLUTION_S, 0, 0.05)) == 0

    @given(busy=seconds, own=seconds, elapsed=st.floats(1e-3, 1e3))
    def test_is_never_negative(self, busy: float, own: float, elapsed: float) -> None:
        """Children that have ended are counted late, so the own share may seem larger than all."""
        assert foreign_share(reading(0, 0, 0), reading(busy, own, elapsed)) >= 0

    @pytest.mark.parametrize(
        ("before", "after"),
        [(None, reading(1, 1, 1)), (reading(1, 1, 1), None), (None, None), (reading(0, 0, 5), reading(9, 0, 5))],
    )
    def test_without_two_readings_nothing_is_claimed(self, before: CpuReading | None, after: CpuReading | None) -> None:
        assert foreign_share(before, after) == 0


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="this system does not offer the counters")
def test_counters_advance_with_the_work_of_this_process() -> None:
    before = read_cpu(time.perf_counter())
    began = time.process_time()
    while time.process_time() - began < 0.1:
        pass
    after = read_cpu(time.perf_counter())
    assert before is not None
    assert after is not None
    assert after.own_s - before.own_s >= 0.08, "0.1 s of work, less the ticks that the counter may lag"
    assert after.busy_s > before.busy_s

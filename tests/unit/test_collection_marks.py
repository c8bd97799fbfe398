"""Profiles say when garbage was collected."""

import gc
from pathlib import Path

import pytest
import torch

from steptune.tuner.profiling.analysis import analyse_rank
from steptune.tuner.trials.capture import num_profiled_steps, record_profile

CPU = torch.device("cpu")


@pytest.fixture
def many_objects() -> list[list[int]]:
    """So many that collecting garbage takes milliseconds."""
    return [[number] for number in range(300_000)]


def test_a_stall_that_collects_garbage_is_named(many_objects: list[list[int]], tmp_path: Path) -> None:
    weight = torch.ones(64, 64)

    def step() -> None:
        for _ in range(20):
            weight @ weight
        gc.collect()

    before = list(gc.callbacks)
    record_profile(step, 4, CPU, tmp_path / "trace.json")
    assert gc.callbacks == before
    (stall,) = [f for f in analyse_rank(tmp_path / "trace.json").findings if f.rule == "host_stall"]
    assert stall.evidence["cause"] == "collection"
    assert "gc.freeze()" in stall.advice
    assert many_objects


def test_a_step_may_clear_the_callbacks_of_the_collector(tmp_path: Path) -> None:
    kept = list(gc.callbacks)
    try:
        record_profile(gc.callbacks.clear, 2, CPU, tmp_path / "trace.json")
    finally:
        gc.callbacks[:] = kept
    assert (tmp_path / "trace.json").exists()


def test_short_steps_are_recorded_ten_times() -> None:
    assert num_profiled_steps(1_000_000) == 10
    assert num_profiled_steps(200_000_000) == 3
    assert num_profiled_steps(5_000_000_000) == 1

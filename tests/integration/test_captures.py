"""Small captures of an H100, with what is known of each (made by benchmarks/capture_traces.py)."""

import json
from functools import cache
from pathlib import Path

import pytest

from tuner.profiling.analysis import analyse_rank
from tuner.profiling.categories import COMPUTING, Category
from tuner.trace_records import RankAnalysis

FOLDER = Path(__file__).resolve().parents[1] / "captures"
KNOWN = json.loads((FOLDER / "captures.json").read_text())


@cache
def analysed(name: str) -> RankAnalysis:
    unprofiled_ns = round(KNOWN[name]["unprofiled_step_ms"] * 1e6)
    return analyse_rank(FOLDER / f"{name}.json.gz", unprofiled_ns)


@pytest.mark.parametrize("name", KNOWN)
def test_every_step_is_whole_and_rescaled_to_the_unprofiled_one(name: str) -> None:
    (breakdown,) = analysed(name).breakdowns
    assert breakdown.num_steps == 3
    assert breakdown.quality.problems == ()
    assert sum(breakdown.categories.values()) == breakdown.step_time_ns
    assert sum(breakdown.rescaled.values()) == round(KNOWN[name]["unprofiled_step_ms"] * 1e6)


def test_checkpointed_blocks_are_computed_again() -> None:
    """PyTorch stops as soon as what the backward pass needs is there again: the second of a block's two equal products
    is not repeated, so it is somewhat less than half of the forward pass.
    """
    (breakdown,) = analysed("h100_checkpointed").breakdowns
    phases = breakdown.phases
    assert 0.35 < phases["recompute"] / phases["forward"] < 0.5
    assert phases["recompute"] == breakdown.categories[Category.RECOMPUTE]
    assert phases["backward"] > phases["forward"]


@pytest.mark.parametrize("name", sorted(set(KNOWN) - {"h100_checkpointed"}))
def test_nothing_else_is(name: str) -> None:
    (breakdown,) = analysed(name).breakdowns
    assert breakdown.categories[Category.RECOMPUTE] == 0
    assert breakdown.phases["forward"] > 0
    assert breakdown.phases["backward"] > 0


def test_triton_kernels_have_their_class_launch_and_phase() -> None:
    """They are launched through the driver, by a call that the runtime does not see."""
    analysis = analysed("h100_compiled")
    triton = [kernel for kernel in analysis.kernels if kernel.name.startswith("triton_")]
    assert triton
    assert {kernel.category for kernel in triton} <= {category.value for category in COMPUTING}
    (breakdown,) = analysis.breakdowns
    assert breakdown.quality.unlinked_share == 0
    assert breakdown.phases["other"] == 0


def test_call_stacks_lead_to_the_line_and_memory_is_followed() -> None:
    analysis = analysed("h100_detailed")
    sources = {gap.source for gap in analysis.gaps["cuda:0"].longest}
    assert any(source.startswith("capture_traces.py(") for source in sources)
    (memory,) = [m for m in analysis.memory if m.device == "cuda:0"]
    assert 0 < memory.peak_allocated_bytes <= memory.peak_reserved_bytes <= memory.total_memory_bytes
    assert max(allocated for _, allocated, _ in memory.timeline) == memory.peak_allocated_bytes
    assert any(operator.flops for operator in analysis.operators)


def test_what_the_host_does_after_item_is_the_host_s() -> None:
    """The value is there soon; the 2 ms of sleep after it leave the device idle. That is not synchronising."""
    (breakdown,) = analysed("h100_item_in_the_loop").breakdowns
    per_step = {name: value / 3 for name, value in breakdown.categories.items()}
    assert per_step[Category.HOST] >= 2e6
    assert per_step[Category.SYNCHRONISATION] < 0.05e6

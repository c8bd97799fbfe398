"""Small captures of an H100 and an H200, with what is known of each (made by benchmarks/capture_traces.py)."""

import json
from functools import cache
from pathlib import Path

import pytest

from steptune.tuner.costs.categories import COMPUTING, Category
from steptune.tuner.profiling.analysis import analyse_rank
from steptune.tuner.trace_records import RankAnalysis

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
    assert breakdown.phases["recompute"] == 0


@pytest.mark.parametrize("name", sorted(set(KNOWN) - {"h200_copies_beside", "h200_cuda_graph"}))
def test_forward_and_backward_passes_are_told_apart(name: str) -> None:
    (breakdown,) = analysed(name).breakdowns
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


def shares(name: str) -> dict[str, float]:
    """Shares of the unprofiled step."""
    (breakdown,) = analysed(name).breakdowns
    return {category: ns / sum(breakdown.rescaled.values()) for category, ns in breakdown.rescaled.items()}


def test_a_step_of_small_operators_waits_for_launches() -> None:
    found = shares("h200_launch_bound")
    waiting = found[Category.HOST] + found[Category.OPTIMIZER_HOST] + found[Category.LAUNCH_LATENCY]
    assert waiting > 0.8
    assert sum(found[category] for category in COMPUTING) < 0.15


def test_replayed_as_a_cuda_graph_it_computes_and_hands_over() -> None:
    """Its operators are the same: the kernels' own time is the same, and nothing waits for the host."""
    found = shares("h200_cuda_graph")
    assert sum(found[category] for category in COMPUTING) + found[Category.DISPATCH] == pytest.approx(1.0, abs=0.005)
    assert found[Category.DISPATCH] < 0.1
    launched, replayed = analysed("h200_launch_bound"), analysed("h200_cuda_graph")
    products = [
        sum(kernel.count for kernel in analysis.kernels if kernel.category == Category.MATMUL)
        for analysis in (launched, replayed)
    ]
    assert products[0] == products[1] > 0


def test_the_update_of_a_replayed_step_is_known_by_its_kernels() -> None:
    """It takes as long as where the host launched it: also replayed, what a fused update would save is known."""
    launched, replayed = (
        sum(k.total_ns for k in analysed(name).kernels if k.category == Category.OPTIMIZER)
        for name in ("h200_launch_bound", "h200_cuda_graph")
    )
    assert launched > 0
    assert replayed == pytest.approx(launched, rel=0.2)


def test_eight_samples_of_a_millisecond_each_are_waited_for() -> None:
    (breakdown,) = analysed("h200_input_bound").breakdowns
    assert breakdown.rescaled[Category.DATA_WAIT] > 8e6
    assert shares("h200_input_bound")[Category.DATA_WAIT] > 0.7


def test_a_copy_beside_matrix_products_takes_none_of_the_step() -> None:
    """32 MiB from pinned memory take 0.6 ms of the bus, all of them hidden."""
    (breakdown,) = analysed("h200_copies_beside").breakdowns
    assert breakdown.categories[Category.COPY_H2D] == 0
    copied_ns = breakdown.overlapped[Category.COPY_H2D] / breakdown.num_steps
    assert 32 * 2**20 / copied_ns == pytest.approx(55, rel=0.15)  # GB/s: PCIe 5 with 16 lanes has 63
    assert breakdown.categories[Category.MATMUL] > 0.99 * breakdown.step_time_ns

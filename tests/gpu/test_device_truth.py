"""Work of known length on a real device: the category that should hold the time holds it within 5 %.

The truth is the device's own: CUDA events around the work, in steps without the profiler, or the length of
`torch.cuda._sleep`, measured by events before.
"""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from breakdowns import analyse

from steptune.tuner.costs.categories import COMPUTING, Category
from steptune.tuner.profiling.reader import read_trace
from steptune.tuner.records import Breakdown
from steptune.tuner.trials.capture import record_profile

WITHIN = 0.05
STEPS = 5
pytestmark = pytest.mark.filterwarnings("ignore")


def profiled(step: Callable[[], None], folder: Path) -> Breakdown:
    for _ in range(10):
        step()
    torch.cuda.synchronize()
    path = folder / "trace.json"
    record_profile(step, STEPS, torch.device("cuda"), path)
    (breakdown,) = analyse(read_trace(path))
    assert breakdown.num_steps == STEPS
    assert breakdown.quality.problems == ()
    return breakdown


def device_ns(run: Callable[[], None], repeats: int = 20) -> float:
    """Nanoseconds of device time of one call, by events around many."""
    run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e6 / repeats


def matches(measured_ns: float, before_ns: float, after_ns: float) -> bool:
    """Within 5 % of what the device took before or after the profile, or between: its clock is not always the same."""
    low, high = sorted((before_ns, after_ns))
    return bool((1 - WITHIN) * low <= measured_ns / STEPS <= (1 + WITHIN) * high)


def sleep(cycles: int) -> None:
    torch.cuda._sleep(cycles)


def test_a_kernel_of_known_length(tmp_path: Path) -> None:
    cycles = 10_000_000
    before = device_ns(lambda: sleep(cycles))
    breakdown = profiled(lambda: sleep(cycles), tmp_path)
    after = device_ns(lambda: sleep(cycles))
    assert matches(breakdown.categories[Category.OTHER_COMPUTE], before, after)


def test_matrix_products(tmp_path: Path) -> None:
    left, right = (torch.randn(4096, 4096, device="cuda") for _ in range(2))
    before = device_ns(lambda: torch.mm(left, right))
    breakdown = profiled(lambda: torch.mm(left, right), tmp_path)
    after = device_ns(lambda: torch.mm(left, right))
    assert matches(breakdown.categories[Category.MATMUL], before, after)


def test_a_copy_on_a_side_stream_is_hidden(tmp_path: Path) -> None:
    """A copy that runs while the device computes costs the step nothing: beside the sum."""
    host = torch.randn(8 << 20, pin_memory=True)
    target = torch.empty_like(host, device="cuda")
    side = torch.cuda.Stream()
    before = device_ns(lambda: target.copy_(host, non_blocking=True))
    cycles = 40_000_000
    assert device_ns(lambda: sleep(cycles)) > 2 * before

    def step() -> None:
        sleep(cycles)
        with torch.cuda.stream(side):
            target.copy_(host, non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)
        side.wait_stream(torch.cuda.current_stream())

    breakdown = profiled(step, tmp_path)
    after = device_ns(lambda: target.copy_(host, non_blocking=True))
    assert matches(breakdown.overlapped["copy_host_to_device"], before, after)
    assert breakdown.categories[Category.COPY_H2D] < WITHIN * STEPS * before


def test_an_exposed_copy(tmp_path: Path) -> None:
    """From pinned memory: the length of a pageable one is the host's, and no two are alike."""
    host = torch.randn(32 << 20, pin_memory=True)
    target = torch.empty_like(host, device="cuda")
    before = device_ns(lambda: target.copy_(host, non_blocking=True))
    breakdown = profiled(lambda: target.copy_(host), tmp_path)
    after = device_ns(lambda: target.copy_(host, non_blocking=True))
    assert matches(breakdown.categories[Category.COPY_H2D], before, after)


def test_item_in_the_loop_is_synchronisation(tmp_path: Path) -> None:
    """The host waits for the value, so the device finds nothing to do when it is done.

    The device is busy while the host waits: that time computes. What it costs is the gap after it, in which the
    host gets ready again (20 ms of Python here).
    """
    value = torch.zeros((), device="cuda")
    cycles = 10_000_000
    before = device_ns(lambda: sleep(cycles))

    def step() -> None:
        sleep(cycles)
        value.item()
        busy(0.020)

    breakdown = profiled(step, tmp_path)
    after = device_ns(lambda: sleep(cycles))
    assert matches(breakdown.categories[Category.OTHER_COMPUTE], before, after)
    assert breakdown.categories[Category.HOST] == pytest.approx(STEPS * 20e6, rel=WITHIN)
    assert breakdown.categories[Category.SYNCHRONISATION] < WITHIN * STEPS * 20e6


def test_a_device_that_waits_while_the_host_synchronises(tmp_path: Path) -> None:
    """Synchronising with another device-side delay: the host blocks on an idle device only as long as it must."""
    side = torch.cuda.Stream()
    cycles = 50_000_000

    def step() -> None:
        with torch.cuda.stream(side):
            sleep(cycles)
        side.synchronize()

    breakdown = profiled(step, tmp_path)
    idle = breakdown.step_time_ns - sum(breakdown.categories[category] for category in COMPUTING)
    assert idle < WITHIN * breakdown.step_time_ns


def test_a_launch_bound_chain_waits_for_the_host(tmp_path: Path) -> None:
    """Hundreds of tiny kernels: the device idles for what its work does not fill, and the host is to blame."""
    values = torch.ones(64, device="cuda")

    def step() -> None:
        for _ in range(500):
            values.mul_(1.0)

    breakdown = profiled(step, tmp_path)
    busy_ns = sum(breakdown.categories[category] for category in COMPUTING)
    idle_ns = breakdown.step_time_ns - busy_ns
    blamed = sum(breakdown.categories[c] for c in (Category.HOST, Category.LAUNCH_LATENCY))
    assert idle_ns > busy_ns
    assert blamed == pytest.approx(idle_ns, rel=WITHIN)


def test_cpu_work_between_steps_is_the_host_s(tmp_path: Path) -> None:
    cycles = 1_000_000

    def step() -> None:
        sleep(cycles)
        torch.cuda.synchronize()
        busy(0.030)

    breakdown = profiled(step, tmp_path)
    assert breakdown.categories[Category.HOST] == pytest.approx(STEPS * 30e6, rel=WITHIN)


def test_a_replayed_graph_computes_without_gaps(tmp_path: Path) -> None:
    """One launch, many kernels: the device's time is theirs, not the host's."""
    values = torch.ones(1 << 22, device="cuda")

    def chain() -> None:
        for _ in range(100):
            values.mul_(1.0)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        chain()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    before = device_ns(graph.replay)
    breakdown = profiled(graph.replay, tmp_path)
    accounted = sum(breakdown.categories[c] for c in (Category.ELEMENTWISE, Category.DISPATCH))
    assert matches(accounted, before, device_ns(graph.replay))


def test_the_optimizer_s_kernels_are_the_optimizer_s(tmp_path: Path) -> None:
    parameters = [torch.randn(1 << 25, device="cuda", requires_grad=True) for _ in range(8)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, fused=True)
    before = device_ns(optimizer.step)
    breakdown = profiled(optimizer.step, tmp_path)
    assert matches(breakdown.categories[Category.OPTIMIZER], before, device_ns(optimizer.step))
    assert breakdown.phases["optimizer"] == breakdown.categories[Category.OPTIMIZER]


def busy(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass

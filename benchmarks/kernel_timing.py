"""Times of kernels on the CUDA device: medians of repeats, replays of graphs, and the rate of a copy."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
QUANTILES = (0.5, 0.2, 0.8)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""A CPU is for trying the script: its rows are no figures."""
Times = dict[str, Any]


def timed(function: Callable[[], object]) -> dict[str, float]:
    """Median and 20th and 80th percentile of `triton.testing.do_bench`, which clears the L2 cache in between."""
    if DEVICE.type == "cpu":
        begun = time.perf_counter()
        function()
        return {"median_us": (time.perf_counter() - begun) * 1e6}
    from triton.testing import do_bench

    median, low, high = do_bench(function, warmup=25, rep=100, quantiles=QUANTILES)
    return {"median_us": median * 1e3, "p20_us": low * 1e3, "p80_us": high * 1e3}


def timed_in_a_row(function: Callable[[], object], calls: int) -> dict[str, float]:
    """Time of a call of many in a row, where the host works while the device does."""

    def in_a_row() -> None:
        for _ in range(calls):
            function()

    return {name: value / calls for name, value in timed(in_a_row).items()}


def captured(function: Callable[[], object]) -> Callable[[], object]:
    """Record a call as a CUDA graph; the first calls compile."""
    if DEVICE.type == "cpu":
        return function
    for _ in range(2):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def copy_rate() -> float:
    """Bytes moved (read and written) by a copy of 1 GiB, in bytes per second."""
    source = torch.randn(1 << (28 if DEVICE.type == "cuda" else 20), device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (timed(lambda: target.copy_(source))["median_us"] * 1e-6)


def error(found: Tensor, wanted: Tensor) -> float:
    """Norm of the difference, over the norm of what is wanted."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in what takes longer, such as a compiler."""

    def end(*_: object) -> None:
        raise TimeoutError(f"took longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Clock:
    """The time that is left: nothing new begins when it is over."""

    def __init__(self, seconds: float) -> None:
        self._begun = time.monotonic()
        self._seconds = seconds

    @property
    def passed(self) -> float:
        return time.monotonic() - self._begun

    @property
    def left(self) -> float:
        return self._seconds - self.passed

    def attempt(self, function: Callable[[], Times]) -> Times:
        """Time a formulation in what is left; a failure is its row."""
        if self.left < 1:
            return {"failed": "not begun: the time was over"}
        try:
            with limited(self.left):
                return function()
        except Exception as reason:
            return {"failed": f"{type(reason).__name__}: {' '.join(str(reason).split())}"[:400]}

"""Inductor's worker processes are gone before anything is measured, and come back where they are needed."""

from collections.abc import Iterator

import psutil
import pytest
import torch

from steptune.tuner.hardware import find_compiler
from steptune.tuner.training.compilation import end_compile_workers

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.skipif(find_compiler() is None, reason="torch.compile needs a C++ compiler here"),
]


def workers() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    from torch._inductor import config

    with config.patch(compile_threads=2):
        yield
    end_compile_workers()


def start_workers() -> None:
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.process_pool()


def test_workers_that_are_starting_are_ended_at_once() -> None:
    before = set(workers())
    start_workers()
    started = [process for process in workers() if process not in before]
    assert started
    end_compile_workers()
    assert not [process for process in started if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def test_workers_that_wait_for_work_are_ended_with_their_own_children() -> None:
    from torch._inductor.async_compile import AsyncCompile

    before = set(workers())
    start_workers()
    assert AsyncCompile.process_pool().submit(_answer).result(timeout=120) == 42
    started = [process for process in workers() if process not in before]
    assert len(started) >= 2
    end_compile_workers()
    psutil.wait_procs(started, timeout=60)
    assert not [process for process in started if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def test_compiling_goes_on_afterwards() -> None:
    start_workers()
    end_compile_workers()
    double = torch.compile(lambda x: x * 2 + 1)
    assert torch.equal(double(torch.ones(3)), torch.full((3,), 3.0))


def _answer() -> int:
    return 42

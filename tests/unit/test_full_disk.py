"""Failures of a trial on a disk without room: the fault of its surroundings, however the libraries say it."""

import contextlib
import errno
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from steptune.tuner.errors import RunnerError
from steptune.tuner.records import FailureKind
from steptune.tuner.trials.capture import record_details, record_profile
from steptune.tuner.trials.failures import classify

CPU = torch.device("cpu")


@contextlib.contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond a size, as on a disk that has no more room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def step() -> None:
    torch.ones(3).add_(1)


class TestTraces:
    @pytest.mark.parametrize("num_bytes", [0, 4096], ids=["nothing", "a part"])
    def test_a_trace_that_was_not_written_to_its_end_is_no_trace(self, tmp_path: Path, num_bytes: int) -> None:
        with largest_file(num_bytes), pytest.raises(RunnerError, match="could not write its trace") as caught:
            record_profile(step, 2, CPU, tmp_path / "trace.json")
        assert classify(caught.value) is FailureKind.INFRASTRUCTURE

    def test_that_of_the_memory_neither(self, tmp_path: Path) -> None:
        with largest_file(0), pytest.raises(RunnerError, match="STEPTUNE_DATA_DIRECTORY"):
            record_details(step, 1, tmp_path / "trace.json")

    def test_one_that_was_is(self, tmp_path: Path) -> None:
        record_profile(step, 2, CPU, tmp_path / "trace.json")
        assert (tmp_path / "trace.json").stat().st_size > 4096


class TestKinds:
    def test_what_torch_cannot_save(self) -> None:
        """It has no exception of its own: a new torch that changes its text fails here."""
        with pytest.raises(RuntimeError) as caught:
            torch.save(torch.zeros(1 << 20), "/dev/full")
        assert classify(caught.value) is FailureKind.INFRASTRUCTURE

    def test_what_was_raised_for_it(self) -> None:
        error = ValueError("mine")
        error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
        assert classify(error) is FailureKind.INFRASTRUCTURE
        assert classify(ValueError("another")) is FailureKind.WORKLOAD_ERROR

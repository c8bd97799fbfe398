"""From an exception or an exit status to the kind of a failure."""

import errno
import signal

import pytest
import torch
from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

from steptune.tuner.errors import PlatformError, RunnerError, UnsupportedError, WorkloadRejectedError
from steptune.tuner.records import Failure, FailureKind, Phase
from steptune.tuner.trials.failures import (
    NumericsError,
    classify,
    failure_of,
    failure_of_exit,
    is_out_of_memory,
    repeats_after,
)

K = FailureKind


def allocator_error() -> BaseException:
    """torch's own, from an allocation that no machine can satisfy."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 58)
    return caught.value


def compiler_error() -> BaseException:
    from torch._dynamo.exc import Unsupported

    return Unsupported("graph break", case_name="test") if _takes_case(Unsupported) else Unsupported("graph break")


def _takes_case(cls: type) -> bool:
    import inspect

    return "case_name" in inspect.signature(cls.__init__).parameters


class TestClassify:
    @pytest.mark.parametrize(
        ("error", "kind"),
        [
            (MemoryError(), K.OUT_OF_MEMORY),
            (torch.OutOfMemoryError("CUDA out of memory"), K.OUT_OF_MEMORY),
            (OSError(errno.ENOMEM, "Cannot allocate memory"), K.OUT_OF_MEMORY),
            (OSError(errno.ENOENT, "No such file"), K.WORKLOAD_ERROR),
            (NumericsError("the loss became nan"), K.NUMERICS),
            (UnsupportedError("no"), K.UNSUPPORTED),
            (RunnerError("our own"), K.INFRASTRUCTURE),
            (WorkloadRejectedError("theirs"), K.WORKLOAD_ERROR),
            (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), K.WORKLOAD_ERROR),
            (ValueError("out of memory, says a user's message"), K.WORKLOAD_ERROR),
            (KeyError("pixel_values"), K.WORKLOAD_ERROR),
            (PlatformError("no such network"), K.INFRASTRUCTURE),
            (DistStoreError("wait timeout after 2000ms, keys: /default_pg/0"), K.TIMEOUT),
            (DistNetworkError("The client socket has timed out after 60000ms while trying to connect"), K.TIMEOUT),
            (DistBackendError("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"), K.TIMEOUT),
            (DistBackendError("NCCL error: ncclRemoteError: A remote process exited"), K.INFRASTRUCTURE),
            (DistBackendError("NCCL communicator was aborted on rank 1."), K.INFRASTRUCTURE),
            (DistBackendError("NCCL error: ncclInvalidUsage: Duplicate GPU detected"), K.WORKLOAD_ERROR),
            (RuntimeError("my own timeout"), K.WORKLOAD_ERROR),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
    )
    def test_by_the_type_of_the_exception(self, error: BaseException, kind: FailureKind) -> None:
        assert classify(error) is kind
        assert is_out_of_memory(error) == (kind is K.OUT_OF_MEMORY)

    def test_torch_s_cpu_allocator_has_no_exception_of_its_own(self) -> None:
        """Its text is recognised; a new torch that changes it fails here."""
        assert classify(allocator_error()) is K.OUT_OF_MEMORY

    def test_what_the_compiler_cannot_do_is_unsupported(self) -> None:
        assert classify(compiler_error()) is K.UNSUPPORTED


class TestRecords:
    def raised(self, error: BaseException) -> BaseException:
        try:
            raise error
        except BaseException as caught:
            return caught

    def test_an_exception_is_named_with_its_traceback(self) -> None:
        failure = failure_of(self.raised(KeyError("labels")), Phase.GUARD, rank=1)
        line = failure.traceback.split(", line ")[1].split(",")[0]
        assert failure.message == f"KeyError: 'labels' ({__file__}, line {line})"
        assert (failure.kind, failure.phase, failure.rank) == (K.WORKLOAD_ERROR, Phase.GUARD, 1)
        assert "raise error" in failure.traceback

    def test_our_own_messages_stand_alone(self) -> None:
        assert (
            failure_of(self.raised(NumericsError("the loss became nan")), Phase.MEASURE, 0).message
            == "the loss became nan"
        )

    def test_an_exception_without_text_is_named(self) -> None:
        assert failure_of(self.raised(MemoryError()), Phase.BUILD, 0).message.startswith("MemoryError (")

    def test_an_exception_without_a_place_has_none(self) -> None:
        assert failure_of(KeyError("labels"), Phase.BUILD, 0).message == "KeyError: 'labels'"

    def test_endless_messages_are_cut_in_the_middle(self) -> None:
        message = failure_of(ValueError("a" * 5000 + "z" * 5000), Phase.BUILD, 0).message
        assert len(message) < 2100
        assert message.startswith("ValueError: aaa")
        assert message.endswith("zzz")


class TestExits:
    @pytest.mark.parametrize(
        ("status", "kind", "message"),
        [
            ({"code": None, "signal_number": signal.SIGSEGV}, K.CRASH, "the process was killed by SIGSEGV"),
            (
                {"code": 3, "signal_number": None},
                K.CRASH,
                "the process exited with status 3 during the trial",
            ),
            (
                {"code": None, "signal_number": signal.SIGKILL, "out_of_memory": True},
                K.OUT_OF_MEMORY,
                "the kernel killed the process because the machine ran out of memory",
            ),
            ({"code": None, "signal_number": signal.SIGKILL}, K.CRASH, "the process was killed by SIGKILL"),
        ],
        ids=["segfault", "exit", "kernel's killer", "somebody's kill"],
    )
    def test_by_status(self, status: dict, kind: FailureKind, message: str) -> None:
        failure = failure_of_exit(**{"out_of_memory": False, **status}, phase=Phase.WARM_UP, rank=2)
        assert (failure.kind, failure.message) == (kind, message)
        assert (failure.phase, failure.rank, failure.signal) == (Phase.WARM_UP, 2, status["signal_number"])


class TestRepeats:
    @pytest.mark.parametrize(
        ("kind", "by", "repeats"),
        [
            (K.CRASH, signal.SIGKILL, 2),
            (K.CRASH, signal.SIGTERM, 2),
            (K.CRASH, signal.SIGHUP, 2),
            (K.CRASH, signal.SIGUSR1, 2),
            (K.CRASH, signal.SIGBUS, 1),
            (K.OUT_OF_MEMORY, signal.SIGKILL, 1),
            (K.INFRASTRUCTURE, None, 1),
            (K.CRASH, signal.SIGSEGV, 0),
            (K.CRASH, signal.SIGABRT, 0),
            (K.CRASH, signal.SIGFPE, 0),
            (K.CRASH, None, 0),
            (K.OUT_OF_MEMORY, None, 0),
            (K.WORKLOAD_ERROR, None, 0),
            (K.TIMEOUT, None, 0),
        ],
    )
    def test_what_the_environment_ended_is_repeated(self, kind: FailureKind, by: int | None, repeats: int) -> None:
        assert repeats_after(Failure(kind=kind, phase=Phase.MEASURE, message="", signal=by)) == repeats

    def test_a_bus_error_says_how_full_shared_memory_is(self) -> None:
        failure = failure_of_exit(
            code=None, signal_number=signal.SIGBUS, out_of_memory=False, phase=Phase.WARM_UP, rank=0
        )
        assert "/dev/shm" in failure.message

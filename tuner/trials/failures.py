"""From an exception or an exit status to the kind of a failure. Never from a log."""

from __future__ import annotations

import errno
import signal
import traceback

from tuner.errors import RunnerError, SteptuneError
from tuner.records import Failure, FailureKind, Phase

_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"


class UnsupportedHere(Exception):
    """A choice turned out to be impossible for this workload, in the running job."""


class NumericsLeft(Exception):
    """The loss is not finite."""


def classify(error: BaseException) -> FailureKind:
    """The kind of an exception that ended a rank."""
    if is_out_of_memory(error):
        return FailureKind.OUT_OF_MEMORY
    if isinstance(error, RunnerError):
        return FailureKind.INFRASTRUCTURE
    if isinstance(error, NumericsLeft):
        return FailureKind.NUMERICS
    if isinstance(error, UnsupportedHere) or _from_compiler(error):
        return FailureKind.UNSUPPORTED
    return FailureKind.WORKLOAD_ERROR


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on a device or on the CPU.

    torch has an exception for devices only; its CPU allocator raises a RuntimeError with a fixed text,
    which is recognised here and nowhere else.
    """
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)


def _from_compiler(error: BaseException) -> bool:
    module = type(error).__module__ or ""
    return module.startswith(("torch._dynamo", "torch._inductor", "torch._functorch"))


def failure_of(error: BaseException, phase: Phase, rank: int) -> Failure:
    """The record of an exception."""
    name = type(error).__name__
    text = str(error).strip()
    message = (
        text
        if isinstance(error, SteptuneError | UnsupportedHere | NumericsLeft)
        else f"{name}: {text}"
        if text
        else name
    )
    return Failure(
        kind=classify(error),
        phase=phase,
        message=_first_lines(message),
        rank=rank,
        traceback="".join(traceback.format_exception(error))[-8000:],
    )


def failure_of_exit(
    *, code: int | None, signal_number: int | None, out_of_memory: bool, phase: Phase, rank: int
) -> Failure:
    """The record of a rank that ended without saying why."""
    if out_of_memory:
        return Failure(
            kind=FailureKind.OUT_OF_MEMORY,
            phase=phase,
            rank=rank,
            signal=signal_number,
            message="the kernel killed the process because the machine ran out of memory",
        )
    if signal_number is not None:
        name = signal.Signals(signal_number).name
        return Failure(
            kind=FailureKind.CRASH,
            phase=phase,
            rank=rank,
            signal=signal_number,
            message=f"the process was killed by {name}",
        )
    return Failure(
        kind=FailureKind.CRASH,
        phase=phase,
        rank=rank,
        message=f"the process exited with status {code} in the middle of the trial",
    )


def _first_lines(message: str, limit: int = 2000) -> str:
    return message if len(message) <= limit else f"{message[: limit // 2]}\n...\n{message[-limit // 2 :]}"

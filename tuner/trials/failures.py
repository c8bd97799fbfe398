"""From an exception or an exit status to the kind of a failure. Never from a log."""

from __future__ import annotations

import errno
import re
import signal
import traceback

from steptune.tuner.errors import CannotCapture, PlatformError, RunnerError, SteptuneError, UnsupportedHere
from steptune.tuner.records import Failure, FailureKind, Phase
from steptune.tuner.user_code import is_users, place_of

_TIMED_OUT = ("timed out", "timeout")
_LOST = ("connection", "broken pipe", "remote process", "communicator was aborted", "socket")
"""Words in what the libraries of process groups raise: of ranks that do not answer, and of those that are gone."""
_GLOO_TIMEOUTS = frozenset({"Wait timeout", "Application timeout caused pair closure"})
"""All that gloo says where others wait, and once a group has timed out."""
_GLOO = "gloo/transport/"
"""In all else that its connections say; there is no exception of its own."""
_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"

_WORKER_TRACEBACK = "Original Traceback (most recent call last):"


class NumericsLeft(Exception):
    """The loss is not finite."""


def classify(error: BaseException) -> FailureKind:
    """The kind of an exception that ended a rank."""
    if is_out_of_memory(error):
        return FailureKind.OUT_OF_MEMORY
    if is_of_the_group(error):
        return FailureKind.TIMEOUT if _says(error, _TIMED_OUT) else FailureKind.INFRASTRUCTURE
    if isinstance(error, RunnerError | PlatformError) or _is_disk_full(error):
        return FailureKind.INFRASTRUCTURE
    if isinstance(error, NumericsLeft):
        return FailureKind.NUMERICS
    if isinstance(error, UnsupportedHere | CannotCapture) or _from_compiler(error):
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


def is_of_the_group(error: BaseException) -> bool:
    """Whether a collective failed because other ranks did not answer in time, or are gone.

    NCCL and the stores have exceptions of their own, for errors of their callers too. Those of gloo are RuntimeErrors.
    """
    from torch.distributed import DistError

    if isinstance(error, DistError):
        return _says(error, (*_TIMED_OUT, *_LOST))
    return type(error) is RuntimeError and (str(error) in _GLOO_TIMEOUTS or _GLOO in str(error))


def _says(error: BaseException, words: tuple[str, ...]) -> bool:
    text = str(error).lower()
    return any(word in text for word in words)


def _is_disk_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _from_compiler(error: BaseException) -> bool:
    module = type(error).__module__ or ""
    return module.startswith(("torch._dynamo", "torch._inductor", "torch._functorch"))


def failure_of(error: BaseException, phase: Phase, rank: int) -> Failure:
    """The record of an exception."""
    ours = isinstance(error, SteptuneError | NumericsLeft)
    return Failure(
        kind=classify(error),
        phase=phase,
        message=_first_lines(str(error).strip() if ours else _of_others(error) + _told(error)),
        rank=rank,
        traceback="".join(traceback.format_exception(error))[-8000:],
    )


def _of_others(error: BaseException) -> str:
    if not is_of_the_group(error):
        return ""
    late = classify(error) is FailureKind.TIMEOUT
    return f"the other ranks {'did not answer in time' if late else 'are gone or cannot be reached'}: "


def _told(error: BaseException) -> str:
    """What an exception says, and the line of the user's code that it came from."""
    name, text = type(error).__name__, str(error).strip()
    if _WORKER_TRACEBACK in text:  # torch hands on what a loader worker raised as the text of its traceback
        where, _, told = text.partition(_WORKER_TRACEBACK)
        lines = re.findall(r'File "([^"]+)", line (\d+)', told)
        place = next((f"{path}, line {line}" for path, line in reversed(lines) if is_users(path)), "")
        worker = re.search(r"in (.+?)\.?$", where.strip())
        text = told.strip().rpartition("\n")[2].removeprefix(f"{name}:").strip()
        place = ", in ".join(part for part in (place, worker[1] if worker else "") if part)
    else:
        place = place_of(error)
    message = f"{name}: {text}" if text else name
    if _is_disk_full(error):
        message = f"{message}: free space, or put the studies elsewhere with STEPTUNE_DATA_DIRECTORY"
    return f"{message} ({place})" if place else message


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

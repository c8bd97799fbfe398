"""Classification of a failure by its exception or exit status; logs are not read."""

from __future__ import annotations

import errno
import re
import shutil
import signal
import traceback

from steptune.tuner.errors import (
    COMPILER_MODULES,
    CaptureError,
    PlatformError,
    RunnerError,
    SteptuneError,
    UnsupportedError,
)
from steptune.tuner.records import Failure, FailureKind, Phase
from steptune.tuner.user_code import is_users, place_of

_TIMED_OUT = ("timed out", "timeout")
_LOST = ("connection", "broken pipe", "remote process", "communicator was aborted", "socket")
"""Words in errors of process-group libraries when ranks do not answer or are gone."""
_GLOO_TIMEOUTS = frozenset({"Wait timeout", "Application timeout caused pair closure"})
"""Messages of gloo when other ranks did not answer, and after a group has timed out."""
_GLOO = "gloo/transport/"
"""Path in gloo's connection errors, which have no exception class."""
_TORCH_WRITER = ("PytorchStreamWriter failed writing", ". unexpected pos ")
"""Words in errors of `torch.save` when it cannot write; they have no exception class."""
_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"

EXTERNAL_SIGNALS = frozenset(
    {
        *(signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT),
        *(signal.SIGUSR1, signal.SIGUSR2),
        *([signal.SIGPWR] if hasattr(signal, "SIGPWR") else []),
    }
)
"""Signals that users, schedulers and the kernel send; a program's own mistake does not cause them."""
MAX_REPEATS, MAX_UNCLEAR_REPEATS = 2, 1
"""Maximum numbers of repeats: of a run that was ended by its environment, and of a run that may have failed by its own
fault.
"""

_DEFAULT_COLLATE = "torch/utils/data/_utils/collate.py"
_WORKER_TRACEBACK = "Original Traceback (most recent call last):"


class NumericsError(SteptuneError):
    """Error for a loss that is not finite."""


def classify(error: BaseException) -> FailureKind:
    """Return the failure kind for an exception that ended a rank."""
    if is_out_of_memory(error):
        return FailureKind.OUT_OF_MEMORY
    if is_of_the_group(error):
        return FailureKind.TIMEOUT if _says(error, _TIMED_OUT) else FailureKind.INFRASTRUCTURE
    if isinstance(error, RunnerError | PlatformError) or _is_disk_full(error):
        return FailureKind.INFRASTRUCTURE
    if isinstance(error, NumericsError):
        return FailureKind.NUMERICS
    if isinstance(error, UnsupportedError | CaptureError) or _from_compiler(error):
        return FailureKind.UNSUPPORTED
    return FailureKind.WORKLOAD_ERROR


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an exception means that memory ran out, on a device or on the CPU.

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
    """Say whether a collective failed because other ranks did not answer in time, or are gone.

    NCCL and the stores raise exceptions of specific classes, also for errors of their callers; gloo raises
    RuntimeErrors.
    """
    from torch.distributed import DistError

    if isinstance(error, DistError):
        return _says(error, (*_TIMED_OUT, *_LOST))
    return type(error) is RuntimeError and (str(error) in _GLOO_TIMEOUTS or _GLOO in str(error))


def _says(error: BaseException, words: tuple[str, ...]) -> bool:
    text = str(error).lower()
    return any(word in text for word in words)


def _is_disk_full(error: BaseException) -> bool:
    """Say whether an exception, or one of its causes, means that a disk is full."""
    if error.__cause__ is not None and _is_disk_full(error.__cause__):
        return True
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TORCH_WRITER)


def _from_compiler(error: BaseException) -> bool:
    return (type(error).__module__ or "").startswith(COMPILER_MODULES)


def failure_of(error: BaseException, phase: Phase, rank: int) -> Failure:
    """Return the failure record for an exception."""
    ours = isinstance(error, SteptuneError)
    return Failure(
        kind=classify(error),
        phase=phase,
        message=_first_lines(str(error).strip() if ours else _of_others(error) + _told(error)),
        rank=rank,
        traceback="".join(traceback.format_exception(error))[-8000:],
        error=f"{type(error).__module__}.{type(error).__qualname__}",
    )


def _of_others(error: BaseException) -> str:
    if not is_of_the_group(error):
        return ""
    late = classify(error) is FailureKind.TIMEOUT
    return f"the other ranks {'did not answer in time' if late else 'are gone or cannot be reached'}: "


def _told(error: BaseException) -> str:
    """Return the text of an exception, and the line of the user's code that raised it."""
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
        message = f"{message}: free disk space, or set STEPTUNE_DATA_DIRECTORY to a folder with more space"
    message += _limit_of_memory(error)
    if _by_default_collate(error):
        message += (
            ": the default collate function cannot combine the samples into a batch; define `collate(self, "
            "samples)` in the workload to pad or pack them"
        )
    return f"{message} ({place})" if place else message


def _by_default_collate(error: BaseException) -> bool:
    """Say whether an exception was raised by PyTorch's default collation of samples, here or in a loader worker."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.filename.endswith(_DEFAULT_COLLATE) for frame in frames) or f'{_DEFAULT_COLLATE}"' in str(error)


def _limit_of_memory(error: BaseException) -> str:
    """If a host allocation exceeded this process's memory limit, return a text with the limit and the remedy; else
    return an empty text.
    """
    import resource

    import torch

    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if limit == resource.RLIM_INFINITY or isinstance(error, torch.OutOfMemoryError) or not is_out_of_memory(error):
        return ""
    return (
        f": the limit is {limit / 2**30:.3g} GiB of private memory per process. Use a smaller global_batch or "
        "model, or raise the limit (--memory-limit of the study, STEPTUNE_STUDY_MEMORY_BYTES of the worker)"
    )


def repeats_after(failure: Failure) -> int:
    """Return how often a run is repeated after this failure: 0 for a failure of the workload itself.

    When memory runs out, the kernel kills whichever process uses much of it, and sends SIGBUS where a page of shared
    memory cannot be allocated: the cause may be the workload or another program.
    """
    if failure.kind is FailureKind.OUT_OF_MEMORY:
        return MAX_UNCLEAR_REPEATS if failure.signal == signal.SIGKILL else 0
    if failure.signal in EXTERNAL_SIGNALS:
        return MAX_REPEATS
    if failure.signal == signal.SIGBUS or failure.kind is FailureKind.INFRASTRUCTURE:
        return MAX_UNCLEAR_REPEATS
    return 0


def is_crash_of_profiler(failure: Failure) -> bool:
    """Say whether a run crashed natively while it was profiled. Its windows are behind it, and the profiler of a GPU
    can crash where training does not: it did with a step recorded as a CUDA graph.
    """
    crashed = failure.kind is FailureKind.CRASH and failure.signal not in (None, *EXTERNAL_SIGNALS)
    return crashed and failure.phase is Phase.PROFILE


def failure_of_exit(
    *, code: int | None, signal_number: int | None, out_of_memory: bool, phase: Phase, rank: int
) -> Failure:
    """Return the failure record for a rank that ended without reporting a reason."""
    if out_of_memory:
        return Failure(
            kind=FailureKind.OUT_OF_MEMORY,
            phase=phase,
            rank=rank,
            signal=signal_number,
            message="the kernel killed the process because the machine ran out of memory",
        )
    if signal_number is not None:
        message = f"the process was killed by {signal.Signals(signal_number).name}"
        if signal_number == signal.SIGBUS:
            message += f": shared memory could not be allocated ({_shared_memory()})"
        return Failure(kind=FailureKind.CRASH, phase=phase, rank=rank, signal=signal_number, message=message)
    return Failure(
        kind=FailureKind.CRASH,
        phase=phase,
        rank=rank,
        message=f"the process exited with status {code} during the trial",
    )


def _shared_memory() -> str:
    try:
        total, used, _ = shutil.disk_usage("/dev/shm")
    except OSError:
        return "there is no /dev/shm"
    return f"{used / max(1, total):.0%} of /dev/shm is in use"


def _first_lines(message: str, limit: int = 2000) -> str:
    return message if len(message) <= limit else f"{message[: limit // 2]}\n...\n{message[-limit // 2 :]}"

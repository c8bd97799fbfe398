"""Recording of a short profile of a running job, never inside a measured window."""

from __future__ import annotations

import gc
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steptune.tuner.errors import RunnerError
from steptune.tuner.profiling.facts import OWN_MARK

if TYPE_CHECKING:
    import torch

TARGET_S = 0.6
MAX_STEPS = 10
"""Maximum number of profiled steps. A lower maximum would miss work that only some steps do, and give more weight to
the host's lead over the device at the beginning of a profile.
"""
WARM_UP_STEPS = 1
COLLECTION_MARK = "Python GC"
"""Name of a garbage collection in profiles with call stacks."""


def num_profiled_steps(step_time_ns: int) -> int:
    """Return the number of steps that fit into the intended duration of a profile, at least one."""
    return int(max(1, min(MAX_STEPS, TARGET_S * 1e9 // max(1, step_time_ns))))


def _export(recorder: Any, path: Path) -> None:
    """Write a trace and check it. A profiler that fails raises no error, but leaves no file, an empty one, or part of
    one.

    Raises:
        RunnerError: The trace is missing or incomplete.
    """
    recorder.export_chrome_trace(str(path))
    if not _is_whole(path):
        free = shutil.disk_usage(path.parent).free / 2**20
        raise RunnerError(
            f"the profiler could not write its trace to {path}, where {free:.3g} MiB are free: free disk space, or "
            "set STEPTUNE_DATA_DIRECTORY to a folder with more space"
        )


def _is_whole(path: Path) -> bool:
    """Say whether a file ends like a complete JSON object."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 64))
            return file.read().rstrip().endswith(b"}")
    except OSError:
        return False


@contextmanager
def _collections_marked() -> Iterator[None]:
    """Record garbage collections as annotations; otherwise a trace does not distinguish them from a sleep or a loop.

    Collections of the youngest generation are left out: they are short and frequent.
    """
    import torch

    running: list[Any] = []

    def mark(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] > 0:
            running.append(torch.profiler.record_function(COLLECTION_MARK))
            running[-1].__enter__()
        elif phase == "stop" and running:
            running.pop().__exit__(None, None, None)

    # A collection can begin inside a compiled step, which would compile this function, too.
    callback = torch.compiler.disable(mark) if "torch._dynamo" in sys.modules else mark
    gc.callbacks.append(callback)
    try:
        yield
    finally:
        if callback in gc.callbacks:  # the step may have cleared them
            gc.callbacks.remove(callback)


def record_profile(
    step: Callable[[], None], num_steps: int, device: torch.device, path: Path, options: dict[str, Any] | None = None
) -> None:
    """Run warm-up steps and `num_steps` recorded ones, and write a Kineto trace.

    One session per process: CUPTI loses the first kernels of later ones (pytorch #192021).

    Args:
        step: One step of the loop, `next(loader)` included.
        path: File with the suffix `.json`; torch.profiler takes twenty times as long to write `.json.gz`.

    Raises:
        RunnerError: The trace could not be written.
    """
    from torch.profiler import ProfilerActivity, profile, record_function, schedule

    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with (
        _collections_marked(),
        profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=WARM_UP_STEPS, active=num_steps, repeat=1),
            **(options or {}),
        ) as recorder,
    ):
        for number in range(WARM_UP_STEPS + num_steps):
            if number == WARM_UP_STEPS:
                with record_function(OWN_MARK):
                    pass
            step()
            recorder.step()
        if device.type == "cuda":
            import torch

            torch.cuda.synchronize(device)
    _export(recorder, path)


def record_details(step: Callable[[], None], num_steps: int, path: Path) -> None:
    """Run steps with call stacks, shapes and every allocation recorded, and write a Kineto trace of them.

    These steps are never used for timing. Devices are not profiled: a second session of CUPTI would lose kernels.

    Args:
        path: File with the suffix `.json`.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=True, record_shapes=True
    ) as recorder:
        for _ in range(num_steps):
            step()
    _export(recorder, path)

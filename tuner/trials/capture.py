"""Recording a short profile of a running job. Never inside a measured window."""

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
"""Fewer hide what happens in some steps only, and a lead that the host has before them weighs more."""
WARM_UP_STEPS = 1
COLLECTION_MARK = "Python GC"
"""Name that the profiler gives a collection where it records call stacks."""


def num_profiled_steps(step_time_ns: int) -> int:
    """Number of steps that fit into the aimed-at time, at least one."""
    return int(max(1, min(MAX_STEPS, TARGET_S * 1e9 // max(1, step_time_ns))))


def _export(recorder: Any, path: Path) -> None:
    """Write a trace. The profiler raises nothing where it could not: it leaves no file, or an empty one, or a part.

    Raises:
        RunnerError: The trace was not written to its end.
    """
    recorder.export_chrome_trace(str(path))
    if not _is_whole(path):
        free = shutil.disk_usage(path.parent).free / 2**20
        raise RunnerError(
            f"the profiler could not write its trace to {path}, where {free:.3g} MiB are free: free space, or put the "
            "studies elsewhere with STEPTUNE_DATA_DIRECTORY"
        )


def _is_whole(path: Path) -> bool:
    """Say whether a file ends as an object of JSON does."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 64))
            return file.read().rstrip().endswith(b"}")
    except OSError:
        return False


@contextmanager
def _collections_marked() -> Iterator[None]:
    """Record collections of garbage as annotations: nothing else in a trace tells them from a sleep or a loop.

    Collections of the youngest objects are short, and many.
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
        path: `.json`; torch.profiler takes twenty times as long to write `.json.gz`.

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

    Nothing is ever timed by it. The devices themselves are not watched: a second session of CUPTI would lose kernels.

    Args:
        path: `.json`.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=True, record_shapes=True
    ) as recorder:
        for _ in range(num_steps):
            step()
    _export(recorder, path)

"""Recording a short profile of a running job. Never inside a measured window."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steptune.tuner.profiling.facts import OWN_MARK

if TYPE_CHECKING:
    import torch

TARGET_S = 0.6
MAX_STEPS = 3
WARM_UP_STEPS = 1


def num_profiled_steps(step_time_ns: int) -> int:
    """As many steps as fit into the aimed-at time, at least one."""
    return int(max(1, min(MAX_STEPS, TARGET_S * 1e9 // max(1, step_time_ns))))


def record_profile(
    step: Callable[[], None], num_steps: int, device: torch.device, path: Path, options: dict[str, Any] | None = None
) -> None:
    """Runs warm-up steps and `num_steps` recorded ones, and writes a Kineto trace.

    One session per process: CUPTI loses the first kernels of later ones (pytorch #192021).

    Args:
        step: One step of the loop, `next(loader)` included.
        path: `.json`; torch.profiler takes twenty times as long to write `.json.gz`.
    """
    from torch.profiler import ProfilerActivity, profile, record_function, schedule

    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=WARM_UP_STEPS, active=num_steps, repeat=1),
        **(options or {}),
    ) as recorder:
        for number in range(WARM_UP_STEPS + num_steps):
            if number == WARM_UP_STEPS:
                with record_function(OWN_MARK):
                    pass
            step()
            recorder.step()
        if device.type == "cuda":
            import torch

            torch.cuda.synchronize(device)
    recorder.export_chrome_trace(str(path))


def record_memory(step: Callable[[], None], path: Path) -> None:
    """Runs a step with every allocation recorded, and writes a Kineto trace of it.

    The devices themselves are not watched: a second session of CUPTI would lose kernels.

    Args:
        path: `.json`.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorder:
        step()
    recorder.export_chrome_trace(str(path))

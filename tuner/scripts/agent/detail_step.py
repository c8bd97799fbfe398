"""Recording of one step with call stacks, shapes and every allocation; its durations are not used."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .tensor_blocks import TensorBlock


class DetailStep:
    """Recording of a step's details.

    Args:
        blocks: Returns the memory of the tensors that training is known to hold.
    """

    def __init__(self, blocks: Callable[[], list[TensorBlock]]) -> None:
        self._blocks = blocks
        self._before: list[TensorBlock] = []
        self._profiler: Any = None

    def begin(self) -> None:
        """Begin to record. Devices are not profiled: a second CUPTI session would lose kernels."""
        from torch.profiler import ProfilerActivity, profile

        self._before = self._blocks()
        older = torch.empty(1)
        self._profiler = profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=True, record_shapes=True
        )
        self._profiler.start()
        with _silence():
            del older  # torch warns, once in a thousand times, that the profiler did not see the allocation

    def end(self, trace: Path, blocks: Path) -> None:
        """Write the trace of the step, and the memory blocks that are known before and after it."""
        self._profiler.stop()
        blocks.write_text(json.dumps({"before": self._before, "after": self._blocks()}), encoding="utf-8")
        part = trace.with_name(f"{trace.name}.part")
        self._profiler.export_chrome_trace(str(part))
        part.rename(trace)
        self._profiler = None


@contextmanager
def _silence() -> Iterator[None]:
    """Discard what libraries write to standard error, without `sys.stderr`."""
    try:
        kept = os.dup(2)
    except OSError:  # closed by the script
        yield
        return
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)

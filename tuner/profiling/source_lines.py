"""Source line of the user's code that was running, if a trace has call stacks.

New traces have Python functions as events of their own ("train.py(54): main"); traces before 2022 have
the stack as text on each operator, innermost first.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

import numpy as np

from steptune.tuner.profiling.modules import Modules, find_modules
from steptune.tuner.profiling.operator_calls import OperatorCalls
from steptune.tuner.profiling.trace import Kind, Trace

FRAME = re.compile(r"^.+\(\d+\): .+$")
LIBRARY = re.compile(
    r"(^|[/\\])(site-packages|dist-packages|lib[/\\]python3[^/\\]*|torch|torchvision)[/\\]"
    r"|^<"
)
"""Paths of frames from Python, PyTorch and other installed packages, which are not the user's code."""
ROOT = re.compile(r"^(\w+)(?:\.py\(|[/\\])")
"""Pattern for the top-level module in a path that torch.profiler shortened by removing a `sys.path` entry."""
LIBRARIES = (sys.stdlib_module_names - {"cmd", "code", "profile", "trace"}) | {
    *("steptune", "numpy", "torchmetrics", "torchdata", "triton", "functorch"),
    *("accelerate", "deepspeed", "lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "ray"),
    *("datasets", "diffusers", "peft", "timm", "tqdm", "transformers", "trl", "webdataset"),
}
"""Names of modules that are not the user's. The list omits standard modules that training does not use and that have
names common for scripts.
"""


class SourceLines:
    """Lookup of source lines; without call stacks in the trace, every answer is empty.

    Args:
        modules: Modules of the trace's operators; by default those that the trace itself shows.
        elsewhere: Function that returns the line of an operator (a row of `trace.host`) without a stack in this trace.

    Attributes:
        modules: Modules of the trace's operators.
    """

    def __init__(
        self,
        trace: Trace,
        calls: OperatorCalls,
        modules: Modules | None = None,
        elsewhere: Callable[[int], str] = lambda row: "",
    ) -> None:
        self.modules = find_modules(trace, calls) if modules is None else modules
        self._elsewhere = elsewhere
        self._trace = trace
        self._calls = calls
        own = np.array([is_user_frame(name) for name in trace.names], dtype=bool)
        functions = np.flatnonzero(trace.host.kind == Kind.PYTHON)
        self._frames = functions[own[trace.host.name[functions]]]
        self._has_stacks = bool((trace.host.stack >= 0).any())
        self._has_lines = self._has_stacks or len(self._frames) > 0

    def at(self, time: int, thread: int) -> str:
        """Return the innermost function of the user's code that runs at a moment on a thread."""
        host = self._trace.host
        rows = self._frames[: np.searchsorted(host.start[self._frames], time, side="right")]
        rows = rows[(host.end[rows] > time) & (host.thread[rows] == thread)]
        return self._trace.names[host.name[rows[-1]]] if len(rows) else ""

    def of(self, operator: int) -> str:
        """Return the line that called an operator (a row of `trace.host`); for a gradient, the line of its forward
        operator.
        """
        host = self._trace.host
        if line := self._elsewhere(operator):
            return line
        if self._has_lines and self.modules.forward_of[operator] >= 0:
            operator = int(self.modules.forward_of[operator])
        row = operator
        while self._has_stacks and row >= 0:
            if host.stack[row] >= 0:
                return user_line(self._trace.stacks[host.stack[row]])
            row = int(self._calls.parent[row])
        return self.at(int(host.start[operator]), int(host.thread[operator]))


def user_line(stack: str) -> str:
    """Return the innermost frame of the user's code in a stack given as text; empty if all frames are library code."""
    frames = (frame.strip() for frame in re.split(r"[;\n]", stack))
    return next((frame for frame in frames if is_user_frame(frame)), "")


def is_user_frame(frame: str) -> bool:
    """Say whether a frame ("train.py(54): main") is the user's code, judged by its path."""
    if not FRAME.match(frame) or LIBRARY.search(frame):
        return False
    root = ROOT.match(frame)
    return root is None or root[1] not in LIBRARIES

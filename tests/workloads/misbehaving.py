"""A workload that trains well as it is and misbehaves under a candidate.

A deed of the step is done where operators use three threads, a deed of the loader where there are
workers: so the baseline is fine, and the candidate is not.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from regression import Numbers, Regression
from torch.utils.data import get_worker_info

BAD_BATCH = 7


def _hang() -> None:
    while True:
        time.sleep(1)


def _out_of_memory() -> None:
    hoard = []
    while True:
        hoard.append(torch.ones(4 << 20))


def _out_of_python_memory() -> None:
    hoard = []
    while True:
        hoard.append(bytearray(16 << 20))


def _raise() -> None:
    raise RuntimeError("the candidate went astray")


def _print() -> None:
    for _ in range(4):
        sys.stdout.write("x" * (1 << 20))
        sys.stderr.write("y" * (1 << 20))


def _children() -> None:
    """One in the session of the trial, one in a session of its own, and one whose parent is gone."""
    for detached in (False, True):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=detached)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)


STEP_DEEDS: dict[str, Callable[[], object]] = {
    "none": lambda: None,
    "raise": _raise,
    "hang": _hang,
    "out_of_memory": _out_of_memory,
    "out_of_python_memory": _out_of_python_memory,
    "segfault": lambda: ctypes.string_at(0),
    "exit": lambda: os._exit(3),
    "exit_quietly": lambda: os._exit(0),
    "sys_exit": lambda: sys.exit(4),
    "print": _print,
    "children": _children,
}


class Misbehaving(Regression):
    """Does a deed at a moment: "build", "step" (the first), "window" (a measured one) or "profile"."""

    def __init__(self, deed: str = "none", at: str = "step", rank: int = -1) -> None:
        super().__init__()
        self._deed = deed
        self._at = at
        self._rank = rank
        self._num_steps = 0

    def model(self) -> torch.nn.Module:
        self._reach("build")
        return super().model()

    def dataset(self) -> "MisbehavingNumbers":
        return MisbehavingNumbers(self.length, self._deed, self.global_batch)

    def loss(self, model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        self._num_steps += 1
        if self._num_steps == 1:
            self._reach("step")
        if _is_measured():
            self._reach("window")
        if torch.autograd._profiler_enabled():
            self._reach("profile")
        loss = super().loss(model, batch)
        spoilt = self._deed == "spoil" and _is_measured() and self._is_candidate("window")
        return loss * float("nan") if spoilt else loss

    def _is_candidate(self, moment: str) -> bool:
        return moment == self._at and torch.get_num_threads() == 3 and self._is_rank()

    def _is_rank(self) -> bool:
        return self._rank < 0 or (torch.distributed.is_initialized() and torch.distributed.get_rank() == self._rank)

    def _reach(self, moment: str) -> None:
        if self._is_candidate(moment) and self._deed in STEP_DEEDS:
            Path(self.directory, "moment").touch()
            STEP_DEEDS[self._deed]()


class Killed(Regression):
    """Somebody ends its process, or the trial server, while it builds the model, as often as a file says.

    Args:
        left: The file.
        by: The signal.
        victim: "rank" or "server".
    """

    def __init__(self, left: str, by: int = signal.SIGKILL, victim: str = "rank") -> None:
        super().__init__()
        self._left = Path(left)
        self._by = by
        self._victim = victim

    def model(self) -> torch.nn.Module:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() != 1:
            return super().model()  # what the other one writes may be read half
        left = int(self._left.read_text())
        if left:
            self._left.write_text(str(left - 1))
            os.kill(os.getpid() if self._victim == "rank" else os.getppid(), self._by)
            time.sleep(60)
        return super().model()


def _is_measured() -> bool:
    """Say whether this step belongs to a window; a workload cannot know, so the stack is asked."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "take_window":
        frame = frame.f_back
    return frame is not None


class MisbehavingNumbers(Numbers):
    """Does the deed in a worker, on its seventh batch."""

    def __init__(self, length: int, deed: str, batch: int) -> None:
        super().__init__(length)
        self._deed = deed
        self._batch = batch
        self._given = 0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._given += 1
        if get_worker_info() is not None and self._given > (BAD_BATCH - 1) * self._batch:
            if self._deed == "worker_killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self._deed == "worker_exits":
                os._exit(5)
            if self._deed == "worker_raises":
                raise ValueError("this sample is damaged")
            if self._deed == "worker_hangs":
                _hang()
        return super().__getitem__(index)

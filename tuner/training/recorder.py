"""Interface for recording work and replaying it, with a Python implementation as its specification."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Recorded(Protocol):
    """Recorded work, which can be replayed without Python."""

    @property
    def outputs(self) -> Any:
        """Results of the recorded function; the same tensors after every replay."""

    def replay(self) -> None: ...


class Recorder(Protocol):
    """Recorder of work for replay."""

    def warm_up(self, run: Callable[[], object], count: int) -> None:
        """Run the function `count` times before it is recorded.

        Raises:
            CaptureError: An operation in it cannot be recorded.
        """

    def record(self, runs: Sequence[Callable[[], object]]) -> list[Recorded]:
        """Record functions that share memory. Their recordings must be replayed in the given order.

        Raises:
            CaptureError: An operation in them cannot be recorded.
        """

    def finish(self) -> None:
        """Wait until all replays have ended."""


class Repeater:
    """Recorder that replays by calling the functions again in Python.

    It is the specification against which graphs are tested, and their substitute without CUDA.
    """

    def warm_up(self, run: Callable[[], object], count: int) -> None:
        for _ in range(count):
            run()

    def record(self, runs: Sequence[Callable[[], object]]) -> list[Recorded]:
        return [_Repeated(run) for run in runs]

    def finish(self) -> None:
        """Do nothing: every replay has run when the call returns."""


class _Repeated:
    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run
        self.outputs: Any = None

    def replay(self) -> None:
        self.outputs = self._run()

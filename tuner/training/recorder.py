"""Making work replayable: what records a step, and what it does said in Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Recorded(Protocol):
    """Work that can be run again without Python."""

    @property
    def outputs(self) -> Any:
        """Results of the recorded function; the same tensors after every replay."""

    def replay(self) -> None: ...


class Recorder(Protocol):
    """Makes work replayable."""

    def warm_up(self, run: Callable[[], object], count: int) -> None:
        """Run what is to be recorded.

        Raises:
            CaptureError: Something in it cannot be recorded.
        """

    def record(self, runs: Sequence[Callable[[], object]]) -> list[Recorded]:
        """Records functions that share memory and are replayed in this order.

        Raises:
            CaptureError: Something in them cannot be recorded.
        """

    def finish(self) -> None:
        """Wait until nothing is replayed any more."""


class Repeater:
    """Graph in Python: the recorded functions are called again. The specification that graphs are tested against, and
    what stands for them where there is no CUDA.
    """

    def warm_up(self, run: Callable[[], object], count: int) -> None:
        for _ in range(count):
            run()

    def record(self, runs: Sequence[Callable[[], object]]) -> list[Recorded]:
        return [_Repeated(run) for run in runs]

    def finish(self) -> None:
        """Do nothing: everything has run when it is called."""


class _Repeated:
    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run
        self.outputs: Any = None

    def replay(self) -> None:
        self.outputs = self._run()

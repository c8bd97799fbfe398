"""Ctrl-C and SIGTERM as `KeyboardInterrupt`, but never within a transaction.

Raised inside of one, it would leave a connection behind that is open for as long as the traceback exists: a study that
is interrupted records the best so far while it handles that exception, and would wait for its own lock in vain.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Held(threading.local):
    """Interrupts that are held back in one thread. Signals reach only the main thread."""

    depth = 0
    pending = False


_held = _Held()


@contextmanager
def held_back() -> Iterator[None]:
    """Delay the interrupts of `interruptible` until the end of this context."""
    _held.depth += 1
    try:
        yield
    finally:
        _held.depth -= 1
        if _held.pending and not _held.depth:
            _held.pending = False
            raise KeyboardInterrupt


class interruptible:
    """Context in which SIGTERM interrupts as Ctrl-C does. SIGINT stays ignored if it was ignored before, as in a
    shell's background jobs.
    """

    def __enter__(self) -> None:
        numbers = [signal.SIGTERM]
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            numbers.append(signal.SIGINT)
        self._before = {number: signal.signal(number, _interrupt) for number in numbers}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _interrupt(*_: Any) -> None:
    if _held.depth:
        _held.pending = True
    else:
        raise KeyboardInterrupt

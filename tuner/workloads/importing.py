"""Import of a user's file that may have been written as a script.

A script without `if __name__ == "__main__":` trains, reads its arguments or starts processes as soon as it is imported.
Such an operation is refused when it happens, with its line; any other statement that takes long is reported while it
runs.
"""

from __future__ import annotations

import ast
import linecache
import multiprocessing.process
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any
from unittest import mock

from steptune.tuner.errors import WorkloadRejectedError
from steptune.tuner.user_code import is_users, place_of

SLOW_S = 5.0
"""Time, in seconds, after which the module-level statement being executed is reported; imports are exempt."""
SAMPLE_S = 0.5
WAY_OUT = (
    'Steptune imports the file: move code that should run only as a script under `if __name__ == "__main__":`, '
    "and keep the workload's class outside of it"
)


@contextmanager
def noticing_scripts(say: Callable[[str], None] | None = None) -> Iterator[None]:
    """Refuse operations that only a script performs, while a user's module is imported inside this context.

    Args:
        say: Called once if a statement of a module takes long, with that statement, while it runs.

    Raises:
        WorkloadRejectedError: The module trains, starts processes by spawning, or ends Python.
    """
    import torch

    backward, start = torch.autograd.backward, multiprocessing.process.BaseProcess.start

    def guarded_backward(*arguments: Any, **options: Any) -> Any:
        _refuse("trains")
        return backward(*arguments, **options)

    def guarded_start(process: Any) -> None:
        method = process._start_method or multiprocessing.get_start_method()
        if method != "fork":
            _refuse(f"starts a process by {method}, which would import the file once more,")
        start(process)

    with (
        mock.patch.object(torch.autograd, "backward", guarded_backward),
        mock.patch.object(multiprocessing.process.BaseProcess, "start", guarded_start),
        nullcontext() if say is None else _watched(say),
    ):
        try:
            yield
        except SystemExit as error:
            place = place_of(error) or "the workload's module"
            raise WorkloadRejectedError(
                f"{place}, exits Python (SystemExit: {error}) during the import. {WAY_OUT}"
            ) from error


def _refuse(what: str) -> None:
    """Refuse an operation of the module that is being imported, if the module is the user's own and not a library's."""
    frame = _module_frame(sys._getframe(1))
    if frame is not None:
        place = f"{frame.f_code.co_filename}, line {frame.f_lineno}"
        raise WorkloadRejectedError(f"{place}, {what} while it is imported. {WAY_OUT}")


def _module_frame(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the innermost module that is running code, if the module is the user's."""
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    return frame if frame is not None and is_users(frame.f_code.co_filename) else None


@contextmanager
def _watched(say: Callable[[str], None]) -> Iterator[None]:
    """Watch the current thread for slow statements: sample its stack from another thread."""
    ended, thread = threading.Event(), threading.get_ident()

    def watch() -> None:
        statement, since = None, 0
        while not ended.wait(SAMPLE_S):
            frame = _module_frame(sys._current_frames().get(thread))
            found = None if frame is None else _statement(frame)
            statement, since = found, since + 1 if found == statement else 0
            if statement is not None and since * SAMPLE_S >= SLOW_S:
                say(f"still importing {statement}, after {SLOW_S:g} s. {WAY_OUT}")
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _statement(frame: FrameType) -> str | None:
    """Return the module-level statement being executed, as `file, line 12`; None for an import, which may take long."""
    path = frame.f_code.co_filename
    try:
        body = ast.parse("".join(linecache.getlines(path))).body
    except SyntaxError:
        return None
    running = next((node for node in body if node.lineno <= frame.f_lineno <= (node.end_lineno or node.lineno)), None)
    if running is None or isinstance(running, ast.Import | ast.ImportFrom):
        return None
    return f"{path}, line {running.lineno}"

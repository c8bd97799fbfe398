"""Work that loads torch in a separate process, because the parent of a study never does."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import IO

from steptune.tuner.errors import RunnerError
from steptune.tuner.installation import IMPORT_ROOT

PROGRAM = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
module, _, function = sys.argv[2].partition(":")
getattr(importlib.import_module(module), function)()
"""
"""Source of the program that the process runs. `-P` keeps modules of the user's folder off the path, so the program
adds the import root.
"""
_LENGTH = struct.Struct("<Q")


class OwnProcess:
    """Process that runs a given function, which calls `answer` to answer requests one after another.

    Args:
        function: Module and name of the function, such as "steptune.tuner.scripts.judge:main".
        failed: Task that failed, for the error message.
    """

    def __init__(self, function: str, failed: str) -> None:
        self._function, self._failed = function, failed
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process, which then loads its modules in the background."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._errors = os.fdopen(os.memfd_create("errors"), "w+b")
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM, str(IMPORT_ROOT), self._function],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
            )
        return self._process

    def wait_until_loaded(self) -> None:
        """Wait until the process has loaded its modules.

        Raises:
            RunnerError: The process failed.
        """
        self.call(b"")

    def call(self, given: bytes) -> bytes:
        """Send a request, and return the answer.

        Raises:
            RunnerError: The process failed.
        """
        process = self.start()
        assert process.stdin is not None, "the process must have a pipe for its input"
        assert process.stdout is not None, "the process must have a pipe for its output"
        try:
            _write(process.stdin, given)
            return _read(process.stdout)
        except (BrokenPipeError, EOFError):
            process.wait()
        assert self._errors is not None, "the process must have a file for its errors"
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
        raise RunnerError(f"{self._failed}: {last[0] if last else 'no message'}")

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
        if self._errors is not None:
            self._errors.close()
            self._errors = None


def in_own_process(function: str, given: bytes, failed: str) -> bytes:
    """Return the answer to one request, from a process for this request alone.

    Raises:
        RunnerError: The process failed.
    """
    process = OwnProcess(function, failed)
    try:
        return process.call(given)
    finally:
        process.close()


def answer(function: Callable[[bytes], bytes]) -> None:
    """Answer requests from standard input on standard output, until the input is closed."""
    while True:
        try:
            given = _read(sys.stdin.buffer)
        except EOFError:
            return
        _write(sys.stdout.buffer, function(given) if given else b"")


def _write(stream: IO[bytes], value: bytes) -> None:
    stream.write(_LENGTH.pack(len(value)) + value)
    stream.flush()


def _read(stream: IO[bytes]) -> bytes:
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(header)
    value = stream.read(length)
    if len(value) < length:
        raise EOFError
    return value

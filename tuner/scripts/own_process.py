"""Work that loads torch, in a process of its own: the parent of a study never does."""

from __future__ import annotations

import subprocess
import sys

from steptune.tuner.errors import RunnerError
from steptune.tuner.installation import IMPORT_ROOT

PROGRAM = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
module, _, function = sys.argv[2].partition(":")
getattr(importlib.import_module(module), function)()
"""
"""`-P` keeps modules of the user's folder out, so the import root is put in by hand."""


def in_own_process(function: str, given: bytes, failed: str) -> bytes:
    """Call a function that reads standard input and writes standard output; return what it wrote.

    Args:
        function: Its module and name, like "steptune.tuner.scripts.judge:main".
        failed: What could not be done, for the message.

    Raises:
        RunnerError: The process failed.
    """
    ended = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, str(IMPORT_ROOT), function], input=given, capture_output=True, check=False
    )
    if ended.returncode:
        last = ended.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise RunnerError(f"{failed}: {last[0] if last else 'no message'}")
    return ended.stdout

"""Profiling from inside a script: one line in it installs the hooks of `steptune profile -- COMMAND`."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TypeVar

from steptune.tuner.installation import IMPORT_ROOT
from steptune.tuner.scripts.agent import FOLDER
from steptune.tuner.scripts.record import SETTINGS

T = TypeVar("T")
_ANSWER = """
import sys
sys.path.insert(0, sys.argv[1])
from steptune.service.script_profile import print_watched
print_watched(sys.argv[2])
"""
"""Source of the program that prints the profile, in a process separate from the training."""


def watch(loader: T = None) -> T:  # type: ignore[assignment]
    """Profile the training loop that follows, once, and print the profile on standard error while the loop continues.

        for batch in steptune.watch(loader): ...

    Without a loader, the line stands anywhere before the loop, like before `trainer.train()`. A second call does
    nothing, like any call under `steptune profile -- COMMAND`. Of several ranks the first is recorded.

    Args:
        loader: A loader, or any other iterable.

    Returns:
        The loader itself.
    """
    from steptune.tuner.scripts.agent.hooks import install, installed

    if FOLDER in os.environ or installed():
        return loader
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own messages
    answer = _Answer()
    hooks = install(str(answer.folder))
    hooks.adopt()
    hooks.finished = answer.begin
    return loader


class _Answer:
    """Process that prints the profile, and the folder of the record from which it is made."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="steptune-script-"))
        (self.folder / SETTINGS).write_text(json.dumps({"full": True}), encoding="utf-8")
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        atexit.register(self._end)

    def begin(self) -> None:
        if os.getpid() != self._owner:  # a forked child, whose training was not asked for
            return
        command = [sys.executable, "-P", "-c", _ANSWER, str(IMPORT_ROOT), str(self.folder)]
        self._process = subprocess.Popen(command)

    def _end(self) -> None:
        if os.getpid() != self._owner:
            return
        if self._process is not None:
            self._process.wait()
        shutil.rmtree(self.folder)

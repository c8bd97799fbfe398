"""Commands that run as the user of trials, who alone may look into all that is theirs.

Whoever has a user may read the environment of its processes, and stop or kill them. So such a command is given nothing
of ours, and a time.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from steptune.tuner.errors import RunnerError

TIMEOUT_S = 60.0


class DisturbedError(RunnerError):
    """The command was killed or stopped by somebody who may."""


def run_as(as_user: Sequence[str], *command: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command to its end, whatever its status.

    Args:
        as_user: The command that runs another one as that user; empty for ourselves.
        given: Its input.

    Raises:
        DisturbedError: It did not end by itself within `TIMEOUT_S`.
    """
    try:
        done = subprocess.run(
            [*as_user, *command],
            cwd="/",
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
            input=given,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DisturbedError(f"{command[0]} did not end within {TIMEOUT_S:g} s") from None
    if done.returncode < 0:
        raise DisturbedError(f"{command[0]} was ended by signal {-done.returncode}")
    return done

"""Commands run as the operating-system user of the trials, the only user who may read all files and processes of the
trials.

User code with the same user may read the environment of such a command, and stop or kill it. So the command gets
nothing from our environment, and has a time limit.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from steptune.tuner.errors import RunnerError

TIMEOUT_S = 60.0


class DisturbedError(RunnerError):
    """Error for a command that other processes of its user killed or stopped."""


def run_as(as_user: Sequence[str], *command: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command to its end, and accept any exit status.

    Args:
        as_user: Command prefix that runs a command as that user; empty for our own user.
        given: Standard input of the command.

    Raises:
        DisturbedError: The command did not end by itself within `TIMEOUT_S`.
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
        raise DisturbedError(f"{command[0]} was killed by signal {-done.returncode}")
    return done

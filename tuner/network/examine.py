"""All checks of a host, and all of the logs of a run."""

from __future__ import annotations

from pathlib import Path

from tuner.errors import ChoiceError
from tuner.network.checks import CHECKS
from tuner.network.finding import NetworkFinding, unknown
from tuner.network.host import Host
from tuner.network.tree import Unreadable


def examine_host(root: Path = Path("/")) -> list[NetworkFinding]:
    """What the checks say of the host whose files are under `root`.

    Raises:
        ChoiceError: `root` is no directory.
    """
    if not root.is_dir():
        raise ChoiceError(f"{root} is no directory: name one that holds a host's sys, proc, etc and dev")
    host = Host(root)
    findings: list[NetworkFinding] = []
    for check in CHECKS:
        try:
            findings.extend(check.examine(host))
        except Unreadable as error:
            findings.append(unknown(check.name, str(error), fix="run as root, or copy it with sudo"))
    return findings

"""Examination of a host by all checks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from steptune.tuner.errors import ChoiceError
from steptune.tuner.network.checks import CHECKS, Check
from steptune.tuner.network.finding import NetworkFinding, unknown
from steptune.tuner.network.host import Host
from steptune.tuner.network.tree import UnreadableError


def examine_host(root: Path = Path("/")) -> list[NetworkFinding]:
    """Return the findings of all checks about the host whose files are under `root`.

    Raises:
        ChoiceError: `root` is not a directory, or holds no host's files, whose absence would say nothing about a host.
    """
    if not root.is_dir():
        raise ChoiceError(
            f"{root} is not a directory: give a directory with copies of a host's /sys, /proc, /etc and /dev"
        )
    if not (root / "sys").is_dir():
        raise ChoiceError(
            f"{root} contains no sys: give a directory with copies of a host's /sys, /proc, /etc and /dev"
        )
    host = Host(root)
    return [finding for check in CHECKS for finding in _examined(check, host)]


def _examined(check: Check, host: Host) -> Iterator[NetworkFinding]:
    """Yield a check's findings up to its first unreadable file, and a finding about that file."""
    try:
        yield from check.examine(host)
    except UnreadableError as error:
        yield unknown(check.name, str(error), fix="run as root, or copy the file with sudo")

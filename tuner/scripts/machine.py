"""Description of the machine, with peak rates that torch measures, in a separate process."""

from __future__ import annotations

from pathlib import Path

import msgspec

from steptune.tuner.hardware import describe_environment
from steptune.tuner.records import Environment
from steptune.tuner.scripts.own_process import answer, in_own_process


def described(kind: str, directory: Path, num_ranks: int) -> Environment:
    """Describe the machine, in a separate process.

    Raises:
        RunnerError: The process failed.
    """
    given = msgspec.json.encode((kind, str(directory), num_ranks))
    found = in_own_process("steptune.tuner.scripts.machine:main", given, "this machine could not be described")
    return msgspec.json.decode(found, type=Environment)


def main() -> None:
    """Answer requests to describe the machine."""
    answer(_described)


def _described(given: bytes) -> bytes:
    kind, directory, num_ranks = msgspec.json.decode(given, type=tuple[str, str, int])
    return msgspec.json.encode(describe_environment(kind, Path(directory), num_ranks))

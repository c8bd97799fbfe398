"""Description of the machine, with ceilings that torch measures: runs in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from steptune.tuner.hardware import describe_environment
from steptune.tuner.records import Environment
from steptune.tuner.scripts.own_process import in_own_process


def described(kind: str, directory: Path, num_ranks: int) -> Environment:
    """Describe the machine, from a process of its own.

    Raises:
        RunnerError: It failed.
    """
    given = msgspec.json.encode((kind, str(directory), num_ranks))
    found = in_own_process("steptune.tuner.scripts.machine:main", given, "this machine could not be described")
    return msgspec.json.decode(found, type=Environment)


def main() -> None:
    """Describe the machine that standard input asks for, and print it."""
    kind, directory, num_ranks = msgspec.json.decode(sys.stdin.buffer.read(), type=tuple[str, str, int])
    sys.stdout.buffer.write(msgspec.json.encode(describe_environment(kind, Path(directory), num_ranks)))

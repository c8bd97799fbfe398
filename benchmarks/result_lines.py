"""Results files with one JSON line a row, written as rows come."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path


def append(out: Path, line: Mapping) -> None:
    """Write a row as soon as it is known, so that it stays though a later one fails."""
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")


def kept_lines(out: Path, *, small: bool) -> list[dict]:
    """Lines of all sittings: those of dry runs, or the others."""
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return [line for line in lines if line["small"] == small]

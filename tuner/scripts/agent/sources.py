"""Source files in the form that a recommendation compares: without blank lines, and without lines that call Steptune.

So a script stays the same script once `steptune.enable()` stands in it, and its other lines keep their numbers.
"""

from __future__ import annotations

import hashlib
import re

_IMPORTED_AS = re.compile(r"^\s*import steptune as (\w+)", re.MULTILINE)


def _lines(text: str) -> list[str]:
    """Split a text into lines as Python counts them: only at newlines and carriage returns, not at form feeds or
    Unicode line separators.
    """
    return re.split(r"\r\n|\r|\n", text)


def counted_lines(text: str) -> list[int]:
    """Return the numbers of the lines that are compared: all except blank lines and calls of Steptune."""
    names = "|".join(["steptune", *_IMPORTED_AS.findall(text)])
    steptunes = re.compile(rf"\s*(import steptune\b|from steptune import\b|(({names})\.)?enable\()")
    counted, num_open = [], 0
    for number, line in enumerate(_lines(text), start=1):
        if num_open > 0 or steptunes.match(line):
            num_open += line.count("(") - line.count(")")
        elif line.strip():
            counted.append(number)
    return counted


def source_digest(text: str) -> str:
    """Return the digest of the compared lines."""
    lines = _lines(text)
    counted = "\n".join(lines[number - 1].rstrip() for number in counted_lines(text))
    return hashlib.sha256(counted.encode()).hexdigest()[:16]

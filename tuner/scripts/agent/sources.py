"""Source files as a recommendation knows them: without blank lines and the lines that call Steptune.

So a script stays the same script once `steptune.enable()` stands in it, and its other lines keep their numbers.
"""

from __future__ import annotations

import hashlib
import re

_STEPTUNES = re.compile(r"\s*(import steptune\b|from steptune import\b|(steptune\.)?enable\()")


def _lines(text: str) -> list[str]:
    """Lines as Python counts them: a form feed or a separator in a string begins none."""
    return re.split(r"\r\n|\r|\n", text)


def counted_lines(text: str) -> list[int]:
    """Numbers, in the file, of the lines that count."""
    lines = enumerate(_lines(text), start=1)
    return [number for number, line in lines if line.strip() and not _STEPTUNES.match(line)]


def source_digest(text: str) -> str:
    """Digest of the lines that count."""
    lines = _lines(text)
    counted = "\n".join(lines[number - 1].rstrip() for number in counted_lines(text))
    return hashlib.sha256(counted.encode()).hexdigest()[:16]

"""Reading of files that are decoded at once: JSON of other profilers, plain or compressed, up to a size."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any

import msgspec

from steptune.tuner.profiling.decoded_size import check_decoded_size
from steptune.tuner.profiling.trace import TraceError

MOST_BYTES = 512 << 20
"""Maximum unpacked size of a file, in bytes: a JAX profile with a million events takes about half of that."""
MOST_DECODED_BYTES = 4 << 30
"""Maximum memory of a decoded file, in bytes: about seven times its size as text."""
BEGINNING_BYTES = 1 << 16
_GZIP = b"\x1f\x8b"


def beginning(path: Path) -> bytes:
    """Return the first bytes of a file, unpacked; empty if it cannot be unpacked."""
    with path.open("rb") as file:
        start = file.read(BEGINNING_BYTES)
    if not start.startswith(_GZIP):
        return start
    try:
        return zlib.decompressobj(wbits=31).decompress(start, BEGINNING_BYTES)
    except zlib.error:
        return b""


def json_of(path: Path) -> Any:
    """Decode the JSON in a file.

    Raises:
        TraceError: The file is not JSON, is damaged, or exceeds the size limit.
    """
    with path.open("rb") as file:
        compressed = file.read(2) == _GZIP
    try:
        with gzip.open(path) if compressed else path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise TraceError("the compressed file is truncated or damaged: copy it again") from None
    if len(text) > MOST_BYTES:
        raise TraceError(f"it has more than {MOST_BYTES >> 20} MiB: record a shorter trace (ten steps are enough)")
    check_decoded_size(text, MOST_DECODED_BYTES)
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(
            f"it is not JSON ({error}): the file is truncated or was modified; copy or record it again"
        ) from None

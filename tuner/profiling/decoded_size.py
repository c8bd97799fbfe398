"""Memory limits for a file that is decoded at once: its text, and the decoded objects.

JSON `[],` is three bytes of text and 72 bytes of objects: a file of 512 MiB could take 13 GB.
"""

from __future__ import annotations

from collections.abc import Iterable

from steptune.tuner.profiling.trace import TraceError

MOST_TEXT_BYTES = 4 << 30
SMALL_BYTES = 64 << 20
"""Maximum length, in bytes, of a text that is decoded without an estimate: decoding it never takes more than 2 GB."""
COSTS = {b"{": 150, b"[": 80, b",": 64}
"""Approximate bytes that msgspec needs for each decoded object, for each list and for each element after the first, by
the JSON character that stands for it: a brace, a bracket or a comma.
"""


def joined(parts: Iterable[bytes]) -> bytes:
    """Join the parts to one text.

    Raises:
        TraceError: The text exceeds the size limit.
    """
    kept, length = [], 0
    for part in parts:
        length += len(part)
        if length > MOST_TEXT_BYTES:
            raise TraceError(
                f"it has more than {_size(MOST_TEXT_BYTES)} without a line that ends an event, unlike the files of "
                "torch.profiler: record a shorter stretch (ten steps are enough)"
            )
        kept.append(part)
    return b"".join(kept)


def check_decoded_size(text: bytes, most_bytes: int) -> None:
    """Refuse a text whose decoded objects would take too much memory.

    Raises:
        TraceError: The estimated size of its objects exceeds `most_bytes`.
    """
    if len(text) <= SMALL_BYTES:
        return
    estimated = sum(cost * text.count(sign) for sign, cost in COSTS.items())
    if estimated > most_bytes:
        raise TraceError(
            f"decoding its {_size(len(text))} would take about {_size(estimated)} of memory, more than the limit of "
            f"{_size(most_bytes)}: record a shorter stretch (ten steps are enough)"
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes >> 20} MiB"

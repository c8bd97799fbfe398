"""Cache of rendered pages: all readers share one copy of a page until its content changes.

Rendering a page takes ten times as long as reading its JSON, so it is done once for each version of the content,
however many readers ask. What differs between readers is left open in the copy (`opening`) and filled in for each: the
pieces between are compressed once, as parts of one gzip stream. What else differs between readers is a part of the key.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import struct
import threading
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass

from markupsafe import Markup

from steptune.service.kept import Kept

MAX_BYTES = 64 << 20
"""Maximum total bytes of the rendered pages cached in one process, compressed and plain. The least recently read pages
are dropped first.
"""
NUM_LOCKS = 64
LEVEL = 5
"""Compression level of gzip: it takes 5 ms to compress a page of 200 trials to a tenth of its size."""
_MARK = secrets.token_hex(16)
"""Random marker of placeholders, which no text of a user can contain."""
_OPENINGS = re.compile(rf"\x02{_MARK}:(\w+)\x03")
_GZIP_HEADER = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"


def opening(name: str) -> Markup:
    """Return a placeholder for a text of a rendered page that differs between readers."""
    return Markup(f"\x02{_MARK}:{name}\x03")


@dataclass(frozen=True)
class Fragment:
    """Part of a page that is rendered and compressed once, however often the rest of the page changes."""

    plain: bytes
    packed: bytes
    name: str

    @classmethod
    def of(cls, text: str) -> Fragment:
        plain = text.encode("utf-8", "replace")
        return cls(plain, _deflated(plain, last=False), hashlib.sha256(plain).hexdigest())

    def __html__(self) -> Markup:
        return opening(self.name)


@dataclass(frozen=True)
class Piece:
    """Text that is the same for all readers. `name` is the name of the placeholder that follows the text; empty if none
    follows.
    """

    plain: bytes
    packed: bytes
    name: str


@dataclass(frozen=True)
class Copy:
    """A rendered page with placeholders for the texts that differ between readers."""

    pieces: tuple[Piece, ...]
    digest: str

    @classmethod
    def of(cls, text: str, fragments: Iterable[Fragment] = ()) -> Copy:
        """Build a shared page from a text that was rendered with placeholders. The placeholders of these fragments are
        filled now, the others for each reader.
        """
        known = {fragment.name: fragment for fragment in fragments}
        found = _OPENINGS.split(text)
        pieces: list[Piece] = []
        for one, name in zip(found[::2], [*found[1::2], None], strict=True):
            plain, fragment = one.encode("utf-8", "replace"), known.get(name or "")
            pieces.append(Piece(plain, _deflated(plain, last=name is None), name if name and not fragment else ""))
            if fragment is not None:
                pieces.append(Piece(fragment.plain, fragment.packed, ""))
        whole = _OPENINGS.sub(r"{\1}", text).encode("utf-8", "replace")
        return cls(tuple(pieces), hashlib.sha256(whole).hexdigest())

    @property
    def size_bytes(self) -> int:
        return sum(len(piece.plain) + len(piece.packed) for piece in self.pieces)

    def tag(self, fillings: Mapping[str, str]) -> str:
        """Return the entity tag of the page with these texts in its placeholders."""
        filled = [fillings[piece.name] for piece in self.pieces if piece.name]
        return hashlib.sha256(f"{self.digest}{filled}".encode()).hexdigest()[:16]

    def plain(self, fillings: Mapping[str, str]) -> bytes:
        return b"".join(piece.plain + (fillings[piece.name].encode() if piece.name else b"") for piece in self.pieces)

    def packed(self, fillings: Mapping[str, str]) -> bytes:
        """Return the page as one gzip stream. Only the texts for its placeholders are compressed now."""
        plain = self.plain(fillings)
        parts = [_GZIP_HEADER]
        for piece in self.pieces:
            parts.append(piece.packed)
            if piece.name:
                parts.append(_deflated(fillings[piece.name].encode(), last=False))
        parts.append(struct.pack("<II", zlib.crc32(plain), len(plain) & 0xFFFFFFFF))
        return b"".join(parts)


class PageCopies:
    """Rendered pages, cached in one process; several threads may use the cache."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._copies: Kept[tuple[Hashable, Copy]] = Kept(max_bytes)
        self._rendering = tuple(threading.Lock() for _ in range(NUM_LOCKS))

    def get(self, key: Hashable, version: Hashable, make: Callable[[], Copy]) -> Copy:
        """Return a cached page; render it first if this version is not in the cache. Of several simultaneous requests,
        one renders it.

        Args:
            key: The page, and all that differs between its readers, except what fills its placeholders.
            version: Version of the page's content, read first: `make` reads this version or a later one.
            make: Renders the page.
        """
        with self._rendering[hash(key) % NUM_LOCKS]:
            kept = self._copies.get(key)
            if kept is not None and kept[0] == version:
                return kept[1]
            copy = make()
            self._copies.put(key, (version, copy), copy.size_bytes)
            return copy


def _deflated(plain: bytes, *, last: bool) -> bytes:
    """Compress text into a part of a deflate stream; the part refers to nothing before it."""
    packer = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(plain) + packer.flush(zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH)

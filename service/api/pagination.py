"""Lists in pages: each page ends with a cursor to the next page, and items that are added in between do not move the
cursor.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

from fastapi import Depends, Query

from steptune.service.api.problems import RefusalError
from steptune.service.messages import Page

DEFAULT_LIMIT = 50
MAX_LIMIT = 200

_PLACE = re.compile(r"[0-9a-z.]{1,130}")
_VERSION = "1:"

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class PageRequest:
    """Requested part of a list.

    Attributes:
        after: The cursor of the last item that the client has; None for the beginning.
    """

    limit: int
    after: str | None

    @property
    def after_number(self) -> int | None:
        """Return the cursor as a number, for a list that is ordered by one number.

        Raises:
            RefusalError: The cursor is of another list.
        """
        if self.after is None:
            return None
        return self._number(self.after)

    @property
    def after_pair(self) -> tuple[int, int] | None:
        """Return the cursor as two numbers, for a list that is ordered by two numbers.

        Raises:
            RefusalError: The cursor is of another list.
        """
        if self.after is None:
            return None
        first, _, second = self.after.partition(".")
        return self._number(first), self._number(second)

    def _number(self, text: str) -> int:
        if not text.isdecimal() or len(text) > 18:  # as many as a column takes
            raise _invalid(self.after or "")
        return int(text)

    def cut(self, found: Sequence[Item], place: Callable[[Item], object]) -> Page[Item]:
        """Return a page of at most `limit` items; `found` may have one more, which shows that there is a next page."""
        items = tuple(found[: self.limit])
        more = len(found) > self.limit
        return Page(items=items, next_cursor=_encode(str(place(items[-1]))) if more else None)


async def _page(
    limit: Annotated[int, Query(ge=1, le=MAX_LIMIT, description="Maximum number of items.")] = DEFAULT_LIMIT,
    cursor: Annotated[
        str | None,
        Query(description="`next_cursor` of the previous page; leave it out for the first page.", max_length=200),
    ] = None,
) -> PageRequest:
    return PageRequest(limit=limit, after=None if cursor is None else _decode(cursor))


Paging = Annotated[PageRequest, Depends(_page)]


def _encode(place: str) -> str:
    return base64.urlsafe_b64encode(f"{_VERSION}{place}".encode()).decode().rstrip("=")


def _decode(cursor: str) -> str:
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode("ascii")
    except (binascii.Error, ValueError):
        raise _invalid(cursor) from None
    place = text.removeprefix(_VERSION)
    if place == text or not _PLACE.fullmatch(place):
        raise _invalid(cursor)
    return place


def _invalid(cursor: str) -> RefusalError:
    return RefusalError(400, "invalid-cursor", f"{cursor!r} is not a cursor of this list: pass `next_cursor` unchanged")

"""One-time code for the login page, shown when the service is started on a terminal.

The code lives in the memory of the process that showed it, as a hash: a copy of the database or of the log holds
nothing to log in with. It has 60 random bits; refused ones count against their address like any refused login.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Callable

from steptune.service.access.errors import NotAuthenticatedError
from steptune.service.access.secrets import equal, sha256

VALID_S = 600.0
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
"""Crockford's base 32: no letter that could be mistaken for a digit or for another letter."""
_GROUPS, _GROUP_LENGTH = 3, 4
_SEEN_AS = str.maketrans("oil", "011")
_CODE = re.compile(rf"[{_ALPHABET}]{{{_GROUPS * _GROUP_LENGTH}}}")


class LoginCodes:
    """Issuer of one-time codes: at most one code is valid at a time, and it opens one session.

    Args:
        seconds: Returns the seconds of a monotonic clock.
    """

    def __init__(self, seconds: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._sha256 = ""
        self._user_id = ""
        self._until_s = 0.0

    def issue(self, user_id: str) -> str:
        """Issue a one-time login code for a user, in groups of characters for typing; any earlier code becomes void."""
        groups = ["".join(secrets.choice(_ALPHABET) for _ in range(_GROUP_LENGTH)) for _ in range(_GROUPS)]
        with self._lock:
            self._sha256, self._user_id = sha256("".join(groups)), user_id
            self._until_s = self._seconds() + VALID_S
        return "-".join(groups)

    def redeem(self, text: str) -> str:
        """Return the id of the user for whom a code was issued, and make the code void.

        Raises:
            NotAuthenticatedError: It is not the code that was issued, was used, or has expired.
        """
        code = _plain(text)
        with self._lock:
            right = bool(self._sha256) and equal(sha256(code), self._sha256) and self._seconds() < self._until_s
            if right:
                self._sha256 = ""
        if not right:
            raise NotAuthenticatedError(
                "the login code is wrong, has been used, or is older than ten minutes: restart `steptune "
                "serve` on a terminal for a new one, or log in with a token",
                token_sent=True,
            )
        return self._user_id


def is_login_code(text: str) -> bool:
    """Say whether a text has the form of a code, however it is grouped."""
    return _CODE.fullmatch(_plain(text)) is not None


def _plain(text: str) -> str:
    return re.sub(r"[\s-]", "", text).lower().translate(_SEEN_AS)

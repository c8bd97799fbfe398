"""Texts that prove who somebody is: how they are made, read, hashed and compared.

The secrets are random, 160 bits or more, so that a fast hash is as good as a slow one: there is nothing to guess.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field

from steptune.tuner.records import new_id

PREFIX = "stp"
_SECRET_BYTES = 20
_TOKEN = re.compile(rf"{PREFIX}_([0-9a-hjkmnp-tv-z]{{26}})_([0-9a-f]{{{2 * _SECRET_BYTES}}})", re.ASCII)
_ANYWHERE = re.compile(rf"({PREFIX}_[0-9A-Za-z]{{26}}_)[0-9A-Za-z]+")
NO_HASH = hashlib.sha256(b"").hexdigest()
"""Compared with where there is no row, so that an unknown id takes as long as a wrong secret."""


@dataclass(frozen=True, kw_only=True)
class BearerToken:
    """`stp_<token_id>_<secret>`. Its `repr` does not show the secret; `text` does."""

    token_id: str
    secret: str = field(repr=False)

    @property
    def text(self) -> str:
        return f"{PREFIX}_{self.token_id}_{self.secret}"


def new_token() -> BearerToken:
    return BearerToken(token_id=new_id(), secret=secrets.token_hex(_SECRET_BYTES))


def parse_token(text: str) -> BearerToken | None:
    """The token in a text, or None where it is not one, to the letter."""
    match = _TOKEN.fullmatch(text)
    return None if match is None else BearerToken(token_id=match[1], secret=match[2])


def new_cookie() -> str:
    """Secret by which a browser's session is known."""
    return secrets.token_urlsafe(32)


def csrf_token_for(cookie: str) -> str:
    """Proof that a request comes from a page of ours: derived, so that only who has the cookie can make it, and the
    cookie cannot be found from it.
    """
    return hmac.new(cookie.encode(), b"steptune csrf token", hashlib.sha256).hexdigest()


def sha256(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def equal(one: str, other: str) -> bool:
    """Say whether two texts are the same, in a time that does not say where they differ."""
    return hmac.compare_digest(one.encode(), other.encode())


def without_secrets(text: str) -> str:
    """A text for logs and rows, in which tokens are cut after their id."""
    return _ANYWHERE.sub(r"\1***", text)

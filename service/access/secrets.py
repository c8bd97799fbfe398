"""Secrets of tokens and cookies: how they are made, parsed, hashed and compared.

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
"""Hash to compare a secret with if its id is unknown, so that the answer takes as long as for a wrong secret."""


@dataclass(frozen=True, kw_only=True)
class BearerToken:
    """A bearer token, `stp_<token_id>_<secret>`. Its `repr` hides the secret; `text` shows it."""

    token_id: str
    secret: str = field(repr=False)

    @property
    def text(self) -> str:
        return f"{PREFIX}_{self.token_id}_{self.secret}"


def new_token() -> BearerToken:
    return BearerToken(token_id=new_id(), secret=secrets.token_hex(_SECRET_BYTES))


def parse_token(text: str) -> BearerToken | None:
    """Parse a token; return None unless the whole text is one token."""
    match = _TOKEN.fullmatch(text)
    return None if match is None else BearerToken(token_id=match[1], secret=match[2])


def new_cookie() -> str:
    """Return a new secret for the cookie of a browser session."""
    return secrets.token_urlsafe(32)


def csrf_token_for(cookie: str) -> str:
    """Return the CSRF token of a session. It is derived from the session's cookie, so that only a holder of the cookie
    can make it, and does not reveal the cookie.
    """
    return hmac.new(cookie.encode(), b"steptune csrf token", hashlib.sha256).hexdigest()


def sha256(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def equal(one: str, other: str) -> bool:
    """Compare two texts in a time that does not reveal where they differ."""
    return hmac.compare_digest(one.encode(), other.encode())


def without_secrets(text: str) -> str:
    """Return a text with every token in it cut off after its id, for use in logs and database rows."""
    return _ANYWHERE.sub(r"\1***", text)

"""State that a browser keeps while its user logs in elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class PendingLogin:
    """Values stored at the beginning of an OpenID Connect login, which are needed to complete it."""

    state: str = field(repr=False)
    nonce: str = field(repr=False)
    verifier: str = field(repr=False)

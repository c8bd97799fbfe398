"""State that a browser keeps while its user logs in elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class PendingLogin:
    """Values of an OpenID Connect login with which its second half is compared."""

    state: str = field(repr=False)
    nonce: str = field(repr=False)
    verifier: str = field(repr=False)

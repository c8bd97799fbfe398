"""Cache of tokens that were found valid a moment ago, so that not every request queries the database."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime

from steptune.service.access.principal import Principal
from steptune.service.access.secrets import BearerToken, equal, sha256

MAX_KNOWN = 10_000


class KnownTokens:
    """Cache of one process's known tokens. Changes by this process take effect at once, changes by others after
    `recheck_s`.

    Args:
        recheck_s: Seconds for which a cached token is not looked up again.
        seconds: Returns the seconds of a monotonic clock.
    """

    def __init__(self, recheck_s: float, seconds: Callable[[], float] = time.monotonic) -> None:
        self._recheck_s = recheck_s
        self._seconds = seconds
        self._known: dict[str, tuple[str, Principal, float]] = {}
        self.generation = 0
        """Generation of the cache; results of a lookup begun in an older generation are not stored."""

    def recall(self, bearer: BearerToken, now: datetime) -> Principal | None:
        """Return the sender of a token, if cached and not expired."""
        found = self._known.get(bearer.token_id)
        if found is None:
            return None
        secret_sha256, principal, until_s = found
        expired = principal.expires_at is not None and principal.expires_at <= now
        if expired or self._seconds() >= until_s or not equal(sha256(bearer.secret), secret_sha256):
            return None
        return principal

    def remember(self, bearer: BearerToken, principal: Principal, generation: int) -> None:
        """Store the sender of a token, unless the cache was emptied since the lookup began.

        Args:
            generation: The generation before the lookup.
        """
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        if generation == self.generation and self._recheck_s > 0:
            until_s = self._seconds() + self._recheck_s
            self._known[bearer.token_id] = (sha256(bearer.secret), principal, until_s)

    def forget(self) -> None:
        """Empty the cache; call this after every change of tokens or users."""
        self.generation += 1
        self._known.clear()

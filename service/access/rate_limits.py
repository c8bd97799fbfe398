"""Rate limits: one token bucket for each client, in the memory of one API process.

Several API processes each allow as much; a limit over all of them belongs in the proxy in front of them.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address

from steptune.service.access.errors import TooManyRequestsError

MAX_CLIENTS = 10_000
"""Maximum number of buckets; the least recently used one is dropped first, so that many clients cannot fill the
memory.
"""
WINDOW_S = 60


class RateLimit:
    """Limit on each client's requests per minute; after a pause, a burst of as many requests is allowed.

    Args:
        name: Name of the limit in the headers.
        per_minute: Requests per minute.
        clock: Returns the seconds of a monotonic clock.
    """

    def __init__(self, name: str, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._per_minute = per_minute
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # what is left, at what time

    def spend(self, client: str) -> dict[str, str]:
        """Count a request, and return the headers that state how many requests remain.

        Raises:
            TooManyRequestsError: Nothing was left.
        """
        now = self._clock()
        with self._lock:
            left = self._left(client, now)
            allowed = left >= 1
            left -= allowed
            self._buckets[client] = (left, now)
            self._buckets.move_to_end(client)
            if len(self._buckets) > MAX_CLIENTS:
                self._buckets.popitem(last=False)
        if not allowed:
            raise self._refusal(left)
        return self._headers(left)

    def _left(self, client: str, now: float) -> float:
        left, at = self._buckets.get(client, (float(self._per_minute), now))
        return min(float(self._per_minute), left + (now - at) * self._per_minute / WINDOW_S)

    def _headers(self, left: float) -> dict[str, str]:
        full_after_s = math.ceil((self._per_minute - left) * WINDOW_S / self._per_minute)
        return {
            "RateLimit-Policy": f'"{self._name}";q={self._per_minute};w={WINDOW_S}',
            "RateLimit": f'"{self._name}";r={int(left)};t={full_after_s}',
        }

    def _refusal(self, left: float) -> TooManyRequestsError:
        wait_s = max(1, math.ceil((1 - left) * WINDOW_S / self._per_minute))
        return TooManyRequestsError(
            f"the limit of {self._per_minute} {self._name} a minute is exceeded: wait {wait_s} s, then send "
            "requests less often",
            headers={"Retry-After": str(wait_s), **self._headers(left)},
            members={"limit": self._per_minute, "retry_after_s": wait_s},
        )


def client_of(address: str) -> str:
    """Return the key under which an address is counted. For IPv6, this is the address's /64 network, because one
    household or host has a whole /64.
    """
    try:
        parsed = ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, IPv6Address):
        return str(IPv6Address(int(parsed) >> 64 << 64)) + "/64"
    return str(parsed)

"""Which address a request comes from, by which scheme, and what a trusted proxy says about it.

Uvicorn must not rewrite addresses itself (`proxy_headers=False`): whose headers are believed is decided here, by the
address of who is connected.
"""

from __future__ import annotations

import logging
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

from steptune.service.access.settings import AccessSettings

log = logging.getLogger("steptune.access")

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


class Proxies:
    """The reverse proxies that are believed.

    Args:
        settings: Their addresses, the header with the user's name, and the address of the service for browsers.
    """

    def __init__(self, settings: AccessSettings) -> None:
        words = filter(None, map(str.strip, settings.trusted_proxies.split(",")))
        self._trusted: list[Network] = [ip_network(word, strict=False) for word in words]
        self._user_header = settings.proxy_user_header
        self._public = urlsplit(settings.public_url)

    def client_address(self, request: HTTPConnection) -> str:
        """The nearest address that is not a trusted proxy's: of `X-Forwarded-For`, trusted proxies wrote the end."""
        nearest = _peer(request)
        hops = ",".join(request.headers.getlist("X-Forwarded-For")).split(",")
        for hop in reversed(hops):
            if not self._trusts(nearest):
                break
            address = _address(hop)
            if address is None:
                break
            nearest = address
        return "unknown" if nearest is None else str(nearest)

    def is_secure(self, request: HTTPConnection) -> bool:
        """Whether the browser speaks https, to us or to a trusted proxy."""
        if self._public.scheme:
            return self._public.scheme == "https"
        forwarded = request.headers.get("X-Forwarded-Proto", "").rpartition(",")[2].strip().lower()
        if forwarded and self._trusts(_peer(request)):
            return forwarded == "https"
        return request.url.scheme == "https"

    def user_name(self, request: HTTPConnection) -> str | None:
        """Who logged in at a trusted proxy; a header from anybody else is ignored and logged."""
        if not self._user_header:
            return None
        names = request.headers.getlist(self._user_header)
        if not names:
            return None
        if not self._trusts(_peer(request)):
            log.warning("ignored header %s from %s, which is no trusted proxy", self._user_header, _peer(request))
            return None
        if len(names) > 1:
            log.warning("ignored header %s: it came %d times, one perhaps forged", self._user_header, len(names))
            return None
        return names[0].strip() or None

    def is_same_origin(self, request: HTTPConnection) -> bool:
        """Whether a browser says that the request comes from a page of ours; programs say nothing, and pass."""
        site = request.headers.get("Sec-Fetch-Site")
        if site is not None and site not in ("same-origin", "none"):
            return False
        origin = request.headers.get("Origin")
        if origin is None:
            return True
        host = self._public.netloc or request.headers.get("Host", "")
        return urlsplit(origin).netloc.lower() == host.lower() != ""

    def _trusts(self, address: Address | None) -> bool:
        return address is not None and any(address in network for network in self._trusted)


def _peer(request: HTTPConnection) -> Address | None:
    """Who is connected; None for a Unix socket."""
    return None if request.client is None else _address(request.client.host)


def _address(text: str) -> Address | None:
    """The address in an entry of `X-Forwarded-For`; an IPv4 address within IPv6 is what it stands for."""
    text = text.strip().partition("%")[0]
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address

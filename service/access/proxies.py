"""Address and scheme of a request, and the headers of the reverse proxy.

An address proves nothing: trials and other users of this machine call from loopback too. A request is the proxy's where
it brings the secret that only the proxy and the service know, or where the service listens on a Unix socket that only
its own user may open. Uvicorn must not rewrite addresses itself (`proxy_headers=False`).
"""

from __future__ import annotations

import logging
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

from steptune.service.access.secrets import equal
from steptune.service.settings.access import AccessSettings

log = logging.getLogger("steptune.access")

Address = IPv4Address | IPv6Address
SECRET_HEADER = "X-Proxy-Secret"
"""Header in which the trusted proxy sends the setting `proxy_secret`. If a client has sent this header, the proxy must
overwrite it.
"""


class Proxies:
    """The trusted reverse proxy, if there is one.

    Args:
        settings: The secret or the socket by which it is known, the header with the user's name, and the address of the
            service for browsers.
    """

    def __init__(self, settings: AccessSettings) -> None:
        secret = settings.proxy_secret
        self._secret = None if secret is None else secret.get_secret_value()
        self._behind_socket = settings.unix_socket is not None
        self._num_hops = settings.proxy_hops
        self._user_header = settings.proxy_user_header
        self._public = urlsplit(settings.public_url)

    def client_address(self, request: HTTPConnection) -> str:
        """Return the client's address; behind trusted proxies, the entry of `X-Forwarded-For` that the outermost proxy
        wrote.
        """
        address = _peer(request)
        if self.is_trusted(request):
            hops = ",".join(request.headers.getlist("X-Forwarded-For")).split(",")
            address = _address(hops[-min(self._num_hops, len(hops))]) or address
        return "unknown" if address is None else str(address)

    def is_secure(self, request: HTTPConnection) -> bool:
        """Say whether the browser speaks https, to us or to the trusted proxy."""
        if self._public.scheme:
            return self._public.scheme == "https"
        forwarded = request.headers.get("X-Forwarded-Proto", "").rpartition(",")[2].strip().lower()
        if forwarded and self.is_trusted(request):
            return forwarded == "https"
        return request.url.scheme == "https"

    def user_name(self, request: HTTPConnection) -> str | None:
        """Return the name of the user who logged in at the trusted proxy. The same header from any other sender is
        ignored and logged.
        """
        if not self._user_header:
            return None
        names = request.headers.getlist(self._user_header)
        if not names:
            return None
        if not self.is_trusted(request):
            log.warning(
                "ignored header %s from %s, which did not send the proxy's secret", self._user_header, _peer(request)
            )
            return None
        if len(names) > 1:
            log.warning(
                "ignored header %s: the request contains it %d times, so one of them may be forged",
                self._user_header,
                len(names),
            )
            return None
        return names[0].strip() or None

    def is_same_origin(self, request: HTTPConnection) -> bool:
        """Say whether a request may come from one of our pages: False if its headers name another origin. Clients that
        are not browsers send no such headers, and pass.
        """
        site = request.headers.get("Sec-Fetch-Site")
        if site is not None and site not in ("same-origin", "none"):
            return False
        origin = request.headers.get("Origin")
        if origin is None:
            return True
        host = self._public.netloc or request.headers.get("Host", "")
        return urlsplit(origin).netloc.lower() == host.lower() != ""

    def is_trusted(self, request: HTTPConnection) -> bool:
        """Say whether a request comes through the trusted proxy, whose headers about the client are accepted."""
        if self._behind_socket:
            return True
        given = request.headers.getlist(SECRET_HEADER)
        return self._secret is not None and len(given) == 1 and equal(given[0], self._secret)


def _peer(request: HTTPConnection) -> Address | None:
    """Return the address of the connected peer; None for a Unix socket."""
    return None if request.client is None else _address(request.client.host)


def _address(text: str) -> Address | None:
    """Return the address in an entry of `X-Forwarded-For`; an IPv4 address mapped into IPv6 is returned as IPv4."""
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

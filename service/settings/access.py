"""Settings of access control; part of the service's `Settings`."""

from __future__ import annotations

from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, SecretStr, field_validator, model_validator

from steptune.service.settings.addresses import is_loopback
from steptune.service.settings.scopes import parse_scopes

MIN_SECRET_LENGTH = 32


class AccessSettings(BaseModel):
    insecure_no_auth: bool = Field(
        default=False,
        description="Allow everyone who can reach the service to do everything. The service must then listen on a "
        "loopback address.",
    )
    public_url: str = Field(
        default="",
        description="Address at which browsers reach the service, like `https://tune.example.org`; empty: the address "
        "that each request names.",
    )
    proxy_secret: SecretStr | None = Field(
        default=None,
        description="Secret that a reverse proxy sends as `X-Proxy-Secret`; its `X-Forwarded-For`, `X-Forwarded-Proto` "
        "and user header are trusted only with this secret.",
    )
    unix_socket: Path | None = Field(
        default=None,
        description="Unix socket on which `serve` listens for a reverse proxy of the same user, instead of an address; "
        "all requests through it are trusted as with `proxy_secret`.",
    )
    proxy_hops: int = Field(
        default=1, ge=1, description="Number of reverse proxies in a chain; each adds an entry to `X-Forwarded-For`."
    )
    trusted_proxies: str = Field(
        default="",
        description="Removed setting: an address alone does not identify a proxy. The service does not start if it is "
        "set; use "
        "`proxy_secret` or `unix_socket`.",
    )
    proxy_user_header: str = Field(
        default="",
        description="Header in which the trusted proxy names the user who logged in there; empty: the proxy "
        "names no user.",
    )
    new_user_scopes: str = Field(
        default="",
        description="Scopes of users who log in for the first time by proxy or OpenID Connect, like `read submit`; "
        "empty: an administrator must create users first.",
    )
    oidc_issuer: str = Field(
        default="", description="URL of an OpenID Connect provider; empty: no login with OpenID Connect."
    )
    oidc_client_id: str = Field(default="", description="Client id of this service at that provider.")
    oidc_client_secret: SecretStr | None = Field(
        default=None, description="Client secret of this service at that provider; a public client has none."
    )
    oidc_scopes: str = Field(default="openid email", description="Scopes that the service requests from that provider.")
    oidc_user_claim: str = Field(
        default="email",
        description="Claim that contains the user's name; if it is `email`, the provider must have verified the "
        "address.",
    )
    token_days: float = Field(default=90, gt=0, description="Default lifetime of a token in days.")
    token_recheck_s: float = Field(
        default=1.0,
        ge=0,
        description="Seconds for which a valid token is not looked up again. A revocation by another process takes "
        "effect within this time, a revocation by this process at once.",
    )
    session_idle_minutes: float = Field(
        default=12 * 60, gt=0, description="Minutes without a request after which a browser has to log in again."
    )
    session_max_hours: float = Field(
        default=7 * 24,
        gt=0,
        description="Hours after which a browser has to log in again, even if it has sent requests.",
    )
    requests_per_minute: int = Field(
        default=1200, gt=0, description="Maximum number of requests a minute of one user, for each API process."
    )
    max_user_requests: int = Field(
        default=64,
        gt=0,
        description="Maximum number of concurrent requests of one user in one process, including streams.",
    )
    max_client_requests: int = Field(
        default=256,
        gt=0,
        description="Maximum number of concurrent requests from one address in one process; requests that send a body "
        "are counted separately, with the same limit. Behind a proxy that is not trusted, all users share the "
        "proxy's address.",
    )
    failed_logins_per_minute: int = Field(
        default=20,
        gt=0,
        description="Maximum number of refused tokens a minute from one address, for each API process.",
    )

    @field_validator("trusted_proxies")
    @classmethod
    def _no_addresses(cls, value: str) -> str:
        if value.strip():
            raise ValueError(
                "proxies are no longer trusted by address, because any program on the proxy's machine shares "
                "it: set STEPTUNE_PROXY_SECRET and let the proxy send it as X-Proxy-Secret, or listen with "
                "--unix-socket"
            )
        return value

    @field_validator("proxy_secret", "oidc_client_secret", mode="before")
    @classmethod
    def _empty_is_none(cls, value: object) -> object:
        return none_if_empty(value)

    @field_validator("proxy_secret")
    @classmethod
    def _hard_to_guess(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and len(value.get_secret_value()) < MIN_SECRET_LENGTH:
            raise ValueError(
                f"the secret must have at least {MIN_SECRET_LENGTH} characters: make one with `openssl rand -hex 32`"
            )
        return value

    @field_validator("new_user_scopes")
    @classmethod
    def _scopes(cls, value: str) -> str:
        if value.strip():
            parse_scopes(value)
        return value

    @field_validator("public_url", "oidc_issuer")
    @classmethod
    def _web_address(cls, value: str) -> str:
        parts = urlsplit(value)
        if value and (parts.scheme not in ("http", "https") or not parts.netloc):
            raise ValueError(f"{value!r} is not a web address: write it like https://tune.example.org")
        return value

    @field_validator("oidc_issuer")
    @classmethod
    def _encrypted(cls, value: str) -> str:
        if value and not is_private_enough(value):
            raise ValueError(f"the provider must use https, or be on this machine, got {value!r}")
        return value

    @model_validator(mode="after")
    def _complete(self) -> Self:
        behind_proxy = self.unix_socket is not None or self.proxy_secret is not None
        if self.proxy_user_header and not behind_proxy:
            raise ValueError(
                "proxy_user_header needs proxy_secret or unix_socket: otherwise anyone could forge the header"
            )
        if self.oidc_issuer and not self.oidc_client_id:
            raise ValueError("oidc_issuer needs oidc_client_id")
        if self.oidc_issuer and not self.public_url:
            raise ValueError(
                "oidc_issuer needs public_url: after the login, the provider sends browsers back to that address"
            )
        if self.insecure_no_auth and (self.proxy_user_header or self.oidc_issuer):
            raise ValueError(
                "insecure_no_auth and a login (proxy_user_header, oidc_issuer) contradict each other: set only one "
                "of them"
            )
        if self.insecure_no_auth and behind_proxy:
            raise ValueError(
                "insecure_no_auth is for this machine only, but a proxy (proxy_secret, unix_socket) admits "
                "others: set only one of them"
            )
        return self


def none_if_empty(value: object) -> object:
    """Return the secret, or None if it is empty, as in a settings file with the line `NAME=`."""
    text = value.get_secret_value() if isinstance(value, SecretStr) else value
    return None if isinstance(text, str) and not text.strip() else value


def is_private_enough(url: str) -> bool:
    """Say whether the connection to this address is protected, so that nobody on the network can read or change its
    content.
    """
    parts = urlsplit(url)
    return parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname or ""))

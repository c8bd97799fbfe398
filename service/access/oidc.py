"""Login with OpenID Connect: the authorisation code flow with PKCE, state and nonce.

Nothing is kept here between the two halves of a login: the values that the second half checks are in a cookie of the
browser that began the first, so any API process can finish it. Needs the extra `oidc`.
"""

from __future__ import annotations

import logging
import threading
import time
from secrets import token_urlsafe
from typing import Any

import httpx

from steptune.service.access.errors import LoginError, NotAuthenticatedError
from steptune.service.access.pending import PendingLogin
from steptune.service.access.secrets import equal
from steptune.service.settings.access import AccessSettings, is_private_enough
from steptune.tuner.errors import MissingDependencyError

try:
    from authlib.integrations.base_client.errors import OAuthError
    from authlib.integrations.httpx_client import OAuth2Client
    from joserfc import jwt
    from joserfc.errors import JoseError
    from joserfc.jwk import KeySet
except ModuleNotFoundError as error:
    raise MissingDependencyError(
        f"login with OpenID Connect needs the package {error.name}: pip install 'steptune[oidc]'"
    ) from error

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Accepted signature algorithms: only those that use the provider's private key; never `none` or a shared key."""
KEPT_S = 3600.0
"""Seconds for which the provider's metadata and keys are cached."""
REFETCH_S = 30.0
"""Minimum seconds between requests for the provider's keys after an unknown key."""
CLOCK_SKEW_S = 60
TIMEOUT_S = 10.0

log = logging.getLogger("steptune.access")


class OidcProvider:
    """An identity provider.

    Args:
        settings: Address of the provider, and our registration there.
    """

    def __init__(self, settings: AccessSettings) -> None:
        secret = settings.oidc_client_secret
        self._issuer = settings.oidc_issuer
        self._client_id = settings.oidc_client_id
        self._client_secret = None if secret is None else secret.get_secret_value()
        self._scopes = settings.oidc_scopes
        self._user_claim = settings.oidc_user_claim
        self._lock = threading.Lock()
        self._metadata: dict[str, Any] = {}
        self._keys: KeySet | None = None
        self._fetched_at = float("-inf")

    def begin(self, redirect_uri: str) -> tuple[str, PendingLogin]:
        """Return the provider's address to which the browser is redirected, and the values that the browser must keep
        until it returns.

        Raises:
            LoginError: The provider cannot be reached, or describes itself in a way that cannot be used.
        """
        pending = PendingLogin(state=token_urlsafe(32), nonce=token_urlsafe(32), verifier=token_urlsafe(48))
        endpoint = self._described()["authorization_endpoint"]
        with self._client(redirect_uri) as client:
            url, _ = client.create_authorization_url(
                endpoint, state=pending.state, nonce=pending.nonce, code_verifier=pending.verifier
            )
        return url, pending

    def complete(self, answer: dict[str, str], pending: PendingLogin, redirect_uri: str) -> str:
        """Return the name of the user whose login the provider confirms.

        Args:
            answer: The query with which the provider sent the browser back.
            pending: State of the login, from the browser's cookie.
            redirect_uri: As in `begin`.

        Raises:
            NotAuthenticatedError: The provider refused, or what came back does not belong to this login.
            LoginError: The provider's answer cannot be used.
        """
        if not equal(answer.get("state", ""), pending.state):
            raise NotAuthenticatedError(
                "the provider's answer belongs to a different login: begin again at /login", token_sent=True
            )
        if "iss" in answer and answer["iss"] != self._issuer:
            raise NotAuthenticatedError(
                "the answer comes from a different identity provider: begin again at /login", token_sent=True
            )
        if "code" not in answer:
            reason = answer.get("error", "no code")[:100]
            raise NotAuthenticatedError(
                f"the identity provider did not complete the login ({reason!r}): begin again at /login"
            )
        id_token = self._exchange(answer["code"], pending.verifier, redirect_uri)
        return self._user_name(self._checked_claims(id_token, pending.nonce))

    def _exchange(self, code: str, verifier: str, redirect_uri: str) -> str:
        try:
            with self._client(redirect_uri) as client:
                tokens = client.fetch_token(
                    self._described()["token_endpoint"],
                    grant_type="authorization_code",
                    code=code,
                    code_verifier=verifier,
                    redirect_uri=redirect_uri,
                )
        except OAuthError as error:
            raise NotAuthenticatedError(
                f"the identity provider rejected its own authorization code ({error.error!r}): begin again at /login"
            ) from error
        except (httpx.HTTPError, ValueError) as error:
            raise self._failed(error) from error
        id_token = tokens.get("id_token")
        if not isinstance(id_token, str):
            raise LoginError("the provider sent no ID token: check that oidc_scopes includes `openid`")
        return id_token

    def _checked_claims(self, id_token: str, nonce: str) -> dict[str, Any]:
        rules = jwt.JWTClaimsRegistry(
            leeway=CLOCK_SKEW_S,
            iss={"essential": True, "value": self._issuer},
            aud={"essential": True, "value": self._client_id},
            sub={"essential": True},
            exp={"essential": True},
            iat={"essential": True},
            nonce={"essential": True, "value": nonce},
        )
        try:
            claims = dict(self._decoded(id_token).claims)
            rules.validate(claims)
        except (JoseError, ValueError) as error:
            log.warning("refused the provider's ID token: %s", type(error).__name__)
            raise NotAuthenticatedError(
                f"the provider's ID token is not valid ({error}): begin again at /login", token_sent=True
            ) from error
        if claims.get("azp", self._client_id) != self._client_id:
            raise NotAuthenticatedError(
                "the provider's ID token was issued for another client: check oidc_client_id", token_sent=True
            )
        return claims

    def _decoded(self, id_token: str) -> jwt.Token:
        """Decode a token and check its signature. If that fails, fetch the provider's keys again, unless they were
        fetched less than `REFETCH_S` ago.
        """
        self._described()
        assert self._keys is not None
        try:
            return jwt.decode(id_token, self._keys, algorithms=ALGORITHMS)
        except (JoseError, ValueError):
            if time.monotonic() - self._fetched_at < REFETCH_S:
                raise
            self._described(afresh=True)
            return jwt.decode(id_token, self._keys, algorithms=ALGORITHMS)

    def _user_name(self, claims: dict[str, Any]) -> str:
        name = claims.get(self._user_claim)
        if not isinstance(name, str) or not name:
            raise LoginError(
                f"the provider's ID token has no claim {self._user_claim!r}: add the scope that provides it to "
                "oidc_scopes, or name another claim in oidc_user_claim"
            )
        if self._user_claim == "email" and claims.get("email_verified") is not True:
            raise NotAuthenticatedError(
                "the identity provider has not verified the user's e-mail address: verify it there, then log in again",
                token_sent=True,
            )
        return name

    def _described(self, *, afresh: bool = False) -> dict[str, Any]:
        """Return the provider's metadata (its OpenID configuration). Its keys are fetched at the same time."""
        with self._lock:
            if not afresh and time.monotonic() - self._fetched_at < KEPT_S:
                return self._metadata
            try:
                with httpx.Client(timeout=TIMEOUT_S, follow_redirects=False) as client:
                    metadata = _document(client, f"{self._issuer.rstrip('/')}/.well-known/openid-configuration")
                    self._check_description(metadata)
                    keys = KeySet.import_key_set(_document(client, metadata["jwks_uri"]))  # type: ignore[arg-type]
            except (httpx.HTTPError, JoseError, ValueError, KeyError, TypeError) as error:
                raise self._failed(error) from error
            self._metadata, self._keys, self._fetched_at = metadata, keys, time.monotonic()
            return metadata

    def _check_description(self, metadata: dict[str, Any]) -> None:
        if metadata.get("issuer") != self._issuer:
            raise ValueError(
                f"the provider reports the issuer {metadata.get('issuer')!r}: set oidc_issuer to exactly this value"
            )
        for name in ("authorization_endpoint", "token_endpoint", "jwks_uri"):
            if not is_private_enough(str(metadata.get(name, ""))):
                raise ValueError(f"the provider's {name} must be an https address, got {metadata.get(name)!r}")

    def _client(self, redirect_uri: str) -> OAuth2Client:
        return OAuth2Client(
            self._client_id,
            self._client_secret,
            scope=self._scopes,
            redirect_uri=redirect_uri,
            code_challenge_method="S256",
            token_endpoint_auth_method=self._authentication_method(),
            timeout=TIMEOUT_S,
        )

    def _authentication_method(self) -> str:
        """Return the method with which this service authenticates when it exchanges a code. The header is preferred to
        the body, if the provider supports both.
        """
        if self._client_secret is None:
            return "none"
        offered = self._described().get("token_endpoint_auth_methods_supported", ["client_secret_basic"])
        return "client_secret_basic" if "client_secret_basic" in offered else "client_secret_post"

    def _failed(self, error: Exception) -> LoginError:
        log.warning("login with %s failed: %s", self._issuer, error)
        return LoginError("the identity provider cannot be reached, or its answer is invalid; see the log")


def _document(client: httpx.Client, url: str) -> dict[str, Any]:
    response = client.get(url, headers={"Accept": "application/json"})
    response.raise_for_status()
    document = response.json()
    if not isinstance(document, dict):
        raise ValueError(f"{url} did not answer with a JSON object")
    return document

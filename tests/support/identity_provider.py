"""A small OpenID Connect provider on loopback: it checks what a real one does, and can misbehave."""

import base64
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlencode, urlsplit

from joserfc import jwt
from joserfc.jwk import KeySet, RSAKey

CLIENT_ID = "steptune"
CLIENT_SECRET = "a secret with : and %"
EMAIL = "ada@example.org"


class Provider:
    """Identity provider: what it knows, and how it differs from a good one.

    Attributes:
        changed_claims: Put into the next ID tokens; None removes a claim.
        header: Of the next ID tokens.
        signing_key: Of the next ID tokens; by default the one that it publishes.
        changed_metadata: Put into its description.
    """

    def __init__(self) -> None:
        self.keys = [RSAKey.generate_key(2048, {"kid": "first", "use": "sig", "alg": "RS256"})]
        self.changed_claims: dict[str, object] = {}
        self.changed_metadata: dict[str, object] = {}
        self.header: dict[str, object] = {}
        self.signing_key: RSAKey | None = None
        self.num_descriptions = 0
        self.methods = ["client_secret_basic"]
        self.codes: dict[str, dict[str, str]] = {}
        self.issuer = ""

    def log_in(self, url: str) -> str:
        """Do what the provider's pages do with a user; return the address to which they send the browser back."""
        asked = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
        assert asked["response_type"] == "code"
        assert asked["client_id"] == CLIENT_ID
        assert asked["code_challenge_method"] == "S256"
        assert "openid" in asked["scope"].split()
        code = f"code-{len(self.codes)}"
        self.codes[code] = asked
        return f"{asked['redirect_uri']}?{urlencode({'code': code, 'state': asked['state'], 'iss': self.issuer})}"

    def metadata(self) -> dict[str, object]:
        self.num_descriptions += 1
        return {
            "issuer": self.issuer,
            "authorization_endpoint": f"{self.issuer}/authorize",
            "token_endpoint": f"{self.issuer}/token",
            "jwks_uri": f"{self.issuer}/keys",
            "token_endpoint_auth_methods_supported": self.methods,
            **self.changed_metadata,
        }

    def tokens(self, form: dict[str, str], authorization: str) -> tuple[int, dict[str, object]]:
        """The answer of the token endpoint."""
        if "client_secret_basic" in self.methods:
            given = base64.b64decode(authorization.removeprefix("Basic ")).decode()
            known = given == f"{CLIENT_ID}:{CLIENT_SECRET}"
        else:
            known = form.get("client_secret") == CLIENT_SECRET
        if not known:
            return 401, {"error": "invalid_client"}
        asked = self.codes.pop(form["code"], None)
        challenge = base64.urlsafe_b64encode(hashlib.sha256(form.get("code_verifier", "").encode()).digest())
        if (
            asked is None
            or asked["redirect_uri"] != form["redirect_uri"]
            or asked["code_challenge"] != challenge.decode().rstrip("=")
        ):
            return 400, {"error": "invalid_grant"}
        return 200, {"access_token": "x", "token_type": "Bearer", "id_token": self.id_token(asked["nonce"])}

    def id_token(self, nonce: str) -> str:
        now = int(time.time())
        claims = {
            "iss": self.issuer,
            "aud": CLIENT_ID,
            "sub": "1234",
            "iat": now,
            "exp": now + 300,
            "nonce": nonce,
            "email": EMAIL,
            "email_verified": True,
            **self.changed_claims,
        }
        kept = {name: value for name, value in claims.items() if value is not None}
        key = self.signing_key or self.keys[-1]
        header = {"alg": "RS256", "kid": key.kid or "first", **self.header}
        if header["alg"] in ("none", "HS256"):
            return self._forged(header, kept)
        return jwt.encode(header, kept, key, algorithms=[header["alg"]])

    def _forged(self, header: dict[str, object], claims: dict[str, object]) -> str:
        """Not signed, or with a "secret" that everybody knows: the public key."""
        signed = ".".join(_base64(json.dumps(part).encode()) for part in (header, claims))
        public = self.keys[0].as_pem(private=False)
        mac = hmac.digest(public, signed.encode(), "sha256") if header["alg"] == "HS256" else b""
        return f"{signed}.{_base64(mac)}"

    def published_keys(self) -> dict[str, object]:
        return KeySet(self.keys).as_dict(private=False)


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


@contextmanager
def running_provider() -> Iterator[Provider]:
    provider = Provider()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers = {"/.well-known/openid-configuration": provider.metadata, "/keys": provider.published_keys}
            self._answer(200, answers[self.path]())

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            form = {name: values[0] for name, values in parse_qs(body).items()}
            self._answer(*provider.tokens(form, self.headers.get("Authorization", "")))

        def _answer(self, status: int, document: object) -> None:
            text = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *arguments: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        provider.issuer = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield provider
        finally:
            server.shutdown()
            thread.join()

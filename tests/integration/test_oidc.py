"""Login with OpenID Connect, against a provider that is real but for its users."""

import time
from urllib.parse import parse_qs, urlsplit

import pytest
from access_builders import HTTPS, application

pytest.importorskip("authlib", reason="pip install 'steptune[oidc]'")
from identity_provider import CLIENT_ID, CLIENT_SECRET, EMAIL, Provider, running_provider
from joserfc.jwk import RSAKey

from steptune.service.access import oidc


@pytest.fixture
def provider():
    with running_provider() as provider:
        yield provider


@pytest.fixture
def served(sqlite_url, tmp_path, provider):
    with application(
        sqlite_url,
        tmp_path,
        base_url=HTTPS,
        public_url=HTTPS,
        oidc_issuer=provider.issuer,
        oidc_client_id=CLIENT_ID,
        oidc_client_secret=CLIENT_SECRET,
        new_user_scopes="read",
    ) as served:
        yield served


def came_back(served, provider: Provider, target: str = ""):
    """The answer to the browser when the provider sends it back."""
    begun = served.http.get("/login/oidc", params={"next": target})
    assert begun.status_code == 303, begun.text
    return served.http.get(provider.log_in(begun.headers["Location"]))


def who(served) -> str | None:
    answer = served.http.get("/api/v1/session")
    return answer.json()["name"] if answer.status_code == 200 else None


class TestLogin:
    def test_from_the_page_to_the_provider_and_back(self, served, provider):
        assert 'href="/login/oidc?next=%2Fstudies"' in served.http.get("/login?next=/studies").text
        done = came_back(served, provider, "/studies")
        assert (done.status_code, done.headers["Location"]) == (303, "/studies")
        assert who(served) == EMAIL
        assert served.http.get("/api/v1/session").json()["scopes"] == ["read"]
        assert "__Host-steptune_oidc" not in served.http.cookies, "what the login needed is gone"

    def test_the_same_user_every_time(self, served, provider):
        came_back(served, provider)
        came_back(served, provider)
        assert len(served.access.users.page(limit=10)) == 1

    def test_the_login_and_the_user_that_it_makes_are_written_down(self, served, provider):
        came_back(served, provider)
        entries = served.entries()
        assert [entry.action for entry in entries] == ["complete_oidc", "create_user"]
        assert {entry.user_id for entry in entries} == {entries[1].target}

    def test_a_secret_in_the_body_where_the_provider_wants_it_there(self, served, provider):
        provider.methods = ["client_secret_post"]
        came_back(served, provider)
        assert who(served) == EMAIL

    def test_the_provider_is_not_asked_about_itself_each_time(self, served, provider):
        for _ in range(3):
            came_back(served, provider)
        assert provider.num_descriptions == 1

    def test_a_new_key_of_the_provider_is_fetched(self, served, provider, monkeypatch):
        came_back(served, provider)
        provider.keys = [RSAKey.generate_key(2048, {"kid": "second", "use": "sig", "alg": "RS256"})]
        assert came_back(served, provider).status_code == 401, "not asked again at once"
        monkeypatch.setattr(oidc, "REFETCH_S", 0.0)
        assert came_back(served, provider).status_code == 303

    def test_below_a_path_the_provider_sends_browsers_back_below_it(self, sqlite_url, tmp_path, provider):
        settings = {"base_path": "/steptune", "public_url": f"{HTTPS}/steptune", "oidc_issuer": provider.issuer}
        with application(sqlite_url, tmp_path, base_url=HTTPS, oidc_client_id=CLIENT_ID, **settings) as served:
            assert 'href="/steptune/login/oidc?' in served.http.get("/login").text
            begun = served.http.get("/login/oidc").headers["Location"]
            assert parse_qs(urlsplit(begun).query)["redirect_uri"] == [f"{HTTPS}/steptune/login/oidc/callback"]
            from_our_page = served.http.post("/login", data={"token": "x"}, headers={"Origin": HTTPS})
            assert from_our_page.status_code == 401, "a wrong token, not another site"

    def test_it_leads_to_our_own_pages_only(self, served, provider):
        assert came_back(served, provider, "https://evil.example").headers["Location"] == "/"


class TestRefusals:
    @pytest.mark.parametrize(
        "claims",
        [
            {"iss": "https://other.example.org"},
            {"aud": "another-client"},
            {"aud": [CLIENT_ID, "another"], "azp": "another"},
            {"nonce": "of another login"},
            {"nonce": None},
            {"exp": int(time.time()) - 3600},
            {"exp": None},
            {"iat": int(time.time()) + 3600},
            {"sub": None},
            {"email_verified": False},
            {"email_verified": None},
            {"email_verified": "true"},
        ],
        ids=lambda claims: "-".join(claims),
    )
    def test_claims_that_do_not_hold(self, served, provider, claims):
        provider.changed_claims = claims
        assert came_back(served, provider).status_code == 401
        assert who(served) is None
        assert served.access.users.page(limit=10) == []

    def test_a_key_that_is_not_the_providers(self, served, provider):
        provider.signing_key = RSAKey.generate_key(2048, {"kid": "first"})
        assert came_back(served, provider).status_code == 401

    @pytest.mark.parametrize("algorithm", ["none", "HS256"])
    def test_a_signature_that_anybody_can_make(self, served, provider, algorithm):
        provider.header = {"alg": algorithm}
        assert came_back(served, provider).status_code == 401

    @pytest.mark.parametrize("claim", [None, 17, ""])
    def test_no_name(self, served, provider, claim):
        provider.changed_claims = {"email": claim}
        answer = came_back(served, provider)
        assert answer.status_code == 502
        assert "oidc_user_claim" in answer.text

    def test_the_answer_of_a_login_that_another_browser_began(self, served, provider):
        """A user who opens the address of another user's login must not end up in that account."""
        begun = served.http.get("/login/oidc")
        back = provider.log_in(begun.headers["Location"])
        served.http.cookies.clear()
        assert served.http.get(back).status_code == 401
        served.http.get("/login/oidc")
        assert served.http.get(back).status_code == 401
        assert who(served) is None

    def test_an_answer_that_comes_twice(self, served, provider):
        begun = served.http.get("/login/oidc")
        kept = served.http.cookies["__Host-steptune_oidc"]
        back = provider.log_in(begun.headers["Location"])
        assert served.http.get(back).status_code == 303
        served.http.cookies.clear()
        served.http.cookies.set("__Host-steptune_oidc", kept)
        assert served.http.get(back).status_code == 401, "the provider takes a code once"

    @pytest.mark.parametrize("cookie", ["", "x", "e30", "WzEsMl0", "////"])
    def test_a_cookie_that_is_not_ours(self, served, cookie):
        served.http.cookies.set("__Host-steptune_oidc", cookie)
        assert served.http.get("/login/oidc/callback?code=1&state=2").status_code == 401

    def test_an_answer_of_another_provider(self, served, provider):
        begun = served.http.get("/login/oidc")
        back = provider.log_in(begun.headers["Location"])
        assert served.http.get(back.rpartition("&iss=")[0] + "&iss=https%3A%2F%2Fevil.example").status_code == 401

    def test_a_user_who_said_no(self, served, provider):
        begun = served.http.get("/login/oidc")
        state = provider.log_in(begun.headers["Location"]).partition("state=")[2]
        answer = served.http.get(f"/login/oidc/callback?error=access_denied&state={state}")
        assert answer.status_code == 401
        assert "access_denied" in answer.text

    @pytest.mark.parametrize(
        "metadata",
        [
            {"issuer": "https://other.example.org"},
            {"token_endpoint": "http://id.example.org/token"},
            {"jwks_uri": None},
            {"authorization_endpoint": "javascript:alert(1)"},
        ],
        ids=str,
    )
    def test_a_provider_that_describes_itself_badly(self, served, provider, metadata):
        provider.changed_metadata = metadata
        answer = served.http.get("/login/oidc")
        assert (answer.status_code, answer.json()["code"]) == (502, "login-failed")

    def test_without_a_provider_there_is_no_such_login(self, sqlite_url, tmp_path):
        with application(sqlite_url, tmp_path) as served:
            assert "oidc" not in served.http.get("/login").text
            assert served.http.get("/login/oidc").status_code == 404
            assert served.http.get("/login/oidc/callback").status_code == 404


def test_its_secrets_are_not_logged(served, provider, caplog):
    caplog.set_level(0)
    begun = served.http.get("/login/oidc")
    back = provider.log_in(begun.headers["Location"])
    served.http.get(back)
    code = back.partition("code=")[2].partition("&")[0]
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("steptune")]
    assert lines
    for secret in (CLIENT_SECRET, code + "&", begun.headers["Location"].partition("state=")[2][:20]):
        assert not [line for line in lines if secret in line]

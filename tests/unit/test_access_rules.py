"""The rules of access that need no database: tokens' texts, scopes, addresses, rates, settings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from starlette.requests import Request

from steptune.service.access.errors import HostRefusedError, TooManyRequestsError
from steptune.service.access.open_access import check_host_header, check_loopback_only
from steptune.service.access.proxies import Proxies
from steptune.service.access.rate_limits import MAX_CLIENTS, RateLimit, client_of
from steptune.service.access.secrets import csrf_token_for, equal, new_cookie, new_token, parse_token, without_secrets
from steptune.service.access.tokens import effective_scopes
from steptune.service.settings.access import AccessSettings
from steptune.service.settings.addresses import is_loopback
from steptune.service.settings.scopes import Scope, implied, parse_scopes, scopes_text
from steptune.tuner.errors import ChoiceError

SECRET = "5a" * 32
SOME_SCOPES = st.frozensets(st.sampled_from(Scope), min_size=1)


def request(client="10.0.0.9", scheme="http", method="GET", **headers) -> Request:
    raw = [(name.replace("_", "-").lower().encode(), str(value).encode()) for name, value in headers.items()]
    return Request(
        {
            "type": "http",
            "method": method,
            "scheme": scheme,
            "path": "/",
            "headers": raw,
            "client": (client, 4000),
            "server": ("service", 80),
            "query_string": b"",
        }
    )


class TestTokens:
    def test_a_token_is_read_back(self):
        token = new_token()
        assert parse_token(token.text) == token
        assert len(bytes.fromhex(token.secret)) * 8 >= 128

    def test_secrets_do_not_repeat(self):
        assert len({new_token().secret for _ in range(100)} | {new_cookie() for _ in range(100)}) == 200

    @given(st.text())
    def test_no_other_text_is_a_token(self, text):
        parsed = parse_token(text)
        assert parsed is None or parsed.text == text

    @given(st.data())
    def test_a_token_with_any_change_is_another_or_none(self, data):
        token = new_token()
        place = data.draw(st.integers(0, len(token.text) - 1))
        changed = token.text[:place] + data.draw(st.characters()) + token.text[place + 1 :]
        parsed = parse_token(changed)
        assert parsed is None or parsed.text == changed
        assert changed == token.text or parsed != token

    @pytest.mark.parametrize("change", [str.upper, lambda t: t + " ", lambda t: t + "\n", lambda t: t[:-1]])
    def test_a_token_is_taken_to_the_letter(self, change):
        assert parse_token(change(new_token().text)) is None

    def test_its_repr_hides_the_secret(self):
        token = new_token()
        assert token.secret not in repr(token)

    @given(st.text(), st.text())
    def test_texts_lose_their_secrets(self, before, after):
        token = new_token()
        assert token.secret not in without_secrets(f"{before}{token.text} {after}")

    @given(st.text(), st.text())
    def test_comparison_takes_any_text(self, one, other):
        assert equal(one, other) is (one == other)

    def test_the_csrf_token_is_the_cookies_own_and_not_the_cookie(self):
        cookie, other = new_cookie(), new_cookie()
        assert csrf_token_for(cookie) == csrf_token_for(cookie) != csrf_token_for(other)
        assert cookie not in csrf_token_for(cookie)


class TestScopes:
    @given(SOME_SCOPES)
    def test_scopes_are_read_back(self, scopes):
        assert parse_scopes(scopes_text(scopes)) == scopes

    def test_only_admin_implies_others(self):
        assert implied({Scope.ADMIN}) == set(Scope)
        assert implied({Scope.READ, Scope.SUBMIT, Scope.WORKER}) == {Scope.READ, Scope.SUBMIT, Scope.WORKER}

    @given(SOME_SCOPES, SOME_SCOPES)
    def test_a_token_never_does_more_than_its_user_may(self, token, user):
        effective = effective_scopes(scopes_text(token), scopes_text(user))
        assert effective <= implied(user)
        assert effective <= implied(token)
        if Scope.ADMIN in user:
            assert effective == implied(token)

    @pytest.mark.parametrize(
        ("text", "match"), [("", "at least one scope is required"), ("read, root", "'root' is no scope")]
    )
    def test_unknown_scopes_are_refused(self, text, match):
        with pytest.raises(ChoiceError, match=match):
            parse_scopes(text)


class TestProxies:
    settings = AccessSettings(proxy_secret=SECRET, proxy_user_header="X-User")

    @pytest.mark.parametrize(
        ("secret", "num_hops", "forwarded", "address"),
        [
            (None, 1, None, "10.0.0.9"),
            (None, 1, "198.51.100.1", "10.0.0.9"),  # not the proxy: what it says is nothing
            ("x" * 40, 1, "198.51.100.1", "10.0.0.9"),
            ("", 1, "198.51.100.1", "10.0.0.9"),
            (SECRET, 1, "198.51.100.1", "198.51.100.1"),
            (SECRET, 1, "1.2.3.4, 198.51.100.1", "198.51.100.1"),  # the client wrote the first itself
            (SECRET, 2, "1.2.3.4, 198.51.100.1, 10.1.1.1", "198.51.100.1"),
            (SECRET, 3, "198.51.100.1", "198.51.100.1"),
            (SECRET, 1, "[2001:db8::1]:443", "2001:db8::1"),
            (SECRET, 1, "198.51.100.1:4711", "198.51.100.1"),
            (SECRET, 1, "::ffff:198.51.100.1", "198.51.100.1"),
            (SECRET, 1, "somebody", "10.0.0.9"),
            (SECRET, 1, "", "10.0.0.9"),
        ],
    )
    def test_the_clients_address(self, secret, num_hops, forwarded, address):
        headers = {} if forwarded is None else {"X_Forwarded_For": forwarded}
        headers |= {} if secret is None else {"X_Proxy_Secret": secret}
        proxies = Proxies(self.settings.model_copy(update={"proxy_hops": num_hops}))
        assert proxies.client_address(request("10.0.0.9", **headers)) == address

    @given(st.text(alphabet=st.characters(codec="latin-1", exclude_categories=["Cc"])))
    def test_any_forwarded_header_gives_an_address(self, text):
        asked = request()
        asked.scope["headers"] = [(b"x-forwarded-for", text.encode("latin-1")), (b"x-proxy-secret", SECRET.encode())]
        assert Proxies(self.settings).client_address(asked)

    @pytest.mark.parametrize("address", ["127.0.0.1", "::1", "10.0.0.9"])
    def test_the_user_header_counts_with_the_secret_only(self, caplog, address):
        proxies = Proxies(self.settings)
        assert proxies.user_name(request(address, X_User="ada", X_Proxy_Secret=SECRET)) == "ada"
        assert proxies.user_name(request(address, X_Proxy_Secret=SECRET)) is None
        assert not caplog.records
        for forged in ({}, {"X_Proxy_Secret": ""}, {"X_Proxy_Secret": SECRET[:-1]}, {"X_Forwarded_For": "127.0.0.1"}):
            assert proxies.user_name(request(address, X_User="ada", **forged)) is None
        assert f"ignored header X-User from {address}" in caplog.text
        assert SECRET not in caplog.text

    def test_all_that_comes_through_the_socket_is_the_proxys(self, tmp_path):
        """Only its own user may open it."""
        proxies = Proxies(AccessSettings(unix_socket=tmp_path / "socket", proxy_user_header="X-User"))
        asked = request(X_User="ada", X_Forwarded_For="198.51.100.1")
        asked.scope["client"] = None
        assert proxies.user_name(asked) == "ada"
        assert proxies.client_address(asked) == "198.51.100.1"

    def test_a_peer_without_an_address_is_no_proxy(self):
        """A connection that was reset at once has none."""
        asked = request(X_User="ada")
        asked.scope["client"] = None
        assert Proxies(self.settings).user_name(asked) is None

    @pytest.mark.parametrize(
        "headers",
        [
            [(b"x-user", b"ada"), (b"x-user", b"root"), (b"x-proxy-secret", SECRET.encode())],
            [(b"x-user", b"ada"), (b"x-proxy-secret", SECRET.encode()), (b"x-proxy-secret", SECRET.encode())],
        ],
    )
    def test_what_comes_twice_is_not_believed(self, headers):
        asked = request()
        asked.scope["headers"] = headers
        assert Proxies(self.settings).user_name(asked) is None

    def test_who_has_no_header_set_believes_none(self):
        assert Proxies(AccessSettings()).user_name(request("10.0.0.9", X_User="ada")) is None

    @pytest.mark.parametrize(
        ("secret", "scheme", "forwarded", "public", "secure"),
        [
            ("", "https", "", "", True),
            ("", "http", "https", "", False),
            (SECRET, "http", "https", "", True),
            (SECRET, "https", "http", "", False),
            (SECRET, "http", "http, https", "", True),  # the nearest proxy wrote the last
            ("", "http", "", "https://tune.example.org", True),
        ],
    )
    def test_https_is_known_from_proxies_and_settings(self, secret, scheme, forwarded, public, secure):
        proxies = Proxies(self.settings.model_copy(update={"public_url": public}))
        headers = {"X_Forwarded_Proto": forwarded} if forwarded else {}
        assert proxies.is_secure(request("127.0.0.1", scheme, X_Proxy_Secret=secret, **headers)) is secure

    @pytest.mark.parametrize(
        ("headers", "same"),
        [
            ({}, True),
            ({"Origin": "http://service"}, True),
            ({"Origin": "http://service:8080"}, False),
            ({"Origin": "http://service.evil.org"}, False),
            ({"Origin": "null"}, False),
            ({"Origin": ""}, False),
            ({"Sec_Fetch_Site": "same-origin"}, True),
            ({"Sec_Fetch_Site": "none"}, True),
            ({"Sec_Fetch_Site": "same-site"}, False),
            ({"Sec_Fetch_Site": "cross-site", "Origin": "http://service"}, False),
        ],
    )
    def test_requests_of_other_sites_are_seen(self, headers, same):
        assert Proxies(AccessSettings()).is_same_origin(request(Host="service", **headers)) is same

    def test_behind_a_proxy_the_public_address_is_ours(self):
        proxies = Proxies(AccessSettings(public_url="https://tune.example.org/steptune"))
        assert proxies.is_same_origin(request(Host="internal:8700", Origin="https://tune.example.org"))
        assert not proxies.is_same_origin(request(Host="internal:8700", Origin="http://internal:8700"))


class TestRates:
    def test_a_burst_then_the_rate(self):
        now = [0.0]
        limit = RateLimit("requests", 60, lambda: now[0])
        for _ in range(60):
            limit.spend("ada")
        with pytest.raises(
            TooManyRequestsError, match="the limit of 60 requests a minute is exceeded: wait 1 s"
        ) as refused:
            limit.spend("ada")
        assert refused.value.headers["Retry-After"] == "1"
        assert refused.value.headers["RateLimit"] == '"requests";r=0;t=60'
        limit.spend("grace")
        now[0] = 1.0
        limit.spend("ada")
        with pytest.raises(TooManyRequestsError):
            limit.spend("ada")

    def test_waiting_as_long_as_it_says_is_enough(self):
        now = [0.0]
        limit = RateLimit("logins", 7, lambda: now[0])
        for _ in range(100):
            try:
                limit.spend("ada")
            except TooManyRequestsError as refused:
                now[0] += int(refused.headers["Retry-After"])
                limit.spend("ada")

    @given(st.lists(st.floats(0, 30), max_size=200))
    def test_no_minute_has_more_than_twice_the_rate(self, pauses):
        now = [0.0]
        limit = RateLimit("requests", 10, lambda: now[0])
        allowed = []
        for pause in pauses:
            now[0] += pause
            try:
                limit.spend("ada")
                allowed.append(now[0])
            except TooManyRequestsError:
                pass
        for begin in allowed:
            assert sum(begin <= at < begin + 60 for at in allowed) <= 20

    def test_what_is_left_is_told(self):
        headers = RateLimit("requests", 10, lambda: 0.0).spend("ada")
        assert headers == {"RateLimit-Policy": '"requests";q=10;w=60', "RateLimit": '"requests";r=9;t=6'}

    def test_many_clients_do_not_fill_the_memory(self):
        limit = RateLimit("requests", 10, lambda: 0.0)
        for number in range(MAX_CLIENTS + 100):
            limit.spend(str(number))
        assert len(limit._buckets) == MAX_CLIENTS

    def test_one_client_has_a_whole_network_of_ipv6(self):
        assert client_of("2001:db8::1") == client_of("2001:db8::ffff:1") != client_of("2001:db8:0:1::1")
        assert client_of("198.51.100.1") != client_of("198.51.100.2")


class TestOpenAccess:
    @pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.0.0.1", "127.8.8.8", "::1", "[::1]"])
    def test_loopback_is_allowed(self, host):
        check_loopback_only(host)

    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "example.org", "localhost.example.org"])
    def test_all_else_is_refused(self, host):
        with pytest.raises(ChoiceError, match="leave out --insecure-no-auth"):
            check_loopback_only(host)

    @pytest.mark.parametrize("host", ["localhost:8700", "127.0.0.1", "[::1]:8700"])
    def test_loopback_names_are_served(self, host):
        check_host_header(request(Host=host))

    @pytest.mark.parametrize("host", ["rebound.example.org", "127.0.0.1.example.org:8700", "", "localhost@evil.org"])
    def test_other_names_are_not(self, host):
        with pytest.raises(HostRefusedError):
            check_host_header(request(Host=host))

    @given(st.text())
    def test_any_text_is_a_host_or_not(self, text):
        is_loopback(text)


class TestSettings:
    @pytest.mark.parametrize(
        ("settings", "match"),
        [
            ({"proxy_user_header": "X-User"}, "needs proxy_secret or unix_socket"),
            ({"proxy_user_header": "X-User", "proxy_secret": ""}, "needs proxy_secret or unix_socket"),
            ({"proxy_secret": "short"}, "openssl rand"),
            ({"trusted_proxies": "127.0.0.1"}, "STEPTUNE_PROXY_SECRET.*--unix-socket"),
            ({"insecure_no_auth": True, "proxy_secret": SECRET}, "admits others"),
            ({"insecure_no_auth": True, "unix_socket": "/run/steptune"}, "admits others"),
            ({"new_user_scopes": "root"}, "no scope"),
            ({"public_url": "tune.example.org"}, "not a web address"),
            ({"oidc_issuer": "https://id.example.org", "public_url": "https://x.org"}, "needs oidc_client_id"),
            ({"oidc_issuer": "https://id.example.org", "oidc_client_id": "x"}, "needs public_url"),
            ({"oidc_issuer": "http://id.example.org", "oidc_client_id": "x"}, "must use https"),
            (
                {"insecure_no_auth": True, "proxy_user_header": "X-User", "proxy_secret": SECRET},
                "contradict each other",
            ),
        ],
    )
    def test_what_cannot_work_is_refused_at_the_start(self, settings, match):
        with pytest.raises(ValidationError, match=match):
            AccessSettings(**settings)

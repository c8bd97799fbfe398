"""Access over HTTP: who gets in, what browsers must prove, what is refused, and what is written down."""

import re
from pathlib import Path

import pytest
from access_builders import HTTPS, application, bearer, texts_of
from starlette.routing import Route

from steptune.service.access.secrets import new_token, parse_token
from steptune.service.api.login import _LOCAL_PATH
from steptune.service.settings.scopes import Scope

PROBLEM = "application/problem+json"
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
ID = "0" * 26
SECRET = "5a" * 32


@pytest.fixture
def served(sqlite_url, tmp_path):
    with application(sqlite_url, tmp_path) as served:
        yield served


def operations(app) -> list[tuple[str, str, list[str]]]:
    """Method, path and scopes of every operation that needs somebody."""
    found = []
    for path, methods in app.openapi()["paths"].items():
        for method, operation in methods.items():
            if "security" in operation:
                filled = re.sub(r"\{\w+\}", ID, path)
                found.append((method.upper(), filled, operation["security"][0]["token"]))
    return found


class TestEveryEndpoint:
    def test_says_what_it_needs(self, served):
        """Only these are for everybody; anything new must be added here by hand, or ask who is there."""
        without = {
            (method.upper(), path)
            for path, methods in served.http.app.openapi()["paths"].items()
            for method, operation in methods.items()
            if "security" not in operation
        }
        assert without == {("GET", "/healthz"), ("GET", "/readyz"), ("GET", "/metrics"), ("POST", "/api/v1/session")}

    def test_offers_both_ways_to_say_who_one_is(self, served):
        for methods in served.http.app.openapi()["paths"].values():
            for operation in methods.values():
                assert [set(way) for way in operation.get("security", [])] in ([], [{"token"}, {"session"}])

    def test_refuses_whoever_is_not_let_in(self, database_url, tmp_path):
        with application(database_url, tmp_path, failed_logins_per_minute=10_000) as served:
            people = served.people
            ada = people.user("ada", "admin read submit worker")
            expired, revoked = people.token(ada, days=1), people.token(ada)
            served.access.tokens.revoke(parse_token(revoked).token_id)
            served.clock.advance(days=2)
            disabled = people.new_token("grace", "read submit")
            served.access.users.change(served.access.users.named("grace").user_id, disabled=True)
            wrong = [expired, revoked, disabled, new_token().text, "", "stp_", "x" * 5000]
            for method, path, _ in operations(served.http.app):
                answer = served.http.request(method, path)
                assert answer.status_code == 401, (method, path)
                assert answer.headers["WWW-Authenticate"] == 'Bearer realm="steptune"'
                for token in wrong:
                    answer = served.http.request(method, path, headers=bearer(token))
                    assert answer.status_code == 401, (method, path, token)
                    assert answer.headers["content-type"] == PROBLEM
                    assert 'error="invalid_token"' in answer.headers["WWW-Authenticate"]
                basic = served.http.request(method, path, headers={"Authorization": "Basic YWRhOmFkYQ=="})
                assert basic.status_code == 401

    def test_refuses_every_scope_but_its_own(self, served):
        tokens = {scope: served.people.new_token(scope.value, scope.value) for scope in Scope}
        num_refused = 0
        for method, path, needed in operations(served.http.app):
            for scope, token in tokens.items():
                answer = served.http.request(method, path, headers=bearer(token))
                if not needed or scope in (needed[0], Scope.ADMIN):
                    assert answer.status_code not in (401, 403), (method, path, scope, answer.text)
                    continue
                num_refused += 1
                assert answer.status_code == 403, (method, path, scope)
                problem = answer.json()
                assert problem["code"] == "missing-scope"
                assert problem["context"] == {"required_scope": needed[0]}
                assert f"`{needed[0]}`" in problem["detail"]
                assert f'scope="{needed[0]}"' in answer.headers["WWW-Authenticate"]
        assert num_refused > 20


class TestTokens:
    def test_made_used_and_revoked(self, database_url, tmp_path):
        with application(database_url, tmp_path) as served:
            first = served.people.new_token("ada", "read submit")
            made = served.as_token(first, "POST", "/tokens", json={"name": "nightly", "scopes": ["read"]})
            assert made.status_code == 201
            assert made.headers["Cache-Control"] == "no-store"
            info = served.as_token(first, "GET", made.headers["Location"].removeprefix("/api/v1")).json()
            assert info == made.json()["info"]
            token = made.json()["token"]
            me = served.as_token(token, "GET", "/session").json()
            assert (me["name"], me["scopes"], me["method"], me["csrf_token"]) == ("ada", ["read"], "token", None)
            assert served.as_token(first, "POST", f"/tokens/{info['token_id']}/revoke").json()["revoked_at"]
            assert served.as_token(token, "GET", "/session").status_code == 401

    def test_the_secret_is_shown_once(self, served):
        first = served.people.new_token("ada", "admin")
        made = served.as_token(first, "POST", "/tokens", json={"scopes": ["read"]}).json()
        secret = parse_token(made["token"]).secret
        for path in ("/tokens", f"/tokens/{made['info']['token_id']}", "/audit", "/session"):
            assert secret not in served.as_token(first, "GET", path).text

    def test_an_idempotency_key_is_refused(self, served):
        token = served.people.new_token("ada", "read")
        refused = served.as_token(
            token, "POST", "/tokens", json={"scopes": ["read"]}, headers={"Idempotency-Key": "once"}
        )
        assert (refused.status_code, refused.json()["code"]) == (400, "no-idempotency")

    def test_more_scopes_than_ones_own_are_refused(self, served):
        token = served.people.new_token("ada", "read")
        refused = served.as_token(token, "POST", "/tokens", json={"scopes": ["read", "admin"]})
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid-choice")
        assert len(served.as_token(token, "GET", "/tokens").json()["items"]) == 1

    def test_others_are_seen_by_administrators_only(self, served):
        ada, grace = served.people.user("ada", "read"), served.people.user("grace", "read")
        ada_token, grace_token = served.people.token(ada), served.people.token(grace)
        admin = served.people.new_token("root", "admin")
        grace_id = parse_token(grace_token).token_id
        assert served.as_token(ada_token, "GET", f"/tokens/{grace_id}").status_code == 404
        assert served.as_token(ada_token, "POST", f"/tokens/{grace_id}/revoke").status_code == 404
        assert served.as_token(ada_token, "GET", f"/tokens?user={grace.user_id}").json()["items"] == []
        refused = served.as_token(ada_token, "POST", "/tokens", json={"scopes": ["read"], "user_id": grace.user_id})
        assert refused.status_code == 403
        assert len(served.as_token(admin, "GET", "/tokens").json()["items"]) == 3
        made = served.as_token(admin, "POST", "/tokens", json={"scopes": ["read"], "user_id": grace.user_id})
        assert made.json()["info"]["user_id"] == grace.user_id
        assert served.as_token(admin, "POST", f"/tokens/{grace_id}/revoke").status_code == 200
        assert served.as_token(grace_token, "GET", "/session").status_code == 401

    def test_pages_follow_one_another(self, served):
        ada = served.people.user("ada", "read")
        tokens = [served.people.token(ada) for _ in range(7)]
        seen, cursor = [], ""
        while True:
            page = served.as_token(tokens[0], "GET", f"/tokens?limit=3{cursor}").json()
            seen += [item["token_id"] for item in page["items"]]
            if page["next_cursor"] is None:
                break
            cursor = f"&cursor={page['next_cursor']}"
        assert seen == sorted((parse_token(token).token_id for token in tokens), reverse=True)


class TestUsers:
    def test_made_changed_and_disabled(self, database_url, tmp_path):
        with application(database_url, tmp_path) as served:
            admin = served.people.new_token("root", "admin")
            made = served.as_token(
                admin, "POST", "/users", json={"name": "ada", "scopes": ["read", "submit"], "max_queued": 3}
            )
            assert made.status_code == 201
            path = made.headers["Location"].removeprefix("/api/v1")
            token = served.people.token(served.access.users.named("ada"))
            changed = served.as_token(
                admin, "PATCH", path, json={"max_queued": None, "max_device_hours": 5, "scopes": ["read"]}
            ).json()
            assert (changed["max_queued"], changed["max_device_hours"], changed["scopes"]) == (None, 5.0, ["read"])
            assert served.as_token(token, "GET", "/session").json()["scopes"] == ["read"]
            served.as_token(admin, "PATCH", path, json={"disabled": True})
            assert served.as_token(token, "GET", "/session").status_code == 401
            names = [user["name"] for user in served.as_token(admin, "GET", "/users").json()["items"]]
            assert names == ["ada", "root"]

    def test_a_name_is_taken_once(self, served):
        admin = served.people.new_token("root", "admin")
        refused = served.as_token(admin, "POST", "/users", json={"name": "root", "scopes": ["read"]})
        assert (refused.status_code, refused.json()["code"]) == (409, "name-taken")

    def test_a_change_of_what_has_changed_is_refused(self, served):
        admin = served.people.new_token("root", "admin")
        user = served.people.user("ada")
        path = f"/users/{user.user_id}"
        tag = served.as_token(admin, "GET", path).headers["ETag"]
        assert served.as_token(admin, "PATCH", path, json={"priority": 1}, headers={"If-Match": tag}).status_code == 200
        again = served.as_token(admin, "PATCH", path, json={"priority": 2}, headers={"If-Match": tag})
        assert again.status_code == 412
        assert served.access.users.get(user.user_id).priority == 1

    def test_the_last_administrator_stays(self, served):
        admin = served.people.new_token("root", "admin")
        user_id = served.access.users.named("root").user_id
        refused = served.as_token(admin, "PATCH", f"/users/{user_id}", json={"disabled": True})
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid-choice")


class TestSessions:
    def test_log_in_ask_and_log_out(self, database_url, tmp_path):
        with application(database_url, tmp_path) as served:
            token = served.people.new_token("ada", "read")
            csrf = served.log_in(token)
            me = served.http.get("/api/v1/session").json()
            assert (me["name"], me["method"], me["csrf_token"]) == ("ada", "session", csrf)
            assert served.http.get("/api/v1/tokens").status_code == 200
            ended = served.http.delete("/api/v1/session", headers={"X-CSRF-Token": csrf})
            assert ended.status_code == 204
            assert served.http.get("/api/v1/session").status_code == 401

    def test_the_cookie_is_out_of_reach_of_scripts_and_other_sites(self, served):
        answer = served.http.post("/api/v1/session", json={"token": served.people.new_token("ada", "read")})
        [cookie] = answer.headers.get_list("set-cookie")
        assert cookie.startswith("steptune_session=")
        assert {"HttpOnly", "Path=/", "SameSite=lax"} <= set(cookie.split("; "))
        assert "Secure" not in cookie

    def test_over_https_it_is_of_this_host_only(self, sqlite_url, tmp_path):
        with application(sqlite_url, tmp_path, base_url=HTTPS) as served:
            answer = served.http.post("/api/v1/session", json={"token": served.people.new_token("ada", "read")})
            [cookie] = answer.headers.get_list("set-cookie")
            assert cookie.startswith("__Host-steptune_session=")
            assert {"Secure", "Path=/"} <= set(cookie.split("; "))
            assert "Domain" not in cookie
            assert served.http.get("/api/v1/session").status_code == 200
            value = served.http.cookies["__Host-steptune_session"]
            served.http.cookies.clear()
            served.http.cookies.set("steptune_session", value)  # a name that another host of the domain could set
            assert served.http.get("/api/v1/session").status_code == 401

    def test_behind_an_https_proxy_too(self, sqlite_url, tmp_path):
        with application(sqlite_url, tmp_path, proxy_secret=SECRET) as served:
            token = served.people.new_token("ada", "read")
            headers = {"X-Forwarded-Proto": "https", "X-Proxy-Secret": SECRET}
            answer = served.http.post("/api/v1/session", json={"token": token}, headers=headers)
            assert "__Host-steptune_session=" in answer.headers["set-cookie"]

    @pytest.mark.parametrize("csrf", [None, "", "0" * 64, "wrong"])
    def test_a_change_without_the_csrf_token_is_refused(self, served, csrf):
        served.log_in(served.people.new_token("ada", "read"))
        headers = {} if csrf is None else {"X-CSRF-Token": csrf}
        refused = served.http.post("/api/v1/tokens", json={"scopes": ["read"]}, headers=headers)
        assert (refused.status_code, refused.json()["code"]) == (403, "cross-site-request")
        assert served.http.get("/api/v1/session").status_code == 200

    def test_the_csrf_token_of_another_session_does_not_help(self, served):
        token = served.people.new_token("ada", "read")
        other = served.log_in(token)
        own = served.log_in(token)
        for csrf, status in ((other, 403), (own, 201)):
            answer = served.http.post("/api/v1/tokens", json={"scopes": ["read"]}, headers={"X-CSRF-Token": csrf})
            assert answer.status_code == status

    def test_another_sites_page_is_refused_even_with_the_csrf_token(self, served):
        csrf = served.log_in(served.people.new_token("ada", "read"))
        for origin in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
            refused = served.http.post(
                "/api/v1/tokens", json={"scopes": ["read"]}, headers={"X-CSRF-Token": csrf, **origin}
            )
            assert refused.status_code == 403

    def test_another_site_cannot_log_a_browser_in(self, served):
        token = served.people.new_token("mallory", "read")
        for path, sent in (("/api/v1/session", {"json": {"token": token}}), ("/login", {"data": {"token": token}})):
            refused = served.http.post(path, headers={"Origin": "http://evil.example"}, **sent)
            assert refused.status_code == 403
            assert "set-cookie" not in refused.headers

    def test_tokens_need_no_csrf_token(self, served):
        token = served.people.new_token("ada", "read")
        served.log_in(token)
        assert served.as_token(token, "POST", "/tokens", json={"scopes": ["read"]}).status_code == 201

    def test_logging_in_again_ends_the_session_before(self, served):
        token = served.people.new_token("ada", "read")
        served.log_in(token)
        before = served.http.cookies["steptune_session"]
        served.log_in(token)
        assert served.http.cookies["steptune_session"] != before
        served.http.cookies.clear()
        served.http.cookies.set("steptune_session", before)
        assert served.http.get("/api/v1/session").status_code == 401

    def test_a_token_is_no_session_to_end(self, served):
        refused = served.as_token(served.people.new_token("ada", "read"), "DELETE", "/session")
        assert (refused.status_code, refused.json()["code"]) == (409, "no-session")

    def test_what_is_read_for_a_session_is_not_kept_by_caches(self, served):
        served.log_in(served.people.new_token("ada", "read"))
        assert served.http.get("/api/v1/session").headers["Cache-Control"] == "no-store"


class TestLoginPage:
    def csrf_in(self, page: str) -> str:
        return re.search(r'name="csrf_token" value="([0-9a-f]{64})"', page)[1]

    def test_forms_without_scripts_log_in_and_out(self, database_url, tmp_path):
        with application(database_url, tmp_path) as served:
            token = served.people.new_token("ada", "read")
            page = served.http.get("/login?next=/studies")
            assert 'value="/studies"' in page.text
            assert "<script" not in page.text
            done = served.http.post("/login", data={"token": f" {token}\n", "next": "/studies"})
            assert (done.status_code, done.headers["Location"]) == (303, "/studies")
            page = served.http.get("/login").text
            assert "ada" in page
            assert served.http.post("/logout", data={"csrf_token": "wrong"}).status_code == 403
            out = served.http.post("/logout", data={"csrf_token": self.csrf_in(page)})
            assert (out.status_code, out.headers["Location"]) == (303, "/login")
            assert 'name="token"' in served.http.get("/login").text

    def test_a_wrong_token_gets_the_form_again_without_it(self, served):
        token = new_token()
        page = served.http.post("/login", data={"token": token.text, "next": '/"><script>'})
        assert page.status_code == 401
        assert 'role="alert"' in page.text
        assert token.secret not in page.text
        assert "<script" not in page.text

    def test_a_login_code_opens_one_session_of_the_administrator(self, database_url, tmp_path):
        with application(database_url, tmp_path) as served:
            served.people.user("ada", "read")
            served.people.user("root", "admin")
            code = served.access.new_login_code()
            typed = code.upper().replace("-", " ")
            assert served.http.post("/login", data={"token": typed}).status_code == 303
            me = served.http.get("/api/v1/session").json()
            assert (me["name"], me["method"], me["token_id"]) == ("root", "session", None)
            assert served.http.post("/login", data={"token": code}).status_code == 401
            assert served.http.post("/api/v1/session", json={"token": code}).status_code == 401
            assert code.replace("-", "") not in str(served.entries())

    def test_a_guessed_login_code_counts_as_a_failed_login(self, sqlite_url, tmp_path):
        with application(sqlite_url, tmp_path, failed_logins_per_minute=2) as served:
            served.people.user("root", "admin")
            served.access.new_login_code()
            guesses = [served.http.post("/login", data={"token": f"0000-0000-000{n}"}).status_code for n in range(4)]
            assert guesses == [401, 401, 429, 429]

    def test_nobody_gets_a_login_code_where_no_administrator_is_enabled(self, served):
        served.people.user("ada", "read submit")
        assert served.access.new_login_code() is None

    @pytest.mark.parametrize(
        "target", ["https://evil.example", "//evil.example", "/\\evil.example", "evil", "/a\r\nX: y", "/\t/evil", ""]
    )
    def test_it_leads_to_our_own_pages_only(self, served, target):
        done = served.http.post("/login", data={"token": served.people.new_token("ada", "read"), "next": target})
        assert (done.status_code, done.headers["Location"]) == (303, "/")

    @pytest.mark.parametrize("path", ["/studies/1?tab=gaps&x=%2F#top", "/"])
    def test_our_own_pages_are_known(self, path):
        assert _LOCAL_PATH.fullmatch(path)

    def test_links_are_below_the_base_path(self, sqlite_url, tmp_path):
        with application(sqlite_url, tmp_path, root_path="/steptune") as served:
            assert 'action="/steptune/login"' in served.http.get("/login").text


class TestProxyLogin:
    HEADER = {"X-User": "ada", "X-Proxy-Secret": SECRET}  # noqa: RUF012
    GRACE = {"X-User": "grace", "X-Proxy-Secret": SECRET}  # noqa: RUF012

    @pytest.fixture
    def proxied(self, sqlite_url, tmp_path):
        with application(sqlite_url, tmp_path, proxy_secret=SECRET, proxy_user_header="X-User") as served:
            served.people.user("ada", "read")
            yield served

    def test_who_logged_in_at_the_proxy_gets_a_session(self, proxied):
        done = proxied.http.get("/login?next=/studies", headers=self.HEADER)
        assert (done.status_code, done.headers["Location"]) == (303, "/studies")
        assert proxied.http.get("/api/v1/session", headers=self.HEADER).json()["name"] == "ada"

    def test_logins_and_the_users_that_they_make_are_written_down(self, sqlite_url, tmp_path):
        settings = {"proxy_secret": SECRET, "proxy_user_header": "X-User", "new_user_scopes": "read"}
        with application(sqlite_url, tmp_path, **settings) as served:
            served.http.get("/login", headers=self.HEADER)
            served.http.cookies.clear()
            served.http.get("/login", headers={**self.HEADER, "X-Request-ID": "second"})
            served.http.get("/login", headers=self.HEADER)
            ada = served.access.users.named("ada")
            second, first, made = served.entries()
            assert (made.action, made.target, made.user_id) == ("create_user", ada.user_id, ada.user_id)
            assert (made.detail["name"], made.detail["scopes"]) == ("ada", "read")
            for login in (first, second):
                assert (login.action, login.outcome, login.user_id) == ("login_page", "done", ada.user_id)
            assert second.request_id == "second"

    def test_the_header_alone_is_no_session(self, proxied):
        """The proxy's own cookie rides along with requests of other sites, so ours must be there too."""
        assert proxied.http.get("/api/v1/session", headers=self.HEADER).status_code == 401

    def test_the_session_is_of_no_use_to_the_next_user_of_the_proxy(self, proxied):
        proxied.people.user("grace", "read")
        proxied.http.get("/login", headers=self.HEADER)
        assert proxied.http.get("/api/v1/session", headers=self.GRACE).status_code == 401
        proxied.http.get("/login", headers=self.GRACE)
        assert proxied.http.get("/api/v1/session", headers=self.GRACE).json()["name"] == "grace"

    @pytest.mark.parametrize("address", ["127.0.0.1", "::1", "203.0.113.7"])
    def test_without_the_secret_the_header_is_ignored_wherever_it_comes_from(
        self, sqlite_url, tmp_path, caplog, address
    ):
        """A trial on the same host calls from loopback, as the proxy does."""
        with application(
            sqlite_url,
            tmp_path,
            client=address,
            proxy_secret=SECRET,
            proxy_user_header="X-User",
            new_user_scopes="admin",
        ) as served:
            served.people.user("ada", "admin")
            forgeries = (
                {"X-Forwarded-For": "127.0.0.1"},
                {"Forwarded": "for=127.0.0.1;proto=https"},
                {"X-Real-IP": "127.0.0.1"},
                {"X-Proxy-Secret": ""},
                {"X-Proxy-Secret": SECRET[:-1]},
                {"Host": "localhost", "Origin": "http://localhost"},
            )
            for forged in ({}, *forgeries):
                for name in ("ada", "somebody new"):
                    page = served.http.get("/login?next=/", headers={"X-User": name, "X-Remote-User": name, **forged})
                    assert page.status_code == 200
                    assert "set-cookie" not in page.headers
                    assert served.http.get("/api/v1/session", headers={"X-User": name, **forged}).status_code == 401
            assert [user.name for user in served.access.users.page(limit=10)] == ["ada"]
        assert "ignored header X-User" in caplog.text


class TestMetrics:
    @pytest.mark.parametrize("address", ["127.0.0.1", "::1", "10.0.0.9"])
    @pytest.mark.parametrize("settings", [{}, {"metrics_token": ""}, {"metrics_token": "the-metrics-token"}])
    def test_no_address_opens_them(self, sqlite_url, tmp_path, address, settings):
        """Neither a proxy's that adds no header, nor this machine's."""
        with application(sqlite_url, tmp_path, client=address, **settings) as served:
            for headers in ({}, {"Authorization": ""}, {"Authorization": "Bearer "}, {"X-Forwarded-For": "127.0.0.1"}):
                assert served.http.get("/metrics", headers=headers).status_code in (401, 403)
            right = served.http.get("/metrics", headers=bearer("the-metrics-token"))
            assert right.status_code == (200 if settings.get("metrics_token") else 403)


class TestOpenAccess:
    @pytest.fixture
    def opened(self, sqlite_url, tmp_path):
        with application(
            sqlite_url, tmp_path, client="127.0.0.1", base_url="http://localhost:8700", insecure_no_auth=True
        ) as served:
            yield served

    def test_everybody_here_is_the_local_administrator(self, opened):
        me = opened.http.get("/api/v1/session").json()
        assert (me["name"], me["method"]) == ("local", "open")
        assert "admin" in me["scopes"]
        assert opened.http.post("/api/v1/users", json={"name": "ada", "scopes": ["read"]}).status_code == 201

    @pytest.mark.parametrize("path", ["/api/v1/session", "/login", "/healthz", "/api/v1/openapi.json", "/nowhere"])
    def test_names_that_are_not_loopback_are_refused_everywhere(self, opened, path):
        refused = opened.http.get(path, headers={"Host": "rebound.example.org:8700"})
        assert (refused.status_code, refused.json()["code"]) == (403, "host-refused")
        assert refused.headers["content-type"] == PROBLEM

    @pytest.mark.parametrize("headers", [{"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}])
    def test_pages_of_other_sites_change_nothing(self, opened, headers):
        refused = opened.http.post("/api/v1/users", json={"name": "ada", "scopes": ["read"]}, headers=headers)
        assert refused.status_code == 403
        assert [user.name for user in opened.access.users.page(limit=10)] in ([], ["local"])


class TestRates:
    def test_a_user_has_their_rate(self, sqlite_url, tmp_path):
        with application(sqlite_url, tmp_path, requests_per_minute=5) as served:
            ada, grace = served.people.new_token("ada", "read"), served.people.new_token("grace", "read")
            left = [served.as_token(ada, "GET", "/session").headers["RateLimit"] for _ in range(5)]
            assert [re.search(r"r=(\d+)", text)[1] for text in left] == ["4", "3", "2", "1", "0"]
            refused = served.as_token(ada, "GET", "/session")
            assert (refused.status_code, refused.json()["code"]) == (429, "too-many-requests")
            assert int(refused.headers["Retry-After"]) > 0
            assert refused.headers["RateLimit-Policy"] == '"requests";q=5;w=60'
            assert served.as_token(grace, "GET", "/session").status_code == 200

    def test_more_tokens_and_sessions_are_no_more_requests(self, sqlite_url, tmp_path):
        with application(sqlite_url, tmp_path, requests_per_minute=3, failed_logins_per_minute=1) as served:
            first = served.people.new_token("ada", "read")
            second = served.people.token(served.access.users.named("ada"))
            statuses = [served.as_token(token, "GET", "/session").status_code for token in (first, second)]
            statuses += [
                served.http.post("/api/v1/session", json={"token": first}).status_code,
                served.http.get("/api/v1/session").status_code,
                served.http.post("/api/v1/session", json={"token": second}).status_code,
                served.http.post("/login", data={"token": second}).status_code,
            ]
            assert statuses == [200, 200, 201, 429, 429, 429]
            assert served.http.post("/login", data={"token": "x"}).status_code == 401, "no refused login was counted"

    def test_guessing_is_slowed_down_for_its_address_only_and_not_for_the_valid(self, sqlite_url, tmp_path):
        with application(sqlite_url, tmp_path, proxy_secret=SECRET, failed_logins_per_minute=3) as served:
            good = served.people.new_token("ada", "read")

            def status(token: str, address: str) -> int:
                headers = {"X-Forwarded-For": address, "X-Proxy-Secret": SECRET}
                return served.as_token(token, "GET", "/session", headers=headers).status_code

            guesses = [status(new_token().text, "198.51.100.1") for _ in range(5)]
            assert guesses == [401, 401, 401, 429, 429]
            assert status(good, "198.51.100.1") == 200
            assert status(new_token().text, "198.51.100.2") == 401

    def test_failed_logins_count_at_every_door(self, sqlite_url, tmp_path):
        with application(sqlite_url, tmp_path, failed_logins_per_minute=2) as served:
            statuses = [
                served.http.post("/login", data={"token": "x"}).status_code,
                served.http.post("/api/v1/session", json={"token": "x"}).status_code,
                served.http.post("/login", data={"token": "x"}).status_code,
                served.http.post("/api/v1/session", json={"token": "x"}).status_code,
                served.as_token("x", "GET", "/session").status_code,
            ]
            assert statuses == [401, 401, 429, 429, 429]
            assert len(served.entries()) == 2, "a flood does not fill the audit log"


class TestQuotas:
    WORKLOAD = "import steptune\n\nclass Mine(steptune.Workload):\n    pass\n"

    def upload(self, served, token: str, text: str):
        return served.as_token(token, "POST", "/workloads", files={"file": ("train.py", text)})

    def test_uploads_beyond_the_quota_are_refused_with_the_numbers(self, database_url, tmp_path):
        size = len(self.WORKLOAD)
        with application(database_url, tmp_path, max_user_artifact_bytes=2 * size) as served:
            token = served.people.new_token("ada", "read submit")
            assert self.upload(served, token, self.WORKLOAD).status_code == 201
            refused = self.upload(served, token, self.WORKLOAD + "# longer\n")
            problem = refused.json()
            assert (refused.status_code, problem["code"]) == (403, "quota-exceeded")
            assert problem["context"] == {"quota": "max_artifact_bytes", "value": 2 * size + 9, "limit": 2 * size}
            assert "delete workloads or studies" in problem["detail"]
            assert len(served.as_token(token, "GET", "/workloads").json()["items"]) == 1
            served.access.users.change(served.access.users.named("ada").user_id, max_artifact_bytes=10 * size)
            assert self.upload(served, token, self.WORKLOAD + "# longer\n").status_code == 201

    def test_waiting_studies_beyond_the_quota_are_refused_with_the_numbers(self, database_url, tmp_path):
        with application(database_url, tmp_path) as served:
            token = served.people.token(served.people.user("ada", "read submit", max_queued=1))
            study = {"workload": "zoo:synthetic"}
            assert served.as_token(token, "POST", "/studies", json=study).status_code == 201
            refused = served.as_token(token, "POST", "/studies", json=study)
            assert (refused.status_code, refused.json()["code"]) == (403, "quota-exceeded")
            assert refused.json()["context"] == {"quota": "max_queued", "value": 2, "limit": 1}


class TestAudit:
    def test_every_change_and_every_refusal_is_written_down(self, database_url, tmp_path):
        with application(database_url, tmp_path) as served:
            admin = served.people.new_token("root", "admin")
            reader = served.people.new_token("ada", "read")
            root = served.access.users.named("root")
            given = {"X-Request-ID": "my-request"}
            made = served.as_token(
                admin, "POST", "/users", json={"name": "grace", "scopes": ["read"]}, headers=given
            ).json()
            served.as_token(reader, "GET", "/users")
            served.as_token(new_token().text, "GET", "/users")
            served.as_token(admin, "POST", "/users", json={"name": "grace", "scopes": ["read"]})
            served.as_token(admin, "GET", "/users")
            served.http.get("/api/v1/users")
            taken, unknown, refused, created = served.as_token(admin, "GET", "/audit").json()["items"]
            assert (created["action"], created["outcome"], created["user_id"]) == ("create_user", "done", root.user_id)
            assert (created["request_id"], created["token_id"]) == ("my-request", parse_token(admin).token_id)
            assert created["detail"]["user_id"] == made["user_id"]
            assert created["detail"]["address"] == "203.0.113.7"
            assert (refused["action"], refused["outcome"]) == ("list_users", "missing-scope")
            assert refused["token_id"] == parse_token(reader).token_id
            assert (unknown["outcome"], unknown["user_id"]) == ("not-authenticated", None)
            assert (taken["outcome"], taken["detail"]["status"]) == ("failed", 409)

    def test_reading_it_in_pages(self, served):
        admin = served.people.new_token("root", "admin")
        for number in range(5):
            served.access.audit.record(None, action=f"action-{number}", target="", outcome="done")
        first = served.as_token(admin, "GET", "/audit?limit=3").json()
        rest = served.as_token(admin, "GET", f"/audit?limit=3&cursor={first['next_cursor']}").json()
        actions = [entry["action"] for entry in first["items"] + rest["items"]]
        assert actions == [f"action-{number}" for number in (4, 3, 2, 1, 0)]
        assert rest["next_cursor"] is None

    def test_a_path_that_does_not_exist_is_no_place_for_a_token(self, served, caplog):
        token = new_token()
        served.http.post(f"/api/v1/tokens/{token.text}/revoke", headers=bearer(token.text))
        assert served.entries()
        assert not [text for text in texts_of(served.access._engine) if token.secret in text]


class TestSecrets:
    def test_none_is_in_rows_or_logs_after_everything_was_done(self, database_url, tmp_path, caplog, capsys):
        """Every operation with a token and with a session, in good and in bad order; then everything is read."""
        caplog.set_level(0)
        with application(database_url, tmp_path, failed_logins_per_minute=10_000) as served:
            admin = served.people.new_token("root", "admin")
            made = served.as_token(admin, "POST", "/tokens", json={"scopes": ["admin"]}).json()["token"]
            csrf = served.log_in(made)
            cookie = served.http.cookies["steptune_session"]
            guess = new_token().text
            everything = [(method, path) for method, path, _ in operations(served.http.app)]
            pages = [(method, r.path) for r in served.http.app.routes if isinstance(r, Route) for method in r.methods]
            for method, path in [*everything, *pages]:
                if (method, path) in (("DELETE", "/api/v1/session"), ("POST", "/logout")) or "events" in path:
                    continue
                for headers in (bearer(admin), bearer(guess), {"X-CSRF-Token": csrf}, {"X-CSRF-Token": guess}):
                    served.http.request(method, f"{path}?token={guess}", headers=headers)
                    served.http.request(method, path, json={"token": guess}, headers=headers)
                    served.http.request(method, path, data={"token": guess}, headers=headers)
            for path in (f"/{guess}", f"/api/v1/tokens/{guess}"):
                served.http.get(path, headers=bearer(admin))
            served.http.post("/logout", data={"csrf_token": csrf})
            secrets = [parse_token(text).secret for text in (admin, made, guess)] + [cookie, csrf]
            from steptune.service.logs import JsonFormatter

            lines = [JsonFormatter().format(record) for record in caplog.records if record.name.startswith("steptune")]
            texts = list(texts_of(served.access._engine))
        captured = capsys.readouterr()
        assert len(lines) > 100
        assert len(texts) > 500
        for secret in secrets:
            assert not [line for line in lines if secret in line]
            assert not [text for text in texts if secret in text]
            assert secret not in captured.out + captured.err

    def test_no_secret_is_in_a_message_of_an_error(self, served):
        token = new_token()
        for sent in ({"token": token.text + "x"}, {"token": [token.text]}, {"tokens": token.text}):
            answer = served.http.post("/api/v1/session", json=sent)
            assert answer.status_code in (401, 422)
            assert token.secret not in answer.text


def test_the_page_needs_nothing_from_elsewhere():
    from steptune import service

    page = (Path(service.__file__).parent / "templates" / "login.html").read_text()
    assert "http://" not in page
    assert "https://" not in page

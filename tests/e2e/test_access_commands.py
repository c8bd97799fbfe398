"""`steptune token` and `steptune user`, as an administrator types them."""

import sqlite3
from contextlib import closing

import pytest

from steptune.service.access.authentication import Access
from steptune.service.access.errors import NotAuthenticatedError
from steptune.service.access.secrets import parse_token
from steptune.service.database import open_engine
from steptune.service.settings.access import AccessSettings
from steptune.service.settings.scopes import Scope


@pytest.fixture
def access(tmp_path):
    engine = open_engine(f"sqlite:///{tmp_path}/steptune.db")
    yield Access(engine, AccessSettings())
    engine.dispose()


def test_a_token_is_printed_alone_works_and_ends(inside, access):
    inside("user", "create", "ada", "--scopes", "read,submit")
    created = inside("token", "create", "--user", "ada", "--scopes", "read", "--name", "laptop", "--days", "7")
    token = created.out.strip()
    assert parse_token(token) is not None, "a script can take standard output as it is"
    assert "cannot be shown again" in created.err
    assert access.authenticate_token(token).scopes == {Scope.READ}
    [listed] = inside("token", "list", "--json").json
    assert (listed["name"], listed["scopes"]) == ("laptop", ["read"])
    assert parse_token(token).secret not in inside("token", "list").out
    assert "revoked" in inside("token", "revoke", listed["token_id"]).out
    with pytest.raises(NotAuthenticatedError, match="revoked"):
        access.authenticate_token(token)


def test_a_token_that_never_expires_is_asked_for_in_words(inside, access):
    inside("user", "create", "ada")
    assert inside("token", "create", "--user", "ada", "--json").json["info"]["expires_at"] is not None
    never = inside("token", "create", "--user", "ada", "--never-expires", "--json").json
    assert never["info"]["expires_at"] is None


def test_a_user_is_made_limited_and_disabled(inside, access):
    inside("user", "create", "ada", "--max-queued", "3", "--priority", "5")
    changed = inside("user", "quota", "ada", "--max-queued", "default", "--max-device-hours", "1.5", "--json").json
    assert (changed["max_queued"], changed["max_device_hours"], changed["priority"]) == (None, 1.5, 5)
    assert inside("user", "quota", "ada", "--json").json == changed
    assert "disabled" in inside("user", "disable", "ada").out
    assert access.users.named("ada").disabled_at is not None
    inside("user", "disable", "ada", "--undo")
    assert access.users.named("ada").disabled_at is None
    assert "ada" in inside("user", "list").out


def test_what_was_done_is_in_the_audit_log_without_secrets(inside, access, tmp_path):
    inside("user", "create", "ada")
    token = inside("token", "create", "--user", "ada").out.strip()
    inside("token", "revoke", parse_token(token).token_id)
    entries = access.audit.page(limit=10)
    assert [entry.action for entry in entries] == ["revoke_token", "create_token", "create_user"]
    assert all(entry.detail["system_user"] for entry in entries)
    with closing(sqlite3.connect(tmp_path / "steptune.db")) as connection:
        assert parse_token(token).secret not in "\n".join(connection.iterdump())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("token", "create", "--user", "nobody"), "no user is called 'nobody'"),
        (("token", "create", "--user", "ada", "--scopes", "admin"), "got `admin`"),
        (("token", "create", "--user", "ada", "--scopes", "root"), "'root' is no scope"),
        (("token", "create", "--user", "ada", "--days", "0"), "0 days"),
        (("token", "create", "--user", "ada", "--days", "7", "--never-expires"), "contradict each other"),
        (("token", "revoke", "0" * 26), "no token has the id"),
        (("user", "create", "ada"), "the user name 'ada' is taken"),
        (("user", "quota", "ada", "--max-running", "many"), "--max-running must be a number or `default`, got 'many'"),
        (("user", "quota", "ada", "--max-running", "-1"), "max_running = -1"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(inside, arguments, message):
    inside("user", "create", "ada", "--scopes", "read")
    assert message in inside(*arguments, status=2).error


def test_settings_that_contradict_each_other_are_refused_without_their_secrets(inside, monkeypatch):
    monkeypatch.setenv("STEPTUNE_OIDC_CLIENT_SECRET", "the-client-secret")
    monkeypatch.setenv("STEPTUNE_METRICS_TOKEN", "the-metrics-token")
    monkeypatch.setenv("STEPTUNE_DATABASE_URL", "postgresql+psycopg://ada:the-password@nowhere.invalid/x")
    refused = inside("serve", "--oidc-issuer", "https://id.example.org", status=2)
    assert "oidc_issuer needs oidc_client_id" in refused.error
    assert "the-" not in refused.err


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_without_authentication_it_listens_on_loopback_only(inside, host):
    refused = inside("serve", "--insecure-no-auth", "--host", host, status=2)
    assert f"--insecure-no-auth needs a loopback address, got --host {host}" in refused.error

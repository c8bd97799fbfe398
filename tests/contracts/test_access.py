"""Users, tokens, sessions, logins and the audit log, on both databases."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from threading import Barrier

import pytest
from access_builders import BEGINNING, Clock, People, access_on, texts_of
from sqlalchemy import event

from steptune.service.access.authentication import Access
from steptune.service.access.errors import MissingScopeError, NameTakenError, NotAuthenticatedError, NotFoundError
from steptune.service.access.first_start import first_admin_token
from steptune.service.access.logins import principal_named
from steptune.service.access.open_access import local_principal
from steptune.service.access.principal import Method, Principal
from steptune.service.access.secrets import BearerToken, new_token, parse_token
from steptune.service.database import open_engine
from steptune.service.settings.scopes import Scope
from steptune.tuner.errors import ChoiceError, StoreError


@pytest.fixture
def engine(database_url):
    engine = open_engine(database_url)
    yield engine
    engine.dispose()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def access(engine, clock) -> Access:
    return access_on(engine, clock)


@pytest.fixture
def people(access) -> People:
    return People(access)


def parsed(text: str) -> BearerToken:
    token = parse_token(text)
    assert token is not None
    return token


class TestTokens:
    def test_who_sends_it_is_known(self, access, people):
        user = people.user("ada", "read submit")
        principal = access.authenticate_token(people.token(user, "read"))
        assert (principal.user_id, principal.name, principal.scopes) == (user.user_id, "ada", {Scope.READ})
        assert principal.method is Method.TOKEN
        assert principal.expires_at == BEGINNING + timedelta(days=30)

    def test_the_secret_is_nowhere_in_the_database(self, engine, people):
        secret = parsed(people.new_token("ada", "read")).secret
        assert not [text for text in texts_of(engine) if secret in text]

    def test_every_bit_of_it_counts(self, access, people):
        token = parsed(people.new_token("ada", "read"))
        for wrong in (new_token().secret, token.secret[::-1], "0" * len(token.secret)):
            with pytest.raises(NotAuthenticatedError, match="not valid"):
                access.tokens.authenticate(BearerToken(token_id=token.token_id, secret=wrong))

    def test_an_unknown_id_and_a_wrong_secret_are_refused_in_the_same_words(self, access, people):
        token = parsed(people.new_token("ada", "read"))
        messages = set()
        for wrong in (new_token(), BearerToken(token_id=token.token_id, secret=new_token().secret)):
            with pytest.raises(NotAuthenticatedError) as refused:
                access.tokens.authenticate(wrong)
            messages.add(str(refused.value))
        assert len(messages) == 1

    def test_it_ends(self, access, people, clock):
        token = people.token(people.user(), days=2)
        clock.advance(days=1, hours=23)
        access.authenticate_token(token)
        clock.advance(hours=1)
        with pytest.raises(NotAuthenticatedError, match="expired at 2026-03-03 12:00 UTC"):
            access.authenticate_token(token)

    def test_it_is_revoked(self, access, people):
        token = people.new_token("ada", "read")
        revoked = access.tokens.revoke(parsed(token).token_id)
        assert revoked.revoked_at == BEGINNING
        with pytest.raises(NotAuthenticatedError, match="revoked at"):
            access.authenticate_token(token)

    def test_revoking_again_changes_nothing(self, access, people, clock):
        token_id = parsed(people.new_token("ada", "read")).token_id
        access.tokens.revoke(token_id)
        clock.advance(days=1)
        assert access.tokens.revoke(token_id).revoked_at == BEGINNING

    def test_it_ends_with_the_one_that_made_it(self, access, people):
        user = people.user("ada", "read")
        first = people.token(user)
        texts = [first]
        for _ in range(3):
            maker = access.authenticate_token(texts[-1])
            _, made = access.tokens.issue(user.user_id, name="", scopes={Scope.READ}, days=90, by=maker)
            texts.append(made.text)
        apart = people.token(user)
        access.tokens.revoke(parsed(texts[1]).token_id)
        access.authenticate_token(first)
        access.authenticate_token(apart)
        for text in texts[1:]:
            with pytest.raises(NotAuthenticatedError, match="revoked"):
                access.authenticate_token(text)

    def test_it_lives_no_longer_than_the_one_that_made_it(self, access, people):
        user = people.user("ada", "read")
        maker = access.authenticate_token(people.token(user, days=5))
        made, _ = access.tokens.issue(user.user_id, name="", scopes={Scope.READ}, days=None, by=maker)
        assert made.expires_at == maker.expires_at

    def test_one_made_by_a_session_lives_no_longer_than_the_token_that_opened_it(self, access, people, clock):
        user = people.user("ada", "read")
        opener = access.authenticate_token(people.token(user, days=0.25))
        cookie = access.sessions.open(opener).cookie
        maker = access.sessions.authenticate(cookie)
        made, _ = access.tokens.issue(user.user_id, name="", scopes={Scope.READ}, days=3650, by=maker)
        assert made.expires_at == opener.expires_at
        clock.advance(hours=7)
        with pytest.raises(NotAuthenticatedError, match="expired"):
            access.tokens.issue(user.user_id, name="", scopes={Scope.READ}, days=1, by=maker)

    def test_one_made_by_an_administrator_for_somebody_outlives_theirs(self, access, people):
        admin_token = people.token(people.user("root", "admin"))
        maker = access.authenticate_token(admin_token)
        user = people.user("ada", "read")
        _, made = access.tokens.issue(user.user_id, name="", scopes={Scope.READ}, days=90, by=maker)
        access.tokens.revoke(parsed(admin_token).token_id)
        access.authenticate_token(made.text)

    def test_one_that_may_do_more_is_revoked_only_by_its_maker(self, access, people):
        user = people.user("ada", "read submit admin")
        maker = access.authenticate_token(people.token(user))
        child, _ = access.tokens.issue(user.user_id, name="", scopes={Scope.SUBMIT}, days=1, by=maker)
        reader = access.authenticate_token(people.token(user, "read"))
        peer, other = (parsed(people.token(user, "read")).token_id for _ in range(2))
        for token_id in (maker.token_id, child.token_id):
            with pytest.raises(MissingScopeError):
                access.tokens.revoke(token_id, by=reader)
        assert access.tokens.revoke(peer, by=reader).revoked_at is not None
        access.users.change(user.user_id, scopes={Scope.READ, Scope.ADMIN})
        weakened = replace(maker, scopes=frozenset({Scope.READ}))
        for token_id in (child.token_id, other, maker.token_id):
            assert access.tokens.revoke(token_id, by=weakened).revoked_at is not None

    def test_a_revoked_token_makes_no_more(self, access, people):
        user = people.user("ada", "read")
        token = people.token(user)
        maker = access.authenticate_token(token)
        access.tokens.revoke(parsed(token).token_id)
        with pytest.raises(NotAuthenticatedError, match="revoked"):
            access.tokens.issue(user.user_id, name="", scopes={Scope.READ}, days=1, by=maker)

    @pytest.mark.parametrize(
        ("user", "maker", "asked", "allowed"),
        [
            ("read", "read", "read", True),
            ("read", "read", "submit", False),
            ("read submit", "read", "submit", False),
            ("read submit", "read", "admin", False),
            ("admin", "admin", "worker", True),
            ("admin", "read", "worker", False),
        ],
    )
    def test_it_never_gets_more_than_its_maker_has(self, access, people, user, maker, asked, allowed):
        owner = people.user("ada", user)
        by = access.authenticate_token(people.token(owner, maker))
        if allowed:
            access.tokens.issue(owner.user_id, name="", scopes={Scope(asked)}, days=1, by=by)
        else:
            with pytest.raises(ChoiceError, match=rf"must be one or more of .*, got `{asked}`"):
                access.tokens.issue(owner.user_id, name="", scopes={Scope(asked)}, days=1, by=by)

    def test_it_does_less_as_soon_as_its_user_may_less(self, access, people):
        user = people.user("ada", "read submit")
        token = people.token(user)
        access.users.change(user.user_id, scopes={Scope.READ})
        assert access.authenticate_token(token).scopes == {Scope.READ}

    def test_it_is_refused_while_its_user_is_disabled(self, access, people):
        user = people.user()
        token = people.token(user)
        access.users.change(user.user_id, disabled=True)
        with pytest.raises(NotAuthenticatedError, match="disabled"):
            access.authenticate_token(token)
        access.users.change(user.user_id, disabled=False)
        access.authenticate_token(token)

    @pytest.mark.parametrize("days", [0, -1, float("nan"), float("inf"), 1e9])
    def test_times_that_cannot_be_are_refused(self, access, people, days):
        with pytest.raises(ChoiceError, match="days"):
            people.token(people.user(), days=days)

    def test_the_last_use_is_written_once_a_minute(self, engine, access, people, clock):
        text = people.new_token("ada", "read")
        token_id = parsed(text).token_id
        assert access.tokens.get(token_id).last_used_at is None
        updates = []
        event.listen(
            engine, "before_cursor_execute", lambda *a: updates.append(a[2]) if a[2].startswith("UPDATE") else None
        )
        access.authenticate_token(text)
        clock.advance(seconds=59)
        access.authenticate_token(text)
        assert access.tokens.get(token_id).last_used_at == BEGINNING
        assert len(updates) == 1
        clock.advance(seconds=1)
        access.authenticate_token(text)
        assert access.tokens.get(token_id).last_used_at == clock.now
        assert len(updates) == 2

    def test_lists_are_newest_first_in_pages_and_of_one_user(self, access, people):
        ada, grace = people.user("ada"), people.user("grace")
        ids = [parsed(people.token(user)).token_id for user in (ada, grace, ada, grace, ada)]
        first = access.tokens.page(limit=2)
        rest = access.tokens.page(limit=10, before=first[-1].token_id)
        assert [token.token_id for token in [*first, *rest]] == sorted(ids, reverse=True)
        assert {token.user_id for token in access.tokens.page(limit=10, owner_id=ada.user_id)} == {ada.user_id}
        assert len(access.tokens.page(limit=10, owner_id=ada.user_id)) == 3

    def test_anothers_token_is_not_there(self, access, people):
        token_id = parsed(people.new_token("ada", "read")).token_id
        grace = people.user("grace")
        for method in (access.tokens.get, access.tokens.revoke):
            with pytest.raises(NotFoundError, match=token_id):
                method(token_id, owner_id=grace.user_id)
        assert access.tokens.get(token_id).revoked_at is None


class TestUsers:
    def test_what_is_set_is_read(self, access, people):
        user = people.user("ada", "read", max_queued=3, max_device_hours=1.5, priority=-2)
        assert access.users.get(user.user_id) == access.users.named("ada") == user
        assert (user.max_queued, user.max_device_hours, user.priority, user.max_running) == (3, 1.5, -2, None)

    def test_a_limit_goes_back_to_the_default(self, access, people):
        user = people.user("ada", max_queued=3)
        assert access.users.change(user.user_id, max_queued=None).max_queued is None

    def test_names_are_unique_also_for_two_at_once(self, access):
        barrier = Barrier(4)

        def make(_) -> bool:
            barrier.wait()
            try:
                access.users.create("ada", {Scope.READ})
            except NameTakenError:
                return False
            return True

        with ThreadPoolExecutor(4) as pool:
            assert sorted(pool.map(make, range(4))) == [False, False, False, True]

    @pytest.mark.parametrize("name", ["", " ", " ada", "ada ", "a\nb", "a\x00b", "a\x1b[31m", "x" * 201])
    def test_names_that_mislead_are_refused(self, access, name):
        with pytest.raises(ChoiceError, match="not a valid user name"):
            access.users.create(name, {Scope.READ})

    @pytest.mark.parametrize("name", ["Ada Lovelace", "ada@example.org", "'; DROP TABLE users; --", "<b>ада</b>"])
    def test_other_names_are_kept_as_they_are(self, access, name):
        access.users.create(name, {Scope.READ})
        assert access.users.named(name).name == name

    @pytest.mark.parametrize(
        "change", [{"max_queued": -1}, {"max_device_hours": -0.1}, {"priority": 10**6}, {"max_artifact_bytes": 2**63}]
    )
    def test_limits_that_cannot_be_are_refused(self, access, people, change):
        with pytest.raises(ChoiceError, match="it lies between"):
            people.user("ada", **change)
        assert access.users.page(limit=10) == []

    def test_the_last_administrator_stays(self, access, people):
        first, second = people.user("first", "admin"), people.user("second", "admin read")
        access.users.change(first.user_id, scopes={Scope.READ})
        for change in ({"disabled": True}, {"scopes": {Scope.READ}}):
            with pytest.raises(ChoiceError, match="no administrator would be left"):
                access.users.change(second.user_id, **change)
        assert access.users.get(second.user_id).disabled_at is None

    def test_disabling_ends_sessions_for_good(self, access, people):
        user = people.user()
        login = access.sessions.open(principal_named(access.users, access.settings, user.name))
        access.users.change(user.user_id, disabled=True)
        access.users.change(user.user_id, disabled=False)
        with pytest.raises(NotAuthenticatedError, match="log in again"):
            access.sessions.authenticate(login.cookie)


class TestSessions:
    @pytest.fixture
    def principal(self, access, people) -> Principal:
        return access.authenticate_token(people.token(people.user("ada", "read submit"), "read", days=30))

    def test_it_has_the_scopes_of_its_token(self, access, principal):
        login = access.sessions.open(principal)
        found = access.sessions.authenticate(login.cookie)
        assert (found.user_id, found.scopes, found.token_id) == (principal.user_id, {Scope.READ}, principal.token_id)
        assert found.method is Method.SESSION

    def test_its_cookie_and_csrf_token_are_nowhere_in_the_database(self, engine, access, principal):
        login = access.sessions.open(principal)
        assert not [text for text in texts_of(engine) if login.cookie in text or login.csrf_token in text]
        assert login.cookie not in repr(login)

    def test_it_ends_when_idle(self, access, principal, clock):
        login = access.sessions.open(principal)
        for _ in range(5):
            clock.advance(hours=11)
            access.sessions.authenticate(login.cookie)
        clock.advance(hours=12)
        with pytest.raises(NotAuthenticatedError, match="log in again"):
            access.sessions.authenticate(login.cookie)

    def test_it_ends_by_age_however_busy(self, access, principal, clock):
        login = access.sessions.open(principal)
        for _ in range(7 * 24 - 1):
            clock.advance(hours=1)
            access.sessions.authenticate(login.cookie)
        clock.advance(hours=1)
        with pytest.raises(NotAuthenticatedError, match="log in again"):
            access.sessions.authenticate(login.cookie)

    def test_activity_is_not_written_with_every_request(self, engine, access, principal, clock):
        login = access.sessions.open(principal)
        updates = []
        event.listen(
            engine, "before_cursor_execute", lambda *a: updates.append(a[2]) if a[2].startswith("UPDATE") else None
        )
        for _ in range(10):
            clock.advance(seconds=10)
            access.sessions.authenticate(login.cookie)
        assert len(updates) == 1

    def test_it_ends_with_its_token(self, access, principal, clock):
        revoked, expired = access.sessions.open(principal), access.sessions.open(principal)
        access.tokens.revoke(principal.token_id)
        with pytest.raises(NotAuthenticatedError, match="revoked"):
            access.sessions.authenticate(revoked.cookie)
        clock.advance(days=31)
        with pytest.raises(NotAuthenticatedError):
            access.sessions.authenticate(expired.cookie)

    def test_it_ends_when_its_token_expires(self, access, people, clock):
        principal = access.authenticate_token(people.token(people.user(), days=0.25))
        login = access.sessions.open(principal)
        clock.advance(hours=7)
        with pytest.raises(NotAuthenticatedError, match="expired"):
            access.sessions.authenticate(login.cookie)

    def test_it_ends_by_logout(self, access, principal):
        login, other = access.sessions.open(principal), access.sessions.open(principal)
        access.sessions.close(login.cookie)
        access.sessions.close(login.cookie)
        with pytest.raises(NotAuthenticatedError, match="log in again"):
            access.sessions.authenticate(login.cookie)
        access.sessions.authenticate(other.cookie)


class TestLoginsElsewhere:
    def test_who_is_known_gets_their_scopes(self, access, people):
        user = people.user("ada@example.org", "read submit")
        principal = principal_named(access.users, access.settings, "ada@example.org")
        assert (principal.user_id, principal.scopes) == (user.user_id, {Scope.READ, Scope.SUBMIT})

    def test_strangers_are_refused_by_default(self, access):
        with pytest.raises(NotAuthenticatedError, match="steptune user create"):
            principal_named(access.users, access.settings, "mallory")
        assert access.users.page(limit=10) == []

    def test_strangers_are_made_users_where_the_settings_say_so(self, engine, clock):
        access = access_on(engine, clock, new_user_scopes="read")
        principal = principal_named(access.users, access.settings, "grace")
        assert principal.scopes == {Scope.READ}
        assert principal_named(access.users, access.settings, "grace").user_id == principal.user_id

    def test_the_disabled_are_refused(self, access, people):
        access.users.change(people.user("ada").user_id, disabled=True)
        with pytest.raises(NotAuthenticatedError, match="disabled"):
            principal_named(access.users, access.settings, "ada")

    @pytest.mark.parametrize("name", ["admin", "local"])
    def test_nobody_takes_the_services_own_names(self, engine, clock, name):
        first_admin_token(engine, days=90)
        local_principal(engine)
        access = access_on(engine, clock, new_user_scopes="read")
        with pytest.raises(NotAuthenticatedError, match="is reserved for the service"):
            principal_named(access.users, access.settings, name)


class TestFirstStart:
    def test_one_of_many_processes_gets_the_token(self, engine):
        barrier = Barrier(6)

        def start(_) -> str | None:
            barrier.wait()
            return first_admin_token(engine, days=90)

        with ThreadPoolExecutor(6) as pool:
            tokens = [token for token in pool.map(start, range(6)) if token]
        assert len(tokens) == 1

    def test_it_administers_and_comes_once(self, engine, access):
        token = first_admin_token(engine, days=90)
        principal = access.authenticate_token(token)
        assert principal.is_admin
        assert principal.expires_at > datetime.now(UTC) + timedelta(days=89)
        assert first_admin_token(engine, days=90) is None

    def test_who_has_users_already_gets_none(self, engine, people):
        people.user("ada", "read")
        assert first_admin_token(engine, days=90) is None

    def test_the_local_user_does_not_count(self, engine):
        assert local_principal(engine) == local_principal(engine)
        assert first_admin_token(engine, days=90) is not None


class TestAudit:
    def test_entries_are_read_back_newest_first(self, access, people):
        principal = access.authenticate_token(people.new_token("ada", "read"))
        access.audit.record(principal, action="cancel_study", target="/x", outcome="done", request_id="r1")
        access.audit.record(None, action="start", target="", outcome="done", detail={"count": 3, "why": "test"})
        newest, oldest = access.audit.page(limit=10)
        assert (newest.action, newest.user_id, newest.detail) == ("start", None, {"count": 3, "why": "test"})
        assert (oldest.user_id, oldest.token_id, oldest.at) == (principal.user_id, principal.token_id, BEGINNING)
        assert access.audit.page(limit=10, before=newest.entry_id) == [oldest]
        assert access.audit.page(limit=10, user_id=principal.user_id) == [oldest]

    def test_secrets_and_floods_do_not_get_in(self, access):
        token = new_token()
        access.audit.record(
            None,
            action="x",
            target=f"/tokens/{token.text}",
            outcome="failed",
            request_id="a\x00b",
            detail={"text": f"{token.text} {'y' * 10_000}", "number": None},
        )
        [entry] = access.audit.page(limit=1)
        assert token.secret not in str(entry)
        assert token.token_id in entry.target
        assert len(entry.detail["text"]) == 500
        assert "\x00" not in entry.request_id


class TestTrouble:
    def test_a_database_that_cannot_be_written_still_lets_people_read(self, engine, access, people, caplog):
        token = people.new_token("ada", "read")

        def refuse(connection, cursor, statement, *rest):
            if "UPDATE" in statement:
                raise OSError(28, "No space left on device")

        event.listen(engine, "before_cursor_execute", refuse)
        assert access.authenticate_token(token).name == "ada"
        assert "last use of token" in caplog.text
        with pytest.raises(StoreError):
            access.tokens.revoke(parsed(token).token_id)

"""Tokens that were found valid a moment ago: not looked up again, and never longer than that."""

from datetime import UTC, datetime, timedelta

import pytest

from steptune.service.access.known import MAX_KNOWN, KnownTokens
from steptune.service.access.principal import Method, Principal
from steptune.service.access.secrets import BearerToken, new_token
from steptune.service.settings.scopes import Scope

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Seconds:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def seconds() -> Seconds:
    return Seconds()


@pytest.fixture
def known(seconds: Seconds) -> KnownTokens:
    return KnownTokens(1.0, seconds)


def owner_of(bearer: BearerToken, expires_at: datetime | None = None) -> Principal:
    return Principal(
        user_id="u",
        name="ada",
        scopes=frozenset({Scope.READ}),
        method=Method.TOKEN,
        token_id=bearer.token_id,
        expires_at=expires_at,
    )


def test_it_is_known_for_its_time_and_no_longer(known: KnownTokens, seconds: Seconds) -> None:
    bearer = new_token()
    known.remember(bearer, owner_of(bearer), known.generation)
    seconds.now = 0.99
    assert known.recall(bearer, NOW) == owner_of(bearer)
    seconds.now = 1.0
    assert known.recall(bearer, NOW) is None


def test_another_secret_is_not_known(known: KnownTokens) -> None:
    bearer, other = new_token(), new_token()
    known.remember(bearer, owner_of(bearer), known.generation)
    assert known.recall(BearerToken(token_id=bearer.token_id, secret=other.secret), NOW) is None
    assert known.recall(other, NOW) is None


def test_one_that_expires_meanwhile_is_not_known(known: KnownTokens) -> None:
    bearer = new_token()
    known.remember(bearer, owner_of(bearer, NOW + timedelta(milliseconds=1)), known.generation)
    assert known.recall(bearer, NOW) is not None
    assert known.recall(bearer, NOW + timedelta(milliseconds=1)) is None


def test_what_was_looked_up_before_a_change_is_not_remembered_after_it(known: KnownTokens) -> None:
    bearer = new_token()
    generation = known.generation
    known.forget()
    known.remember(bearer, owner_of(bearer), generation)
    assert known.recall(bearer, NOW) is None


def test_without_a_time_nothing_is_known(seconds: Seconds) -> None:
    known, bearer = KnownTokens(0, seconds), new_token()
    known.remember(bearer, owner_of(bearer), known.generation)
    assert known.recall(bearer, NOW) is None


def test_so_many_are_known_at_most(known: KnownTokens) -> None:
    for _ in range(MAX_KNOWN + 1):
        last = new_token()
        known.remember(last, owner_of(last), known.generation)
    assert len(known._known) <= MAX_KNOWN
    assert known.recall(last, NOW) is not None

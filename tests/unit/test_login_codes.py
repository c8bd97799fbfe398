"""One-time codes for the login page."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from steptune.service.access.errors import NotAuthenticatedError
from steptune.service.access.login_codes import VALID_S, LoginCodes, is_login_code
from steptune.service.access.secrets import new_token
from steptune.service.serving import _show_login_code


class Seconds:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_it_opens_one_session_for_its_user_however_it_is_typed() -> None:
    codes = LoginCodes()
    code = codes.issue("root")
    assert is_login_code(code)
    assert codes.redeem(code.upper().replace("-", " ").replace("0", "O").replace("1", "I")) == "root"
    with pytest.raises(NotAuthenticatedError, match="has been used"):
        codes.redeem(code)


def test_of_many_who_send_it_at_once_one_gets_in() -> None:
    codes = LoginCodes()
    code = codes.issue("root")

    def redeems(_: int) -> bool:
        try:
            return codes.redeem(code) == "root"
        except NotAuthenticatedError:
            return False

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(redeems, range(64))) == 1


def test_it_ends_after_ten_minutes() -> None:
    seconds = Seconds()
    codes = LoginCodes(seconds)
    early, late = codes.issue("root"), VALID_S
    seconds.now = late - 1
    assert codes.redeem(early) == "root"
    code = codes.issue("root")
    seconds.now += VALID_S
    with pytest.raises(NotAuthenticatedError, match="older than ten minutes"):
        codes.redeem(code)


def test_a_new_one_voids_the_one_before_and_a_wrong_one_does_not() -> None:
    codes = LoginCodes()
    first, second = codes.issue("root"), codes.issue("root")
    with pytest.raises(NotAuthenticatedError):
        codes.redeem(first)
    with pytest.raises(NotAuthenticatedError):
        codes.redeem("0000-0000-0000")
    assert codes.redeem(second) == "root"


def test_nothing_is_redeemed_where_none_was_issued() -> None:
    with pytest.raises(NotAuthenticatedError):
        LoginCodes().redeem("")


def test_only_its_hash_is_kept() -> None:
    codes = LoginCodes()
    code = codes.issue("root")
    assert code.replace("-", "") not in str(vars(codes))


@pytest.mark.parametrize("text", ["", "x", "0000-0000-000", "0000-0000-0000-0", "0000-0000-00u0"])
def test_other_texts_are_not_codes(text: str) -> None:
    assert not is_login_code(text)


def test_a_token_is_not_a_code() -> None:
    assert not is_login_code(new_token().text)


def test_serve_makes_none_where_nobody_sits_at_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    class NeverAsked:
        def __getattr__(self, name: str) -> object:
            raise AssertionError(f"asked for {name}")

    _show_login_code(NeverAsked())  # type: ignore[arg-type]
    assert capfd.readouterr() == ("", "")

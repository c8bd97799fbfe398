"""A study of a script that goes on: what was measured before counts as another place, for the load was another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from steptune.service import studies
from steptune.service.places import this_place


class DriverMadeError(Exception):
    """Carries the place that a driver was made with."""

    def __init__(self, place: Callable[[], str]) -> None:
        super().__init__()
        self.place = place


def place_of(monkeypatch: pytest.MonkeyPatch, *, measured_anew: bool) -> Callable[[], str]:
    def driver(*arguments: Any, place: Callable[[], str], **options: Any) -> None:
        raise DriverMadeError(place)

    monkeypatch.setattr(studies, "StudyDriver", driver)
    nothing: Any = None
    with pytest.raises(DriverMadeError) as made:
        studies.run_study(nothing, nothing, nothing, nothing, measured_anew=measured_anew)
    return made.value.place


def test_a_study_that_begins_or_can_compare_is_in_this_place(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place_of(monkeypatch, measured_anew=False)() == this_place()


def test_one_that_is_measured_anew_stays_in_one_place_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    place = place_of(monkeypatch, measured_anew=True)

    assert place() == place()
    assert place() != this_place()
    assert place().startswith(this_place())

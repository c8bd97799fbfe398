"""Searches by name: what `--search` may be.

A search of another package joins by an entry point of the group `steptune.searches`, whose name is the search's and
which loads a callable without arguments that makes one (see `Search` in `history.py`).
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from steptune.tuner.errors import ChoiceError
from steptune.tuner.wording import no_such

if TYPE_CHECKING:
    from steptune.tuner.search.history import Search

GROUP = "steptune.searches"
OWN = ("model", "tpe", "gp", "random")
STAGES = "stages"
"""The search of earlier studies, which `model` has taken the place of: it goes on with what they measured."""


def search_names() -> list[str]:
    """Every name that there is here, the default first."""
    return list(dict.fromkeys([*OWN, *sorted(entry.name for entry in entry_points(group=GROUP))]))


def check_search(name: str) -> None:
    """Refuse the name of a search that does not exist.

    Raises:
        ChoiceError: Names those that do.
    """
    if name not in search_names():
        raise ChoiceError(no_such("search", name, search_names()))


def make_search(name: str) -> Search:
    """A new search; the default one for a study that was begun with one that is no more.

    Raises:
        ChoiceError: There is none of that name, or what its entry point loads makes none.
    """
    name = OWN[0] if name == STAGES else name
    check_search(name)
    if name in OWN:
        return _own(name)
    (entry, *_) = entry_points(group=GROUP, name=name)
    search = entry.load()()
    missing = [method for method in ("suggest", "update") if not callable(getattr(search, method, None))]
    if missing:
        raise ChoiceError(f"the search {name!r} of {entry.value} has no method {' and none '.join(missing)}")
    made: Search = search
    return made


def _own(name: str) -> Search:
    """One of those that come with Steptune; numerical libraries are loaded only now."""
    from steptune.tuner.search.model_search import ModelSearch
    from steptune.tuner.search.plain_searches import OptunaSearch, RandomSearch

    if name == "model":
        return ModelSearch()
    return RandomSearch() if name == "random" else OptunaSearch(name)

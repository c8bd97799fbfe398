"""Searches by name: the values of `--search`.

Another package adds a search by an entry point of the group `steptune.searches`: it has the name of the search, and
loads a callable without arguments that makes one (see `Search` in `history.py`).
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
"""Name of a former search in stored studies. The search `model` has replaced it, and continues from those studies'
results.
"""


def search_names() -> list[str]:
    """Return the names of all installed searches, the default first."""
    return list(dict.fromkeys([*OWN, *sorted(entry.name for entry in entry_points(group=GROUP))]))


def check_search(name: str) -> None:
    """Refuse the name of a search that does not exist.

    Raises:
        ChoiceError: The name is unknown; the message lists the searches that exist.
    """
    if name not in search_names():
        raise ChoiceError(no_such("search", name, search_names()))


def make_search(name: str) -> Search:
    """Make a search by its name; the default one for a study begun with a search that no longer exists.

    Raises:
        ChoiceError: No search has this name, or its entry point does not make one.
    """
    name = OWN[0] if name == STAGES else name
    check_search(name)
    if name in OWN:
        return _own(name)
    (entry, *_) = entry_points(group=GROUP, name=name)
    search = entry.load()()
    missing = [method for method in ("suggest", "update") if not callable(getattr(search, method, None))]
    if missing:
        raise ChoiceError(f"the search {name!r} of {entry.value} has no method {' and no method '.join(missing)}")
    made: Search = search
    return made


def _own(name: str) -> Search:
    """Make one of Steptune's own searches; numerical libraries are loaded only now."""
    from steptune.tuner.search.model_search import ModelSearch
    from steptune.tuner.search.plain_searches import OptunaSearch, RandomSearch

    if name == "model":
        return ModelSearch()
    return RandomSearch() if name == "random" else OptunaSearch(name)

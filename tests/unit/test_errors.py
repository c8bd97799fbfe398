"""Every public error is Steptune's own, ends in Error, and stands in the table of the documentation."""

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from steptune.service import client
from steptune.tuner import errors
from steptune.tuner.errors import SteptuneError

DOCS = Path(__file__).parents[2] / "docs"


def public_errors() -> list[type]:
    """The classes that derive from an exception, in the source of every package."""
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    return [
        getattr(importlib.import_module(f"steptune.{place}"), found.name) for place, found in generate.error_classes()
    ]


def test_every_public_error_is_ours_is_named_so_and_is_in_the_table() -> None:
    found = public_errors()
    assert {errors.StoreError, client.ConflictError} < set(found)
    assert [kind for kind in found if not issubclass(kind, SteptuneError) or not kind.__name__.endswith("Error")] == []
    table = (DOCS / "reference/errors.md").read_text()
    assert [kind for kind in found if f"| `{kind.__name__}` | `{kind.__module__}` |" not in table] == []


@pytest.mark.parametrize("module", [errors, client], ids=lambda module: module.__name__)
def test_earlier_names_are_the_same_errors_and_warn(module: ModuleType) -> None:
    for earlier, name in module.EARLIER_NAMES.items():
        with pytest.warns(FutureWarning, match=f"{earlier} is now {name}"):
            assert getattr(module, earlier) is getattr(module, name)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = module.Nothing

"""Lines of the user's own code among those that an inspection sees."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from steptune.tuner.scripts.agent.places import is_users


@pytest.mark.parametrize(("path", "is_own"), [("torch/optim/lr_scheduler.py", False), ("torch_models/train.py", True)])
def test_torch_is_not_the_users_where_it_was_built_beside_its_sources(
    path: str, is_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There it lies in no folder of installed packages."""
    built = ModuleType("torch")
    built.__file__ = "/src/pytorch/torch/__init__.py"
    monkeypatch.setitem(sys.modules, "torch", built)
    assert is_users(f"/src/pytorch/{path}") is is_own

"""Support for `tuner`, the earlier name of `steptune`, for one release and with a warning.

`tuner.x.y` is the module `steptune.tuner.x.y` itself, not a copy, so that classes of both names are the same.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

OLD = "tuner"


class _OldNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{OLD}.") or not getattr(sys.modules.get(OLD), "is_old_name", False):
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(f"steptune.{spec.name}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state  # the import system has just replaced it


def get_attribute(name: str) -> Any:
    """Look up a public name of `steptune`, for the `__getattr__` of the module `tuner`."""
    if name.startswith("__") and name != "__version__":
        raise AttributeError(f"module {OLD!r} has no attribute {name!r}")
    return getattr(importlib.import_module("steptune"), name)


def hand_on() -> None:
    """Warn about the old name, and redirect imports of `tuner.x` to `steptune.tuner.x`."""
    warnings.warn(
        "the module `tuner` is now `steptune`: write `import steptune`. The old name ends with the next release",
        FutureWarning,
        stacklevel=3,
    )
    if not any(isinstance(finder, _OldNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OldNames())

"""Hooks inside a training script: they find its steps, record some of them, and describe its parts.

It is loaded by its path, under a name of its own, into every Python process of a command. That process may belong to
another environment than Steptune's: nothing here imports Steptune. Before torch is imported there is one import hook.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

FOLDER = "STEPTUNE_SCRIPT_RECORD"
"""Environment variable that arms a process; its value is the folder of the settings and the records."""

ARMED_PACKAGE = "_steptune_agent"
"""Package name under which this package is loaded in an armed process."""

OUTSIDE = "STEPTUNE_SCRIPT_ENABLE"
"""Environment variable by which a verification overrides `steptune.enable` in the script: the path of a recommendation,
or empty for none."""


class TorchFinder:
    """Module finder that installs the hooks as soon as torch has been executed, then removes itself."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find torch as all other finders do, and hook its execution; leave all other modules to the other finders."""
        if name != "torch":
            return None
        import importlib.util

        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _install()
                _enable()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _install() -> None:
    """Install the hooks. If that fails, the script runs without them, and the reason is written to standard error."""
    try:
        from .hooks import install

        install(os.environ[FOLDER])
    except Exception:
        import traceback

        sys.stderr.write(f"steptune cannot observe process {os.getpid()}:\n{traceback.format_exc()}")


def _enable() -> None:
    """Install a recommendation's changes if a verification asks for that; a refusal ends the script."""
    if os.environ.get(OUTSIDE):
        from pathlib import Path

        from .enabled import enable_from

        enable_from(Path(os.environ[OUTSIDE]))


def arm() -> None:
    """Arm this process: install the hooks as soon as torch is imported."""
    sys.meta_path.insert(0, TorchFinder())

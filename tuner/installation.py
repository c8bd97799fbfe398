"""Location of the package `steptune`. In a checkout its subpackages are links to the folders at the top."""

from __future__ import annotations

import sys
from pathlib import Path

# Looked up, not imported: the package itself imports everything that is public.
PACKAGE = Path(next(iter(sys.modules["steptune"].__path__))).absolute()
IMPORT_ROOT = PACKAGE.parent
"""Folder that must be on an interpreter's path to import `steptune`. Links are not resolved: their targets are not in a
package.
"""
_IN_TRIALS = ("tuner", "kernels", "examples")


def trial_folders() -> list[Path]:
    """Return the folders that trials must be able to read: the package, and the linked folders that trials import."""
    behind = [(PACKAGE / name).resolve() for name in _IN_TRIALS if (PACKAGE / name).is_symlink()]
    return [PACKAGE, *behind]

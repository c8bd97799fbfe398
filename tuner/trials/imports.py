"""Modules that a workload imports while it runs. They are recorded once, so that trial servers preload them for all
trials.

What a workload's file imports at its top is known without running it; what its model imports when it is
built (transformers loads its classes on demand, which takes seconds) is seen during its inspection. Only
what was imported before a device was touched is noted: a server that had touched one could not fork.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import msgspec

from steptune.tuner.workloads.reference import parse_reference

MAX_MODULES = 10_000


def imported_since(known: set[str], workload: str) -> list[str]:
    """Return the names of the modules imported after `known` was recorded, in import order, except the workload's own
    modules. Return no names once torch has initialised a device.

    Args:
        known: Earlier names in `sys.modules`.
        workload: Reference of the workload.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return []
    reference = parse_reference(workload)
    own = str(reference.path.parent) if reference.kind == "file" else None
    package = reference.source.partition(".")[0] if reference.kind == "module" else None
    names = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        is_own = (own is not None and file.startswith(own)) or name.partition(".")[0] == package
        if name not in known and not is_own and getattr(module, "__spec__", None) is not None:
            names.append(name)
    return names[:MAX_MODULES]


def save_imports(path: Path, names: list[str]) -> None:
    path.write_bytes(msgspec.json.encode(names))


def load_imports(path: Path) -> list[str]:
    """Load the saved names of modules; empty if the file is missing, or if the workload has overwritten it with
    something else.
    """
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(path.read_bytes(), type=list[str])
    return []

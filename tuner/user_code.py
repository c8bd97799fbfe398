"""Traceback lines in the user's own code, and in the model that the code trains."""

from __future__ import annotations

import importlib.util
import sysconfig
import traceback
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from steptune.tuner.installation import PACKAGE

_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
_PACKAGES = tuple({Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")})


def is_users(path: str) -> bool:
    """Say whether a source file is neither Steptune's nor an installed library's."""
    return not path.startswith("<") and not _is_under(path, (PACKAGE, _STANDARD_LIBRARY, *_PACKAGES))


def is_models(path: str) -> bool:
    """Say whether a source file may define a model or a loss: one of the user, of a zoo workload, or of a library."""
    if path.startswith("<"):
        return False
    if _is_under(path, (PACKAGE,)):
        return _is_under(path, (PACKAGE / "tuner" / "workloads",))
    if _is_under(path, _PACKAGES):
        return not _is_under(path, (_torch(),))
    return not _is_under(path, (_STANDARD_LIBRARY,))


def place_of(error: BaseException) -> str:
    """Return the innermost line of the user's own code, as `/home/me/train.py, line 12`."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return next((_place(frame) for frame in frames if is_users(frame.filename)), "")


def model_line(frames: Iterable[traceback.FrameSummary]) -> str:
    """Return the innermost line of the model or the loss: its place, and its code.

    Args:
        frames: Frames, the outermost first, as `traceback` gives them.
    """
    frame = next((frame for frame in reversed(list(frames)) if is_models(frame.filename)), None)
    if frame is None:
        return ""
    return f"{_place(frame)}: {frame.line}" if frame.line else _place(frame)


def _place(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename}, line {frame.lineno}"


def _is_under(path: str, folders: Iterable[Path]) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in folders)


@cache
def _torch() -> Path:
    specification = importlib.util.find_spec("torch")
    origin = specification.origin if specification is not None else None
    assert origin is not None, "running a model requires torch"
    return Path(origin).parent

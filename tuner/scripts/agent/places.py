"""Lines of the user's own code, and tracebacks without Steptune's frames."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from types import FrameType, TracebackType

_OWN = __file__.rpartition("/")[0]
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def is_users(path: str) -> bool:
    """Say whether a source file belongs neither to Steptune, nor to the standard library or an installed package."""
    torch_init = getattr(sys.modules.get("torch"), "__file__", None) or ""  # torch may be built where its sources are
    torch_folders = (torch_init.removesuffix("__init__.py"),) if torch_init else ()
    return not path.startswith(("<", _OWN, *_LIBRARIES, *torch_folders)) and "/site-packages/" not in path


def frames() -> Iterator[FrameType]:
    """Yield the frames of the calling thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def users_place() -> str:
    """Return the innermost line of the user's code as `/home/me/train.py:12 in main`; empty if there is none."""
    frame = next((frame for frame in frames() if is_users(frame.f_code.co_filename)), None)
    if frame is None:
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def hide_own_frames() -> None:
    """Remove Steptune's frames from the tracebacks that end the script, so that users see only frames of their own
    code.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            trace = _clean(error)
        finally:
            before(kind, error, trace)

    sys.excepthook = hook


def _clean(error: BaseException) -> TracebackType | None:
    seen: set[int] = set()
    waiting: list[BaseException] = [error]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = _without_own(one.__traceback__)
        waiting += [other for other in (one.__cause__, one.__context__) if other is not None]
    return error.__traceback__


def _without_own(trace: TracebackType | None) -> TracebackType | None:
    kept = trace
    while kept is not None and _is_own(kept):
        kept = kept.tb_next
    current = kept
    while current is not None:
        following = current.tb_next
        while following is not None and _is_own(following):
            following = following.tb_next
        current.tb_next = following
        current = following
    return kept


def _is_own(trace: TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename.startswith(_OWN)

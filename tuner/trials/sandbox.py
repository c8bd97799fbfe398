"""Sandbox between a trial server and the machine, chosen by the code that creates the runner."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from steptune.tuner.trials.memory_use import Taker
from steptune.tuner.trials.watch import Quota


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """Command that wraps every trial server, and the properties of the sandbox.

    Attributes:
        level: Name of the isolation level, stored with each trial.
        prefix: Command that the server's command is appended to. It must become the server itself, or end with its own
            parent and end the server.
        environment: Environment of the server; None for the parent's whole environment.
        temporary: Directory for temporary files inside the sandbox, where the host's is not visible.
        own_pids: Whether the server lives in a process namespace of its own, and does not see its parent.
        headers: Directory of torch.compile's precompiled headers that are not shared with others.
        uid: User of the study's servers alone; None for the parent's.
        as_user: Command prefix that runs a command as that user, who alone may read all of its files and processes.
        tidy: Function that removes files that trials have left outside of the servers' temporary directories, which it
            is called with; called when no trial runs.
        quota: Limits of all trials together; None for no limits.
        fellows: Other studies of the same submitter that run on this machine now, and share the quota.
    """

    level: str = "none"
    prefix: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None
    temporary: str | None = None
    own_pids: bool = False
    uid: int | None = None
    headers: Path | None = None
    as_user: tuple[str, ...] = ()
    tidy: Callable[[Collection[Path]], None] = lambda kept: None
    quota: Quota | None = None
    fellows: Callable[[], Sequence[Taker]] = tuple

    @property
    def alone(self) -> bool:
        """True if the server can send signals only to processes that it started."""
        return self.own_pids or self.uid is not None

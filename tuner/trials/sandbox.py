"""Sandbox between a trial server and the machine. Whoever makes the runner chooses it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from steptune.tuner.trials.memory_use import Taker
from steptune.tuner.trials.watch import Quota


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """A command that wraps every trial server, and what holds inside of it.

    Attributes:
        level: Name of the isolation level, stored with each trial.
        prefix: The command. It must end in the server itself, or die with its own parent and take the server along.
        environment: All that the server inherits; None is everything that the parent has.
        temporary: Directory for temporary files inside, where the host's is not visible.
        own_pids: The server lives in a process namespace of its own, and does not see its parent.
        headers: Where torch.compile's precompiled headers are kept, which others do not share.
        uid: User of the study's servers and of nobody else; None is the parent's.
        as_user: The command that runs another one as that user, who alone may look into all that is theirs.
        tidy: Called when no trial runs, with the temporary directories of the servers: removes what trials have left
            elsewhere.
        quota: What the trials together may take from the machine; None is not watched.
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
        """Say whether all that the server may send a signal to was started by it."""
        return self.own_pids or self.uid is not None

"""No isolation: trials have all rights of the user who starts them."""

from __future__ import annotations

import contextlib

from steptune.service.isolation.base import Level, SandboxRequest
from steptune.tuner.trials.sandbox import Sandbox


class NoIsolation(Level):
    """No isolation, for users who run their own code on their own machine."""

    name = "none"
    limits = "only deadlines and the memory of each process"

    def sandbox(self, request: SandboxRequest) -> contextlib.AbstractContextManager[Sandbox]:
        return contextlib.nullcontext(Sandbox())

    def separates(self) -> bool:
        return False

    def missing(self) -> str | None:
        return None

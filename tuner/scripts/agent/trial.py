"""A process of the script as a trial: a candidate's changes, guarded steps, timed windows, and an immediate end."""

from __future__ import annotations

import math
import os
import resource
import sys
from time import perf_counter_ns
from typing import Any

import torch

from .changes import Changes
from .files import SharedFolder
from .guard_watch import GuardWatch
from .ranks import rank_and_size
from .session import Session, SessionHooks, never_raises
from .trial_window import TrialWindow
from .window import Window


def begin_session(folder: str, hooks: SessionHooks) -> Session:
    """Begin the session of this process: a trial's, if the settings describe one."""
    trial = SharedFolder(folder).trial()
    if trial is None:
        return Session(folder, hooks)
    seed_generators(trial["seed"])
    return TrialSession(folder, hooks, trial)


class TrialSession(Session):
    """Session of a trial's process.

    Args:
        trial: pattern, loader, loader_place, models, changes, seed, measure, guard (None without), only_guard,
            num_losses (number of losses to keep, one for each backward pass).
    """

    def __init__(self, folder: str, hooks: SessionHooks, trial: dict[str, Any]) -> None:
        self._trial = trial
        self._step_loader_ns: list[int] = []
        self._losses: list[torch.Tensor] = []
        super().__init__(folder, hooks)
        pattern = tuple(trial["pattern"]) if trial["pattern"] is not None else None
        self.finder.pattern = pattern
        self._changes = Changes(
            trial["changes"], trial["loader"], trial["loader_place"], pattern or (), tuple(trial["models"])
        )
        self._loader_ns = 0
        self._training_loader: Any = None
        self._first_step_ns = 0
        self._guard: GuardWatch | None = None
        if trial["guard"] is not None:
            rank = int(os.environ.get("RANK", "0"))
            self._guard = GuardWatch(trial["guard"], self._folder.guard(rank), pattern or ())

    def go_on_from(self, before: Session) -> None:
        """Take over the observations that an earlier session made before this process was forked, and apply the
        changes.
        """
        self._known_loaders, self.loaders = before._known_loaders, before.loaders
        self._loader_of, self._last_loader = before._loader_of, before._last_loader
        self.optimizers, self.optimizer_kinds = before.optimizers, before.optimizer_kinds
        self.notes, self.num_calls_without_grad = before.notes, before.num_calls_without_grad
        for optimizer in list(self.optimizers):
            self._change_optimizer(optimizer)

    def _make_window(self) -> Window:
        settings = {**self._trial["measure"], "guarded": self._trial["guard"] is not None}
        return TrialWindow(
            self._folder, self._step_times_ns, self._remaining, settings, self._step_loader_ns, self._blocks
        )

    @property
    def awaits_modules(self) -> bool:  # type: ignore[override]
        return self._changes.awaits_modules

    @never_raises
    def made_optimizer(self, optimizer: Any, place: str) -> None:
        super().made_optimizer(optimizer, place)
        self._change_optimizer(optimizer)

    def _change_optimizer(self, optimizer: Any) -> None:
        number = self.optimizers[optimizer].number
        self._changes.optimizer(optimizer, number)
        if self._guard is not None:
            self._guard.made_optimizer(optimizer, number)

    @never_raises
    def loader_begins(self, loader: Any) -> None:
        self._changes.begin()
        self._loader_ns -= perf_counter_ns()
        made = self._known_loaders.get(loader)
        number = made.number if made is not None else len(self.loaders)
        self._changes.loader(loader, number, made.place if made is not None else "")
        if number == self._trial["loader"]:
            self._training_loader = loader

    @never_raises
    def loader_began(self, loader: Any, iterator: Any) -> None:
        self._loader_ns += perf_counter_ns()
        super().loader_began(loader, iterator)

    def drew(self, iterator: Any, index: Any) -> None:
        if self._guard is not None and not self._guard.over:
            iterator.__dict__.setdefault("steptune_indices", []).append(index)

    def given(self, iterator: Any, batch: Any, began_ns: int) -> Any:
        self._loader_ns += perf_counter_ns() - began_ns
        guard, made = self._guard, self._loader_of.get(iterator)
        if guard is None or guard.over or made is None or made.number != self._trial["loader"]:
            return batch
        guard.drew(getattr(iterator, "steptune_indices", []))
        return guard.fed(batch)

    @never_raises
    def loss(self, tensors: Any) -> None:
        self._changes.begin()
        if len(self._losses) < self._trial["num_losses"]:
            first = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors))
            self._losses.append(first.detach().float().mean())
        if self._guard is not None and not self._guard.over:
            self._guard.loss(tensors)

    @never_raises
    def called(self, module: torch.nn.Module) -> None:
        is_new = module not in self.called_modules
        super().called(module)
        if not torch.is_grad_enabled() or module not in self.called_modules:
            return
        self._changes.begin()
        if self._guard is not None and not self._guard.over:
            self._guard.called(module)
        if is_new:
            self._changes.module(module)

    def _step_ended(self) -> None:
        if not self._first_step_ns:
            self._first_step_ns = perf_counter_ns()
        guard = self._guard
        if guard is not None and self._is_guarding() and not self.window.is_over():
            self._guard_step(guard)
            self._num_backwards = self._num_batches = 0
            self._boundary_ns = 0
            self._loader_ns = 0
            if self._is_guarding() or not self._trial["only_guard"]:
                return
            self.window.end()
        super()._step_ended()
        self._loader_ns = 0

    def _is_guarding(self) -> bool:
        return self._guard is not None and not self._guard.over

    @never_raises
    def _guard_step(self, guard: GuardWatch) -> None:
        guard.step_ended(self._training_loader)

    def _count_step(self, now_ns: int) -> None:
        if self._boundary_ns:
            self._step_loader_ns.append(self._loader_ns)
        super()._count_step(now_ns)

    def _write(self) -> None:
        window = self.window
        assert isinstance(window, TrialWindow)
        self._folder.write_trial(
            rank_and_size()[0],
            {
                "windows": window.windows,
                "first_step_ns": self._first_step_ns,
                "num_warm_up": window.num_warm_up,
                "warm_up_ns": window.warm_up_ns,
                "num_interrupted": window.num_interrupted,
                "applied": self._changes.applied,
                "guarded": self._guard is not None and self._guard.over,
                "memory": _memory(),
                "losses": [loss if math.isfinite(loss) else None for loss in map(torch.Tensor.item, self._losses)],
                "missing": _not_enabled(),
            },
        )
        super()._write()


def _not_enabled() -> list[str]:
    """Return the changes that `steptune.enable` should have made but did not, whether the script or a verification
    requested them.
    """
    modules = [sys.modules.get(f"{package}.enabled") for package in (__package__, "steptune.tuner.scripts.agent")]
    return [name for module in modules if module is not None for name in module.missing()]


def _memory() -> dict[str, int]:
    own, children = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    found = {"resident_bytes": 1024 * (own + children)}
    if torch.cuda.is_initialized():
        found["allocated_bytes"] = torch.cuda.max_memory_allocated()
        found["reserved_bytes"] = torch.cuda.max_memory_reserved()
    return found


def seed_generators(seed: int) -> None:
    """Seed the random generators that a script may draw from; the script's own seeding comes later."""
    import random

    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)

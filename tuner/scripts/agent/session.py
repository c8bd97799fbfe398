"""Session of one process of the script, from its first training event to its record.

The record is written when the window is over, or at the end of the process where that comes first. After a window the
process ends at once, unless the script is to run on: an exception would pass through the script's own handlers, which
may write checkpoints.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
import traceback
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, ParamSpec, Protocol
from weakref import WeakKeyDictionary

import torch

from .copies import Copies
from .describe import Description, loader_values, process_description
from .files import SharedFolder
from .observed_loop import Made, ObservedLoop
from .places import users_place
from .ranks import has_group, rank_and_size
from .tensor_blocks import TensorBlock, tensor_blocks
from .window import LEAST_STEPS, MOST_STEPS, Window

P = ParamSpec("P")
NUM_CALLED_STEPS = 3
"""Number of first steps in which calls of modules are counted."""
MOST_PLACES = 64


def never_raises(method: Callable[P, None]) -> Callable[P, None]:
    """Wrap a method of a session so that its failure ends the inspection, not the script."""

    @functools.wraps(method)
    def guarded(*arguments: P.args, **options: P.kwargs) -> None:
        try:
            method(*arguments, **options)
        except Exception:
            session: Any = arguments[0]
            session.window.refuse(f"the inspection itself failed:\n{traceback.format_exc()}")

    return guarded


class SessionHooks(Protocol):
    """The hooks of a process, as its session sees them.

    Attributes:
        session: Session that they report to.
        finished: Called once the record is written, if the process does not end then.
    """

    session: Session
    finished: Callable[[], None]

    def forget_forward(self) -> None:
        """Remove the wrappers that only describe the forward pass."""

    def remove(self) -> None:
        """Remove all hooks that can be removed."""


class Session(ObservedLoop):
    """Session of one process: it receives the events of the script's loaders, modules and optimizers, and records its
    steps.
    """

    def __init__(self, folder: str, hooks: SessionHooks) -> None:
        super().__init__()
        self._folder = SharedFolder(folder)
        self._hooks = hooks
        self._begin_ns = perf_counter_ns()
        self._known_loaders: WeakKeyDictionary[Any, Made] = WeakKeyDictionary()
        self._description: dict[str, Any] = {}
        self._loader_of: WeakKeyDictionary[Any, Made] = WeakKeyDictionary()
        self._last_loader: Made | None = None
        self._places: list[dict[str, Any]] = []
        self._step_times_ns: list[int] = []
        self._num_backwards = self._num_batches = 0
        self._boundary_ns = 0
        self._thread: int | None = None
        self.window = self._make_window()
        self._is_registered = self._is_written = False

    def _make_window(self) -> Window:
        return Window(self._folder, self._step_times_ns, self._remaining, self._blocks)

    def _blocks(self) -> list[TensorBlock]:
        return tensor_blocks(list(self.called_modules), list(self.optimizers))

    # --- what a trial does at the same marks (`trial.py`) ---------------------------------------

    awaits_modules = False
    """True while at least one module to be changed has not been called yet."""

    copies: Copies | None = None

    def number_of(self, loader: Any) -> int:
        """Return the number of a loader; for a new one, the number that it will have."""
        made = self._known_loaders.get(loader)
        return made.number if made is not None else len(self.loaders)

    def begins_training(self, module: torch.nn.Module) -> bool:
        """Say whether this call of an outermost module is the first one that trains."""
        return not self.called_modules and torch.is_grad_enabled() and next(module.parameters(), None) is not None

    def loss(self, tensors: Any) -> None:
        """Note the tensors from which a backward pass begins."""

    @never_raises
    def loader_begins(self, loader: Any) -> None:
        """Note that an epoch is about to begin."""
        self.samples.expect(loader.dataset, self.number_of(loader))

    def drew(self, iterator: Any, index: Any) -> None:
        """Note the indices that a sampler gave."""

    def given(self, iterator: Any, batch: Any, began_ns: int) -> Any:
        """Return the batch that the training loop receives."""
        return batch

    # --- marks ----------------------------------------------------------------------------------

    @never_raises
    def made_loader(self, loader: Any, place: str) -> None:
        """Register a new loader."""
        values = loader_values(loader)
        made = self._known_loaders.get(loader)
        if made is None:
            made = self._known_loaders[loader] = Made(len(self.loaders), place)
            self.loaders.append(made)
        made.values = values
        self._register_end()

    @never_raises
    def made_optimizer(self, optimizer: Any, place: str) -> None:
        """Register a new optimizer."""
        if optimizer not in self.optimizers:
            self.optimizers[optimizer] = Made(len(self.optimizer_kinds), place)
            self.optimizer_kinds.append(type(optimizer).__name__)
        self._register_end()

    @never_raises
    def loader_began(self, loader: Any, iterator: Any) -> None:
        """Note the beginning of an epoch."""
        self.made_loader(loader, "")
        made = self._loader_of[iterator] = self._known_loaders[loader]
        made.num_batches = 0
        if not self._step_times_ns:
            self._note_place("loader", made.number)

    @never_raises
    def batch(self, iterator: Any) -> None:
        """Note that a loader gave a batch."""
        loader = self._loader_of.get(iterator)
        if loader is not None:
            self._last_loader = loader
            loader.num_batches += 1
            self._num_batches += 1
            self.finder.batch()

    @never_raises
    def called(self, module: torch.nn.Module) -> None:
        """Note the call of an outermost module."""
        if not torch.is_grad_enabled():
            self.num_calls_without_grad += 1
        elif module in self.called_modules:
            self.called_modules[module] += 1
        elif next(module.parameters(), None) is not None:
            if not self.called_modules:
                self._note_place("forward", 0)
            self.called_modules[module] = 1
            self.module_places[module] = users_place()

    @never_raises
    def backward_ended(self, *, in_closure: bool) -> None:
        """Note a backward pass, which may be part of an optimizer's step."""
        self._register_end()
        if in_closure:
            self.note("closures", "backward")
        self._num_backwards += 1
        if self._last_loader is not None:
            self._last_loader.num_backwards += 1
        if self.finder.backward_ended(len(self.optimizers)):
            self._step_ended()

    @never_raises
    def optimizer_stepped(self, optimizer: Any) -> None:
        """Note a step of an optimizer."""
        made = self.optimizers.get(optimizer)
        if made is None:
            self.made_optimizer(optimizer, "")
            made = self.optimizers[optimizer]
        if self.finder.optimizer_stepped(made.number, self._existing()):
            self._step_ended()

    def _existing(self) -> list[int]:
        """Return the numbers of the existing optimizers, which are needed to find the period of the optimizer steps;
        empty once the period is known.
        """
        return [] if self.finder.pattern else [made.number for made in self.optimizers.values()]

    def _note_place(self, what: str, number: int) -> None:
        """Note a place where training may begin: a trial could be forked there."""
        if len(self._places) < MOST_PLACES:
            self._places.append(
                {
                    "what": what,
                    "number": number,
                    "after_ns": perf_counter_ns() - self._begin_ns,
                    "cuda": torch.cuda.is_initialized(),
                    "process_group": has_group(),
                    "num_threads": threading.active_count(),
                }
            )

    def _remaining(self) -> tuple[int, int] | None:
        """Return the number of steps left in the epoch, and the number of steps in a whole epoch; None if unknown."""
        loader = self._last_loader
        length = loader.values["num_batches"] if loader is not None else None
        if loader is None or length is None:
            return None
        (_, batches), _ = self.kinds.most_common(1)[0]
        each = max(1, batches)
        return (length - loader.num_batches) // each, length // each

    def _step_ended(self) -> None:
        now_ns = perf_counter_ns()
        window = self.window
        if not window.is_over():
            self._count_step(now_ns)
        if window.is_over() and not self._is_written:
            self._finish()
        self._boundary_ns = perf_counter_ns()

    def _count_step(self, now_ns: int) -> None:
        thread = threading.get_ident()
        if self._thread is None:
            self._thread = thread
        elif thread != self._thread:
            self.window.refuse("several threads of one process train at the same time")
            return
        if self._boundary_ns:
            self._step_times_ns.append(now_ns - self._boundary_ns)
            self.kinds[self._num_backwards, self._num_batches] += 1
        self._num_backwards = self._num_batches = 0
        if len(self._step_times_ns) == NUM_CALLED_STEPS:
            self._hooks.forget_forward()
            self._description = Description(self).as_dict()
        self.window.step_ended()

    def _finish(self) -> None:
        self._hooks.remove()
        self._write()
        if self._folder.is_full():
            self._hooks.finished()
            return
        if self.window.complete:
            self.window.wait_for_ranks()
        elif rank_and_size() != (0, 1):
            if rank_and_size()[0] == 0:
                self._folder.all_recorded()  # without rank 0 nobody is recorded
            return  # the others need this one until the supervisor ends them all
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # closed by the script
                stream.flush()
        os._exit(0)

    def _register_end(self) -> None:
        """Register a function that writes the record when the process ends."""
        if self._is_registered:
            return
        self._is_registered = True
        import multiprocessing
        from multiprocessing.util import Finalize

        if multiprocessing.parent_process() is not None:
            Finalize(None, self._ended, exitpriority=0)  # such a process runs no atexit
        else:
            atexit.register(self._ended)

    def _ended(self) -> None:
        if not self._is_written and self._hooks.session is self:
            self._write()
            self._hooks.finished()

    def _last_description(self) -> dict[str, Any]:
        """Return the description of the training; models and optimizers that are gone at the end are described as in
        the first steps.
        """
        last = Description(self).as_dict()
        gone = [key for key in ("models", "optimizers", "trainer") if not last[key]]
        return {**last, **{key: self._description[key] for key in gone if key in self._description}}

    def _write(self) -> None:
        self._is_written = True
        rank, num_ranks = rank_and_size()
        window = self.window
        self._folder.write_record(
            {
                **process_description(),
                "rank": rank,
                "num_ranks": num_ranks,
                "complete": window.complete,
                "refusal": window.refusal,
                "num_steps": window.num_steps,
                "num_steps_needed": (LEAST_STEPS, MOST_STEPS),
                "num_backwards": self.finder.num_backwards,
                "num_optimizer_steps": self.finder.num_optimizer_steps,
                "step_time_ns": window.step_time_ns,
                "step_time_before_ns": window.before_ns,
                "step_time_after_ns": window.after_ns,
                "step_times_ns": self._step_times_ns,
                "recorded_step_ns": window.recorded_step_ns,
                "places": self._places,
                "copies": self.copies.places if self.copies is not None else [],
                **self._last_description(),
            }
        )

"""Hooks around torch's functions, installed once, right after torch is imported.

Each wrapper passes everything through, and tells the session of its process what happened. Under `torch.compile` it
tells nothing, so that it leaves no trace in a compiled graph. The wrapper of all modules stays for the first steps,
and at most until a compiled module is called: its graph would hold the wrapper.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import threading
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter

from .copies import Copies
from .files import SharedFolder
from .places import hide_own_frames, is_users, users_place
from .session import Session
from .trial import TrialSession, begin_session, seed_generators

_is_compiling = torch.compiler.is_compiling


class Hooks:
    """Wrappers in a process, and the session that they report to; each forked child has a new session.

    Attributes:
        finished: Called once the record is written, if the process does not end then.
    """

    _copies: Copies | None = None
    """Frozen copies of this process, which only an inspection makes."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.finished: Callable[[], None] = lambda: None
        self.session = begin_session(folder, self)
        self._depth = threading.local()
        self._restore: dict[str, Callable[[], None]] = {}

    def install(self) -> None:
        self._put(torch.autograd, "backward", self._backward)
        self._put(DataLoader, "__init__", self._made_loader)
        self._put(DataLoader, "__iter__", self._began_loader)
        self._put(_BaseDataLoaderIter, "__next__", self._next)
        self._put(_BaseDataLoaderIter, "_next_index", self._next_index)
        for fetcher in (_MapDatasetFetcher, _IterableDatasetFetcher):
            self._put(fetcher, "fetch", self.session.samples.fetching)
        self._put(torch.optim.Optimizer, "__init__", self._made_optimizer)
        self._put(torch.amp.GradScaler, "__init__", self._made_scaler)
        self._put(torch.autocast, "__enter__", self._autocast)
        self._put(torch.autocast, "__call__", self._decorated)
        for module in (torch.nn.utils, torch.nn.utils.clip_grad):
            self._put(module, "clip_grad_norm_", self._clip)
        self._put(torch.optim.lr_scheduler.LRScheduler, "__init__", self._made_scheduler)
        self._put(torch, "compile", self._compile)
        self._put(torch, "save", self._save)
        self._put(torch.nn.Module, "__call__", self._module)
        os.register_at_fork(after_in_child=self._in_child)
        hide_own_frames()
        seed = SharedFolder(self.folder).frozen_seed()
        if seed is not None:
            seed_generators(seed)
            self._copies = self.session.copies = Copies(self.folder)
            self._put_lazy_init()

    def remove(self) -> None:
        """Remove all hooks that can be removed; the script continues as it would without Steptune."""
        for restore in self._restore.values():
            restore()
        self._restore.clear()

    def adopt(self) -> None:
        """Wrap the steps of optimizers that already exist."""
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.optim.Optimizer):
                self.wrap_step(type(thing))

    def forget_forward(self) -> None:
        """Remove the wrappers that only describe the forward pass."""
        for name in ("Module.__call__", "autocast.__enter__", "autocast.__call__"):
            restore = self._restore.pop(name, None)
            if restore is not None:
                restore()

    def _put(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        wrapper = functools.wraps(original)(make(original))
        setattr(owner, name, wrapper)
        key = f"{getattr(owner, '__name__', '')}.{name}"

        def restore() -> None:
            if getattr(owner, name) is wrapper:  # else somebody has put another one around it
                setattr(owner, name, original)

        self._restore[key] = restore

    def _put_lazy_init(self) -> None:
        """Replace the function that initialises CUDA wherever torch has bound its name, because a process cannot be
        forked once it uses CUDA.
        """
        original = torch.cuda._lazy_init
        for module in [module for name, module in sys.modules.items() if name.startswith("torch.")]:
            if vars(module).get("_lazy_init") is original:
                self._put(module, "_lazy_init", self._lazy_init)

    def _freeze(self, what: str, number: int = 0) -> None:
        """Make a frozen copy of this process if one is wanted. A trial that starts from the copy continues here, with
        its own session.
        """
        copies, before, depth = self._copies, self.session, dict(vars(self._depth))
        if copies is None:
            return
        inside = "training begins inside an optimizer's step" if depth.get("step") else ""
        request = copies.freeze(what, number, is_last=what != "loader", against=inside)
        if request is not None:
            self.folder = request["folder"]
            session = self.session = TrialSession(self.folder, self, request["trial"])
            session.go_on_from(before)
            vars(self._depth).update(depth)

    def _in_child(self) -> None:
        self._copies = None
        self.session = Session(self.folder, self)  # a trial is of the process that was started, not of its workers
        self._depth = threading.local()

    def _backward(self, original: Any) -> Any:
        def backward(*arguments: Any, **options: Any) -> Any:
            depth = self._depth
            if _is_compiling() or getattr(depth, "backward", False):
                return original(*arguments, **options)
            depth.backward = True
            if self._copies is not None:
                self._copies.end()
            self.session.loss(arguments[0] if arguments else options.get("tensors"))
            try:
                result = original(*arguments, **options)
            finally:
                depth.backward = False
            self.session.backward_ended(in_closure=getattr(depth, "step", False))
            return result

        return backward

    def _lazy_init(self, original: Any) -> Any:
        def _lazy_init() -> None:
            if self._copies is not None and not torch.cuda.is_initialized():
                self._freeze("cuda")
            original()

        return _lazy_init

    def _made_loader(self, original: Any) -> Any:
        def __init__(loader: Any, *arguments: Any, **options: Any) -> None:
            original(loader, *arguments, **options)
            self.session.made_loader(loader, users_place())

        return __init__

    def _began_loader(self, original: Any) -> Any:
        def __iter__(loader: Any) -> Any:
            if self._copies is not None:
                self._freeze("loader", self.session.number_of(loader))
            self.session.loader_begins(loader)
            iterator = original(loader)
            self.session.loader_began(loader, iterator)
            return iterator

        return __iter__

    def _next(self, original: Any) -> Any:
        def __next__(iterator: Any) -> Any:
            began_ns = perf_counter_ns()
            batch = original(iterator)
            self.session.batch(iterator)
            return self.session.given(iterator, batch, began_ns)

        return __next__

    def _next_index(self, original: Any) -> Any:
        def _next_index(iterator: Any) -> Any:
            index = original(iterator)
            self.session.drew(iterator, index)
            return index

        return _next_index

    def _made_optimizer(self, original: Any) -> Any:
        def __init__(optimizer: Any, *arguments: Any, **options: Any) -> None:
            original(optimizer, *arguments, **options)
            self.session.made_optimizer(optimizer, users_place())
            self.wrap_step(type(optimizer))

        return __init__

    def wrap_step(self, kind: Any) -> None:
        """Wrap the method `step` of an optimizer class so that the wrapper encloses all of the optimizer's hooks and
        the profiler's record of the step, because a recording window may end in the wrapper.
        """
        if hasattr(kind.step, "steptune_wrapped"):
            return

        def wrapper(original: Any) -> Any:
            def step(optimizer: Any, *arguments: Any, **options: Any) -> Any:
                depth = self._depth
                if _is_compiling() or getattr(depth, "step", False):
                    return original(optimizer, *arguments, **options)
                depth.step = True
                try:
                    result = original(optimizer, *arguments, **options)
                finally:
                    depth.step = False
                self.session.optimizer_stepped(optimizer)
                return result

            return step

        self._put(kind, "step", wrapper)
        kind.step.steptune_wrapped = True

    def _made_scaler(self, original: Any) -> Any:
        def __init__(scaler: Any, *arguments: Any, **options: Any) -> None:
            original(scaler, *arguments, **options)
            if scaler.is_enabled():
                self.session.note("scalers", type(scaler).__name__)

        return __init__

    def _autocast(self, original: Any) -> Any:
        def __enter__(autocast: Any) -> Any:
            result = original(autocast)
            if not _is_compiling():
                self._note_autocast(autocast)
            return result

        return __enter__

    def _decorated(self, original: Any) -> Any:
        """Wrap autocast as a decorator: a forward pass that is compiled later enters it in compiled code, unseen."""

        def __call__(autocast: Any, function: Any) -> Any:
            if getattr(function, "__name__", "") == "forward" and not _is_compiling():
                self._note_autocast(autocast)
            return original(autocast, function)

        return __call__

    def _note_autocast(self, autocast: Any) -> None:
        if autocast._enabled:
            self.session.note("autocast", f"{autocast.device} {str(autocast.fast_dtype).removeprefix('torch.')}")

    def _clip(self, original: Any) -> Any:
        def clip_grad_norm_(parameters: Any, max_norm: Any, *arguments: Any, **options: Any) -> Any:
            if not _is_compiling():
                self.session.note("clipping", f"norm at most {max_norm:g}")
            return original(parameters, max_norm, *arguments, **options)

        return clip_grad_norm_

    def _made_scheduler(self, original: Any) -> Any:
        def __init__(scheduler: Any, *arguments: Any, **options: Any) -> None:
            original(scheduler, *arguments, **options)
            self.session.note("schedulers", type(scheduler).__name__)

        return __init__

    def _compile(self, original: Any) -> Any:
        def compile(model: Any = None, *arguments: Any, **options: Any) -> Any:  # torch's own name
            of_module = isinstance(model, torch.nn.Module) or isinstance(
                getattr(model, "__self__", None), torch.nn.Module
            )
            if model is not None and (of_module or is_users(_file_of(model))):
                self.session.note("compiled", _compile_name(model, options))
                if not of_module:
                    self.forget_forward()  # the modules that it calls would be compiled with our wrapper
            return original(model, *arguments, **options)

        return compile

    def _save(self, original: Any) -> Any:
        def save(*arguments: Any, **options: Any) -> Any:
            self.session.note("saves", "torch.save")
            return original(*arguments, **options)

        return save

    def _module(self, original: Any) -> Any:
        def __call__(module: Any, *arguments: Any, **options: Any) -> Any:
            depth = self._depth
            if _is_compiling() or getattr(depth, "module", False) or getattr(depth, "backward", False):
                return original(module, *arguments, **options)
            if self._copies is not None and self.session.begins_training(module):
                self._freeze("forward")
                depth = self._depth
            depth.module = True
            try:
                self.session.called(module)
                if _is_compiled(module) and not self.session.awaits_modules:
                    self.forget_forward()
                return original(module, *arguments, **options)
            finally:
                depth.module = False

        return __call__


def _is_compiled(module: Any) -> bool:
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def _file_of(function: Any) -> str:
    code = getattr(function, "__code__", None)
    return code.co_filename if code is not None else "<unknown>"


def _compile_name(model: Any, options: dict[str, Any]) -> str:
    owner = model if isinstance(model, torch.nn.Module) else getattr(model, "__self__", None)
    name = type(owner).__name__ if owner is not None else getattr(model, "__name__", "a function")
    said = ", ".join(f"{key}={value!r}" for key, value in options.items() if key in ("mode", "backend", "dynamic"))
    return f"{name} ({said})" if said else name


_installed: list[Hooks] = []


def installed() -> bool:
    """Say whether this process has hooks."""
    return bool(_installed)


def install(folder: str) -> Hooks:
    """Return the hooks of this process, which are installed once."""
    if not _installed:
        hooks = Hooks(folder)
        hooks.install()
        _installed.append(hooks)
    return _installed[0]

"""Changes of a recommendation in an ordinary run of a script: made as in its trials, but without timing or guard.

The same `Changes` are made at the same events of the training in the same order. Nothing is timed, guarded or ended.
The wrapper of all modules goes as soon as every module was changed.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader

from . import ARMED_PACKAGE
from .changes import Changes
from .hooks import Hooks
from .ranks import rank_and_size
from .sources import counted_lines, source_digest


def enable_from(path: Path, error: type[Exception] = RuntimeError) -> None:
    """Install the changes of a recommendation that was exported as JSON.

    Args:
        error: Exception to raise if the recommendation does not belong to this script and machine; also raised later,
            from the script's own lines, for conditions that show only there.
    """
    if _installed:
        return
    record = _read(path, error)
    found = record["in_script"]
    sources = _Sources(found["script"])
    measured = _Measured(record, error)
    measured.check_start(sources)
    hooks = EnabledHooks(Enabled(found, sources.place("loader"), measured))
    hooks.install()
    _installed.append(hooks)
    if is_first():
        sys.stderr.write(f"steptune: {'; '.join(found['words']) or 'no change'} (from {path})\n")


def _read(path: Path, error: type[Exception]) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as reason:
        raise error(f"{path} is not JSON ({reason}): export the recommendation again") from None
    if not isinstance(record, dict) or not record.get("in_script"):
        raise error(f"{path} is not a recommendation for a training script: create one with `steptune tune -- COMMAND`")
    return record


def is_first() -> bool:
    """Say whether this process reports for the whole script."""
    is_main = multiprocessing.current_process().name == "MainProcess"  # a spawned one has a parent only later
    return is_main and multiprocessing.parent_process() is None and os.environ.get("RANK", "0") == "0"


class _Sources:
    """Current files of the script that was tuned."""

    def __init__(self, script: dict[str, Any]) -> None:
        self._script = script
        main = getattr(sys.modules["__main__"], "__file__", None)
        folders = [Path.cwd(), *(Path(main).resolve().parents if main else ())]
        names = script["files"]
        self._folder = next((f for f in folders if all((f / name).is_file() for name in names)), folders[0])

    def changed(self) -> str:
        """Return the name of the first file of the script that has changed since it was tuned; empty if none has."""
        for name, digest in self._script["files"].items():
            path = self._folder / name
            if not path.is_file() or source_digest(self._text(name)) != digest:
                return str(name)
        return ""

    def place(self, name: str) -> str:
        """Return the file, line and function where the script now makes an object, in the format of `users_place` but
        without folders; empty if unknown.
        """
        if name not in self._script["lines"]:
            return ""
        file, position = self._script["lines"][name]
        function = self._script["places"][name].partition(" in ")[2]
        return f"{Path(file).name}:{counted_lines(self._text(file))[position]} in {function}"

    def _text(self, name: str) -> str:
        return (self._folder / name).read_text(encoding="utf-8", errors="replace")


class _Measured:
    """Conditions under which the recommendation was measured."""

    def __init__(self, record: dict[str, Any], error: type[Exception]) -> None:
        self._record = record
        self._script = record["in_script"]["script"]
        self._error = error
        self.is_device_checked = False

    def check_start(self, sources: _Sources) -> None:
        """Refuse a run whose conditions differ from the measured ones, as far as they are known before the script
        begins.
        """
        changed = sources.changed()
        if changed:
            self._refuse(f"{changed} has changed since it was tuned")
        torch_then, torch_now = self._record["hardware"]["versions"].get("torch"), str(torch.__version__)
        if torch_then != torch_now:
            self._refuse(f"it was measured with torch {torch_then}, but this process has torch {torch_now}")
        for name, value in self._record["environment_variables"].items():
            if os.environ.get(name) != value:
                self._refuse(
                    (f"it was measured with {name}={value}: set this variable before the script starts"), remedy=""
                )
        if os.environ.get("WORLD_SIZE"):  # else there may be a launcher that sets it
            self._check_size(int(os.environ["WORLD_SIZE"]))

    def check_device(self, device: torch.device) -> None:
        """Refuse a device or a number of ranks other than the measured ones, once the script uses a device."""
        if self.is_device_checked:
            return
        self.is_device_checked = True
        self._check_size(rank_and_size()[1])
        then = self._script["device"], self._script["device_name"]
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} CPU cores"
        if then != (device.type, name):
            self._refuse(f"it was measured on {then[0]} ({then[1]}), but the script trains on {device.type} ({name})")

    def _check_size(self, size: int) -> None:
        if size != self._record["num_ranks"]:
            self._refuse(f"it was measured with {self._record['num_ranks']} ranks, but this job has {size}")

    def _refuse(
        self, reason: str, remedy: str = (". Tune the script again, or remove the line steptune.enable()")
    ) -> None:
        raise self._error(f"the recommendation of study {self._record['study_id']} is not applied: {reason}{remedy}")


class Enabled:
    """Session of a process whose script enables a recommendation: it makes the changes at the events of its training.

    Args:
        found: The changes, and the script that they are for.
        place: Line at which the training loader is made, without folders.
        measured: Conditions of the measurement, checked at the first mark that shows a device.
    """

    def __init__(self, found: dict[str, Any], place: str, measured: _Measured) -> None:
        script = found["script"]
        self._wanted = found["changes"]
        numbers, models = tuple(script["optimizer_numbers"]), tuple(script["models"])
        self._changes = Changes(self._wanted, script["loader_number"], place, numbers, models)
        self._measured = measured
        self._loaders: WeakKeyDictionary[Any, tuple[int, str]] = WeakKeyDictionary()
        self._num_loaders = self._num_optimizers = 0
        self._called: WeakKeyDictionary[torch.nn.Module, bool] = WeakKeyDictionary()
        self.over: Callable[[], None] = lambda: None
        """Callback for the moment when no module is left to change."""
        atexit.register(self._tell_missing)

    @property
    def awaits_modules(self) -> bool:
        """Say whether at least one module to be changed has not been called yet."""
        return self._changes.awaits_modules

    def made_loader(self, loader: Any, place: str) -> None:
        """Assign a number to a new loader."""
        if loader not in self._loaders:
            file, _, rest = place.rpartition(":")
            self._loaders[loader] = self._num_loaders, f"{Path(file).name}:{rest}"
            self._num_loaders += 1

    def loader_begins(self, loader: Any) -> None:
        """Set the process's flags, then change the training loader."""
        self._changes.begin()
        self._changes.loader(loader, *self._loaders.get(loader, (self._num_loaders, "")))

    def loader_began(self, loader: Any, iterator: Any) -> None:
        """Assign a number to a loader that existed before the hooks."""
        self.made_loader(loader, "")

    def made_optimizer(self, optimizer: Any, place: str) -> None:
        """Assign a number to a new optimizer, and change the optimizer if the step uses it."""
        number, self._num_optimizers = self._num_optimizers, self._num_optimizers + 1
        self._changes.optimizer(optimizer, number)

    def loss(self, tensors: Any) -> None:
        """Check the device of the tensors from which a backward pass begins, and set the flags."""
        first = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors))
        self._measured.check_device(first.device)
        self._changes.begin()

    def backward_ended(self, *, in_closure: bool) -> None:
        """Call `over`, because all modules of the step have been called by now."""
        self.over()

    def called(self, module: torch.nn.Module) -> None:
        """Change an outermost module at its first call with gradients enabled."""
        if not torch.is_grad_enabled() or module in self._called:
            return
        parameter = next(module.parameters(), None)
        if parameter is None:
            return
        self._called[module] = True
        self._measured.check_device(parameter.device)
        self._changes.begin()
        self._changes.module(module)

    def missing(self) -> list[str]:
        """Return the names of changes that have not been made so far."""
        return [name for name in self._wanted if name not in self._changes.applied]

    def _tell_missing(self) -> None:
        missing = self.missing()
        if not missing or not is_first():
            return
        if not (self._num_loaders or self._num_optimizers or self._measured.is_device_checked):
            sys.stderr.write("steptune: nothing was changed, because this process did no training\n")
        else:
            sys.stderr.write(
                f"steptune: not changed: {', '.join(missing)}. The script never reached the code to change\n"
            )


class EnabledHooks(Hooks):
    """Wrappers of torch's functions that the changes need."""

    def __init__(self, session: Enabled) -> None:
        self.session: Any = session
        self._depth = threading.local()
        self._restore: dict[str, Callable[[], None]] = {}
        session.over = self._without_forward

    def install(self) -> None:
        self._put(torch.autograd, "backward", self._backward)
        self._put(DataLoader, "__init__", self._made_loader)
        self._put(DataLoader, "__iter__", self._began_loader)
        self._put(torch.optim.Optimizer, "__init__", self._made_optimizer)
        self._put(torch.nn.Module, "__call__", self._module)
        os.register_at_fork(after_in_child=self._in_child)

    def wrap_step(self, kind: Any) -> None:
        """Do nothing: steps are not counted."""

    def _in_child(self) -> None:
        """Remove the hooks in a forked child, except in a frozen copy of the script and in its trials."""
        copies = sys.modules.get(f"{ARMED_PACKAGE}.copies")
        if copies is None or not copies.Forks.now:
            self.remove()

    def _without_forward(self) -> None:
        """Remove the wrappers that only the first step needs."""
        self._restore.pop("torch.autograd.backward", lambda: None)()
        if not self.session.awaits_modules:
            self.forget_forward()


_installed: list[EnabledHooks] = []


def missing() -> list[str]:
    """Return the names of this process's changes that have not been made so far."""
    return [name for hooks in _installed for name in hooks.session.missing()]

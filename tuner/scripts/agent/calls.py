"""Calls in a guarded step that determine how the step trains: dropout, clipping of gradients, and schedulers.

The numbers of the guarded steps do not show a dropout rate, a clipping bound that no gradient reaches yet, or a second
step of a schedule on a plateau. Dropout is off in these steps, because other back ends draw other masks; its rates are
recorded.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

DROPOUTS = {
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d"), True),
    **dict.fromkeys(("alpha_dropout", "feature_alpha_dropout"), False),
}
"""Dropout functions, with the default of each one's argument `training`."""
CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
DROPOUT = "dropout"
"""Name prefix of the recorded calls that do not appear in compiled code."""


class Calls:
    """Record of the calls of a step, and the switch that turns dropout off.

    Dropout functions are replaced only for models that may have dropout, because code that was compiled with the
    original functions is compiled again.

    Attributes:
        used: Whether a function that would have dropped something was called, outside compiled code.
        seen: Calls of this step, in order, with their settings.
    """

    def __init__(self) -> None:
        self.off, self.used = False, False
        self.seen: list[str] = []
        self._replaced: list[tuple[Any, str, Any]] = []

    def watch(self) -> None:
        """Record calls of clipping and of schedulers' steps from now on."""
        utilities = torch.nn.utils
        originals = {name: getattr(utilities, name) for name in CLIPPING if hasattr(utilities, name)}
        self._replace({id(call): self._clipping(name, call) for name, call in originals.items()}, utilities)
        for kind in {torch.optim.lr_scheduler.LRScheduler, *_below(torch.optim.lr_scheduler.LRScheduler)}:
            if "step" in vars(kind):
                self._put(kind, "step", self._scheduler(vars(kind)["step"]))

    def switch_off(self) -> None:
        """Replace torch's functions, also where they were imported by name."""
        if self.off:
            return
        self.off = True
        functional: Any = torch.nn.functional
        originals = {name: getattr(functional, name) for name in DROPOUTS}
        replacements = {id(call): self._dropping(name, call) for name, call in originals.items()}
        attention = functional.scaled_dot_product_attention
        replacements[id(attention)] = self._attention(attention)
        self._replace(replacements, functional)

    def take(self) -> list[str]:
        """Return the calls of the step that ends, and clear the record."""
        seen, self.seen = self.seen, []
        return seen

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Stop recording while active, so that the guard's own computations do not count as calls of the step."""
        seen, used = self.seen, self.used
        self.seen = []
        try:
            yield
        finally:
            self.seen, self.used = seen, used

    def restore(self) -> None:
        self.off = False
        for owner, name, original in reversed(self._replaced):
            setattr(owner, name, original)
        self._replaced.clear()

    # --- replacements ---------------------------------------------------------------------------

    def _dropping(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def dropout(input: Any, *arguments: Any, **options: Any) -> Any:
            given = {**dict(zip(("p", "training", "inplace"), arguments, strict=False)), **options}
            trains = given.get("training", DROPOUTS[name])
            rate = given.get("p", 0.5) if trains else 0.0
            if self.off and name == "dropout":
                given["p"] = 0.0
            is_in_place = bool(given.get("inplace"))
            return self._dropped(name, rate, original(input, **given), input, is_in_place=is_in_place)

        return dropout

    def _attention(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def attention(query: Any, key: Any, value: Any, *arguments: Any, **options: Any) -> Any:
            rate = options.get("dropout_p", arguments[1] if len(arguments) > 1 else 0.0)
            if self.off and "dropout_p" in options:
                options["dropout_p"] = 0.0
            elif self.off and len(arguments) > 1:
                arguments = (arguments[0], 0.0, *arguments[2:])
            return self._dropped("of attention", rate, original(query, key, value, *arguments, **options), query)

        return attention

    def _clipping(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def clip(parameters: Any, *arguments: Any, **options: Any) -> Any:
            bound = arguments[0] if arguments else options.get("max_norm", options.get("clip_value"))
            self._note(name, bound)
            return original(parameters, *arguments, **options)

        return clip

    def _scheduler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(scheduler: Any, *arguments: Any, **options: Any) -> Any:
            self._note(f"step of {type(scheduler).__name__}")
            return original(scheduler, *arguments, **options)

        return step

    def _dropped(
        self, name: str, rate: Any, output: torch.Tensor, given: torch.Tensor, *, is_in_place: bool = False
    ) -> torch.Tensor:
        """Note a call that would have applied dropout, once a gradient reaches its output: if the loss does not depend
        on the output, dropout there does not affect training. An in-place call is noted at once, because later code may
        use its output through the input tensor.
        """
        if not self.off or not rate or torch.compiler.is_compiling() or _is_in_backward():
            return output
        if name == "dropout":
            self.used = True
        call = name if name.startswith(DROPOUT) else f"{DROPOUT} {name}"
        # As in a re-entrant checkpoint, whose backward pass repeats the call.
        if is_in_place or not output.requires_grad:
            self._note(call, rate)
            return output
        if output is given or output._is_view():  # a change in place removes the hooks of a view
            output = output.clone()
        arrived = False

        def note(gradient: torch.Tensor) -> None:
            nonlocal arrived
            if self.off and not arrived:
                arrived = True
                self._note(call, rate)

        try:
            output.register_hook(note)
        except RuntimeError:  # a tensor inside a function transform takes none
            self._note(call, rate)
        return output

    def _note(self, name: str, setting: Any = None) -> None:
        if torch.compiler.is_compiling():
            return
        self.seen.append(f"{name} {float(setting):.6g}" if isinstance(setting, int | float) else name)

    # --- where they are -------------------------------------------------------------------------

    def _replace(self, replacements: dict[int, Any], owner: Any) -> None:
        """Replace functions in their module, and wherever a module outside torch has imported them by name."""
        others = [module for name, module in sys.modules.items() if name.partition(".")[0] != "torch"]
        for module in (owner, *others):
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if id(value) in replacements:
                    self._put(module, name, replacements[id(value)])

    def _put(self, owner: Any, name: str, replacement: Any) -> None:
        self._replaced.append((owner, name, vars(owner)[name]))
        setattr(owner, name, replacement)


def _is_in_backward() -> bool:
    """Say whether this call comes from a backward pass, which repeats calls of the forward pass when it recomputes."""
    task: int = torch._C._current_graph_task_id()
    return task != -1


def _below(kind: Any) -> Iterator[Any]:
    for below in kind.__subclasses__():
        yield below
        yield from _below(below)


def may_drop(module: torch.nn.Module) -> bool:
    """Say whether a module may apply dropout: its own or its configuration's dropout probability is not 0, or its code
    calls dropout.
    """
    for part in module.modules():
        if _calls_dropout(part):
            return True
        if isinstance(part, torch.nn.modules.dropout._DropoutNd) and part.p:
            return True
        for owner in (part, getattr(part, "config", None)):
            values = getattr(owner, "__dict__", {}).items()
            if any("drop" in name and isinstance(value, int | float) and value for name, value in values):
                return True
    return False


def _calls_dropout(module: torch.nn.Module) -> bool:
    """Say whether a method of a module, from a class outside torch, uses the name `dropout` although the module has no
    attribute of that name.
    """
    own = [kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch.")]
    codes = [getattr(method, "__code__", None) for kind in own for method in vars(kind).values()]
    return any(code is not None and "dropout" in code.co_names for code in codes) and not hasattr(module, "dropout")

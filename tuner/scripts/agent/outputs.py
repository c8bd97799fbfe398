"""First 16-bit output of each module, computed once more in FP32 from the same inputs and parameters.

`trials/output_watch.py` does the same for workloads. Only on CPUs: on other devices the comparison rejects nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

MOST_ELEMENTS = 2**26
"""Maximum total number of elements in the parameters, buffers, inputs and output of a recomputed module: 256 MiB in
FP32.
"""


class Outputs:
    """Observer of every innermost module's first 16-bit output.

    Args:
        aside: Function that returns a context in which calls of modules are not recorded.

    Attributes:
        seen: Difference of an output from FP32, in unit roundoffs of its norm, and the excess of its size, by name.
    """

    def __init__(self, aside: Callable[[], AbstractContextManager[None]]) -> None:
        self.seen: dict[str, list[float]] = {}
        self._aside = aside
        self._given: dict[str, tuple[list[int], torch.Tensor]] = {}
        self._is_looking = False
        self._undone = ExitStack()

    def watch(self, prefix: str, module: torch.nn.Module) -> None:
        """Observe the innermost modules of a module; observe none if any part of the module is compiled."""
        parts = dict(module.named_modules())
        if any(part._compiled_call_impl is not None or hasattr(part, "_orig_mod") for part in parts.values()):
            return
        for name, part in parts.items():
            has_hooks = part._forward_hooks or part._forward_pre_hooks  # of the user: what they do is not known
            is_plain = not has_hooks and "forward" not in vars(part) and not isinstance(part, torch.jit.ScriptModule)
            if next(part.children(), None) is None and is_plain:
                full = f"{prefix}{name}"
                self._undone.callback(part.register_forward_pre_hook(self._before(full), with_kwargs=True).remove)
                self._undone.callback(part.register_forward_hook(self._after(full), with_kwargs=True).remove)

    def end(self) -> None:
        """Stop observing."""
        self._undone.close()
        self._given.clear()

    def _before(self, name: str) -> Any:
        def look(_: Any, arguments: Any, named: Any) -> None:
            if not self._is_looking:
                self._given[name] = _versions(arguments, named), torch.get_rng_state()

        return look

    def _after(self, name: str) -> Any:
        def look(module: Any, arguments: Any, named: Any, output: Any) -> None:
            found = next(iter(_tensors(output)), None)
            if self._is_looking or name in self.seen or name not in self._given or found is None:
                return
            if not found.is_floating_point() or found.dtype.itemsize != 2 or found.device.type != "cpu":
                return
            versions, generator = self._given[name]
            if versions != _versions(arguments, named) or not torch.equal(generator, torch.get_rng_state()):
                return  # inputs that were changed in place are gone, and FP32 draws other numbers than 16 bits do
            self._is_looking = True
            try:
                with self._aside():
                    self.seen[name] = _held_to_fp32(module, arguments, named, found)
            finally:
                self._is_looking = False

        return look


def _held_to_fp32(module: Any, arguments: Any, named: Any, found: torch.Tensor) -> list[float]:
    """Compare an output with the FP32 outputs from the exact inputs and from inputs rounded as under autocast; return
    the smaller difference.
    """
    state = [*module.parameters(), *module.buffers()]
    if sum(tensor.numel() for tensor in (*state, found, *_tensors((arguments, named)))) > MOST_ELEMENTS:
        return []
    compared, attributes = [], dict(vars(module))
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.random.fork_rng([]):
            for given in (_wide, lambda tensor: _wide(tensor.to(found.dtype) if _is_real(tensor) else tensor)):
                wanted = next(iter(_tensors(_in_fp32(module, arguments, named, given))))
                compared.append(_compared(wanted.double(), found.detach()))
    except Exception:  # a module that cannot compute in FP32, or no memory for it: the script must go on
        return []
    finally:
        vars(module).update(attributes)  # what it keeps of a forward pass is that of its own
    return min((values for values in compared if values), default=[])


def _in_fp32(module: Any, arguments: Any, named: Any, given: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    state = {name: given(tensor.detach()) for name, tensor in module.named_parameters()}
    state |= {name: _wide(tensor.detach()).clone() for name, tensor in module.named_buffers()}
    return torch.func.functional_call(module, state, _mapped(given, arguments), _mapped(given, named))


def _compared(wanted: torch.Tensor, found: torch.Tensor) -> list[float]:
    if wanted.shape != found.shape or not bool(wanted.isfinite().all()):
        return []
    limits, square = torch.finfo(found.dtype), float((wanted * wanted).sum())
    smallest = limits.smallest_normal * limits.eps / 2 * math.sqrt(wanted.numel())
    norm, unit, apart = math.sqrt(square), limits.eps / 2, found.double() - wanted
    if norm <= smallest / limits.eps:
        return []
    return [float(apart.norm()) / (unit * norm + smallest), float((apart * wanted).sum()) / square / unit]


def _mapped(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value.detach())
    if type(value) is dict:
        return {name: _mapped(change, part) for name, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(change, part) for part in value)
    return value


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    _mapped(keep, value)
    return found


def _versions(arguments: Any, named: Any) -> list[int]:
    return [tensor._version for tensor in _tensors((arguments, named))]


def _is_real(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point()


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor

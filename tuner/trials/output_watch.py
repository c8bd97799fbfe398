"""Recomputation of modules' outputs in FP32, in a rank during a guarded step."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from steptune.tuner.guard.outputs import ModuleOutput
from steptune.tuner.training.fp32_products import without_tf32
from steptune.tuner.training.job import unwrapped
from steptune.tuner.training.structure import map_structure

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.job import TrainingJob

MOST_ELEMENTS = 2**26
"""Maximum number of elements in a recomputed module's state, inputs and outputs together: 256 MiB in FP32."""


class OutputWatch:
    """Observer of the first 16-bit output of every innermost module, during the first step."""

    def __init__(self, job: TrainingJob) -> None:
        self._model = unwrapped(job.model)
        self._given: dict[str, tuple[list[int], list[torch.Tensor]]] = {}
        self._is_looking = False
        self.outputs: dict[str, ModuleOutput | None] = {}
        """Deviations of the outputs, keyed by module name; None for an output that could not be recomputed."""
        self._was_done = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Observe the first step only."""
        handles = []
        if not self._was_done:
            self._was_done = True
            for name, module in self._model.named_modules():
                has_hooks = module._forward_hooks or module._forward_pre_hooks  # of the user: what they do is not known
                if next(module.children(), None) is None and not has_hooks:
                    handles.append(module.register_forward_pre_hook(self._before(name), with_kwargs=True))
                    handles.append(module.register_forward_hook(self._after(name), with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def on_gradients(self) -> None:
        """Do nothing: outputs are seen in the forward pass."""

    def on_repeat(self) -> None:
        """Do nothing: a repeated step has the same outputs."""

    def _before(self, name: str) -> Any:
        def look(module: Any, arguments: Any, named: Any) -> None:
            if not self._is_looking:
                self._given[name] = _versions(arguments, named), _generators()

        return _not_compiled(look)

    def _after(self, name: str) -> Any:
        def look(module: Any, arguments: Any, named: Any, output: Any) -> None:
            found = next(iter(_tensors(output)), None)
            if self._is_looking or name in self.outputs or found is None or not _has_16_bits(found):
                return
            # Inputs that were changed in place are gone, and FP32 draws other numbers than 16 bits do.
            is_other = name not in self._given or _has_changed(*self._given[name], arguments, named)
            self._is_looking = True
            try:
                self.outputs[name] = None if is_other else _held_to_fp32(name, module, arguments, named, found)
            finally:
                self._is_looking = False

        return _not_compiled(look)


def _not_compiled(look: Any) -> Any:
    """Exclude a hook from compilation. The graph of a compiled caller ends at the hook."""
    return sys.modules["torch._dynamo"].disable(look) if "torch._dynamo" in sys.modules else look


def _held_to_fp32(name: str, module: Any, arguments: Any, named: Any, found: torch.Tensor) -> ModuleOutput | None:
    """Compare an output with two recomputed in FP32: one from the exact inputs, and one from inputs rounded to the
    output's dtype as under autocast. Return the smaller deviation.
    """
    import torch

    state = [*module.parameters(), *module.buffers()]
    if sum(tensor.numel() for tensor in (*state, found, *_tensors((arguments, named)))) > MOST_ELEMENTS:
        return None
    compared = []
    try:
        with torch.no_grad(), torch.autocast(found.device.type, enabled=False), without_tf32(), _same_draws(found):
            for given in (_wide, partial(_rounded, found.dtype)):
                wanted = next(iter(_tensors(_in_fp32(module, arguments, named, given))))
                compared.append(_compared(name, wanted.double(), found.detach()))
    except (RuntimeError, TypeError, ValueError):  # a module that cannot compute in FP32, or no memory for it
        return None
    return min((output for output in compared if output is not None), key=lambda output: output.ratio, default=None)


def _in_fp32(module: Any, arguments: Any, named: Any, given: Callable[[Any], Any]) -> Any:
    """Compute a module's output from parameters and inputs in FP32; its buffers stay unchanged."""
    import torch

    state = {name: given(tensor.detach()) for name, tensor in module.named_parameters()}
    state |= {name: _wide(tensor.detach()).clone() for name, tensor in module.named_buffers()}
    wide_arguments, wide_named = map_structure(given, (arguments, named), _is_other)
    return torch.func.functional_call(module, state, wide_arguments, wide_named)


@contextmanager
def _same_draws(near: torch.Tensor) -> Iterator[None]:
    """Restore the states of the random generators when the context ends, so that a recomputation in FP32 changes no
    later draw.
    """
    import torch

    with torch.random.fork_rng([near.device.index or 0] if near.is_cuda else []):
        yield


def _compared(name: str, wanted: torch.Tensor, found: torch.Tensor) -> ModuleOutput | None:
    import torch

    if wanted.shape != found.shape or not bool(wanted.isfinite().all()):
        return None
    limits = torch.finfo(found.dtype)
    apart, square = found.double() - wanted, float((wanted * wanted).sum())
    smallest = limits.smallest_normal * limits.eps / 2 * math.sqrt(wanted.numel())
    norm = math.sqrt(square)
    if norm <= smallest / limits.eps:
        return None
    unit = limits.eps / 2
    return ModuleOutput(
        name=name,
        size=float((apart * wanted).sum()) / square / unit,
        difference=float(apart.norm()) / (unit * norm + smallest),
    )


def _tensors(value: Any) -> list[torch.Tensor]:
    import torch

    found: list[torch.Tensor] = []
    map_structure(lambda leaf: found.append(leaf) if isinstance(leaf, torch.Tensor) else None, value, _is_other)
    return found


def _is_other(value: Any) -> bool:
    """Say whether a value is treated as a leaf: anything but a list, a tuple or a plain dict, because other containers
    cannot be rebuilt.
    """
    return not isinstance(value, list | tuple) and type(value) is not dict


def _versions(arguments: Any, named: Any) -> list[int]:
    return [tensor._version for tensor in _tensors((arguments, named))]


def _generators() -> list[torch.Tensor]:
    """Return the states of the generators that a module may draw from."""
    import torch

    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if on_gpu else [])]


def _has_changed(versions: list[int], generators: list[torch.Tensor], arguments: Any, named: Any) -> bool:
    """Say whether a call changed its inputs or drew random numbers."""
    import torch

    drew = not all(torch.equal(a, b) for a, b in zip(generators, _generators(), strict=False))
    return drew or versions != _versions(arguments, named)


def _has_16_bits(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize == 2


def _wide(leaf: Any) -> Any:
    import torch

    return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def _rounded(dtype: torch.dtype, leaf: Any) -> Any:
    import torch

    return leaf.to(dtype).float() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

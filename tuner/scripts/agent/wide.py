"""Steps of a loop in FP32, even where the loop turns autocast on."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Wide:
    """Switch that turns autocast off, even where the loop turns it on, and runs functions compiled by torch.compile in
    eager mode.

    Args:
        looks: Whether it looks for results in 16 bits, which slows every operation.
    """

    def __init__(self, looks: bool) -> None:
        self._dtypes = _Dtypes() if looks else None
        self._undone = ExitStack()

    @property
    def has_16_bits(self) -> bool:
        """Say whether a 16-bit result was observed although autocast was off."""
        return self._dtypes is not None and self._dtypes.found

    def begin(self) -> None:
        kind: Any = torch.amp.autocast_mode.autocast
        entered = kind.__enter__

        def enter(context: Any) -> Any:
            wanted, context._enabled = context._enabled, False
            try:
                return entered(context)
            finally:
                context._enabled = wanted

        kind.__enter__ = enter
        self._undone.callback(setattr, kind, "__enter__", entered)
        for device in ("cpu", *(("cuda",) if torch.cuda.is_initialized() else ())):
            self._undone.callback(torch.set_autocast_enabled, device, torch.is_autocast_enabled(device))
            torch.set_autocast_enabled(device, False)
        if "torch._dynamo" in sys.modules:
            self._undone.enter_context(torch.compiler.set_stance("force_eager"))
        if self._dtypes is not None:
            self._undone.enter_context(self._dtypes)

    def end(self) -> None:
        self._undone.close()


class _Dtypes(TorchDispatchMode):
    """Dispatch mode that looks for results in 16 bits."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.dtype.itemsize == 2:
                self.found = True
        return result

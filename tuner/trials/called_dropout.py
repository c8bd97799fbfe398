"""Observation of direct calls of `dropout` outside dropout modules; each call is named after the calling module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import dropout
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

Look = Callable[[str, Any, Any], None]
"""Callback that receives the name, the arguments and the result of a call."""


class CalledDropout(TorchFunctionMode):
    """Observer of every direct call of `dropout` while active. A call is named by its position among the calls of its
    module.

    Positions are distinguished because a batch split into micro-batches, or a forward pass that is partly recomputed,
    makes some calls weigh more than others. Calls in code that is being compiled are left alone.
    """

    def __init__(self, model: torch.nn.Module, look: Look) -> None:
        super().__init__()
        self._model = model
        self._see = look
        self._inside: list[_Entry] = [_Entry("the loss", None)]

    def enter(self, name: str, module: torch.nn.Module) -> None:
        self._inside.append(_Entry(name or "the model", module))

    def leave(self, module: torch.nn.Module) -> None:
        """Handle the end of a module's forward pass. After that of the whole model, numbering restarts for calls in the
        loss.
        """
        self._inside.pop()
        if module is self._model:
            self._inside[0] = _Entry("the loss after the model", None)

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        output = function(*arguments, **(named or {}))
        if function is dropout and not torch.compiler.is_compiling():
            entry = self._inside[-1]
            if not isinstance(entry.module, _DropoutNd):
                entry.num_calls += 1
                self._see(f"dropout {entry.num_calls} called in {entry.name}", arguments or (named["input"],), output)
        return output


class _Entry:
    def __init__(self, name: str, module: torch.nn.Module | None) -> None:
        self.name, self.module, self.num_calls = name, module, 0

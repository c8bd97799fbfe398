"""Diagnosis of a step that cannot be recorded as a CUDA graph: the operator, the line of the model, and the reason.

A step that waits for the device is found before anything is recorded, while it warms up: torch then raises at the
operator that waits (`torch.cuda.set_sync_debug_mode`). Any other operation that cannot be recorded fails during the
recording, after which the process may be unable to use its device.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from steptune.tuner.errors import CaptureError
from steptune.tuner.user_code import model_line

if TYPE_CHECKING:
    import torch

WAITS = "called a synchronizing CUDA operation"
"""Text of torch's error when an operator waits for the device although waiting is forbidden."""

MASKS = "transformers/masking_utils.py"
"""Source file in transformers that computes masks, which attention with the `is_causal` flag does not need."""

_READS = re.compile(r"aten::(_local_scalar_dense|item|is_nonzero|equal|allclose)\b")
_SHAPES = re.compile(
    r"aten::(nonzero|masked_select|_?unique\w*|index|index_put_?|repeat_interleave|bincount|argwhere)\b"
)
_COPIES = re.compile(r"aten::(_to_copy|to|copy_|_pin_memory|pin_memory|lift_fresh\w*|_copy_from)\b")
_REASONS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        _READS,
        "the host reads a device value and waits for it, as .item(), float() or an `if` on a tensor does: keep "
        "the computation on tensors, for example with torch.where",
    ),
    (
        _SHAPES,
        "the shape of the result depends on device values, for which the host waits: keep shapes fixed, for "
        "example with torch.where or masked_fill",
    ),
    (
        _COPIES,
        "the operator copies a tensor between host and device and waits: create the tensor on the device, or once "
        "before the step",
    ),
)
_TEXTS: tuple[tuple[str, str], ...] = (
    ("CUDAGeneratorImpl", "the step reads or sets the random generator, which the graph controls during recording"),
    ("capturable is False", "the optimizer keeps its step count on the host: use an optimizer with capturable=True"),
    ("cudaErrorStreamCaptureUnjoined", "work on another stream was not joined to the recorded stream"),
    (
        "cudaErrorStreamCaptureIsolation",
        "the step depends on work that was launched on another stream before the recording",
    ),
    (
        "cudaErrorStreamCaptureImplicit",
        "the step uses the legacy default stream: launch its work on torch's current stream",
    ),
    (
        WAITS,
        "the host waits for the device, as .cpu(), creating a device tensor from Python numbers, or the gradient of "
        "torch.prod does",
    ),
    (
        "cudaErrorStreamCaptureUnsupported",
        "the host waits for the device, or makes a call that is not permitted during recording",
    ),
    (
        "operation not permitted when stream is capturing",
        "the host waits for the device, or makes a call that is not permitted during recording",
    ),
)


def explained(error: BaseException, operator: str = "") -> CaptureError:
    """Return the error that explains to the user why a step cannot be recorded.

    Args:
        error: Original exception, with its traceback.
        operator: Operator that ran last; empty where unknown.
    """
    line = model_line(traceback.extract_tb(error.__traceback__))
    what = operator or f"{type(error).__name__}: {_first_line(error)}"
    where = f" ({line})" if line else ""
    return CaptureError(f"the step cannot be recorded as a CUDA graph: {what}{where}: {reason_of(error, operator)}")


def reason_of(error: BaseException, operator: str = "") -> str:
    """Return why the step cannot be recorded, with the remedy."""
    text = str(error)
    for pattern, reason in _REASONS:
        if operator and pattern.match(operator):
            return reason
    return next((reason for part, reason in _TEXTS if part in text), "the reason is unknown")


def waits(error: BaseException) -> bool:
    """Say whether an error was raised because an operator waits for the device."""
    return WAITS in str(error)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


class FailingOperator:
    """Recorder of the operator, forward or backward, that was running when an error was raised; `name` is empty if none
    was running.
    """

    def __init__(self) -> None:
        self.name = ""

    def mode(self) -> Any:
        from torch.utils._python_dispatch import TorchDispatchMode

        outer = self

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                outer.name = str(func.name())
                result = func(*args, **(kwargs or {}))
                outer.name = ""
                return result

        return Watch()  # type: ignore[no-untyped-call]


class HostReads:
    """Detector of the first operator of a step for which the host must wait, and of the line that calls it.

    It looks at the operators, not at a device, so that a step can be judged before anything is tried.

    Attributes:
        found: The first such operator; empty if there is none.
        found_beside_masks: The first that computes no attention mask.
        found_in_loss: The first that the loss runs outside of the model's forward pass.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_in_loss = False
        self.found = self.found_beside_masks = self.found_in_loss = ""

    @contextmanager
    def loss_of(self, model: torch.nn.Module) -> Iterator[None]:
        """Attribute operators to the loss where they run outside the model's forward pass; to nothing if the model
        itself is not called, but parts of it are.
        """
        was_called = False

        def enter(module: torch.nn.Module, args: Any) -> None:
            nonlocal was_called
            self._is_in_loss, was_called = False, True

        def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
            self._is_in_loss = True

        handles = [model.register_forward_pre_hook(enter, prepend=True), model.register_forward_hook(leave)]
        self._is_in_loss = True
        try:
            yield
        finally:
            self._is_in_loss = False
            if not was_called:
                self.found_in_loss = ""
            for handle in handles:
                handle.remove()

    def mode(self) -> Any:
        from torch.utils._python_dispatch import TorchDispatchMode

        outer = self

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if outer._is_wanted() and outer._waits(str(func.name()), args):
                    outer._note(str(func.name()), traceback.extract_stack())
                return func(*args, **(kwargs or {}))

        return Watch()  # type: ignore[no-untyped-call]

    def _is_wanted(self) -> bool:
        return not self.found_beside_masks or (self._is_in_loss and not self.found_in_loss)

    def _note(self, name: str, stack: traceback.StackSummary) -> None:
        line = model_line(stack)
        told = f"{name} ({line})" if line else name
        self.found = self.found or told
        if not any(frame.filename.endswith(MASKS) for frame in stack):
            if self._is_in_loss:
                self.found_in_loss = self.found_in_loss or told
            self.found_beside_masks = self.found_beside_masks or told

    def _waits(self, name: str, args: Any) -> bool:
        if not args or getattr(args[0], "device", None) != self._device:
            return False
        if re.match(r"aten::index(\.Tensor)?$", name):
            return any(str(getattr(index, "dtype", "")) == "torch.bool" for index in args[1] if index is not None)
        shape = re.match(r"aten::(nonzero|masked_select|_unique2|unique_dim|unique_consecutive|bincount)\b", name)
        return bool(_READS.match(name) or shape)

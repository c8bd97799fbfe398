"""Contiguous parameters: the parameters are views of large buffers, one buffer for each parameter group and dtype.

An optimizer then runs over a few large tensors instead of hundreds of small ones. The user's parameters stay what they
are (the same objects, names, shapes and layouts); only their storage is a part of a buffer, in which every one begins
at a multiple of `ALIGNMENT` bytes. Before an update their gradients are copied into a buffer of the same layout by one
multi-tensor operation.

This is the same update only for optimizers that treat every element alike (`ELEMENT_WISE`): those that look at a
parameter's norm or shape (LAMB, LARS, Adafactor, SM3, Muon) would see the norm or shape of the buffer.

Source: the contiguous_params library (https://github.com/PhilJd/contiguous_pytorch_params), which points gradients at
the buffer instead; copying them leaves DistributedDataParallel's gradient views alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from steptune.tuner.errors import UnsupportedError
from steptune.tuner.training.layouts import dense_strides
from steptune.tuner.training.parameter_layout import ParameterLayout

if TYPE_CHECKING:
    import torch

ALIGNMENT = 256
"""Alignment of parameters in a buffer, in bytes: enough for the widest kernel loads and tensor-memory copies."""

ELEMENT_WISE = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
"""Classes of torch.optim that update each element independently of all others."""

_OF_ALL = ("step", "mu_product", "eta", "mu")
"""Keys of the optimizer state entries that hold a single number per tensor, for the classes in `ELEMENT_WISE`."""


class FlatParameters(ParameterLayout):
    """Layout that places the parameters of an optimizer's groups in contiguous buffers.

    Args:
        optimizer: Optimizer before its first step. It is only read; its replacement uses `buffer_groups`.

    Attributes:
        buffer_groups: The optimizer's groups, with the buffers instead of the parameters.
        order: Parameters of each group.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._members: list[list[_Buffer]] = []
        self.buffer_groups: list[dict[str, Any]] = []
        for group in optimizer.param_groups:
            buffers = [_Buffer(parameters) for parameters in _of_one_kind(group["params"])]
            self._members.append(buffers)
            self.buffer_groups.append({**group, "params": [buffer.flat for buffer in buffers]})
        self.order = [group["params"] for group in optimizer.param_groups]

    def finish_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Copy the parameters' gradients into the buffers' gradients, and free the copied ones.

        Raises:
            UnsupportedError: A parameter has no gradient (alone it would be left out of the update), or lies elsewhere.
        """
        for buffer in self._buffers():
            buffer.take_gradients()

    def _own_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
        """Return the gradients of the user's parameters as views of the buffers' gradients.

        Their norm, summed view by view, is the same as without buffers; summed over a whole buffer it differs (by 0.03
        % for ten million elements on a CPU).
        """
        return [view for buffer in self._buffers() for view in buffer.gradients]

    def gradients_by_parameter(self) -> Mapping[torch.nn.Parameter, torch.Tensor]:
        return {p: g for buffer in self._buffers() for p, g in zip(buffer.parameters, buffer.gradients, strict=True)}

    def groups(self, optimizer: torch.optim.Optimizer) -> list[list[torch.nn.Parameter]]:
        return self.order

    def whole_optimizer_state(
        self, state: dict[str, Any], optimizer: torch.optim.Optimizer, names: Sequence[str]
    ) -> tuple[dict[str, Any], Sequence[str]]:
        return self._split(state), names

    def own_optimizer_state(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return self._join(state)

    def _split(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Convert the state of the optimizer over buffers to the state of the user's own optimizer over parameters."""
        numbers = self._numbers()
        state: dict[int, dict[str, Any]] = {}
        for number, buffer in enumerate(self._buffers()):
            for parameter, piece in buffer.split(state_dict["state"].get(number, {})):
                state[numbers[id(parameter)]] = piece
        groups = []
        for parameters, group in zip(self.order, state_dict["param_groups"], strict=True):
            groups.append({**group, "params": [numbers[id(p)] for p in parameters]})
        return {**state_dict, "state": dict(sorted(state.items())), "param_groups": groups}

    def _join(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Convert the state of the user's own optimizer to one that the optimizer over buffers can load.

        Raises:
            UnsupportedError: Parameters of one buffer have states of different kinds.
        """
        numbers = self._numbers()
        state, groups, count = {}, [], 0
        for buffers, group in zip(self._members, state_dict["param_groups"], strict=True):
            groups.append({**group, "params": list(range(count, count + len(buffers)))})
            for buffer in buffers:
                pieces = [state_dict["state"].get(numbers[id(p)], {}) for p in buffer.parameters]
                joined = buffer.join(pieces)
                if joined:
                    state[count] = joined
                count += 1
        return {**state_dict, "state": state, "param_groups": groups}

    def _buffers(self) -> Iterator[_Buffer]:
        for buffers in self._members:
            yield from buffers

    def _numbers(self) -> dict[int, int]:
        """Return each parameter's number in torch's state dict, where numbering continues across groups; keys are the
        parameters' `id`s.
        """
        parameters = (p for group in self.order for p in group)
        return {id(p): number for number, p in enumerate(parameters)}


class _Buffer:
    """A buffer and the parameters that it contains, all of one device and dtype."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        import torch

        self.parameters = parameters
        step = max(1, ALIGNMENT // parameters[0].element_size())
        self._offsets, end = [], 0
        for parameter in parameters:
            self._offsets.append(end)
            end += -(-parameter.numel() // step) * step
        first = parameters[0]
        self.flat = torch.nn.Parameter(torch.zeros(end, dtype=first.dtype, device=first.device))
        self._gradient = torch.zeros_like(self.flat)
        self.gradients = self._views_of(self._gradient)
        ends = [offset + parameter.numel() for offset, parameter in zip(self._offsets, parameters, strict=True)]
        between = zip(ends, [*self._offsets[1:], end], strict=True)
        self._padding = [self._gradient[start:stop] for start, stop in between if start < stop]
        with torch.no_grad():
            for parameter, view in zip(parameters, self._views_of(self.flat.data), strict=True):
                view.copy_(parameter)
                parameter.data = view
        self._addresses = [parameter.data_ptr() for parameter in parameters]

    def take_gradients(self) -> None:
        import torch

        for parameter, address in zip(self.parameters, self._addresses, strict=True):
            if parameter.data_ptr() != address:
                raise UnsupportedError(
                    f"a parameter of shape {tuple(parameter.shape)} no longer uses its part of the contiguous "
                    "buffer, as after flatten_parameters() or `parameter.data = ...`: copy the new values into it "
                    "instead (parameter.copy_), or train without contiguous parameters"
                )
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if len(gradients) < len(self.parameters):
            missing = next(p for p in self.parameters if p.grad is None)
            raise UnsupportedError(
                f"a parameter of shape {tuple(missing.shape)} has no gradient, but contiguous parameters are all "
                "updated together: use the parameter in every step, or train without contiguous parameters"
            )
        torch._foreach_copy_(self.gradients, gradients)
        if self._padding:  # clipping a gradient that is not finite left no numbers there
            torch._foreach_zero_(self._padding)
        for parameter in self.parameters:
            parameter.grad = None
        self.flat.grad = self._gradient

    def split(self, state: dict[str, Any]) -> Iterator[tuple[torch.nn.Parameter, dict[str, Any]]]:
        import torch

        whole = {key for key, value in state.items() if self._is_whole(value)}
        views = {key: self._views_of(state[key]) for key in whole}
        for number, parameter in enumerate(self.parameters):
            piece = {}
            for key, value in state.items():
                if key in whole:
                    piece[key] = views[key][number].clone(memory_format=torch.preserve_format)
                else:
                    piece[key] = value.clone() if isinstance(value, torch.Tensor) else value
            if piece:
                yield parameter, piece

    def join(self, pieces: list[dict[str, Any]]) -> dict[str, Any]:
        import torch

        first = pieces[0]
        if len({(*sorted(piece), float(piece.get("step", 0))) for piece in pieces}) > 1:
            raise UnsupportedError(
                "the parameters in the optimizer's state differ in step count or entries, but contiguous "
                "parameters are all updated together: load this state without contiguous parameters"
            )
        joined: dict[str, Any] = {}
        for key, value in first.items():
            if isinstance(value, torch.Tensor) and key not in _OF_ALL:
                buffer = torch.zeros(len(self.flat), dtype=value.dtype, device=self.flat.device)
                for view, piece in zip(self._views_of(buffer), pieces, strict=True):
                    view.copy_(piece[key])
                joined[key] = buffer
            else:
                joined[key] = value.clone() if isinstance(value, torch.Tensor) else value
        return joined

    def _is_whole(self, value: Any) -> bool:
        return getattr(value, "shape", None) == self.flat.shape

    def _views_of(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of a buffer as views in the parameters' shapes and layouts."""
        return [
            buffer.as_strided(p.size(), dense_strides(p), buffer.storage_offset() + offset)
            for p, offset in zip(self.parameters, self._offsets, strict=True)
        ]


def _of_one_kind(parameters: list[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    kinds: dict[tuple[Any, ...], list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    return list(kinds.values())

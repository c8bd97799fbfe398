"""Snapshot of the state that a training step changes, restored in place: tensors keep their addresses."""

from __future__ import annotations

import inspect
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from steptune.tuner.errors import CaptureError

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.job import TrainingJob


class StepState:
    """Snapshot of parameters, buffers, masters, optimizer and loss-scaler state, and random generators.

    Args:
        also: Further tensors that a step changes.
    """

    def __init__(self, job: TrainingJob, also: Sequence[torch.Tensor] = ()) -> None:
        self._job = job
        self._tensors = {id(tensor): tensor for tensor in [*_tensors_of(job), *also]}
        self._kept = {key: tensor.detach().clone() for key, tensor in self._tensors.items()}
        self._device_generator = _device_generator(job.device)
        self._host_generators = _host_generators(job.device)

    def restore(self) -> None:
        """Restore everything. Optimizer state created since the snapshot gets its initial values.

        Raises:
            CaptureError: The steps since drew random numbers on the host.
        """
        import torch

        drawn = [
            name for name, state in _host_generators(self._job.device).items() if state != self._host_generators[name]
        ]
        if drawn:
            raise CaptureError(
                f"the step draws random numbers on the host ({', '.join(drawn)}), but a CUDA graph would repeat "
                "those of the recorded step: draw them on the device, for example with torch.rand(..., "
                "device=x.device)"
            )
        with torch.no_grad():
            for key, tensor in self._tensors.items():
                tensor.copy_(self._kept[key])
            self._reset_new_state()
        _set_device_generator(self._job.device, self._device_generator)

    def _reset_new_state(self) -> None:
        optimizer = self._job.optimizer
        new = {
            parameter: {name: value for name, value in values.items() if _is_new(value, self._tensors)}
            for parameter, values in optimizer.state.items()
        }
        if not any(new.values()):
            return
        fresh = initial_state(optimizer)
        for parameter, values in new.items():
            for name, value in values.items():
                if name in fresh[parameter]:
                    value.copy_(fresh[parameter][name])
                else:
                    value.zero_()  # SGD's momentum: it begins as the first gradient, and zero times anything plus that


def initial_state(optimizer: torch.optim.Optimizer) -> dict[Any, dict[str, Any]]:
    """Return the initial state that an optimizer of torch.optim creates for parameters with gradients.

    Raises:
        CaptureError: The initial state cannot be determined.
    """
    if any(group.get("momentum") and group.get("dampening") for group in optimizer.param_groups):
        raise CaptureError(
            f"{type(optimizer).__name__} with dampening handles its first update differently from all others, "
            "which a CUDA graph cannot do: set dampening to 0"
        )
    initialise = getattr(optimizer, "_init_group", None)
    if initialise is None:
        raise CaptureError(
            f"the initial state of {type(optimizer).__name__} is unknown: use an optimizer from torch.optim"
        )
    kept = optimizer.state
    optimizer.state = defaultdict(dict)
    try:
        for group in optimizer.param_groups:
            initialise(group, *([] for _ in range(len(inspect.signature(initialise).parameters) - 1)))
    except KeyError as error:  # Adagrad of torch 2.11
        raise CaptureError(
            f"{type(optimizer).__name__} creates its state {error} in its constructor instead of at the first "
            "update: use a later version of PyTorch, or another optimizer"
        ) from error
    else:
        return {parameter: {} for parameter in kept} | dict(optimizer.state)
    finally:
        optimizer.state = kept


def _tensors_of(job: TrainingJob) -> list[torch.Tensor]:
    scaler = job.scaler
    state = [value for values in job.optimizer.state.values() for value in values.values()]
    scaling = [scaler._scale, scaler._growth_tracker] if scaler is not None else []
    found = [*job.model.parameters(), *job.model.buffers(), *job.parameters(), *state, *scaling]
    return [value for value in found if hasattr(value, "data_ptr")]


def _is_new(value: Any, known: dict[int, torch.Tensor]) -> bool:
    return hasattr(value, "data_ptr") and id(value) not in known


def _device_generator(device: torch.device) -> torch.Tensor:
    import torch

    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_device_generator(device: torch.device, state: torch.Tensor) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def _host_generators(device: torch.device) -> dict[str, Any]:
    """Return the states of the generators that a graph does not track. On a CPU, a graph tracks torch's own
    generator.
    """
    import torch

    states: dict[str, Any] = {"Python's random": random.getstate()}
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states["NumPy's random"] = (kind, keys.tobytes(), *rest)
    if device.type != "cpu":
        states["torch's CPU generator"] = torch.get_rng_state().numpy().tobytes()
    return states

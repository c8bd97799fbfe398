"""Detection of state that a step leaves on modules for the next step, apart from tensors that are changed in place.

A graph follows a buffer that is changed in place on the device. It does not follow an attribute that Python sets anew:
a replay runs no Python, so every step would see what the recorded one saw. What is set in every step but read in the
same step only (a loss that a layer leaves for the training loop, a weight that a hook computes) is no such state.
Warm-up steps show the difference: in the last one, the tensors that the step before left are replaced by copies that
report when they are read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from steptune.tuner.errors import CaptureError

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.job import TrainingJob

MAX_ITEMS = 1000
"""Maximum number of items of an inspected container; a larger one is assumed to be a lookup table."""
MAX_DEPTH = 4
MAX_ARRAY_BYTES = 1 << 20

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True, kw_only=True)
class _Attribute:
    """Snapshot of an attribute, buffer or parameter at one moment.

    Attributes:
        name: Human-readable name, with that of its module.
        value: Value, stored in the dictionary `slots` under `slot`.
        leaves: Leaves of the value; kept alive, so that no other object can get the identity of one.
        identity: Differs where the attribute was set anew.
        versions: Differ where a tensor was changed in place.
    """

    name: str
    value: Any
    slots: dict[str, Any]
    slot: str
    leaves: tuple[Any, ...]
    identity: tuple[Any, ...]
    versions: tuple[int, ...]

    @property
    def is_tensor(self) -> bool:
        return _is_tensor(self.value)


Look = dict[tuple[int, str], _Attribute]


class CarriedState:
    """Detector of state that one step leaves for the next.

    It compares the attributes of a job's modules and workload around each of three steps: attributes that the first
    step creates may stay; those that later steps set anew may not be read by the next step.
    """

    def __init__(self, job: TrainingJob) -> None:
        self._job = job
        self._looks = [_look(job)]
        tensors = [leaf for found in self._looks[0].values() for leaf in found.leaves if _is_tensor(leaf)]
        registered = {id(tensor) for tensor in [*job.model.parameters(), *job.model.buffers()]}
        own = [t for t in tensors if id(t) not in registered and t.device.type == job.device.type]
        self._kept = [(t, t.detach().clone(), _version(t)) for t in own]

    @contextmanager
    def step(self) -> Iterator[None]:
        """Wrap a step, to find state that it carries to the next one.

        Raises:
            CaptureError: A graph cannot follow a way in which state is carried to the next step.
        """
        read: set[str] = set()
        watched = self._watch(read.add) if len(self._looks) == 3 else []
        try:
            yield
        finally:
            for attribute, stand_in in watched:
                if attribute.slots.get(attribute.slot) is stand_in:
                    attribute.slots[attribute.slot] = attribute.value
        self._looks.append(_look(self._job))
        if len(self._looks) == 4:
            self._check(harmless={attribute.name for attribute, _ in watched} - read)

    def restore(self) -> None:
        """Undo the in-place changes that the steps made to attributes; `StepState` restores parameters and buffers."""
        import torch

        with torch.no_grad():
            for tensor, kept, version in self._kept:
                if _version(tensor) != version:
                    tensor.copy_(kept)

    def _watch(self, on_read: Callable[[str], None]) -> list[tuple[_Attribute, torch.Tensor]]:
        """Replace each tensor that the last step assigned to an attribute; its replacement reports when it is read."""
        before, now = self._looks[-2:]
        watched = []
        for key, attribute in now.items():
            if attribute.is_tensor and (key not in before or before[key].identity != attribute.identity):
                stand_in = _watched(attribute.value, attribute.name, on_read)
                attribute.slots[attribute.slot] = stand_in
                watched.append((attribute, stand_in))
        return watched

    def _check(self, harmless: set[str]) -> None:
        first, _, before, now = self._looks
        for key in now | before:
            new, old = now.get(key), before.get(key)
            found = new or old
            assert found is not None
            if new is None or old is None or new.identity != old.identity:
                if found.name not in harmless:
                    raise CaptureError(_set_anew(old, new))
            elif new.versions != old.versions:
                self._check_in_place(new, is_new=key not in first or first[key].identity != new.identity)

    def _check_in_place(self, attribute: _Attribute, *, is_new: bool) -> None:
        others = {t.device.type for t in attribute.leaves if _is_tensor(t)} - {self._job.device.type}
        if others:
            raise CaptureError(
                f"{attribute.name} is on the {', '.join(sorted(others))} and changes in every step, but a CUDA "
                f"graph on the {self._job.device.type} would not update it: register it as a buffer "
                "(register_buffer), so that it moves with the model"
            )
        if is_new:
            raise CaptureError(
                f"{attribute.name} is created in the first step and changed in place from then on, so Steptune "
                "cannot undo its changes after the warm-up steps: create it together with its module "
                "(register_buffer)"
            )


def _set_anew(old: _Attribute | None, new: _Attribute | None) -> str:
    found = new or old
    assert found is not None
    if found.is_tensor:
        how = "holds a new tensor after every step, which the next step reads"
    elif any(_is_tensor(leaf) for leaf in found.leaves):
        how = "holds new tensors after every step, which the next step may read"
    else:
        how = f"changes in every step (from {_shown(old)} to {_shown(new)})"
    return (
        f"{found.name} {how}, but a CUDA graph runs no Python and would keep the value of the recorded step: "
        "register it as a buffer (register_buffer) and change it in place, for example with self.count.add_(1)"
    )


def _shown(attribute: _Attribute | None) -> str:
    if attribute is None:
        return "nothing"
    return repr(attribute.value)[:80] if isinstance(attribute.value, _PLAIN) else f"{len(attribute.leaves)} items"


# --- looking --------------------------------------------------------------------------------------


def _look(job: TrainingJob) -> Look:
    from torch import nn

    internal = vars(nn.Module()).keys()
    found: Look = {}
    owners = [(type(job.workload).__name__, job.workload)]
    owners += [(name or type(module).__name__, module) for name, module in job.model.named_modules()]
    for owner, holder in owners:
        attributes = vars(holder)
        for slots in (attributes, attributes.get("_buffers", {}), attributes.get("_parameters", {})):
            for slot, value in slots.items():
                if slots is not attributes or slot not in internal:
                    leaves = tuple(_leaves(value))
                    found[id(slots), slot] = _Attribute(
                        name=f"{owner}.{slot}",
                        value=value,
                        slots=slots,
                        slot=slot,
                        leaves=leaves,
                        identity=tuple(_identity(leaf) for leaf in leaves),
                        versions=tuple(_version(leaf) for leaf in leaves if _is_tensor(leaf)),
                    )
    return found


def _leaves(value: Any, depth: int = MAX_DEPTH) -> Iterator[Any]:
    """Yield the leaves of nested containers, and the keys of mappings."""
    if isinstance(value, Mapping) and depth and len(value) <= MAX_ITEMS:
        for key, item in value.items():
            yield key
            yield from _leaves(item, depth - 1)
    elif isinstance(value, list | tuple | set | deque) and depth and len(value) <= MAX_ITEMS:
        for item in value:
            yield from _leaves(item, depth - 1)
    else:
        yield value


def _identity(leaf: Any) -> Any:
    if isinstance(leaf, _PLAIN):
        return repr(leaf)
    if hasattr(leaf, "tobytes") and leaf.nbytes <= MAX_ARRAY_BYTES:
        return leaf.tobytes()
    return id(leaf)


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "data_ptr")


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _watched(tensor: torch.Tensor, name: str, on_read: Callable[[str], None]) -> torch.Tensor:
    """Return an alias of a tensor that calls `on_read` whenever an operator uses its values; reading shape, dtype or
    device does not count.
    """
    import torch

    described = {torch.Tensor.size, torch.Tensor.dim}
    described |= {getattr(torch.Tensor, n).__get__ for n in ("shape", "dtype", "device", "ndim")}

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            if func not in described:
                on_read(name)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    return tensor.detach().as_subclass(Watched)

"""Records of a trial's guarded steps, to be compared with the reference's in another process.

The first steps continue from the reference's weights; each of the following steps begins from these weights again, so
that gradients can be compared without accumulated differences, and the last of these steps run in FP32. Random numbers
are seeded at every step, dropout is off, and where the batches differ from the reference's, the loop gets those of the
reference: its loader is judged separately.
"""

from __future__ import annotations

import hashlib
import random
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from .calls import Calls, may_drop
from .held_tensors import HeldTensors
from .other_layout import put_in_other_layout
from .outputs import Outputs
from .wide import Wide

SAMPLED_ELEMENTS = 512
"""Maximum number of elements sampled from each tensor, evenly spread, as in `trials/update_watch.py`."""
FLAGS = ("foreach", "fused", "capturable", "differentiable")
PROBED_SAMPLES, PROBED_SEEDS = 2, 16
FP32_ROUNDOFF = 2.0**-24


class GuardWatch:
    """Recorder of the guarded steps of one process.

    Args:
        settings: steps, audits, wide (audits in FP32), seed, disturb (a unit roundoff, or 0), noise (its seed),
            outputs (whether outputs in 16 bits are computed in FP32 as well), reference (folder of the reference's
            files, or None where this is the reference).
        target: File for the record; the data that the reference provides to candidates lies in the same folder.
        numbers: Numbers of the optimizers that make a step.

    Attributes:
        over: Whether all guarded steps are done.
    """

    def __init__(self, settings: dict[str, Any], target: Path, numbers: tuple[int, ...]) -> None:
        self._settings = settings
        self._target = target
        self._numbers = numbers
        self._reference = Path(settings["reference"]) if settings["reference"] else None
        self._known: dict[str, Any] = {}
        self._initial: dict[str, torch.Tensor] = {}
        self._optimizers: dict[int, Any] = {}
        self._began_state: dict[int, dict[Any, dict[str, Any]]] = {}
        self._modules: list[torch.nn.Module] = []
        self._steps: list[dict[str, Any]] = []
        self._losses: list[torch.Tensor] = []
        self._updates: list[dict[str, Any]] = []
        self._pending: dict[int, dict[str, Any]] = {}
        self._hashes: list[str] = []
        self._batches: list[Any] = []
        self._indices: list[Any] = []
        self._notes: list[str] = []
        self._began = False
        self._num_fed = 0
        self.same_initial = True
        self.over = False
        self._generators: dict[torch.device, torch.Generator] = {}
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self._calls = Calls()
        self._outputs = Outputs(self._calls.set_aside)
        self._held: HeldTensors | None = None
        self._buffers: dict[str, torch.Tensor] = {}
        self._wide_steps: list[dict[str, Any]] = []
        self._wide = Wide(looks=bool(settings["disturb"]))
        self._is_wide = False
        self._undone = ExitStack()
        self._undone.callback(self._calls.restore)
        self._undone.callback(self._outputs.end)
        if settings["disturb"]:  # hooks in every module would break a compiled graph into hundreds
            self._undone.enter_context(torch.compiler.set_stance("force_eager"))
        self._undone.callback(self._wide.end)  # before the stance, which it took over
        self._undone.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self._undone.callback(register_optimizer_step_post_hook(self._after_step).remove)

    def seed(self, step: int) -> None:
        """Seed every random generator that a loop may draw from."""
        seed = self._settings["seed"] + step
        torch.manual_seed(seed)
        random.seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed % 2**32)

    def _load(self) -> None:
        """Read the reference's files when they are first needed: a launcher, which does not train, never reads them."""
        if self._reference is not None and not self._known:
            self._known = torch.load(self._reference / self._target.name, weights_only=False)
            stored = self._reference / _batches(self._target)
            self._batches = torch.load(stored, weights_only=False) if stored.exists() else []

    # --- marks ----------------------------------------------------------------------------------

    def made_optimizer(self, optimizer: Any, number: int) -> None:
        """Register an optimizer of the step."""
        if number in self._numbers:
            self._optimizers[number] = optimizer

    def called(self, module: torch.nn.Module) -> None:
        """Set the reference's weights, before the first forward pass with gradients enabled."""
        self._begin()
        if not any(module is known for known in self._modules):
            place = len(self._modules)
            self._modules.append(module)
            if may_drop(module):
                self._calls.switch_off()
            self._start(f"module {place}.", dict(module.named_buffers()))
            self._buffers = {**self._sampled_buffers(), **self._buffers}  # those of earlier modules may have changed
            self._disturb(module)
            if self._settings["outputs"] and not self._steps:
                self._outputs.watch(f"module {place}.", module)

    def loss(self, tensors: Any) -> None:
        """Note the tensors from which a backward pass begins."""
        self._begin()
        first = tensors[0] if isinstance(tensors, list | tuple) and tensors else tensors
        if isinstance(first, torch.Tensor):
            self._losses.append(first.detach().double().sum().cpu())

    def drew(self, indices: list[Any]) -> None:
        """Register the list of indices that a training loader's sampler has given so far."""
        self._indices = indices

    def fed(self, batch: Any) -> Any:
        """Return the batch for the loop: the reference's, if the loader's differs from it."""
        self._load()
        place, own = len(self._hashes), hash_of(batch)
        self._hashes.append(own)
        if self._reference is None:
            self._batches.append(_copied(batch))
            return batch
        known = self._known.get("hashes", [])
        if place < len(known) and place < len(self._batches) and own != known[place]:
            self._num_fed += 1
            return _copied(self._batches[place])
        return batch

    def step_ended(self, loader: Any) -> None:
        """Finish a guarded step, and restore the reference's weights if the next step begins from them."""
        losses = [float(loss) for loss in self._losses]
        buffers = self._sampled_buffers()
        changes = {name: _change(self._buffers.get(name, value * 0), value) for name, value in buffers.items()}
        step = {"losses": losses, "updates": self._updates, "buffers": changes, "calls": self._calls.take()}
        step["held"] = {} if self._held is None else self._held.sampled(sampled)
        (self._wide_steps if self._is_wide else self._steps).append(step)
        self._losses, self._updates = [], []
        self._outputs.end()
        count, num_fine = len(self._steps) + len(self._wide_steps), self._settings["steps"] + self._settings["audits"]
        if count >= num_fine + self._settings["wide"]:
            self._finish(loader)
            return
        if count == num_fine:
            self._is_wide = True
            self._wide.begin()
        if count >= self._settings["steps"]:
            self._restart()
            buffers = self._sampled_buffers()
        self._buffers = buffers
        self.seed(count)

    def _sampled_buffers(self) -> dict[str, torch.Tensor]:
        return {
            f"module {place}.{name}": sampled(buffer)
            for place, module in enumerate(self._modules)
            for name, buffer in module.named_buffers()
            if buffer.is_floating_point()
        }

    # --- weights --------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._began:
            return
        self._began = True
        self._load()
        self._calls.watch()
        parameters = [p for optimizer in self._optimizers.values() for p in _named(optimizer).values()]
        own = [leaf for leaf in _leaves([self._known, self._batches]) if isinstance(leaf, torch.Tensor)]
        self._held = HeldTensors(parameters, own)
        for number, optimizer in self._optimizers.items():
            self._start(f"optimizer {number}.", _named(optimizer))
            self._began_state[number] = {key: _copied(state) for key, state in optimizer.state.items()}

    def _start(self, prefix: str, tensors: dict[str, torch.Tensor]) -> None:
        """Copy the reference's initial values, if known, into the tensors; record the tensors' values as this run's
        initial ones.
        """
        known = self._known.get("initial", {})
        with torch.no_grad():
            for name, tensor in tensors.items():
                key = prefix + name
                fits = key in known and known[key].shape == tensor.shape
                if fits and not torch.equal(known[key].to(tensor.device), tensor):
                    self.same_initial = False
                    tensor.copy_(known[key])
                self._initial[key] = tensor.detach().clone().cpu()
        if self._settings["disturb"] and prefix.startswith("optimizer"):
            self._disturb_values(tensors)

    def _restart(self) -> None:
        with torch.no_grad():
            for number, optimizer in self._optimizers.items():
                parameters = _named(optimizer)
                for name, parameter in parameters.items():
                    parameter.copy_(self._initial[f"optimizer {number}.{name}"])
                optimizer.state.clear()
                optimizer.state.update(_copied(self._began_state[number]))  # some is made with the optimizer
                if self._settings["disturb"]:
                    self._disturb_values(parameters)
            for place, module in enumerate(self._modules):
                for name, buffer in module.named_buffers():
                    if f"module {place}.{name}" in self._initial:
                        buffer.copy_(self._initial[f"module {place}.{name}"])

    # --- rounding -------------------------------------------------------------------------------

    def _disturb_values(self, tensors: dict[str, Any]) -> None:
        with torch.no_grad():
            for tensor in tensors.values():
                if tensor.is_floating_point():
                    tensor.copy_(_moved(tensor, self._steps_of(tensor)))

    def _steps_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return relative noise for a tensor, with a size of about one unit roundoff.

        The noise is uniform within the unit roundoff or, where that is the roundoff of the tensor's own dtype, a step
        to a neighbouring number with a probability that makes the mean distance one unit roundoff. It is drawn on the
        tensor's device: the host would take minutes for a step of a large model.
        """
        unit, device = FP32_ROUNDOFF if self._is_wide else self._settings["disturb"], tensor.device
        if device not in self._generators:
            seed = self._settings["seed"] + self._settings["noise"]
            self._generators[device] = torch.Generator(device).manual_seed(seed)
        noise = torch.rand(tensor.shape, generator=self._generators[device], device=device, dtype=torch.float32)
        noise.mul_(2).sub_(1)
        own = torch.finfo(tensor.dtype).eps / 2
        if own < unit:
            return noise.mul_(unit).to(tensor.dtype)
        return torch.where(noise.abs() < unit / own, noise.sign(), 0.0).mul_(1.25 * own).to(tensor.dtype)

    def _disturb(self, module: torch.nn.Module) -> None:
        """Disturb the outputs of every module without children, and the gradients that flow back through them."""
        if not self._settings["disturb"]:
            return

        def disturb(_: Any, arguments: Any, output: Any) -> Any:
            return self._disturbed(output)

        for part in module.modules():
            if next(part.children(), None) is None:
                self._undone.callback(put_in_other_layout(part))
                self._undone.callback(part.register_forward_hook(disturb).remove)

    def _disturbed(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and not self.over:
            return _Disturbed.apply(value, self._steps_of(value))  # type: ignore[no-untyped-call]
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return tuple(self._disturbed(part) for part in value)
        return value

    # --- updates --------------------------------------------------------------------------------

    def _before_step(self, optimizer: Any, arguments: Any, options: Any) -> Any:
        number = next((n for n, known in self._optimizers.items() if known is optimizer), None)
        if number is None or self.over:
            return None
        closure = options.get("closure") if "closure" in options else arguments[1] if len(arguments) > 1 else None
        if closure is None:
            self._look(optimizer, number)
            return None

        def watched() -> Any:  # forward and backward run in here
            result = closure()
            self._look(optimizer, number)
            return result

        if "closure" in options:
            return arguments, {**options, "closure": watched}
        return (arguments[0], watched, *arguments[2:]), options

    def _look(self, optimizer: Any, number: int) -> None:
        named = _named(optimizer)
        gradients = {n: p.grad for n, p in named.items() if p.grad is not None and p.grad.layout is torch.strided}
        scale = getattr(optimizer, "grad_scale", None)
        by = 1.0 if scale is None else 1.0 / float(scale)
        norm = torch.nn.utils.get_total_norm(list(gradients.values())) if gradients else torch.zeros(())
        self._pending[number] = {
            "number": number,
            "kind": type(optimizer).__name__,
            "module": type(optimizer).__module__,
            "groups": [_group(optimizer, group) for group in optimizer.param_groups],
            "before": {name: sampled(p) for name, p in named.items()},
            "gradients": {name: sampled(gradient) * by for name, gradient in gradients.items()},
            "norm": float(norm) * by,
            "roundoff": max((torch.finfo(p.dtype).eps for p in named.values()), default=0.0),
        }

    def _after_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        number = next((n for n, known in self._optimizers.items() if known is optimizer), None)
        update = self._pending.pop(number, None) if number is not None else None
        if update is None:
            return
        named = _named(optimizer)
        update["after"] = {name: sampled(p) for name, p in named.items()}
        update["states"] = {
            name: {
                key: sampled(value)
                for key, value in optimizer.state.get(p, {}).items()
                if getattr(value, "shape", None) == p.shape
            }
            for name, p in named.items()
        }
        self._updates.append(update)

    # --- the end --------------------------------------------------------------------------------

    def give_back(self) -> None:
        """Undo this recorder's changes to torch: remove its hooks, and restore dropout and compiled execution."""
        self.over = True
        self._undone.close()

    def _finish(self, loader: Any) -> None:
        self.give_back()
        seen = {
            "steps": self._steps,
            "hashes": self._hashes,
            "indices": [_plain(index) for index in self._indices],
            "same_initial": self.same_initial,
            "num_fed": self._num_fed,
            "repeats": None if self._reference is not None else _repeats(loader),
            "dropout": self._calls.used,
            "wide": self._wide_steps,
            "wide_has_16_bits": self._wide.has_16_bits,
            "outputs": self._outputs.seen,
            "roundoffs": {} if self._held is None else self._held.roundoffs,
            "too_many_held": self._held is not None and self._held.are_too_many,
            "notes": self._notes,
        }
        if self._reference is None:
            seen["initial"] = self._initial
            _save(self._batches, self._target.with_name(_batches(self._target)), self._notes)
        torch.save(seen, self._target)
        self._initial, self._batches, self._steps, self._wide_steps, self._held = {}, [], [], [], None


def _moved(tensor: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Return `tensor * (1 + steps)`, computed in a wider dtype and rounded once."""
    wide = torch.float64 if steps.dtype.itemsize >= 4 else torch.float32
    return (tensor.to(wide) * steps.to(wide).add_(1)).to(tensor.dtype)


class _Disturbed(torch.autograd.Function):
    """Autograd function that multiplies a tensor, and in the backward pass its gradient, by `1 + steps`."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(steps)
        return _moved(tensor, steps)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (steps,) = ctx.saved_tensors
        return _moved(gradients[0], steps), None


def _change(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return the change of values; an infinity or NaN that stays counts as no change."""
    stayed = (before == after) | (before.isnan() & after.isnan())
    return (after - before).masked_fill(stayed, 0.0)


def _named(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's parameters by their position in it, which is the same in every run."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {f"parameter {place}": parameter for place, parameter in enumerate(parameters)}


def _group(optimizer: Any, group: dict[str, Any]) -> dict[str, Any]:
    own = {id(parameter) for parameter in group["params"]}
    names = [name for name, p in _named(optimizer).items() if id(p) in own and p.grad is not None]
    options = {key: _plain(value) for key, value in group.items() if key not in ("params", *FLAGS)}
    return {"names": names, "options": {key: value for key, value in options.items() if _is_plain(value)}}


def _is_plain(value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    return all(item is None or isinstance(item, bool | int | float | str) for item in items)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return value.item() if hasattr(value, "item") else value


def sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Return evenly spread elements in FP64 on the CPU: the same ones for all tensors of one shape, in any layout."""
    tensor = tensor.detach()
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    stride = max(1, flat.numel() // SAMPLED_ELEMENTS)
    return flat[::stride][:SAMPLED_ELEMENTS].double().cpu().clone()


def hash_of(value: Any) -> str:
    """Return a hash of a batch's content, independent of its device and of pinning."""
    digest = hashlib.sha1(usedforsecurity=False)
    for leaf in _leaves(value):
        if isinstance(leaf, torch.Tensor):
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            dense = leaf.detach().to_dense() if leaf.layout is not torch.strided else leaf.detach()
            digest.update(dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif hasattr(leaf, "tobytes"):
            digest.update(leaf.tobytes())
        elif isinstance(leaf, str | bytes | int | float | bool | None):
            digest.update(repr(leaf).encode())
    return digest.hexdigest()


def _leaves(value: Any) -> Any:
    if isinstance(value, dict):
        for key in value:
            yield from _leaves(value[key])
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _leaves(part)
    elif hasattr(value, "__dict__") and not isinstance(value, torch.Tensor):
        yield from _leaves(vars(value))
    else:
        yield value


def _copied(value: Any) -> Any:
    """Return a deep copy of a batch or a state, so that the loop may change its tensors."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_copied, value))
    if isinstance(value, list | tuple):
        return type(value)(map(_copied, value))
    if type(value) is dict:
        return {key: _copied(part) for key, part in value.items()}
    import copy

    return copy.deepcopy(value)


def _repeats(loader: Any) -> bool | None:
    """Say whether a loader's dataset gives the same samples each time; None where that cannot be determined."""
    dataset = getattr(loader, "dataset", None)
    if dataset is None or isinstance(dataset, torch.utils.data.IterableDataset):
        return None
    try:
        for index in range(min(PROBED_SAMPLES, len(dataset))):
            found = set()
            for seed in range(PROBED_SEEDS):  # many: a sample may be drawn from two
                torch.manual_seed(seed)
                random.seed(seed)
                if "numpy" in sys.modules:
                    sys.modules["numpy"].random.seed(seed)
                found.add(hash_of(dataset[index]))
                if len(found) > 1:
                    return False
    except Exception:
        return None
    return True


def _save(value: Any, path: Path, notes: list[str]) -> None:
    try:
        torch.save(value, path)
    except Exception as error:
        notes.append(f"batches cannot be stored ({type(error).__name__})")
        path.unlink(missing_ok=True)


def _batches(target: Path) -> str:
    return f"batches-of-{target.name}"

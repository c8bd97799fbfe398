"""Description of a script's training as plain values, read once from the objects that its steps used."""

from __future__ import annotations

import gc
import inspect
import os
import platform
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from .observed_loop import ObservedLoop
from .places import frames, is_users

TRAINERS = {
    "transformers.trainer": "Trainer",
    "lightning.pytorch.trainer.trainer": "Trainer",
    "pytorch_lightning.trainer.trainer": "Trainer",
    "ignite.engine.engine": "Engine",
    "composer.trainer.trainer": "Trainer",
    "fastai.learner": "Learner",
}
"""Library modules and, in each, the class that owns a training loop: its method is on the call stack during a step."""
TRAINER_SETTINGS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "accumulate_grad_batches",
    "bf16",
    "fp16",
    "precision",
    "torch_compile",
    "gradient_checkpointing",
    "optim",
    "dataloader_num_workers",
)
WRAPPERS = {
    "DistributedDataParallel": "DistributedDataParallel",
    "FullyShardedDataParallel": "FSDP",
    "FSDPModule": "FSDP2",
    "DataParallel": "DataParallel",
    "OptimizedModule": "torch.compile",
    "PeftModel": "PEFT",
    "DeepSpeedEngine": "DeepSpeed",
}
"""Display names of module wrappers, by the name of the wrapper's class or of one of its base classes."""


def process_description() -> dict[str, Any]:
    """Describe the process: its id, command and folder, and the versions of Python and torch."""
    return {
        "pid": os.getpid(),
        "command": list(sys.orig_argv),
        "folder": str(Path.cwd()),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def loader_values(loader: Any) -> dict[str, Any]:
    """Return the attributes of a loader that matter for speed."""
    sampler = getattr(loader, "batch_sampler", None)
    batch_size = loader.batch_size if loader.batch_size is not None else getattr(sampler, "batch_size", None)
    iterable = isinstance(loader.dataset, torch.utils.data.IterableDataset)
    return {
        "kind": type(loader).__name__,
        "dataset": type(loader.dataset).__name__,
        "iterable": iterable,
        "batch_size": batch_size if isinstance(batch_size, int) else None,
        "num_batches": None if iterable else _length(loader),
        "num_workers": loader.num_workers,
        "pin_memory": bool(loader.pin_memory),
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": bool(loader.persistent_workers),
    }


def _length(loader: Any) -> int | None:
    """Return the number of batches in an epoch; None if the loader has no length. Do not call this for iterable
    datasets: once asked for its length, their loader warns if it gives more batches.
    """
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


class Description:
    """Description of the observed parts of the training."""

    def __init__(self, loop: ObservedLoop) -> None:
        self._loop = loop
        self._optimizers = {made.number: (optimizer, made.place) for optimizer, made in loop.optimizers.items()}

    def as_dict(self) -> dict[str, Any]:
        loop = self._loop
        frame, trainer = _stack()
        return {
            "step": self._step(frame),
            "loaders": [
                {
                    "number": made.number,
                    "place": made.place,
                    "num_backwards": made.num_backwards,
                    "sample_ns": loop.samples.sample_ns(made.number),
                    **made.values,
                }
                for made in loop.loaders
            ],
            "models": self._models(),
            "optimizers": [self._optimizer(number) for number in sorted(self._optimizers)],
            "notes": {kind: dict(counts) for kind, counts in loop.notes.items()},
            "num_calls_without_grad": loop.num_calls_without_grad,
            "trainer": trainer or _accelerate(),
            "device": self._device(),
            "device_name": _device_name(self._device()),
            "settings": _torch_settings(),
        }

    def _step(self, place: str) -> dict[str, Any]:
        loop = self._loop
        (backwards, batches), count = (loop.kinds.most_common(1) or [((0, 0), 0)])[0]
        return {
            "optimizers": list(loop.finder.pattern) if loop.finder.pattern is not None else None,
            "kinds": [loop.optimizer_kinds[number] for number in loop.finder.pattern or ()],
            "num_backwards": backwards,
            "num_batches": batches,
            "share": count / max(1, loop.kinds.total()),
            "place": place,
        }

    def _optimizer(self, number: int) -> dict[str, Any]:
        optimizer, place = self._optimizers[number]
        groups = optimizer.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        first = groups[0] if groups else {}
        pattern = self._loop.finder.pattern
        return {
            "number": number,
            "place": place,
            "kind": type(optimizer).__name__,
            "num_parameters": sum(parameter.numel() for parameter in parameters),
            "num_groups": len(groups),
            "implementation": next((name for name in ("fused", "foreach", "capturable") if first.get(name)), ""),
            "implementations": _implementations(type(optimizer)),
            "module": type(optimizer).__module__,
            "in_step": pattern is not None and number in pattern,
        }

    def _models(self) -> list[dict[str, Any]]:
        """Return descriptions of the outermost modules that were called with gradients enabled; if there are none, of
        the modules that own trained parameters.
        """
        called = dict(self._loop.called_modules)
        seen = bool(called)
        if not called:
            called = dict.fromkeys(_owners(self._trained()), 0)
        inside = {id(part) for module in called for part in module.modules() if part is not module}
        outermost = [module for module in called if id(module) not in inside]
        return [self._model(module, called[module], seen) for module in outermost]

    def _trained(self) -> set[int]:
        pattern = self._loop.finder.pattern
        chosen = [self._optimizers[number][0] for number in pattern or self._optimizers if number in self._optimizers]
        return {id(p) for optimizer in chosen for group in optimizer.param_groups for p in group["params"]}

    def _model(self, module: torch.nn.Module, num_calls: int, seen: bool) -> dict[str, Any]:
        parameters = list(module.parameters())
        trained = self._trained()
        names = Counter[str]()
        for parameter in parameters:
            names[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
        kinds = [type(part) for part in module.modules()]
        return {
            "kind": type(_unwrapped(module)).__name__,
            "num_parameters": sum(parameter.numel() for parameter in parameters),
            "num_trained": sum(p.numel() for p in parameters if p.requires_grad),
            "num_in_optimizer": sum(p.numel() for p in parameters if id(p) in trained),
            "dtypes": dict(names),
            "num_tensors": len(parameters),
            "module_types": dict(Counter(kind.__name__ for kind in kinds)),
            "device": str(parameters[0].device) if parameters else "",
            "num_calls": num_calls if seen else None,
            "place": self._loop.module_places.get(module, ""),
            "wrappers": _wrappers(module),
            "compiled": any(getattr(part, "_compiled_call_impl", None) is not None for part in module.modules())
            or any(kind.__name__ == "OptimizedModule" for kind in kinds),
            "checkpointed": any(
                getattr(part, "gradient_checkpointing", False) is True or type(part).__name__ == "CheckpointWrapper"
                for part in module.modules()
            ),
            "sparse": any(getattr(part, "sparse", False) is True for part in module.modules()),
            "channels_last": any(
                p.dim() == 4 and p.is_contiguous(memory_format=torch.channels_last) and not p.is_contiguous()
                for p in parameters
            ),
        }

    def _device(self) -> str:
        for optimizer, _ in self._optimizers.values():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    return str(parameter.device.type)
        for module in self._loop.called_modules:
            return str(next(module.parameters()).device.type)
        return "cpu"


def _implementations(kind: type) -> list[str]:
    """Return the implementations of the update that a class of torch's optimizers supports."""
    if not kind.__module__.startswith("torch.optim"):
        return []
    names = inspect.signature(kind).parameters
    loop = ["for_loop"] if "foreach" in names else []
    return loop + [name for name in ("foreach", "fused") if name in names]


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    while True:
        bases = {base.__name__ for base in type(module).__mro__}
        inner = module.__dict__.get("_modules", {})
        if bases & {"DistributedDataParallel", "DataParallel"}:
            module = inner["module"]
        elif "OptimizedModule" in bases:
            module = inner["_orig_mod"]
        else:
            return module


def _wrappers(module: torch.nn.Module) -> list[str]:
    names = [
        WRAPPERS[base.__name__] for part in module.modules() for base in type(part).__mro__ if base.__name__ in WRAPPERS
    ]
    return list(dict.fromkeys(names))


def _owners(trained: set[int]) -> list[torch.nn.Module]:
    """Return, from all objects of the process, the modules that own trained parameters and are not part of another such
    module.
    """
    found = []
    for thing in gc.get_objects():
        kind = type(thing)
        if issubclass(kind, torch.nn.Module) and "_modules" in thing.__dict__:
            owned = {id(parameter) for parameter in thing.parameters()}
            if owned & trained:
                found.append(thing)
    inside = {id(part) for module in found for part in module.modules() if part is not module}
    return [module for module in found if id(module) not in inside]


def _stack() -> tuple[str, dict[str, Any] | None]:
    """Return the line of the user's loop that ends a step, and the library that owns the loop, if any."""
    place, trainer = "", None
    for frame in frames():
        if not place and is_users(frame.f_code.co_filename):
            place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        module = frame.f_globals.get("__name__", "")
        owner = frame.f_locals.get("self")
        bases = {base.__name__ for base in type(owner).__mro__}
        if trainer is None and TRAINERS.get(module) in bases:
            trainer = _trainer(module, owner)
    return place, trainer


def _trainer(module: str, owner: Any) -> dict[str, Any]:
    holder = getattr(owner, "args", owner)
    settings = {}
    for name in TRAINER_SETTINGS:
        value = getattr(holder, name, None)
        if value is not None and not callable(value):
            settings[name] = str(getattr(value, "value", value))
    base = next(base for base in type(owner).__mro__ if base.__module__ == module)
    methods = ("compute_loss", "training_step", "get_train_dataloader", "create_optimizer")
    changed = [name for name in methods if getattr(type(owner), name, None) is not getattr(base, name, None)]
    return {
        "library": module.partition(".")[0],
        "kind": type(owner).__name__,
        "settings": settings,
        "overrides": changed,
    }


def _accelerate() -> dict[str, Any] | None:
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    shared = getattr(state, "_shared_state", None)
    if not shared:
        return None
    gradient = getattr(sys.modules["accelerate.state"].GradientState, "_shared_state", {})
    plugin = gradient.get("plugin_kwargs", {})
    settings = {
        "mixed_precision": str(shared.get("_mixed_precision", "")),
        "gradient_accumulation_steps": str(plugin.get("num_steps", 1)),
        "distributed_type": str(getattr(shared.get("distributed_type"), "value", "")),
    }
    return {"library": "accelerate", "kind": "Accelerator", "settings": settings, "overrides": []}


def _device_name(device: str) -> str:
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    return f"{os.cpu_count()} CPU cores"


def _matmul_precision() -> str:
    """Return the precision of FP32 matmuls. This repeats `training/fp32_products.py`, which a script's process cannot
    import.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # an operator was set by itself
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"


def _torch_settings() -> dict[str, Any]:
    return {
        "num_threads": torch.get_num_threads(),
        "matmul_precision": _matmul_precision(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
    }

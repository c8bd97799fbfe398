"""Changes of a trial, applied to the objects that the inspection recorded, as if the script's own lines made them.

Flags are set at the first event of training, because scripts set them too; loaders are changed when their iterator is
made, optimizers when they are made, modules when they are called with gradients for the first time. Changes that were
made are recorded, so that one that was never reached does not count as effective.
"""

from __future__ import annotations

from typing import Any

import torch

LOADER = "loader."
KNOWN = (
    *("loader.num_workers", "loader.pin_memory", "loader.prefetch_factor", "loader.persistent_workers"),
    *("optimizer", "channels_last", "autocast", "compile", "compile_dynamic"),
    *("num_threads", "cudnn_benchmark", "cudnn_tf32", "matmul_precision", "flush_denormals"),
)
"""Names of all changes."""


class Changes:
    """Changes by name, and their results.

    Args:
        wanted: Changes by name, as the strategies state them in `outside`.
        loader: Number of the loader whose batches train.
        place: Line at which this loader was made, where known: a script that makes a new loader for every epoch makes
            each there.
        optimizers: Numbers of the optimizers that make a step.
        models: Classes of the modules that are called with gradients.

    Attributes:
        applied: State that was seen after each change, by its name.
    """

    def __init__(
        self,
        wanted: dict[str, Any],
        loader: int | None,
        place: str,
        optimizers: tuple[int, ...],
        models: tuple[str, ...],
    ) -> None:
        self._wanted = wanted
        self._loader, self._place = loader, place
        self._optimizers = optimizers
        self._models = list(models)
        self._began = False
        self.applied: dict[str, str] = {}

    @property
    def awaits_modules(self) -> bool:
        """Say whether at least one module to be changed has not been called yet."""
        return bool(self._models) and any(self._wanted.get(name) for name in ("autocast", "compile", "channels_last"))

    def begin(self) -> None:
        """Set torch's global flags in this process, at most once."""
        if self._began:
            return
        self._began = True
        wanted = self._wanted
        if wanted.get("num_threads") is not None:
            torch.set_num_threads(wanted["num_threads"])
            self.applied["num_threads"] = str(torch.get_num_threads())
        if "cudnn_benchmark" in wanted:
            torch.backends.cudnn.benchmark = bool(wanted["cudnn_benchmark"])
            self.applied["cudnn_benchmark"] = str(torch.backends.cudnn.benchmark)
        if "cudnn_tf32" in wanted:
            torch.backends.cudnn.allow_tf32 = bool(wanted["cudnn_tf32"])
            self.applied["cudnn_tf32"] = str(torch.backends.cudnn.allow_tf32)
        if "matmul_precision" in wanted:
            torch.set_float32_matmul_precision(wanted["matmul_precision"])
            self.applied["matmul_precision"] = torch.get_float32_matmul_precision()
        if "flush_denormals" in wanted:
            possible = torch.set_flush_denormal(bool(wanted["flush_denormals"]))
            self.applied["flush_denormals"] = str(bool(wanted["flush_denormals"]) and possible)

    def loader(self, loader: Any, number: int, place: str) -> None:
        """Change a loader that gives the batches for training, just before its iterator is made."""
        if number != self._loader and (not place or place != self._place):
            return
        for name, value in self._wanted.items():
            if name.startswith(LOADER):
                attribute = name.removeprefix(LOADER)
                object.__setattr__(loader, attribute, value)  # loaders refuse some once they are made
                self.applied[name] = str(getattr(loader, attribute))

    def optimizer(self, optimizer: Any, number: int) -> None:
        """Set an optimizer's implementation, before its class has read its parameter groups."""
        name = self._wanted.get("optimizer")
        if name is None or number not in self._optimizers:
            return
        flags = {"fused": name == "fused", "foreach": name == "foreach"}

        def chosen(values: dict[str, Any]) -> dict[str, Any]:
            return {**values, **{flag: value for flag, value in flags.items() if flag in values}}

        def keep(_: Any, state: dict[str, Any]) -> dict[str, Any]:
            """Keep the chosen optimizer implementation when a checkpoint is loaded, because the checkpoint has its own
            setting.
            """
            return {**state, "param_groups": [chosen(group) for group in state["param_groups"]]}

        for values in (optimizer.defaults, *optimizer.param_groups):
            values.update(chosen(values))
        optimizer.register_load_state_dict_pre_hook(keep)
        if name == "fused":
            optimizer._step_supports_amp_scaling = True
        group = optimizer.param_groups[0]
        ran = next((flag for flag in flags if group.get(flag)), "for_loop")
        self.applied["optimizer"] = ran

    def module(self, module: torch.nn.Module) -> None:
        """Change an outermost module when it is first called with gradients enabled."""
        kind = type(_inner(module)).__name__
        if kind not in self._models:
            return
        self._models.remove(kind)
        wanted = self._wanted
        if wanted.get("channels_last"):
            _to_channels_last(module)
            self.applied["channels_last"] = "True"
        if wanted.get("autocast"):
            _to_autocast(module, getattr(torch, wanted["autocast"]))
            self.applied["autocast"] = wanted["autocast"]
        if wanted.get("compile"):
            mode = None if wanted["compile"] == "default" else wanted["compile"]
            module.compile(mode=mode, dynamic=wanted.get("compile_dynamic"))
            self.applied["compile"] = wanted["compile"]
            self.applied["compile_dynamic"] = str(wanted.get("compile_dynamic"))


def _inner(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside data-parallel wrappers."""
    inner = getattr(module, "module", None)
    if type(module).__name__ in ("DistributedDataParallel", "DataParallel") and isinstance(inner, torch.nn.Module):
        return inner
    return module


def _to_channels_last(module: torch.nn.Module) -> None:
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)

    def convert(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() == 4 and value.is_floating_point():
            return value.contiguous(memory_format=torch.channels_last)
        return value

    def before(_: Any, arguments: Any, options: Any) -> Any:
        return tuple(map(convert, arguments)), {name: convert(value) for name, value in options.items()}

    module.register_forward_pre_hook(before, with_kwargs=True)


def _to_autocast(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Wrap `forward` in autocast. Its output is FP32, as with Accelerate, because the loss is computed outside."""
    forward = module.forward
    device = next(module.parameters()).device.type

    def cast(*arguments: Any, **options: Any) -> Any:
        with torch.autocast(device, dtype=dtype):
            result = forward(*arguments, **options)
        return _to_fp32(result)

    module.forward = cast


def _to_fp32(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
    if isinstance(value, dict):
        for name in list(value):
            value[name] = _to_fp32(value[name])
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_to_fp32, value))
    if isinstance(value, list | tuple):
        return type(value)(map(_to_fp32, value))
    return value

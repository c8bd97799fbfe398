"""Facts about a script from its inspection, in the form that the search uses for workloads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from steptune.tuner.hardware import usable_cores
from steptune.tuner.records import (
    Choice,
    DatasetFacts,
    ModelFacts,
    OptimizerFacts,
    SampleUnit,
    ScriptFacts,
    WorkloadFacts,
)
from steptune.tuner.scripts.agent.sources import counted_lines, source_digest
from steptune.tuner.scripts.record import ScriptModel, ScriptOptimizer, ScriptRecord
from steptune.tuner.strategies.backend_flags.choice import BackendFlagsSetting
from steptune.tuner.strategies.compile.choice import CompileSetting
from steptune.tuner.strategies.cpu_threads.choice import CpuThreadsSetting
from steptune.tuner.strategies.data_loading.choice import DataLoadingSetting
from steptune.tuner.strategies.memory_format.choice import MemoryFormatSetting
from steptune.tuner.strategies.precision.choice import PrecisionSetting
from steptune.tuner.workloads.reference import workload_of

SHARDED = ("DistributedDataParallel", "FSDP", "FSDP2", "DataParallel", "DeepSpeed")
HIGHER_PRECISION = ("high", "medium")


def _files(command: tuple[str, ...], folder: Path, places: Iterable[str]) -> dict[str, str]:
    """Return the text of each Python file that the command or one of `places` (`file:line`) names, by relative path;
    files outside the folder are left out.
    """
    root = folder.resolve()
    named = [*command, *(place.rpartition(":")[0] for place in places)]
    paths = {(folder / name).resolve() for name in named if name.endswith(".py")}
    inside = sorted(path for path in paths if path.is_relative_to(root) and path.is_file())
    return {str(path.relative_to(root)): path.read_text(encoding="utf-8", errors="replace") for path in inside}


def _lines(folder: Path, places: Mapping[str, str], files: Mapping[str, str]) -> dict[str, tuple[str, int]]:
    """Return, for each place in the script, its file and the index of its line. The index does not count blank lines
    and calls of Steptune.
    """
    found = {}
    for name, place in places.items():
        path, _, rest = place.rpartition(":")
        number = int(rest.partition(" ")[0])
        for file, text in files.items():
            counted = counted_lines(text)
            if (folder / path).resolve() == (folder / file).resolve() and number in counted:
                found[name] = (file, counted.index(number))
    return found


def command_digest(command: tuple[str, ...], folder: Path) -> str:
    """Return a hash of the files that a command names, to keep results of an edited script apart."""
    digest = hashlib.sha256()
    for argument in command:
        path = folder / argument
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def workload_facts(command: tuple[str, ...], record: ScriptRecord) -> WorkloadFacts:
    """Return the facts of a script whose steps an inspection has recorded."""
    script = script_facts(command, record)
    loader = record.training_loader
    per_step = max(1, record.step.num_batches)
    counted = loader is not None and loader.batch_size is not None
    batch = (loader.batch_size or 1) * per_step * record.num_ranks if loader is not None and counted else 1
    length = loader.num_batches if loader is not None else None
    return WorkloadFacts(
        reference=workload_of(command),
        name=_name(command),
        signature=_signature(record, batch),
        global_batch=batch,
        sample_unit=SampleUnit.SAMPLE if counted else SampleUnit.STEP,
        dataset=DatasetFacts(
            kind="none" if loader is None else "iterable" if loader.iterable else "map",
            length=None if loader is None or length is None else length * (loader.batch_size or 1),
            sample_bytes=None,
            sample_ns=loader.sample_ns if loader is not None and counted else None,
            deterministic=False,
            splits=False,
        ),
        model=_model_facts(record.models),
        optimizer=_optimizer_facts(record),
        current=_current(record),
        steps_per_epoch=None if length is None else max(1, length // per_step),
        batch_splittable=False,
        units_per_batch=float(batch),
        sampling="sampler",
        custom_step=True,
        sample_step_ns=round(record.step_time_ns or 0),
        script=script,
    )


def script_facts(command: tuple[str, ...], record: ScriptRecord) -> ScriptFacts:
    """Return the findings of an inspection, in the form that strategies use."""
    loader = record.training_loader
    optimizers = _in_step(record)
    numbers = record.step.optimizers or ()
    places = {
        "loader": loader.place if loader is not None else "",
        "optimizer": optimizers[0].place if optimizers else "",
        "step": record.step.place,
        "model": next((model.place for model in record.models if model.num_calls is not None), ""),
    }
    called = [model for model in record.models if model.num_calls is not None]
    wrappers = dict.fromkeys(name for model in record.models for name in model.wrappers if name in SHARDED)
    places = {name: place for name, place in places.items() if place}
    files = _files(command, Path(record.folder), places.values())
    autocast = next(iter(record.notes.get("autocast", {})), "")
    return ScriptFacts(
        command=command,
        folder=record.folder,
        device=record.device,
        loader=loader.kind if loader is not None else None,
        loader_number=loader.number if loader is not None else None,
        optimizers=tuple(optimizer.kind for optimizer in optimizers),
        optimizer_numbers=tuple(numbers),
        models=tuple(model.kind for model in called),
        places=places,
        autocast=autocast.rpartition(" ")[2],
        compiled=bool(record.notes.get("compiled")) or any(model.compiled for model in record.models),
        wrappers=tuple(wrappers),
        deterministic=bool(record.settings.get("cudnn_deterministic")),
        sparse=any(model.sparse for model in record.models),
        device_name=record.device_name,
        files={name: source_digest(text) for name, text in files.items()},
        lines=_lines(Path(record.folder), places, files),
    )


def _name(command: tuple[str, ...]) -> str:
    """Return the script's name, as far as the command shows it."""
    named = [Path(argument).name for argument in command if argument.endswith((".py", ".sh"))]
    return named[0] if named else Path(command[0]).name


def _signature(record: ScriptRecord, batch: int) -> str:
    parts = [model.kind + str(model.num_parameters) for model in record.models]
    parts += [*record.step.kinds, str(batch), record.training_loader.dataset if record.training_loader else ""]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def _in_step(record: ScriptRecord) -> list[ScriptOptimizer]:
    return [optimizer for optimizer in record.optimizers if optimizer.in_step]


def _model_facts(models: tuple[ScriptModel, ...]) -> ModelFacts:
    kinds: dict[str, int] = {}
    for model in models:
        for name, count in model.module_types.items():
            kinds[name] = kinds.get(name, 0) + count
    total, trained = (sum(getattr(model, name) for model in models) for name in ("num_parameters", "num_trained"))
    sizes = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
    return ModelFacts(
        num_parameters=total,
        parameter_bytes=sum(sizes.get(name, 4) * count for model in models for name, count in model.dtypes.items()),
        num_parameter_tensors=sum(model.num_tensors for model in models),
        module_types=kinds,
        has_batch_statistics=any("BatchNorm" in name for name in kinds),
        num_frozen=total - trained,
    )


def _optimizer_facts(record: ScriptRecord) -> OptimizerFacts:
    optimizers = _in_step(record)
    if not optimizers:
        return OptimizerFacts(name="none", module="", implementation="own")
    first = optimizers[0]
    offered = [name for name in first.implementations if all(name in each.implementations for each in optimizers)]
    default = "for_loop" if record.device == "cpu" else "foreach"
    implementation = first.implementation if first.implementation in ("fused", "foreach") else default
    own = not first.module.startswith("torch.optim")
    return OptimizerFacts(
        name=first.kind,
        module=first.module,
        implementation="own" if own else implementation,
        implementations=() if own else tuple(offered),
    )


def _current(record: ScriptRecord) -> dict[str, Choice]:
    """Return the choices that the script already makes, by strategy."""
    current: dict[str, Choice] = {}
    loader = record.training_loader
    if loader is not None:
        settings: Choice = {
            "num_workers": loader.num_workers,
            "prefetch_factor": loader.prefetch_factor or 2,
            "persistent_workers": loader.persistent_workers,
            "pin_memory": loader.pin_memory,
        }
        current[DataLoadingSetting.strategy] = settings
    autocast = next(iter(record.notes.get("autocast", {})), "").rpartition(" ")[2]
    if autocast in ("bfloat16", "float16"):
        current[PrecisionSetting.strategy] = {"level": "O1", "dtype": autocast}
    flags: Choice = {
        "cudnn_benchmark": bool(record.settings.get("cudnn_benchmark")),
        "tf32": record.settings.get("matmul_precision") in HIGHER_PRECISION,
    }
    if any(flags.values()):
        current[BackendFlagsSetting.strategy] = flags
    num_threads = record.settings.get("num_threads")
    if isinstance(num_threads, int) and num_threads < usable_cores():  # fewer than torch takes by itself
        current[CpuThreadsSetting.strategy] = {"num_threads": num_threads}
    if record.notes.get("compiled") or any(model.compiled for model in record.models):
        current[CompileSetting.strategy] = {"mode": "default"}
    if any(model.channels_last for model in record.models):
        current[MemoryFormatSetting.strategy] = {"layout": "channels_last"}
    return current

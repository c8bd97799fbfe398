"""Description in words of the parts of a script that were recognised, item by item."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath
from statistics import median
from typing import NamedTuple

from steptune.tuner.scripts.record import ScriptLoader, ScriptModel, ScriptOptimizer, ScriptRecord, ScriptTrainer

SHORT_DTYPES = {"float32": "FP32", "bfloat16": "BF16", "float16": "FP16", "float64": "FP64"}
LONG_STEP = 3.0
"""Multiple of the median step time above which a step is taken to contain other work: an evaluation, a checkpoint, a
rollout.
"""
IRREGULAR_SHARE = 0.1
MUCH_TIME = 0.05


class Item(NamedTuple):
    """One part that a script has or lacks."""

    name: str
    text: str
    found: bool


def recognised(record: ScriptRecord) -> tuple[Item, ...]:
    """Return all items of a process, in the order of a training script."""
    return (
        _item("step", _step(record)),
        _item(
            "loader",
            _loader(record.training_loader),
            "none in the loop: the script creates its batches without a loader",
        ),
        *(_item("model", _model(model)) for model in record.models or ()),
        *(() if record.models else (Item("model", "not seen", False),)),
        *(_item("optimizer", _optimizer(optimizer)) for optimizer in record.optimizers if optimizer.in_step),
        *(() if any(o.in_step for o in record.optimizers) else (Item("optimizer", _no_optimizer(record), False),)),
        _item("precision", _precision(record)),
        _item("accumulation", _accumulation(record), "none"),
        _item("clipping", ", ".join(record.notes.get("clipping", {})), "none"),
        _item("schedule", ", ".join(record.notes.get("schedulers", {})), "no torch scheduler"),
        _item("compile", _compile(record), "not compiled"),
        _item("wrappers", _wrappers(record), "none"),
        _item("trainer", _trainer(record.trainer), "the script's own loop"),
        _item("ranks", f"{record.num_ranks} ranks" if record.num_ranks > 1 else "", "one process"),
    )


def remarks(record: ScriptRecord) -> tuple[str, ...]:
    """Return remarks on the script for the reader of its profile."""
    return tuple(
        text
        for text in (
            _long_steps(record),
            _irregular(record),
            _parts(record),
            "The model's gradients are sparse: a fused optimizer would refuse them."
            if any(model.sparse for model in record.models)
            else "",
            "cuDNN is deterministic by the script's own setting." if record.settings.get("cudnn_deterministic") else "",
        )
        if text
    )


def remarks_on_processes(trained: Sequence[ScriptRecord]) -> tuple[str, ...]:
    """Return remarks on the processes that trained."""
    alone = sum(record.num_ranks == 1 for record in trained)
    if alone < 2:
        return ()
    return (
        f"{alone} processes train without a process group, and only one is profiled. If they update the same "
        "parameters, the order of their updates differs from run to run, and runs cannot be compared.",
    )


def _item(name: str, text: str, otherwise: str = "not seen") -> Item:
    return Item(name, text or otherwise, bool(text))


def short_place(place: str, folder: str) -> str:
    """Return a source location (`file:line`), relative to the script's folder if the file is in that folder."""
    path, _, rest = place.rpartition(":")
    pure = PurePath(path)
    return f"{pure.relative_to(folder) if pure.is_relative_to(folder) else pure}:{rest}" if path else place


def _at(place: str, record: ScriptRecord) -> str:
    return f"; {short_place(place, record.folder)}" if place else ""


def _step(record: ScriptRecord) -> str:
    step = record.step
    if step.optimizers is None:
        return ""
    if step.optimizers:
        kinds = dict(zip(step.optimizers, step.kinds, strict=True))
        counts = Counter(step.optimizers)
        single = len(counts) == 1
        names = [f"{count} x {kinds[number]}{'' if single else f' #{number + 1}'}" for number, count in counts.items()]
        first = " + ".join(names) if len(step.optimizers) > 1 else f"one step of {step.kinds[0]}"
    else:
        first = "one backward pass (parameters are updated by hand)"
    batches = _counted(step.num_batches, "batch", "batches") if step.num_batches else "no batch from a loader"
    backwards = f"{_counted(step.num_backwards, 'backward pass', 'backward passes')}, " if step.optimizers else ""
    inside = " inside the optimizer's step" if record.notes.get("closures") else ""
    return f"{first}, {backwards}{batches}{inside}{_at(step.place, record)}"


def _loader(loader: ScriptLoader | None) -> str:
    if loader is None:
        return ""
    workers = _counted(loader.num_workers, "worker", "workers")
    parts = [f"{loader.kind} over {loader.dataset}"]
    parts += [f"batches of {loader.batch_size}"] if loader.batch_size else []
    parts += [f"{loader.num_batches} an epoch"] if loader.num_batches else []
    parts += [workers, "pinned" if loader.pin_memory else "not pinned"]
    parts += [f"prefetch {loader.prefetch_factor}"] if loader.prefetch_factor else []
    parts += ["persistent"] if loader.persistent_workers else []
    parts += [] if loader.sample_ns is None else [f"{loader.sample_ns / 1e6:.3g} ms a sample"]
    place = loader.place.rpartition("/")[2]
    return ", ".join(parts) + (f"; {place}" if place else "")


def _model(model: ScriptModel) -> str:
    dtypes = " and ".join(SHORT_DTYPES.get(name, name) for name in model.dtypes)
    parts = [f"{model.kind}, {_amount(model.num_parameters)} parameters"]
    if model.num_trained < model.num_parameters:
        parts.append(f"{_amount(model.num_trained)} of them trained")
    parts.append(f"{dtypes} on {model.device}")
    parts += ["channels last"] if model.channels_last else []
    parts += ["gradient checkpointing"] if model.checkpointed else []
    parts += ["identified by its parameters, not by a call"] if model.num_calls is None else []
    return ", ".join(parts)


def _optimizer(optimizer: ScriptOptimizer) -> str:
    parts = [f"{optimizer.kind}, {_amount(optimizer.num_parameters)} parameters"]
    parts += [f"in {optimizer.num_groups} groups"] if optimizer.num_groups > 1 else []
    parts += [optimizer.implementation] if optimizer.implementation else []
    place = optimizer.place.rpartition("/")[2]
    return ", ".join(parts) + (f"; {place}" if place else "")


def _no_optimizer(record: ScriptRecord) -> str:
    return "none in the step" if record.optimizers else "none: parameters are updated by hand"


def _precision(record: ScriptRecord) -> str:
    autocast = list(record.notes.get("autocast", {}))
    scalers = list(record.notes.get("scalers", {}))
    dtypes = dict.fromkeys(SHORT_DTYPES.get(name, name) for model in record.models for name in model.dtypes)
    parts = [" and ".join(dtypes)] if dtypes else []
    parts.append(f"autocast on {' and '.join(autocast)}" if autocast else "no autocast")
    parts.append("gradient scaler" if scalers else "no gradient scaler")
    if record.device == "cuda":
        parts.append("TF32 matmuls" if record.settings.get("matmul_precision") != "highest" else "no TF32")
    return ", ".join(parts)


def _accumulation(record: ScriptRecord) -> str:
    """Describe gradient accumulation: several backward passes before one update of one optimizer, without a closure."""
    step = record.step
    if len(step.optimizers or ()) != 1 or step.num_backwards < 2 or record.notes.get("closures"):
        return ""
    if step.num_batches == step.num_backwards:
        return f"{step.num_backwards} micro-batches a step"
    return f"{step.num_backwards} backward passes a step: micro-batches, or several losses"


def _compile(record: ScriptRecord) -> str:
    names = list(record.notes.get("compiled", {}))
    if not names and any(model.compiled for model in record.models):
        names = ["the model"]
    return ", ".join(names)


def _wrappers(record: ScriptRecord) -> str:
    names = dict.fromkeys(name for model in record.models for name in model.wrappers if name != "torch.compile")
    return ", ".join(names)


def _trainer(trainer: ScriptTrainer | None) -> str:
    if trainer is None:
        return ""
    settings = ", ".join(f"{name}={value}" for name, value in trainer.settings.items() if value)
    changed = f"; overrides {', '.join(trainer.overrides)}" if trainer.overrides else ""
    return f"{trainer.library} {trainer.kind}{f' ({settings})' if settings else ''}{changed}"


def _long_steps(record: ScriptRecord) -> str:
    times = record.step_times_ns[len(record.step_times_ns) // 4 :]
    if len(times) < 4:
        return ""
    limit = LONG_STEP * median(times)
    long = [time for time in times if time > limit]
    share = sum(long) / sum(times)
    if share < MUCH_TIME:
        return ""
    calls = (
        f" (there were {record.num_calls_without_grad} calls without gradients)"
        if record.num_calls_without_grad
        else ""
    )
    return (
        f"{len(long)} of the last {len(times)} steps took more than three times the median, together {share:.0%} of "
        "the time: their work besides the step (data, evaluation, rollout, checkpoint, other programs) is not "
        f"profiled{calls}."
    )


def _irregular(record: ScriptRecord) -> str:
    if record.step.optimizers is None or record.step.share > 1 - IRREGULAR_SHARE:
        return ""
    return (
        f"{1 - record.step.share:.0%} of the steps differ from the most common one in the number of batches or "
        "backward passes."
    )


def _parts(record: ScriptRecord) -> str:
    if len(record.models) < 2 or len(record.step.optimizers or ()) > 1:
        return ""
    return f"{len(record.models)} modules are called separately: the model is never called as a whole."


def _counted(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


def _amount(number: int) -> str:
    for limit, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{suffix}"
    return str(number)

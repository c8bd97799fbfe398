"""Looking at a workload once per study: what it is, whether it can be trained, and its shared files.

Everything that can be wrong with a workload is found here, before the first trial, and named.
"""

from __future__ import annotations

import hashlib
import math
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tuner.errors import WorkloadRejected
from tuner.records import (
    Choice,
    DatasetFacts,
    ModelFacts,
    OptimizerFacts,
    Record,
    SampleUnit,
    WorkloadFacts,
)
from tuner.strategies import strategy_named
from tuner.training.initial_state import save_initial_state
from tuner.training.job import TrainingJob
from tuner.training.loader import build_loader
from tuner.training.micro_batch import batch_length, split_batch
from tuner.training.plan import LoaderArguments, Plan
from tuner.trials.failures import is_out_of_memory
from tuner.trials.messages import Channel, TaskProgress
from tuner.trials.processes import limit_data
from tuner.trials.study_files import StudyFiles
from tuner.trials.trial import UserClock, rank_device
from tuner.workloads.batches import draw_batches, save_batches
from tuner.workloads.loading import load_workload
from tuner.workloads.workload import Workload, leaves

if TYPE_CHECKING:
    import torch

NUM_SAMPLES = 8
NUM_GUARD_BATCHES = 8


class InspectRequest(Record):
    """What the parent asks for."""

    workload: str
    study_directory: str
    device: str = "cpu"
    seed: int = 0
    num_ranks: int = 1
    memory_limit_bytes: int | None = None


def inspect_workload(request: InspectRequest, rank: int, num_ranks: int, channel: Channel) -> WorkloadFacts:
    """Loads, prepares and tries a workload; writes the study's shared files.

    Raises:
        WorkloadError: Names the piece that is missing or wrong, its value, and the way out.
    """
    return _Inspection(request, channel).run()


class _Inspection:
    def __init__(self, request: InspectRequest, channel: Channel) -> None:
        self._request = request
        self._files = StudyFiles(Path(request.study_directory))
        self._channel = channel

    def run(self) -> WorkloadFacts:
        import torch

        importing, preparing, modelling = UserClock(), UserClock(), UserClock()
        if self._request.memory_limit_bytes is not None:
            limit_data(self._request.memory_limit_bytes)
        self._say("loading the workload")
        with importing():
            workload = load_workload(self._request.workload)
        current = _checked_current(workload)
        self._files.data.mkdir(parents=True, exist_ok=True)
        workload.directory = self._files.data
        self._say("preparing its data")
        with preparing():
            workload.prepare(self._files.data)
            dataset = workload.dataset()
        data_facts = look_at_dataset(workload, dataset, self._request.seed)
        batches = self._draw(workload, dataset, data_facts, current)
        self._say("initialising the model")
        torch.manual_seed(self._request.seed)
        with modelling():
            model = workload.model()
        if not isinstance(model, torch.nn.Module):
            raise WorkloadRejected(
                f"{type(workload).__name__}.model() returned {type(model).__name__}, not a torch.nn.Module"
            )
        save_initial_state(model, self._files.initial_state)
        self._say("trying one step")
        job = _plain_job(workload, model, rank_device(self._request.device, 0))
        look = look_at_model(job, batches[0])
        name = self._request.workload.rpartition(":")[2].partition("?")[0]
        return WorkloadFacts(
            reference=self._request.workload,
            name=name,
            signature=_signature(workload, look.facts, data_facts, job),
            global_batch=workload.global_batch,
            sample_unit=SampleUnit(workload.sample_unit),
            dataset=data_facts,
            model=look.facts,
            optimizer=look_at_optimizer(job),
            current=current,
            steps_per_epoch=_steps_per_epoch(workload, data_facts),
            batch_bytes=size_of(batches[0]),
            batch_splittable=batch_length(batches[0]) is not None,
            varying_shapes=len({_shapes(batch) for batch in batches}) > 1,
            units_per_batch=sum(workload.num_units(batch) for batch in batches) / len(batches),
            randomness=look.randomness,
            custom_step=workload.has_custom_step,
            sample_loss=look.loss,
            sample_step_ns=look.step_ns,
            fits_memory=look.fits,
            prepare_ns=preparing.total_ns,
            import_ns=importing.total_ns,
            model_ns=modelling.total_ns,
        )

    def _say(self, text: str) -> None:
        self._channel.send(TaskProgress(text=text))

    def _draw(self, workload: Workload, dataset: Any, facts: DatasetFacts, current: dict[str, Choice]) -> list[Any]:
        """Fixes the order of batches and stores the guard's batches, drawn through the baseline's loader."""
        import torch

        order = None
        if facts.kind == "map":
            order = draw_batches(workload, dataset, self._request.seed)
            save_batches(self._files.order_file, order)
        plan = Plan()
        loading = strategy_named("data_loading")
        loading.contribute(plan, {**loading.defaults, **current.get("data_loading", {})})
        torch.manual_seed(self._request.seed)
        loader = build_loader(
            workload, dataset, plan.loader, batch_sampler=order[:NUM_GUARD_BATCHES] if order else None
        )
        batches = [batch for batch, _ in zip(loader, range(NUM_GUARD_BATCHES), strict=False)]
        if not batches:
            raise WorkloadRejected(
                f"the dataset gave no batch of {workload.global_batch}: give more data or set a smaller global_batch"
            )
        if self._request.num_ranks > 1 and workload.global_batch % self._request.num_ranks:
            raise WorkloadRejected(
                f"global_batch {workload.global_batch} cannot be split over {self._request.num_ranks} ranks: "
                "choose a multiple"
            )
        self._files.save_guard_batches(batches)
        return batches


def _checked_current(workload: Workload) -> dict[str, Choice]:
    """The workload's `current`, refused where a strategy or parameter does not exist."""
    current: dict[str, Choice] = {}
    for name, choice in workload.current.items():
        strategy = strategy_named(name)
        strategy.check(choice)
        difference = {key: value for key, value in choice.items() if value != strategy.defaults[key]}
        if difference:
            current[name] = difference
    return current


def _plain_job(workload: Workload, model: torch.nn.Module, device: torch.device) -> TrainingJob:
    """A job without any strategy, for looking at single steps; its loader is empty."""
    model = model.to(device)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise WorkloadRejected(f"{type(workload).__name__}.model() has no parameter that requires a gradient")
    optimizer = workload.optimizer(iter(named))
    if not hasattr(optimizer, "param_groups"):
        raise WorkloadRejected(f"optimizer() returned {type(optimizer).__name__}, not a torch.optim.Optimizer")
    plan = Plan(loader=LoaderArguments())
    return TrainingJob(
        workload=workload,
        plan=plan,
        device=device,
        model=model,
        optimizer=optimizer,
        scheduler=None,
        masters=None,
        loader=(),
    )


# --- the data ---------------------------------------------------------------------------------


def look_at_dataset(workload: Workload, dataset: Any, seed: int) -> DatasetFacts:
    """Kind, length, size and speed of samples, and whether they repeat themselves.

    Raises:
        WorkloadRejected: It is neither map-style nor iterable, or smaller than one batch.
    """
    if not hasattr(dataset, "__getitem__"):
        if not hasattr(dataset, "__iter__"):
            raise WorkloadRejected(
                f"{type(workload).__name__}.dataset() returned {type(dataset).__name__}, which has neither "
                "__getitem__ nor __iter__"
            )
        return _iterable_facts(dataset)
    if not hasattr(dataset, "__len__"):
        raise WorkloadRejected(
            f"{type(dataset).__name__} has __getitem__ but no __len__: a map-style dataset needs both"
        )
    length = len(dataset)
    if length < workload.global_batch:
        raise WorkloadRejected(
            f"the dataset has {length} samples, fewer than one batch of {workload.global_batch}: "
            "give more data or set a smaller global_batch"
        )
    splits = hasattr(dataset, "load") and hasattr(dataset, "augment")
    indices = random.Random(seed).sample(range(length), min(NUM_SAMPLES, length))
    first = _samples(dataset.__getitem__, indices, generator_seed=1)
    began = time.perf_counter_ns()
    second = _samples(dataset.__getitem__, indices, generator_seed=2)
    sample_ns = (time.perf_counter_ns() - began) // len(indices)
    repeated = _samples(dataset.__getitem__, indices, generator_seed=1)
    loads = [_samples(dataset.load, indices, generator_seed=s) for s in (1, 2)] if splits else []
    stored = loads[0] if splits else first
    return DatasetFacts(
        kind="map",
        length=length,
        sample_bytes=sum(size_of(sample) for sample in stored) // len(stored),
        sample_ns=sample_ns,
        deterministic=_digests(first) == _digests(second),
        seedable=_digests(first) == _digests(repeated),
        splits=splits,
        load_deterministic=bool(loads) and _digests(loads[0]) == _digests(loads[1]),
    )


def _iterable_facts(dataset: Any) -> DatasetFacts:
    iterator = iter(dataset)
    began = time.perf_counter_ns()
    samples = [sample for sample, _ in zip(iterator, range(NUM_SAMPLES), strict=False)]
    if not samples:
        raise WorkloadRejected("the iterable dataset yields nothing")
    return DatasetFacts(
        kind="iterable",
        length=len(dataset) if hasattr(dataset, "__len__") else None,
        sample_bytes=sum(size_of(sample) for sample in samples) // len(samples),
        sample_ns=(time.perf_counter_ns() - began) // len(samples),
        deterministic=False,
        splits=False,
    )


def _samples(get: Any, indices: list[int], *, generator_seed: int) -> list[Any]:
    import numpy as np
    import torch

    torch.manual_seed(generator_seed)
    np.random.seed(generator_seed)
    random.seed(generator_seed)
    return [get(index) for index in indices]


def _digests(samples: list[Any]) -> str:
    digest = hashlib.sha256()
    for sample in samples:
        for leaf in leaves(sample):
            digest.update(_leaf_bytes(leaf))
    return digest.hexdigest()


def _leaf_bytes(leaf: Any) -> bytes:
    if hasattr(leaf, "detach"):
        import torch

        flat = leaf.detach().cpu().contiguous().reshape(-1)
        return bytes(memoryview(flat.view(torch.uint8).numpy())) if flat.numel() else b""
    if hasattr(leaf, "tobytes"):  # NumPy arrays and Pillow images
        return bytes(leaf.tobytes())
    return repr(leaf).encode()


def size_of(value: Any) -> int:
    """Bytes of a sample or batch."""
    total = 0
    for leaf in leaves(value):
        if hasattr(leaf, "element_size"):
            total += leaf.numel() * leaf.element_size()
        elif hasattr(leaf, "nbytes"):
            total += int(leaf.nbytes)
        elif hasattr(leaf, "tobytes") and hasattr(leaf, "size"):  # a Pillow image
            total += len(leaf.tobytes())
        elif isinstance(leaf, str | bytes):
            total += len(leaf)
        else:
            total += 8
    return total


def _shapes(batch: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(leaf.shape) for leaf in leaves(batch) if hasattr(leaf, "shape"))


def _steps_per_epoch(workload: Workload, facts: DatasetFacts) -> int | None:
    if facts.length is None:
        return None
    whole = facts.length // workload.global_batch
    return max(1, whole if workload.drop_last else math.ceil(facts.length / workload.global_batch))


# --- the model --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ModelLook:
    """What one step of the model showed."""

    facts: ModelFacts
    randomness: str
    loss: float
    step_ns: int
    fits: bool


def look_at_model(job: TrainingJob, batch: Any) -> ModelLook:
    """Counts, and one forward and backward pass: of the whole batch or, where that does not fit into
    memory, of a part of it.

    Raises:
        WorkloadRejected: The loss is not a finite scalar, or does not depend on the parameters.
    """
    length = batch_length(batch) or 1
    for pieces in (1, 2, 4, 8, 16, 32, 64):
        piece = batch if pieces == 1 else split_batch(job.workload, batch, min(pieces, length))[0][0]
        try:
            return _look(job, piece, pieces)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error) or pieces >= length or job.workload.has_custom_step:
                raise
            job.optimizer.zero_grad(set_to_none=True)
    raise AssertionError("the last piece either ran or raised")


def _look(job: TrainingJob, batch: Any, pieces: int) -> ModelLook:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    on_device = job.to_device(batch)
    attention = _AttentionSeen()
    began = time.perf_counter_ns()
    with attention.mode(), FlopCounterMode(display=False) as counter:
        if job.workload.has_custom_step:
            loss = job.workload.training_step(job, on_device)
        else:
            loss = job.loss(on_device)
            _check_loss(job, loss)
            loss.backward()
    step_ns = time.perf_counter_ns() - began
    parameters = [p for p in job.model.parameters() if p.requires_grad]
    if not job.workload.has_custom_step and all(p.grad is None for p in parameters):
        raise WorkloadRejected("the loss does not depend on any parameter of the model: no gradient reaches them")
    value = float(loss.detach())
    if not math.isfinite(value):
        raise WorkloadRejected(
            f"the loss of the first batch is {value}: the workload cannot be trained as it is; check its data, "
            "its learning rate and its initialisation"
        )
    job.optimizer.zero_grad(set_to_none=True)
    blocks = list(job.workload.blocks(job.model))
    state = list(job.model.parameters())
    facts = ModelFacts(
        num_parameters=sum(p.numel() for p in state),
        parameter_bytes=sum(p.numel() * p.element_size() for p in state),
        num_parameter_tensors=len(state),
        module_types=dict(Counter(type(module).__name__ for module in job.model.modules())),
        num_blocks=len(blocks),
        uses_attention=attention.seen,
        has_batch_statistics=any(
            isinstance(m, torch.nn.modules.batchnorm._NormBase) and m.track_running_stats for m in job.model.modules()
        ),
        flops_per_step=pieces * int(counter.get_total_flops()),
    )
    return ModelLook(
        facts=facts,
        randomness=_randomness(job, on_device),
        loss=value,
        step_ns=pieces * step_ns,
        fits=pieces == 1,
    )


def _check_loss(job: TrainingJob, loss: Any) -> None:
    import torch

    where = f"{type(job.workload).__name__}.loss"
    if not isinstance(loss, torch.Tensor):
        raise WorkloadRejected(f"{where} returned {type(loss).__name__}, not a tensor")
    if loss.numel() != 1:
        raise WorkloadRejected(
            f"{where} returned a tensor of shape {tuple(loss.shape)}: reduce it to a scalar, as with .mean()"
        )
    if not loss.requires_grad:
        raise WorkloadRejected(
            f"{where} returned a tensor that does not depend on the model's parameters (it requires no gradient): "
            "compute it from the model's output, without detach() or no_grad()"
        )


def _randomness(job: TrainingJob, batch: Any) -> str:
    """ "none", "switchable" or "always": found by running the loss under two seeds."""
    from tuner.trials.guard import randomness_off

    if job.workload.has_custom_step:
        return "always"
    if _repeats(job, batch):
        return "none"
    with randomness_off(job.model, "switchable"):
        try:
            return "switchable" if _repeats(job, batch) else "always"
        except Exception:
            # A model whose evaluation mode cannot give a loss (detectors) is compared by its curve.
            return "always"


def _repeats(job: TrainingJob, batch: Any) -> bool:
    import torch

    values = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            values.append(job.loss(batch).detach().clone())
    return bool(torch.equal(values[0], values[1]))


class _AttentionSeen:
    """Notices calls of scaled_dot_product_attention."""

    def __init__(self) -> None:
        self.seen = False

    def mode(self) -> Any:
        import torch
        from torch.overrides import TorchFunctionMode

        outer = self

        class Watch(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func is torch.nn.functional.scaled_dot_product_attention:
                    outer.seen = True
                return func(*args, **(kwargs or {}))

        return Watch()


def look_at_optimizer(job: TrainingJob) -> OptimizerFacts:
    """Which implementation the user's optimizer runs, and which its class offers."""
    import inspect

    optimizer = job.optimizer
    cls = type(optimizer)
    arguments = inspect.signature(cls.__init__).parameters
    own = not cls.__module__.startswith("torch.optim")
    offered = ["for_loop"] if "foreach" in arguments else []
    offered += [name for name in ("foreach", "fused") if name in arguments]
    group = optimizer.param_groups[0]
    current = "fused" if group.get("fused") else "foreach" if group.get("foreach") else "default"
    if current == "default" and group.get("foreach") is False:
        current = "for_loop"
    if current == "default" and job.device.type == "cpu" and "foreach" in arguments:
        current = "for_loop"  # torch chooses foreach by itself for CUDA parameters only
    return OptimizerFacts(
        name=cls.__name__,
        module=cls.__module__,
        implementation="own" if own else current,
        implementations=() if own else tuple(offered),
    )


def _signature(workload: Workload, model: ModelFacts, data: DatasetFacts, job: TrainingJob) -> str:
    """Equal for workloads whose past results are worth starting from."""
    magnitude = round(math.log2(max(1, model.num_parameters)))
    per_sample = round(math.log2(max(1, data.sample_bytes or 1)))
    kinds = sorted(model.module_types)
    parts = [kinds, magnitude, per_sample, workload.global_batch.bit_length(), type(job.optimizer).__name__, data.kind]
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]

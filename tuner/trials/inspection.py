"""Inspection of a workload, once per study: its facts, whether it can be trained, and its shared files.

Errors of a workload are found and reported here, before the first trial.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from steptune.tuner.errors import WorkloadRejectedError
from steptune.tuner.hardware import checked_device
from steptune.tuner.records import (
    Choice,
    DatasetFacts,
    ModelFacts,
    Record,
    SampleUnit,
    WorkloadFacts,
)
from steptune.tuner.strategies import strategy_named
from steptune.tuner.strategies.data_loading.choice import DataLoadingSetting
from steptune.tuner.strategies.ddp_buckets.choice import DdpBucketsSetting
from steptune.tuner.strategies.gradient_compression.choice import FEEDS_BACK, GradientCompressionSetting
from steptune.tuner.strategies.local_sgd.choice import LocalSgdSetting
from steptune.tuner.strategies.nccl_settings.choice import NcclSetting
from steptune.tuner.strategies.nccl_settings.strategy import settings_of
from steptune.tuner.training.host_step import HostStep
from steptune.tuner.training.initial_state import save_initial_state
from steptune.tuner.training.job import TrainingJob
from steptune.tuner.training.loader import build_loader
from steptune.tuner.training.micro_batch import batch_length
from steptune.tuner.training.parameter_layout import ParameterLayout
from steptune.tuner.training.plan import LoaderArguments, Plan
from steptune.tuner.training.regrouping import padding_share
from steptune.tuner.trials.dataset_look import look_at_dataset, size_of
from steptune.tuner.trials.imports import imported_since, save_imports
from steptune.tuner.trials.memory import limit_host_memory
from steptune.tuner.trials.messages import Channel, TaskProgress
from steptune.tuner.trials.model_look import ModelLook, look_at_model, look_at_optimizer
from steptune.tuner.trials.rank_device import rank_device
from steptune.tuner.trials.study_files import StudyFiles
from steptune.tuner.trials.trial import UserClock
from steptune.tuner.workloads.batches import draw_batches, save_batches
from steptune.tuner.workloads.knobs import knobs_of
from steptune.tuner.workloads.loading import load_workload
from steptune.tuner.workloads.workload import Workload, leaves

if TYPE_CHECKING:
    import torch

NUM_GUARD_BATCHES = 8
PADDING_BATCHES = 64


class InspectRequest(Record):
    """Request of the parent to inspect a workload."""

    workload: str
    study_directory: str
    device: str = "cpu"
    seed: int = 0
    num_ranks: int = 1
    memory_limit_bytes: int | None = None


class CheckRequest(Record):
    """Request to check that a workload can be loaded and that its device exists. An empty device lets torch choose."""

    workload: str
    device: str = ""
    num_ranks: int = 1
    memory_limit_bytes: int | None = None


def check_workload(request: CheckRequest, channel: Channel) -> bool:
    """Load a workload and run the quick checks, before a study of it exists.

    Raises:
        WorkloadError: A piece is missing or wrong; the message names it, its value, and the way out.
        ChoiceError: The device does not exist, or `current` names an unknown strategy or parameter.
    """
    limit_host_memory(request.memory_limit_bytes, checked_device(request.device))

    def say(text: str) -> None:
        channel.send(TaskProgress(text=text))

    say("loading the workload")
    workload = load_workload(request.workload, say)
    _checked_current(workload)
    _check_splits(workload, request.num_ranks)
    return True


def inspect_workload(request: InspectRequest, rank: int, num_ranks: int, channel: Channel) -> WorkloadFacts:
    """Load, prepare and try a workload; write the study's shared files.

    Raises:
        WorkloadError: A piece is missing or wrong; the message names it, its value, and the way out.
    """
    return _Inspection(request, channel).run()


class _Inspection:
    def __init__(self, request: InspectRequest, channel: Channel) -> None:
        self._request = request
        self._files = StudyFiles(Path(request.study_directory))
        self._channel = channel
        self._padding_share: float | None = None
        self._importing, self._preparing, self._modelling = UserClock(), UserClock(), UserClock()

    def run(self) -> WorkloadFacts:
        import torch  # not one of the workload's modules: a trial server has it in any case

        known_modules = set(sys.modules)
        limit_host_memory(self._request.memory_limit_bytes, self._request.device)
        self._say("loading the workload")
        with self._importing():
            workload = load_workload(self._request.workload, self._say)
        current = with_nccl(_checked_current(workload), self._request)
        self._say("preparing its data")
        dataset = self._prepared_dataset(workload)
        data = look_at_dataset(workload, dataset, self._request.seed)
        batches = self._draw(workload, dataset, data, current)
        self._say("initialising the model")
        with self._modelling():
            model, imports = self._initialised(workload, known_modules)
        if not isinstance(model, torch.nn.Module):
            raise WorkloadRejectedError(
                f"{type(workload).__name__}.model() returned {type(model).__name__}, not a torch.nn.Module"
            )
        save_initial_state(model, self._files.initial_state)
        save_imports(self._files.imports, imports)
        self._say("trying one step")
        job = _plain_job(workload, model, rank_device(self._request.device, 0, self._request.memory_limit_bytes))
        look = look_at_model(job, batches[0])
        return self._facts(job, data, batches, current, look)

    def _prepared_dataset(self, workload: Workload) -> Any:
        self._files.data.mkdir(parents=True, exist_ok=True)
        workload.directory = self._files.data
        with self._preparing():
            workload.prepare(self._files.data)
            return workload.dataset()

    def _facts(
        self, job: TrainingJob, data: DatasetFacts, batches: list[Any], current: dict[str, Choice], look: ModelLook
    ) -> WorkloadFacts:
        workload = job.workload
        return WorkloadFacts(
            reference=self._request.workload,
            name=self._request.workload.partition("?")[0].rpartition(":")[2],
            signature=_signature(workload, look.facts, data, job),
            global_batch=workload.global_batch,
            sample_unit=SampleUnit(workload.sample_unit),
            dataset=msgspec.structs.replace(data, padding_share=self._padding_share),
            model=look.facts,
            optimizer=look_at_optimizer(job),
            current=_finding_unused(current, look.facts, self._request.num_ranks),
            steps_per_epoch=_steps_per_epoch(workload, data),
            batch_bytes=size_of(batches[0]),
            batch_splittable=batch_length(batches[0]) is not None,
            varying_shapes=len({_shapes(batch) for batch in batches}) > 1,
            units_per_batch=sum(workload.num_units(batch) for batch in batches) / len(batches),
            randomness=look.randomness,
            max_global_batch=workload.max_global_batch,
            sampling=_sampling(workload),
            custom_step=workload.has_custom_step,
            host_read=look.host_read,
            host_read_beside_masks=look.host_read_beside_masks,
            host_read_in_loss=look.host_read_in_loss,
            byte_form=workload.has_byte_form,
            sample_loss=look.loss,
            sample_step_ns=look.step_ns,
            fits_memory=look.fits,
            look_samples=look.samples,
            look_peak_bytes=look.peak_bytes,
            knobs=knobs_of(workload),
            prepare_ns=self._preparing.total_ns,
            import_ns=self._importing.total_ns,
            model_ns=self._modelling.total_ns,
        )

    def _initialised(self, workload: Workload, known_modules: set[str]) -> tuple[Any, list[str]]:
        """Return the initialised model, and the modules imported for it before a device was initialised."""
        import torch

        on_device = workload.initialises_on_device and self._request.device != "cpu"
        torch.manual_seed(self._request.seed)
        nowhere: Any = torch.device("meta") if on_device else nullcontext()  # for its imports
        with nowhere:
            model = workload.model()
        imports = imported_since(known_modules, self._request.workload)
        if on_device:
            device = rank_device(self._request.device, 0)
            torch.manual_seed(self._request.seed)
            with device:
                model = workload.model()
        return model, imports

    def _say(self, text: str) -> None:
        self._channel.send(TaskProgress(text=text))

    def _draw(self, workload: Workload, dataset: Any, facts: DatasetFacts, current: dict[str, Choice]) -> list[Any]:
        """Fix the order of batches and store the guard's batches, drawn through the baseline's loader."""
        import torch

        order = None
        if facts.kind == "map":
            order = draw_batches(workload, dataset, self._request.seed)
            save_batches(self._files.order_file, order)
            self._padding_share = _padding_share(workload, dataset, order, self._request.num_ranks)
        plan = Plan()
        loading = strategy_named(DataLoadingSetting.strategy)
        loading.contribute(plan, {**loading.defaults, **current.get(DataLoadingSetting.strategy, {})})
        torch.manual_seed(self._request.seed)
        loader = build_loader(
            workload, dataset, plan.loader, batch_sampler=order[:NUM_GUARD_BATCHES] if order else None
        )
        batches = [batch for batch, _ in zip(loader, range(NUM_GUARD_BATCHES), strict=False)]
        if not batches:
            raise WorkloadRejectedError(
                f"the dataset yields no batch of {workload.global_batch} samples: give more data or set a smaller "
                "global_batch"
            )
        _check_splits(workload, self._request.num_ranks)
        self._files.save_guard_batches(batches)
        return batches


def _check_splits(workload: Workload, num_ranks: int) -> None:
    if workload.global_batch % num_ranks:
        raise WorkloadRejectedError(
            f"global_batch {workload.global_batch} cannot be split evenly over {num_ranks} ranks: choose a multiple "
            f"of {num_ranks}"
        )


def _checked_current(workload: Workload) -> dict[str, Choice]:
    """Return the workload's `current`, without settings that equal the defaults; refuse unknown strategies or
    parameters.
    """
    current: dict[str, Choice] = {}
    for name, choice in workload.current.items():
        strategy = strategy_named(name)
        strategy.check(choice)
        difference = {key: value for key, value in choice.items() if value != strategy.defaults[key]}
        if difference:
            current[name] = difference
    method = current.get(GradientCompressionSetting.strategy, {}).get("method")
    if method in FEEDS_BACK:
        raise WorkloadRejectedError(
            f"{type(workload).__name__}.current compresses gradients by {method}, so its steps cannot be compared "
            "with those of a training that reduces whole gradients: remove gradient_compression from current, "
            "and let the search try it with --allow lossy"
        )
    if current.get(LocalSgdSetting.strategy, {}).get("every", 1) != 1:
        raise WorkloadRejectedError(
            f"{type(workload).__name__}.current lets ranks step independently (local_sgd), so its steps cannot be "
            "compared with those of a training that reduces gradients in every step: remove local_sgd from "
            "current, and let the search try it with --allow recipe"
        )
    return current


def with_nccl(current: dict[str, Choice], request: InspectRequest) -> dict[str, Choice]:
    """Add the NCCL variables set in the environment, if ranks communicate through NCCL; the workload's own values take
    precedence.
    """
    if request.num_ranks == 1 or request.device == "cpu":
        return current
    found = {name: value for name, value in settings_of(os.environ).items() if value is not None}
    together = {**found, **current.get(NcclSetting.strategy, {})}
    return {**current, NcclSetting.strategy: together} if together else current


def _finding_unused(current: dict[str, Choice], model: ModelFacts, num_ranks: int) -> dict[str, Choice]:
    """Enable `find_unused` in DDP for a model with unused parameters. DDP trains such a model only with this option or
    a static graph.
    """
    buckets = current.get(DdpBucketsSetting.strategy, {})
    if num_ranks == 1 or not model.num_unused_parameters or buckets.get("static_graph"):
        return current
    return {**current, DdpBucketsSetting.strategy: {**buckets, "find_unused": True}}


def _plain_job(workload: Workload, model: torch.nn.Module, device: torch.device) -> TrainingJob:
    """Build a job without any strategy, to inspect single steps; its loader is empty."""
    model = model.to(device)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise WorkloadRejectedError(f"{type(workload).__name__}.model() has no parameter that requires a gradient")
    optimizer = workload.optimizer(iter(named))
    if not hasattr(optimizer, "param_groups"):
        raise WorkloadRejectedError(f"optimizer() returned {type(optimizer).__name__}, not a torch.optim.Optimizer")
    plan = Plan(loader=LoaderArguments())
    return TrainingJob(
        workload=workload,
        plan=plan,
        device=device,
        model=model,
        optimizer=optimizer,
        scheduler=None,
        layout=ParameterLayout(),
        hooks=(),
        loader=(),
        make_runner=HostStep,
    )


def _shapes(batch: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(leaf.shape) for leaf in leaves(batch) if hasattr(leaf, "shape"))


def _padding_share(workload: Workload, dataset: Any, order: list[list[int]], num_ranks: int) -> float | None:
    """Return the share of padding in the first batches; None if the workload does not know the lengths of its
    samples.
    """
    if not workload.knows_lengths(dataset):
        return None
    return padding_share(order[:PADDING_BATCHES], lambda index: workload.length(dataset, index), num_ranks)


def _sampling(workload: Workload) -> str:
    cls = type(workload)
    if cls.batch_sampler is not Workload.batch_sampler:
        return "batch_sampler"
    return "shuffled" if cls.sampler is Workload.sampler else "sampler"


def _steps_per_epoch(workload: Workload, facts: DatasetFacts) -> int | None:
    if facts.length is None:
        return None
    whole = facts.length // workload.global_batch
    return max(1, whole if workload.drop_last else math.ceil(facts.length / workload.global_batch))


def _signature(workload: Workload, model: ModelFacts, data: DatasetFacts, job: TrainingJob) -> str:
    """Return a hash that is equal for workloads so similar that past results of one help to tune the other."""
    magnitude = round(math.log2(max(1, model.num_parameters)))
    per_sample = round(math.log2(max(1, data.sample_bytes or 1)))
    kinds = sorted(model.module_types)
    parts = [kinds, magnitude, per_sample, workload.global_batch.bit_length(), type(job.optimizer).__name__, data.kind]
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]

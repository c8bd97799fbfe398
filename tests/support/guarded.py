"""A small real training and its guard reference, and candidates with one thing wrong."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from steptune import Workload
from steptune.tuner.guard.curves import GuardReference, Protocol
from steptune.tuner.records import Choice, GuardCheck
from steptune.tuner.strategies import STRATEGIES
from steptune.tuner.strategies.combine import make_plan
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.initial_state import build_initialised, save_initial_state
from steptune.tuner.training.job import TrainingJob
from steptune.tuner.training.plan import Plan
from steptune.tuner.trials.coordination import Coordinator
from steptune.tuner.trials.guard_judge import Judge, Judged
from steptune.tuner.trials.reference import ReferenceRequest, make_reference
from steptune.tuner.trials.study_files import StudyFiles
from steptune.tuner.workloads.batches import draw_batches, save_batches

FP32 = 2.0**-24
BF16 = 2.0**-8
NUM_SAMPLES = 96


class Guarded(Workload):
    """Learnable classes, dropout, clipping that acts, and an optimizer whose update has the gradient's size."""

    global_batch = 8
    max_grad_norm = 0.5
    dropout = 0.7
    learning_rate = 0.1

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(16, 32),
            nn.GELU(),
            nn.Dropout(self.dropout),
            nn.LayerNorm(32),
            nn.Linear(32, 32),
            nn.Linear(32, 4),
        )

    def dataset(self) -> Any:
        generator = torch.Generator().manual_seed(5)
        labels = torch.arange(NUM_SAMPLES) % 4
        samples = torch.randn(NUM_SAMPLES, 16, generator=generator) + 2 * nn.functional.one_hot(labels, 16)
        return TensorDataset(samples, labels)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        samples, labels = batch
        return cross_entropy(model(samples), labels)

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named_parameters], lr=self.learning_rate, momentum=0.9)


class WithInfinities(Guarded):
    """With a mask of infinities and a NaN among its buffers, as published attention has."""

    def model(self) -> nn.Module:
        model = super().model()
        model.register_buffer("mask", torch.tensor([0.0, -torch.inf, torch.nan]))
        return model


class ByAdamW(Guarded):
    """Without dropout, so that nothing but the update is in question."""

    dropout = 0.0
    options: ClassVar[dict[str, Any]] = {"lr": 1e-2, "weight_decay": 0.1}

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for _, p in named_parameters], **self.options)


class Counting(ByAdamW):
    """With an update that counts its steps on the device."""

    options: ClassVar[dict[str, Any]] = {**ByAdamW.options, "capturable": True}


class Wide(ByAdamW):
    """A layer of a million elements."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(16, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.LayerNorm(1024), nn.Linear(1024, 4)
        )


PROTOCOL = Protocol(num_pointwise=5, num_curve=24, num_horizon=48, randomness="switchable", seed=3, num_audits=2)


class _Nobody:
    """Where progress is sent to when nobody listens."""

    def send(self, message: Any) -> None:
        pass


def neutral_choices(**changed: Choice) -> dict[str, Choice]:
    return {strategy.name: {**strategy.defaults, **changed.get(strategy.name, {})} for strategy in STRATEGIES}


@dataclass(frozen=True)
class Study:
    """The files of a study whose reference is made."""

    files: StudyFiles
    reference: GuardReference
    make_workload: type[Guarded]
    device: str = "cpu"
    rank: int = 0
    num_ranks: int = 1
    coordinator: Coordinator | None = None
    """Coordinator of several ranks."""

    @property
    def batches(self) -> list[Any]:
        return self.files.guard_batches(self.rank, self.num_ranks)

    def job(
        self, workload: Workload | None = None, change: Callable[[Plan], None] = lambda plan: None, **choices: Choice
    ) -> TrainingJob:
        workload = workload or self.make_workload()
        plan = make_plan(neutral_choices(**choices))
        change(plan)
        return assemble(
            workload,
            plan,
            device=torch.device(self.device),
            rank=self.rank,
            num_ranks=self.num_ranks,
            make_model=lambda: build_initialised(workload.model, self.files.initial_state),
            batch_sampler=self.files.order(self.rank, self.num_ranks),
        )

    def checks(
        self,
        job: TrainingJob,
        *,
        batches: list[Any] | None = None,
        unit_roundoff: float = FP32,
        lossy: bool = False,
        choices: dict[str, Choice] | None = None,
    ) -> dict[str, GuardCheck]:
        """Runs the protocol and compares, as a trial does."""
        judged = self.judged(job, batches, unit_roundoff, lossy=lossy, choices=choices)
        return {check.name: check for check in judged.checks}

    def judged(
        self,
        job: TrainingJob,
        batches: list[Any] | None = None,
        unit_roundoff: float = FP32,
        *,
        lossy: bool = False,
        choices: dict[str, Choice] | None = None,
    ) -> Judged:
        """
        Args:
            choices: Those of the job that are not neutral; with them it has a twin.
        """
        judge = Judge(self.reference, self.files, self.coordinator or coordinator_of(self.files.directory))
        return judge.judge(
            job,
            batches or self.batches,
            unit_roundoff=unit_roundoff,
            lossy=lossy,
            choices=None if choices is None else neutral_choices(**choices),
        )

    def failed(self, job: TrainingJob, **options: Any) -> list[str]:
        return [name for name, check in self.checks(job, **options).items() if not check.passed]


def coordinator_of(directory: Path, rank: int = 0, num_ranks: int = 1, device: str = "cpu") -> Coordinator:
    return Coordinator(rank, num_ranks, _Nobody(), directory, torch.device(device))  # type: ignore[arg-type]


def make_study(
    directory: Path,
    make_workload: type[Guarded] = Guarded,
    *,
    protocol: Protocol = PROTOCOL,
    bias_corrections: bool = False,
    choices: dict[str, Choice] | None = None,
    unit_roundoffs: tuple[float, ...] = (FP32, BF16),
    device: str = "cpu",
    seed: int = 0,
    twin_s: float | None = None,
    own_roundoff: float = 0.0,
) -> Study:
    """
    Args:
        twin_s: Seconds that the runs of the reference's twin may take.
        own_roundoff: The least of the reference's arithmetic.
        seed: Of the initial parameters, the order of samples and the guard's masks.
    """
    files = make_files(directory, make_workload, seed)
    request = request_of(
        directory, make_workload, protocol, bias_corrections, choices or {}, unit_roundoffs, device, seed
    )
    request = msgspec.structs.replace(request, twin_s=twin_s, own_roundoff=max(request.own_roundoff, own_roundoff))
    reference = make_reference(request, 0, 1, _Nobody())  # type: ignore[arg-type]
    assert reference == msgspec.json.decode(files.reference.read_bytes(), type=GuardReference)
    return Study(files=files, reference=reference, make_workload=make_workload, device=device)


def join_study(
    directory: Path,
    make_workload: type[Guarded],
    rank: int,
    num_ranks: int,
    *,
    protocol: Protocol,
    bias_corrections: bool = False,
    unit_roundoffs: tuple[float, ...] = (FP32, BF16),
    device: str = "cpu",
    own_roundoff: float = 0.0,
) -> Study:
    """Make the reference on several ranks, of which this process is one; `make_files` came before.

    The ranks stay together, until the study's coordinator leaves.
    """
    request = request_of(directory, make_workload, protocol, bias_corrections, {}, unit_roundoffs, device, 0)
    request = msgspec.structs.replace(request, own_roundoff=max(request.own_roundoff, own_roundoff))
    reference = make_reference(request, rank, num_ranks, _Nobody())  # type: ignore[arg-type]
    torch.distributed.destroy_process_group()
    files = StudyFiles(directory)
    return Study(
        files=files,
        reference=reference,
        make_workload=make_workload,
        device=device,
        rank=rank,
        num_ranks=num_ranks,
        coordinator=coordinator_of(files.trial_directory("judged"), rank, num_ranks, device),
    )


def make_files(directory: Path, make_workload: type[Guarded], seed: int = 0) -> StudyFiles:
    """Make a study's files before its reference: the initial state, the order of batches, the guard's batches."""
    workload, files = make_workload(), StudyFiles(directory)
    files.data.mkdir(parents=True)
    torch.manual_seed(11 + seed)
    save_initial_state(workload.model(), files.initial_state)
    dataset = workload.dataset()
    batches = draw_batches(workload, dataset, seed=7 + seed, limit=36)
    save_batches(files.order_file, batches)
    files.save_guard_batches([torch.utils.data.default_collate([dataset[i] for i in batch]) for batch in batches[:24]])
    return files


def request_of(
    directory: Path,
    make_workload: type[Guarded],
    protocol: Protocol,
    bias_corrections: bool,
    choices: dict[str, Choice],
    unit_roundoffs: tuple[float, ...],
    device: str,
    seed: int,
) -> ReferenceRequest:
    complete = neutral_choices(**choices)
    return ReferenceRequest(
        workload=f"{inspect.getfile(make_workload)}:{make_workload.__name__}",
        study_directory=str(directory),
        choices=complete,
        device=device,
        protocol=msgspec.structs.replace(protocol, seed=protocol.seed + 1000 * seed),
        unit_roundoffs=unit_roundoffs,
        bias_corrections=bias_corrections,
        own_roundoff=max(strategy.unit_roundoff(complete[strategy.name]) for strategy in STRATEGIES),
    )

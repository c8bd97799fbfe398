"""Application of a recommendation in the user's own script, by the code that the trials ran."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from steptune.tuner.emulation import refuse_parts
from steptune.tuner.errors import ChoiceError, RecommendationError
from steptune.tuner.export.leaving import let_go_at_exit
from steptune.tuner.export.native import load_recommendation
from steptune.tuner.hardware import default_device, describe_hardware
from steptune.tuner.network.finding import Level
from steptune.tuner.network.rank_order import examine_order
from steptune.tuner.records import Choice, HardwareProfile, Recommendation
from steptune.tuner.strategies import STRATEGIES, Strategy, strategy_named
from steptune.tuner.strategies.api import Settings
from steptune.tuner.strategies.combine import make_plan
from steptune.tuner.strategies.dataset_cache.choice import DatasetCacheSetting
from steptune.tuner.strategies.dataset_cache.strategy import CachedDataset
from steptune.tuner.strategies.knobs import PREFIX, Knob, is_knob
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.hosts import host_of_ranks
from steptune.tuner.workloads.knobs import knobs_of
from steptune.tuner.workloads.validation import validate
from steptune.tuner.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.job import TrainingJob

UNFINISHED = ".steptune_unfinished"
"""Name of a marker file that exists in a workload's directory while `prepare` runs; after an interrupted run, `prepare`
runs again.
"""


def apply(
    recommendation: Recommendation | str | Path,
    workload: Workload,
    *,
    device: str | torch.device | None = None,
    directory: str | Path | None = None,
) -> TrainingJob:
    """Build the training job that a recommendation describes, by the same code as its trials.

        job = steptune.apply("steptune.json", MyWorkload())
        for batch in job.loader:
            loss = job.step(batch)

    Process-wide settings (threads, back-end flags) are made here; the samples come in the workload's
    own order; the model starts as `workload.model()` makes it, so seed the generators first if you
    want the run to repeat. If torch.distributed is initialised, this process joins it as its rank.

    A recommended memory cache with loader workers is filled here, in one pass over the whole dataset
    in this process: workers are forked from it and share what it holds, whereas each worker filling
    its own would take the memory several times, and workers that do not persist would begin every
    epoch with nothing. Without workers the first epoch fills it, at the same cost. A cache on disk
    is shared by all processes and fills itself during the first epoch.

    Args:
        recommendation: The record, or the path or the text of its JSON or YAML export.
        workload: The workload that was tuned.
        device: Where to train; by default the kind of device that was measured. Ranks use the device
            of their local rank.
        directory: Where the workload's files are. Where it is missing or empty, `workload.prepare`
            is called once (on one rank of a machine); otherwise its content is taken as prepared.

    Raises:
        RecommendationError: The recommendation cannot be read, the workload is not the one that was tuned, or this
            machine lacks the kind of device that was measured.
        WorkloadRejectedError: The workload is not complete.

    Warns:
        UserWarning: torch or the hardware differ from what was measured, a variable of
            `launch_environment` is not set, several processes run without torch.distributed, or ranks are dealt out to
            hosts in turn.
    """
    recommendation = _loaded(recommendation)
    rank, num_ranks = _place()
    _check_workload(recommendation, workload, num_ranks)
    choices = _complete_choices(recommendation, workload)
    target = _device(device, recommendation.hardware, num_ranks)
    _check_machine(recommendation.hardware, target.type)
    _check_environment(recommendation)
    if num_ranks > 1:
        check_order(rank, "nccl" if target.type == "cuda" else "gloo")
    _settle(workload, directory, choices, num_ranks)
    with warnings.catch_warnings():
        # PyTorch's guess that there are too many workers: theirs was measured.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        job = assemble(workload, make_plan(choices), device=target, rank=rank, num_ranks=num_ranks)
    if num_ranks > 1:
        let_go_at_exit(job.model)
    _fill_cache(job)
    return job


def launch_environment(recommendation: Recommendation | str | Path) -> dict[str, str]:
    """Return the environment variables that must be set before torch is imported; often none.

    Set them where the script is launched, or by `os.environ.update(steptune.launch_environment(...))`
    above its `import torch` (`import steptune` does not import torch).

    Raises:
        RecommendationError: The recommendation cannot be read.
    """
    return dict(_loaded(recommendation).environment_variables)


def _loaded(recommendation: Recommendation | str | Path) -> Recommendation:
    return recommendation if isinstance(recommendation, Recommendation) else load_recommendation(recommendation)


# --- checks -----------------------------------------------------------------------------------


def _check_workload(recommendation: Recommendation, workload: Workload, num_ranks: int) -> None:
    name = type(validate(workload)).__name__
    if workload.global_batch != recommendation.global_batch:
        raise RecommendationError(
            f"{name}.global_batch is {workload.global_batch}, but {recommendation.workload} was tuned with "
            f"{recommendation.global_batch}: set it to {recommendation.global_batch}, or tune {name} with its own value"
        )
    if workload.global_batch % num_ranks:
        raise RecommendationError(
            f"{name}.global_batch must be divisible by the number of ranks, got {workload.global_batch} for "
            f"{num_ranks} ranks: start a number of ranks that divides it"
        )


def _complete_choices(recommendation: Recommendation, workload: Workload) -> dict[str, Choice]:
    """Return the choice of every strategy; a strategy unknown to the version that made the recommendation keeps its
    current setting.

    Raises:
        RecommendationError: This version lacks a strategy or parameter of the recommendation.
    """
    every: tuple[Strategy, ...] = (*STRATEGIES, *map(Knob, knobs_of(workload)))
    try:
        for name, choice in recommendation.choices.items():
            _check_choice(name, choice, every, workload)
    except ChoiceError as error:
        raise RecommendationError(
            f"the recommendation (Steptune {recommendation.steptune_version}) cannot be applied by this version: "
            f"{error}. Install the version that made it"
        ) from None
    return {
        s.name: {**s.completed(workload.current.get(s.name, {})), **recommendation.choices.get(s.name, {})}
        for s in every
    }


def _check_choice(name: str, choice: Choice, strategies: Sequence[Strategy], workload: Workload) -> None:
    """Refuse a choice that this version or the workload does not have."""
    if is_knob(name) and name not in [strategy.name for strategy in strategies]:
        raise RecommendationError(
            f"the recommendation sets {name.removeprefix(PREFIX)} to {choice.get('value')!r}, but "
            f"{type(workload).__name__} does not list {name.removeprefix(PREFIX)} in knobs or recipe_knobs: apply the "
            "recommendation to the workload that was tuned"
        )
    strategy_named(name, strategies).check(choice)


def _check_machine(measured: HardwareProfile, kind: str) -> None:
    here = describe_hardware(kind)
    if "OMP_PROC_BIND" in os.environ:  # has pinned this thread, so that it sees one core
        here = msgspec.structs.replace(here, num_cores=measured.num_cores)
    differences = _differences(measured, here)
    if differences:
        warnings.warn(
            f"the recommendation was measured elsewhere: {'; '.join(differences)}. Its gain here is unknown: "
            "tune on this machine to measure it",
            UserWarning,
            stacklevel=3,
        )


def _differences(measured: HardwareProfile, here: HardwareProfile) -> list[str]:
    pairs = [(measured.label, here.label)]
    pairs += [
        (f"{name} {measured.versions[name]}", f"{name} {here.versions[name]}")
        for name in ("torch", "cuda")
        if name in measured.versions and name in here.versions
    ]
    return [f"on {there}, here {this}" for there, this in pairs if there != this]


def _check_environment(recommendation: Recommendation) -> None:
    wanted = recommendation.environment_variables
    missing = {name: value for name, value in wanted.items() if os.environ.get(name) != value}
    if missing:
        settings = " ".join(f"{name}={value}" for name, value in missing.items())
        raised = ", ".join(f"{name} is {os.environ.get(name, 'not set')}" for name in missing)
        warnings.warn(
            f"{raised}, but the recommendation was measured with {settings}, which must be set before torch is "
            "imported: set it where the script is launched, or by os.environ.update(steptune.launch_environment(...)) "
            "above `import torch`",
            UserWarning,
            stacklevel=3,
        )


def check_order(rank: int, backend: str) -> None:
    """Warn, on the first rank, if ranks of different hosts are interleaved: a ring over them sends too many bytes
    between hosts, unless Steptune orders the ring.

    Every rank must call it.
    """
    finding = examine_order(host_of_ranks(), backend)
    if rank == 0 and finding.level is not Level.OK:
        warnings.warn(f"{finding.found}: {finding.effect}. {finding.fix}", UserWarning, stacklevel=3)


# --- this process -----------------------------------------------------------------------------


def _place() -> tuple[int, int]:
    """Return the rank and the number of ranks, from torch.distributed where it is initialised."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched not in ("", "1"):
        warnings.warn(
            f"WORLD_SIZE is {launched}, but torch.distributed is not initialised, so every process trains alone: call "
            "torch.distributed.init_process_group() before steptune.apply",
            UserWarning,
            stacklevel=3,
        )
    return 0, 1


def _device(wanted: str | torch.device | None, measured: HardwareProfile, num_ranks: int) -> torch.device:
    import torch

    if wanted is None and measured.device_kind != "cpu" and default_device() != measured.device_kind:
        raise RecommendationError(
            f"the recommendation was measured on {measured.label}, and torch sees no {measured.device_kind} device "
            'here: train there, or pass device="cpu" to train on the CPU anyway'
        )
    name = str(measured.device_kind if wanted is None else wanted)
    if not name.startswith("cuda"):
        return torch.device(name)
    refuse_parts("steptune.apply trains on whole GPUs")
    if name == "cuda":
        local = os.environ.get("LOCAL_RANK") if num_ranks > 1 else None
        name = f"cuda:{local or torch.cuda.current_device()}"
    torch.cuda.set_device(name)
    return torch.device(name)


def _settle(workload: Workload, directory: str | Path | None, choices: Mapping[str, Choice], num_ranks: int) -> None:
    """Set the workload's directory, and prepare the workload if necessary."""
    prepares = type(workload).prepare is not Workload.prepare
    needs = prepares or Settings(choices)[DatasetCacheSetting].where == "disk"
    if directory is None:
        if needs and workload.directory == Workload.directory:
            reason = f"{type(workload).__name__} prepares files" if prepares else "the recommended cache is on disk"
            raise RecommendationError(
                f"{reason}, but no directory is set: pass directory=... to steptune.apply, a folder for this "
                "workload alone"
            )
        return
    workload.directory = Path(directory).expanduser().absolute()
    if prepares:
        _prepare_once(workload, num_ranks)


def _prepare_once(workload: Workload, num_ranks: int) -> None:
    """Prepare the workload on one rank of each machine while the others wait."""
    if num_ranks == 1:
        _prepare(workload)
        return
    import torch.distributed as dist

    if int(os.environ.get("LOCAL_RANK", dist.get_rank())) == 0:
        _prepare(workload)
    dist.barrier()


def _prepare(workload: Workload) -> None:
    directory = workload.directory
    directory.mkdir(parents=True, exist_ok=True)
    mark = directory / UNFINISHED
    if mark.exists() or not any(directory.iterdir()):
        mark.touch()
        workload.prepare(directory)
        mark.unlink()


def _fill_cache(job: TrainingJob) -> None:
    dataset = job.loader.dataset
    if isinstance(dataset, CachedDataset) and dataset.where == "memory" and job.loader.num_workers > 0:
        dataset.fill(range(len(dataset)))

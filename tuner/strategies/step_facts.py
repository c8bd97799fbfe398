"""Facts about a step, read from complete choices, so that advice leaves out features that are already enabled."""

from __future__ import annotations

from collections.abc import Mapping

from steptune.tuner.records import Choice, StepFacts
from steptune.tuner.strategies.activation_checkpointing.choice import ActivationCheckpointingSetting
from steptune.tuner.strategies.api import Setting
from steptune.tuner.strategies.compile.choice import MODES_WITH_GRAPHS, CompileSetting
from steptune.tuner.strategies.cuda_graph.choice import CudaGraphSetting
from steptune.tuner.strategies.data_loading.choice import DataLoadingSetting
from steptune.tuner.strategies.device_prefetch.choice import DevicePrefetchSetting
from steptune.tuner.strategies.memory_format.choice import MemoryFormatSetting
from steptune.tuner.strategies.optimizer_implementation.choice import OptimizerImplementationSetting
from steptune.tuner.strategies.precision.choice import PrecisionSetting


def step_facts(choices: Mapping[str, Choice]) -> StepFacts:
    """Read from the complete choices of a trial which features are enabled."""

    def chosen(kind: type[Setting], parameter: str) -> object:
        return choices.get(kind.strategy, {}).get(parameter)

    mode = chosen(CompileSetting, "mode")
    workers = chosen(DataLoadingSetting, "num_workers")
    num_workers = workers if isinstance(workers, int) else None
    level = chosen(PrecisionSetting, "level")
    dtype = chosen(PrecisionSetting, "dtype") or (
        "tf32" if level == "tf32" else "bfloat16" if level in ("O1", "O2", "O3") else ""
    )
    pinned = chosen(DataLoadingSetting, "pin_memory")
    return StepFacts(
        compiled=bool(mode),
        cuda_graphs=bool(chosen(CudaGraphSetting, "scope")) or mode in MODES_WITH_GRAPHS,
        optimizer=str(chosen(OptimizerImplementationSetting, "implementation") or ""),
        loader="" if num_workers is None else "workers" if num_workers else "main process",
        num_workers=num_workers,
        pinned_memory=pinned if isinstance(pinned, bool) else None,
        prefetched=bool(chosen(DevicePrefetchSetting, "ahead")),
        matmul_dtype=str(dtype),
        channels_last=True if chosen(MemoryFormatSetting, "layout") == "channels_last" else None,
        checkpointed=bool(
            chosen(ActivationCheckpointingSetting, "every") or chosen(ActivationCheckpointingSetting, "save")
        ),
        own_capture=True,
    )

"""Looking at this machine, or at a workload on it, outside of a study."""

from __future__ import annotations

import tempfile
from pathlib import Path

from service.running import chosen_level, isolated_runner
from service.settings import Settings
from tuner.records import (
    DatasetFacts,
    Environment,
    ModelFacts,
    OptimizerFacts,
    SampleUnit,
    WorkloadFacts,
)
from tuner.workloads.reference import format_reference, parse_reference


def look_here(workload: str | None, device: str | None) -> tuple[Environment, WorkloadFacts]:
    """The environment, and the facts of a workload; without one, of a workload that has everything."""
    reference = format_reference(parse_reference(workload)) if workload else "zoo:synthetic"
    with tempfile.TemporaryDirectory(prefix="steptune-") as folder:
        settings = Settings()
        level = chosen_level(settings)
        with isolated_runner(
            workload=reference, directory=Path(folder), settings=settings, level=level, device=device or ""
        ) as runner:
            environment = runner.describe()
            return environment, runner.inspect() if workload else workload_with_everything()


def workload_with_everything() -> WorkloadFacts:
    """A workload to which every strategy applies, so that only the machine limits them."""
    return WorkloadFacts(
        reference="",
        name="a workload that has everything",
        signature="",
        global_batch=32,
        sample_unit=SampleUnit.SAMPLE,
        dataset=DatasetFacts(
            kind="map",
            length=1 << 20,
            sample_bytes=1,
            sample_ns=1,
            deterministic=True,
            splits=True,
            load_deterministic=True,
            padding_share=0.4,
        ),
        model=ModelFacts(
            num_parameters=1,
            parameter_bytes=4,
            num_parameter_tensors=1,
            module_types={"Conv2d": 1, "Linear": 1, "LayerNorm": 1},
            num_blocks=12,
            uses_attention=True,
            expert_implementations=("looped", "batched", "grouped"),
            expert_implementation="looped",
            unaligned_linears={"8": 1, "64": 1},
            unaligned_flops={"8": 0.5, "64": 0.5},
            has_class_token=True,
        ),
        optimizer=OptimizerFacts(
            name="AdamW",
            module="torch.optim",
            implementation="default",
            implementations=("for_loop", "foreach", "fused"),
        ),
        max_global_batch=128,
    )

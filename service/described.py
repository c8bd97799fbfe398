"""Example workloads and machines, for the description of strategies if the user names no workload. Every choice applies
to at least one of them.

No single workload has everything: batch normalisation and attention masks, fixed shapes and unequal lengths, AdamW and
momentum are required by different choices, and some exclude each other.
"""

from __future__ import annotations

from msgspec.structs import replace

from steptune.tuner.records import (
    DatasetFacts,
    Device,
    Environment,
    HardwareProfile,
    ModelFacts,
    OptimizerFacts,
    SampleUnit,
    UnitFacts,
    WorkloadFacts,
)

_IMPLEMENTATIONS = ("for_loop", "foreach", "fused")
_ADAMW = OptimizerFacts(
    name="AdamW",
    module="torch.optim.adamw",
    implementation="default",
    implementations=_IMPLEMENTATIONS,
    capturable=True,
)
_SGD = replace(_ADAMW, name="SGD", module="torch.optim.sgd")
_MAP = DatasetFacts(
    kind="map",
    length=1 << 20,
    sample_bytes=1 << 10,
    sample_ns=10**6,
    deterministic=True,
    splits=True,
    load_deterministic=True,
)


def _workload(name: str, model: ModelFacts, optimizer: OptimizerFacts = _ADAMW) -> WorkloadFacts:
    return WorkloadFacts(
        reference="",
        name=name,
        signature="",
        global_batch=32,
        sample_unit=SampleUnit.SAMPLE,
        dataset=_MAP,
        model=model,
        optimizer=optimizer,
        max_global_batch=128,
        sample_step_ns=10**7,
    )


def _model(num_parameters: int, num_blocks: int, modules: dict[str, int]) -> ModelFacts:
    block = num_parameters // (num_blocks + 1)
    units = {
        "root": UnitFacts(largest=0, root=num_parameters),
        "block": UnitFacts(largest=block, root=block),
    }
    return ModelFacts(
        num_parameters=num_parameters,
        parameter_bytes=4 * num_parameters,
        num_parameter_tensors=12 * num_blocks,
        module_types=modules,
        num_blocks=num_blocks,
        num_block_kinds=1,
        shard_units=units,
        unaligned_linears={"8": 1, "64": 2},
        unaligned_flops={"8": 0.3, "64": 0.5},
    )


_NO_LAYERWISE = {"lamb": "the optimizer is not LAMB", "lars": "the optimizer is not LARS"}
VISION = replace(
    _workload(
        "a vision transformer trained with AdamW",
        replace(
            _model(86_000_000, 12, {"Conv2d": 1, "Linear": 25, "LayerNorm": 25, "MultiheadAttention": 12}),
            uses_attention=True,
            can_be_batch_second=True,
            has_class_token=True,
            tensor_units=12,
            mask_refusal="its attention has no causal masks",
            kernel_refusals={"window_attention": "the model has no Swin attention", **_NO_LAYERWISE},
        ),
    ),
    byte_form=True,
)
WINDOWS = _workload(
    "a Swin transformer trained with AdamW",
    replace(
        _model(88_000_000, 24, {"Conv2d": 1, "Linear": 99, "LayerNorm": 53, "WindowAttention": 24}),
        mask_refusal="the model computes its own attention masks, or uses none",
        kernel_refusals={"window_attention": "", **_NO_LAYERWISE},
    ),
)
LANGUAGE = _workload(
    "a mixture-of-experts language model trained with AdamW",
    replace(
        _model(1_300_000_000, 24, {"Embedding": 1, "Linear": 96, "LayerNorm": 49}),
        uses_attention=True,
        mask_refusal="",
        tensor_units=16,
        num_movable_experts=8,
        expert_implementations=("looped", "batched", "grouped"),
        expert_implementation="looped",
    ),
)
CONVOLUTIONS = _workload(
    "a convolutional network with batch normalisation trained with SGD",
    replace(
        _model(25_000_000, 16, {"Conv2d": 53, "BatchNorm2d": 53, "ReLU": 49, "Linear": 1}), has_batch_statistics=True
    ),
    _SGD,
)
TEXTS = replace(
    _workload(
        "a text classifier (batched experts and unequal sequence lengths) trained with AdamW",
        replace(
            _model(110_000_000, 12, {"Embedding": 3, "Linear": 73, "LayerNorm": 25}),
            uses_attention=True,
            expert_implementations=("looped", "batched"),
            expert_implementation="batched",
        ),
    ),
    dataset=replace(_MAP, padding_share=0.4),
    varying_shapes=True,
)
BY_LAMB, BY_LARS = (
    _workload(
        f"a text encoder trained in large batches with {name.upper()}",
        replace(
            _model(110_000_000, 12, {"Embedding": 3, "Linear": 73, "LayerNorm": 25}),
            kernel_refusals={"window_attention": "the model has no Swin attention", **_NO_LAYERWISE, name: ""},
        ),
    )
    for name in _NO_LAYERWISE
)
DETECTOR = _workload(
    "an object detector (label assignment in the loss) trained with AdamW",
    replace(_model(9_000_000, 8, {"Conv2d": 60, "BatchNorm2d": 60}), kernel_refusals={"simota": "", "fcos3d": ""}),
)
WORKLOADS = (VISION, WINDOWS, LANGUAGE, CONVOLUTIONS, TEXTS, BY_LAMB, BY_LARS, DETECTOR)


def _machine(kind: str, num_devices: int, num_hosts: int = 1) -> Environment:
    device = Device(kind=kind, name=kind, memory_bytes=64 << 30, capability="9.0" if kind == "cuda" else None)
    return Environment(
        hardware=HardwareProfile(
            devices=(device,) * num_devices, num_cores=8 * num_devices, cpu_name="cpu", memory_bytes=256 << 30
        ),
        compiler="g++",
        free_disk_bytes=1 << 40,
        free_memory_bytes=256 << 30,
        num_ranks=num_devices * num_hosts,
        num_hosts=num_hosts,
    )


MACHINES = {
    "CPU": _machine("cpu", 1),
    "1 GPU": _machine("cuda", 1),
    "4 GPUs": _machine("cuda", 4),
    "2 × 4 GPUs": _machine("cuda", 4, num_hosts=2),
}

"""Recommendations that between them use every part of every exporter."""

from __future__ import annotations

from hypothesis import strategies as st
from report_builders import complete, cpu_hardware, make_recommendation

from steptune.tuner.records import (
    BASELINE,
    Candidate,
    Choice,
    DatasetFacts,
    Device,
    Environment,
    HardwareProfile,
    ModelFacts,
    OptimizerFacts,
    Recommendation,
    SampleUnit,
    WorkloadFacts,
)
from steptune.tuner.strategies import STRATEGIES, Supported, strategy_named
from steptune.tuner.strategies.combine import conflict, normalise


def gpu_hardware(count: int = 1) -> HardwareProfile:
    gpu = Device(kind="cuda", name="NVIDIA H100", memory_bytes=80 << 30, capability="9.0")
    return HardwareProfile(
        devices=(gpu,) * count,
        num_cores=16,
        cpu_name="Intel Xeon",
        memory_bytes=128 << 30,
        versions={"torch": "2.13.0", "python": "3.11.7", "cuda": "13.0"},
    )


def on_cpu(**choices: Choice) -> Recommendation:
    return make_recommendation(Candidate(choices=choices))


def on_gpus(num_ranks: int = 1, **choices: Choice) -> Recommendation:
    return make_recommendation(Candidate(choices=choices), hardware=gpu_hardware(num_ranks), num_ranks=num_ranks)


def sharded(mode: str, **changes: bool | int | str | None) -> Recommendation:
    """With a choice of `sharding`, all of whose parameters are the candidate's."""
    choice: Choice = {**strategy_named("sharding").defaults, "mode": mode, **changes}
    candidate = Candidate(choices={"activation_checkpointing": {"every": 1}, "sharding": choice})
    choices = {**complete(candidate), "sharding": choice}
    return make_recommendation(
        candidate, choices=choices, environment_variables={}, hardware=gpu_hardware(4), num_ranks=4
    )


CUDA = {
    "autocast_bfloat16": on_gpus(precision={"level": "O1", "dtype": "bfloat16"}, data_loading={"pin_memory": True}),
    "autocast_float16_two_ranks": on_gpus(2, precision={"level": "O1", "dtype": "float16"}),
    "masters": on_gpus(precision={"level": "O2", "dtype": "bfloat16"}),
    "pure_bfloat16": on_gpus(precision={"level": "O3", "dtype": "bfloat16"}),
    "pure_float16": on_gpus(precision={"level": "O3", "dtype": "float16"}),
    "tf32": on_gpus(precision={"level": "tf32"}, compile={"mode": "reduce-overhead"}),
    "flags": on_gpus(
        backend_flags={"cudnn_benchmark": True, "tf32": True}, compile={"mode": "max-autotune-no-cudagraphs"}
    ),
    "buckets_of_two_ranks": on_gpus(
        2, ddp_buckets={"bucket_cap_mb": 50, "first_bucket_mb": 50, "static_graph": True, "bucket_views": True}
    ),
    "bfloat16_between_two_ranks": on_gpus(2, gradient_compression={"method": "bf16"}),
    "powersgd_between_two_ranks": on_gpus(
        2, gradient_compression={"method": "powersgd", "rank": 8}, ddp_buckets={"bucket_cap_mb": 50}
    ),
    "eight_bits_between_two_ranks": on_gpus(2, gradient_compression={"method": "int8"}),
    "graphs_of_all": on_gpus(compile={"mode": "max-autotune"}, optimizer_implementation={"implementation": "foreach"}),
}
SHARDED = {
    "sharded_full": sharded("full"),
    "sharded_full_offloaded": sharded("full", cpu_offload=True, wrap="size", min_num_params=5_000_000),
    "sharded_full_kept": sharded("full", reshard=False, wrap="block", prefetch=2, backward_prefetch=3),
    "sharded_without_norms": sharded("full", wrap="block", ignored="norms", reduce_each=False),
    "sharded_grad_op": sharded("grad_op", cpu_offload=True),
    "sharded_hybrid": sharded("hybrid"),
    "sharded_hybrid_kept": sharded("hybrid", reshard=False),
    "sharded_zero1": sharded("zero1"),
}
RECOMMENDATIONS = {
    "baseline": make_recommendation(BASELINE),
    "everything_on_cpu": on_cpu(
        data_loading={"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4},
        dataset_cache={"where": "memory"},
        cpu_threads={"num_threads": 1, "bind": "close"},
        backend_flags={"flush_denormals": True},
        memory_format={"layout": "channels_last"},
        attention_backend={"backend": "math"},
        compile={"mode": "default", "scope": "regional"},
        optimizer_implementation={"implementation": "fused"},
        activation_checkpointing={"every": 2},
        micro_batch={"num_micro_batches": 4},
    ),
    "epochs_ahead": on_cpu(data_loading={"num_workers": 2, "persistent_workers": True, "epochs_ahead": True}),
    "whole_compilation": on_cpu(
        compile={"mode": "default"},
        optimizer_implementation={"implementation": "for_loop"},
        activation_checkpointing={"every": 1},
    ),
    **CUDA,
    **SHARDED,
}


FACTS = WorkloadFacts(
    reference="zoo:synthetic",
    name="synthetic",
    signature="0123",
    global_batch=32,
    sample_unit=SampleUnit.SAMPLE,
    dataset=DatasetFacts(kind="map", length=512, sample_bytes=4096, sample_ns=1000, deterministic=True, splits=False),
    model=ModelFacts(
        num_parameters=1000,
        parameter_bytes=4000,
        num_parameter_tensors=8,
        num_blocks=3,
        module_types={"Conv2d": 3},
        uses_attention=True,
    ),
    optimizer=OptimizerFacts(
        name="AdamW", module="torch.optim", implementation="default", implementations=("for_loop", "foreach", "fused")
    ),
)
ENVIRONMENTS = {
    kind: Environment(
        hardware=hardware,
        num_ranks=num_ranks,
        compiler="/usr/bin/g++",
        free_memory_bytes=1 << 36,
        free_disk_bytes=1 << 36,
    )
    for kind, hardware, num_ranks in (
        ("cpu", cpu_hardware(), 1),
        ("cuda", gpu_hardware(), 1),
        ("cuda2", gpu_hardware(2), 2),
    )
}


@st.composite
def candidates(
    draw: st.DrawFn, environment: Environment = ENVIRONMENTS["cuda"], *, runnable: bool = False
) -> Candidate:
    """One choice of each of some strategies, as the search would combine them; runnable: that can be run there."""
    candidate = BASELINE
    for strategy in draw(st.lists(st.sampled_from(STRATEGIES), unique_by=lambda s: s.name)):
        choices = [
            choice
            for choice in strategy.choices(environment, FACTS)
            if not runnable or isinstance(strategy.supports(choice, environment, FACTS), Supported)
        ]
        if choices:
            extended = candidate.with_choice(strategy.name, draw(st.sampled_from(choices)))
            if not runnable or conflict(extended, environment, FACTS) is None:
                candidate = extended
    return normalise(candidate, FACTS)

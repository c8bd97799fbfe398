"""Material for tests of predictions: models, links and the steps that were measured by hand on 4 H200.

Source of the figures: measured by hand on one host of 4 H200 (NVLink), ms per step; two hosts are emulated
(`NCCL_HOSTID` for each pair, sockets over loopback, 7 to 9 GB/s of bus bandwidth; with 4 threads of 4 sockets 23 GB/s,
but messages of 1 MiB four times slower). ViT-L/16: 64 images per GPU, ResNet-50: 64, GPT-2 large: 4 x 1024 tokens;
fused AdamW. Rows of DDP compute in O1 (FP32 gradients), those of FSDP in bf16 with FP32 masters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from builders import sample_facts
from msgspec import structs
from report_builders import cpu_hardware, make_result, make_study, make_windows

from steptune.tuner.prediction.cluster import Cluster
from steptune.tuner.prediction.model import Model
from steptune.tuner.prediction.step import UPDATE_BYTES, ComputeStep
from steptune.tuner.records import (
    Breakdown,
    Calibration,
    Candidate,
    CaptureQuality,
    Choice,
    Environment,
    Link,
    ModelFacts,
    Purpose,
    SampleUnit,
    Scalar,
    Study,
    Topology,
    TrialResult,
    Window,
)
from steptune.tuner.strategies import STRATEGIES

NVLINK = Link(kind="NV18", latency_ns=2_000, bytes_per_s=350e9, call_ns=15_000)
"""Bandwidth as nccl-tests show it on H200 without NVLS; latency and call as NCCL's usual ones."""
SOCKETS = Link(kind="emulated network", latency_ns=25_000, bytes_per_s=9e9)
MANY_SOCKETS = Link(kind="emulated network", latency_ns=205_000, bytes_per_s=23e9)
"""1 MiB takes 4 times as long as on `SOCKETS`: 6 steps are 4 (6 x 25 us + 1.5 MiB / 9 GB/s) less 1.5 MiB / 23 GB/s."""
H200 = Calibration(copy_bytes_per_s=4.0e12)
CONTENTION = 0.5


def model_facts(num_parameters: int, num_tensors: int, num_blocks: int) -> ModelFacts:
    return ModelFacts(
        num_parameters=num_parameters,
        parameter_bytes=4 * num_parameters,
        num_parameter_tensors=num_tensors,
        num_blocks=num_blocks,
    )


VIT_LARGE = model_facts(304_326_632, 296, 24)
RESNET_50 = model_facts(25_557_032, 161, 16)
GPT2_LARGE = model_facts(774_030_080, 436, 36)


def choices(**changes: Mapping[str, Scalar]) -> dict[str, Choice]:
    """Complete ones."""
    return {s.name: {**s.defaults, **changes.get(s.name, {})} for s in STRATEGIES}


def step_of(step_ms: float, facts: ModelFacts) -> ComputeStep:
    """A step without communication, of which only the total is known: the update is bound by memory."""
    update_ns = UPDATE_BYTES * facts.num_parameters / H200.copy_bytes_per_s * 1e9
    passes_ns = step_ms * 1e6 - update_ns
    return ComputeStep(
        before_ns=0,
        forward_ns=passes_ns / 3,
        backward_ns=passes_ns * 2 / 3,
        optimizer_ns=update_ns,
        divisible_ns=update_ns,
    )


def model_of(step_ms: float, facts: ModelFacts, contention: float = CONTENTION) -> Model:
    return Model(step=step_of(step_ms, facts), facts=facts, calibration=H200, contention=contention)


def cluster_of(num_hosts: int, devices: int, between: Link = SOCKETS, inside: Link = NVLINK) -> Cluster:
    return Cluster(num_hosts=num_hosts, devices_per_host=devices, inside=inside, between=between)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A row of the figures.

    Attributes:
        alone_ms: The step without communication, in the same precision.
        waits: The backward pass waited for every reduction (the hook of the measurement was a synchronous one).
    """

    name: str
    facts: ModelFacts
    alone_ms: float
    measured_ms: float
    cluster: Cluster
    choices: dict[str, Choice]
    waits: bool = False


ONE, TWO, TWO_FAST = cluster_of(1, 4), cluster_of(2, 2), cluster_of(2, 2, MANY_SOCKETS)
TWO_LEVELS = {"levels": 2}
BF16 = {"method": "bf16"}


def _fsdp(mode: str, wrap: str = "block") -> dict[str, Choice]:
    return choices(precision={"level": "O2", "dtype": "bfloat16"}, sharding={"mode": mode, "wrap": wrap})


def _rows(facts: ModelFacts, alone_ms: float, *rows: tuple[str, float, Cluster, dict[str, Choice], bool]):
    return tuple(
        Measured(
            name=name,
            facts=facts,
            alone_ms=alone_ms,
            measured_ms=measured,
            cluster=cluster,
            choices=chosen,
            waits=waits,
        )
        for name, measured, cluster, chosen, waits in rows
    )


FSDP_ALONE_MS = 67.5
"""Nobody has measured bf16 parameters without communication: such that FSDP by block takes its measured 70.0 on one
host. That row is therefore not among the rows."""

KNOWN: tuple[Measured, ...] = (
    *_rows(
        VIT_LARGE,
        72.0,
        ("ViT-L, one host, DDP 25 MiB", 76.9, ONE, choices(), False),
        ("ViT-L, one host, DDP 1 MiB", 77.0, ONE, choices(ddp_buckets={"bucket_cap_mb": 1}), False),
        ("ViT-L, one host, DDP 200 MiB", 77.1, ONE, choices(ddp_buckets={"bucket_cap_mb": 200}), False),
        ("ViT-L, two hosts, DDP 25 MiB", 229.0, TWO, choices(), False),  # 223 to 235
        ("ViT-L, two hosts, DDP 200 MiB", 282.0, TWO, choices(ddp_buckets={"bucket_cap_mb": 200}), False),
        ("ViT-L, two hosts, bf16 hook", 130.0, TWO, choices(gradient_compression=BF16), False),
        (
            "ViT-L, two hosts, PowerSGD rank 4",
            120.0,
            TWO,
            choices(gradient_compression={"method": "powersgd", "rank": 4}),
            False,
        ),
        ("ViT-L, two hosts, two levels", 200.0, TWO, choices(hierarchical_allreduce=TWO_LEVELS), True),
        (
            "ViT-L, two hosts, two levels, bf16 between",
            140.0,
            TWO,
            choices(hierarchical_allreduce=TWO_LEVELS, gradient_compression=BF16),
            True,
        ),
        ("ViT-L, two hosts, more sockets, DDP", 155.0, TWO_FAST, choices(), False),
    ),
    *_rows(
        VIT_LARGE,
        FSDP_ALONE_MS,
        ("ViT-L, one host, FSDP without resharding", 69.1, ONE, _fsdp("grad_op"), False),
        ("ViT-L, one host, FSDP root only", 71.2, ONE, _fsdp("full", "root"), False),
        ("ViT-L, two hosts, FSDP", 214.0, TWO, _fsdp("full"), False),
        ("ViT-L, two hosts, hybrid", 142.0, TWO, _fsdp("hybrid"), False),
        ("ViT-L, two hosts, more sockets, hybrid", 135.0, TWO_FAST, _fsdp("hybrid"), False),
    ),
    *_rows(
        RESNET_50,
        28.9,
        ("ResNet-50, two hosts, DDP", 34.4, TWO, choices(), False),
        ("ResNet-50, two hosts, two levels", 42.3, TWO, choices(hierarchical_allreduce=TWO_LEVELS), True),
        ("ResNet-50, two hosts, bf16 hook", 34.0, TWO, choices(gradient_compression=BF16), False),
    ),
    *_rows(
        GPT2_LARGE,
        120.1,
        ("GPT-2 large, one host, DDP", 129.8, ONE, choices(), False),
        ("GPT-2 large, one host, bf16 hook", 135.7, ONE, choices(gradient_compression=BF16), False),
    ),
)
"""All but hybrid sharding with bf16 reduction (88.7 and 93 ms), which no strategy offers: FSDP reduces FP32 at O2."""


# --- a study whose trials take what the model says --------------------------------------------------

ALONE_NS = {"compute_matmul": 60_000_000, "optimizer": 6_000_000, "data_wait": 4_000_000}
PHASES_NS = {"forward": 20_000_000, "backward": 40_000_000, "optimizer": 6_000_000}
NUM_STEPS = 20
LINK = Link(kind="loopback", latency_ns=10_000, bytes_per_s=2e9, call_ns=50_000)


def profile_of(exposed_ns: int = 0, hidden_ns: int = 0) -> Breakdown:
    """Breakdown of a step that computes for 70 ms, with communication before it and beside it."""
    per_step = {**ALONE_NS, "communication": exposed_ns}
    step_ns = sum(per_step.values())
    return Breakdown(
        rank=0,
        device="cpu",
        num_steps=NUM_STEPS,
        step_time_ns=step_ns * NUM_STEPS,
        categories={name: value * NUM_STEPS for name, value in per_step.items()},
        quality=CaptureQuality(num_events=40_000, num_steps=NUM_STEPS),
        unprofiled_step_time_ns=step_ns,
        rescaled=per_step,
        overlapped={"communication": hidden_ns * NUM_STEPS},
        phases={name: value * NUM_STEPS for name, value in PHASES_NS.items()},
    )


def steady_windows(step_ns: float, units: int) -> tuple[Window, ...]:
    return tuple(
        structs.replace(window, duration_ns=int(step_ns * window.num_steps), num_units=units * window.num_steps)
        for window in make_windows(step_ns)
    )


def result_of(
    trial_id: str, candidate: Candidate, step_ns: float, *, num_ranks: int = 1, breakdown: Breakdown | None = None
) -> TrialResult:
    """Result of a trial whose ranks compute 16 samples a step each."""
    purpose = Purpose.BASELINE if candidate.is_baseline else Purpose.EXPLORE
    result = make_result(trial_id, candidate, step_ns, purpose=purpose)
    breakdowns = () if breakdown is None else (breakdown,)
    return structs.replace(result, windows=steady_windows(step_ns, 16 * num_ranks), breakdowns=breakdowns)


def study_of(num_ranks: int = 1, num_hosts: int = 1, topology: Topology | None = None) -> Study:
    """Study of ViT-L on a CPU."""
    environment = Environment(hardware=cpu_hardware(), num_ranks=num_ranks, num_hosts=num_hosts, topology=topology)
    facts = sample_facts(
        model=VIT_LARGE, current={}, custom_step=False, global_batch=16 * num_ranks, sample_unit=SampleUnit.SAMPLE
    )
    return make_study(facts=facts, environment=environment)


def topology_of(host_of_rank: tuple[int, ...], link: Link = LINK) -> Topology:
    return Topology(
        host_of_rank=host_of_rank,
        inside=link,
        between=link if len(set(host_of_rank)) > 1 else None,
        whole=link,
        backend="gloo",
        hardware_fingerprint=cpu_hardware().fingerprint,
        measured_at="2026-11-22T12:00:00+00:00",
    )

"""Combinations of choices: the only table of them, each row with its reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from steptune.tuner.records import Candidate, Choice, Environment, Numerics, WorkloadFacts
from steptune.tuner.strategies import STRATEGIES, Strategy, strategy_named
from steptune.tuner.strategies.base import TF32_ROUNDOFF
from steptune.tuner.strategies.compile import MODES_WITH_GRAPHS
from steptune.tuner.strategies.exchange import FSDP
from steptune.tuner.strategies.gradient_compression import FEEDS_BACK, WHOLE_TENSORS
from steptune.tuner.strategies.knobs import knobs_set_by, with_knobs
from steptune.tuner.strategies.optimizer_algorithm import IMPLEMENTATIONS
from steptune.tuner.strategies.parallel_mesh import model_ranks
from steptune.tuner.training.wide_reduction import is_needed

if TYPE_CHECKING:
    from steptune.tuner.training.plan import Plan

Choices = Mapping[str, Choice]


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """A combination that cannot be run.

    Attributes:
        detail: What the reason is in this workload.
    """

    strategies: tuple[str, str]
    applies: Callable[[Choices, Environment, WorkloadFacts], bool]
    reason: str
    detail: Callable[[WorkloadFacts], str] = lambda workload: ""


@dataclass(frozen=True, kw_only=True)
class Meaningless:
    """Parameters that have no meaning in a combination, and are dropped from the candidate."""

    strategy: str
    parameters: tuple[str, ...]
    applies: Callable[[Choices], bool]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Together:
    """Strategies whose choices are worth trying at once, because they share a resource."""

    strategies: tuple[str, str]
    reason: str


def _meshed(choices: Choices) -> bool:
    return model_ranks(choices["parallel_mesh"]) > 1


def _is_fsdp(choices: Choices) -> bool:
    """With parameters in parts, O2 reduces gradients in FP32."""
    return "sharding" in choices and choices["sharding"]["mode"] in FSDP


def _sends_own_format(choices: Choices, environment: Environment) -> bool:
    """Say whether a compression leaves gradients of 16 bits as they are, where O2 would add them up in FP32."""
    precision = choices["precision"]
    own = {"bfloat16": "bf16", "float16": "fp16"}.get(str(precision["dtype"]))
    needed = is_needed(environment.num_ranks, str(precision["dtype"]))
    return precision["level"] == "O2" and needed and choices["gradient_compression"]["method"] == own


def _fused_sgd(choices: Choices, facts: WorkloadFacts) -> bool:
    implementation = choices["optimizer_implementation"]["implementation"] or facts.optimizer.implementation
    own = choices.get("optimizer_algorithm", {}).get("algorithm") is None
    return own and facts.optimizer.name == "SGD" and implementation == "fused"


RECURRENT = ("RNN", "LSTM", "GRU")
"""Modules that cuDNN computes, as it does convolutions."""
CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        strategies=("attention_backend", "precision"),
        applies=lambda c, e, w: (
            e.hardware.device_kind == "cuda"
            and c["attention_backend"]["backend"] in ("flash", "cudnn")
            and c["precision"]["level"] in ("fp32", "tf32")
        ),
        reason="flash and cuDNN attention on CUDA need 16-bit inputs",
    ),
    Conflict(
        strategies=("optimizer_implementation", "precision"),
        applies=lambda c, e, w: (
            e.hardware.device_kind == "cpu" and c["precision"]["level"] == "O3" and _fused_sgd(c, w)
        ),
        reason="torch's fused SGD on a CPU silently leaves 16-bit parameters unchanged",
    ),
    Conflict(
        strategies=("compile", "cuda_graph"),
        applies=lambda c, e, w: c["cuda_graph"]["scope"] == "step" and c["compile"]["mode"] in MODES_WITH_GRAPHS,
        reason="both record CUDA graphs, which cannot be nested: compile with mode default or max-autotune-no-"
        "cudagraphs",
    ),
    Conflict(
        strategies=("cuda_graph", "compile"),
        applies=lambda c, e, w: (
            c["cuda_graph"]["scope"] == "step"
            and bool(w.host_read_beside_masks if c.get("attention_mask", {}).get("is_causal") else w.host_read)
            and not (c["compile"]["mode"] is not None and c["compile"]["scope"] == "whole")
        ),
        reason="the step synchronises the host with the device, which a CUDA graph cannot record; compiling the "
        "whole model may remove the synchronisation",
        detail=lambda w: f" ({w.host_read})",
    ),
    Conflict(
        strategies=("activation_compression", "cuda_graph"),
        applies=lambda c, e, w: (
            c["cuda_graph"]["scope"] == "step" and c["activation_compression"]["kept_as"] == "relu_sparse"
        ),
        reason="the size of a compressed activation depends on the data, and a CUDA graph needs fixed sizes",
    ),
    Conflict(
        strategies=("optimizer_algorithm", "cuda_graph"),
        applies=lambda c, e, w: (
            c["cuda_graph"]["scope"] == "step" and c["optimizer_algorithm"]["algorithm"] not in (None, "adamw")
        ),
        reason="the algorithm reads its learning rate on the host (LAMB and Adafactor their step count, too): a CUDA"
        " graph would keep the first value",
    ),
    Conflict(
        strategies=("optimizer_algorithm", "optimizer_implementation"),
        applies=lambda c, e, w: (
            c["optimizer_algorithm"]["algorithm"] is not None
            and c["optimizer_implementation"]["implementation"]
            not in (None, *IMPLEMENTATIONS.get(str(c["optimizer_algorithm"]["algorithm"]), ()))
        ),
        reason="the algorithm does not have this implementation",
    ),
    Conflict(
        strategies=("optimizer_algorithm", "optimizer_implementation"),
        applies=lambda c, e, w: (
            c["optimizer_algorithm"]["algorithm"] not in (None, "adamw")
            and bool(c["optimizer_implementation"]["contiguous"])
        ),
        reason="the algorithm needs the shape or norm of each parameter, and contiguous parameters are one flat tensor",
    ),
    Conflict(
        strategies=("device_prefetch", "data_loading"),
        applies=lambda c, e, w: bool(c["device_prefetch"]["ahead"]) and not c["data_loading"]["pin_memory"],
        reason="a copy is asynchronous only from pinned memory",
    ),
    Conflict(
        strategies=("device_prefetch", "dataset_cache"),
        applies=lambda c, e, w: bool(c["device_prefetch"]["as_bytes"]) and c["dataset_cache"]["where"] == "disk",
        reason="the cache on disk holds converted samples",
    ),
    Conflict(
        strategies=("ddp_buckets", "micro_batch"),
        applies=lambda c, e, w: bool(c["ddp_buckets"]["static_graph"]) and c["micro_batch"]["num_micro_batches"] != 1,
        reason="DDP records its static graph in the first backward pass, and accumulation does not reduce gradients "
        "in that pass",
    ),
    Conflict(
        strategies=("gradient_compression", "precision"),
        applies=lambda c, e, w: (
            c["gradient_compression"]["method"] is not None
            and (c["precision"]["level"] == "O3" or (c["precision"]["level"] == "O2" and not _is_fsdp(c)))
            and not _sends_own_format(c, e)
        ),
        reason="gradients have 16 bits already, too few to keep the compression error: at O2 use method bf16 over "
        "more than two ranks, or fp16 with float16, which sends 16-bit gradients instead of FP32",
    ),
    Conflict(
        strategies=("gradient_compression", "precision"),
        applies=lambda c, e, w: (
            c["gradient_compression"]["method"] in FEEDS_BACK and c["precision"]["dtype"] == "float16"
        ),
        reason="error feedback adds the error of one step to gradients of another loss scale, and an overflow would "
        "stay in the error forever",
    ),
    Conflict(
        strategies=("gradient_compression", "optimizer_algorithm"),
        applies=lambda c, e, w: (
            c["gradient_compression"]["method"] == "dgc" and c["optimizer_algorithm"]["algorithm"] is not None
        ),
        reason="momentum correction is defined for SGD",
    ),
    Conflict(
        strategies=("gradient_compression", "optimizer_implementation"),
        applies=lambda c, e, w: (
            c["gradient_compression"]["method"] == "dgc" and bool(c["optimizer_implementation"]["contiguous"])
        ),
        reason="momentum is corrected per parameter tensor, and contiguous parameters are one flat tensor",
    ),
    Conflict(
        strategies=("hierarchical_allreduce", "gradient_compression"),
        applies=lambda c, e, w: (
            c["hierarchical_allreduce"]["levels"] == 2 and c["gradient_compression"]["method"] in WHOLE_TENSORS
        ),
        reason="the method needs whole gradient tensors, and between hosts each rank holds only a part: use bf16, "
        "fp16, int8 or one_bit with two levels",
    ),
    Conflict(
        strategies=("sharding", "precision"),
        applies=lambda c, e, w: (
            c["sharding"]["mode"] in FSDP
            and bool(c["sharding"]["cpu_offload"])
            and c["precision"]["dtype"] == "float16"
            and c["precision"]["level"] != "O3"
        ),
        reason="the loss scaler checks gradients on the device, and offloaded gradients are in host memory: use "
        "bfloat16",
    ),
    Conflict(
        strategies=("sharding", "memory_format"),
        applies=lambda c, e, w: c["sharding"]["mode"] in FSDP and c["memory_format"]["layout"] == "channels_last",
        reason="FSDP shards contiguous parameters only",
    ),
    Conflict(
        strategies=("sharding", "optimizer_implementation"),
        applies=lambda c, e, w: c["sharding"]["mode"] != "ddp" and bool(c["optimizer_implementation"]["contiguous"]),
        reason="sharding splits each parameter over ranks, and contiguous parameters are one flat tensor",
    ),
    Conflict(
        strategies=("sharding", "optimizer_algorithm"),
        applies=lambda c, e, w: (
            c["sharding"]["mode"] != "ddp" and c["optimizer_algorithm"]["algorithm"] not in (None, "adamw")
        ),
        reason="the algorithm needs whole parameters, and each rank holds only a part",
    ),
    Conflict(
        strategies=("sharding", "gradient_compression"),
        applies=lambda c, e, w: (
            c["sharding"]["mode"] in FSDP and c["gradient_compression"]["method"] not in (None, "bf16")
        ),
        reason="FSDP reduces and scatters gradients itself and has no hook for compression: use bf16, in which FSDP "
        "can reduce",
    ),
    Conflict(
        strategies=("sharding", "gradient_compression"),
        applies=lambda c, e, w: c["sharding"]["mode"] == "zero1" and c["gradient_compression"]["method"] == "dgc",
        reason="deep gradient compression replaces the momentum of the optimizer, and under ZeRO-1 each rank's "
        "optimizer holds only a part of the parameters",
    ),
    Conflict(
        strategies=("sharding", "hierarchical_allreduce"),
        applies=lambda c, e, w: c["sharding"]["mode"] in FSDP and c["hierarchical_allreduce"]["levels"] == 2,
        reason="FSDP reduces and scatters gradients itself: use sharding mode hybrid for two levels",
    ),
    Conflict(
        strategies=("sharding", "fused_kernels"),
        applies=lambda c, e, w: (
            c["sharding"]["mode"] in FSDP and c["sharding"]["wrap"] == "size" and any(c["fused_kernels"].values())
        ),
        reason="units chosen by size are gathered when their own modules are called, and a kernel goes around some of "
        "these calls: wrap blocks",
    ),
    Conflict(
        strategies=("parallel_mesh", "fused_kernels"),
        applies=lambda c, e, w: _meshed(c) and any(c["fused_kernels"].values()),
        reason="the mesh cuts modules whose inner parts a kernel computes",
    ),
    Conflict(
        strategies=("parallel_mesh", "sharding"),
        applies=lambda c, e, w: _meshed(c) and c["sharding"]["mode"] != "ddp",
        reason="the mesh divides parameters over ranks already, and further sharding on top is not supported",
    ),
    Conflict(
        strategies=("parallel_mesh", "moe_experts"),
        applies=lambda c, e, w: (
            c["parallel_mesh"]["expert"] != 1 and c["moe_experts"]["execution"] not in (None, "batched")
        ),
        reason="expert parallelism exchanges slots of fixed size, which needs moe_experts execution=batched",
    ),
    Conflict(
        strategies=("parallel_mesh", "micro_batch"),
        applies=lambda c, e, w: c["parallel_mesh"]["pipeline"] != 1 and c["micro_batch"]["num_micro_batches"] != 1,
        reason="a pipeline sets its own number of micro-batches",
    ),
    Conflict(
        strategies=("parallel_mesh", "activation_compression"),
        applies=lambda c, e, w: (
            c["parallel_mesh"]["pipeline"] != 1 and c["activation_compression"]["kept_as"] is not None
        ),
        reason="saved-tensor hooks cannot cross pipeline-stage boundaries",
    ),
    Conflict(
        strategies=("parallel_mesh", "precision"),
        applies=lambda c, e, w: _meshed(c) and c["precision"]["dtype"] == "float16",
        reason="the loss scaler would have to skip a step on all ranks or on none, which is not supported with a "
        "device mesh: use bfloat16",
    ),
    Conflict(
        strategies=("parallel_mesh", "precision"),
        applies=lambda c, e, w: _meshed(c) and c["precision"]["level"] in ("O2", "O3"),
        reason="sharded master weights and 16-bit gradients are not supported with a device mesh: use O1",
    ),
    Conflict(
        strategies=("parallel_mesh", "compile"),
        applies=lambda c, e, w: _meshed(c) and c["compile"]["mode"] is not None,
        reason="ranks communicate inside the blocks, which would break every compiled graph",
    ),
    Conflict(
        strategies=("parallel_mesh", "cuda_graph"),
        applies=lambda c, e, w: _meshed(c) and c["cuda_graph"]["scope"] == "step",
        reason="ranks communicate within the step, which a CUDA graph does not record here",
    ),
    Conflict(
        strategies=("parallel_mesh", "optimizer_implementation"),
        applies=lambda c, e, w: _meshed(c) and bool(c["optimizer_implementation"]["contiguous"]),
        reason="the mesh splits each parameter over ranks, and contiguous parameters are one flat tensor",
    ),
    Conflict(
        strategies=("parallel_mesh", "optimizer_algorithm"),
        applies=lambda c, e, w: _meshed(c) and c["optimizer_algorithm"]["algorithm"] not in (None, "adamw"),
        reason="the algorithm needs whole parameters, and each rank holds only a part",
    ),
    Conflict(
        strategies=("parallel_mesh", "gradient_compression"),
        applies=lambda c, e, w: _meshed(c) and c["gradient_compression"]["method"] is not None,
        reason="compression is a DDP hook over all ranks, and in a mesh ranks hold different parameters",
    ),
    Conflict(
        strategies=("parallel_mesh", "hierarchical_allreduce"),
        applies=lambda c, e, w: _meshed(c) and c["hierarchical_allreduce"]["levels"] == 2,
        reason="two-level all-reduce runs over all ranks, and in a mesh only ranks with the same parameters reduce "
        "together",
    ),
    Conflict(
        strategies=("local_sgd", "parallel_mesh"),
        applies=lambda c, e, w: c["local_sgd"]["every"] != 1 and _meshed(c),
        reason="local SGD averages models over all ranks, and in a mesh ranks hold different parameters",
    ),
    Conflict(
        strategies=("local_sgd", "sharding"),
        applies=lambda c, e, w: c["local_sgd"]["every"] != 1 and c["sharding"]["mode"] != "ddp",
        reason="local SGD needs the whole model and the whole optimizer state on each rank",
    ),
    Conflict(
        strategies=("local_sgd", "gradient_compression"),
        applies=lambda c, e, w: c["local_sgd"]["every"] != 1 and c["gradient_compression"]["method"] is not None,
        reason="local SGD sends no gradients between averages",
    ),
    Conflict(
        strategies=("local_sgd", "hierarchical_allreduce"),
        applies=lambda c, e, w: c["local_sgd"]["every"] != 1 and c["hierarchical_allreduce"]["levels"] == 2,
        reason="local SGD has two levels of its own: set inside=True to reduce gradients within hosts in every step "
        "and average models between hosts",
    ),
    Conflict(
        strategies=("local_sgd", "precision"),
        applies=lambda c, e, w: (
            c["local_sgd"]["every"] != 1 and c["precision"]["dtype"] == "float16" and c["precision"]["level"] != "O3"
        ),
        reason="loss scalers of different ranks would skip different steps and learning-rate schedules would "
        "diverge: use bfloat16",
    ),
    Conflict(
        strategies=("activation_compression", "compile"),
        applies=lambda c, e, w: c["activation_compression"]["kept_as"] is not None and c["compile"]["mode"] is not None,
        reason="torch.compile decides itself which activations the backward pass keeps",
    ),
)

MEANINGLESS: tuple[Meaningless, ...] = (
    Meaningless(
        strategy="data_loading",
        parameters=("prefetch_factor", "persistent_workers"),
        applies=lambda c: not c["data_loading"]["num_workers"],
        reason="prefetching and persistent workers need at least one worker",
    ),
    Meaningless(
        strategy="device_prefetch",
        parameters=("as_bytes",),
        applies=lambda c: not c["device_prefetch"]["ahead"],
        reason="nothing is copied ahead",
    ),
    Meaningless(
        strategy="activation_checkpointing",
        parameters=("save",),
        applies=lambda c: c["activation_checkpointing"]["every"] is None,
        reason="nothing is recomputed",
    ),
    Meaningless(
        strategy="compile",
        parameters=("scope", "dynamic"),
        applies=lambda c: c["compile"]["mode"] is None,
        reason="nothing is compiled",
    ),
    Meaningless(
        strategy="backend_flags",
        parameters=("tf32",),
        applies=lambda c: c["precision"]["level"] == "tf32",
        reason="precision sets TF32 already",
    ),
    Meaningless(
        strategy="sharding",
        parameters=(
            *("wrap", "min_num_params", "reshard", "prefetch", "backward_prefetch"),
            *("cpu_offload", "ignored", "reduce_each"),
        ),
        applies=lambda c: c["sharding"]["mode"] not in FSDP,
        reason="parameters are whole on every rank",
    ),
    Meaningless(
        strategy="sharding",
        parameters=("min_num_params",),
        applies=lambda c: c["sharding"]["wrap"] != "size",
        reason="units are not chosen by size",
    ),
    Meaningless(
        strategy="sharding",
        parameters=("reshard",),
        applies=lambda c: c["sharding"]["mode"] == "grad_op",
        reason="parameters stay until the backward pass",
    ),
    Meaningless(
        strategy="sharding",
        parameters=("backward_prefetch",),
        applies=lambda c: (
            c["sharding"]["mode"] == "grad_op" or (c["sharding"]["mode"] == "hybrid" and not c["sharding"]["reshard"])
        ),
        reason="the backward pass gathers nothing",
    ),
    Meaningless(
        strategy="sharding",
        parameters=("reduce_each",),
        applies=lambda c: c["micro_batch"]["num_micro_batches"] == 1,
        reason="there is one micro-batch",
    ),
    Meaningless(
        strategy="ddp_buckets",
        parameters=("bucket_cap_mb", "first_bucket_mb", "static_graph", "bucket_views", "find_unused"),
        applies=lambda c: _meshed(c),
        reason="a mesh does not reduce gradients in DDP's buckets",
    ),
    Meaningless(
        strategy="ddp_buckets",
        parameters=("bucket_cap_mb", "first_bucket_mb", "static_graph", "bucket_views", "find_unused"),
        applies=lambda c: c["sharding"]["mode"] in FSDP,
        reason="FSDP has no buckets",
    ),
    Meaningless(
        strategy="parallel_mesh",
        parameters=("schedule", "micro_batches"),
        applies=lambda c: c["parallel_mesh"]["pipeline"] == 1,
        reason="there is no pipeline",
    ),
    Meaningless(
        strategy="nccl_settings",
        parameters=("algorithm",),
        applies=lambda c: c["sharding"]["mode"] in ("full", "grad_op"),
        reason="the algorithm applies to all-reduce, and FSDP uses reduce-scatter",
    ),
    Meaningless(
        strategy="gradient_compression",
        parameters=("rank",),
        applies=lambda c: c["gradient_compression"]["method"] != "powersgd",
        reason="no matrix is approximated",
    ),
    Meaningless(
        strategy="gradient_compression",
        parameters=("ratio", "warm_up_steps"),
        applies=lambda c: c["gradient_compression"]["method"] != "dgc",
        reason="no elements are chosen",
    ),
    Meaningless(
        strategy="local_sgd",
        parameters=("warm_up_steps", "inside"),
        applies=lambda c: c["local_sgd"]["every"] == 1,
        reason="no step is taken alone",
    ),
    Meaningless(
        strategy="larger_global_batch",
        parameters=("rule",),
        applies=lambda c: c["larger_global_batch"]["factor"] == 1,
        reason="the learning rate stays with the batch",
    ),
)

TOGETHER: tuple[Together, ...] = (
    Together(strategies=("data_loading", "cpu_threads"), reason="loader workers and operator threads share the cores"),
    Together(strategies=("larger_global_batch", "micro_batch"), reason="a larger batch may fit in pieces only"),
    Together(strategies=("data_loading", "device_prefetch"), reason="copying ahead needs pinned memory"),
    Together(
        strategies=("attention_mask", "cuda_graph"), reason="no graph can hold what looks whether a mask is needed"
    ),
    Together(
        strategies=("nccl_settings", "ddp_buckets"), reason="more sockets slow small messages, so buckets go along"
    ),
)


def complete_choices(
    candidate: Candidate, workload: WorkloadFacts, strategies: Sequence[Strategy] = STRATEGIES
) -> dict[str, Choice]:
    """The complete choice of every strategy, and of every knob of the workload."""
    every = with_knobs(strategies, workload)
    return {s.name: s.complete(candidate.choices.get(s.name, {}), workload) for s in every}


def normalise(candidate: Candidate, workload: WorkloadFacts, strategies: Sequence[Strategy] = STRATEGIES) -> Candidate:
    """Only what differs from today and has a meaning.

    Raises:
        ChoiceError: A strategy or parameter that does not exist.
    """
    strategies = with_knobs(strategies, workload)
    for name, choice in candidate.choices.items():
        strategy_named(name, strategies).check(choice)
    complete = complete_choices(candidate, workload, strategies)
    for row in MEANINGLESS:
        if row.strategy in complete and row.applies(complete):
            neutral = strategy_named(row.strategy, strategies).neutral(workload)
            complete[row.strategy] = {
                name: neutral[name] if name in row.parameters else value
                for name, value in complete[row.strategy].items()
            }
    differences = {s.name: s.difference(complete[s.name], workload) for s in strategies}
    return Candidate(choices={name: choice for name, choice in differences.items() if choice})


def conflict(
    candidate: Candidate,
    environment: Environment,
    workload: WorkloadFacts,
    strategies: Sequence[Strategy] = STRATEGIES,
) -> str | None:
    """Why a candidate's combination cannot be run, or None."""
    complete = complete_choices(candidate, workload, strategies)
    for row in CONFLICTS:
        if complete.keys() >= set(row.strategies) and row.applies(complete, environment, workload):
            return f"{' with '.join(row.strategies)}: {row.reason}{row.detail(workload)}"
    return None


def make_plan(choices: Choices) -> Plan:
    """Plan of what the strategies ask for, in their order."""
    from steptune.tuner.training.plan import Plan

    plan = Plan()
    for strategy in (*STRATEGIES, *knobs_set_by(choices)):
        strategy.contribute(plan, choices[strategy.name])
    return plan


def environment_variables(choices: Choices, strategies: Sequence[Strategy] = STRATEGIES) -> dict[str, str]:
    """Variables that must be set before torch is imported."""
    variables: dict[str, str] = {}
    for strategy in strategies:
        variables.update(strategy.environment_variables(choices[strategy.name]))
    return variables


def numerics_of(candidate: Candidate, workload: WorkloadFacts, strategies: Sequence[Strategy] = STRATEGIES) -> Numerics:
    """The strongest thing that a candidate does to the numbers."""
    worst = Numerics.EXACT
    strategies = with_knobs(strategies, workload)
    for name, choice in candidate.choices.items():
        strategy = strategy_named(name, strategies)
        worst = max(worst, strategy.numerics(strategy.complete(choice, workload)), key=lambda n: n.rank)
    return worst


def unit_roundoff_of(
    candidate: Candidate,
    environment: Environment,
    workload: WorkloadFacts,
    strategies: Sequence[Strategy] = STRATEGIES,
) -> float:
    """Unit roundoff of the coarsest arithmetic that a candidate computes with, the baseline's own included.

    FP32 convolutions and recurrent layers on CUDA use TF32 unless told otherwise:
    https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices
    """
    complete = complete_choices(candidate, workload, strategies)
    uses_cudnn = any(("Conv" in name and name != "Conv1D") or name in RECURRENT for name in workload.model.module_types)
    default = TF32_ROUNDOFF if environment.hardware.device_kind == "cuda" and uses_cudnn else 0.0
    return max(default, *(strategy.unit_roundoff(complete[strategy.name]) for strategy in strategies))

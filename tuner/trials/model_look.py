"""Inspection of a workload's model and optimizer: one step, the counts of its work, and whether it can be trained."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from steptune.tuner.errors import WorkloadRejectedError
from steptune.tuner.records import ModelFacts, OptimizerFacts, UnitFacts
from steptune.tuner.strategies.sharding.choice import ShardingSetting
from steptune.tuner.training.batch_second import can_be_batch_second
from steptune.tuner.training.block_kinds import block_kinds
from steptune.tuner.training.capture_failure import HostReads
from steptune.tuner.training.causal_attention import CausalLook
from steptune.tuner.training.experts import num_movable_experts, offered_implementations, used_implementation
from steptune.tuner.training.job import TrainingJob, unwrapped
from steptune.tuner.training.mesh.chain import chain_refusal
from steptune.tuner.training.mesh.pipeline import unchanged_generators
from steptune.tuner.training.mesh.tensor import shareable_units
from steptune.tuner.training.micro_batch import batch_length, split_at, split_batch
from steptune.tuner.training.sharding import sizes_of_units
from steptune.tuner.trials.failures import is_out_of_memory


@dataclass(frozen=True, kw_only=True)
class ModelLook:
    """Facts observed in one step of the model."""

    facts: ModelFacts
    randomness: str
    loss: float
    step_ns: int
    fits: bool
    host_read: str
    host_read_beside_masks: str
    """First operator for whose result the host waits, other than operators that compute an attention mask; empty if
    there is none.
    """
    host_read_in_loss: str
    """First such operator that the loss runs outside of the model's forward pass; empty if there is none."""
    samples: float
    peak_bytes: int


def look_at_model(job: TrainingJob, batch: Any) -> ModelLook:
    """Count a model's work, and run one forward and backward pass: on a part of the batch if the whole does not fit
    into memory.

    Raises:
        WorkloadRejectedError: The loss is not a finite scalar, or does not depend on the parameters.
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
    raise AssertionError("the smallest micro-batch must have run or raised")


def _look(job: TrainingJob, batch: Any, pieces: int) -> ModelLook:
    on_device = job.to_device(batch)
    tried = _try_step(job, on_device)
    own_step, num_samples = job.workload.has_custom_step, batch_length(batch)
    return ModelLook(
        facts=_model_facts(job, on_device, tried, pieces),
        randomness=_randomness(job, on_device),
        loss=tried.loss,
        step_ns=pieces * tried.step_ns,
        fits=pieces == 1,
        host_read="" if own_step else tried.reads.found,
        host_read_beside_masks="" if own_step else tried.reads.found_beside_masks,
        host_read_in_loss="" if own_step else tried.reads.found_in_loss,
        samples=float(num_samples or 0),
        peak_bytes=tried.peak_bytes if num_samples else 0,
    )


@dataclass(frozen=True, kw_only=True)
class _TriedStep:
    """Results and observers of one forward and backward pass."""

    loss: float
    step_ns: int
    peak_bytes: int
    num_unused: int
    flops: int
    attention: _AttentionSeen
    causal: CausalLook
    unaligned: _UnalignedProducts
    reads: HostReads
    block_state: str


def _try_step(job: TrainingJob, batch: Any) -> _TriedStep:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    causal, reads = CausalLook(job.model), HostReads(job.device)
    attention = _AttentionSeen(causal)
    if job.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(job.device)
    began = time.perf_counter_ns()
    unaligned = _UnalignedProducts(job.model)
    blocks = job.workload.blocks(job.model)
    before = _buffers(blocks)
    with attention.mode(), causal, unaligned, FlopCounterMode(display=False) as counter, reads.mode():
        if job.workload.has_custom_step:
            loss = job.workload.training_step(job, batch)
        else:
            with reads.loss_of(job.model):
                loss = job.loss(batch)
            _check_loss(job, loss)
            loss.backward()
    step_ns = time.perf_counter_ns() - began
    peak_bytes = torch.cuda.max_memory_allocated(job.device) if job.device.type == "cuda" else 0
    tried = _TriedStep(
        num_unused=0 if job.workload.has_custom_step else _num_unused_parameters(job.model),
        loss=_finite(loss),
        step_ns=step_ns,
        peak_bytes=peak_bytes,
        flops=int(counter.get_total_flops()),
        attention=attention,
        causal=causal,
        unaligned=unaligned,
        reads=reads,
        block_state=_changed(before, _buffers(blocks)),
    )
    job.optimizer.zero_grad(set_to_none=True)
    return tried


def _num_unused_parameters(model: Any) -> int:
    """Return the number of trained parameters that a backward pass has not reached."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    num_unused = sum(p.grad is None for p in parameters)
    if num_unused == len(parameters):
        raise WorkloadRejectedError(
            "the loss does not depend on any parameter of the model: no parameter receives a gradient"
        )
    return num_unused


def _finite(loss: Any) -> float:
    value = float(loss.detach())
    if not math.isfinite(value):
        raise WorkloadRejectedError(
            f"the loss of the first batch is {value}: the workload cannot be trained as it is; check its data, "
            "its learning rate and its initialisation"
        )
    return value


def _model_facts(job: TrainingJob, batch: Any, tried: _TriedStep, pieces: int) -> ModelFacts:
    from steptune.kernels.applying import refusals

    blocks = list(job.workload.blocks(job.model))
    state = list(job.model.parameters())
    tensor_units, tensor_refusal = shareable_units(blocks)
    return ModelFacts(
        num_parameters=sum(p.numel() for p in state),
        parameter_bytes=sum(p.numel() * p.element_size() for p in state),
        num_parameter_tensors=len(state),
        module_types=dict(Counter(type(module).__name__ for module in job.model.modules())),
        num_blocks=len(blocks),
        num_block_kinds=len(set(block_kinds(blocks))),
        uses_attention=tried.attention.seen,
        mask_refusal=tried.causal.refusal,
        has_batch_statistics=_has_batch_statistics(job.model),
        block_state=tried.block_state,
        num_frozen=sum(p.numel() for p in state if not p.requires_grad),
        num_unused_parameters=tried.num_unused,
        expert_implementations=offered_implementations(job.model),
        expert_implementation=used_implementation(job.model),
        can_be_batch_second=can_be_batch_second(blocks),
        flops_per_step=pieces * tried.flops,
        unaligned_linears=tried.unaligned.layers,
        unaligned_flops=tried.unaligned.shares(tried.flops),
        num_movable_experts=num_movable_experts(job.model),
        tensor_units=tensor_units,
        tensor_refusal=tensor_refusal,
        chain_refusal=_chain_refusal(job, blocks, batch),
        kernel_refusals=refusals(job.model, job.device, job.optimizer, job.workload),
        has_class_token=job.workload.class_token(job.model) is not None,
        shard_units=_shard_units(job),
    )


def _has_batch_statistics(model: Any) -> bool:
    import torch

    kinds = torch.nn.modules.batchnorm
    return any(
        isinstance(m, kinds._BatchNorm) or (isinstance(m, kinds._NormBase) and m.track_running_stats)
        for m in model.modules()
    )


_Buffers = dict[tuple[int, str], tuple[Any, int]]


def _buffers(blocks: Sequence[Any]) -> _Buffers:
    """Return the buffers of all blocks with their versions, keyed by block number and buffer name. The statistics of
    torch's norms are left out.
    """
    import torch

    return {
        (number, f"{name}.{own}".lstrip(".")): (buffer, buffer._version)
        for number, block in enumerate(blocks)
        for name, module in block.named_modules()
        if not isinstance(module, torch.nn.modules.batchnorm._NormBase)
        for own, buffer in module.named_buffers(recurse=False)
        if not buffer.is_inference()
    }


def _changed(before: _Buffers, after: _Buffers) -> str:
    """Return the name of the first buffer that was replaced or changed in place; empty if none was."""
    for key, (buffer, version) in after.items():
        old, old_version = before.get(key, (None, 0))
        if buffer is not old or version != old_version:
            return key[1]
    return ""


def _chain_refusal(job: TrainingJob, blocks: list[Any], batch: Any) -> str:
    """Return the reason why the blocks cannot be pipeline stages; empty if they can. If the batch can be split, the
    test uses a single sample.
    """
    if len(blocks) < 2 or job.workload.has_custom_step:
        return ""
    if _has_batch_statistics(job.model):
        return "batch normalisation would use the statistics of micro-batches"
    sample = split_at(job.workload, batch, [0, 1])[0][0] if batch_length(batch) else batch
    with unchanged_generators(job.device):
        return chain_refusal(job.model, blocks, lambda: job.loss(sample))


def _shard_units(job: TrainingJob) -> dict[str, UnitFacts]:
    """Return the sizes of the largest FSDP unit and of the root, for each way of wrapping that this study may use."""
    from steptune.tuner.strategies.sharding.strategy import SIZES, unit_key

    current = job.workload.current.get(ShardingSetting.strategy, {}).get("min_num_params")
    sizes = sorted({*SIZES, *([int(current)] if current else [])})
    found = {}
    for wrap, least in (("root", 0), ("block", 0), *(("size", size) for size in sizes)):
        largest, root = sizes_of_units(job.model, job.workload, wrap, least)
        found[unit_key({"wrap": wrap, "min_num_params": least})] = UnitFacts(largest=largest, root=root)
    return found


class _UnalignedProducts:
    """Counter of the matmuls that would change if linear layers were padded to multiples of 8, or further to multiples
    of 64.

    Attributes:
        layers: Number of these layers, by multiple.
    """

    def __init__(self, model: Any) -> None:
        from steptune.tuner.training.padding import padded_size, unaligned_linears

        def further(module: Any) -> bool:
            return any(padded_size(n, 64) != padded_size(n, 8) for n in (module.in_features, module.out_features))

        self._modules = {
            "8": unaligned_linears(model, 8),
            "64": [module for module in unaligned_linears(model, 64) if further(module)],
        }
        self.layers = {multiple: len(modules) for multiple, modules in self._modules.items()}
        self._flops = dict.fromkeys(self._modules, 0)
        self._hooks: list[Any] = []

    def __enter__(self) -> _UnalignedProducts:
        for multiple, modules in self._modules.items():
            self._hooks += [module.register_forward_hook(self._counter(multiple)) for module in modules]
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def shares(self, total_flops: int) -> dict[str, float]:
        return {multiple: min(1.0, flops / max(1, total_flops)) for multiple, flops in self._flops.items()}

    def _counter(self, multiple: str) -> Any:
        def count(module: Any, arguments: Any, output: Any) -> None:
            """Count a layer's three matmuls: forward, and for the gradients of input and weight. Each takes 2 m n k
            FLOPs.
            """
            self._flops[multiple] += 6 * output.numel() * module.in_features

        return count


def _check_loss(job: TrainingJob, loss: Any) -> None:
    import torch

    where = f"{type(job.workload).__name__}.loss"
    if not isinstance(loss, torch.Tensor):
        raise WorkloadRejectedError(
            f"{where} returned {type(loss).__name__}, not a tensor: return the loss as a scalar tensor, without .item()"
        )
    if loss.numel() != 1:
        raise WorkloadRejectedError(
            f"{where} returned a tensor of shape {tuple(loss.shape)}: reduce it to a scalar, for example with .mean()"
        )
    if not loss.requires_grad:
        raise WorkloadRejectedError(
            f"{where} returned a tensor that does not depend on the model's parameters (it requires no gradient): "
            "compute it from the model's output, without detach() or no_grad()"
        )


def _randomness(job: TrainingJob, batch: Any) -> str:
    """Return the kind of the model's randomness ("none", "switchable" or "always"), by computing the loss under two
    seeds. Random numbers drawn outside the model (such as the noise of a diffusion) do not count, because they are the
    same for every candidate with the same seed.
    """
    from steptune.tuner.trials.guard_protocol import randomness_off

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
    """Say whether the loss is repeatable: the same for two seeds or, if the model itself draws no random numbers, the
    same for one seed.
    """
    import torch

    def loss_of(seed: int) -> Any:
        torch.manual_seed(seed)
        with torch.no_grad(), draws:
            return job.loss(batch).detach().clone()

    draws = _Draws(job)
    first = loss_of(1)
    return bool(torch.equal(first, loss_of(2))) or (not draws.seen and bool(torch.equal(first, loss_of(1))))


class _Draws:
    """Detector of random numbers drawn by the model, which change a generator's state during its forward pass.

    Attributes:
        seen: Whether the model has drawn any. A model that the loss does not call counts as drawing.
    """

    def __init__(self, job: TrainingJob) -> None:
        self._job = job
        self._before: list[list[Any]] = []
        self._called = self._drew = False

    @property
    def seen(self) -> bool:
        return self._drew or not self._called

    def __enter__(self) -> None:
        model = self._job.model
        self._hooks = [model.register_forward_pre_hook(self._begin), model.register_forward_hook(self._end)]

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begin(self, *_: Any) -> None:
        self._before.append(self._states())

    def _end(self, *_: Any) -> None:
        import torch

        self._called = True
        pairs = zip(self._before.pop(), self._states(), strict=True)
        self._drew |= any(not torch.equal(before, after) for before, after in pairs)

    def _states(self) -> list[Any]:
        import torch

        device = self._job.device
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


class _AttentionSeen:
    """Detector of calls of scaled_dot_product_attention."""

    def __init__(self, causal: CausalLook) -> None:
        self.seen = False
        self._causal = causal

    def mode(self) -> Any:
        import torch
        from torch.overrides import TorchFunctionMode

        outer = self

        class Watch(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func is torch.nn.functional.scaled_dot_product_attention:
                    outer.seen = True
                    outer._causal.note_attention(args, kwargs or {})
                return func(*args, **(kwargs or {}))

        return Watch()


def look_at_optimizer(job: TrainingJob) -> OptimizerFacts:
    """Return the implementation that the user's optimizer runs, such as `foreach` or `fused`, and all implementations
    that its class offers.
    """
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
    if current == "default" and "foreach" in arguments:
        current = "for_loop" if job.device.type == "cpu" else "foreach"  # which torch chooses by itself
    return OptimizerFacts(
        name=cls.__name__,
        module=cls.__module__,
        implementation="own" if own else current,
        implementations=() if own else tuple(offered),
        capturable=not own and ("capturable" in arguments or cls.__name__ == "SGD"),
        state_bytes=state_bytes(job),
    )


def state_bytes(job: TrainingJob) -> int:
    """Return the bytes of the optimizer's state after a step on tensors without storage; 0 if the optimizer cannot step
    on such tensors, or creates its state at another time.
    """
    import torch

    parameters = [(n, p) for n, p in unwrapped(job.model).named_parameters() if p.requires_grad]
    stand_ins = [(name, torch.nn.Parameter(torch.empty_like(p, device="meta"))) for name, p in parameters]
    for _, stand_in in stand_ins:
        stand_in.grad = torch.empty_like(stand_in)
    try:
        optimizer = job.workload.optimizer(iter(stand_ins))
        optimizer.step()
    except Exception:  # the user's own code, which need not know of such tensors
        return 0
    tensors = (value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

"""Deep gradient compression: only the largest elements of every tensor are sent; the rest is kept for later steps.

On every rank, for each tensor of more than one dimension, with momentum m and the share that is sent (ratio):

    u <- m u + g          momentum correction: momentum is of what this rank saw, not of what arrives late
    v <- v + u            what was not sent yet
    send the elements of v that are largest in magnitude; set v and u to zero there (momentum factor masking)

With Nesterov's momentum u <- m (u + g), v <- v + u + g. All ranks gather what all sent, so that the volume grows with
their number. Other tensors, and all of them at ratio 1, are averaged, and get their momentum afterwards as SGD has it:
there this is SGD bit for bit. The optimizer's own momentum and weight decay are taken over from its groups. If the
workload clips to a gradient norm, each of N ranks clips its gradient to that norm divided by sqrt(N), before anything
is kept; as that needs the whole gradient, nothing is sent before the last bucket then. During the warm-up the share
falls in five stages from its fifth root. On a CPU, and in the first step of each share, the largest elements are found
exactly. Afterwards a CUDA device finds them by the last step's threshold in two launches
(`steptune.kernels.deep_gradient`); the paper estimates the threshold from a sample.

Source: Lin et al. (2017), arXiv 1712.01887; https://github.com/synxlin/deep-gradient-compression
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from steptune.kernels.triton_device import unavailable
from steptune.tuner.errors import UnsupportedError, WorkloadRejectedError
from steptune.tuner.training.compression.base import Compression, average_dense

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

    from steptune.tuner.training.compression.lane import Lane
    from steptune.tuner.training.step_hook import Names

STAGES = 5

Gradient = tuple[torch.Tensor, torch.nn.Parameter]


@dataclass(frozen=True)
class Options:
    """Momentum and weight decay of one optimizer group."""

    momentum: float
    nesterov: bool
    weight_decay: float


class DeepGradient(Compression):
    method = "dgc"
    has_clipped = True

    def __init__(
        self,
        lane: Lane,
        optimizer: torch.optim.Optimizer,
        ratio: float,
        warm_up_steps: int = 0,
        max_grad_norm: float | None = None,
    ) -> None:
        super().__init__()
        self._lane = lane
        self._final_ratio = ratio
        self._warm_up_steps = warm_up_steps
        self._max_grad_norm = max_grad_norm
        self._options = take_over(optimizer)
        self._waiting: list[tuple[GradBucket, torch.futures.Future[torch.Tensor]]] = []
        self.momenta: dict[torch.nn.Parameter, torch.Tensor] = {}
        self.unsent: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._thresholds: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._threshold_ratio = ratio

    def kept(self, names: Names) -> dict[str, Any]:
        def by_name(tensors: Mapping[torch.nn.Parameter, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {names[parameter]: tensor.clone() for parameter, tensor in tensors.items()}

        return {
            "num_steps": self.num_steps,
            "momenta": by_name(self.momenta),
            "unsent": by_name(self.unsent),
            "thresholds": by_name(self._thresholds),
            "threshold_ratio": self._threshold_ratio,
        }

    def keep(self, kept: Mapping[str, Any], names: Names) -> None:
        parameters = {name: parameter for parameter, name in names.items()}
        unknown = sorted({*kept["momenta"], *kept["unsent"]} - parameters.keys())
        if unknown:
            raise WorkloadRejectedError(
                f"the saved compression state contains the parameter {unknown[0]!r}, which the model does not "
                "have: resume with the same model, or do not load this state"
            )

        def by_parameter(tensors: Mapping[str, torch.Tensor]) -> dict[torch.nn.Parameter, torch.Tensor]:
            return {parameters[name]: tensor.to(parameters[name].device, copy=True) for name, tensor in tensors.items()}

        self.num_steps = kept["num_steps"]
        self.momenta, self.unsent = by_parameter(kept["momenta"]), by_parameter(kept["unsent"])
        self._thresholds = by_parameter(kept.get("thresholds", {}))
        self._threshold_ratio = kept.get("threshold_ratio", self.ratio)

    # --- what the optimizer's checkpoints have ------------------------------------------------

    def optimizer_state(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's state, including the options and momentum that the compression has taken over; every
        rank must call this.

        The momentum is averaged over the ranks.
        """
        groups, values = [], dict(state["state"])
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
            options = asdict(self._options[group["params"][0]]) if group["params"] else {}
            groups.append({**saved, **options})
            for number, parameter in zip(saved["params"], group["params"], strict=True):
                if parameter in self.momenta:
                    averaged = average_dense(self.momenta[parameter].clone(), dist.group.WORLD)
                    values[number] = {**values.get(number, {}), "momentum_buffer": averaged}
        return {**state, "state": values, "param_groups": groups}

    def optimizer_loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over the optimizer's options and momentum again, after the optimizer has loaded a state."""
        self._options = take_over(optimizer)
        self.momenta, self.unsent, self._thresholds = {}, {}, {}
        for parameter in self._options:
            values = optimizer.state.pop(parameter, {})
            if values.get("momentum_buffer") is not None:
                self.momenta[parameter] = values["momentum_buffer"].contiguous()  # as places in it are counted

    # --- one step -----------------------------------------------------------------------------

    @property
    def settings(self) -> dict[str, Any]:
        return {"ratio": self._final_ratio, "warm_up_steps": self._warm_up_steps}

    @property
    def ratio(self) -> float:
        """Share of the elements that the present step sends."""
        if self.num_steps >= self._warm_up_steps:
            return self._final_ratio
        stage = (STAGES - 1) * self.num_steps // self._warm_up_steps
        return float(self._final_ratio ** ((stage + 1) / STAGES))

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = self._lane.future()
        self._waiting.append((bucket, future))
        if self._max_grad_norm is None or bucket.is_last():
            buckets, futures = zip(*self._waiting, strict=True)
            self._waiting = []
            self._lane.fulfil(futures, lambda: self._reduced(buckets))
        return future

    def _reduced(self, buckets: Sequence[GradBucket]) -> list[torch.Tensor]:
        if self._max_grad_norm is not None:
            limit = self._max_grad_norm / math.sqrt(dist.get_world_size())
            gradients = [gradient for bucket in buckets for gradient in bucket.gradients()]
            scale = (limit / (torch.nn.utils.get_total_norm(gradients) + 1e-6)).clamp_max(1.0)
            torch._foreach_mul_(gradients, scale)
        for bucket in buckets:
            pairs: list[Gradient] = list(zip(bucket.gradients(), bucket.parameters(), strict=True))  # type: ignore[arg-type]
            sparse = [self.ratio < 1.0 and gradient.dim() > 1 and gradient.numel() > 0 for gradient, _ in pairs]
            self._send_all([pair for pair, is_sparse in zip(pairs, sparse, strict=True) if not is_sparse])
            self._send_largest([pair for pair, is_sparse in zip(pairs, sparse, strict=True) if is_sparse])
        self.num_steps += buckets[-1].is_last()
        return [bucket.buffer() for bucket in buckets]

    def _send_all(self, pairs: list[Gradient]) -> None:
        """Average the whole gradients, then apply weight decay and momentum as SGD does."""
        if not pairs:
            return
        flat = average_dense(torch.cat([gradient.flatten() for gradient, _ in pairs]), self._lane.group)
        self.count(flat, flat.nbytes)
        for (gradient, parameter), averaged in zip(pairs, _split_like(flat, pairs), strict=True):
            options = self._options[parameter]
            gradient.copy_(averaged.view_as(gradient))
            if options.weight_decay:
                gradient.add_(parameter, alpha=options.weight_decay)
            if options.momentum:
                momentum = self._of(self.momenta, parameter).mul_(options.momentum).add_(gradient)
                gradient.copy_(gradient.add(momentum, alpha=options.momentum) if options.nesterov else momentum)

    def _send_largest(self, pairs: list[Gradient]) -> None:
        if not pairs:
            return
        offset = sum(gradient.numel() for gradient, _ in pairs)
        own_values, own_places = self._taken(pairs)
        num_ranks = dist.get_world_size()
        all_values = own_values.new_empty(num_ranks * own_values.numel())
        all_places = own_places.new_empty(num_ranks * own_places.numel())
        dist.all_gather_into_tensor(all_values, own_values, group=self._lane.group)
        dist.all_gather_into_tensor(all_places, own_places, group=self._lane.group)
        averaged = own_values.new_zeros(offset)
        for part, where in zip(all_values.chunk(num_ranks), all_places.chunk(num_ranks), strict=True):
            # One rank after the other: each place once, so that all ranks add in the same order.
            averaged.index_add_(0, where, part, alpha=1 / num_ranks)
        # Gathering sends from each rank to all what an all-reduce of half as much for each rank would.
        self.count(averaged, (all_values.nbytes + all_places.nbytes) // 2)
        for (gradient, _), part in zip(pairs, _split_like(averaged, pairs), strict=True):
            gradient.copy_(part.view_as(gradient))

    def _taken(self, pairs: list[Gradient]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values that this rank sends, and their indices in the concatenated tensors."""
        in_one = all(_is_for_kernel(gradient) for gradient, _ in pairs)
        if self._threshold_ratio != self.ratio:
            self._thresholds, self._threshold_ratio = {}, self.ratio
        if in_one and all(parameter in self._thresholds for _, parameter in pairs):
            return self._taken_in_one(pairs)
        values, places, offset = [], [], 0
        for gradient, parameter in pairs:
            self._accumulate(gradient, parameter)
            chosen = self._largest(parameter)
            values.append(self._take(parameter, chosen))
            places.append(chosen + offset)
            offset += gradient.numel()
            if in_one:
                self._thresholds[parameter] = values[-1].abs().amin()
        return torch.cat(values), torch.cat(places)

    def _taken_in_one(self, pairs: list[Gradient]) -> tuple[torch.Tensor, torch.Tensor]:
        from steptune.kernels.deep_gradient import Settings, compensate_and_select

        gradients, parameters = [gradient for gradient, _ in pairs], [parameter for _, parameter in pairs]
        for gradient, parameter in pairs:
            if decay := self._options[parameter].weight_decay:
                gradient.add_(parameter, alpha=decay)
        settings = [
            Settings(self._options[p].momentum, self._options[p].nesterov, math.ceil(self.ratio * p.numel()))
            for p in parameters
        ]
        momenta, unsent = ([self._of(own, p) for p in parameters] for own in (self.momenta, self.unsent))
        thresholds = torch.stack([self._thresholds[parameter] for parameter in parameters])
        sent = compensate_and_select(gradients, momenta, unsent, thresholds, settings)
        self._thresholds.update(zip(parameters, sent.thresholds.unbind(), strict=True))
        return sent.values, sent.places

    def _accumulate(self, gradient: torch.Tensor, parameter: torch.nn.Parameter) -> None:
        options = self._options[parameter]
        if options.weight_decay:
            gradient.add_(parameter, alpha=options.weight_decay)
        unsent, momentum = self._of(self.unsent, parameter), self._of(self.momenta, parameter)
        if options.nesterov:
            momentum.add_(gradient).mul_(options.momentum)
            unsent.add_(momentum).add_(gradient)
        else:
            unsent.add_(momentum.mul_(options.momentum).add_(gradient))

    def _largest(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return the indices of the largest unsent values in the flattened tensor; their number is the same on every
        rank.
        """
        unsent = self.unsent[parameter].flatten()
        return unsent.abs().topk(math.ceil(self.ratio * unsent.numel()), sorted=False).indices.int()

    def _take(self, parameter: torch.nn.Parameter, places: torch.Tensor) -> torch.Tensor:
        """Return the unsent values at the given indices, and set these values and the momentum at these indices to
        zero.
        """
        unsent = self.unsent[parameter].view(-1)
        values = unsent[places]
        unsent[places] = 0.0
        self.momenta[parameter].view(-1)[places] = 0.0
        return values

    def _of(self, kept: dict[torch.nn.Parameter, torch.Tensor], parameter: torch.nn.Parameter) -> torch.Tensor:
        if parameter not in kept:
            kept[parameter] = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        return kept[parameter]


def _is_for_kernel(gradient: torch.Tensor) -> bool:
    return gradient.dtype == torch.float32 and gradient.is_contiguous() and not unavailable(gradient.device)


def take_over(optimizer: torch.optim.Optimizer) -> dict[torch.nn.Parameter, Options]:
    """Remove momentum and weight decay from the optimizer, and return them for every parameter.

    Raises:
        UnsupportedError: The optimizer is not SGD, or momentum correction is not defined for its options.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        raise UnsupportedError(
            f"deep gradient compression requires torch.optim.SGD, got {type(optimizer).__name__}: momentum "
            "correction is defined for SGD only"
        )
    options = {}
    for group in optimizer.param_groups:
        for name in ("dampening", "maximize"):
            if group[name]:
                raise UnsupportedError(f"deep gradient compression is not defined for SGD with {name}={group[name]}")
        taken = Options(group["momentum"], group["nesterov"], group["weight_decay"])
        options.update(dict.fromkeys(group["params"], taken))
        group.update(momentum=0.0, nesterov=False, weight_decay=0.0)
    return options


def _split_like(flat: torch.Tensor, pairs: list[Gradient]) -> tuple[torch.Tensor, ...]:
    return tuple(flat.split([gradient.numel() for gradient, _ in pairs]))

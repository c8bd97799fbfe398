"""Post-local SGD: data-parallel training at first; later, ranks step alone and average their models periodically.

    step t <= W:  gradients averaged over all ranks, as ever
    step t > W:   each rank takes its own gradient, or the average of its host's ranks
                  t - W a multiple of H: parameters and statistics in buffers are averaged over all ranks

Momentum and other states of the optimizer stay each rank's own; each clips its own gradient. Between averages there is
no one model: a checkpoint has the average of all.

Gradients are left out by PyTorch's own hook. Its averagers are not used: they put new memory under parameters, which
undoes memory formats and contiguous parameters, and leave out buffers and parameters without a gradient.

Source: Lin et al., "Don't Use Large Mini-Batches, Use Local SGD" (2018), arXiv 1808.07217;
torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from steptune.tuner.training.compression.base import average_dense
from steptune.tuner.training.hierarchy import average_in_two_levels
from steptune.tuner.training.hosts import Levels, make_levels
from steptune.tuner.training.step_hook import StepHook
from steptune.tuner.training.structure import map_structure

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import GradBucket
    from torch.nn.parallel import DistributedDataParallel

    from steptune.tuner.training.plan import LocalSgdArguments

AVERAGED_BYTES = 25 * 2**20
"""Maximum number of bytes averaged at once, equal to DDP's bucket size. Averaging needs as much extra memory."""


class LocalSgd(StepHook):
    """Hook for local SGD: ranks take steps independently, and their models are averaged periodically.

    Attributes:
        every: Steps from one average to the next.
        warm_up_steps: Ordinary steps before ranks step alone.
        inside: Whether gradients are averaged inside every host in every step.
        num_steps: Updates so far.
        num_averages: Averages of models so far in this job.
    """

    method = "local_sgd"
    ranks_differ = True

    def __init__(self, model: DistributedDataParallel, arguments: LocalSgdArguments) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

        self.every = self.steps_per_round = arguments.every
        self.warm_up_steps = arguments.warm_up_steps
        self.inside = arguments.inside
        self.num_steps = 0
        self.num_averages = 0
        self._model = model
        self._levels: Levels | None = make_levels() if self.inside else None
        self._state = PostLocalSGDState(
            process_group=None,
            subgroup=None if self._levels is None else self._levels.inside,
            start_localSGD_iter=self.warm_up_steps,
            post_local_gradient_allreduce=self.inside,
        )
        self._go_on()

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import post_localSGD_hook

        return post_localSGD_hook(self._state, bucket)

    def after_update(self, parameters: Sequence[torch.Tensor]) -> None:
        """Count an update, and average the ranks' models if an average is due."""
        self.num_steps += 1
        local = self.num_steps - self.warm_up_steps
        if local > 0 and local % self.every == 0:
            self._average([*parameters, *self._buffers()])
            self.num_averages += 1
        self._go_on()

    # --- checkpoints --------------------------------------------------------------------------

    def state(self, state: dict[str, torch.Tensor], model: torch.nn.Module) -> dict[str, torch.Tensor]:
        return self._averaged(state)  # type: ignore[no-any-return]

    def _averaged(self, structure: Any) -> Any:
        """Return a copy of a structure of tensors, in which the tensors that may differ are averaged over the ranks;
        every rank must call it.
        """
        copied = map_structure(lambda leaf: leaf.detach().clone() if _may_differ(leaf) else leaf, structure)
        found: list[torch.Tensor] = []
        map_structure(lambda leaf: found.append(leaf) if _may_differ(leaf) else None, copied)
        self._average(found)
        return copied

    def optimizer_state(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's state, averaged over the ranks. Step counts are left as they are, because averaging
        would only round them.
        """
        without = {
            number: {name: value for name, value in values.items() if name != "step"}
            for number, values in state["state"].items()
        }
        averaged = self._averaged(without)
        return {
            **state,
            "state": {number: {**values, **averaged[number]} for number, values in state["state"].items()},
        }

    def kept(self, names: Mapping[torch.nn.Parameter, str]) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def keep(self, kept: Mapping[str, Any], names: Mapping[torch.nn.Parameter, str]) -> None:
        self.num_steps = kept["num_steps"]
        self._state.iter = min(self.num_steps, self.warm_up_steps)
        self._go_on()

    # --- pieces -------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Stop DDP's broadcast of the first rank's buffers before every forward pass: ranks now have their own."""
        if self.num_steps >= self.warm_up_steps:
            self._model.broadcast_buffers = False

    def _buffers(self) -> Iterator[torch.Tensor]:
        return (buffer for buffer in self._model.module.buffers() if _may_differ(buffer))

    def _average(self, tensors: list[torch.Tensor]) -> None:
        """Average tensors over the ranks in place, in FP32 or a wider dtype."""
        import torch
        import torch.distributed as dist

        with torch.no_grad():
            for together in _grouped([torch.view_as_real(t) if t.is_complex() else t for t in tensors]):
                wide = torch.promote_types(together[0].dtype, torch.float32)
                flat = torch.cat([tensor.detach().flatten().to(wide) for tensor in together])
                if self._levels is None:
                    average_dense(flat, dist.group.WORLD)
                else:
                    average_in_two_levels(flat, self._levels)
                pieces = flat.split([tensor.numel() for tensor in together])
                for tensor, piece in zip(together, pieces, strict=True):
                    tensor.copy_(piece.view(tensor.shape))


def _may_differ(leaf: Any) -> bool:
    """Say whether a value of the state may differ between ranks. Floating-point tensors may; integers are counters,
    equal on all ranks.
    """
    return hasattr(leaf, "data_ptr") and (leaf.is_floating_point() or leaf.is_complex())


def _grouped(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Group consecutive tensors of the same device and dtype, up to the maximum bytes averaged at once."""
    group: list[torch.Tensor] = []
    for tensor in tensors:
        size = sum(other.nbytes for other in (*group, tensor))
        if group and (size > AVERAGED_BYTES or (tensor.device, tensor.dtype) != (group[0].device, group[0].dtype)):
            yield group
            group = []
        group.append(tensor)
    if group:
        yield group

"""Measurement of every block's costs: forward and backward time, parameters, and the activations kept between the two
passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from steptune.tuner.training.mesh.stages import Costs, Piece

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.mesh.chain import Chain, Examined, Loss

REPEATS = 3
"""Number of repetitions of a measurement. The fastest one is the result; the first one is a warm-up."""


def measure(chain: Chain, examined: Examined, loss: Loss, device: torch.device) -> Costs:
    """Measure the costs of one micro-batch, each block by itself on its recorded input."""
    named = dict(chain.model.named_parameters())
    blocks = []
    for number, block in enumerate(chain.blocks):
        args, kwargs = examined.calls[number]

        def run(number: int = number, args: Any = args, kwargs: Any = kwargs) -> torch.Tensor:
            return chain.block(number, *_requiring_grad(args), **kwargs)

        blocks.append(_piece(run, block.parameters(), device))
    front = _piece(lambda: chain.entry(loss), (named[name] for name in examined.front), device)
    hidden = _requiring_grad(examined.calls[-1][0])[0]
    back = _piece(lambda: chain.back(loss, hidden), (named[name] for name in examined.back), device)
    for parameter in chain.model.parameters():
        parameter.grad = None
    # The run behind the blocks computes what is before them too.
    back = Piece(
        time_s=max(0.0, back.time_s - front.forward_s),
        forward_s=max(0.0, back.forward_s - front.forward_s),
        parameter_bytes=back.parameter_bytes,
        kept_bytes=back.kept_bytes,
    )
    return Costs(front=front, blocks=tuple(blocks), back=back)


def _requiring_grad(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (args[0].detach().requires_grad_(), *args[1:])


def _piece(run: Callable[[], torch.Tensor], parameters: Iterable[torch.nn.Parameter], device: torch.device) -> Piece:
    import torch

    kept: dict[int, int] = {}
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    own = {parameter.untyped_storage().data_ptr() for parameter in trained}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    forward_s, time_s = float("inf"), float("inf")
    for _ in range(REPEATS):
        began = _now(device)
        output = run()
        between = _now(device)
        if output.requires_grad:
            output.sum().backward()
        end = _now(device)
        forward_s, time_s = min(forward_s, between - began), min(time_s, end - began)
    return Piece(
        time_s=time_s,
        forward_s=forward_s,
        parameter_bytes=sum(parameter.numel() * parameter.element_size() for parameter in trained),
        kept_bytes=sum(kept.values()),
    )


def _now(device: torch.device) -> float:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()

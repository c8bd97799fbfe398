"""Dtypes of a step's matmuls, read from the graph that autograd recorded.

Looking costs nothing and changes nothing: no hook, no mode, no other graph for the compiler. What compiled code, or a
function with a backward pass of its own, does inside is not recorded there.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_PRODUCT = re.compile(
    r"^(Addmm|Mm|\w*GroupedMm|Bmm|Baddbmm|Addbmm|Mv|Addmv|Dot|Linear|\w*Convolution|\w*Rnn\w*|ScaledDot\w+)Backward"
)
_HIDDEN = re.compile(r"^(CompiledFunction|CheckpointFunction)")


class SeenFormats:
    """Dtypes of the matmuls that led to the first loss computed with gradients enabled.

    Attributes:
        looked: Whether such a loss was inspected.
        products: Number of matmuls with a result of each dtype.
        hidden: Whether parts of the step do not show what they compute.
        autocast: Dtype of autocast while the loss was computed; None where it was off.
    """

    def __init__(self) -> None:
        self.looked = False
        self.products: Counter[str] = Counter()
        self.hidden = False
        self.autocast: str | None = None

    def look(self, loss: torch.Tensor, device: torch.device) -> None:
        """Inspect the graph of a loss, inside the autocast context in which the loss was computed."""
        import torch

        # What is no tensor, or depends on no parameter, is refused by the look at the workload, which says why.
        if self.looked or not isinstance(loss, torch.Tensor) or loss.grad_fn is None:
            return
        self.looked = True
        if torch.is_autocast_enabled(device.type):
            self.autocast = _name(torch.get_autocast_dtype(device.type))
        waiting, known = [loss.grad_fn], {loss.grad_fn}
        while waiting:
            node = waiting.pop()
            if _PRODUCT.match(node.name()):
                self.products[_name(node._input_metadata[0].dtype)] += 1
            self.hidden |= bool(_HIDDEN.match(node.name()))
            following = {found for found, _ in node.next_functions if found is not None} - known
            known |= following
            waiting.extend(following)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

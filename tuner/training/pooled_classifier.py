"""Vision transformer that classifies the mean of its tokens instead of the class token.

The class token is left out before the first block, and the normalisation after the last one gives the mean of all
tokens in the place of the first, which is what the classifier takes. Both are hooks: the parameters stay, and the
class token and its position get a gradient of zero.

Source: pycls, `CLASSIFIER_TYPE: pooled` (https://github.com/facebookresearch/pycls/blob/main/pycls/models/vit.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptune.tuner.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

    from steptune.tuner.workloads.workload import Workload


def pool_tokens(model: torch.nn.Module, workload: Workload) -> torch.nn.Module:
    """Add hooks that drop the class token and put the mean of the tokens in its place.

    Raises:
        UnsupportedError: The position of the class token is not known.
    """
    found = workload.class_token(model)
    if found is None:
        raise UnsupportedError(
            f"the class token of {type(model).__name__} is unknown: implement Workload.class_token, or leave out "
            "pooled_classifier"
        )
    first_block, last_norm = found
    first_block.register_forward_pre_hook(drop_class_token)
    last_norm.register_forward_hook(mean_in_first_place)
    return model


def drop_class_token(module: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return (batch, 1 + tokens, width) without the first token."""
    return (arguments[0][:, 1:], *arguments[1:])


def mean_in_first_place(module: torch.nn.Module, arguments: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    """Average (batch, tokens, width) to (batch, 1, width)."""
    return output.mean(dim=1, keepdim=True)


def is_pooled(model: torch.nn.Module, workload: Workload) -> bool:
    """Say whether the model has the pooling hooks."""
    found = workload.class_token(model)
    return found is not None and drop_class_token in found[0]._forward_pre_hooks.values()

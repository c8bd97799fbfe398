"""Calls of dropout in a guarded step: each that training depends on is noted once, however its output is used."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from steptune.tuner.scripts.agent.calls import Calls

WEIGHT = torch.nn.Parameter(torch.ones(4, 4))
BATCH = torch.ones(3, 4)


def hidden() -> torch.Tensor:
    return BATCH @ WEIGHT


def then_in_place() -> torch.Tensor:
    return torch.relu_(functional.dropout(hidden(), 0.3))


def then_residual() -> torch.Tensor:
    found = functional.dropout(hidden(), 0.3)
    found += BATCH
    return found


def in_place() -> torch.Tensor:
    return torch.relu_(functional.dropout(hidden(), 0.3, inplace=True))


def in_place_under_its_input_s_name() -> torch.Tensor:
    found = hidden()
    functional.dropout(found, 0.3, inplace=True)
    return found


def in_attention() -> torch.Tensor:
    return functional.scaled_dot_product_attention(*[hidden()[None, None]] * 3, dropout_p=0.3)


def checkpointed(*, reentrant: bool) -> torch.Tensor:
    inner = BATCH.clone().requires_grad_()
    found: torch.Tensor = checkpoint(
        lambda x: torch.relu_(functional.dropout(x @ WEIGHT, 0.3)), inner, use_reentrant=reentrant
    )
    return found


def unused() -> torch.Tensor:
    functional.dropout(hidden(), 0.3)
    return hidden()


@pytest.mark.parametrize(
    ("forward", "noted"),
    [
        (then_in_place, ["dropout 0.3"]),
        (then_residual, ["dropout 0.3"]),
        (in_place, ["dropout 0.3"]),
        (in_place_under_its_input_s_name, ["dropout 0.3"]),
        (in_attention, ["dropout of attention 0.3"]),
        (lambda: checkpointed(reentrant=False), ["dropout 0.3"]),
        (lambda: checkpointed(reentrant=True), ["dropout 0.3"]),
        (unused, []),
    ],
)
def test_a_call_is_noted_once_if_the_loss_depends_on_it(forward: Callable[[], torch.Tensor], noted: list[str]) -> None:
    calls = Calls()
    calls.switch_off()
    try:
        forward().sum().backward()
        assert calls.take() == noted
    finally:
        calls.restore()

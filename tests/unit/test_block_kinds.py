"""Which blocks are compiled as one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from steptune.tuner.training.block_kinds import block_kinds


class Shifted(nn.Module):
    """Its rate and shift are read by the code; its index is not."""

    def __init__(self, index: int, *, width: int = 4, shift: int = 0, rate: float = 0.0) -> None:
        super().__init__()
        self.index = index
        self.window = [2, shift]
        self.rest = nn.Dropout(rate)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.rest(self.linear(x.roll(self.window[1], 0))) * scale


def test_blocks_that_differ_by_their_index_alone_are_one_kind() -> None:
    assert block_kinds([Shifted(index) for index in range(6)]) == [0] * 6
    assert block_kinds([]) == []


@pytest.mark.parametrize("other", [{"width": 8}, {"shift": 1}, {"rate": 0.1}], ids=str)
def test_what_guards_tell_apart_makes_a_kind(other: dict[str, float]) -> None:
    blocks = [Shifted(0), Shifted(1, **other), Shifted(2), Shifted(3, **other)]  # type: ignore[arg-type]
    assert block_kinds(blocks) == [0, 1, 0, 1]


def test_a_switch_that_only_the_second_of_two_blocks_has_on_is_no_index() -> None:
    blocks = [Shifted(0), Shifted(0)]
    for block, switch in zip(blocks, (False, True), strict=True):
        block.switch = switch  # type: ignore[assignment]
    assert block_kinds(blocks) == [0, 1]


def test_other_classes_are_other_kinds_and_the_mode_of_training_is_none() -> None:
    blocks = [nn.Linear(2, 2), nn.Linear(2, 2), nn.Bilinear(2, 2, 2)]
    blocks[1].eval()
    assert block_kinds(blocks) == [0, 0, 1]

"""Which blocks are compiled as one, and that no kind's guards are tried for another."""

from __future__ import annotations

import types

import pytest
import torch
import torch._dynamo
from torch import nn

from tuner.training.block_kinds import block_kinds, give_code_of_their_own
from tuner.training.compilation import allow_recompilations


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


def variants(function: object) -> int:
    assert isinstance(function, types.MethodType)
    return len(torch._dynamo.eval_frame._debug_get_cache_entry_list(function.__code__))  # type: ignore[attr-defined]


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


def test_blocks_of_one_kind_keep_their_class_s_code() -> None:
    blocks = [Shifted(index) for index in range(2)]
    give_code_of_their_own(blocks)
    assert all(block.forward.__code__ is Shifted.forward.__code__ for block in blocks)


def test_each_kind_is_compiled_for_itself_and_finds_its_own_variants_only() -> None:
    """Three kinds of two blocks: one graph a kind, in a list of one, and the results are the class's own."""
    torch._dynamo.reset()
    blocks = [Shifted(index, shift=index // 2) for index in range(6)]
    x = torch.randn(3, 4)
    wanted = [block(x, scale=2.0) for block in blocks]
    give_code_of_their_own(blocks)
    allow_recompilations(len(blocks))
    torch._dynamo.utils.counters.clear()
    for block in blocks:
        block.compile(backend="eager", dynamic=False)
    found = [block(x, scale=2.0) for block in blocks]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3
    codes = {block.forward.__code__.co_name for block in blocks}
    assert len(codes) == 3
    assert [variants(block.forward) for block in blocks] == [1] * 6
    torch._dynamo.reset()

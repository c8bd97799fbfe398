"""Attention blocks with the batch in the second dimension: the same results, and only where that is known."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_workloads import Everything
from torch import nn

from steptune.tuner.strategies.memory_format.strategy import MemoryFormat
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.batch_second import can_be_batch_second, is_batch_second, to_batch_second
from steptune.tuner.training.plan import Plan

WIDTH, HEADS, TOKENS, BATCH = 16, 2, 5, 3


class EncoderBlock(nn.Module):
    """Block like that of torchvision's vision transformer."""

    def __init__(self, extra: nn.Module | None = None, *, batch_first: bool = True) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.self_attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.0))
        self.extra = extra or nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.ln_1(x)
        x = x + self.self_attention(y, y, y, need_weights=False)[0]
        return x + self.extra(self.mlp(x))


class Stack(nn.Module):
    """Blocks between an embedding and a head that know nothing of their order."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 2, 2)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.blocks(x).mean(dim=1))


class Vision(Everything):
    def model(self) -> nn.Module:
        return Stack([EncoderBlock() for _ in range(3)])


def encoder(norm_first: bool) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, 0.0, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def compare(plain: nn.Module, changed: nn.Module, call: Any) -> None:
    """Outputs and gradients agree to within rounding."""
    outputs = [call(plain), call(changed)]
    assert torch.allclose(outputs[0], outputs[1], rtol=1e-5, atol=1e-6)
    for output in outputs:
        output.square().mean().backward()
    for ours, theirs in zip(changed.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-4, atol=1e-7)


class TestSame:
    @pytest.mark.parametrize("norm_first", [False, True])
    @pytest.mark.parametrize("masks", ["none", "causal", "padding", "both"])
    def test_as_torch_s_encoder(self, norm_first: bool, masks: str) -> None:
        torch.manual_seed(0)
        plain = encoder(norm_first)
        changed = copy.deepcopy(plain)
        to_batch_second(changed.layers)
        x = torch.randn(BATCH, TOKENS, WIDTH)
        causal = nn.Transformer.generate_square_subsequent_mask(TOKENS) if masks in ("causal", "both") else None
        padding = torch.zeros(BATCH, TOKENS)
        padding[:, -1] = -torch.inf

        def call(model: nn.Module) -> torch.Tensor:
            return model(x, mask=causal, src_key_padding_mask=padding if masks in ("padding", "both") else None)

        compare(plain, changed, call)

    def test_as_a_stack_of_torchvision_s_kind(self) -> None:
        torch.manual_seed(0)
        plain = Vision().model()
        changed = copy.deepcopy(plain)
        to_batch_second(changed.blocks)
        images = torch.randn(BATCH, 3, 8, 8)
        compare(plain, changed, lambda model: model(images))

    def test_a_run_is_the_same_to_rounding(self) -> None:
        losses = []
        for batch_second in (False, True):
            plan = Plan()
            MemoryFormat().contribute(plan, {"layout": "contiguous", "batch_second": batch_second})
            torch.manual_seed(0)
            job = assemble(Vision(), plan, device=torch.device("cpu"))
            losses.append([float(job.step(batch)) for batch in job])
            assert MemoryFormat().evidence(job)["batch_second"] is batch_second
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)

    def test_state_keys_stay(self) -> None:
        model = Vision().model()
        keys = list(model.state_dict())
        to_batch_second(model.blocks)
        assert list(model.state_dict()) == keys
        assert is_batch_second(model)


class TestInside:
    def test_tokens_come_first_and_lie_so_in_memory(self) -> None:
        """Purpose of the layout: nothing between the first and the last block has to be transposed."""
        model = Vision().model()
        to_batch_second(model.blocks)
        seen = []
        model.blocks[1].ln_1.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        model(torch.randn(BATCH, 3, 8, 8))
        assert seen[0].shape == (16, BATCH, WIDTH)
        assert seen[0].is_contiguous()


class TestKnown:
    @pytest.mark.parametrize(
        ("blocks", "known"),
        [
            ([EncoderBlock(), EncoderBlock()], True),
            (list(encoder(True).layers), True),
            ([EncoderBlock()], False),
            ([], False),
            ([EncoderBlock(), nn.Linear(2, 2)], False),
            ([EncoderBlock(batch_first=False), EncoderBlock(batch_first=False)], False),
            ([EncoderBlock(nn.BatchNorm1d(TOKENS)), EncoderBlock(nn.BatchNorm1d(TOKENS))], False),
            ([EncoderBlock(nn.Dropout1d()), EncoderBlock(nn.Dropout1d())], False),
        ],
        ids=["own", "torch's", "one", "none", "no attention", "second today", "batch statistics", "drops per sample"],
    )
    def test_is_only_what_treats_every_position_alike(self, blocks: list[nn.Module], known: bool) -> None:
        assert can_be_batch_second(blocks) is known

    def test_a_module_of_somebody_else_is_unknown(self) -> None:
        class Dropout(nn.Module):
            """Named like torch's, and drops whole samples."""

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * (torch.rand(x.shape[0], 1, 1) > 0.5)

        assert not can_be_batch_second([EncoderBlock(Dropout()), EncoderBlock(Dropout())])

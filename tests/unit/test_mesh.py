"""Cuts and refusals of a mesh: chains of blocks, stages, products, choices, and how they are exported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import sample_environment, sample_facts
from msgspec.structs import replace
from report_builders import make_recommendation
from tiny_workloads import TinyViT
from torch import nn

from steptune.tuner.export import exporter_named
from steptune.tuner.records import Candidate, Choice
from steptune.tuner.strategies import Supported, Unsupported, strategy_named
from steptune.tuner.strategies.combine import conflict, normalise
from steptune.tuner.training.mesh.chain import Chain, chain_refusal
from steptune.tuner.training.mesh.parts import Cut
from steptune.tuner.training.mesh.stages import Costs, Piece, cut_stages
from steptune.tuner.training.mesh.tensor import shareable_units


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        x = torch.tanh(self.layer(x))
        return x if bias is None else x + bias


class Model(nn.Module):
    """Three blocks between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Between(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) * 2
        return self.last(x)


class Skipping(Model):
    """Model in which the layer after the blocks uses an earlier one's output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        outputs = []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        return self.last(x + outputs[0])


class Around(Model):
    """Model in which the layer after the blocks uses what is before them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x = self.first(x)
        for block in self.blocks:
            y = block(y)
        return self.last(x + y)


class Second(Model):
    """Blocks take a second tensor with a gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = bias = self.first(x)
        for block in self.blocks:
            x = block(x, bias)
        return self.last(x)


class Backwards(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in reversed(self.blocks):
            x = block(x)
        return self.last(x)


class Fewer(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks[0](self.first(x)))


class Shared(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].layer.weight = self.blocks[0].layer.weight


class Choosy(Model):
    """Fails on what is not a number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            if x.isnan().any():
                raise ValueError("lost")
            x = block(x)
        return self.last(x)


def refusal(model: Any) -> str:
    torch.manual_seed(0)
    x = torch.randn(5, 2)
    return chain_refusal(model, list(model.blocks), lambda: model(x).square().mean())


class TestChain:
    @pytest.mark.parametrize(
        ("model", "reason"),
        [
            (Model, ""),
            (Between, "the model runs operations between blocks 0 and 1"),
            (Skipping, "use more than the output of the last block"),
            (Around, "not only through the blocks: first."),
            (Second, "takes a second tensor that requires a gradient"),
            (Backwards, "block 2 (Block) is called out of order, in place of block 0"),
            (Fewer, "the loss calls only 1 of 3 blocks"),
            (Shared, "blocks share parameters ("),
            (Choosy, "the model fails when its blocks are skipped (ValueError: lost)"),
        ],
    )
    def test_is_refused_with_the_reason_where_it_is_none(self, model: type, reason: str) -> None:
        found = refusal(model())
        assert reason in found
        assert bool(found) == bool(reason)

    def test_examining_changes_nothing(self) -> None:
        model, x = Model(), torch.randn(5, 2)
        before = model(x)
        model.first.weight.grad = kept = torch.ones(4, 2)
        assert refusal(model) == ""
        assert torch.equal(model(x), before)
        assert model.first.weight.grad is kept
        assert model.last.weight.grad is None

    @pytest.mark.parametrize("cut", [1, 2])
    def test_two_stages_are_the_model(self, cut: int) -> None:
        """Outputs and gradients, each stage's from its own parameters only."""
        model, x = Model(), torch.randn(5, 2)
        loss = lambda: model(x).square().mean()  # noqa: E731
        expected = loss()
        wanted = torch.autograd.grad(expected, list(model.parameters()))
        chain = Chain(model, list(model.blocks))
        sent = chain.stage(loss, 0, cut - 1, None)
        received = sent.detach().requires_grad_()
        found = chain.stage(loss, cut, 2, received)
        found.backward()
        assert model.first.weight.grad is None
        sent.backward(received.grad)
        assert torch.equal(found, expected)
        for parameter, gradient in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)

    def test_knows_what_comes_before_and_behind(self) -> None:
        model, x = Model(), torch.randn(5, 2)
        examined = Chain(model, list(model.blocks)).examine(lambda: model(x).mean())
        assert examined.front == {"first.weight", "first.bias"}
        assert examined.back == {"last.weight", "last.bias"}


def piece(time_s: float, *, parameters: int = 0, kept: int = 0) -> Piece:
    return Piece(time_s=time_s, forward_s=time_s / 3, parameter_bytes=parameters, kept_bytes=kept)


NOTHING = piece(0.0)


def starts(costs: Costs, count: int, *, memory: float = float("inf"), schedule: str = "1f1b") -> tuple[int, ...]:
    return cut_stages(costs, count, num_ranks=count, schedule=schedule, num_micro_batches=8, memory_bytes=memory)


class TestStages:
    def test_are_cut_by_time_and_not_by_count(self) -> None:
        blocks = tuple(piece(t) for t in (1.0, 1.0, 1.0, 1.0, 4.0, 4.0))
        assert starts(Costs(front=NOTHING, blocks=blocks, back=NOTHING), 2) == (0, 4)
        assert starts(Costs(front=NOTHING, blocks=blocks, back=NOTHING), 3) == (0, 4, 5)

    def test_count_what_is_before_and_behind_the_blocks(self) -> None:
        blocks = tuple(piece(1.0) for _ in range(6))
        assert starts(Costs(front=NOTHING, blocks=blocks, back=piece(4.0)), 2) == (0, 5)
        # Of the first 3.0, the second stage computes the forward pass, 1.0, again.
        assert starts(Costs(front=piece(3.0), blocks=blocks, back=NOTHING), 2) == (0, 2)

    def test_fit_into_memory_before_they_are_even(self) -> None:
        """The first two blocks need 4 x 10 bytes each for parameters and states."""
        blocks = (piece(1.0, parameters=10), piece(1.0, parameters=10), piece(1.0), piece(5.0))
        costs = Costs(front=NOTHING, blocks=blocks, back=NOTHING)
        assert starts(costs, 2) == (0, 3)
        assert starts(costs, 2, memory=50) == (0, 1)

    def test_keep_fewer_activations_under_1f1b(self) -> None:
        """Two micro-batches on the first of two stages, one on the last; under GPipe all eight on both."""
        blocks = (piece(1.0, kept=10), piece(1.0, kept=10), piece(1.0, kept=10), piece(1.0, kept=10))
        costs = Costs(front=NOTHING, blocks=blocks, back=NOTHING)
        assert starts(costs, 2, memory=30) == (0, 1)
        assert starts(costs, 2, memory=160) == (0, 2)
        assert starts(costs, 2, memory=160, schedule="gpipe") == (0, 2)

    def test_have_a_block_each(self) -> None:
        blocks = (piece(9.0), NOTHING, NOTHING)
        assert starts(Costs(front=NOTHING, blocks=blocks, back=NOTHING), 3) == (0, 1, 2)


class TestCut:
    @pytest.mark.parametrize(("dim", "stretches"), [(0, 1), (1, 1), (1, 3)])
    def test_parts_make_the_whole_again(self, dim: int, stretches: int) -> None:
        whole = torch.arange(72.0).view(6, 12)
        cut = Cut(dim=dim, num_parts=2, stretches=stretches)
        parts = [cut.part(whole, number) for number in range(2)]
        assert torch.equal(cut.joined(parts), whole)
        assert all(tuple(part.shape) == cut.part_shape(whole.shape) for part in parts)

    def test_stretches_are_cut_each_by_itself(self) -> None:
        """Query, key and value of two heads: a part has one head of all three."""
        whole = torch.tensor([[10, 11, 20, 21, 30, 31]])
        assert Cut(dim=1, num_parts=2, stretches=3).part(whole, 1).tolist() == [[11, 21, 31]]


class Attention(nn.Module):
    """Named as ViT's."""

    def __init__(self, *, out: int = 8, extra: bool = False) -> None:
        super().__init__()
        self.num_attention_heads, self.head_dim = 4, 2
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, out) for _ in range(3))
        self.o_proj = nn.Linear(8, 8)
        if extra:
            self.position = nn.Parameter(torch.zeros(3))


class Encoder(nn.Module):
    def __init__(self, attention: nn.Module | None = None, **more: nn.Module) -> None:
        super().__init__()
        self.attention = attention or Attention()
        self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 8)
        for name, module in more.items():
            setattr(self, name, module)


class TestProducts:
    def test_known_ones_can_be_shared_by_what_divides_heads_and_columns(self) -> None:
        assert shareable_units([Encoder(), Encoder()]) == (4, "")

    @pytest.mark.parametrize(
        ("blocks", "reason"),
        [
            ([], "no repeated blocks"),
            (list(TinyViT().blocks), "AttentionBlock has no attention whose matmuls can be sharded"),
            ([Encoder(Attention(extra=True))], "Attention has parameters outside its matmuls: position"),
            ([Encoder(Attention(out=4))], r"\[4\] outputs before one with 8 inputs"),
            ([Encoder(other=nn.Linear(8, 8))], "weights outside its attention and feed-forward layers: other.weight"),
            ([Encoder(second=Attention())], "more than one attention"),
        ],
    )
    def test_what_is_not_known_is_refused(self, blocks: list[nn.Module], reason: str) -> None:
        units, found = shareable_units(blocks)
        assert units == 0
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(found)


FACTS = sample_facts(current={}, custom_step=False, global_batch=64, batch_splittable=True, varying_shapes=False)
FACTS = replace(
    FACTS,
    model=replace(
        FACTS.model, num_blocks=8, tensor_units=12, num_movable_experts=8, has_batch_statistics=False, chain_refusal=""
    ),
)
FOUR = sample_environment(num_ranks=4)
strategy = strategy_named("parallel_mesh")


class TestChoices:
    def test_have_degrees_that_divide(self) -> None:
        for environment in (FOUR, sample_environment(num_ranks=4, num_hosts=2), sample_environment(num_ranks=6)):
            choices = strategy.choices(environment, FACTS)
            for choice in choices:
                assert strategy.supports(choice, environment, FACTS) == Supported(), choice
            assert {c["expert"] for c in choices} == ({1, 2, 4} if environment.num_ranks == 4 else {1, 2})
            assert len(choices) > 5
        tensor = {c["tensor"] for c in strategy.choices(sample_environment(num_ranks=4, num_hosts=2), FACTS)}
        assert tensor == {1, 2}, "activations stay inside a host"

    def test_of_an_unknown_model_is_today(self) -> None:
        unknown = replace(FACTS, model=replace(FACTS.model, num_blocks=0, tensor_units=0, num_movable_experts=0))
        assert strategy.choices(FOUR, unknown) == (strategy.defaults,)

    @pytest.mark.parametrize(
        ("choice", "facts", "reason"),
        [
            ({"tensor": 3}, {}, "must be a multiple of 3"),
            ({"tensor": 2}, {"custom_step": True}, "training_step"),
            ({"tensor": 2}, {"batch_splittable": False}, "of one shape"),
            ({"tensor": 2}, {"varying_shapes": True}, "of one shape"),
            ({"pipeline": 2}, {"model": {"has_batch_statistics": True}}, "batch normalisation"),
            ({"tensor": 2}, {"optimizer": {"name": "Own"}}, "requires an element-wise optimizer from torch.optim; Own"),
            (
                {"tensor": 2},
                {"model": {"tensor_units": 0, "tensor_refusal": "Odd has no"}},
                "cannot be sharded: Odd has no",
            ),
            (
                {"tensor": 4},
                {"model": {"tensor_units": 6}},
                "6 heads or inner columns cannot be divided evenly among 4",
            ),
            (
                {"pipeline": 4, "schedule": "interleaved"},
                {"model": {"num_blocks": 6}},
                "at least 8 repeated blocks for 8 pipeline stages, got 6",
            ),
            ({"pipeline": 2}, {"model": {"chain_refusal": "between blocks"}}, "between its blocks: between blocks"),
            ({"pipeline": 4, "micro_batches": 2}, {}, "at least 4 micro-batches to keep 4 pipeline ranks busy, got 2"),
            ({"pipeline": 2, "micro_batches": 3, "schedule": "interleaved"}, {}, "a multiple of 2 micro-batches"),
            ({"pipeline": 2, "micro_batches": 5}, {}, "batch of 32 cannot be divided evenly into 5"),
            ({"expert": 2, "tensor": 2}, {}, "with data parallelism only"),
            ({"expert": 2}, {"model": {"num_movable_experts": 0}}, "whose experts can be sharded"),
            ({"expert": 4}, {"model": {"num_movable_experts": 6}}, "6 experts cannot be divided evenly among 4"),
        ],
    )
    def test_what_cannot_be_tried_gives_the_reason(self, choice: Choice, facts: dict[str, Any], reason: str) -> None:
        parts = {
            name: replace(getattr(FACTS, name), **value) if isinstance(value, dict) else value
            for name, value in facts.items()
        }
        support = strategy.supports(strategy.completed(choice), FOUR, replace(FACTS, **parts))
        assert isinstance(support, Unsupported)
        assert reason in support.reason

    @pytest.mark.parametrize(
        ("choice", "other", "reason"),
        [
            ({"tensor": 2}, {"sharding": {"mode": "full"}}, "further sharding is not supported"),
            ({"tensor": 2}, {"compile": {"mode": "default"}}, "break every compiled graph"),
            ({"tensor": 2}, {"precision": {"level": "O2", "dtype": "bfloat16"}}, "use O1"),
            ({"tensor": 2}, {"precision": {"level": "O1", "dtype": "float16"}}, "use bfloat16"),
            ({"expert": 2}, {"gradient_compression": {"method": "bf16"}}, "hold different parameters"),
            ({"pipeline": 2}, {"micro_batch": {"num_micro_batches": 2}}, "sets its own number"),
            ({"tensor": 2}, {"micro_batch": {"num_micro_batches": 2}}, None),
            ({"expert": 2}, {"moe_experts": {"execution": "looped"}}, "execution=batched"),
            ({"schedule": "gpipe"}, {"sharding": {"mode": "full"}}, None),
        ],
    )
    def test_what_does_not_go_together_is_refused(
        self, choice: Choice, other: dict[str, Choice], reason: str | None
    ) -> None:
        found = conflict(Candidate(choices={"parallel_mesh": choice, **other}), FOUR, FACTS)
        assert (found is None) == (reason is None)
        assert reason is None or reason in str(found)

    def test_of_a_schedule_mean_nothing_without_a_pipeline(self) -> None:
        candidate = Candidate(choices={"parallel_mesh": {"tensor": 2, "schedule": "gpipe", "micro_batches": 3}})
        assert normalise(candidate, FACTS).choices == {"parallel_mesh": {"tensor": 2}}


def test_torchtitan_has_the_degrees_and_the_rest_is_listed() -> None:
    titan = exporter_named("torchtitan")
    choice = {"pipeline": 2, "tensor": 2, "schedule": "interleaved", "micro_batches": 8}
    recommendation = make_recommendation(Candidate(choices={"parallel_mesh": choice}), num_ranks=8)
    text = titan.export(recommendation)
    samples = recommendation.global_batch // 2
    for line in (
        "data_parallel_replicate_degree = 2",
        "tensor_parallel_degree = 2",
        "pipeline_parallel_degree = 2",
        "pipeline_parallel_schedule = 'Interleaved1F1B'",
        f"pipeline_parallel_microbatch_size = {samples // 8}",
        f"local_batch_size = {samples}",
    ):
        assert line in text.replace('"', "'")
    assert "not by the measured times" in text
    experts = make_recommendation(Candidate(choices={"parallel_mesh": {"expert": 2}}), num_ranks=8)
    assert any("distributes experts only over ranks" in sentence for sentence in titan.not_expressible(experts))

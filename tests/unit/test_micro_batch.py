"""Cutting a batch: the weighted pieces have the gradient of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tiny_workloads import Line
from torch import nn

from steptune.tuner.errors import CaptureError, WorkloadRejectedError
from steptune.tuner.strategies import strategy_named
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.job import TrainingJob
from steptune.tuner.training.micro_batch import batch_length, split_batch
from steptune.tuner.training.plan import Plan, StepArguments
from steptune.tuner.workloads.workload import Workload


class Tokens(Workload):
    """A language model whose loss is the mean over the tokens that are not padding (zero)."""

    global_batch = 5
    sample_unit = "token"

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6)).double()

    def dataset(self) -> Any:
        return torch.tensor([[1, 2, 3, 4], [2, 0, 0, 0], [3, 4, 0, 0], [5, 1, 2, 0], [4, 4, 4, 4]])

    def sampler(self, dataset: Any) -> Any:
        return range(len(dataset))

    def num_units(self, batch: Any) -> int:
        return int((batch != 0).sum())

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten(), ignore_index=0)


class DoubleLine(Line):
    """In double precision, so that only a wrong weight makes a difference."""

    def model(self) -> nn.Module:
        return super().model().double()

    def batch_transform(self, batch: Any) -> Any:
        return [tensor.double() for tensor in batch]


def gradients(workload: Workload, num_pieces: int) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients of the first step."""
    plan = Plan(step=StepArguments(num_micro_batches=num_pieces))
    job: TrainingJob = assemble(workload, plan, device=torch.device("cpu"))
    seen: list[torch.Tensor] = []
    job.on_gradients = lambda found: seen.extend(gradient.clone() for gradient in found)
    loss = job.step(next(iter(job)))
    return float(loss), seen


class TestGradient:
    @pytest.mark.parametrize("num_pieces", [2, 3, 4])
    def test_of_unequal_pieces_is_that_of_the_batch(self, num_pieces: int) -> None:
        """Four samples in three pieces are 1, 1 and 2: an unweighted mean of means would differ."""
        loss, whole = gradients(DoubleLine(), 1)
        pieces_loss, pieces = gradients(DoubleLine(), num_pieces)
        assert pieces_loss == pytest.approx(loss, rel=1e-12)
        for one, other in zip(pieces, whole, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=0)

    @pytest.mark.parametrize("num_pieces", [2, 5])
    def test_of_tokens_weighs_pieces_by_their_tokens(self, num_pieces: int) -> None:
        loss, whole = gradients(Tokens(), 1)
        pieces_loss, pieces = gradients(Tokens(), num_pieces)
        assert pieces_loss == pytest.approx(loss, rel=1e-12)
        for one, other in zip(pieces, whole, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)

    def test_of_a_piece_without_tokens_is_nothing(self) -> None:
        """Its mean is not a number; where there are ranks, the last piece with tokens is the one that they wait for."""

        class Padded(Tokens):
            def dataset(self) -> Any:
                return super().dataset().clone().index_fill_(0, torch.tensor([1, 4]), 0)

        loss, whole = gradients(Padded(), 1)
        pieces_loss, pieces = gradients(Padded(), 5)
        assert pieces_loss == pytest.approx(loss, rel=1e-12)
        for one, other in zip(pieces, whole, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)
        plan = Plan(step=StepArguments(num_micro_batches=5, captured=True))
        job = assemble(Padded(), plan, device=torch.device("cpu"))
        with pytest.raises(CaptureError, match=r"micro-batch 2 of 5 contains no tokens.*use fewer"):
            job.step(next(iter(job)))

    @pytest.mark.parametrize("captured", [False, True])
    @pytest.mark.parametrize("length", [1, 2, 3])
    def test_of_a_last_batch_with_fewer_samples_than_pieces(self, length: int, captured: bool) -> None:
        plan = Plan(step=StepArguments(num_micro_batches=4, captured=captured))
        job = assemble(DoubleLine(), plan, device=torch.device("cpu"))
        whole = assemble(DoubleLine(), Plan(), device=torch.device("cpu"))
        x, y = next(iter(job))
        for batch in ([x, y], [x[:length], y[:length]]):
            assert float(job.step(batch)) == pytest.approx(float(whole.step(batch)), rel=1e-6 if captured else 1e-12)
        torch.testing.assert_close(job.state_dict(), whole.state_dict(), rtol=1e-6, atol=0)

    def test_the_pieces_are_counted_in_the_step(self) -> None:
        strategy = strategy_named("micro_batch")
        job = assemble(DoubleLine(), Plan(step=StepArguments(num_micro_batches=2)), device=torch.device("cpu"))
        assert strategy.took_effect(strategy.evidence(job), {"num_micro_batches": 2}).detail == "nothing shows it"
        job.step(next(iter(job)))
        assert strategy.took_effect(strategy.evidence(job), {"num_micro_batches": 2}).detail == "as asked"
        assert not strategy.took_effect(strategy.evidence(job), {"num_micro_batches": 4}).took


class TestSplit:
    @given(st.integers(1, 40), st.data())
    def test_pieces_are_the_batch_in_order_and_weights_sum_to_one(self, length: int, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, length))
        batch = {"x": torch.arange(length), "y": [torch.arange(2 * length).reshape(length, 2)], "name": "kept"}
        pieces, weights = split_batch(Line(), batch, count)
        assert torch.equal(torch.cat([piece["x"] for piece in pieces]), batch["x"])
        assert torch.equal(torch.cat([piece["y"][0] for piece in pieces]), batch["y"][0])
        assert {piece["name"] for piece in pieces} == {"kept"}
        sizes = [len(piece["x"]) for piece in pieces]
        assert max(sizes) - min(sizes) <= 1
        assert weights == pytest.approx([size / length for size in sizes])

    @pytest.mark.parametrize(
        "batch", [[torch.ones(4), torch.ones(3)], [torch.ones(4), torch.tensor(1.0)], [], ["text"]]
    )
    def test_a_batch_without_a_common_first_dimension_is_refused(self, batch: Any) -> None:
        assert batch_length(batch) is None
        with pytest.raises(WorkloadRejectedError, match="cannot be split into 2 micro-batches"):
            split_batch(Line(), batch, 2)

    def test_texts_and_objects_of_samples_go_with_them(self) -> None:
        """Items that exist once for the whole batch stay whole."""
        batch = {
            "x": torch.arange(4.0),
            "names": ("a", "b", "c", "d"),
            "sizes": [{"h": n} for n in range(4)],
            "of": "all",
        }
        (first, second), _ = split_batch(Line(), [batch, ["one", "two", "three"]], 2)
        assert (first[0]["names"], second[0]["names"]) == (("a", "b"), ("c", "d"))
        assert second[0]["sizes"] == [{"h": 2}, {"h": 3}]
        assert (second[0]["of"], second[1]) == ("all", ["one", "two", "three"])

    def test_more_pieces_than_samples_are_refused(self) -> None:
        with pytest.raises(WorkloadRejectedError, match="cannot be split into 5 micro-batches"):
            split_batch(Line(), [torch.ones(4)], 5)

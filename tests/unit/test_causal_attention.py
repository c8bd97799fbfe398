"""Causal attention by a flag: what it computes, where it is the same, and what it makes possible."""

from __future__ import annotations

import copy
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from steptune.tuner.records import Choice
from steptune.tuner.strategies import STRATEGIES
from steptune.tuner.strategies.combine import make_plan
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.captured_step import CapturedStep
from steptune.tuner.training.causal_attention import CausalLook, use_causal_flag, uses_causal_flag
from steptune.tuner.training.plan import Plan
from steptune.tuner.training.recorder import Repeater
from steptune.tuner.trials.model_look import look_at_model
from steptune.tuner.workloads.loading import load_workload
from steptune.tuner.workloads.workload import Workload

CPU = torch.device("cpu")
GPT = "zoo:gpt2?batch=2&sequence=16&n_layer=2&n_embd=32&n_head=2&vocab_size=256&n_positions=16"
VIT = (
    "zoo:vit_large?batch=2&hidden_size=32&num_hidden_layers=2&num_attention_heads=2&intermediate_size=64&image_size=32"
    "&num_labels=10"
)
IS_CAUSAL: dict[str, Choice] = {"attention_mask": {"is_causal": True}}


class Given(Workload):
    """GPT-2 that is told which tokens are padding, or where they stand."""

    global_batch = 2

    def __init__(self, **given: Any) -> None:
        self._inner, self._given = load_workload(GPT), given

    def model(self) -> nn.Module:
        return self._inner.model()

    def dataset(self) -> Any:
        return self._inner.dataset()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = model(**batch, **self._given, labels=batch["input_ids"]).loss
        return loss


def looked_at(workload: Workload) -> Any:
    job = assemble(workload, Plan(), device=CPU)
    return look_at_model(job, next(iter(job)))


def masks_of(model: nn.Module, workload: Workload, batch: Any) -> list[tuple[bool, bool]]:
    """Two flags for each attention of the compiled model: it gets a mask, and it is told to be causal."""
    found = []

    def look(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        for node in graph.graph.nodes:
            if "scaled_dot_product_attention" in str(node.target):
                found.append((node.kwargs.get("attn_mask") is not None, bool(node.kwargs.get("is_causal"))))
        return graph.forward

    torch._dynamo.reset()
    model.compile(backend=look)
    workload.loss(model, batch)
    torch._dynamo.reset()
    return found


class TestTheFlag:
    def test_the_loss_is_the_same(self) -> None:
        workload = load_workload(GPT)
        model = workload.model().eval()
        batch = next(iter(assemble(workload, Plan(), device=CPU)))
        masked = workload.loss(model, batch)
        flagged = workload.loss(use_causal_flag(model), batch)
        assert uses_causal_flag(model)
        torch.testing.assert_close(flagged, masked, rtol=1e-6, atol=0)

    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own, compiling
    @pytest.mark.parametrize(("flag", "seen"), [(False, (True, False)), (True, (False, True))])
    def test_a_compiled_model_hands_over_no_mask(self, flag: bool, seen: tuple[bool, bool]) -> None:
        """Without the flag it does: were that no longer so, the strategy would have nothing to give."""
        workload = load_workload(GPT)
        model = workload.model()
        if flag:
            use_causal_flag(model)
        batch = next(iter(assemble(workload, Plan(), device=CPU)))
        assert masks_of(model, workload, batch) == [seen, seen]

    def test_the_strategy_sets_it_and_nothing_else_does(self) -> None:
        for choices, expected in ((IS_CAUSAL, True), ({}, False)):
            complete = {s.name: {**s.defaults, **choices.get(s.name, {})} for s in STRATEGIES}
            job = assemble(load_workload(GPT), make_plan(complete), device=CPU)
            assert uses_causal_flag(job.model) == expected


PADDED = torch.cat([torch.zeros(2, 5, dtype=torch.long), torch.ones(2, 11, dtype=torch.long)], dim=1)


def logits_of(model: Any, ids: torch.Tensor, how: str) -> torch.Tensor:
    """Logits of the tokens that are no padding."""
    model.eval()
    with torch.no_grad():
        if how == "inner":
            hidden = model.transformer(ids, attention_mask=PADDED).last_hidden_state
            found = model.lm_head(hidden)
        else:
            found = (model(ids, None, None, PADDED) if how == "position" else model(ids, attention_mask=PADDED)).logits
    real: torch.Tensor = found[:, 5:]
    return real


class TestWhatIsToldLater:
    """A batch with padding, or an evaluation, of a model that was looked at with none."""

    IDS = torch.arange(32).reshape(2, 16)

    @pytest.mark.parametrize("how", ["name", "position", "inner"])
    def test_padding_is_left_out(self, how: str) -> None:
        model = load_workload(GPT).model()
        masked = logits_of(model, self.IDS, how)
        torch.testing.assert_close(logits_of(use_causal_flag(model), self.IDS, how), masked, rtol=0, atol=0)
        assert uses_causal_flag(model)

    def test_padding_is_left_out_by_a_compiled_model(self) -> None:
        model = load_workload(GPT).model()
        masked = logits_of(model, self.IDS, "name")
        use_causal_flag(model).compile(backend="eager")
        model(self.IDS)
        torch.testing.assert_close(logits_of(model, self.IDS, "name"), masked, rtol=0, atol=1e-6)
        assert uses_causal_flag(model)
        torch._dynamo.reset()

    def test_the_flag_comes_back_after_a_call_that_fails(self) -> None:
        model = use_causal_flag(load_workload(GPT).model())
        with pytest.raises(IndexError):
            model(self.IDS + 256, attention_mask=PADDED)
        assert uses_causal_flag(model)

    def test_a_recorded_step_trains_as_it_does_op_by_op(self) -> None:
        """Nothing that the flag sets around a call is taken for state that a graph would freeze."""
        losses = []
        for recorded in (False, True):
            complete = {s.name: {**s.defaults, **IS_CAUSAL.get(s.name, {})} for s in STRATEGIES}
            torch.manual_seed(0)
            job = assemble(load_workload(GPT), make_plan(complete), device=CPU)
            if recorded:
                job.runner = CapturedStep(job, Repeater())
            torch.manual_seed(1)
            losses.append([float(job.step(batch)) for batch in islice(job, 3)])
        assert losses[0] == losses[1]
        assert isinstance(job.runner, CapturedStep)
        assert (job.runner.num_replays, job.runner.num_recordings) == (3, 1)


class TestWhereItIsTheSame:
    def test_a_plain_language_model(self) -> None:
        look = looked_at(load_workload(GPT))
        assert look.facts.mask_refusal == ""

    def test_looking_leaves_no_hooks(self) -> None:
        model = load_workload(GPT).model()
        with CausalLook(model):
            pass
        assert not any(module._forward_pre_hooks for module in model.modules())

    @pytest.mark.parametrize(
        ("given", "named"),
        [
            ({"attention_mask": torch.ones(2, 16, dtype=torch.long)}, "attention_mask"),
            ({"position_ids": torch.arange(16)[None]}, "position_ids"),
            ({"token_type_ids": torch.zeros(2, 16, dtype=torch.long)}, "token_type_ids"),
        ],
    )
    def test_not_where_the_workload_says_more(self, given: dict[str, Any], named: str) -> None:
        """Even where the first batch has no padding and no packed sequences: others may."""
        assert named in looked_at(Given(**given)).facts.mask_refusal

    @pytest.mark.parametrize("direct", [False, True])
    def test_not_where_a_model_within_is_told_more(self, direct: bool) -> None:
        """Case of a loss computed in pieces of the vocabulary: the model is called without its head."""
        model: Any = load_workload(GPT).model()
        call = model.transformer.forward if direct else model.transformer
        with CausalLook(model) as look:
            call(torch.zeros(2, 16, dtype=torch.long), attention_mask=torch.ones(2, 16, dtype=torch.long))
            look.note_attention((), {"is_causal": True})
        assert ("was not called" if direct else "attention_mask") in look.refusal

    def test_not_where_a_model_was_not_called(self) -> None:
        """One of two towers may come later, with a mask."""
        workload = load_workload(GPT)
        towers = nn.ModuleList([workload.model(), workload.model()])
        with CausalLook(towers) as look:
            towers[0](torch.zeros(2, 16, dtype=torch.long))
            look.note_attention((), {"is_causal": True})
        assert "was not called" in look.refusal

    def test_not_where_a_model_within_is_set_otherwise(self) -> None:
        model: Any = load_workload(GPT).model()
        model.transformer.config = type(model.config)(attn_implementation="eager")
        with CausalLook(model) as look:
            model.transformer(torch.zeros(2, 16, dtype=torch.long))
            look.note_attention((), {"is_causal": True})
        assert "cannot be changed" in look.refusal

    def test_not_where_attention_sees_all(self) -> None:
        assert "causal" in looked_at(load_workload(VIT)).facts.mask_refusal

    @pytest.mark.parametrize("within", [False, True])
    def test_not_where_tokens_see_a_window(self, within: bool) -> None:
        model: Any = load_workload(GPT).model()
        if within:
            model.transformer.config = copy.deepcopy(model.config)
        model.transformer.config.sliding_window = 4
        with CausalLook(model) as look:
            model(torch.zeros(2, 16, dtype=torch.long))
            look.note_attention((), {"is_causal": True})
        assert "window" in look.refusal

    def test_not_for_a_model_of_another_kind(self) -> None:
        from tiny_workloads import Everything

        assert "attention masks Steptune can replace" in looked_at(Everything()).facts.mask_refusal


class TestWhatTheHostReads:
    def test_the_mask_is_all_that_it_waits_for(self) -> None:
        look = looked_at(load_workload(GPT))
        assert look.host_read
        assert look.host_read_beside_masks == ""

    def test_what_the_workload_reads_beside_it_stays(self) -> None:
        class Reading(Given):
            def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
                loss = super().loss(model, batch)
                return loss * (2.0 if loss.item() > 1e9 else 1.0)

        look = looked_at(Reading())
        assert "loss.item()" not in look.host_read
        assert "loss.item()" in look.host_read_beside_masks

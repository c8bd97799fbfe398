"""parallel_mesh: laid over ranks by products, layers or experts, a model trains as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_jobs import Trained, train, train_alone
from ranks import Ranks
from torch.utils.data import SequentialSampler

from tuner.workloads.adapters.transformers import TransformersWorkload

pytestmark = pytest.mark.xdist_group("ranks")

SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 64, "n_positions": 16, "resid_pdrop": 0.0}
    | {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0},
    "bert": {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
    | {"vocab_size": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "vit": {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
    | {"image_size": 8, "patch_size": 4, "num_labels": 4}
    | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}


class Small(TransformersWorkload):
    """A transformer of four blocks and a millisecond; samples in order."""

    model_type = "gpt2"
    fields: dict[str, Any] = {}

    def __init__(self) -> None:
        fields = {**SIZES[self.model_type], **self.fields}
        super().__init__(self.model_type, batch=8, sequence=12, lr=1e-3, **fields)

    def sampler(self, dataset: Any) -> Any:
        return SequentialSampler(dataset)


class Gpt2(Small):
    pass


class Bert(Small):
    model_type = "bert"


class Vit(Small):
    model_type = "vit"


class Clipped(Small):
    max_grad_norm = 0.1


def mesh(**choice: Any) -> dict[str, Any]:
    return {"parallel_mesh": choice}


TOLERANCE = 2e-5
"""Of a loss near four after 20 updates of AdamW, each with some hundred roundings of FP32 in another order."""


def check(found: list[Trained], alone: Trained, *, rel: float = TOLERANCE) -> None:
    for trained in found:
        took, detail = trained.effects["parallel_mesh"]
        assert took, detail
        assert trained.losses == pytest.approx(alone.losses, rel=rel)
        assert trained.state.keys() == alone.state.keys()
        for name, value in alone.state.items():
            torch.testing.assert_close(trained.state[name], value, rtol=2e-3, atol=2e-3, msg=name)


class TestTensor:
    @pytest.mark.parametrize("workload", [Gpt2, Bert, Vit, Clipped])
    def test_is_the_training_of_one_process(self, ranks: Ranks, workload: type) -> None:
        check(ranks.run(2, train, workload, mesh(tensor=2)), train_alone(workload))


SCHEDULES = [
    {"schedule": "gpipe", "micro_batches": 2},
    {"schedule": "1f1b", "micro_batches": 4},
    {"schedule": "interleaved", "micro_batches": 4},
]
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda choice: choice["schedule"])


class TestPipeline:
    @each_schedule
    def test_is_the_training_of_one_process(self, ranks: Ranks, schedule: dict[str, Any]) -> None:
        check(ranks.run(2, train, Gpt2, mesh(pipeline=2, **schedule)), train_alone(Gpt2))

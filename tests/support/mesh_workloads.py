"""Small models that can be laid over ranks by products, layers or experts, and how; samples come in order."""

from __future__ import annotations

from typing import Any, ClassVar

from torch.utils.data import SequentialSampler

from steptune.tuner.workloads.adapters.transformers import TransformersWorkload
from steptune.tuner.workloads.zoo.mixture_of_experts import MixtureOfExperts

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
    fields: ClassVar[dict[str, Any]] = {}

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


class Experts(MixtureOfExperts):
    """Four experts with room for every token, and no loss that depends on which tokens meet."""

    def __init__(self) -> None:
        super().__init__(
            **{"batch": 8, "sequence": 8, "vocabulary": 64, "width": 16, "depth": 2, "num_heads": 2}
            | {"num_experts": 4, "capacity_factor": 4.0, "balance": 0.0, "lr": 1e-3}
        )

    def sampler(self, dataset: Any) -> Any:
        return SequentialSampler(dataset)


SCHEDULES = [
    {"schedule": "gpipe", "micro_batches": 2},
    {"schedule": "1f1b", "micro_batches": 4},
    {"schedule": "interleaved", "micro_batches": 4},
]
PIPELINE = {"pipeline": 2, "micro_batches": 4}


def mesh(**choice: Any) -> dict[str, Any]:
    return {"parallel_mesh": choice}

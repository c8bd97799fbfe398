"""A workload from a Hugging Face transformers config.

The model is built from the config with fresh weights; nothing is downloaded. Data are random tokens
or images of the config's shape, unless `dataset` is overridden:

    class Mine(TransformersWorkload):
        def __init__(self):
            super().__init__(model_type="gpt2", batch=8, sequence=512, n_layer=12)

        def dataset(self):
            return my_tokenised_dataset()      # dicts with what the model's forward takes
"""

from __future__ import annotations

from typing import Any

from steptune.tuner.errors import MissingDependencyError, WorkloadRejectedError
from steptune.tuner.wording import which_of
from steptune.tuner.workloads.workload import NamedParameters, Workload

_HEADS = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "image": "AutoModelForImageClassification",
}
_MASKED = ("bert", "roberta", "distilbert", "deberta", "electra", "albert")
_OWN = ("batch", "sequence", "task", "lr")
"""Arguments of the workload that are its own, not fields of the config."""
_DATASET_LENGTH = 65536
_IMAGE_SIZE = 224
"""Default image size for configs that accept images of any size."""


class TransformersWorkload(Workload):
    """Training of a model built from a transformers config, with the model's own loss.

    Args:
        model_type: As in `AutoConfig.for_model`: "gpt2", "bert", "vit", ...
        batch: Samples per step.
        sequence: Tokens per sample, for language models.
        task: "causal", "masked" or "image"; None for the usual task of the model type.
        lr: Learning rate of AdamW.
        config: Fields of the config; `"2,2,6,2"` is a list of numbers.
    """

    initialises_on_device = True

    def __init__(
        self,
        model_type: str,
        batch: int = 8,
        sequence: int = 512,
        task: str | None = None,
        lr: float = 3e-4,
        **config: Any,
    ) -> None:
        transformers = _import_transformers()
        self._sequence = sequence
        self._lr = lr
        self.global_batch = batch
        fields = {name: _field(name, value) for name, value in config.items()}
        known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
        if model_type not in known:
            advice = which_of(str(model_type), known, "transformers.CONFIG_MAPPING lists the names")
            raise WorkloadRejectedError(f"transformers has no model type {model_type!r}: {advice}")
        try:
            self.config = transformers.AutoConfig.for_model(model_type, **fields)
        except Exception as error:  # of its own validation, which has no common base
            said = " ".join(str(error).split())
            raise WorkloadRejectedError(f"the {model_type} config rejects its fields {fields}: {said}") from error
        _refuse_unknown(fields, self.config, transformers.AutoConfig.for_model(model_type))
        if hasattr(self.config, "use_cache"):
            self.config.use_cache = False  # of keys and values, for generating text
        self.task = task or _task_of(model_type, self.config)
        if self.task not in _HEADS:
            raise WorkloadRejectedError(f"task is {self.task!r}: it must be one of {', '.join(_HEADS)}")
        self.sample_unit = "sample" if self.task == "image" else "token"

    def model(self) -> Any:
        head = getattr(_import_transformers(), _HEADS[self.task])
        model = head.from_config(self.config)
        model.train()
        return model

    def dataset(self) -> Any:
        from steptune.tuner.workloads.adapters.random_data import MaskedTokens, RandomImages, RandomTokens

        if self.task == "image":
            size = getattr(self.config, "image_size", _IMAGE_SIZE)
            shape = (self.config.num_channels, size, size)
            return RandomImages(_DATASET_LENGTH, shape, self.config.num_labels)
        kind = MaskedTokens if self.task == "masked" else RandomTokens
        return kind(_DATASET_LENGTH, self._sequence, self.config.vocab_size)

    def batch_transform(self, batch: Any) -> Any:
        from steptune.tuner.workloads.adapters.random_data import with_normal_pixels

        return with_normal_pixels(batch) if self.task == "image" else batch

    def optimizer(self, named_parameters: NamedParameters) -> Any:
        import torch

        return torch.optim.AdamW([parameter for _, parameter in named_parameters], lr=self._lr)

    def loss(self, model: Any, batch: Any) -> Any:
        if self.task == "image":
            from torch.nn.functional import cross_entropy

            return cross_entropy(model(pixel_values=batch["pixel_values"]).logits.float(), batch["labels"])
        inputs = dict(batch)
        if "labels" not in inputs:
            inputs["labels"] = inputs["input_ids"]
        return model(**inputs).loss

    def num_units(self, batch: Any) -> int:
        if self.sample_unit == "sample":
            return int(batch["pixel_values"].shape[0])
        mask = batch.get("attention_mask")
        return int(mask.sum()) if mask is not None else int(batch["input_ids"].numel())

    def blocks(self, model: Any) -> Any:
        found = [m for m in model.modules() if type(m).__name__.endswith(("Block", "Layer")) and _is_block(m)]
        first = type(found[0]) if found else None
        return [m for m in found if type(m) is first] or super().blocks(model)


def _is_block(module: Any) -> bool:
    """Say whether a module is a block of the model: one of its children is an attention module, or it has a residual
    connection (`shortcut`).
    """
    return any("attention" in type(child).__name__.lower() for child in module.children()) or hasattr(
        module, "shortcut"
    )


def _task_of(model_type: str, config: Any) -> str:
    if hasattr(config, "image_size") or hasattr(config, "num_channels"):
        return "image"
    return "masked" if model_type in _MASKED else "causal"


def _refuse_unknown(fields: dict[str, Any], config: Any, usual: Any) -> None:
    """Refuse fields that the config does not know, because it would keep them silently and without effect.

    `image_size` is always accepted, because this workload reads it from the config itself.
    """
    unknown = [n for n in fields if hasattr(config, n) and not hasattr(usual, n) and n != "image_size"]
    if unknown:
        advice = which_of(unknown[0], [*_OWN, *usual.to_dict()], "see the documentation of this config")
        raise WorkloadRejectedError(
            f"{unknown[0]!r} is not one of {', '.join(_OWN)}, nor a field of a {usual.model_type} config: {advice}"
        )


def _field(name: str, value: Any) -> Any:
    if not isinstance(value, str) or "," not in value:
        return value
    try:
        return [int(number) for number in value.split(",")]
    except ValueError:
        raise WorkloadRejectedError(
            f"{name} is {value!r}: write whole numbers separated by commas, such as 2,2,6,2"
        ) from None


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise MissingDependencyError(
            "this workload needs transformers: pip install 'steptune[transformers]' (or pip install transformers)"
        ) from None
    return transformers

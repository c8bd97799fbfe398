"""A workload from the name of a timm model, on random images."""

from __future__ import annotations

from typing import Any

from steptune.tuner.errors import MissingDependencyError, WorkloadRejectedError
from steptune.tuner.wording import which_of
from steptune.tuner.workloads.workload import Workload

_DATASET_LENGTH = 65536


class TimmWorkload(Workload):
    """Training of a timm image classifier with cross-entropy.

    Args:
        name: Name of the model, as in `timm.create_model`.
        batch: Images per step.
        num_classes: Number of classes.
        options: Further arguments of `timm.create_model`.
    """

    def __init__(self, name: str, batch: int = 32, num_classes: int = 1000, **options: Any) -> None:
        timm = _import_timm()
        name = str(name)
        if not timm.is_model(name):
            advice = which_of(name, timm.list_models(), "timm.list_models() lists the names")
            raise WorkloadRejectedError(f"timm has no model {name!r}: {advice}")
        self.name = name
        self.global_batch = batch
        self._num_classes = num_classes
        self._options = options

    def model(self) -> Any:
        try:
            return _import_timm().create_model(self.name, num_classes=self._num_classes, **self._options)
        except TypeError as error:
            given = ", ".join(self._options) or "none"
            raise WorkloadRejectedError(
                f"timm.create_model({self.name!r}) rejects its options ({given}): {error}. zoo:timm itself "
                "accepts name, batch and num_classes"
            ) from error

    def dataset(self) -> Any:
        from steptune.tuner.workloads.adapters.random_data import RandomImages

        timm = _import_timm()
        shape = timm.get_pretrained_cfg(self.name, allow_unregistered=True).input_size
        size = self._options.get("img_size", shape[-1])
        return RandomImages(_DATASET_LENGTH, (shape[0], size, size), self._num_classes)

    def batch_transform(self, batch: Any) -> Any:
        from steptune.tuner.workloads.adapters.random_data import with_normal_pixels

        return with_normal_pixels(batch)

    def loss(self, model: Any, batch: Any) -> Any:
        from torch.nn.functional import cross_entropy

        return cross_entropy(model(batch["pixel_values"]), batch["labels"])


def _import_timm() -> Any:
    try:
        import timm
    except (ImportError, RuntimeError) as error:
        raise MissingDependencyError(
            f"this workload needs timm and torchvision: pip install 'steptune[timm]' (the import said: {error})"
        ) from None
    return timm

"""Workload: a user's model, data, loss and optimizer, and the settings that the user has today.

A user subclasses `Workload` and implements three methods. Everything else has the default of plain
PyTorch. Nothing here imports torch, so that a file which only defines workloads loads anywhere.

    class Digits(Workload):
        global_batch = 64

        def model(self):
            return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))

        def dataset(self):
            return digits_dataset()

        def loss(self, model, batch):
            images, labels = batch
            return torch.nn.functional.cross_entropy(model(images), labels)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from steptune.tuner.errors import WorkloadRejectedError
from steptune.tuner.records import Scalar

if TYPE_CHECKING:
    import torch

NamedParameters = Iterable[tuple[str, "torch.nn.Parameter"]]


class StepJob(Protocol):
    """The running training job, as a workload's own step sees it."""

    @property
    def model(self) -> torch.nn.Module:
        """Model of the workload, transformed and wrapped."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Optimizer of the workload, over the parameters that it updates."""

    @property
    def scheduler(self) -> Any:
        """Scheduler of the workload, or None."""

    def loss(self, batch: Any) -> torch.Tensor:
        """Return the loss of a batch, in the precision of the candidate."""

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate gradients of a loss, scaled if there is a loss scaler."""

    def update(self) -> None:
        """Clip gradients, update parameters, clear the gradients and step the scheduler."""


class Workload:
    """Training to tune. Subclass it, and implement `model`, `dataset` and `loss`.

    Attributes:
        global_batch: Samples per optimizer step over all ranks. Steptune changes it only up to `max_global_batch`.
        max_global_batch: The most samples per step that you would train with; None allows no more than `global_batch`.
            Larger ones are another recipe, tried with `--allow recipe`.
        learning_rates: Learning rates for other optimizers, by their names in `optimizer_algorithm` (`{"lars": 2.0}`);
            an optimizer that is not named uses your optimizer's.
        sample_unit: What throughput counts: "sample", or "token" (then implement `num_units`).
        max_grad_norm: Clip gradients to this norm before each update; None does not clip.
        drop_last: Leave out the last, smaller batch of an epoch.
        current: What you run today, in Steptune's own vocabulary, where it differs from PyTorch's
            defaults: `{"data_loading": {"num_workers": 4}, "precision": {"level": "O1"}}`. It is
            the baseline that every gain is measured against. `steptune strategies` lists the names.
        knobs: Attributes of your own that Steptune may set to other values, by name: `{"chunk": (1, 2, 4)}`; what they
            are now is what you run today. Training stays the same whatever they are, and the guard checks that.
            Numbers count as ordered; a set has no order. Read them in your methods, not in `__init__`.
        recipe_knobs: The same for attributes that change the training recipe, tried with `--allow recipe`.
        initialises_on_device: `model` may be called under `torch.device(...)`, where a device draws the initial
            numbers of a large model faster than the CPU.
        directory: Where `prepare` put this study's files. Set by Steptune.
    """

    global_batch: int = 32
    max_global_batch: int | None = None
    learning_rates: ClassVar[Mapping[str, float]] = {}
    sample_unit: str = "sample"
    max_grad_norm: float | None = None
    drop_last: bool = True
    current: ClassVar[Mapping[str, Mapping[str, Scalar]]] = {}
    knobs: ClassVar[Mapping[str, Collection[Scalar]]] = {}
    recipe_knobs: ClassVar[Mapping[str, Collection[Scalar]]] = {}
    initialises_on_device: bool = False
    directory: Path = Path()

    # --- required -----------------------------------------------------------------------------

    def model(self) -> torch.nn.Module:
        """Return the freshly initialised model, on the CPU."""
        raise NotImplementedError

    def dataset(self) -> Any:
        """Return the training data: map-style (`__len__`, `__getitem__`) or iterable.

        A map-style dataset whose `__getitem__` both reads and augments may instead offer
        `load(index)`, which is deterministic, and `augment(sample)`, which may draw random numbers:
        then what `load` returns can be cached without changing the training.
        """
        raise NotImplementedError

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the scalar loss of one batch (mean over its samples or tokens)."""
        return self.criterion(self.forward(model, batch), batch)

    # --- optional: the model ------------------------------------------------------------------

    def forward(self, model: torch.nn.Module, batch: Any) -> Any:
        """Return the model's output for a batch; with `criterion` this replaces `loss`."""
        raise NotImplementedError

    def criterion(self, output: Any, batch: Any) -> torch.Tensor:
        """Return the scalar loss of an output; with `forward` this replaces `loss`."""
        raise NotImplementedError

    def blocks(self, model: torch.nn.Module) -> Sequence[torch.nn.Module]:
        """Return the repeated blocks, for checkpointing, regional compilation and wrapping.

        Default: the members of the longest ModuleList or Sequential whose members are of one class.
        """
        from steptune.tuner.workloads.blocks import longest_repetition

        return longest_repetition(model)

    def class_token(self, model: torch.nn.Module) -> tuple[torch.nn.Module, torch.nn.Module] | None:
        """Return the place of the class token: the first block that takes it, and the normalisation after which the
        first token is classified; None without a class token. This is needed to try a classifier on the mean of the
        tokens.

        Default: the vision transformers of transformers, torchvision and timm.
        """
        from steptune.tuner.workloads.class_token import known_class_token

        return known_class_token(model)

    # --- optional: the update -----------------------------------------------------------------

    def optimizer(self, named_parameters: NamedParameters) -> torch.optim.Optimizer:
        """Return the optimizer. Called after wrapping, so that parameter groups survive sharding."""
        import torch

        return torch.optim.AdamW([parameter for _, parameter in named_parameters], lr=1e-3)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return a learning-rate scheduler, or None. It is stepped once after every update."""
        return None

    def training_step(self, job: StepJob, batch: Any) -> torch.Tensor:
        """Run one whole step. Override it if forward pass, backward pass and update do not describe the training.

        Use `job.loss(batch)`, `job.backward(loss)` and `job.update()`. A workload that overrides
        this gives up the strategies that need to know the step: micro-batches and whole-step graphs.
        """
        raise NotImplementedError

    # --- optional: the data -------------------------------------------------------------------

    def prepare(self, directory: Path) -> None:
        """Download, decode or generate data into `directory`, once per study."""

    def sampler(self, dataset: Any) -> Any:
        """Return a sampler that yields the sample indices of one epoch; None for a random order."""
        return None

    def batch_sampler(self, dataset: Any) -> Any:
        """Return a sampler that yields the batches of one epoch as lists of indices; None makes batches of
        `global_batch` indices from `sampler`.
        """
        return None

    def length(self, dataset: Any, index: int) -> int:
        """Return the length of a sample (tokens, frames) without loading it, so that batches of similar lengths can be
        made.

        Default: `dataset.lengths[index]`, where the dataset has that.
        """
        return int(dataset.lengths[index])

    collate: Callable[[list[Any]], Any] | None = None
    """Function that makes a batch: `collate(self, samples)`; None uses PyTorch's default."""

    def worker_init(self, worker_id: int) -> None:
        """Run once in every loader worker."""

    def batch_transform(self, batch: Any) -> Any:
        """Transform a batch on the device before it enters the model: normalisation, mix-up, casts."""
        return batch

    def byte_dataset(self, dataset: Any) -> Any:
        """Return a dataset of the same samples before their last conversion, such as images in uint8, with a quarter of
        the bytes to copy to the device. `from_bytes` converts them there. Define both or none; `device_prefetch` uses
        them.

        Args:
            dataset: What `dataset` returned.
        """
        raise NotImplementedError

    def from_bytes(self, batch: Any) -> Any:
        """Convert a batch of `byte_dataset` on the device to the equivalent batch of `dataset`."""
        raise NotImplementedError

    def num_units(self, batch: Any) -> int:
        """Return the number of samples or (unpadded) tokens in a batch."""
        if self.sample_unit == "token":
            raise WorkloadRejectedError(
                f"{type(self).__name__}.sample_unit is 'token', but num_units(batch) is missing: "
                "return the number of tokens in the batch without padding"
            )
        return first_length(batch)

    # --- what Steptune asks -------------------------------------------------------------------

    @property
    def has_custom_step(self) -> bool:
        return type(self).training_step is not Workload.training_step

    def knows_lengths(self, dataset: Any) -> bool:
        """Say whether `length` is available."""
        return type(self).length is not Workload.length or hasattr(dataset, "lengths")

    @property
    def has_byte_form(self) -> bool:
        return type(self).byte_dataset is not Workload.byte_dataset


def first_length(batch: Any) -> int:
    """Return the length of the first tensor in a batch: its number of samples."""
    for leaf in leaves(batch):
        if hasattr(leaf, "shape") and len(leaf.shape) > 0:
            return int(leaf.shape[0])
    raise WorkloadRejectedError(
        "the batch contains no tensor with a first dimension, so its samples cannot be counted: implement "
        "num_units(self, batch)"
    )


def leaves(batch: Any) -> Iterator[Any]:
    """Yield the leaves of nested mappings and sequences, in the order of their iteration."""
    if isinstance(batch, Mapping):
        for value in batch.values():
            yield from leaves(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from leaves(value)
    elif hasattr(batch, "__dataclass_fields__"):
        for name in batch.__dataclass_fields__:
            yield from leaves(getattr(batch, name))
    else:
        yield batch

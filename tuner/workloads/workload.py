"""Workload that is tuned: a user's model, data, loss and optimizer, and the settings they use today.

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

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from steptune.tuner.errors import WorkloadRejectedError
from steptune.tuner.records import Scalar
from steptune.tuner.wording import near
from steptune.tuner.workloads.knobs import knobs_of

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.job import TrainingJob

MISTYPED = 0.85
"""How alike a member's name and one of `Workload` are at least, for one to be the other, mistyped."""
NamedParameters = Iterable[tuple[str, "torch.nn.Parameter"]]


class Workload:
    """One training workload. Subclass it; implement `model`, `dataset` and `loss`.

    Attributes:
        global_batch: Samples per optimizer step over all ranks. Steptune changes it only up to `max_global_batch`.
        max_global_batch: The most samples per step that you would train with; None allows no more than `global_batch`.
            Larger ones are another recipe, tried with `--allow recipe`.
        learning_rates: Of other optimizers, by their names in `optimizer_algorithm` (`{"lars": 2.0}`); one that is
            not named takes your optimizer's.
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
        """The freshly initialised model, on the CPU."""
        raise NotImplementedError

    def dataset(self) -> Any:
        """The training data: map-style (`__len__`, `__getitem__`) or iterable.

        A map-style dataset whose `__getitem__` both reads and augments may instead offer
        `load(index)`, which is deterministic, and `augment(sample)`, which may draw random numbers:
        then what `load` returns can be cached without changing the training.
        """
        raise NotImplementedError

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """The scalar loss of one batch (mean over its samples or tokens)."""
        return self.criterion(self.forward(model, batch), batch)

    # --- optional: the model ------------------------------------------------------------------

    def forward(self, model: torch.nn.Module, batch: Any) -> Any:
        """The model's output for a batch; with `criterion` this replaces `loss`."""
        raise NotImplementedError

    def criterion(self, output: Any, batch: Any) -> torch.Tensor:
        """The scalar loss of an output; with `forward` this replaces `loss`."""
        raise NotImplementedError

    def blocks(self, model: torch.nn.Module) -> Sequence[torch.nn.Module]:
        """The repeated blocks, for checkpointing, regional compilation and wrapping.

        Default: the members of the longest ModuleList or Sequential whose members are of one class.
        """
        from steptune.tuner.workloads.blocks import longest_repetition

        return longest_repetition(model)

    def class_token(self, model: torch.nn.Module) -> tuple[torch.nn.Module, torch.nn.Module] | None:
        """Where a class token goes: the first block that takes it, and the normalisation whose first token is
        classified. None where there is none. Lets a classifier on the mean of the tokens be tried.

        Default: the vision transformers of transformers, torchvision and timm.
        """
        from steptune.tuner.workloads.class_token import known_class_token

        return known_class_token(model)

    # --- optional: the update -----------------------------------------------------------------

    def optimizer(self, named_parameters: NamedParameters) -> torch.optim.Optimizer:
        """The optimizer; called after wrapping, so that parameter groups survive sharding."""
        import torch

        return torch.optim.AdamW([parameter for _, parameter in named_parameters], lr=1e-3)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        """A learning-rate scheduler that is stepped once after every update, or None."""
        return None

    def training_step(self, job: TrainingJob, batch: Any) -> torch.Tensor:
        """One whole step, where forward, backward, update does not describe it.

        Use `job.loss(batch)`, `job.backward(loss)` and `job.update()`. A workload that overrides
        this gives up the strategies that need to know the step: micro-batches and whole-step graphs.
        """
        raise NotImplementedError

    # --- optional: the data -------------------------------------------------------------------

    def prepare(self, directory: Path) -> None:
        """Download, decode or generate data, once per study, into `directory`."""

    def sampler(self, dataset: Any) -> Any:
        """Yields indices of one epoch; None shuffles."""
        return None

    def batch_sampler(self, dataset: Any) -> Any:
        """Yields lists of indices of one epoch; None groups the sampler's by `global_batch`."""
        return None

    def length(self, dataset: Any, index: int) -> int:
        """The length of a sample (tokens, frames), without loading it; lets batches be made of similar lengths.

        Default: `dataset.lengths[index]`, where the dataset has that.
        """
        return int(dataset.lengths[index])

    collate: Callable[[list[Any]], Any] | None = None
    """`collate(self, samples)` makes a batch; None takes PyTorch's default."""

    def worker_init(self, worker_id: int) -> None:
        """Runs once in every loader worker."""

    def batch_transform(self, batch: Any) -> Any:
        """Applied to a batch on the device, before the model: normalisation, mix-up, casts."""
        return batch

    def byte_dataset(self, dataset: Any) -> Any:
        """The same samples before their last conversion, images as uint8: a quarter of what has to be copied to the
        device. `from_bytes` converts them there. Define both or none; `device_prefetch` uses them.

        Args:
            dataset: What `dataset` returned.
        """
        raise NotImplementedError

    def from_bytes(self, batch: Any) -> Any:
        """A batch of `byte_dataset` on the device, as the same batch of `dataset` would be there."""
        raise NotImplementedError

    def num_units(self, batch: Any) -> int:
        """Samples or (unpadded) tokens in a batch."""
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
        """Say whether `length` can be asked."""
        return type(self).length is not Workload.length or hasattr(dataset, "lengths")

    @property
    def has_byte_form(self) -> bool:
        return type(self).byte_dataset is not Workload.byte_dataset


def first_length(batch: Any) -> int:
    """Length of the first tensor found in a batch: its number of samples."""
    for leaf in leaves(batch):
        if hasattr(leaf, "shape") and len(leaf.shape) > 0:
            return int(leaf.shape[0])
    raise WorkloadRejectedError(
        "the batch holds no tensor with a first dimension, so its samples cannot be counted: "
        "implement num_units(self, batch)"
    )


def leaves(batch: Any) -> Iterator[Any]:
    """The leaves of nested mappings and sequences, in order."""
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


def validate(workload: object) -> Workload:
    """Checks in microseconds that an object is a complete workload; names the missing piece.

    Raises:
        WorkloadRejectedError: It is not a `Workload`, lacks a required method, or has a bad attribute.
    """
    if not isinstance(workload, Workload):
        raise WorkloadRejectedError(
            f"{type(workload).__name__} is not a workload: subclass steptune.Workload and implement "
            "model, dataset and loss"
        )
    cls = type(workload)
    _check_names(workload)
    for name in ("model", "dataset"):
        if getattr(cls, name) is getattr(Workload, name):
            mistyped = near(name, [own for own in dir(cls) if own not in vars(Workload)])
            advice = f"did you mean {name} by {mistyped[0]}?" if mistyped else "a workload must define it"
            raise WorkloadRejectedError(f"{cls.__name__} lacks {name}(self): {advice}")
    has_loss = cls.loss is not Workload.loss
    has_pair = cls.forward is not Workload.forward and cls.criterion is not Workload.criterion
    if not (has_loss or has_pair or workload.has_custom_step):
        raise WorkloadRejectedError(
            f"{cls.__name__} lacks loss(self, model, batch): define it, or forward and criterion"
        )
    _check_values(workload)
    knobs_of(workload)
    if (cls.byte_dataset is Workload.byte_dataset) != (cls.from_bytes is Workload.from_bytes):
        missing = "from_bytes(self, batch)" if workload.has_byte_form else "byte_dataset(self, dataset)"
        raise WorkloadRejectedError(f"{cls.__name__} lacks {missing}: define byte_dataset and from_bytes, or neither")
    _check_arguments(cls, "loss", ("model", "batch"))
    _check_arguments(cls, "optimizer", ("named_parameters",))
    return workload


def _check_values(workload: Workload) -> None:
    """Refuse attributes whose values no training can have."""
    cls = type(workload)
    if not isinstance(workload.global_batch, int) or workload.global_batch < 1:
        raise WorkloadRejectedError(
            f"{cls.__name__}.global_batch is {workload.global_batch!r}: it must be a positive integer"
        )
    limit = workload.max_global_batch
    if limit is not None and (not isinstance(limit, int) or limit < workload.global_batch):
        raise WorkloadRejectedError(
            f"{cls.__name__}.max_global_batch is {limit!r}: it must be an integer of at least global_batch "
            f"({workload.global_batch}), or None"
        )
    for name, rate in workload.learning_rates.items():
        if not isinstance(rate, int | float) or not rate > 0:
            raise WorkloadRejectedError(
                f"{cls.__name__}.learning_rates[{name!r}] is {rate!r}: it must be a positive number"
            )
    if workload.sample_unit not in ("sample", "token"):
        raise WorkloadRejectedError(
            f"{cls.__name__}.sample_unit is {workload.sample_unit!r}: it must be 'sample' or 'token'"
        )
    if not isinstance(workload.current, Mapping):
        raise WorkloadRejectedError(
            f"{cls.__name__}.current is {workload.current!r}: it must map strategies to choices, "
            "as {'data_loading': {'num_workers': 4}}"
        )


def _check_names(workload: Workload) -> None:
    """Refuse a member that is nearly one which Steptune would ask for, by its name and its kind: it would be ignored.

    Plain values of one's own are free: `samples = 512` is no mistyped `sampler`, which is a method.
    """
    bases = [cls for cls in type(workload).__mro__ if issubclass(cls, Workload) and cls is not Workload]
    own = {name for place in (workload, *bases) for name in vars(place) if not name.startswith("_")}
    known = [name for name in vars(Workload) if not name.startswith("_")]
    for name in sorted(own.difference(known)):
        value = getattr(workload, name)
        close = (close for close in near(name, known, MISTYPED) if close not in own)
        meant = [found for found in close if _kind(getattr(Workload, found)) == _kind(value)]
        if meant:
            raise WorkloadRejectedError(
                f"{type(workload).__name__}.{name} is not part of a workload: did you mean {meant[0]}? If it is a "
                "helper of your own, give it another name, or one that begins with an underscore"
            )


def _kind(value: object) -> str:
    return "method" if callable(value) else "mapping" if isinstance(value, Mapping) else "value"


def _check_arguments(cls: type, method: str, expected: tuple[str, ...]) -> None:
    signature = inspect.signature(getattr(cls, method))
    try:
        signature.bind(None, *expected)
    except TypeError as error:
        raise WorkloadRejectedError(
            f"{cls.__name__}.{method}{signature} cannot be called as {method}({', '.join(expected)}): {error}"
        ) from None

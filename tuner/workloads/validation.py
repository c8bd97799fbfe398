"""Checks of a workload that need neither its model nor its data."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from steptune.tuner.errors import WorkloadRejectedError
from steptune.tuner.wording import near
from steptune.tuner.workloads.knobs import knobs_of
from steptune.tuner.workloads.workload import Workload

MISTYPED = 0.85
"""Minimum similarity of a member's name to a name in `Workload` at which the member is taken for a typo."""


def validate(workload: object) -> Workload:
    """Refuse an object that is not a complete workload, and name what is missing; takes microseconds.

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
            advice = f"did you write {mistyped[0]} instead of {name}?" if mistyped else "a workload must define it"
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
    """Refuse attribute values that no training can have."""
    cls = type(workload)
    if not isinstance(workload.global_batch, int) or workload.global_batch < 1:
        raise WorkloadRejectedError(
            f"{cls.__name__}.global_batch is {workload.global_batch!r}: it must be a positive integer"
        )
    limit = workload.max_global_batch
    if limit is not None and (not isinstance(limit, int) or limit < workload.global_batch):
        raise WorkloadRejectedError(
            f"{cls.__name__}.max_global_batch is {limit!r}: it must be None, or an integer of at least "
            f"global_batch ({workload.global_batch})"
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
    """Refuse a member whose name and kind nearly match a member of `Workload`: such a typo would be ignored silently.

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
                f"{type(workload).__name__}.{name} is not part of a workload: did you mean {meant[0]}? If it is "
                "your own helper, rename it, for example with a leading underscore"
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

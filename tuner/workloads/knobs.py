"""Knobs of a workload: attributes that Steptune may set to other values to measure their effect on the step.

    class Chunked(Workload):
        chunk = 2                        # what you run today
        knobs = {"chunk": (1, 2, 4)}     # the same training, whatever the value

        def loss(self, model, batch):
            return chunked_loss(model, batch, self.chunk)

A knob reaches the job in one way: the attribute is set on the workload before its model, data or loss is requested. So
a workload reads it in the methods that use it, never in `__init__`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from types import CodeType
from typing import Any

from steptune.tuner.errors import WorkloadRejectedError
from steptune.tuner.records import KnobFacts, Scalar
from steptune.tuner.workloads.workload import Workload

MAX_VALUES = 64
_EXAMPLE = "{'chunk': (1, 2, 4)}"


def knobs_of(workload: Workload) -> tuple[KnobFacts, ...]:
    """Return the knobs that a workload declares, those of `knobs` before those of `recipe_knobs`.

    Raises:
        WorkloadRejectedError: A knob is ill-formed; the message names it, what is wrong and how to write it.
    """
    found: dict[str, KnobFacts] = {}
    for field, recipe in (("knobs", False), ("recipe_knobs", True)):
        place, declared = f"{type(workload).__name__}.{field}", getattr(workload, field)
        if not isinstance(declared, Mapping):
            raise WorkloadRejectedError(
                f"{place} is {declared!r}: it must map attributes to their values, as {_EXAMPLE}"
            )
        for name, values in declared.items():
            if name in found:
                raise WorkloadRejectedError(
                    f"{name!r} is declared in both {place} and `knobs`: remove it from one of the two"
                )
            found[name] = _knob(workload, place, name, values, recipe=recipe)
    return tuple(found.values())


def set_knobs(workload: Workload, values: Mapping[str, Scalar]) -> None:
    """Set a workload's knobs to the given values."""
    for name, value in values.items():
        setattr(workload, name, value)


def _knob(workload: Workload, place: str, name: Any, values: Any, *, recipe: bool) -> KnobFacts:
    today = _today(workload, place, name)
    if not isinstance(values, list | tuple | set | frozenset | range):
        raise WorkloadRejectedError(
            f"{place}[{name!r}] is {values!r}: it must be a tuple of values, as {_EXAMPLE}, or a set if the "
            "values have no order"
        )
    without_order = isinstance(values, set | frozenset)
    listed = sorted(values, key=repr) if without_order else list(values)
    if len(listed) > MAX_VALUES:
        raise WorkloadRejectedError(f"{place}[{name!r}] has {len(listed)} values: name at most {MAX_VALUES}")
    for value in listed:
        if not _is_plain(value):
            raise WorkloadRejectedError(
                f"{place}[{name!r}] has the value {value!r}: values must be finite numbers, strings, booleans or None"
            )
    others = {_identity(value): value for value in listed if _identity(value) != _identity(today)}
    if not others:
        raise WorkloadRejectedError(f"{place}[{name!r}] has no value other than today's, {today!r}: add values to try")
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (today, *listed))
    return KnobFacts(
        name=name, today=today, values=tuple(others.values()), ordered=numbers and not without_order, recipe=recipe
    )


def _today(workload: Workload, place: str, name: Any) -> Scalar:
    """Return the current value of an attribute, as the user trains with it today."""
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
        raise WorkloadRejectedError(
            f"{place} names {name!r}: a knob must be an attribute of the workload whose name begins with a letter"
        )
    if hasattr(Workload, name):
        raise WorkloadRejectedError(
            f"{place} names {name!r}, which every workload has: a knob must be an attribute that only your workload has"
        )
    if not hasattr(workload, name):
        raise WorkloadRejectedError(
            f"{place} names {name!r}, but {type(workload).__name__}.{name} does not exist: set it to the value "
            f"that you use today, and read self.{name} where the value matters"
        )
    value = getattr(workload, name)
    if isinstance(getattr(type(workload), name, None), property):
        raise WorkloadRejectedError(
            f"{place} names {name!r}, which is a property: a knob must be a plain attribute, which can be set"
        )
    if not _is_plain(value):
        raise WorkloadRejectedError(
            f"{place} names {name!r}, which is {value!r} today: a knob must be a finite number, a string, a "
            "boolean or None"
        )
    plain: Scalar = value
    return plain


def _is_plain(value: Any) -> bool:
    """Say whether a record can hold a value: a bool, an int, a finite float, a string or None, but no NumPy number."""
    return type(value) in (bool, int, str, type(None)) or (type(value) is float and math.isfinite(value))


def _identity(value: Scalar) -> tuple[type, Scalar]:
    """Return a key that distinguishes values of different types: True is not the number 1."""
    return type(value), value


def is_read(workload: Workload, name: str) -> bool:
    """Say whether any method of the workload except `__init__` names the attribute. Code that reads it elsewhere, from
    a workload passed to it, is not found.
    """
    own = [cls for cls in type(workload).__mro__ if cls.__module__ != Workload.__module__]
    functions = [f for cls in own for method, f in vars(cls).items() if method != "__init__"]
    return any(_names_it(code, name) for code in map(_code_of, functions) if code is not None)


def _code_of(member: Any) -> CodeType | None:
    found = getattr(inspect.unwrap(getattr(member, "__func__", member)), "__code__", None)
    return found if isinstance(found, CodeType) else None


def _names_it(code: CodeType, name: str) -> bool:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return name in code.co_names or name in code.co_consts or any(_names_it(each, name) for each in inner)

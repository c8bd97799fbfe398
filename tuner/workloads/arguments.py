"""Checks of the arguments in a workload's reference against the parameters of its class or function.

Ready workloads are read, not imported: their modules load torch, which the parent of a study never does.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from steptune.tuner.errors import WorkloadRejectedError
from steptune.tuner.records import Scalar
from steptune.tuner.wording import near, which_of

_KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,)}
_NOUNS = {"int": "a whole number", "float": "a number", "bool": "true or false"}


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Parameters of a workload's class or function.

    Attributes:
        annotations: Annotations by name, as written in the source; empty where there is none.
        required: Names of the parameters without a default.
        is_open: Whether further names are accepted.
    """

    annotations: Mapping[str, str]
    required: tuple[str, ...]
    is_open: bool

    def check(self, name: str, arguments: Mapping[str, Scalar], given: Mapping[str, Any] | None = None) -> None:
        """Refuse arguments that are missing, unknown, or of another type.

        Args:
            name: The workload as its user wrote it, such as `zoo:timm`.
            arguments: Arguments in the reference.
            given: Arguments that the entry itself sets.

        Raises:
            WorkloadRejectedError: An argument is refused; the message names it, its value, and how to write it.
        """
        missing = [known for known in self.required if known not in {*arguments, *(given or {})}]
        if missing:
            example = "&".join(f"{known}=..." for known in missing)
            mistyped = near(missing[0], arguments)
            found = f", not {mistyped[0]!r}" if mistyped else ""
            raise WorkloadRejectedError(f"{name} needs {' and '.join(missing)}{found}: write '{name}?{example}'")
        for argument, value in arguments.items():
            if argument in self.annotations:
                _check_type(name, argument, value, self.annotations[argument])
            elif not self.is_open:
                advice = which_of(argument, self.annotations) if self.annotations else "it takes none"
                raise WorkloadRejectedError(f"{name} has no argument {argument!r}: {advice}")


def parameters_of(factory: Callable[..., Any]) -> Parameters | None:
    """Return the parameters of a class or function; None where Python cannot determine them."""
    try:
        found = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return None
    named = [p for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return Parameters(
        annotations={
            p.name: p.annotation if isinstance(p.annotation, str) else getattr(p.annotation, "__name__", "")
            for p in named
        },
        required=tuple(p.name for p in named if p.default is p.empty),
        is_open=any(p.kind is p.VAR_KEYWORD for p in found),
    )


@cache
def parameters_in_source(module: str, class_name: str) -> Parameters:
    """Return the parameters of one of Steptune's own classes, read from its source without an import."""
    spec = find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    [owner] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name]
    [init] = [node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    positional = init.args.args[1:]  # without self
    num_required = len(positional) - len(init.args.defaults)
    required = [argument.arg for argument in positional[:num_required]]
    required += [a.arg for a, default in zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True) if not default]
    return Parameters(
        annotations={
            a.arg: ast.unparse(a.annotation) if a.annotation else "" for a in (*positional, *init.args.kwonlyargs)
        },
        required=tuple(required),
        is_open=init.args.kwarg is not None,
    )


def check_multiple(name: str, value: int, of: int) -> None:
    """Refuse a size, such as an image's height, that is not a positive multiple of `of`; the network's strides require
    one.

    Raises:
        WorkloadRejectedError: The size is not a positive multiple.
    """
    if value < of or value % of:
        raise WorkloadRejectedError(f"{name} is {value}: it must be a multiple of {of}")


def _check_type(name: str, argument: str, value: Scalar, annotation: str) -> None:
    kinds = _KINDS.get(annotation)
    if kinds is None or (isinstance(value, kinds) and (annotation == "bool" or not isinstance(value, bool))):
        return
    raise WorkloadRejectedError(f"{name}: {argument} is {value!r}, and must be {_NOUNS[annotation]}")

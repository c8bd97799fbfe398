"""References to workloads: a file, a module, an entry of the zoo, or a command.

    path/to/file.py:ClassName        a class in a file (its folder is importable, as under `python`)
    package.module:ClassName         a class in an installed module
    zoo:vit_small?batch=128          a ready workload; arguments follow the question mark
    -- python train.py --lr 1e-3     a command that runs a training script, which is no class (`tuner/scripts/`)

Arguments (`?name=value&name=value`) are passed to the class; numbers and booleans are recognised.
This module never imports the workload: the parent process only checks what can be checked by
reading.
"""

from __future__ import annotations

import ast
import hashlib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

from steptune.tuner.errors import WorkloadNotFoundError, WorkloadRejectedError
from steptune.tuner.records import Scalar
from steptune.tuner.wording import which_of


@dataclass(frozen=True, kw_only=True)
class WorkloadReference:
    """Parsed reference of a workload; `kind` is "file", "module" or "zoo"."""

    kind: str
    source: str
    name: str
    arguments: dict[str, Scalar] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        assert self.kind == "file"
        return Path(self.source)


COMMAND = "-- "
"""Prefix of a workload's name that marks it as a command."""


def is_command(workload: str) -> bool:
    """Say whether a study's workload is a command."""
    return workload.startswith(COMMAND)


def workload_of(command: Sequence[str]) -> str:
    """Return the workload name of a command."""
    return COMMAND + shlex.join(command)


def command_of(workload: str) -> tuple[str, ...]:
    """Return the command that a workload name contains."""
    return tuple(shlex.split(workload.removeprefix(COMMAND)))


def parse_reference(text: str) -> WorkloadReference:
    """Parse a reference and check the file, its syntax and the class, without an import.

    Raises:
        WorkloadNotFoundError: The file, class or zoo entry does not exist.
        WorkloadRejectedError: The file is not valid Python, or the reference has no class.
    """
    if is_command(text):
        raise WorkloadRejectedError(
            f"{text.removeprefix(COMMAND)!r} is a command: `steptune tune -- COMMAND` and `steptune profile -- "
            "COMMAND` run it as it is; all other uses require a Workload, written as path/to/file.py:ClassName"
        )
    target, _, query = text.partition("?")
    arguments = {name: _scalar(value) for name, value in parse_qsl(query, keep_blank_values=True)}
    if target.startswith("zoo:"):
        return WorkloadReference(kind="zoo", source="zoo", name=target[4:], arguments=arguments)
    source, colon, name = target.rpartition(":")
    if not colon or not name:
        raise WorkloadRejectedError(
            f"{text!r} names no class: write path/to/file.py:ClassName, package.module:ClassName or zoo:NAME "
            "(`steptune zoo` lists the names); to run a training script unchanged, use `steptune tune -- python "
            "train.py`"
        )
    if source.endswith(".py") or "/" in source:
        path = Path(source).expanduser().resolve()
        _check_file(path, name)
        return WorkloadReference(kind="file", source=str(path), name=name, arguments=arguments)
    return WorkloadReference(kind="module", source=source, name=name, arguments=arguments)


def format_reference(reference: WorkloadReference) -> str:
    """Return the text of a reference, with an absolute path: the inverse of `parse_reference`."""
    query = urlencode(reference.arguments)
    target = f"zoo:{reference.name}" if reference.kind == "zoo" else f"{reference.source}:{reference.name}"
    return f"{target}?{query}" if query else target


def source_digest(reference: WorkloadReference) -> str:
    """Return the digest of a workload's own file, which keeps the results of an edited workload separate."""
    if reference.kind == "file":
        return hashlib.sha256(reference.path.read_bytes()).hexdigest()[:16]
    return hashlib.sha256(format_reference(reference).encode()).hexdigest()[:16]


def imported_modules(path: Path) -> list[str]:
    """Return the names of the top-level modules that a file imports at its top level."""
    names: dict[str, None] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            names.update((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names[node.module] = None
    return list(names)


def _check_file(path: Path, name: str) -> None:
    if not path.is_file():
        raise WorkloadNotFoundError(f"{path} does not exist: give the path of a Python file with the class {name}")
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except SyntaxError as error:
        raise WorkloadRejectedError(f"{path}, line {error.lineno}: this is not valid Python: {error.msg}") from None
    except (UnicodeDecodeError, ValueError, RecursionError, MemoryError) as error:  # a null byte, or endless nesting
        raise WorkloadRejectedError(f"{path} is not valid Python: {error or type(error).__name__}") from None
    names = list(_defined_names(tree.body))
    if name not in names and "*" not in names:
        classes = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name in names]
        advice = which_of(name, [*classes, *names], f"its classes are {', '.join(classes) or 'none'}")
        raise WorkloadNotFoundError(f"{path} has no class {name}: {advice}")


def _defined_names(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield the names that a module's statements define, also under `if`, `try` and `with`; yield `*` for star
    imports.
    """
    for node in body:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name
            case ast.ImportFrom() | ast.Import():
                yield from (alias.asname or alias.name for alias in node.names)
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from (part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name))
            case ast.If() | ast.For() | ast.While() | ast.With() | ast.Try():
                yield from _defined_names(node.body)
                yield from _defined_names(getattr(node, "orelse", ()))
                yield from _defined_names(getattr(node, "finalbody", ()))
                for handler in getattr(node, "handlers", ()):
                    yield from _defined_names(handler.body)
            case ast.Expr(value=ast.Call()):
                if any(
                    isinstance(part, ast.Name) and part.id in ("globals", "setattr", "exec") for part in ast.walk(node)
                ):
                    yield "*"


def _scalar(text: str) -> Scalar:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text

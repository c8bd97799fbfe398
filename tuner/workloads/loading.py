"""Construction of a workload from a reference, where user code may run: in a rank, never in a parent."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from steptune.tuner.errors import WorkloadNotFoundError, WorkloadRejectedError
from steptune.tuner.wording import which_of
from steptune.tuner.workloads.arguments import parameters_of
from steptune.tuner.workloads.importing import noticing_scripts
from steptune.tuner.workloads.reference import WorkloadReference, parse_reference
from steptune.tuner.workloads.validation import validate
from steptune.tuner.workloads.workload import Workload


def load_workload(reference: str | WorkloadReference, say: Callable[[str], None] | None = None) -> Workload:
    """Import the module that a reference names, and create the workload.

    Args:
        say: Called with the statement that takes long while the module is imported.

    Raises:
        WorkloadNotFoundError: The module, class or zoo entry does not exist.
        WorkloadRejectedError: The class exists but is not a complete workload, or its arguments do not fit.
        Exception: Whatever the user's own module raises at import.
    """
    parsed = parse_reference(reference) if isinstance(reference, str) else reference
    if parsed.kind == "zoo":
        from steptune.tuner.workloads.zoo import zoo_entry

        factory: Any = zoo_entry(parsed.name)
    else:
        with noticing_scripts(say):
            module = _import_file(parsed) if parsed.kind == "file" else _import_module(parsed.source)
        if not hasattr(module, parsed.name):
            advice = which_of(parsed.name, _workloads_in(module), _counted_workloads(module))
            raise WorkloadNotFoundError(f"{parsed.source} has no class {parsed.name}: {advice}")
        factory = getattr(module, parsed.name)
    if isinstance(factory, Workload):
        return validate(factory)
    if not callable(factory):
        raise WorkloadRejectedError(
            f"{parsed.name} in {parsed.source} is {factory!r}: give the name of a class or a function"
        )
    if parsed.kind != "zoo":  # an entry of the zoo checks its own
        parameters = parameters_of(factory)
        if parameters is not None:
            parameters.check(parsed.name, parsed.arguments)
    return validate(factory(**parsed.arguments))


def _workloads_in(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Workload) and value is not Workload
    ]


def _counted_workloads(module: ModuleType) -> str:
    names = _workloads_in(module)
    return f"its workloads are {', '.join(names)}" if names else "it contains no workload"


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and name.startswith(error.name):
            raise WorkloadNotFoundError(
                f"module {name} cannot be found: install it, or give a file as path/to/file.py:ClassName"
            ) from None
        raise


def _import_file(reference: WorkloadReference) -> ModuleType:
    """Import a file as `python file.py` would: with its folder first on the path."""
    path = reference.path
    name = path.stem
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) == str(path):
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    if name in sys.modules:
        name = f"steptune_workload_{name}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module

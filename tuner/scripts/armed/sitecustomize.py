"""Module that arms the hooks of `steptune profile -- COMMAND`, then runs the environment's own `sitecustomize`."""

import os
import sys
from importlib import import_module


def _arm() -> None:
    from importlib.util import module_from_spec, spec_from_file_location

    folder = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "agent")  # noqa: PTH100, PTH118, PTH120
    place = os.path.join(folder, "__init__.py")  # noqa: PTH118
    spec = spec_from_file_location("_steptune_agent", place, submodule_search_locations=[folder])
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["_steptune_agent"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.arm()


def _give_way() -> None:
    """Import the next module of this name on the path, as if this folder were not there."""
    own = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != own]  # noqa: PTH100
    this = sys.modules.pop("sitecustomize")
    try:
        import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = this


if os.environ.get("STEPTUNE_SCRIPT_RECORD"):
    _arm()
_give_way()

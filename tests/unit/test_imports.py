"""Limits on what may be imported where: parents stay without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from steptune.service.cli.main import GROUPS, MODULES

ROOT = Path(__file__).parents[2]
TORCH_FREE = (
    "steptune",
    "steptune.tuner.search.driver",
    "steptune.tuner.export",
    "steptune.tuner.export.study_formats",
    "steptune.tuner.memory_store",
    "steptune.tuner.network.examine",
    "steptune.tuner.network.log_checks",
    "steptune.tuner.profiling.analysis",
    "steptune.tuner.profiling.comparison",
    "steptune.tuner.profiling.perfetto",
    "steptune.tuner.strategies.combine",
    "steptune.tuner.trials.runner",
    "steptune.tuner.workloads.zoo",
    "steptune.service.app",
    "steptune.service.cli.main",
    *(f"steptune.service.cli.{module}" for module in (*MODULES, *GROUPS)),
    "steptune.service.cli.network",
    "steptune.service.serving",
    "steptune.service.cli.trace_summary",
    "steptune.service.store",
    "steptune.service.worker.loop",
    "steptune.service.worker.machine",
    "steptune.service.worker.supervisor",
    "steptune.dashboards.report",
    "steptune.dashboards.trace_page",
)


PROGRAM = """
import importlib, sys
unwanted = set(sys.argv[1].split())
for name in sys.argv[2:]:
    importlib.import_module(name)
    loaded = unwanted & sys.modules.keys()
    if loaded:
        sys.exit(f"{name} loads {sorted(loaded)}")
"""
OF_EVERY_STUDY = tuple(
    f"steptune.tuner.trials.{name}" for name in ("runner", "host_agent", "server", "inspection", "reference", "trial")
)


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        pytest.param(TORCH_FREE, "torch transformers timm", id="a parent has no torch"),
        pytest.param(OF_EVERY_STUDY, "torch scipy pandas", id="a study starts without statistics"),
        pytest.param(
            ("steptune.service.worker.loop", "steptune.service.serving", "steptune.dashboards.trace_page"),
            "pandas pyarrow",
            id="a service and its workers start without tables",
        ),
    ],
)
def test_some_modules_load_no_large_library(modules: tuple[str, ...], unwanted: str) -> None:
    """In a fresh interpreter, one after another: what is loaded stays loaded, so that none hides another."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, unwanted, *modules],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr


def test_asking_for_apply_in_a_script_is_what_loads_the_engine() -> None:
    import steptune

    assert callable(steptune.apply)
    assert callable(steptune.launch_environment)
    with pytest.raises(AttributeError, match="no attribute 'aply'"):
        _ = steptune.aply

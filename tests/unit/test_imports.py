"""What may be imported where: parents stay without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCH_FREE = (
    "tuner",
    "tuner.search.driver",
    "tuner.export",
    "tuner.export.study_formats",
    "tuner.memory_store",
    "tuner.network.examine",
    "tuner.network.log_checks",
    "tuner.profiling.analysis",
    "tuner.profiling.comparison",
    "tuner.profiling.perfetto",
    "tuner.strategies.composition",
    "tuner.trials.runner",
    "tuner.workloads.zoo",
    "service.app",
    "service.cli.main",
    "service.cli.network",
    "service.cli.serve",
    "service.serving",
    "service.cli.trace_summary",
    "service.store",
    "service.worker.loop",
    "service.worker.machine",
    "service.worker.supervisor",
    "dashboards.report",
    "dashboards.trace_page",
)


@pytest.mark.parametrize("module", TORCH_FREE)
def test_a_parent_has_no_torch(module: str) -> None:
    """Each alone, in a fresh interpreter: an import of another module must not hide one's own."""
    program = f"import sys, {module}; print(*sorted({{'torch', 'transformers', 'timm'}} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def test_asking_for_apply_in_a_script_is_what_loads_the_engine() -> None:
    import tuner

    assert callable(tuner.apply)
    assert callable(tuner.launch_environment)
    with pytest.raises(AttributeError, match="no attribute 'aply'"):
        _ = tuner.aply

"""A command loads its own modules and no other's: loading all takes longer than a small trace to analyse."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from analysed import write_loop
from typer.main import get_command

from steptune.service.cli.main import GROUPS, MODULES, application

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "pandas", "pyarrow", "plotly", "scipy", "optuna", "sqlalchemy", "httpx", "pydantic", "typer", "ray")
PROGRAM = f"""
import sys
from steptune.__main__ import main
try:
    main()
finally:
    loaded = [name for name in {HEAVY} if name in sys.modules]
    if loaded:
        sys.exit(f"loaded: {{loaded}}")
"""
NAMES = [*(name for names in MODULES.values() for name in names), *GROUPS.values()]


def test_analyze_loads_nothing_that_it_does_not_need(tmp_path: Path) -> None:
    write_loop(tmp_path / "trace.json")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "analyze", str(tmp_path / "trace.json")],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "step breakdown" in done.stdout


def test_the_whole_application_has_the_commands_that_the_table_names() -> None:
    assert list(get_command(application()).commands) == NAMES  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", NAMES)
def test_a_command_by_itself_is_that_of_the_whole_application(name: str) -> None:
    alone = get_command(application(name)).commands  # type: ignore[attr-defined]
    assert name in alone
    assert len(alone) <= 4


def test_a_name_that_is_no_command_is_answered_with_all_of_them() -> None:
    assert len(get_command(application("analyse")).commands) == len(NAMES)  # type: ignore[attr-defined]

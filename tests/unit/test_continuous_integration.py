"""The workflow, the hooks of commits and `.ci/run` call the same targets of the Makefile."""

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
JOB = WORKFLOW["jobs"]["test"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TARGET = re.compile(r"^make ([\w-]+)$", re.MULTILINE)


def targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def minor_versions(requirement: str) -> set[str]:
    """Versions allowed by a requirement: ">=3.11,<3.13" allows 3.11 and 3.12."""
    least, below = (int(number) for number in re.fullmatch(r">=3\.(\d+),<3\.(\d+)", requirement).groups())
    return {f"3.{number}" for number in range(least, below)}


def test_the_workflow_calls_the_targets_of_the_script() -> None:
    called = [name for step in JOB["steps"] for name in TARGET.findall(step.get("run", ""))]
    assert called == TARGET.findall((ROOT / ".ci/run").read_text())
    assert {"check", "test"} <= set(called) <= targets()


def test_hooks_of_commits_call_targets() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    called = [name for hook in hooks for name in TARGET.findall(hook["entry"])]
    assert len(called) == len(hooks)
    assert "check" in called
    assert set(called) <= targets()


def test_every_supported_python_and_the_oldest_torch_are_tested() -> None:
    rows = JOB["strategy"]["matrix"]["include"]
    assert {row["python"] for row in rows} == minor_versions(PROJECT["requires-python"])
    (oldest,) = (re.match(r"torch>=([\d.]+),", need)[1] for need in PROJECT["optional-dependencies"]["torch"])
    (pinned,) = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert {row["torch"] for row in rows} == {pinned, f"{oldest}.0"}
    assert JOB["env"]["TORCH"] == "torch==${{ matrix.torch }}"
    assert f"TORCH ?= torch=={pinned}\n" in (ROOT / "Makefile").read_text()


def test_the_workflow_installs_what_the_script_installs() -> None:
    """The images of Python bring the interpreter's headers and `venv`."""
    wanted = set(re.findall(r"wanted\+=\(([\w+-]+)\)", (ROOT / ".ci/run").read_text()))
    installed = next(step["run"] for step in JOB["steps"] if "apt-get install" in step.get("run", ""))
    assert wanted - {"python3-dev", "python3-venv"} <= set(installed.split())

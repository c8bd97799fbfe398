"""The core's requirements beside packages that environments for training have: nothing there has to change."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENVIRONMENTS = sorted((ROOT / "tests" / "environments").glob("*.txt"))
"""Versions that pip chose for torch, torchvision, timm and transformers."""


def versions_of(path: Path) -> dict[str, str]:
    lines = (line.partition("==") for line in path.read_text().splitlines())
    return {canonicalize_name(name): version for name, _, version in lines}


def needed(requirements: list[str], extras: tuple[str, ...] = ("",)) -> list[Requirement]:
    """Those that apply here."""
    parsed = map(Requirement, requirements)
    return [one for one in parsed if one.marker is None or any(one.marker.evaluate({"extra": e}) for e in extras)]


def everything_needed() -> dict[str, list[Requirement]]:
    """All requirements of the core and of the versions that `constraints.txt` pins, by package."""
    found: dict[str, list[Requirement]] = {}
    left = needed(PROJECT["dependencies"])
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        is_new = name not in found
        found.setdefault(name, []).append(requirement)
        if is_new:
            left += needed(metadata.requires(name) or [], ("", *requirement.extras))
    return found


@pytest.mark.parametrize("path", ENVIRONMENTS, ids=lambda path: path.stem)
def test_an_environment_with_torch_keeps_every_version(path: Path) -> None:
    versions = versions_of(path)
    wanted = everything_needed()
    assert len(versions.keys() & wanted.keys()) > 10
    refused = [
        f"{one} ({versions[name]} is installed)"
        for name in versions.keys() & wanted.keys()
        for one in wanted[name]
        if not one.specifier.contains(versions[name], prereleases=True)
    ]
    assert refused == []


def test_environments_are_of_every_supported_torch() -> None:
    [torch] = map(Requirement, PROJECT["optional-dependencies"]["torch"])
    minors = {re.match(r"\d+\.\d+", versions_of(path)["torch"])[0] for path in ENVIRONMENTS}
    assert minors == {f"2.{minor}" for minor in range(100) if torch.specifier.contains(f"2.{minor}.0")}
    for path in ENVIRONMENTS:
        assert {"timm", "transformers", "torchvision"} <= versions_of(path).keys()


def test_torch_is_no_dependency_of_the_core() -> None:
    assert not {"torch", "torchvision", "triton"} & everything_needed().keys()


def test_every_extra_says_what_it_brings() -> None:
    """In `pyproject.toml`, and in the table of the documentation."""
    text = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    table = (ROOT / "docs" / "installation.md").read_text()
    for name in PROJECT["optional-dependencies"]:
        assert re.search(rf"^{name} = \[.*\]  # \w", text, re.MULTILINE), name
        assert f"| `{name}` |" in table

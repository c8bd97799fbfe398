"""Stamp of every published figure: command, date, code, hardware, versions."""

from __future__ import annotations

import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from steptune import __version__
from steptune.tuner.records import Environment

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "numpy", "scipy", "optuna", "msgspec", "transformers")


def stamp(command: str, code: Sequence[str] = ("tuner", "benchmarks")) -> dict:
    """The stamp of a result.

    Args:
        command: The command that gives these figures again; where it writes them is left out.
        code: Paths that the figures depend on; their last commit is named.
    """
    return {
        "command": re.sub(r"\s--(out(put)?|traces)[ =]\S+", "", command),
        "date": datetime.now(UTC).date().isoformat(),
        "code": _code_version(code),
        "versions": {"steptune": __version__, "python": platform.python_version(), **_versions()},
    }


def device_stamp() -> dict:
    """The stamp of a result of the kernels on the CUDA device of this process, with its name."""
    import torch

    command = " ".join(["python", *sys.argv])
    return {"device": torch.cuda.get_device_name(), **stamp(command, ("kernels", "benchmarks"))}


def hardware(environment: Environment) -> dict:
    """Names and numbers of the machine; never its own name or address."""
    return {
        "cpu": environment.hardware.cpu_name,
        "cores": environment.hardware.num_cores,
        "memory_gib": round(environment.hardware.memory_bytes / 2**30),
        "devices": [device.name for device in environment.hardware.devices],
        "load_1min": round(os.getloadavg()[0], 1),
        "machine": "shared",
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _code_version(paths: Sequence[str]) -> str | None:
    """Return the commit of the code, of an unpacked archive the one that it was made of; None where that is unknown."""
    exported = (ROOT / "benchmarks" / "commit.txt").read_text().strip()  # filled in by `git archive`
    if not exported.startswith("$"):
        return exported
    try:
        commit = _git("log", "-1", "--format=%h", "--", *paths)
        return f"{commit} with changes" if _git("status", "--porcelain", "--", *paths) else commit
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def peak_memory_bytes() -> int:
    """Peak resident memory of this process (ru_maxrss is in KiB on Linux)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

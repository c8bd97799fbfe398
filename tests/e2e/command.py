"""`steptune` as a user runs it: a process of its own, in a folder of its own."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WORKLOADS = Path(__file__).parent / "workloads"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
"""Characters that move a cursor or colour text; a log has none."""
TIMEOUT_S = 800
TUNED = "zoo:synthetic?load_ms=20&compute_ms=2&batch=4"
"""Its step is nearly all waiting for data, so that loader workers pay on any machine."""
PATIENT = ("--foreign-load", "100")
"""Load from other tests must not void the windows."""


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output, which must be one JSON document and nothing else."""
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The message of a refusal: one line on standard error, and no traceback."""
        assert "Traceback" not in self.err, self.err
        assert not CONTROL.search(self.err)
        [message] = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert self.err.rstrip().endswith(message), "the message is the last thing that is said"
        return message.removeprefix("error: ")


class Steptune:
    """The command in one folder, with the default database and data directory under it."""

    def __init__(self, folder: Path, bin: Path | None = None) -> None:
        self.folder = folder
        self.command = [sys.executable, "-m", "steptune"] if bin is None else [str(bin / "steptune")]
        self._path = {"PYTHONPATH": str(ROOT / "src")} if bin is None else {}

    def __call__(
        self,
        *arguments: str | Path,
        status: int | None = 0,
        wrapper: tuple[str, ...] = (),
        variables: Mapping[str, str] | None = None,
        before: Callable[[], object] | None = None,
    ) -> Ended:
        """Runs it to its end, and checks its exit status unless that is None."""
        process = subprocess.run(
            [*wrapper, *self.command, *map(str, arguments)],
            cwd=self.folder,
            env=self.environment(variables),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            preexec_fn=before,
        )
        assert status in (None, process.returncode), f"status {process.returncode}\n{process.stdout}\n{process.stderr}"
        return Ended(process.returncode, process.stdout, process.stderr)

    def refused(self, *arguments: str | Path, **options: Any) -> str:
        """The message of a command that is refused with status 2; nothing is on standard output."""
        ended = self(*arguments, status=2, **options)
        assert not ended.out
        return ended.error

    def environment(self, variables: Mapping[str, str] | None = None) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("STEPTUNE_", "PYTHONPATH"))}
        # Threads that spin for operators of microseconds take milliseconds on a busy machine.
        return {**kept, **self._path, "OMP_NUM_THREADS": "1", "COLUMNS": "80", **(variables or {})}

    def studies(self) -> list[dict[str, Any]]:
        """The studies that the database has, the newest first."""
        return self("list", "--json").json

"""A service whose server and workers are processes of their own."""

import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from command import Steptune

from steptune.service.client import Client

START_S = 300.0


class Running:
    """A service in a folder: its database, its server, its worker."""

    def __init__(self, folder: Path, database: str, bin: Path | None = None) -> None:
        self.folder = folder
        self.steptune = Steptune(folder, bin)
        self.variables = {"STEPTUNE_DATABASE_URL": database}
        self.url = ""
        self.token = ""

    def __call__(self, *arguments: str, **options):
        """A command of whoever runs the service."""
        return self.steptune(*arguments, variables=self.variables, **options)

    def remote(self, *arguments: str, **options):
        """A command of a user somewhere else, who has only an address and a token."""
        variables = {"STEPTUNE_URL": self.url, "STEPTUNE_TOKEN": self.token}
        return self.steptune(*arguments, variables=variables, **options)

    def client(self, token: str | None = None) -> Client:
        return Client(self.url, token or self.token)

    @contextmanager
    def process(self, *arguments: str, log: str) -> Iterator[Path]:
        """A process that is asked to end at the end, and must."""
        path = self.folder / log
        with path.open("wb") as sink:
            process = subprocess.Popen(
                [*self.steptune.command, *arguments],
                cwd=self.folder,
                env=self.steptune.environment(self.variables),
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )
        try:
            yield path
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                assert process.wait(60) in (0, -signal.SIGTERM), path.read_text()
            finally:
                process.kill()


def written(log: Path, pattern: str) -> str:
    """Words of a log, once it says them."""
    deadline = time.monotonic() + START_S
    while not (found := re.search(pattern, log.read_text())):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    return found[1]

"""PostgreSQL as the Compose file prepares it, and that file's services in the images' folders, with their volume."""

import os
import secrets
import subprocess
from collections.abc import Mapping
from pathlib import Path

from compose_file import ROOT, services_beside
from images.building import Image
from images.containers import Container, Places, command_of
from postgres import PostgresServer, server_binaries

UID = 10001
"""The services' user."""
START_S = 180.0
DATABASE = "/run/database"
"""Where containers find the database's socket."""


class Stack:
    """The services of the Compose file, as far as they run here.

    Args:
        folder: For the database, volumes and logs.
        images: By the stages of the Dockerfile.
        variables: Of the file `.env`.
    """

    def __init__(self, folder: Path, images: Mapping[str, Image], variables: Mapping[str, str]) -> None:
        self._folder = folder
        self._images = images
        self.services = services_beside(folder, *(f"{name}={value}" for name, value in variables.items()))
        self.password = f"secret-of-the-database-{secrets.token_hex(8)}"
        self.data = folder / "data"
        self._running: list[Container] = []
        self.database = self._prepared_database()
        self._places = Places(
            volumes={"data": _owned(self.data)},
            secrets={"postgres_password": _secret(folder / "password", self.password)},
            shown={DATABASE: self.database.folder},
        )

    def _prepared_database(self) -> PostgresServer:
        """A server whose roles the Compose file's script made, and which asks for passwords."""
        place = self._folder / "postgres"
        place.mkdir(mode=0o755)
        server = PostgresServer(place, superuser="postgres")
        server.start()
        binaries = server_binaries()
        assert binaries is not None
        where = ["--host", str(place), "--username", "postgres", "--dbname", "postgres"]
        command = [str(binaries / "psql"), "--no-psqlrc", "--set", "ON_ERROR_STOP=1", *where, "--file"]
        variables = {**os.environ, "POSTGRES_PASSWORD": self.password}
        subprocess.run([*command, str(ROOT / "docker-database.sql")], check=True, capture_output=True, env=variables)
        server.ask_for_passwords(secrets.token_hex(8))
        return server

    def start(self, name: str, *command: str) -> Container:
        """Start a service; or another command in its place."""
        service = self.services[name]
        image = self._images[service["build"]["target"]]
        variables = {"STEPTUNE_DATABASE_URL": f"postgresql+psycopg://steptune@/steptune?host={DATABASE}"}
        log = self._folder / f"{name}{len(self._running)}.log"
        started = Container(command_of(image, service, self._places, variables, command), log)
        self._running.append(started)
        return started

    def output_of(self, name: str, *command: str) -> str:
        """Output of a command in a service's container; it has to succeed."""
        started = self.start(name, *command)
        status = started.process.wait(START_S)
        assert status == 0, started.output
        return started.output.strip()

    def close(self) -> None:
        for container in self._running:
            container.kill()
        self.database.stop()


def _owned(folder: Path) -> Path:
    """A new volume takes its owner and mode from the image's folder."""
    folder.mkdir(mode=0o711)
    os.chown(folder, UID, UID)
    return folder


def _secret(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o400)
    os.chown(path, UID, UID)
    return path

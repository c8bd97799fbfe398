"""A service of the Compose file in an image's folder, as an engine would run it, with namespaces and no engine.

Its root is read-only; its user, capabilities, environment and places for writing are those of the file; and it has
process numbers of its own. All containers share the network of whoever starts them.
"""

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from images.building import Image

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
STOP_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Places:
    """Folders and files of this machine that containers have.

    Attributes:
        volumes: By their names in the Compose file.
        secrets: Likewise.
        shown: By the places where containers have them, whatever the file says.
    """

    volumes: Mapping[str, Path]
    secrets: Mapping[str, Path]
    shown: Mapping[str, Path]


def command_of(
    image: Image, service: Mapping[str, Any], places: Places, variables: Mapping[str, str], command: Sequence[str] = ()
) -> list[str]:
    """Return the command that runs a service.

    Args:
        variables: In the place of those of the file.
        command: In the place of the image's entry point and the file's command; an engine's `--entrypoint`.
    """
    given = service.get("environment") or {}
    environment = {**image.environment, **given, **variables}
    words = command or [*image.entrypoint, *(service.get("command") or image.command)]
    entered = [
        *("chroot", str(image.root), *_rights(service, image)),
        *("env", "--ignore-environment", f"--chdir={image.directory}"),
        *(f"{name}={value}" for name, value in environment.items()),
        *words,
    ]
    script = "\n".join(["set -e", *_mounts(image.root, service, places), f"{shlex.join(entered)} &", "wait $!"])
    return ["unshare", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "sh", "-c", script]


def _rights(service: Mapping[str, Any], image: Image) -> list[str]:
    """The user and capabilities with which an engine starts a container."""
    user, _, group = service.get("user", image.user).partition(":")
    kept = ",".join(["-all", *(f"+{name.lower()}" for name in service.get("cap_add", ()))])
    become = [] if user == "0" else ["--reuid", user, "--regid", group, "--clear-groups"]
    return ["setpriv", *become, f"--bounding-set={kept}", "--inh-caps=-all", "--no-new-privs", "--"]


def _mounts(root: Path, service: Mapping[str, Any], places: Places) -> list[str]:
    bound = {
        **{volume["target"]: places.volumes[volume["source"]] for volume in service["volumes"]},
        **{f"/run/secrets/{secret['source']}": places.secrets[secret["source"]] for secret in service["secrets"]},
        **places.shown,
    }
    memory = [entry.partition(":") for entry in service.get("tmpfs", ())]
    size = service.get("shm_size", "67108864")
    lines = [
        f"mount --bind {root} {root}",
        *(f"mkdir -p {root}{place}" for place, path in bound.items() if path.is_dir()),
        *(f"install -D /dev/null {root}{place}" for place, path in bound.items() if path.is_file()),
        f"mount -t proc proc {root}/proc",
        f"mount -t tmpfs -o mode=755 tmpfs {root}/dev",
        *(f"touch {root}/dev/{name}; mount --bind /dev/{name} {root}/dev/{name}" for name in DEVICES),
        f"ln -s /proc/self/fd {root}/dev/fd",
        f"mkdir {root}/dev/shm; mount -t tmpfs -o mode=1777,size={size} tmpfs {root}/dev/shm",
        *(f"mount -t tmpfs -o {options or 'mode=1777'} tmpfs {root}{place}" for place, _, options in memory),
        *(f"mount --bind {path} {root}{place}" for place, path in bound.items()),
    ]
    return [*lines, f"mount -o remount,bind,ro {root}"] if service.get("read_only") else lines


class Container:
    """A service that runs, with its output in a file."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def stop(self) -> int:
        """Tell its first process to end, as `docker stop` does, and return how it ended."""
        first = psutil.Process(self.process.pid).children()
        for child in [grandchild for process in first for grandchild in process.children()]:
            child.terminate()
        return self.process.wait(STOP_S)

    def kill(self) -> None:
        """End all that runs in it."""
        self.process.kill()
        self.process.wait()

"""Images without an engine: a Dockerfile's own steps in folders, each step in namespaces of its own.

A base image `python:VERSION-slim-SUITE` is what debootstrap makes of that Debian suite, with an interpreter of this
machine of the same minor version, as that image has one in /usr/local. Files that stages share are hard links.
Needs root, debootstrap, and the network for packages.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from images.dockerfile import Instruction, Stage, expanded

LIBRARIES = (
    *("ca-certificates", "netbase", "tzdata", "libbz2-1.0", "libffi8", "liblzma5", "libncursesw6", "libreadline8t64"),
    *("libsqlite3-0", "libssl3t64", "libuuid1", "zlib1g"),
)
"""Packages that an interpreter needs of Debian, as in the image."""
PASSED = re.compile(r"PIP_\w+|(?i:https?_proxy|no_proxy)")
"""How packages are found here is no part of an image, and holds while it is built."""
MOUNTS = (
    "mount -t proc proc {root}/proc",
    "mount --rbind /dev {root}/dev",
    "mount --bind /etc/resolv.conf {root}/etc/resolv.conf",
)


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image, as a folder and what its metadata would be."""

    root: Path
    environment: Mapping[str, str]
    user: str = "0:0"
    directory: str = "/"
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Builder:
    """Builds stages of a Dockerfile.

    Args:
        folder: Where images are made; no two at a time.
        context: The folder with what is copied into them.
        stages: Of the Dockerfile.
        arguments: Build arguments that are given.
        shown: Folders of this machine that steps see at the same place, for pip's packages.
        interpreter: Prefix of the Python for the base images.
    """

    folder: Path
    context: Path
    stages: Mapping[str, Stage]
    interpreter: Path
    arguments: Mapping[str, str] = field(default_factory=dict)
    shown: Sequence[Path] = ()
    built: dict[str, Image] = field(default_factory=dict)

    def image(self, name: str) -> Image:
        """Return a stage's image, or a base's, built where that was not done yet."""
        if name not in self.built:
            self.built[name] = self._stage(self.stages[name]) if name in self.stages else self._base(name)
        return self.built[name]

    def _base(self, name: str) -> Image:
        version, suite = _parts_of(name)
        root = self.folder / "base"
        _debootstrap(suite, root)
        _install_interpreter(self.interpreter, root, version)
        environment = {"PATH": "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
        return Image(root=root, environment=environment, command=("python3",))

    def _stage(self, stage: Stage) -> Image:
        base = self.image(stage.base)
        root = self.folder / stage.name
        _link_tree(base.root, root)
        image = replace(base, root=root)
        arguments: dict[str, str] = {}
        for instruction in stage.instructions:
            image = self._step(image, instruction, arguments)
        return image

    def _step(self, image: Image, instruction: Instruction, arguments: dict[str, str]) -> Image:
        if instruction.word == "COPY":
            self._copy(image, instruction)
        elif instruction.word == "RUN":
            self._run(image, instruction.text, arguments)
        elif instruction.word == "ARG":
            self._declare(instruction, arguments)
        else:
            return described(image, instruction, {**arguments, **image.environment})
        return image

    def _declare(self, instruction: Instruction, arguments: dict[str, str]) -> None:
        for name, default in instruction.pairs:
            if name in self.arguments or "=" in instruction.text:
                arguments[name] = self.arguments.get(name, default)

    def _copy(self, image: Image, instruction: Instruction) -> None:
        sources, destination = instruction.paths
        place = image.root / str(Path(image.directory, destination)).lstrip("/")
        if instruction.source_stage is not None:
            [name] = sources
            _link_tree(self.image(instruction.source_stage).root / name.lstrip("/"), place)
            return
        for name in sources:
            source = self.context / name
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.pyc")  # as in .dockerignore
                shutil.copytree(source, place, symlinks=True, ignore=ignored, dirs_exist_ok=True)
            else:
                shutil.copy(source, place)

    def _run(self, image: Image, command: str, arguments: Mapping[str, str]) -> None:
        assert image.user == "0:0", "steps run as root"
        passed = {name: value for name, value in os.environ.items() if PASSED.fullmatch(name)}
        environment = {**passed, **arguments, **image.environment}
        for place in self.shown:
            inside = image.root / str(place).lstrip("/")
            inside.mkdir(parents=True, exist_ok=True) if place.is_dir() else inside.touch()
        binds = [f"mount --bind -o ro {place} {image.root}{place}" for place in self.shown]
        mounts = [line.format(root=image.root) for line in MOUNTS]
        script = "; ".join(["set -e", *mounts, *binds, _entered(image, environment, command)])
        subprocess.run(["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script], check=True)


def described(image: Image, instruction: Instruction, variables: Mapping[str, str]) -> Image:
    """Return an image after an instruction that changes how it runs."""
    match instruction.word:
        case "ENV":
            given = {name: expanded(value, variables) for name, value in instruction.pairs}
            return replace(image, environment={**image.environment, **given})
        case "WORKDIR":
            (image.root / instruction.text.lstrip("/")).mkdir(parents=True, exist_ok=True)
            return replace(image, directory=instruction.text)
        case "USER":
            return replace(image, user={"root": "0:0"}.get(instruction.text, instruction.text))
        case "ENTRYPOINT":
            return replace(image, entrypoint=tuple(instruction.exec_form), command=())
        case "CMD":
            return replace(image, command=tuple(instruction.exec_form))
    raise AssertionError(f"{instruction.word} is handled elsewhere")


def _entered(image: Image, environment: Mapping[str, str], command: str) -> str:
    variables = [f"{name}={value}" for name, value in environment.items()]
    within = ["env", "--ignore-environment", f"--chdir={image.directory}", *variables, "sh", "-c", command]
    return shlex.join(["chroot", str(image.root), *within])


def _parts_of(name: str) -> tuple[str, str]:
    found = re.fullmatch(r"python:(\d+\.\d+)\.\d+-slim-(\w+)", name)
    assert found, f"{name}: a base is a stage, or python:VERSION-slim-SUITE"
    return found[1], found[2]


def _debootstrap(suite: str, root: Path) -> None:
    included = f"--include={','.join(LIBRARIES)}"
    subprocess.run(["debootstrap", "--variant=minbase", included, suite, str(root)], check=True, stdout=sys.stderr)
    (root / "etc" / "resolv.conf").touch()


def _install_interpreter(prefix: Path, root: Path, version: str) -> None:
    """Copy a Python without its packages."""
    binary = prefix / "bin" / f"python{version}"
    assert binary.exists(), f"{binary} is not there: name the prefix of a Python {version}"
    place = root / "usr" / "local"
    shutil.copy(binary, place / "bin")
    library = f"lib/python{version}"
    ignored = shutil.ignore_patterns("site-packages", "test", "__pycache__", "*.a")
    shutil.copytree(prefix / library, place / library, ignore=ignored, symlinks=True)
    for shared in (prefix / "lib").glob(f"libpython{version}.so*"):
        shutil.copy(shared, place / "lib")
    for name in ("python3", "python"):
        (place / "bin" / name).symlink_to(f"python{version}")
    subprocess.run(["chroot", str(root), "/sbin/ldconfig"], check=True)


def _link_tree(source: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "--archive", "--link", "--no-target-directory", str(source), str(place)], check=True)

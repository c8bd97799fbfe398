"""The instructions of a Dockerfile, by stage: as much of its language as ours uses, and a refusal of the rest."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

KNOWN = ("FROM", "ARG", "ENV", "RUN", "COPY", "WORKDIR", "USER", "ENTRYPOINT", "CMD")


class UnknownInstructionError(ValueError):
    """The Dockerfile has an instruction that is not understood here."""


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction, its continued lines joined."""

    word: str
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)

    @property
    def exec_form(self) -> list[str]:
        """The command of an ENTRYPOINT or CMD, which runs without a shell."""
        found: list[str] = json.loads(self.text)
        return found

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Names and values of an ENV or ARG."""
        return [(name, value) for name, _, value in (word.partition("=") for word in self.words)]

    @property
    def source_stage(self) -> str | None:
        """The stage from which a COPY takes its files; None for the context."""
        found = re.match(r"--from=(\S+)\s", self.text)
        return found[1] if found else None

    @property
    def paths(self) -> tuple[list[str], str]:
        """Sources and destination of a COPY."""
        *sources, destination = [word for word in self.words if not word.startswith("--")]
        return sources, destination


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage: a base, which may be an earlier stage, and the instructions after FROM."""

    name: str
    base: str
    instructions: tuple[Instruction, ...]

    def all(self, word: str) -> list[Instruction]:
        """Its instructions of one kind, in order."""
        return [instruction for instruction in self.instructions if instruction.word == word]


def parse(text: str) -> dict[str, Stage]:
    """Read a Dockerfile.

    Raises:
        UnknownInstructionError: It has an instruction, or a stage without a name, that is not understood.
    """
    stages: dict[str, Stage] = {}
    name = base = ""
    found: list[Instruction] = []
    for line in _logical_lines(text):
        word, _, rest = line.partition(" ")
        if word not in KNOWN:
            raise UnknownInstructionError(f"{line!r}: only {', '.join(KNOWN)} are understood")
        if word == "FROM":
            match = re.fullmatch(r"(\S+) AS (\S+)", rest.strip())
            if match is None:
                raise UnknownInstructionError(f"{line!r}: a stage has a base and a name, FROM base AS name")
            base, name = match.groups()
            found = []
        else:
            found.append(Instruction(word=word, text=rest.strip()))
        stages[name] = Stage(name=name, base=base, instructions=tuple(found))
    return stages


def _logical_lines(text: str) -> list[str]:
    """Lines without comments, which may stand between continued ones, and with continued ones joined."""
    kept = "\n".join(line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    return re.sub(r"\\\n\s*", "", kept).splitlines()


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$NAME` and `${NAME}` as ENV, COPY and WORKDIR do; a variable that is not set is empty."""
    return re.sub(r"\$(\w+)|\$\{(\w+)\}", lambda match: variables.get(match[1] or match[2], ""), text)

"""Reading a Dockerfile, and what its instructions make of an image."""

from pathlib import Path

import pytest
from images.building import Image, described
from images.dockerfile import Instruction, UnknownInstructionError, expanded, parse

TEXT = """\
# syntax=docker/dockerfile:1.7
FROM python:3.12.12-slim-trixie AS build
ARG INDEX
ARG EXTRAS=a,b
RUN one \\
    # a comment between continued lines
    && two "with  spaces"

FROM build AS final
COPY --from=build /opt/it /opt/other
COPY first second ./
ENTRYPOINT ["it", "--flag"]
"""


def test_stages_have_their_bases_and_instructions_in_order() -> None:
    stages = parse(TEXT)
    assert {name: stage.base for name, stage in stages.items()} == {
        "build": "python:3.12.12-slim-trixie",
        "final": "build",
    }
    assert [instruction.word for instruction in stages["build"].instructions] == ["ARG", "ARG", "RUN"]


def test_continued_lines_are_one_command_without_comments() -> None:
    [run] = parse(TEXT)["build"].all("RUN")
    assert run.text == 'one && two "with  spaces"'
    assert run.words[-1] == "with  spaces"


def test_arguments_may_have_no_default() -> None:
    assert [arg.pairs for arg in parse(TEXT)["build"].all("ARG")] == [[("INDEX", "")], [("EXTRAS", "a,b")]]


def test_copies_come_from_the_context_or_a_stage() -> None:
    of_stage, of_context = parse(TEXT)["final"].all("COPY")
    assert (of_stage.source_stage, of_stage.paths) == ("build", (["/opt/it"], "/opt/other"))
    assert (of_context.source_stage, of_context.paths) == (None, (["first", "second"], "./"))


@pytest.mark.parametrize(
    ("line", "why"), [("ADD x y", "only FROM, ARG"), ("FROM debian", "a base and a name, FROM base AS name")]
)
def test_what_is_not_understood_is_refused(line: str, why: str) -> None:
    """A step that is left out would prove another image."""
    with pytest.raises(UnknownInstructionError, match=why):
        parse(f"FROM a AS b\n{line}\n")


@pytest.mark.parametrize(
    ("text", "value"), [("$A/bin:${B}", "one/bin:two"), ("$ABSENT", ""), ("plain", "plain"), ("${A}B", "oneB")]
)
def test_variables_are_replaced(text: str, value: str) -> None:
    assert expanded(text, {"A": "one", "B": "two"}) == value


def after(*lines: tuple[str, str], root: Path) -> Image:
    image = Image(root=root, environment={"PATH": "/bin"}, command=("python3",))
    for word, text in lines:
        image = described(image, Instruction(word=word, text=text), image.environment)
    return image


def test_an_image_runs_as_its_last_instructions_say(tmp_path: Path) -> None:
    image = after(
        ("ENV", "PATH=/opt/bin:$PATH HOME=/tmp"),
        ("WORKDIR", "/var/it"),
        ("USER", "10001:10001"),
        ("ENTRYPOINT", '["first"]'),
        ("CMD", '["serve"]'),
        ("USER", "root"),
        root=tmp_path,
    )
    assert image.environment == {"PATH": "/opt/bin:/bin", "HOME": "/tmp"}
    assert (image.directory, image.user) == ("/var/it", "0:0")
    assert (image.entrypoint, image.command) == (("first",), ("serve",))
    assert (tmp_path / "var/it").is_dir()


def test_another_entry_point_does_not_keep_the_command_of_the_base(tmp_path: Path) -> None:
    assert after(("CMD", '["serve"]'), ("ENTRYPOINT", '["other"]'), root=tmp_path).command == ()

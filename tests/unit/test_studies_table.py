"""Lists of studies on narrow terminals: ids can be copied, and what is cut says so."""

from rich.console import Console
from rich.text import Text

from steptune.service.cli.console import studies_table

ID = "01m86sw4w7jb91yyvw495fwdds"
LONG = "failed: the workload could not be loaded, because its module imports what is not installed here"


def shown(width: int, text: str) -> list[str]:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(studies_table("answer", [(ID, "2026-01-31T12:00:00+00:00", Text(text))]))
    return capture.get().splitlines()


def test_a_sentence_that_is_cut_ends_with_an_ellipsis() -> None:
    _, first, second = shown(80, f"{LONG}\n{LONG}")
    for line in (first, second):
        assert line.rstrip().endswith("…")
        assert len(line) <= 80
    assert first.startswith(ID)
    assert "2026-01-31" in first


def test_what_fits_is_whole() -> None:
    assert shown(160, LONG)[1].rstrip().endswith(LONG)
    assert shown(80, "2.42×")[1].rstrip().endswith("2.42×")

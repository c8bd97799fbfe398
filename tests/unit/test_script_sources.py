"""Lines of a script that count, and those that are Steptune's."""

from __future__ import annotations

import pytest

from steptune.tuner.scripts.agent.sources import counted_lines, source_digest

PLAIN = "import torch\n\nmodel = torch.nn.Linear(2, 2)\n"


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param('import steptune\nsteptune.enable("steptune.json")\n', id="one line"),
        pytest.param('import steptune\nsteptune.enable(\n    "steptune.json",\n)\n', id="several lines"),
        pytest.param("from steptune import (\n    enable,\n)\nenable()  # as tuned\n", id="from"),
        pytest.param("import steptune as st\nst.enable()\n", id="other name"),
    ],
)
def test_the_line_that_enables_is_no_edit_however_it_is_written(lines: str) -> None:
    text = PLAIN.replace("\n\n", f"\n{lines}\n")

    assert source_digest(text) == source_digest(PLAIN)
    assert counted_lines(text) == [1, len(text.splitlines())]


def test_a_call_of_something_else_is_an_edit() -> None:
    assert source_digest(f"{PLAIN}st.enable()\n") != source_digest(PLAIN)
    assert source_digest(f"{PLAIN}enable_grad(\n    model,\n)\n") != source_digest(PLAIN)

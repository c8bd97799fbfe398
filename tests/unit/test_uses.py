"""Ways to use an answer, as a study's page offers them: each with the part of the gain that it carries."""

from __future__ import annotations

from pathlib import Path

import msgspec
from report_builders import make_recommendation
from test_script_diff import FUSED, SCRIPT, WORKERS, recommended

from steptune.dashboards.answer import get_uses
from steptune.tuner.records import Choice, Numerics, Part, Recommendation
from steptune.tuner.speeds import proven_gain
from steptune.tuner.wording import ratio


def claimed(recommendation: Recommendation) -> str:
    gain = proven_gain(recommendation)
    assert gain is not None
    return ratio(gain)


def test_the_diff_says_its_part_and_the_line_carries_all(tmp_path: Path) -> None:
    text = SCRIPT.replace("AdamW(model.parameters(), lr=1e-3)", "AdamW(*given, **settings)")
    recommendation = recommended(tmp_path, text, data_loading=WORKERS, optimizer_implementation=FUSED)
    named = [part_of(name, choice) for name, choice in recommendation.candidate.choices.items()]
    recommendation = msgspec.structs.replace(recommendation, parts=tuple(named))

    diff, line, *_ = get_uses(recommendation)

    assert diff.title == "Diff"
    assert "carries at most" in diff.note
    assert "without optimizer_implementation (not measured); the line below carries all" in diff.note
    assert line.note == f"makes all changes; carries all of the gain of {claimed(recommendation)}"


def test_where_the_script_is_not_here_it_says_so(tmp_path: Path) -> None:
    recommendation = recommended(tmp_path, SCRIPT, data_loading=WORKERS)
    (tmp_path / "train.py").unlink()
    line, *_ = get_uses(recommendation)
    assert "No diff is available" in line.note
    assert "train.py cannot be read" in line.note


def test_a_workloads_code_carries_all_of_the_gain() -> None:
    recommendation = make_recommendation()
    assert get_uses(recommendation)[0].note.endswith(f"carries all of the gain of {claimed(recommendation)}")


def part_of(name: str, choice: Choice) -> Part:
    """Without a contribution of its own."""
    return Part(strategy=name, choice=choice, bound=None, reason="", numerics=Numerics.EXACT)

"""Text that `watch` prints of a study that nobody runs yet."""

from types import SimpleNamespace

import pytest
import typer

from steptune.service.cli.console import errors
from steptune.service.cli.watch import follow_to_its_end
from steptune.tuner.records import StudyState


@pytest.mark.parametrize("waits_for", ["", "hosts of the cluster, which are kept free for a study over 2 hosts"])
def test_a_study_that_waits_says_for_what_before_anything_happens(
    capsys: pytest.CaptureFixture[str], waits_for: str
) -> None:
    study = SimpleNamespace(
        study_id="study", state=StudyState.CANCELLED, message="", queue=SimpleNamespace(waits_for=waits_for)
    )
    client = SimpleNamespace(study=lambda _: study, events=lambda _: [], recommendation=lambda _: None)
    with pytest.raises(typer.Exit):
        follow_to_its_end(client, "study", errors, as_json=False)  # type: ignore[arg-type]
    said = " ".join(capsys.readouterr().err.split())
    assert (f"waits for {waits_for}" in said) == bool(waits_for)
    assert said.count("waits for") == bool(waits_for)

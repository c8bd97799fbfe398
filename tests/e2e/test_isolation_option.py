"""Isolation as a user chooses it, and sees that it was used."""

import pytest
from command import PATIENT, TUNED

from steptune.service.isolation import Available, level_named


def test_an_unknown_level_is_refused_with_those_that_there_are(steptune):
    message = steptune.refused("tune", "zoo:synthetic", "--isolation", "jail")
    assert message == "there is no isolation level 'jail': choose one of bubblewrap, limits, none, strongest"


def test_a_level_that_cannot_be_had_is_refused_with_what_to_install(steptune):
    """Without falling back to a weaker one."""
    message = steptune.refused("tune", "zoo:synthetic", variables={"STEPTUNE_ISOLATION": "bubblewrap", "PATH": "/none"})
    assert "bwrap not found: apt-get install bubblewrap" in message
    assert "--isolation" in message


def test_the_doctor_lists_all_levels(steptune):
    found = {item["subject"]: item for item in steptune("doctor", "--json", status=None).json}
    for name in ("none", "limits", "bubblewrap"):
        item = found[f"isolation {name}"]
        assert item["level"] == "ok" or item["advice"]


def test_the_level_of_a_study_is_shown(steptune, inside):
    if not isinstance(level_named("bubblewrap").probe(), Available):
        pytest.skip("bubblewrap cannot be used here")
    (steptune.folder / ".env").write_text("STEPTUNE_ISOLATION=bubblewrap\n")
    steptune("tune", TUNED, "--budget", "3m", "--trials", "1", *PATIENT)
    shown = inside("show", "--all").out
    assert [line.split() for line in shown.splitlines() if "Isolation" in line] == [
        ["│", "Isolation", "bubblewrap", "│"]
    ]

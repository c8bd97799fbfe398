"""A script's diff as a file: what stands above it, and what is said beside it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from test_script_diff import FUSED, SCRIPT, WORKERS, recommended

from steptune.service.cli.exporting import _diff


def test_its_comments_say_the_parts_and_git_passes_over_them(tmp_path: Path) -> None:
    parser = '    parser.add_argument("-j", "--workers", type=int, default=0)\n'
    text = SCRIPT.replace("        shuffle=True,\n", "        shuffle=True, num_workers=args.workers,\n") + parser
    text = text.replace("AdamW(model.parameters(), lr=1e-3)", "AdamW(*given, **settings)")

    found = _diff(recommended(tmp_path, text, data_loading=WORKERS, optimizer_implementation=FUSED))

    comments = found.content.decode().partition("--- a/")[0]
    assert "In this change: data_loading (" in comments
    assert "Not expressed here: optimizer_implementation (its arguments come from a dictionary or list;" in comments
    assert any(sentence.startswith("the script's option --workers 4 (") for sentence in found.not_expressible)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    subprocess.run(["git", "apply", "-"], input=found.content, cwd=tmp_path, check=True)
    assert "pin_memory=True" in (tmp_path / "train.py").read_text()


def test_an_answer_of_options_alone_is_added_to_the_command_and_no_patch(tmp_path: Path) -> None:
    parser = '    parser.add_argument("-j", "--workers", type=int, default=0)\n'
    text = SCRIPT.replace("        shuffle=True,\n", "        shuffle=True, num_workers=args.workers,\n") + parser

    found = _diff(recommended(tmp_path, text, data_loading={"num_workers": 4}))

    assert found.usage == "Add to the command: --workers 4"
    assert "--- a/" not in found.content.decode()

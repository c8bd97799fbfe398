"""Studies over links of which one is slow choose how gradients are reduced by what their trials measure.

One for each link, of a minute or so; `make soak` runs five.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from host_networks import two_hosts

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.mark.parametrize(("link", "levels"), [("unlimited", 1), ("500mbit", 2)])
def test_a_study_reduces_in_two_levels_where_the_link_between_hosts_is_slow(
    link: str, levels: int, tmp_path: Path
) -> None:
    with two_hosts():  # they may be made here
        pass
    script, output = ROOT / "benchmarks" / "shaped_links.py", tmp_path / "figures.json"
    options = ["--link", link, "--output", str(output)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, str(script), *options], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (study,) = json.loads(output.read_text())["studies"]
    assert (study["levels"], study["right"]) == (levels, True)
    assert levels in study["tried"]
    if levels > 1:
        assert study["verdict"] == "faster"
        assert study["interval"][0] > 1
    assert study["recommended"] in study["step_ms"]

"""`submit` refuses, before it sends anything, what a worker could not run."""

from pathlib import Path

import pytest

NOBODY = ("--url", "http://127.0.0.1:1")
"""Nobody listens there: what is refused otherwise was refused before."""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train.py:Mnie"], ["has no class Mnie", "did you mean 'Mine'?"]),
        (["train.py:Mine"], ["train.py imports helper", "add --folder ."]),
        (["nowhere.py:Mine"], ["nowhere.py does not exist"]),
        (["zoo:timm"], ["zoo:timm needs name"]),
        (["zoo:lstm", "--budget", "5"], ["'5' has no unit"]),
        (["train.py:Mine", "--folder", "."], ["127.0.0.1:1 cannot be reached"]),
        (["zoo:lstm"], ["127.0.0.1:1 cannot be reached"]),
    ],
)
def test_mistakes_are_refused_on_the_users_side(inside, arguments, said):
    Path("helper.py").write_text("import os\n")
    Path("train.py").write_text("import os\nimport helper\n\n\nclass Mine: ...\n")
    message = inside("submit", *arguments, *NOBODY, status=2).error
    for part in said:
        assert part in message

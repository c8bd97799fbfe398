"""Names of strategies as text in the product: only in a strategy's own folder and in stored formats.

The count may fall and never rises: lower `MOST` with it.
"""

from __future__ import annotations

import io
import tokenize
from collections import Counter
from pathlib import Path

import steptune.tuner
from steptune.tuner.strategies import STRATEGIES

MOST = 28
NAMES = frozenset(strategy.name for strategy in STRATEGIES)
STORED = ("export/study_formats.py", "workloads/zoo/synthetic.py")
"""Files of stored formats, and the workload with a known best candidate."""


def names_outside() -> Counter[str]:
    """Strings that are a strategy's name, by file: not in its own folder."""
    tuner = Path(str(steptune.tuner.__file__)).parent
    found: Counter[str] = Counter()
    for path in sorted(tuner.rglob("*.py")):
        place = path.relative_to(tuner).as_posix()
        if place in STORED:
            continue
        own = place.split("/")[1] if place.startswith("strategies/") else ""
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            name = token.string.strip("\"'")
            if token.type == tokenize.STRING and name in NAMES and name != own:
                found[place] += 1
    return found


def test_no_more_names_than_before() -> None:
    found = names_outside()
    assert found.total() <= MOST, "\n".join(f"{count:4} {place}" for place, count in found.most_common())


def test_every_strategy_is_a_folder() -> None:
    folder = Path(str(steptune.tuner.__file__)).parent / "strategies"
    assert {path.parent.name for path in folder.glob("*/strategy.py")} == NAMES
    assert all((folder / name / "choice.py").exists() for name in NAMES)

"""Writes files as this revision leaves them with users, for the tests of what is read back.

Run with the code of that revision, its `tests` folder on PYTHONPATH, before a change of what is stored:

    python tests/released/files/dump.py
"""

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
from report_builders import make_recommendation, without_gain
from search_builders import NO_LIMIT_S, SMALL, surface_space, tell

from steptune.tuner.export.native import NativeJson, NativeYaml
from steptune.tuner.export.snippet import PythonSnippet
from steptune.tuner.records import Candidate, Scalar
from steptune.tuner.search.designer import Designer
from steptune.tuner.search.knowledge import Outcome
from steptune.tuner.search.model_search import ModelSearch
from steptune.tuner.strategies import STRATEGIES
from steptune.tuner.trials.fake import FakeRunner

FILES = Path(__file__).parent


def search() -> list[Outcome]:
    """Outcomes of a whole search over the small surface, the baseline's first."""
    designer = Designer(surface_space(SMALL), search=ModelSearch(), budget_s=NO_LIMIT_S, max_trials=8, seed=3)
    return tell(designer, FakeRunner(SMALL, noise_sd=0.01, seed=3))[1]


def candidates() -> Iterator[Candidate]:
    """One for each value that a parameter of a strategy may have, other than plain PyTorch's."""
    for strategy in STRATEGIES:
        for name, allowed in strategy.values.items():
            ends = ((group[0], group[-1]) if isinstance(group, range) else (group,) for group in allowed)
            values: dict[Scalar, None] = dict.fromkeys(value for pair in ends for value in pair)
            for value in (value for value in values if value != strategy.defaults[name]):
                yield Candidate(choices={strategy.name: {name: value}})


if __name__ == "__main__":
    for name, recommendation in {"faster": make_recommendation(), "no_gain": without_gain()}.items():
        for exporter in (NativeJson(), NativeYaml(), PythonSnippet()):
            suffix = Path(exporter.file_name(recommendation)).suffix.replace(".py", ".txt")  # no code of ours
            (FILES / f"{name}{suffix}").write_text(exporter.export(recommendation), encoding="utf-8")
    lines = [json.dumps([candidate.key, candidate.choices]) for candidate in candidates()]
    (FILES / "candidates.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (FILES / "search.json").write_bytes(msgspec.json.format(msgspec.json.encode(search()), indent=1) + b"\n")

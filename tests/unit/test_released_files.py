"""Files that a released revision left with users are read as they were meant; `released/files/dump.py` made them."""

import ast
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from search_builders import NO_LIMIT_S, SMALL, surface_space, tell

import steptune
from steptune.tuner.export import EXPORTERS, exporter_named
from steptune.tuner.records import Candidate, Purpose
from steptune.tuner.search.designer import Designer
from steptune.tuner.search.knowledge import Outcome
from steptune.tuner.search.model_search import ModelSearch
from steptune.tuner.strategies import strategy_named
from steptune.tuner.trials.fake import FakeRunner

FILES = Path(__file__).parents[1] / "released" / "files"
CANDIDATES = [json.loads(line) for line in (FILES / "candidates.jsonl").read_text(encoding="utf-8").splitlines()]


def is_kept(stored: Any, now: Any) -> bool:
    """Say whether everything stored is there; records may have got further fields."""
    if isinstance(stored, dict):
        return all(field in now and is_kept(value, now[field]) for field, value in stored.items())
    if isinstance(stored, list):
        return len(stored) == len(now) and all(map(is_kept, stored, now))
    return stored == now


@pytest.mark.parametrize("name", ["faster", "no_gain"])
class TestRecommendation:
    def test_both_formats_hold_the_same_and_nothing_is_lost(self, name: str) -> None:
        loaded = steptune.load_recommendation(FILES / f"{name}.json")
        assert steptune.load_recommendation(FILES / f"{name}.yaml") == loaded
        stored = json.loads((FILES / f"{name}.json").read_text(encoding="utf-8"))
        assert is_kept(stored, json.loads(exporter_named("json").export(loaded)))

    def test_it_is_exported_to_every_target_that_can_hold_it(self, name: str) -> None:
        loaded = steptune.load_recommendation(FILES / f"{name}.yaml")
        texts = [exporter.export(loaded) for exporter in EXPORTERS if exporter.refusal(loaded) is None]
        assert len(texts) > len(EXPORTERS) / 2
        assert all(texts)

    def test_what_a_script_imports_is_still_there(self, name: str) -> None:
        tree = ast.parse((FILES / f"{name}.txt").read_text(encoding="utf-8"))
        imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert len(imports) >= 2
        names: dict[str, object] = {}
        exec(compile(ast.Module(imports, []), name, "exec"), names)
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_ours(node.value)}
        assert used
        assert all(hasattr(steptune, attribute) for attribute in used)


def _is_ours(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "steptune"


@pytest.mark.parametrize(("key", "choices"), CANDIDATES, ids=lambda part: part if isinstance(part, str) else "")
def test_a_stored_candidate_keeps_its_key_and_its_values(key: str, choices: dict) -> None:
    candidate = msgspec.convert({"choices": choices}, Candidate)
    assert candidate.key == key
    ((name, choice),) = choices.items()
    strategy_named(name).check(choice)


class TestSearch:
    outcomes = msgspec.json.decode((FILES / "search.json").read_bytes(), type=list[Outcome])

    def test_a_search_goes_on_from_what_was_stored(self) -> None:
        """Told the first half, it asks for no candidate of that half again and finds the best one, as it once did."""
        designer = Designer(surface_space(SMALL), search=ModelSearch(), budget_s=NO_LIMIT_S, max_trials=8, seed=3)
        half = self.outcomes[: len(self.outcomes) // 2]
        for outcome in half:
            designer.update(outcome)
        suggestions, outcomes = tell(designer, FakeRunner(SMALL, noise_sd=0.01, seed=4))
        asked = {outcome.result.candidate.key for outcome in half}
        assert all(s.purpose is not Purpose.EXPLORE or s.candidate.key not in asked for s in suggestions)
        assert {"loader": {"level": 2}, "products": {"level": 2}} in [
            o.result.candidate.choices for o in outcomes + half
        ]

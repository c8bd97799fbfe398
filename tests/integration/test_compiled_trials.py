"""Trials that compile: what TorchDynamo did is kept with the result, and a model that it gives up is recognised."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from trial_builders import Prepared, complete_choices, prepare, reference

from steptune.tuner.guard.curves import Protocol
from steptune.tuner.hardware import find_compiler
from steptune.tuner.profiling.compile_findings import diagnose_compilation
from steptune.tuner.protocols import Progress
from steptune.tuner.records import Candidate, TrialResult
from steptune.tuner.trials.reference import ReferenceRequest

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="torch.compile needs a C++ compiler here")
COMPILED = Candidate(choices={"compile": {"mode": "default"}})


@pytest.fixture
def counts(tmp_path: Path) -> Iterator[Prepared]:
    prepared = prepare(reference("uncapturable", "Counts"), tmp_path, with_reference=False)
    yield prepared
    prepared.runner.close()


def reference_request(prepared: Prepared, *, eager: bool) -> ReferenceRequest:
    return ReferenceRequest(
        workload=prepared.workload,
        study_directory=str(prepared.directory),
        choices=complete_choices(COMPILED, prepared.facts),
        device="cpu",
        protocol=Protocol(num_pointwise=2, num_curve=0, num_horizon=0, randomness=prepared.facts.randomness),
        unit_roundoffs=(2.0**-24,),
        eager=eager,
    )


def effect_of(result: TrialResult, strategy: str) -> tuple[bool, str]:
    (effect,) = (effect for effect in result.effects if effect.strategy == strategy)
    return effect.took, effect.detail


def test_a_model_that_is_compiled_in_every_step_is_recognised(counts: Prepared) -> None:
    """The effect says which guard failed, the records say where, and a finding says what to do."""
    baseline, result = counts.run(
        counts.spec(guard=False, profile=False), counts.spec(COMPILED, guard=False, profile=False)
    )
    assert baseline.compilation is None
    assert result.ok, result.failure
    took, detail = effect_of(result, "compile")
    assert not took
    assert "num_steps" in detail
    compiled = result.compilation
    assert compiled is not None
    assert compiled.num_given_up > 0
    assert "uncapturable.py, line " in compiled.recompilations[0].place
    assert compiled.seconds > 0
    assert "compiled_too_often" in [finding.rule for finding in diagnose_compilation(compiled)]


def test_what_one_trial_compiled_the_next_one_finds(counts: Prepared) -> None:
    """Trials of a study share the caches of TorchInductor and AOTAutograd, in the study's own directory."""
    cold, warm = (counts.run(counts.spec(COMPILED, guard=False, profile=False))[0].compilation for _ in range(2))
    assert cold is not None
    assert warm is not None
    assert cold.cache_misses > 0
    assert (counts.directory / "compile_cache" / "inductor").is_dir()
    assert warm.cache_misses == 0


def test_a_reference_is_made_while_a_trial_starts_and_again_where_that_failed(counts: Prepared, tmp_path: Path) -> None:
    """A trial that compiles leaves its device idle; nothing is measured beside the reference."""
    request, made = reference_request(counts, eager=True), counts.directory / "reference.json"
    counts.runner.begin_reference(replace(request, study_directory=str(tmp_path / "nowhere")), 100.0)
    assert counts.run_baseline().ok
    assert not made.exists()
    counts.runner.make_reference(request)
    first = made.stat().st_mtime_ns

    counts.runner.begin_reference(request, 100.0)
    running: list[int] = []

    def note(progress: Progress) -> None:
        if progress.text.startswith("window"):
            running.append(len(counts.runner._board.running()))

    (result,) = counts.run(counts.spec(guard=False, profile=False), listener=note)
    assert result.ok, result.failure
    assert set(running) == {1}
    second = made.stat().st_mtime_ns
    assert second > first
    counts.runner.make_reference(request)
    assert made.stat().st_mtime_ns == second


@pytest.mark.parametrize("eager", [True, False])
def test_an_eager_reference_of_a_compiled_configuration_compiles_nothing(counts: Prepared, eager: bool) -> None:
    """Disturbed runs would compile the model once more each; candidates are held to what rounding does in any case."""
    counts.runner.make_reference(reference_request(counts, eager=eager))
    compiled = list((counts.directory / "compile_cache" / "inductor").rglob("*.py"))
    assert bool(compiled) is not eager

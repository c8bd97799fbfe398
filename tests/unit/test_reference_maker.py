"""The guard's reference is begun beside the first trial where that costs nothing."""

from typing import Any

import pytest
from builders import sample_environment, sample_facts, sample_study

from steptune.tuner.records import BASELINE
from steptune.tuner.search.knowledge import Priors
from steptune.tuner.search.preparation import Prepared, ReferenceMaker
from steptune.tuner.search.space import Space

COMPILED = {"compile": {"mode": "default"}}


class Runner:
    def __init__(self) -> None:
        self.begun: list[Any] = []

    def begin_reference(self, request: Any, longest_s: float) -> None:
        self.begun.append(request)


def begun(device_kind: str, **facts: Any) -> list[Any]:
    """Requests of a study whose workload and device are these, asked for twice."""
    study = sample_study(
        facts=sample_facts(**{"current": COMPILED, "custom_step": False, **facts}),
        environment=sample_environment(device_kind, num_ranks=1),
    )
    space = Space(study.environment, study.facts, study.settings)
    prepared = Prepared(study=study, space=space, reference=BASELINE, priors=Priors(), trials_s=100.0)
    runner = Runner()
    maker = ReferenceMaker(prepared, runner, None, None)  # type: ignore[arg-type]
    for _ in range(2):
        maker.begin(60.0)
    return runner.begun


def test_is_begun_once_while_a_trial_compiles() -> None:
    (request,) = begun("cuda")
    assert request.eager


@pytest.mark.parametrize(
    ("device_kind", "facts"),
    [
        pytest.param("cpu", {}, id="compiling keeps the cores busy"),
        pytest.param("cuda", {"current": {}}, id="nothing is compiled"),
        pytest.param("cuda", {"randomness": "always"}, id="the reference compiles too"),
        pytest.param("cuda", {"look_peak_bytes": 10**12}, id="no room"),
        pytest.param("cuda", {"fits_memory": False}, id="the look saw a part of a batch"),
    ],
)
def test_waits_for_the_first_candidate(device_kind: str, facts: dict[str, Any]) -> None:
    assert begun(device_kind, **facts) == []

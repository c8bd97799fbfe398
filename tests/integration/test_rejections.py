"""A workload that cannot be trained as it is: an error that names the value and the way out, before any trial."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from marked import VARIABLE, new_mark, none_left
from trial_builders import reference

from steptune.tuner.errors import BaselineError, BudgetError, RunnerError, WorkloadError
from steptune.tuner.guard.curves import Protocol
from steptune.tuner.records import BASELINE, WorkloadFacts
from steptune.tuner.strategies.combine import complete_choices
from steptune.tuner.trials.inspection import InspectRequest
from steptune.tuner.trials.reference import ReferenceRequest
from steptune.tuner.trials.runner import LocalRunner

MARK = new_mark()

pytestmark = pytest.mark.xdist_group("rejections")


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRunner]:
    """One server looks at all of them: what is wrong with one does not touch the next. No process is left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, MARK)
        runner = LocalRunner(workload=reference("regression", "Regression"), directory=tmp_path_factory.mktemp("study"))
        yield runner
        runner.close()
        none_left(MARK)


def error_of(
    runner: LocalRunner, directory: Path, name: str, *, file: str = "unsound", num_ranks: int = 1, **arguments
) -> str:
    """Message of the inspection of the workload."""
    request = InspectRequest(
        workload=reference(file, name, **arguments),
        study_directory=str(directory),
        num_ranks=num_ranks,
        memory_limit_bytes=4 << 30,
    )
    with pytest.raises(WorkloadError) as caught:
        runner.task("inspect", request)
    return str(caught.value)


class TestInspection:
    @pytest.mark.parametrize(
        ("name", "value", "way_out"),
        [
            ("NanFromTheStart", "the loss of the first batch is nan", "check its data"),
            ("Detached", "does not depend on the model's parameters", "without detach() or no_grad()"),
            ("Constant", "does not depend on any parameter", "no parameter receives a gradient"),
            ("NotScalar", "a tensor of shape (8, 1)", "reduce it to a scalar"),
            ("NoParameters", "NoParameters.model() has no parameter", "requires a gradient"),
            ("DamagedInWorker", "ValueError: sample", "is damaged"),
            ("Ragged", "got [8] at entry 0 and [9] at entry 1", "`collate(self, samples)`"),
            ("RaggedInWorker", "got [8] at entry 0 and [9] at entry 1", "`collate(self, samples)`"),
            ("TooLarge", "can't allocate memory", "4398046511104 bytes"),
            ("NotAWorkload", "NotAWorkload is not a workload", "subclass steptune.Workload"),
        ],
    )
    def test_names_the_value_and_the_way_out(
        self, runner: LocalRunner, tmp_path: Path, name: str, value: str, way_out: str
    ) -> None:
        message = error_of(runner, tmp_path, name)
        assert value in message
        assert way_out in message

    def test_a_dataset_smaller_than_a_batch(self, runner: LocalRunner, tmp_path: Path) -> None:
        message = error_of(runner, tmp_path, "Regression", file="regression", length=5)
        assert message == (
            "the dataset has 5 samples, fewer than one batch of 8: give more data or set a smaller global_batch"
        )

    def test_a_batch_that_cannot_be_split_over_the_ranks(self, runner: LocalRunner, tmp_path: Path) -> None:
        message = error_of(runner, tmp_path, "Regression", file="regression", num_ranks=2, batch=9)
        assert message == "global_batch 9 cannot be split evenly over 2 ranks: choose a multiple of 2"

    def test_a_step_that_never_ends(self, tmp_path: Path) -> None:
        runner = LocalRunner(workload=reference("unsound", "EndlessStep"), directory=tmp_path, task_deadline_s=6)
        try:
            with pytest.raises(WorkloadError, match=r"^trying one step did not end within 6 s: use a smaller"):
                runner.inspect()
        finally:
            runner.close()


class TestGivenUp:
    def test_what_takes_longer_than_the_budget_is_ended(self, tmp_path: Path) -> None:
        """Progress gives no more time, and no process is left."""
        runner = LocalRunner(workload=reference("unsound", "EndlessStep"), directory=tmp_path)
        try:
            with pytest.raises(BudgetError, match="inspecting the workload"):
                runner.inspect(longest_s=4.0)
            assert not runner._board.running()
        finally:
            runner.close()


class TestReference:
    def test_a_reference_that_does_not_fit_says_that_memory_was_the_reason(
        self, runner: LocalRunner, tmp_path: Path
    ) -> None:
        """The search then looks for the nearest candidate that needs less."""
        workload = reference("regression", "Regression")
        facts = msgspec.msgpack.decode(
            runner.task("inspect", InspectRequest(workload=workload, study_directory=str(tmp_path))),
            type=WorkloadFacts,
        )
        request = ReferenceRequest(
            workload=reference("unsound", "TooLarge"),
            study_directory=str(tmp_path),
            choices=complete_choices(BASELINE, facts),
            device="cpu",
            protocol=Protocol(num_pointwise=2, num_curve=0, num_horizon=0, randomness="none"),
            unit_roundoffs=(2.0**-24,),
            memory_limit_bytes=4 << 30,
        )
        with pytest.raises(BaselineError) as caught:
            runner.make_reference(request)
        assert caught.value.out_of_memory


class TestServer:
    def test_an_interpreter_that_cannot_run_it_is_named(self, tmp_path: Path) -> None:
        runner = LocalRunner(workload="zoo:synthetic", directory=tmp_path, python="/bin/false")
        with pytest.raises(RunnerError, match="the trial server did not start"):
            runner.describe()
        runner.close()

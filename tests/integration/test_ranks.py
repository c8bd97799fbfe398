"""Trials of two ranks on a CPU: DistributedDataParallel over gloo."""

import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from ranks import Ranks, group
from trial_builders import QUICK, THREE_THREADS, Prepared, prepare, reference

from steptune.tuner.emulation import HOSTS_VARIABLE
from steptune.tuner.errors import BaselineError
from steptune.tuner.guard.curves import GuardReference
from steptune.tuner.records import Candidate, Deadlines, FailureKind, Phase
from steptune.tuner.search.verification import verify
from steptune.tuner.strategies.combine import complete_choices
from steptune.tuner.trace_records import TraceAnalysis
from steptune.tuner.trials.coordination import Coordinator
from steptune.tuner.trials.failures import classify, failure_of, is_of_the_group
from steptune.tuner.trials.messages import Channel, FromRank, decoder_of
from steptune.tuner.trials.trial import TrialRun

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prepared]:
    prepared = prepare(reference("misbehaving", "Misbehaving"), tmp_path_factory.mktemp("study"), num_ranks=2)
    yield prepared
    prepared.runner.close()


@pytest.fixture(scope="module")
def normalised(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prepared]:
    prepared = prepare(reference("regression", "Normalised"), tmp_path_factory.mktemp("normalised"), num_ranks=2)
    yield prepared
    prepared.runner.close()


class TestTwoRanks:
    def test_are_measured_profiled_and_guarded_as_one_trial(self, study: Prepared) -> None:
        (result,) = study.run(study.spec())
        assert result.failure is None, result.failure
        assert len(result.clean_windows) == QUICK.min_rounds
        assert [peak.rank for peak in result.memory] == [0, 1]
        assert result.breakdowns
        for breakdown in result.breakdowns:
            assert sum(breakdown.categories.values()) == breakdown.step_time_ns

    @pytest.mark.parametrize("own", [False, True], ids=["FP32 to bf16", "bf16"])
    def test_their_precision_is_taken_back_together(self, own: bool, tmp_path: Path) -> None:
        in_16_bits = Candidate(choices={"precision": {"level": "O1", "dtype": "bfloat16"}})
        options = {"candidate": in_16_bits} if own else {}
        prepared = prepare(reference("regression", "Penalised"), tmp_path, num_ranks=2, **options)
        try:
            spec = prepared.spec(in_16_bits, profile=False, unit_roundoff=2.0**-8)
            right, wrong = (
                prepared.run(msgspec.structs.replace(spec, trial_id=name, workload=reference("regression", name)))[0]
                for name in ("Penalised", "Regression")
            )
        finally:
            prepared.runner.close()
        assert right.failure is None, right.failure
        assert right.guard.passed, right.guard.reason
        assert "gradients in FP32" in {check.name for check in right.guard.checks}
        assert not [note for note in right.guard.notes if "FP32" in note]
        failed = [check.name for check in wrong.guard.checks if not check.passed]
        assert "gradients in FP32" in failed

    def test_the_profiles_of_both_are_kept_and_compared(self, study: Prepared) -> None:
        (result,) = study.run(study.spec(guard=False))
        assert result.failure is None, result.failure
        kept = (study.directory / "trials" / result.trial_id / "analysis.json").read_bytes()
        analysis = msgspec.json.decode(kept, type=TraceAnalysis)
        assert [rank.rank for rank in analysis.ranks] == [0, 1]
        assert {breakdown.rank for rank in analysis.ranks for breakdown in rank.breakdowns} == {0, 1}
        assert [wait.rank for wait in analysis.waits] == [0, 1]
        assert analysis.clock_offsets_ns.keys() == {0, 1}, "all on the clock of the first"
        assert all(collective.skew_ns is not None for collective in analysis.collectives)

    @pytest.mark.parametrize(("variable", "threads"), [(None, 1), ("2", 2)])
    def test_have_one_thread_each_unless_the_user_says_otherwise(
        self, variable: str | None, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Torchrun does the same; it holds in the reference as in trials."""
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if variable:
            monkeypatch.setenv("OMP_NUM_THREADS", variable)
        study = prepare(reference("regression", "CountsThreads", wanted=threads), tmp_path, num_ranks=2)
        try:
            (result,) = study.run(study.spec(profile=False))
        finally:
            study.runner.close()
        assert result.ok, result.failure

    def test_train_as_one_process_does(self, study: Prepared, tmp_path: Path) -> None:
        """Without batch statistics, halves of every batch make the losses, gradients and update of the whole one."""
        alone = prepare(study.workload, tmp_path)
        alone.runner.close()
        ours, theirs = _reference(study), _reference(alone)
        assert ours.curve.losses == pytest.approx(theirs.curve.losses, rel=1e-5)
        assert ours.curve.gradient_norms == pytest.approx(theirs.curve.gradient_norms, rel=1e-5)
        assert ours.curve.update_norm == pytest.approx(theirs.curve.update_norm, rel=1e-5)

    def test_are_the_reference(self, study: Prepared) -> None:
        (result,) = study.run(study.spec(profile=False))
        assert result.guard is not None
        assert result.guard.passed, result.guard.reason
        assert result.guard.losses == pytest.approx(result.guard.reference_losses, rel=1e-6)

    def test_are_held_to_rounding(self, study: Prepared) -> None:
        """No collective promises an order in which it adds, so that choices which change no bit on one rank, today's
        among them, may do so on several.
        """
        (result,) = study.run(study.spec(profile=False))
        assert result.failure is None, result.failure
        assert result.guard is not None
        assert all(check.tolerance > 0 for check in result.guard.checks if check.kind == "pointwise")

    def test_make_the_buckets_that_were_asked_for(self, study: Prepared) -> None:
        candidate = Candidate(choices={"ddp_buckets": {"bucket_cap_mb": 5, "bucket_views": True, "static_graph": True}})
        (result,) = study.run(study.spec(candidate))
        assert result.failure is None, result.failure
        assert result.guard is not None
        assert result.guard.passed
        (effect,) = [effect for effect in result.effects if effect.strategy == "ddp_buckets"]
        assert effect.took
        assert effect.detail.startswith("1 bucket of ")

    @pytest.mark.parametrize("mode", ["zero1", "grad_op", "full"])
    def test_share_their_parameters_or_states(self, study: Prepared, mode: str) -> None:
        """Gradient norms and first updates of parts are compared with those of the whole model."""
        (result,) = study.run(study.spec(Candidate(choices={"sharding": {"mode": mode}})))
        assert result.failure is None, result.failure
        assert result.guard is not None
        assert result.guard.passed
        (effect,) = [effect for effect in result.effects if effect.strategy == "sharding"]
        assert effect.took, effect.detail

    def test_may_reduce_in_16_bits_where_that_is_what_the_user_does(self, study: Prepared) -> None:
        """So rounding at 16 bits is allowed; the reference reduces in full."""
        candidate = Candidate(choices={"gradient_compression": {"method": "bf16"}})
        (result,) = study.run(study.spec(candidate, unit_roundoff=2.0**-8, profile=False))
        assert result.failure is None, result.failure
        assert result.guard is not None
        assert result.guard.passed

    def test_throughput_counts_the_samples_of_all_ranks(self, study: Prepared) -> None:
        """A window of a trial is worth its global batches, so that gains over one rank would be true."""
        result = study.run_baseline()
        for window in result.windows:
            assert window.num_samples == window.num_steps * study.facts.global_batch
            assert window.num_units == window.num_samples

    def test_loader_workers_of_both_ranks_move_in_step(self, study: Prepared) -> None:
        workers = Candidate(choices={"data_loading": {"num_workers": 2}})
        (result,) = study.run(study.spec(workers, profile=False, checks_loader=True))
        assert result.failure is None, result.failure
        assert len(result.clean_windows) == QUICK.min_rounds

    def test_take_turns_with_another_trial_of_two_ranks(self, study: Prepared) -> None:
        specs = [study.spec(guard=False, profile=False), study.spec(THREE_THREADS, guard=False, profile=False)]
        results = study.run(*specs)
        assert [result.failure for result in results] == [None, None]


class TestReference:
    """It is the user's own training on as many ranks, which one process could not repeat."""

    def test_has_the_statistics_of_each_rank(self, normalised: Prepared) -> None:
        (result,) = normalised.run(normalised.spec(profile=False))
        assert result.failure is None, result.failure
        assert result.guard is not None
        assert result.guard.losses == pytest.approx(result.guard.reference_losses, rel=1e-6)

    @pytest.mark.parametrize("deal", ["first", "halves"])
    def test_is_not_that_of_other_statistics(self, normalised: Prepared, deal: str) -> None:
        """ "halves" are of the very same samples: a model without statistics would train as it does."""
        workload = reference("regression", "Normalised", deal=deal)
        (result,) = normalised.run(normalised.spec(THREE_THREADS, workload=workload, profile=False))
        assert result.failure is not None
        assert result.failure.kind is FailureKind.NUMERICS
        assert "loss differs by" in result.failure.message

    @pytest.mark.parametrize("length", [21, 17])
    def test_weighs_samples_as_the_ranks_do(self, tmp_path: Path, length: int) -> None:
        """The last batch of 21 samples has 5: ranks take the mean of 3 and that of 2, and then the mean of both.

        That of 17 has 1, which both take.
        """
        study = prepare(reference("regression", "Rest", length=length), tmp_path, num_ranks=2)
        try:
            (result,) = study.run(study.spec(profile=False))
        finally:
            study.runner.close()
        assert result.failure is None, result.failure
        assert result.guard is not None
        assert result.guard.losses == pytest.approx(result.guard.reference_losses, rel=1e-6)

    def test_has_the_same_parameters_on_all_ranks_however_it_is_disturbed(self, tmp_path: Path) -> None:
        """DDP itself never compares them after its beginning."""
        study = prepare(reference("regression", "Together"), tmp_path, num_ranks=2)
        study.runner.close()
        for tolerance in _reference(study).rounding.values():
            assert any((*tolerance.loss, *tolerance.gradient_norm, tolerance.update_norm))

    @pytest.mark.parametrize("mode", ["zero1", "grad_op", "full"])
    def test_may_be_in_parts_where_it_does_not_fit_whole(self, study: Prepared, mode: str, tmp_path: Path) -> None:
        """Every run of it begins with the same parameters and a fresh optimizer, as when ranks hold all of it."""
        parts = prepare(
            study.workload, tmp_path, num_ranks=2, candidate=Candidate(choices={"sharding": {"mode": mode}})
        )
        parts.runner.close()
        ours, theirs = _reference(parts), _reference(study)
        assert ours.curve.losses == pytest.approx(theirs.curve.losses, rel=1e-5)
        assert ours.curve.update_norm == pytest.approx(theirs.curve.update_norm, rel=1e-4)
        assert max(ours.repetition.loss) < 1e-5

    def test_is_made_again_in_the_same_study(self, normalised: Prepared) -> None:
        """Repeated for a candidate that needs less memory, or after somebody killed it: ranks find no earlier run's."""
        before = _reference(normalised)
        again = prepare(normalised.workload, normalised.directory, num_ranks=2)
        again.runner.close()
        assert _reference(again).curve == before.curve

    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_rank_that_dies_ends_all(self, tmp_path: Path, rank: int) -> None:
        with pytest.raises(BaselineError, match="exited with status 3"):
            prepare(reference("regression", "DiesInStep", rank=rank), tmp_path, num_ranks=2)


class TestVerification:
    def test_trains_on_the_ranks_of_the_study(self, normalised: Prepared) -> None:
        """Whose batch statistics are not those of one process; samples are those of all ranks."""
        baseline = complete_choices(Candidate(), normalised.facts)
        found = verify(
            normalised.runner,
            workload=normalised.workload,
            study_directory=str(normalised.directory),
            device="cpu",
            baseline=baseline,
            recommended={**baseline, "ddp_buckets": {**baseline["ddp_buckets"], "bucket_views": True}},
            num_steps=8,
            seed=0,
        )
        assert found.same
        assert found.baseline[0].losses[:3] == pytest.approx(_reference(normalised).curve.losses, rel=1e-6)
        assert found.recommended.losses == pytest.approx(found.baseline[0].losses, rel=1e-5)
        assert found.recommended.num_units == 4 * 8


def _reference(study: Prepared) -> GuardReference:
    return msgspec.json.decode((study.directory / "reference.json").read_bytes(), type=GuardReference)


class TestTwoHosts:
    """Emulated: two of two ranks each."""

    @pytest.fixture
    def hosts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Prepared]:
        monkeypatch.setenv(HOSTS_VARIABLE, "2")
        prepared = prepare(reference("misbehaving", "Misbehaving"), tmp_path, num_ranks=4)
        yield prepared
        prepared.runner.close()

    def test_reduce_in_two_levels_and_are_the_same_training(self, hosts: Prepared) -> None:
        environment = hosts.runner.describe()
        assert (environment.num_ranks, environment.num_hosts) == (4, 2)
        candidate = Candidate(choices={"hierarchical_allreduce": {"levels": 2}})
        (result,) = hosts.run(hosts.spec(candidate))
        assert result.failure is None, result.failure
        assert result.guard is not None
        assert result.guard.passed
        (effect,) = [effect for effect in result.effects if effect.strategy == "hierarchical_allreduce"]
        assert (effect.took, effect.detail) == (True, "2 hosts with 2 ranks each")


class TestOneRankFails:
    @pytest.mark.parametrize("rank", [0, 1])
    @pytest.mark.parametrize(
        ("deed", "at", "kind", "phase"),
        [
            ("segfault", "step", FailureKind.CRASH, Phase.WARM_UP),
            ("raise", "step", FailureKind.WORKLOAD_ERROR, Phase.WARM_UP),
            ("raise", "build", FailureKind.WORKLOAD_ERROR, Phase.BUILD),
            ("exit_quietly", "window", FailureKind.CRASH, Phase.MEASURE),
        ],
    )
    def test_ends_both_and_costs_one_failed_trial(
        self, study: Prepared, rank: int, deed: str, at: str, kind: FailureKind, phase: Phase
    ) -> None:
        workload = reference("misbehaving", "Misbehaving", deed=deed, at=at, rank=rank)
        (result,) = study.run(study.spec(THREE_THREADS, workload=workload, guard=False, profile=False))
        assert result.failure is not None
        assert (result.failure.kind, result.failure.phase, result.failure.rank) == (kind, phase, rank)
        assert result.failure.signal == (signal.SIGSEGV if deed == "segfault" else None)
        assert study.run_baseline().ok

    @pytest.mark.parametrize("rank", [0, 1])
    def test_every_rank_says_which_phase_it_is_in(self, study: Prepared, rank: int) -> None:
        """Or what befalls a rank would be laid to the phase that another one was in."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            TrialRun(study.spec(), rank, Channel(ours))._enter(Phase.WARM_UP)
            line = Channel(theirs).receive(5.0)
        assert line is not None
        assert decoder_of(FromRank).decode(line).phase is Phase.WARM_UP

    def test_one_that_hangs_is_ended_with_the_other_at_the_deadline(self, study: Prepared) -> None:
        workload = reference("misbehaving", "Misbehaving", deed="hang", at="step", rank=1)
        spec = study.spec(
            THREE_THREADS, workload=workload, guard=False, profile=False, deadlines=Deadlines(warm_up_s=2.0)
        )
        (result,) = study.run(spec)
        assert result.failure is not None
        assert (result.failure.kind, result.failure.phase) == (FailureKind.TIMEOUT, Phase.WARM_UP)
        assert study.run_baseline().ok


class TestCollectivesThatFail:
    """Errors of the libraries are told from a bug of the workload; a new torch that says it otherwise fails here."""

    @pytest.mark.parametrize("call", ["all_reduce", "barrier", "new_group"])
    def test_ranks_that_do_not_answer_are_a_time_out(self, ranks: Ranks, call: str) -> None:
        (kind, message), _ = ranks.run(2, wait_for_nobody, call)
        assert kind is FailureKind.TIMEOUT
        assert message.startswith("the other ranks did not answer in time: ")

    def test_ranks_that_are_gone_are_no_error_of_the_workload(self, tmp_path: Path) -> None:
        """Processes of their own, one of which ends."""
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        processes = [context.Process(target=lose_the_other, args=(rank, str(tmp_path), theirs)) for rank in range(2)]
        for process in processes:
            process.start()
        try:
            assert ours.poll(60)
            assert ours.recv() == (FailureKind.INFRASTRUCTURE, True)
        finally:
            for process in processes:
                process.kill()
                process.join()

    def test_times_of_a_window_are_the_largest_of_all_ranks(self, ranks: Ranks) -> None:
        assert ranks.run(2, most_of_ranks) == [[1.0, 5.0]] * 2


def wait_for_nobody(rank: int, call: str) -> tuple[FailureKind, str] | None:
    import torch.distributed as dist

    short = timedelta(seconds=3)
    group = dist.new_group(backend="gloo", timeout=short)
    values = torch.ones(2)
    dist.barrier()
    dist.all_reduce(values, group=group)
    calls = {
        "all_reduce": lambda: dist.all_reduce(values, group=group),
        "barrier": lambda: dist.barrier(group=group),
        "new_group": lambda: dist.new_group(backend="gloo", timeout=short),
    }
    if rank == 1:
        dist.barrier()
        return None
    try:
        calls[call]()
    except Exception as error:
        failure = failure_of(error, Phase.WARM_UP, rank)
        dist.barrier()
        return failure.kind, failure.message
    raise AssertionError("nobody answered, and yet it ended")


def lose_the_other(rank: int, directory: str, pipe: Any) -> None:
    import torch.distributed as dist

    with group(rank, 2, f"{directory}/rendezvous"):
        values = torch.ones(2)
        dist.all_reduce(values)
        if rank == 1:
            os._exit(3)
        try:
            dist.all_reduce(values)
        except Exception as error:
            pipe.send((classify(error), is_of_the_group(error)))


def most_of_ranks(rank: int) -> list[float]:
    import torch.distributed as dist

    ours, theirs = socket.socketpair()
    with ours, theirs:
        coordinator = Coordinator(rank, 1, Channel(ours), Path(), torch.device("cpu"))
        coordinator.group = dist.group.WORLD
        return coordinator.most([1.0, 5.0] if rank else [0.0, 2.0])

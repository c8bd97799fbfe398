"""From studies to predictions: what a prediction begins with, what it is compared with, and what it says."""

from __future__ import annotations

import re

import pytest
from msgspec import structs
from predictions import ALONE_NS, LINK, choices, profile_of, result_of, study_of, topology_of
from report_builders import make_trials, stored

from steptune.dashboards.scaling import LOOKS, get_checks_info, get_scaling_info, get_ways_info, scaling_context
from steptune.service.predicting import Question, predicted
from steptune.tuner.errors import ChoiceError, StoreError
from steptune.tuner.network.collective_costs import ALL_REDUCE, REDUCE_SCATTER, ring_ns
from steptune.tuner.prediction.basis import Basis, basis_of
from steptune.tuner.prediction.cluster import Cluster
from steptune.tuner.prediction.contention import measured_contention
from steptune.tuner.prediction.corrections import correction
from steptune.tuner.prediction.extrapolate import checks_of, extrapolate, host_counts
from steptune.tuner.prediction.plans import WAYS, Family
from steptune.tuner.prediction.step import BACKWARD_SHARE, NO_PHASES, compute_step
from steptune.tuner.records import BASELINE, Candidate, CollectiveTiming, Decision, Link, Numerics, SampleUnit

STEP_NS = sum(ALONE_NS.values())
NETWORK = Link(kind="given", latency_ns=20_000, bytes_per_s=3.125e9)
BF16 = Candidate(choices={"gradient_compression": {"method": "bf16"}})
SMALL = Candidate(choices={"ddp_buckets": {"bucket_cap_mb": 5}})
THREADS = Candidate(choices={"cpu_threads": {"num_threads": 1}})


def one_rank() -> tuple:
    study = study_of()
    return study, make_trials([result_of("a", BASELINE, STEP_NS, breakdown=profile_of())])


def two_ranks(exposed_ns: int = 9_000_000, *others, **given) -> tuple:
    study = study_of(2, topology=topology_of((0, 0)))
    first = result_of("a", BASELINE, STEP_NS + exposed_ns, num_ranks=2, breakdown=profile_of(exposed_ns, **given))
    return study, make_trials([first, *others])


def basis(study, trials) -> Basis:
    return basis_of(study, trials, trials[0])


class TestStep:
    def test_passes_are_divided_as_the_compute_of_their_phases(self) -> None:
        step = compute_step(profile_of())
        assert (step.before_ns, step.optimizer_ns) == (4_000_000, 6_000_000)
        assert (step.forward_ns, step.backward_ns) == pytest.approx((20_000_000, 40_000_000))

    def test_exposed_communication_is_no_part_of_it(self) -> None:
        assert compute_step(profile_of(exposed_ns=9_000_000)).total_ns == pytest.approx(STEP_NS)

    def test_what_compute_lost_to_hidden_communication_is_none_either(self) -> None:
        step = compute_step(profile_of(hidden_ns=10_000_000), contention=0.5)
        assert step.total_ns == pytest.approx(STEP_NS - 5_000_000)

    def test_without_phases_two_thirds_are_the_backward_pass_and_that_is_said(self) -> None:
        study, trials = one_rank()
        bare = structs.replace(trials[0].result, breakdowns=(structs.replace(profile_of(), phases={}),))
        found = basis(study, [structs.replace(trials[0], result=bare)])
        assert found.model.step.backward_ns == pytest.approx(BACKWARD_SHARE * 60_000_000)
        assert NO_PHASES in found.assumptions

    def test_only_what_moving_bytes_takes_is_divided_among_ranks(self) -> None:
        step = compute_step(profile_of(), moving_ns=4_000_000)
        assert step.update_ns(4) == pytest.approx(6_000_000 - 3_000_000)


class TestBasis:
    def test_one_rank_is_predicted_as_it_was_measured(self) -> None:
        found = basis(*one_rank())
        assert found.model.step_ns(choices(), found.cluster) == pytest.approx(STEP_NS)

    def test_a_cpu_has_no_streams(self) -> None:
        assert not basis(*one_rank()).model.has_streams

    def test_several_ranks_of_one_host_are_predicted_as_they_were_measured(self) -> None:
        """Whatever the model thinks of their links: what it does not explain is kept."""
        found = basis(*two_ranks())
        assert found.model.step_ns(choices(), found.cluster) == pytest.approx(STEP_NS + 9_000_000)
        assert found.facts.unexplained_ns != 0

    def test_all_starts_of_a_configuration_count(self) -> None:
        study, trials = one_rank()
        again = result_of("b", BASELINE, 4 * STEP_NS)
        found = basis_of(study, make_trials([trials[0].result, again]), trials[0])
        assert found.facts.step_time_ns == pytest.approx(2 * STEP_NS)  # the geometric mean
        assert found.model.step.forward_ns == pytest.approx(2 * 20_000_000)

    def test_a_trial_without_a_profile_is_none(self) -> None:
        study = study_of()
        with pytest.raises(StoreError, match=r"must be measured and profiled.*--from"):
            basis(study, make_trials([result_of("a", BASELINE, STEP_NS)]))

    def test_links_carry_what_its_sockets_let_them(self) -> None:
        """They were measured with today's: the step would be explained by a network that it does not have."""
        timing = CollectiveTiming(collective=ALL_REDUCE, message_bytes=1 << 20, num_ranks=2, duration_ns=1_000_000)
        link = structs.replace(LINK, timings=(timing,))
        study = study_of(2, 2, topology_of((0, 1), link))
        sockets = Candidate(choices={"nccl_settings": {"socket_threads": 4, "sockets_per_thread": 4}})
        slow, fast = (
            result_of(name, candidate, STEP_NS + exposed_ns, num_ranks=2, breakdown=profile_of(exposed_ns))
            for name, candidate, exposed_ns in (("a", BASELINE, 600_000_000), ("b", sockets, 200_000_000))
        )
        trials = make_trials([slow, fast])
        today, found = (basis_of(study, trials, trial) for trial in trials)
        assert today.cluster.between == link
        assert found.cluster.between is not None
        assert found.cluster.between.bytes_per_s == pytest.approx(16**0.4 * link.bytes_per_s)
        assert not found.cluster.between.timings
        assert found.cluster.inside == today.cluster.inside
        assert not [said for said in today.assumptions if "sockets" in said]
        assert [said for said in found.assumptions if "16 sockets" in said]
        said = predicted(stored(study, trials), study, Question(hosts=2, which=str(trials[1].sequence)))
        assert said.between == found.cluster.between

    def test_hosts_whose_link_is_not_known_are_none(self) -> None:
        study = study_of(2, num_hosts=2)
        trials = make_trials([result_of("a", BASELINE, STEP_NS, num_ranks=2, breakdown=profile_of())])
        with pytest.raises(ChoiceError, match="use a study that ran on one host"):
            basis(study, trials)


class TestContention:
    def test_it_is_the_slope_of_compute_over_hidden_communication(self) -> None:
        """10 ms more are hidden, and compute is 3 ms longer."""
        slower = profile_of(hidden_ns=20_000_000)
        times = {**slower.rescaled, "compute_matmul": ALONE_NS["compute_matmul"] + 3_000_000}
        slower = structs.replace(slower, rescaled=times)
        results = [
            result_of("a", BASELINE, STEP_NS, num_ranks=2, breakdown=profile_of(hidden_ns=10_000_000)),
            result_of("b", SMALL, STEP_NS, num_ranks=2, breakdown=slower),
        ]
        assert measured_contention(results) == pytest.approx(0.3)

    def test_trials_that_differ_otherwise_say_nothing(self) -> None:
        results = [
            result_of("a", BASELINE, STEP_NS, num_ranks=2, breakdown=profile_of(hidden_ns=10_000_000)),
            result_of("b", THREADS, STEP_NS, num_ranks=2, breakdown=profile_of(hidden_ns=30_000_000)),
            result_of("c", BF16, STEP_NS, num_ranks=2, breakdown=profile_of(hidden_ns=30_000_000)),
        ]
        assert measured_contention(results) is None

    def test_what_was_not_measured_is_said(self) -> None:
        assert any("the study has not measured it" in text for text in basis(*two_ranks()).assumptions)


class TestCorrections:
    def link(self, factor: float) -> Link:
        """Reduce-scatter takes so many times as long as the model says, at 1 and 4 MiB."""
        timings = tuple(
            CollectiveTiming(
                collective=collective,
                num_ranks=4,
                message_bytes=size,
                duration_ns=round(ring_ns(collective, size, 4, LINK) * slower),
            )
            for collective, slower in ((ALL_REDUCE, 1.0), (REDUCE_SCATTER, factor))
            for size in (1 << 20, 4 << 20)
        )
        return structs.replace(LINK, timings=timings)

    def test_a_collective_takes_as_long_as_it_was_measured_to(self) -> None:
        link = self.link(2.0)
        assert correction(link, REDUCE_SCATTER, 2 << 20) == pytest.approx(2.0, rel=1e-3)
        assert correction(link, REDUCE_SCATTER, 64 << 20) == pytest.approx(2.0, rel=1e-3)
        assert correction(link, ALL_REDUCE, 2 << 20) == pytest.approx(1.0, rel=1e-3)
        assert correction(LINK, REDUCE_SCATTER, 2 << 20) == 1.0

    def test_it_is_used(self) -> None:
        plain, slower = (Cluster(num_hosts=1, devices_per_host=4, inside=link) for link in (LINK, self.link(2.0)))
        assert slower.reduce_scatter_ns(1 << 20) == pytest.approx(2 * plain.reduce_scatter_ns(1 << 20), rel=1e-3)
        assert slower.all_reduce_ns(1 << 20) == pytest.approx(plain.all_reduce_ns(1 << 20), rel=1e-3)


def on_hosts(num_hosts: int = 4, devices: int = 8, study_and_trials=None):
    found = basis(*(study_and_trials or one_rank()))
    cluster = Cluster(num_hosts=num_hosts, devices_per_host=devices, inside=LINK, between=NETWORK)
    return extrapolate("study", found, cluster)


class TestExtrapolation:
    def test_every_way_is_predicted_or_refused_with_a_reason(self) -> None:
        found = on_hosts()
        assert {f.label for f in found.forecasts} | found.refused.keys() == {way.label for way in WAYS}
        assert "SGD" in found.refused["DGC, 1 %"]
        times = [forecast.step_time_ns for forecast in found.forecasts]
        assert times == sorted(times)

    def test_a_model_with_unused_parameters_can_communicate_in_as_many_ways(self) -> None:
        """DDP looks for them in every step, as it does today."""
        study, trials = one_rank()
        model = structs.replace(study.facts.model, num_unused_parameters=2)
        unused = structs.replace(study, facts=structs.replace(study.facts, model=model))
        assert on_hosts(study_and_trials=(unused, trials)).refused == on_hosts().refused

    def test_the_best_drops_no_information(self) -> None:
        """On a network of 25 Gbit/s compressions are faster, and are named beside it."""
        found = on_hosts()
        assert found.best is not None
        assert not found.best.numerics.needs_consent
        assert found.best_lossy is not None
        assert found.best_lossy.numerics is Numerics.LOSSY
        assert found.best_lossy.step_time_ns < found.best.step_time_ns

    def test_curves_have_the_fastest_of_each_family_on_every_number_of_hosts(self) -> None:
        found = on_hosts(num_hosts=6)
        assert host_counts(6) == [1, 2, 4, 6]
        several = [f for f in found.curves if f.num_hosts == 6]
        assert {f.family for f in several} == {family.value for family in Family}
        for forecast in several:
            others = [f.step_time_ns for f in found.forecasts if f.family == forecast.family]
            assert forecast.step_time_ns == min(others)
        assert Family.HIERARCHICAL.value not in {f.family for f in found.curves if f.num_hosts == 1}

    def test_the_global_batch_grows_with_the_ranks(self) -> None:
        for forecast in on_hosts().forecasts:
            assert forecast.units_per_s == pytest.approx(16 * 32 / forecast.step_time_ns * 1e9)
            assert forecast.efficiency == pytest.approx(STEP_NS / forecast.step_time_ns)

    def test_what_was_assumed_is_said(self) -> None:
        said = " ".join(on_hosts().assumptions)
        for part in (
            "global batch grows",
            "at a constant rate during the backward pass",
            "links reach the given",
            "loses 0%",
        ):
            assert part in said
        assert "4 ranks and emulated links" in on_hosts().validated


class TestChecks:
    def test_other_ways_that_were_measured_are_compared(self) -> None:
        bf16 = result_of("b", BF16, 80_000_000, num_ranks=2)
        other = result_of("c", THREADS, 50_000_000, num_ranks=2)
        study, trials = two_ranks(9_000_000, bf16, other)
        found = basis(study, trials)
        (check,) = checks_of(found, study, trials, found.cluster)
        assert (check.sequence, check.num_ranks, check.measured_ns) == (2, 2, pytest.approx(80_000_000))
        complete = found.choices(BF16)
        assert check.predicted_ns == found.model.step_ns(complete, found.cluster)
        assert check.error == pytest.approx(check.predicted_ns / 80_000_000 - 1)

    def test_another_study_on_more_ranks_is_too(self) -> None:
        """Its baseline is no longer what the prediction began with."""
        study, trials = two_ranks()
        found = basis(*one_rank())
        cluster = Cluster(num_hosts=1, devices_per_host=2, inside=LINK)
        (check,) = checks_of(found, study, trials, cluster)
        assert check.measured_ns == pytest.approx(STEP_NS + 9_000_000)
        assert check.predicted_ns > STEP_NS

    def test_ranks_that_compute_something_else_are_refused(self) -> None:
        study, trials = two_ranks()
        cluster = Cluster(num_hosts=1, devices_per_host=2, inside=LINK)
        found = basis(*one_rank())
        halves = make_trials([result_of("a", BASELINE, STEP_NS, num_ranks=1)])
        with pytest.raises(StoreError, match=r"computes 0\.5 times as many samples"):
            checks_of(found, study, halves, cluster)
        smaller = structs.replace(study.facts.model, num_parameters=7)
        other = structs.replace(study, facts=structs.replace(study.facts, model=smaller))
        with pytest.raises(StoreError, match="has a different model"):
            checks_of(found, other, trials, cluster)


class TestAsked:
    def asked(self, study, trials, **question):
        return predicted(stored(study, trials), study, Question(**question))

    def test_a_cluster_is_read_as_people_write_it(self) -> None:
        found = self.asked(*one_rank(), hosts=4, devices=8, network="25gbps", latency="50us", inside="400GBps")
        assert (found.between.bytes_per_s, found.between.latency_ns) == (3.125e9, 50_000)
        assert found.inside.bytes_per_s == 400e9
        assert not any("message between hosts" in text for text in found.assumptions)
        assumed = self.asked(*one_rank(), hosts=2, network="25gbps").assumptions
        assert any("between hosts is assumed to be 20 µs" in text for text in assumed)

    def test_links_of_the_study_need_not_be_given(self) -> None:
        found = self.asked(*two_ranks(), hosts=2, network="25gbps")
        assert (found.devices_per_host, found.inside) == (2, LINK)
        given = self.asked(*two_ranks(), hosts=2, network="25gbps", inside="100GBps").inside
        assert (given.bytes_per_s, given.latency_ns, given.call_ns) == (100e9, LINK.latency_ns, LINK.call_ns)

    def test_what_other_hosts_have_inside_is_not_what_the_study_ran_on(self) -> None:
        """Its own steps are explained, and compared, with the links on which they were measured."""
        ran = two_ranks(9_000_000, result_of("b", BF16, 80_000_000, num_ranks=2))
        measured = self.asked(*ran, hosts=2, network="25gbps")
        given = self.asked(*ran, hosts=2, network="25gbps", inside="1MBps")
        assert given.checks == measured.checks
        assert given.basis.unexplained_ns == measured.basis.unexplained_ns
        assert given.forecasts[0].step_time_ns > measured.forecasts[0].step_time_ns

    @pytest.mark.parametrize(
        ("other", "said"),
        [
            ({"local_sgd": {"every": 16}}, r"averages models between its steps \(local_sgd\)"),
            ({"parallel_mesh": {"tensor": 2}}, r"divides the model among ranks \(parallel_mesh\)"),
        ],
    )
    def test_what_does_more_than_reducing_gradients_is_not_begun_with(self, other, said) -> None:
        """The model would put an exchange of all gradients into each of its steps."""
        fast = result_of("b", Candidate(choices=other), STEP_NS, num_ranks=2, breakdown=profile_of())
        study, trials = two_ranks(9_000_000, fast)
        accepted = Decision(
            sequence=1, stage="move", verdict="accepted", reason="", candidate=trials[1].candidate, measured_gain=0.1
        )
        store = stored(study, trials, [accepted])
        best = predicted(store, study, Question(hosts=2, network="25gbps"))
        assert best.basis.sequence == 1
        assert any(re.search(f"the best configuration {said}", text) for text in best.assumptions)
        with pytest.raises(StoreError, match=f"trial 2 {said}, which cannot be predicted.*--from baseline"):
            self.asked(study, trials, hosts=2, network="25gbps", which="2")

    @pytest.mark.parametrize(
        ("question", "said"),
        [
            ({"hosts": 2}, "--network 25gbps"),
            ({"devices": 8}, "--inside 400GBps"),
            ({"network": "fast"}, "not a bandwidth"),
            ({"network": "1gbps", "latency": "soon"}, "not a latency"),
            ({"hosts": 1024, "devices": 64, "network": "1gbps", "inside": "1GBps"}, "at most"),
            ({"contention": 1.5}, "share of its speed"),
            ({"which": "7"}, "no trial '7'"),
        ],
    )
    def test_what_cannot_be_answered_says_what_to_do(self, question, said) -> None:
        with pytest.raises((ChoiceError, StoreError), match=said):
            self.asked(*one_rank(), **question)


class TestFigures:
    def test_every_family_is_a_curve_over_the_hosts(self) -> None:
        found = on_hosts()
        info = get_scaling_info(found)
        assert list(LOOKS) == [family.value for family in Family]
        assert set(info["family"]) == set(LOOKS)
        figures = scaling_context(found, SampleUnit.SAMPLE)["figures"]
        assert set(figures) == {"step_times", "throughput", "efficiency"}
        rows = info[info["family"] == "flat"]
        assert list(rows["num_hosts"]) == [1, 2, 4]
        assert (rows["step_ms"].diff().dropna() >= 0).all()

    def test_one_host_has_no_curves(self) -> None:
        assert scaling_context(on_hosts(num_hosts=1), SampleUnit.SAMPLE)["figures"] == {}

    def test_tables_have_what_the_prediction_says(self) -> None:
        study, trials = two_ranks(9_000_000, result_of("b", BF16, 80_000_000, num_ranks=2))
        found = predicted(stored(study, trials), study, Question(hosts=2, network="25gbps"))
        assert len(get_ways_info(found)) == len(found.forecasts)
        assert list(get_checks_info(found)["error"]) == [check.error for check in found.checks]

"""Savings of other reductions of gradients on links that were measured."""

import dataclasses

import pytest
from builders import sample_environment, sample_facts, sample_topology
from msgspec.structs import replace
from profiled import STEP_NS, breakdown_of

from steptune.tuner.costs.bounds import Situation, removable
from steptune.tuner.costs.categories import Category
from steptune.tuner.costs.reduction import SLACK, Reduction, most_saved, saved
from steptune.tuner.costs.reduction import reduction as costs_of
from steptune.tuner.network.collective_costs import ALL_GATHER, ALL_REDUCE, flat_ring_ns, ring_ns
from steptune.tuner.records import Calibration, Choice, Link, ModelFacts, Topology
from steptune.tuner.strategies import STRATEGIES, strategy_named
from steptune.tuner.strategies.situations import exchange_of

MB = 10**6
MIB = 1 << 20
DEFAULTS: dict[str, Choice] = {strategy.name: dict(strategy.defaults) for strategy in STRATEGIES}
INSIDE = Link(kind="NV18", latency_ns=2_000, bytes_per_s=100e9, call_ns=10_000)
FAST_NETWORK = Link(kind="network", latency_ns=2_000, bytes_per_s=200e9, call_ns=10_000, num_sharing=2)
"""Each of two ranks has what it has inside."""
SLOW_NETWORK = Link(kind="network", latency_ns=30_000, bytes_per_s=62.5e6, call_ns=30_000, num_sharing=2)
"""500 Mbit/s."""
HOSTS = (0, 0, 1, 1)
TWO_LEVELS: Choice = {"levels": 2}
REDUCERS = ("hierarchical_allreduce", "gradient_compression", "ddp_buckets", "sharding", "nccl_settings")


def topology_of(between: Link) -> Topology:
    """The flat ring is as slow as its slowest edge."""
    alone = replace(between, num_sharing=1)
    assert flat_ring_ns(ALL_REDUCE, MB, HOSTS, INSIDE, alone) >= ring_ns(ALL_REDUCE, MB, 4, INSIDE)
    slowest = min(INSIDE, alone, key=lambda link: link.bytes_per_s)
    return sample_topology(inside=INSIDE, between=between, whole=slowest)


def model_of(size_bytes: int, *, element_bytes: int = 4, num_frozen: int = 0) -> ModelFacts:
    return ModelFacts(
        num_parameters=size_bytes // element_bytes,
        parameter_bytes=size_bytes,
        num_parameter_tensors=100,
        num_frozen=num_frozen,
    )


def situation_on(
    topology: Topology | None,
    *,
    exposed: float = 0.5,
    hidden: float = 0.0,
    size_bytes: int = 100 * MIB,
    model: ModelFacts | None = None,
    **choices: Choice,
) -> Situation:
    breakdown = breakdown_of({Category.COMMUNICATION: exposed}, rest=Category.MATMUL)
    beside = {Category.COMMUNICATION.value: round(hidden * STEP_NS)}
    return Situation(
        breakdown=replace(breakdown, overlapped=beside),
        workload=sample_facts(model=model or model_of(size_bytes)),
        environment=sample_environment(
            num_ranks=4, num_hosts=2, topology=topology, calibration=Calibration(copy_bytes_per_s=3e12)
        ),
        choices={**DEFAULTS, **choices},
        exchange=exchange_of({**DEFAULTS, **choices}),
    )


def reduction(situation: Situation, **choices: Choice) -> Reduction | None:
    """With the incumbent's choices and these instead."""
    return costs_of(dataclasses.replace(situation, exchange=exchange_of({**situation.choices, **choices})))


def emulated(between: Link) -> Topology:
    topology = topology_of(between)
    return replace(topology, whole=replace(topology.whole, kind="NV18 and emulated network"))


def sharded(mode: str, **more) -> Choice:
    return {**DEFAULTS["sharding"], "mode": mode, **more}


def expected(name: str, situation: Situation, **choice) -> float | None:
    return strategy_named(name).expected(situation, {**DEFAULTS[name], **choice})


def bound(name: str, situation: Situation, **choice) -> float:
    return strategy_named(name).bound(situation, {**DEFAULTS[name], **choice})


class TestTwoLevels:
    def test_do_not_pay_where_the_network_is_as_fast_as_a_host(self):
        situation = situation_on(topology_of(FAST_NETWORK))
        assert expected("hierarchical_allreduce", situation, levels=2) == 0
        assert bound("hierarchical_allreduce", situation, levels=2) < removable(situation, Category.COMMUNICATION) / 2

    def test_pay_where_it_is_slow(self):
        """A third of the bytes need not cross: 2 hosts of 2 ranks send 1.0 messages in place of 1.5."""
        situation = situation_on(topology_of(SLOW_NETWORK), exposed=0.6)
        assert expected("hierarchical_allreduce", situation, levels=2) == pytest.approx(0.6 / 3, rel=0.02)
        assert bound("hierarchical_allreduce", situation, levels=2) > 0.6 / 3

    def test_are_expected_to_pay_a_little_where_the_links_are_known_badly(self):
        """They did not pay by figures of links that were off by a half, so they were tried last, or not at all."""
        slow = topology_of(SLOW_NETWORK)
        assert slow.between is not None
        seems_slower = replace(slow.between, bytes_per_s=0.6 * slow.between.bytes_per_s)
        known, doubtful = (replace(slow, between=replace(seems_slower, fit_residual=error)) for error in (0.0, 0.5))
        clean = replace(known, inside=replace(INSIDE, fit_residual=0.0), whole=replace(known.whole, fit_residual=0.0))
        assert expected("hierarchical_allreduce", situation_on(clean), levels=2) == 0
        assert 0.02 < expected("hierarchical_allreduce", situation_on(doubtful), levels=2) < 0.2

    def test_that_are_given_up_where_they_cost_save_what_they_cost(self):
        slow = situation_on(topology_of(FAST_NETWORK), hierarchical_allreduce=TWO_LEVELS)
        assert expected("hierarchical_allreduce", slow, levels=1) > 0

    def test_save_less_of_what_is_compressed(self):
        """16 bits between hosts leave half of what two levels could still save there."""
        half = {"gradient_compression": {**DEFAULTS["gradient_compression"], "method": "bf16"}}
        plain, compressed = situation_on(topology_of(SLOW_NETWORK)), situation_on(topology_of(SLOW_NETWORK), **half)
        together = {**half, "hierarchical_allreduce": TWO_LEVELS}
        assert reduction(compressed, **together).total_ns < reduction(plain, **half).total_ns
        assert reduction(plain, **together).total_ns < reduction(plain, hierarchical_allreduce=TWO_LEVELS).total_ns


class TestCompression:
    def test_of_half_the_bytes_saves_half_of_a_slow_network(self):
        situation = situation_on(topology_of(SLOW_NETWORK), exposed=0.6)
        assert expected("gradient_compression", situation, method="bf16") == pytest.approx(0.3, rel=0.02)

    def test_saves_more_the_fewer_bytes_it_sends(self):
        situation = situation_on(topology_of(SLOW_NETWORK))
        gains = [expected("gradient_compression", situation, method=m) for m in ("fp16", "int8", "one_bit")]
        assert gains == sorted(gains)
        assert gains[0] < gains[-1]

    def test_of_gradients_that_are_mostly_hidden_saves_what_is_not(self):
        """Three quarters of it is beside compute: with a quarter of the bytes all is, but for the last bucket, which
        has 24 of 100 MiB and takes a quarter of its time.
        """
        situation = situation_on(topology_of(SLOW_NETWORK), exposed=0.2, hidden=0.6)
        assert expected("gradient_compression", situation, method="int8") == pytest.approx(
            0.2 - 0.8 * 0.24 / 4, rel=0.03
        )

    def test_by_thin_matrices_is_bounded_by_all_of_communication(self):
        """The bytes that it sends depend on shapes that are not known."""
        situation = situation_on(topology_of(SLOW_NETWORK))
        assert bound("gradient_compression", situation, method="powersgd") == removable(
            situation, Category.COMMUNICATION
        )


class TestBuckets:
    def test_of_one_mebibyte_pay_the_latency_often(self):
        """100 calls in place of 5 on a network on which a call takes as long as a megabyte."""
        slow_to_begin = Link(kind="network", latency_ns=1e6, bytes_per_s=1e9, call_ns=0, num_sharing=2)
        today = {"ddp_buckets": {**DEFAULTS["ddp_buckets"], "bucket_cap_mb": 1}}
        situation = situation_on(topology_of(slow_to_begin), **today)
        assert expected("ddp_buckets", situation, bucket_cap_mb=25) > 0.2
        assert reduction(situation).total_ns == pytest.approx(
            100 * ring_ns(ALL_REDUCE, MIB, 4, slow_to_begin), rel=1e-6
        )

    def test_leave_the_last_one_in_view(self):
        """A bucket of all gradients can begin only when the last gradient is there."""
        situation = situation_on(topology_of(SLOW_NETWORK), exposed=0.1, hidden=0.3)
        assert expected("ddp_buckets", situation, bucket_cap_mb=1000) == 0
        assert bound("ddp_buckets", situation, bucket_cap_mb=1000) == 0
        assert 0 < bound("ddp_buckets", situation, bucket_cap_mb=5) < 0.1

    def test_of_today_s_sizes_save_nothing_of_communication(self):
        """Views of buckets were tried first where a slow network took three quarters of the step."""
        situation = situation_on(topology_of(SLOW_NETWORK), exposed=0.7)
        assert expected("ddp_buckets", situation, bucket_views=True) == 0
        copies = breakdown_of({Category.COMMUNICATION: 0.5, Category.COPY_D2D: 0.2}, rest=Category.MATMUL)
        copying = dataclasses.replace(situation, breakdown=copies)
        assert 0 < expected("ddp_buckets", copying, bucket_views=True) < 0.2


class TestSharding:
    def test_that_gathers_twice_sends_half_as_much_again(self):
        situation = situation_on(topology_of(SLOW_NETWORK), exposed=0.6)
        today = reduction(situation).total_ns
        modes = {mode: sharded(mode) for mode in ("grad_op", "full")}
        assert reduction(situation, sharding=modes["grad_op"]).total_ns == pytest.approx(today, rel=0.01)
        assert reduction(situation, sharding=modes["full"]).total_ns == pytest.approx(1.5 * today, rel=0.01)
        assert expected("sharding", situation, **modes["full"]) == 0

    def test_of_states_sends_the_update_besides_which_nothing_hides(self):
        situation = situation_on(topology_of(SLOW_NETWORK), exposed=0.6)
        today, then = reduction(situation), reduction(situation, sharding=sharded("zero1"))
        assert then.total_ns == pytest.approx(1.5 * today.total_ns, rel=0.01)
        assert then.last_ns - today.last_ns == pytest.approx(then.total_ns - today.total_ns)

    def test_inside_hosts_sends_a_part_between_them(self):
        situation = situation_on(topology_of(SLOW_NETWORK), exposed=0.6)
        hybrid = sharded("hybrid", reshard=False)
        assert expected("sharding", situation, **hybrid) == pytest.approx(0.6 / 3, rel=0.05)

    def test_with_weights_of_16_bits_gathers_half_and_reduces_all(self):
        situation = situation_on(topology_of(SLOW_NETWORK), sharding=sharded("grad_op"))
        today, then = reduction(situation), reduction(situation, precision={"level": "O2", "dtype": "bfloat16"})
        assert then.total_ns == pytest.approx(0.75 * today.total_ns, rel=0.01)

    def test_in_16_bits_reduces_half(self):
        situation = situation_on(topology_of(SLOW_NETWORK), exposed=0.6, sharding=sharded("grad_op"))
        saved_share = expected("gradient_compression", situation, method="bf16")
        assert saved_share == pytest.approx(0.6 / 4, rel=0.05)

    def test_gathers_and_reduces_for_every_micro_batch(self):
        """DDP reduces the last one's gradients only."""
        pieces: dict[str, Choice] = {"micro_batch": {**DEFAULTS["micro_batch"], "num_micro_batches": 4}}
        situation = situation_on(topology_of(SLOW_NETWORK), **pieces)
        today = reduction(situation).total_ns
        assert reduction(situation, sharding=sharded("grad_op")).total_ns == pytest.approx(4 * today, rel=0.01)
        at_the_end = sharded("grad_op", reduce_each=False)
        assert reduction(situation, sharding=at_the_end).total_ns == pytest.approx(2.5 * today, rel=0.01)

    def test_gathers_what_is_frozen_whose_gradients_nobody_sends(self):
        model = model_of(100 * MIB, num_frozen=90 * MIB // 4)
        situation = situation_on(topology_of(SLOW_NETWORK), exposed=0.6, model=model)
        all_trained = situation_on(topology_of(SLOW_NETWORK))
        today = reduction(situation).total_ns
        assert today == pytest.approx(0.1 * reduction(all_trained).total_ns, rel=0.02)
        assert reduction(situation, sharding=sharded("grad_op")).total_ns > 5 * today
        zero1 = reduction(situation, sharding=sharded("zero1")).total_ns
        assert zero1 == pytest.approx(1.5 * today, rel=0.02)

    @pytest.mark.parametrize(("level", "part"), [("O1", 0.5), ("O2", 0.5), ("O3", 0.25)])
    def test_of_states_sends_what_the_optimizer_updates(self, level, part):
        """At O2 the masters, which have 32 bits."""
        situation = situation_on(topology_of(SLOW_NETWORK))
        precision: Choice = {"level": level, "dtype": "bfloat16"}
        now, then = (reduction(situation, precision=precision, sharding=sharded(mode)) for mode in ("ddp", "zero1"))
        whole = reduction(situation).total_ns
        assert then.total_ns - now.total_ns == pytest.approx(part * whole, rel=0.02)

    def test_of_many_units_pays_the_latency_of_each(self):
        situation = situation_on(topology_of(replace(SLOW_NETWORK, latency_ns=1e6)))
        few, many = (sharded("full", wrap="size", min_num_params=size) for size in (10**7, 10**5))
        assert reduction(situation, sharding=many).total_ns > 1.05 * reduction(situation, sharding=few).total_ns

    def test_on_the_cpu_is_for_memory(self):
        situation = situation_on(topology_of(SLOW_NETWORK), precision={"level": "O1", "dtype": "bfloat16"})
        assert expected("sharding", situation, mode="full", wrap="block", cpu_offload=True) == 0


class TestPrecision:
    """Exchange of DDP with weights of 16 bits."""

    O1, O2, O3 = ({"level": level, "dtype": "bfloat16"} for level in ("O1", "O2", "O3"))
    TWO = Topology(
        host_of_rank=(0, 1),
        inside=None,
        between=SLOW_NETWORK,
        whole=SLOW_NETWORK,
        backend="nccl",
        hardware_fingerprint="",
        measured_at="",
    )

    def test_reduces_fp32_over_four_ranks_unless_it_is_pure(self):
        situation = situation_on(topology_of(SLOW_NETWORK), exposed=0.6, precision=self.O1)
        today = reduction(situation).total_ns
        assert reduction(situation, precision=self.O2).total_ns == pytest.approx(today, rel=0.01)
        assert reduction(situation, precision=self.O3).total_ns == pytest.approx(today / 2, rel=0.01)

    def test_sends_half_between_two_whose_sum_is_rounded_once_anyway(self):
        situation = situation_on(self.TWO, exposed=0.6, precision=self.O1)
        assert strategy_named("precision").expected(situation, self.O2) == pytest.approx(0.3, rel=0.05)
        assert strategy_named("precision").bound(situation, self.O2) > 0.3
        float16 = {"level": "O2", "dtype": "float16"}
        assert strategy_named("precision").expected(situation, float16) < 0.1

    def test_is_bounded_by_what_it_sends(self):
        """The error of the links is no reason to expect something of a level that sends as much as today's."""
        situation = situation_on(topology_of(SLOW_NETWORK), exposed=0.6)
        alone = dataclasses.replace(situation, environment=replace(situation.environment, topology=None))
        precision = strategy_named("precision")
        for level in (self.O1, self.O2):
            assert precision.bound(situation, level) == precision.bound(alone, level)
        assert precision.bound(situation, self.O3) > precision.bound(alone, self.O3) + 0.3

    def test_in_two_levels_is_of_16_bits_inside_hosts_too(self):
        """Where a link inside is the slow one: O3, and with a compression O2, send half on it as well."""
        inside = replace(INSIDE, bytes_per_s=62.5e6)
        network = replace(FAST_NETWORK, latency_ns=1)
        situation = situation_on(sample_topology(inside=inside, between=network, whole=inside))
        compressed = {"gradient_compression": {**DEFAULTS["gradient_compression"], "method": "bf16"}}
        levels = {"hierarchical_allreduce": TWO_LEVELS}
        whole = reduction(situation, **levels, precision=self.O2).total_ns
        assert whole == pytest.approx(reduction(situation, **levels).total_ns, rel=0.01)
        assert reduction(situation, **levels, precision=self.O3).total_ns == pytest.approx(whole / 2, rel=0.01)
        sent = reduction(situation, **levels, **compressed, precision=self.O2).total_ns
        assert sent == pytest.approx(whole / 2, rel=0.01)

    def test_of_a_model_that_has_16_bits_by_itself(self):
        """Its gradients are sent as they are, and at O2 added up in FP32."""
        model = model_of(50 * MIB, element_bytes=2)
        situation = situation_on(topology_of(SLOW_NETWORK), exposed=0.6, model=model)
        today = reduction(situation).total_ns
        assert expected("gradient_compression", situation, method="bf16") == 0
        assert expected("gradient_compression", situation, method="int8") == pytest.approx(0.3, rel=0.05)
        assert reduction(situation, precision=self.O2).total_ns == pytest.approx(2 * today, rel=0.01)

    def test_leaves_a_compression_what_is_sent_beyond_it(self):
        four, two = (situation_on(t, exposed=0.6, precision=self.O2) for t in (topology_of(SLOW_NETWORK), self.TWO))
        assert expected("gradient_compression", four, method="bf16") == pytest.approx(0.3, rel=0.05)
        assert expected("gradient_compression", two, method="bf16") == 0
        assert expected("gradient_compression", two, method="one_bit") > 0.5

    def test_over_four_ranks_takes_what_widening_takes(self):
        """20 bytes of each element, over what a copy reads and writes in a second."""
        o2, bf16 = {"level": "O2", "dtype": "bfloat16"}, {**DEFAULTS["gradient_compression"], "method": "bf16"}
        situation = situation_on(topology_of(FAST_NETWORK), precision=o2)
        slower = dataclasses.replace(
            situation,
            environment=replace(situation.environment, calibration=Calibration(copy_bytes_per_s=3e11)),
        )
        elements = 100 * MIB / 4
        more_ns = reduction(slower).total_ns - reduction(situation).total_ns
        assert more_ns == pytest.approx(20 * elements * (1 / 3e11 - 1 / 3e12) * 1e9)
        assert reduction(slower, gradient_compression=bf16) == reduction(situation, gradient_compression=bf16)


class TestSockets:
    def test_of_emulated_hosts_are_expected_to_carry_more(self):
        """Where three quarters of the step crossed a network of sockets, what doubles it was never tried."""
        situation = situation_on(emulated(SLOW_NETWORK), exposed=0.75)
        more = expected("nccl_settings", situation, socket_threads=4, sockets_per_thread=4)
        assert 0.45 < more < 0.55
        assert more > expected("nccl_settings", situation, socket_threads=2, sockets_per_thread=2) > 0

    def test_of_a_network_that_may_have_none_are_expected_to_save_less(self):
        known, unknown = (situation_on(topology(SLOW_NETWORK), exposed=0.75) for topology in (emulated, topology_of))
        both = [expected("nccl_settings", s, socket_threads=4, sockets_per_thread=4) for s in (known, unknown)]
        assert both[1] == pytest.approx(both[0] / 2)

    def test_that_are_fewer_than_today_save_nothing(self):
        today = {"nccl_settings": {**DEFAULTS["nccl_settings"], "socket_threads": 4, "sockets_per_thread": 4}}
        situation = situation_on(emulated(SLOW_NETWORK), exposed=0.5, **today)
        for fewer in ({}, {"socket_threads": 2, "sockets_per_thread": 2}, {"algorithm": "tree"}):
            assert expected("nccl_settings", situation, **fewer) == 0

    def test_do_not_change_what_is_inside_a_host(self):
        situation = situation_on(emulated(SLOW_NETWORK), sharding=sharded("hybrid", reshard=False))
        many = {**DEFAULTS["nccl_settings"], "socket_threads": 8, "sockets_per_thread": 8}
        now, then = reduction(situation), reduction(situation, nccl_settings=many)
        inside_ns = 2 * ring_ns(ALL_GATHER, 100 * MIB, 2, INSIDE)
        assert now.total_ns - inside_ns == pytest.approx(64**0.4 * (then.total_ns - inside_ns), rel=0.02)

    def test_other_settings_are_judged_by_other_knowledge(self):
        assert expected("nccl_settings", situation_on(emulated(SLOW_NETWORK)), min_channels=16) is None


class TestUnknown:
    @pytest.mark.parametrize(
        ("name", "choice"),
        [("parallel_mesh", {"tensor": 2}), ("parallel_mesh", {"pipeline": 2}), ("local_sgd", {"every": 4})],
    )
    def test_is_what_ranks_exchange_beside_gradients(self, name, choice):
        """The expectation for a reduction of gradients would be another exchange's."""
        situation = situation_on(topology_of(SLOW_NETWORK), **{name: {**DEFAULTS[name], **choice}})
        assert reduction(situation) is None
        for reducer in REDUCERS:
            assert expected(reducer, situation) is None

    def test_links_leave_bounds_as_they_were(self):
        situation = situation_on(None)
        for name, choice in (
            ("hierarchical_allreduce", {"levels": 2}),
            ("gradient_compression", {"method": "bf16"}),
            ("ddp_buckets", {"bucket_cap_mb": 5}),
            ("sharding", sharded("grad_op")),
            ("nccl_settings", {"socket_threads": 4, "sockets_per_thread": 4}),
        ):
            assert expected(name, situation, **choice) is None
            assert bound(name, situation, **choice) == removable(situation, Category.COMMUNICATION)


@pytest.mark.parametrize("name", REDUCERS)
@pytest.mark.parametrize("network", [FAST_NETWORK, SLOW_NETWORK], ids=["fast", "slow"])
@pytest.mark.parametrize(("exposed", "hidden"), [(0.0, 0.3), (0.1, 0.0), (0.4, 2.0)])
def test_what_is_expected_lies_within_the_bound(name, network, exposed, hidden):
    """And both within what communication holds up."""
    situation = situation_on(topology_of(network), exposed=exposed, hidden=hidden)
    strategy = strategy_named(name)
    for choice in strategy.choices(situation.environment, situation.workload):
        most = strategy.bound(situation, choice)
        known = strategy.expected(situation, choice)
        extra = removable(situation, Category.COPY_D2D, Category.ELEMENTWISE, Category.HOST, Category.LAUNCH_LATENCY)
        assert 0 <= most <= exposed + extra + 1e-9
        assert known is None or 0 <= known <= most + 1e-9


@pytest.mark.parametrize("error", [0.0, 0.5])
def test_a_bound_allows_for_the_error_of_the_fit(error):
    """Both costs may have it: the one that is known too high, the other too low."""
    topology = topology_of(SLOW_NETWORK)
    inexact = replace(topology, whole=replace(topology.whole, fit_residual=error))
    situation = situation_on(inexact, exposed=0.6)
    today = reduction(situation)
    assert saved(situation, today, today) == 0
    assert most_saved(situation, today, today) == pytest.approx(0.6 * (1 - 1 / (SLACK * (1 + error) ** 2)))

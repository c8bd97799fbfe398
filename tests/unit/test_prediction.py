"""Predicted costs of communication: properties of the simulation, and steps that were measured by hand."""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from predictions import (
    CONTENTION,
    GPT2_LARGE,
    KNOWN,
    NVLINK,
    RESNET_50,
    SOCKETS,
    TWO,
    VIT_LARGE,
    Measured,
    choices,
    cluster_of,
    model_of,
    step_of,
)

from steptune.tuner.errors import ChoiceError
from steptune.tuner.prediction.cluster import Cluster
from steptune.tuner.prediction.compression import sending_ns
from steptune.tuner.prediction.data_parallel import data_parallel_tasks, reduction_ns
from steptune.tuner.prediction.model import Model
from steptune.tuner.prediction.overheads import copies_ns
from steptune.tuner.prediction.plans import WAYS
from steptune.tuner.prediction.sharded import sharded_tasks
from steptune.tuner.prediction.step import ComputeStep
from steptune.tuner.prediction.timeline import Lane, Task, simulate
from steptune.tuner.prediction.volumes import MIB, buckets, volumes_of
from steptune.tuner.records import Calibration, Link
from steptune.tuner.training.compression.own_cost import OwnCost

ROUNDING = 1e-9
MEDIAN_ERROR = 0.06
"""Limit for the known figures; they have two digits, and most bandwidths behind them are known as 7 to 9 GB/s."""
WORST_ERROR = 0.25

WAY_CHOICES = {way.label: choices(**way.changes) for way in WAYS}
every_way = pytest.mark.parametrize("chosen", WAY_CHOICES.values(), ids=WAY_CHOICES.keys())
ENDLESS = Link(kind="network", latency_ns=0, bytes_per_s=1e30)


def compute(work_ns: float, *after: int) -> Task:
    return Task(lane=Lane.COMPUTE, work_ns=work_ns, after=after)


def communication(work_ns: float, *after: int) -> Task:
    return Task(lane=Lane.COMMUNICATION, work_ns=work_ns, after=after)


class TestTimeline:
    def test_communication_runs_beside_compute(self) -> None:
        found = simulate([compute(10), communication(4, 0), compute(10), communication(6, 2)])
        assert found.ends_ns == (10, 14, 20, 26)
        assert found.exposed_ns == 6

    def test_a_lane_keeps_the_order_in_which_tasks_were_issued(self) -> None:
        """The second collective waits for the first, though what it comes after was done long ago."""
        found = simulate([compute(10), compute(10), communication(5, 1), communication(5, 0)])
        assert found.ends_ns == (10, 20, 25, 30)

    def test_compute_loses_its_share_while_communication_runs(self) -> None:
        """At half speed for 8 ns it does 4 of its 10."""
        found = simulate([compute(2), communication(8, 0), compute(10)], contention=0.5)
        assert found.ends_ns == (2, 10, 16)
        assert found.slowed_ns == 4

    @given(
        pieces=st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50), st.floats(0, 50)), min_size=1, max_size=12),
        contention=st.floats(0, 0.9),
    )
    @settings(max_examples=200, deadline=None)
    def test_more_communication_ends_nothing_earlier(
        self, pieces: list[tuple[float, float, float]], contention: float
    ) -> None:
        def ends(more: bool) -> tuple[float, ...]:
            tasks: list[Task] = []
            for work, sent, added in pieces:
                tasks += [compute(work), communication(sent + added * more, len(tasks))]
            tasks.append(compute(1.0, len(tasks) - 1))
            return simulate(tasks, contention).ends_ns

        assert all(less <= more + 1e-6 for less, more in zip(ends(False), ends(True), strict=True))


class TestBuckets:
    def test_the_first_is_small_and_the_last_is_what_is_left(self) -> None:
        volumes = volumes_of(RESNET_50, choices(), 4)
        found = [elements * 4 / MIB for elements in buckets(volumes, choices()["ddp_buckets"])]
        assert found[:4] == pytest.approx([1, 25, 25, 25])
        assert sum(found) == pytest.approx(RESNET_50.parameter_bytes / MIB)

    def test_none_is_smaller_than_a_tensor(self) -> None:
        few = replace_facts(num_parameter_tensors=2)
        found = buckets(volumes_of(few, choices(), 4), choices()["ddp_buckets"])
        assert found == pytest.approx([few.num_parameters / 2] * 2)

    def test_gradients_of_sixteen_bit_weights_have_sixteen_bits(self) -> None:
        volumes = volumes_of(VIT_LARGE, choices(precision={"level": "O2", "dtype": "bfloat16"}), 4)
        assert volumes.formats == (2, 4, 2, 4)

    def test_what_is_frozen_is_gathered_and_not_reduced(self) -> None:
        frozen = replace_facts(num_frozen=RESNET_50.num_parameters * 9 // 10)
        volumes = volumes_of(frozen, choices(), 4)
        assert sum(buckets(volumes, choices()["ddp_buckets"])) == pytest.approx(RESNET_50.num_parameters / 10, rel=1e-6)
        sent = {
            mode: [
                model_of(72.0, facts, contention=0)
                .timeline(choices(sharding={"mode": mode}), TWO)
                .work_ns[Lane.COMMUNICATION]
                for facts in (frozen, RESNET_50)
            ]
            for mode in ("ddp", "zero1", "grad_op")
        }
        assert sent["ddp"][0] < 0.2 * sent["ddp"][1]
        assert sent["zero1"][0] < 0.2 * sent["zero1"][1]
        assert 0.5 < sent["grad_op"][0] / sent["grad_op"][1] < 0.6

    def test_masters_of_a_model_that_has_sixteen_bits_by_itself_have_thirty_two(self) -> None:
        halved = replace_facts(parameter_bytes=2 * RESNET_50.num_parameters)
        assert volumes_of(halved, choices(), 4).formats.reduced == 2
        assert volumes_of(halved, choices(precision={"level": "O2", "dtype": "bfloat16"}), 4).formats.reduced == 4


def replace_facts(**changes):
    from msgspec import structs

    return structs.replace(RESNET_50, **changes)


def free_of_own_cost(model: Model) -> Model:
    """Neither copies nor compressions take time: what is left is sending."""
    nothing = OwnCost(ns_per_element=0, call_ns=0)
    methods = ("fp16", "bf16", "int8", "one_bit", "powersgd", "dgc")
    return replace(
        model,
        own_costs=dict.fromkeys(methods, nothing),
        calibration=type(model.calibration)(),
        contention=0.0,
    )


@every_way
class TestEveryWay:
    def test_a_link_without_cost_leaves_the_compute(self, chosen) -> None:
        model = free_of_own_cost(model_of(72.0, VIT_LARGE))
        step = model.step
        parts = {"ddp": 1, "zero1": 4, "hybrid": 2}.get(chosen["sharding"]["mode"], 4)
        wanted = step.total_ns - step.optimizer_ns * (1 - 1 / parts)
        found = model.step_ns(chosen, cluster_of(2, 2, ENDLESS, ENDLESS))
        assert found == pytest.approx(wanted, rel=1e-6)

    @given(
        bytes_per_s=st.floats(1e8, 1e11),
        more=st.floats(1, 10),
        latency_ns=st.floats(0, 1e6),
        less=st.floats(0, 1),
        contention=st.floats(0, 0.9),
    )
    @settings(max_examples=15, deadline=None)
    def test_a_better_network_is_never_slower(self, chosen, bytes_per_s, more, latency_ns, less, contention) -> None:
        model = model_of(72.0, VIT_LARGE, contention)

        def step_ns(bytes_per_s: float, latency_ns: float) -> float:
            network = Link(kind="network", latency_ns=latency_ns, bytes_per_s=bytes_per_s)
            return model.step_ns(chosen, cluster_of(2, 4, network))

        assert step_ns(bytes_per_s * more, latency_ns * less) <= step_ns(bytes_per_s, latency_ns) * (1 + ROUNDING)

    def test_one_rank_takes_the_step_alone(self, chosen) -> None:
        model = model_of(72.0, VIT_LARGE)
        assert model.step_ns(chosen, Cluster(num_hosts=1, devices_per_host=1)) == model.step.total_ns

    def test_a_network_a_hundred_times_as_slow_is_felt(self, chosen) -> None:
        """Nothing that is predicted leaves the network out."""
        model = model_of(72.0, VIT_LARGE)
        slow = replace_link(SOCKETS, bytes_per_s=SOCKETS.bytes_per_s / 100)
        assert model.step_ns(chosen, cluster_of(4, 8, slow)) > 1.05 * model.step_ns(chosen, cluster_of(4, 8))


def replace_link(link: Link, **changes) -> Link:
    from msgspec import structs

    return structs.replace(link, **changes)


class TestReductions:
    def reduction(self, cluster: Cluster, **changes) -> float:
        chosen = choices(**changes)
        volumes = volumes_of(VIT_LARGE, chosen, cluster.num_ranks)
        return reduction_ns(1e6, volumes, cluster, chosen, {"bf16": OwnCost(ns_per_element=0, call_ns=0)})

    def test_two_levels_are_flat_where_every_host_has_one_rank(self) -> None:
        cluster = Cluster(num_hosts=4, devices_per_host=1, between=SOCKETS)
        two_levels = self.reduction(cluster, hierarchical_allreduce={"levels": 2})
        assert two_levels == pytest.approx(self.reduction(cluster))

    def test_two_levels_send_less_between_hosts(self) -> None:
        """A flat ring over n ranks sends 2 (n - 1) / n of a message over the network, two levels 2 (h - 1) / h."""
        network = Link(kind="network", latency_ns=0, bytes_per_s=1e9)
        cluster = cluster_of(2, 8, network, ENDLESS)
        assert self.reduction(cluster) == pytest.approx(2 * 15 / 16 * 4e6)
        two_levels = self.reduction(cluster, hierarchical_allreduce={"levels": 2})
        assert two_levels == pytest.approx(2 * 1 / 2 * 4e6)
        halved = self.reduction(cluster, hierarchical_allreduce={"levels": 2}, gradient_compression={"method": "bf16"})
        assert halved == pytest.approx(two_levels / 2)

    @pytest.mark.parametrize(("level", "part"), [("O1", 1.0), ("O2", 1.0), ("O3", 0.5)])
    def test_zero1_sends_what_the_optimizer_updates(self, level, part) -> None:
        """At O2 the masters, which have 32 bits."""
        network = Link(kind="network", latency_ns=0, bytes_per_s=1e9)
        cluster, model = cluster_of(2, 8, network, ENDLESS), model_of(72.0, VIT_LARGE, contention=0)
        precision = {"level": level, "dtype": "bfloat16"}
        with_update, without = (
            model.timeline(choices(precision=precision, sharding={"mode": mode}), cluster).work_ns[Lane.COMMUNICATION]
            for mode in ("zero1", "ddp")
        )
        assert with_update - without == pytest.approx(part * 15 / 16 * VIT_LARGE.parameter_bytes, rel=1e-6)

    def test_what_dgc_sends_grows_with_the_ranks(self) -> None:
        choice = choices(gradient_compression={"method": "dgc", "ratio": 0.01})["gradient_compression"]
        volumes = volumes_of(VIT_LARGE, choices(), 4)
        network = Link(kind="network", latency_ns=0, bytes_per_s=1e9)

        def sent(num_hosts: int) -> float:
            return sending_ns(choice, 1e6, volumes, Cluster(num_hosts=num_hosts, devices_per_host=1, between=network))

        # One part for each of the others, 8 bytes for each of its 10,000 elements.
        assert [sent(2), sent(5)] == pytest.approx([80_000, 320_000])

    def test_eight_bits_are_sent_twice_with_their_scales(self) -> None:
        """To whom averages, and back: half of the elements each time, between two ranks."""
        choice = choices(gradient_compression={"method": "int8"})["gradient_compression"]
        volumes = volumes_of(VIT_LARGE, choices(), 4)
        network = Link(kind="network", latency_ns=0, bytes_per_s=1e9)
        cluster = Cluster(num_hosts=2, devices_per_host=1, between=network)
        assert sending_ns(choice, 256_000, volumes, cluster) == pytest.approx(2 * 260_000 / 2)


class TestTasks:
    MS = 1_000_000
    STEP = ComputeStep(before_ns=0, forward_ns=30 * MS, backward_ns=60 * MS, optimizer_ns=6 * MS, divisible_ns=4 * MS)
    PAIR = Cluster(num_hosts=1, devices_per_host=2, inside=Link(kind="x", latency_ns=MS, bytes_per_s=1e30))
    """An all-gather or a reduce-scatter takes one step, an all-reduce two."""
    SHARDED = choices(sharding={"mode": "full", "wrap": "block"})
    VOLUMES = volumes_of(replace_facts(num_blocks=3), SHARDED, 4)

    def test_the_update_waits_for_the_last_reduction(self) -> None:
        tasks = data_parallel_tasks(self.STEP, self.VOLUMES, self.PAIR, choices(), {})
        assert simulate(tasks).step_ns == (30 + 60 + 2 + 6) * self.MS

    def test_units_are_gathered_just_ahead(self) -> None:
        """The third is gathered when the first has computed, not before."""
        tasks = sharded_tasks(self.STEP, self.VOLUMES, self.PAIR, self.SHARDED)
        ends = simulate(tasks).ends_ns
        gathers = [n for n, task in enumerate(tasks) if task.lane is Lane.COMMUNICATION][:3]
        assert [ends[n] / self.MS for n in gathers] == [1, 2, 12]
        # 1 for the first unit of each pass, 1 for the last scatter; half of the divisible part of the update.
        assert simulate(tasks).step_ns / self.MS == 1 + 30 + 1 + 60 + 1 + 6 - 2

    @pytest.mark.parametrize(
        ("precision", "ignored", "units"),
        [("O1", None, 3), ("O2", None, 3 + 5), ("O2", "norms", 3)],
    )
    def test_norms_of_another_format_are_units(self, precision: str, ignored: str | None, units: int) -> None:
        facts = replace_facts(num_blocks=3, module_types={"LayerNorm": 5, "Linear": 9})
        sharding = {"mode": "full", "wrap": "block", "ignored": ignored}
        chosen = choices(precision={"level": precision, "dtype": "bfloat16"}, sharding=sharding)
        tasks = sharded_tasks(self.STEP, volumes_of(facts, chosen, 2), self.PAIR, chosen)
        assert sum(task.lane is Lane.COMMUNICATION for task in tasks) == 3 * units

    def test_a_cpu_waits_for_every_exchange_of_fsdp(self) -> None:
        facts = replace_facts(num_blocks=3)
        beside = Model(step=self.STEP, facts=facts)
        waits = replace(beside, has_streams=False)
        # Three gathers in each pass and three scatters, one after the other.
        assert waits.step_ns(self.SHARDED, self.PAIR) == (30 + 60 + 9 + 4) * self.MS
        assert beside.step_ns(self.SHARDED, self.PAIR) < waits.step_ns(self.SHARDED, self.PAIR)
        assert waits.step_ns(choices(), self.PAIR) == beside.step_ns(choices(), self.PAIR)


class TestCopies:
    def test_they_are_read_and_written(self) -> None:
        volumes, calibration = volumes_of(RESNET_50, choices(), 4), Calibration(copy_bytes_per_s=1e9)
        gradients_ns = RESNET_50.parameter_bytes

        def copies(**changes) -> float:
            return copies_ns(choices(**changes), volumes, calibration) / gradients_ns

        assert copies() == 4  # into buckets and out of them
        assert copies(ddp_buckets={"bucket_views": True}) == 0
        o2 = {"level": "O2", "dtype": "bfloat16"}
        wide = volumes_of(RESNET_50, choices(precision=o2), 4)
        found = copies_ns(choices(precision=o2, ddp_buckets={"bucket_views": True}), wide, calibration)
        assert found / gradients_ns == pytest.approx(5)  # 20 bytes for each of the elements of 4
        assert copies(sharding={"mode": "grad_op"}) == 4  # gathered once, scattered once
        assert copies(sharding={"mode": "full"}) == 6  # gathered twice
        assert copies(sharding={"mode": "full"}, gradient_compression={"method": "bf16"}) == pytest.approx(5)  # 16 bits
        at_the_end = {"mode": "grad_op", "reduce_each": False}
        assert copies(sharding=at_the_end, micro_batch={"num_micro_batches": 3}) == 8  # gathered thrice
        assert copies_ns(choices(), volumes, Calibration()) == 0


class TestMicroBatches:
    def test_only_the_last_one_hides_reductions(self) -> None:
        whole = model_of(72.0, VIT_LARGE, contention=0)
        cut = replace(whole, step=replace(whole.step, num_micro_batches=4))
        assert cut.step_ns(choices(), TWO) > whole.step_ns(choices(), TWO)

    def test_fsdp_exchanges_all_of_them(self) -> None:
        chosen = choices(sharding={"mode": "full", "wrap": "block"})
        whole = model_of(72.0, VIT_LARGE, contention=0)
        cut = replace(whole, step=replace(whole.step, num_micro_batches=2))
        sent = [model.timeline(chosen, TWO).work_ns[Lane.COMMUNICATION] for model in (whole, cut)]
        assert sent[1] == pytest.approx(2 * sent[0])

    def test_fsdp_reduces_the_last_one_where_gradients_wait(self) -> None:
        model = model_of(72.0, VIT_LARGE, contention=0)
        cut = replace(model, step=replace(model.step, num_micro_batches=4))
        each, last = (
            cut.timeline(choices(sharding={"mode": "grad_op", "reduce_each": reduces}), TWO).work_ns[Lane.COMMUNICATION]
            for reduces in (True, False)
        )
        assert last == pytest.approx(each * (4 + 1) / (4 + 4), rel=0.01)

    def test_fsdp_scatters_half_where_it_may_reduce_16_bits(self) -> None:
        model = model_of(72.0, VIT_LARGE, contention=0)
        plain, halved = (
            model.timeline(choices(sharding={"mode": "grad_op"}, **more), TWO).work_ns[Lane.COMMUNICATION]
            for more in ({}, {"gradient_compression": {"method": "bf16"}})
        )
        assert halved == pytest.approx(0.75 * plain, rel=0.01)


class TestCluster:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ({"num_hosts": 0, "devices_per_host": 1}, "at least one host"),
            ({"num_hosts": 1, "devices_per_host": 8}, "--inside 400GBps"),
            ({"num_hosts": 2, "devices_per_host": 1}, "--network 25gbps"),
        ],
    )
    def test_what_is_not_known_is_asked_for(self, arguments, said) -> None:
        with pytest.raises(ChoiceError, match=said):
            Cluster(**arguments)


# --- steps that were measured by hand on 4 H200 -----------------------------------------------------


def predicted_ms(row: Measured) -> float:
    model = Model(
        step=step_of(row.alone_ms, row.facts),
        facts=row.facts,
        calibration=model_of(1, row.facts).calibration,
        contention=CONTENTION,
    )
    timeline = model.timeline(row.choices, row.cluster)
    return (sum(timeline.work_ns.values()) if row.waits else timeline.step_ns) / 1e6


def test_steps_measured_by_hand_on_4_h200() -> None:
    """Steps on 4 H200, on one host and on two emulated ones; hybrid sharding over more sockets is missed by most."""
    errors = {row.name: predicted_ms(row) / row.measured_ms - 1 for row in KNOWN}
    for row in KNOWN:
        line = (
            f"{row.name:45} {row.measured_ms:6.1f} ms, predicted {predicted_ms(row):6.1f} ({errors[row.name]:+.1%})\n"
        )
        sys.stdout.write(line)
    absolute = [abs(error) for error in errors.values()]
    assert statistics.median(absolute) <= MEDIAN_ERROR, errors
    assert max(absolute) <= WORST_ERROR, errors


def test_hierarchy_pays_for_one_model_and_not_for_the_other_where_the_hook_waits() -> None:
    """Measured: 200 ms against 229 for ViT-L, 42.3 against 34.4 for ResNet-50."""
    rows = {row.name: predicted_ms(row) for row in KNOWN}
    assert rows["ViT-L, two hosts, two levels"] < rows["ViT-L, two hosts, DDP 25 MiB"]
    assert rows["ResNet-50, two hosts, two levels"] > rows["ResNet-50, two hosts, DDP"]


def test_a_fast_link_hides_everything_but_the_copies_and_what_compute_loses() -> None:
    """GPT-2 large on NVLink: 13 ms of all-reduce are nearly all hidden, and still cost."""
    model = model_of(120.1, GPT2_LARGE)
    timeline = model.timeline(choices(), cluster_of(1, 4, inside=NVLINK))
    assert timeline.work_ns[Lane.COMMUNICATION] / 1e6 == pytest.approx(15, abs=2)
    assert timeline.exposed_ns / 1e6 - timeline.slowed_ns / 1e6 < 1

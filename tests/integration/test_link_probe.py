"""The links between ranks are measured by the ranks: on gloo, on one host and on emulated ones."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from builders import sample_hardware
from msgspec.structs import replace
from rank_jobs import emulated

from steptune.tuner.emulation import HOSTS_VARIABLE
from steptune.tuner.network.collective_costs import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from steptune.tuner.records import Device, HardwareProfile, Topology
from steptune.tuner.trials import topology
from steptune.tuner.trials.link_probe import LEAST_SIZES, SIZES_BYTES, median_and_least
from steptune.tuner.trials.runner import LocalRunner
from steptune.tuner.trials.topology import TopologyRequest, kind_inside, probe_links

pytestmark = pytest.mark.xdist_group("ranks")

CPU = HardwareProfile(
    devices=(Device(kind="cpu", name="Some Processor", memory_bytes=16 << 30),),
    num_cores=2,
    cpu_name="Some Processor",
    memory_bytes=16 << 30,
)


class Meeting:
    """Stand-in for `Coordinator`, of ranks that have joined already."""

    def __init__(self):
        self.group = dist.group.WORLD
        self.said = []

    def agree(self, value):
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value):
        rows = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(value, rows)
        return rows or []

    def send(self, message):
        self.said.append(message.text)


def probed(rank, known=None, tolerance=None):
    """The topology, and what it said meanwhile."""
    if tolerance is not None:
        topology.TOLERANCE = tolerance
    meeting = Meeting()
    request = TopologyRequest(study_directory="", hardware=CPU, known=known, seconds=0.05)
    return probe_links(request, meeting, torch.device("cpu")), meeting.said


class TestMeasured:
    @pytest.mark.parametrize("num_ranks", [2, 4])
    def test_on_one_host_there_is_one_link(self, ranks, num_ranks):
        found = [answer for answer, _ in ranks.run(num_ranks, probed)]
        assert found == [found[0]] * num_ranks, "all ranks have the same"
        assert found[0].host_of_rank == (0,) * num_ranks
        assert found[0].between is None
        assert found[0].whole == found[0].inside
        assert found[0].inside.kind == "loopback"
        assert (found[0].backend, found[0].hardware_fingerprint) == ("gloo", CPU.fingerprint)

    def test_two_hosts_have_three(self, ranks):
        """Inside with the ranks of a host, between with those of a place, flat with all."""
        found = ranks.run(4, emulated, 2, probed)[0][0]
        assert found.host_of_rank == (0, 0, 1, 1)
        for link, num_ranks, num_sharing in ((found.inside, 2, 1), (found.between, 2, 2), (found.whole, 4, 1)):
            assert {timing.num_ranks for timing in link.timings} == {num_ranks}
            assert link.num_sharing == num_sharing
            assert link.bytes_per_s > 0
            assert {t.collective for t in link.timings} == {ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER}
        assert (found.inside.kind, found.between.kind) == ("loopback", "emulated network")

    def test_every_collective_is_timed_by_size(self, ranks):
        """Sizes go as far as the time allows, and in any case so far that a bandwidth shows."""
        link = ranks.run(2, probed)[0][0].inside
        for collective in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER):
            sizes = [timing.message_bytes for timing in link.timings if timing.collective == collective]
            assert sizes == list(SIZES_BYTES[: len(sizes)])
            assert len(sizes) >= LEAST_SIZES
        assert all(timing.duration_ns > 0 for timing in link.timings)

    def test_hosts_of_one_rank_each_have_no_inside(self, ranks):
        found = ranks.run(2, emulated, 2, probed)[0][0]
        assert found.inside is None
        assert found.whole == found.between

    def test_hosts_of_different_sizes_are_measured_as_a_whole(self, ranks):
        found = ranks.run(3, emulated, 2, probed)[0][0]
        assert (found.inside, found.between) == (None, None)
        assert {timing.num_ranks for timing in found.whole.timings} == {3}


class TestKnown:
    """With a tolerance that no load on this machine exceeds, or that nothing meets."""

    def test_links_that_are_as_they_were_are_kept(self, ranks):
        known = ranks.run(4, emulated, 2, probed)[0][0]
        for found, said in ranks.run(4, emulated, 2, probed, known, 1e9):
            assert found == known
            assert said == ["checking the links between ranks"]

    def test_links_that_are_not_are_measured_anew(self, ranks):
        known = ranks.run(2, probed)[0][0]
        for found, said in ranks.run(2, probed, known, 1.0):
            assert found.inside.timings != known.inside.timings
            assert said == ["checking the links between ranks", "measuring the links between ranks"]

    def test_ranks_that_are_placed_otherwise_are_measured_anew(self, ranks):
        known = ranks.run(2, probed)[0][0]
        for found, said in ranks.run(2, emulated, 2, probed, known, 1e9):
            assert found.host_of_rank == (0, 1)
            assert said == ["measuring the links between ranks"]


class TestJob:
    """Measurement by the runner of a study."""

    @pytest.fixture
    def runner(self, tmp_path: Path) -> Iterator[LocalRunner]:
        runner = LocalRunner(workload="zoo:synthetic", directory=tmp_path, device="cpu", num_ranks=4)
        yield runner
        runner.close()

    def test_ranks_of_a_study_are_measured_before_its_trials(self, runner, monkeypatch):
        monkeypatch.setenv(HOSTS_VARIABLE, "2")
        hardware = runner.describe().hardware
        found = runner.measure_topology(hardware, None, 0.05)
        assert isinstance(found, Topology)
        assert found.host_of_rank == (0, 0, 1, 1)
        assert found.hardware_fingerprint == hardware.fingerprint

    def test_one_rank_has_no_links(self, tmp_path):
        runner = LocalRunner(workload="zoo:synthetic", directory=tmp_path, device="cpu")
        assert runner.measure_topology(CPU, None, 1.0) is None
        runner.close()


def test_a_group_takes_as_long_as_its_last_rank_and_the_slowest_group_counts():
    """Three repeats of two groups. In the first, rank 0 waited 90 for rank 1, which came last and took 10."""
    rows = [[100, 20, 30], [10, 20, 31], [40, 12, 13], [41, 12, 14]]
    assert median_and_least(rows, [(0, 1), (2, 3)]) == (30, 20)


@pytest.mark.parametrize(
    ("links", "kind"),
    [
        ({}, "unknown"),
        ({"0-1": "NV18"}, "NV18"),
        ({"0-1": "NV4", "0-2": "SYS", "1-2": "PIX"}, "SYS"),
        ({"0-1": "NV4", "0-2": "PHB (no peer access)"}, "PHB (no peer access)"),
    ],
)
def test_a_ring_inside_a_host_is_as_slow_as_its_slowest_link(links, kind):
    assert kind_inside(replace(sample_hardware(), links=links)) == kind

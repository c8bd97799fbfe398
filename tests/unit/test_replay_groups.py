"""Ranks meet in the groups of their collectives: a late rank holds up its own group."""

import dataclasses
from functools import partial
from pathlib import Path

import pytest
from counterfactuals.machine import Do, Machine, write_traces
from counterfactuals.programs import training

from steptune.tuner.profiling.capture import link
from steptune.tuner.profiling.reader import read_trace
from steptune.tuner.profiling.replay.graph import Graph, build_graph
from steptune.tuner.profiling.replay.ranks import UnlikeRanksError, meet, step_time_ns, without_late_ranks

MACHINE = Machine(clocks=(0.0, 5000.0))
OPERATIONS, LAST = 60, 61


def late_every_other(turn: int, rank: int, step: int, place: int) -> list[Do]:
    """Each step waits for its device: no host works ahead of a rank that is late."""
    late = rank == 1 and step % 2 == turn and place == 10
    reads = [Do(kind="read", cause="synchronisation", stays=1.0)] if place == LAST else []
    return reads + ([Do(kind="pause", host=4000.0, cause="late_ranks", stays=10.0)] if late else [])


def job(folder: Path, turn: int, group: str) -> list[Graph]:
    """Two ranks, of which the second is late in every other step."""
    folder.mkdir()
    late = partial(late_every_other, turn)
    program = training(host=20.0, device=12.0, operations=OPERATIONS, buckets=4, network=300.0, extra=late)
    paths = write_traces(folder, program, MACHINE, num_steps=6, num_ranks=2)
    graphs = [build_graph(link(read_trace(path))) for path in paths]
    return [of_group(graph, group) for graph in graphs if graph is not None]


def of_group(graph: Graph, *groups: str) -> Graph:
    """The graph whose collectives are of these groups in turn."""
    count = int(graph.operations.collective.sum())
    names = tuple(groups[number % len(groups)] for number in range(count))
    return dataclasses.replace(graph, operations=dataclasses.replace(graph.operations, group=names))


def test_a_late_rank_holds_up_its_own_group_only(tmp_path: Path) -> None:
    """Two jobs that are late in turn: as one group they would pay for both, apart each pays for its own."""
    first, second = job(tmp_path / "a", 0, "a"), job(tmp_path / "b", 1, "b")
    apart = [step_time_ns(meet(graphs)) for graphs in (first, second)]
    both = meet([*first, *second])
    assert step_time_ns(both) == pytest.approx(max(apart), rel=1e-6)
    one_group = meet([of_group(graph, "") for graph in (*first, *second)])
    assert step_time_ns(one_group) > 1.2 * max(apart)
    punctual = [step_time_ns(without_late_ranks(meet(graphs))) for graphs in (first, second)]
    assert step_time_ns(without_late_ranks(both)) == pytest.approx(max(punctual), rel=0.02)


def test_lateness_goes_on_through_ranks_that_groups_share(tmp_path: Path) -> None:
    """Shards within a host, replicas between hosts: each group alone joins two of four ranks."""
    first, second = job(tmp_path / "a", 0, "shards 0"), job(tmp_path / "b", 1, "shards 1")
    apart = max(step_time_ns(meet(graphs)) for graphs in (first, second))
    graphs = [
        of_group(graph, shards, replicas)
        for graph, shards, replicas in zip(
            (*first, *second),
            ("shards 0", "shards 0", "shards 1", "shards 1"),
            ("replicas 0", "replicas 1", "replicas 0", "replicas 1"),
            strict=True,
        )
    ]
    assert step_time_ns(meet(graphs)) > 1.2 * apart


def test_a_group_that_is_called_in_different_places_is_refused(tmp_path: Path) -> None:
    first, second = job(tmp_path / "a", 0, "a")
    with pytest.raises(UnlikeRanksError, match="process group 'a' at different positions"):
        meet([of_group(first, "a", "b"), of_group(second, "b", "a")])


def test_clocks_are_compared_by_collectives_of_one_group(tmp_path: Path) -> None:
    first, second = job(tmp_path / "a", 0, "a"), job(tmp_path / "b", 1, "b")
    alone = meet(first).offsets
    assert meet([*first, *second]).offsets[:2] == pytest.approx(alone)

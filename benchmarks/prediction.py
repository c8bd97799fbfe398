"""How good are predictions of several ranks from a measurement of one? Real training over gloo, each step predicted.

    python benchmarks/prediction.py                                                     # the loopback device
    python -m tuner.network.emulated --rate 500mbit -- python benchmarks/prediction.py  # two hosts, links of that rate
    python benchmarks/prediction.py --workload gpt2 vit resnet --ranks 2                # real models

One rank is measured and profiled; the links of every placement of ranks are probed; each compression is timed by itself
in one process. From that alone every configuration is predicted; then it is measured. What FSDP itself does on a CPU is
no part of the model: on more than two ranks or one host it is predicted from FSDP on two ranks of one host. Two hosts
are emulated: without networks of their own (second form) their link is the loopback device too.

Four ranks share the cores of this machine, so a workload whose compute scales with cores would measure the cores: the
compute of `workloads/sleeping.py` sleeps, its gradients, updates and collectives are real. Models of the zoo compute
for real, small enough for one thread a rank: they need a core for every rank and for what the rank sends. Every rank
has as many samples. Operators use one thread: those that spin for others of a busy machine take milliseconds.

On a machine that others use, `chrt --rr 10` before the command lets its ranks go first.

The configuration of one rank, started again, says how repeatable measuring is; it does not enter the median error.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from stamp import RESULTS, hardware, stamp

from steptune.tuner.emulation import HOSTS_VARIABLE
from steptune.tuner.estimates import units_per_s
from steptune.tuner.prediction.basis import Basis, basis_of
from steptune.tuner.prediction.cluster import Cluster
from steptune.tuner.records import (
    BASELINE,
    Candidate,
    Choice,
    Environment,
    MeasureSettings,
    Purpose,
    Study,
    StudySettings,
    Topology,
    Trial,
    TrialResult,
    TrialSpec,
    TrialState,
    WorkloadFacts,
    new_id,
)
from steptune.tuner.strategies.combine import complete_choices, environment_variables
from steptune.tuner.training.compression.own_cost import OwnCost
from steptune.tuner.trials.runner import LocalRunner

WORKLOADS = {
    "sleeping": f"{Path(__file__).parent / 'workloads' / 'sleeping.py'}:Sleeping?",
    "gpt2": "zoo:gpt2?sequence=128&n_layer=4&n_embd=256&n_head=4&vocab_size=2048&n_positions=128&bos_token_id=0"
    "&eos_token_id=0&",
    "vit": "zoo:vit_large?hidden_size=256&num_hidden_layers=4&num_attention_heads=4&intermediate_size=1024"
    "&image_size=64&patch_size=8&num_labels=100&",
    "resnet": "zoo:resnet50?image_size=64&embedding_size=32&hidden_sizes=64,128,256,512&depths=2,2,2,2&num_labels=100&",
}
"""Without their batches."""
NETWORKS_VARIABLE = "STEPTUNE_HOST_NETWORKS"
BATCH = 4
"""Samples of a rank."""
PROBE_S = 6.0
OWN_COST_SIZES = (2**16, 2**18, 2**20, 2**21)
REPEATS = 7
WANTED = 0.10

DDP: dict[str, Choice] = {}
SMALL: dict[str, Choice] = {"ddp_buckets": {"bucket_cap_mb": 1}}
MIDDLE: dict[str, Choice] = {"ddp_buckets": {"bucket_cap_mb": 5}}
BF16: dict[str, Choice] = {"gradient_compression": {"method": "bf16"}}
INT8: dict[str, Choice] = {"gradient_compression": {"method": "int8"}}
TWO_LEVELS: dict[str, Choice] = {"hierarchical_allreduce": {"levels": 2}}


def fsdp(mode: str) -> dict[str, Choice]:
    return {"sharding": {"mode": mode, "wrap": "block"}}


@dataclass(frozen=True)
class Placement:
    """Ranks on hosts, and the configurations that are compared there."""

    num_ranks: int
    num_hosts: int
    configurations: dict[str, dict[str, Choice]]


ALONE = Placement(1, 1, {"alone, again": DDP})
ONE_HOST = Placement(
    2,
    1,
    {
        "DDP": DDP,
        "DDP, 1 MiB": SMALL,
        "bf16": BF16,
        "ZeRO-1": {"sharding": {"mode": "zero1"}},
        "FSDP until backward": fsdp("grad_op"),
        "FSDP full": fsdp("full"),
    },
)
PLACEMENTS = (
    ALONE,
    ONE_HOST,
    Placement(2, 2, {"DDP": DDP, "DDP, 1 MiB": SMALL, "bf16": BF16, "int8": INT8, "FSDP full": fsdp("full")}),
    Placement(4, 1, {"DDP": DDP, "DDP, 5 MiB": MIDDLE, "FSDP full": fsdp("full")}),
    Placement(
        4,
        2,
        {
            "DDP": DDP,
            "DDP, 1 MiB": SMALL,
            "bf16": BF16,
            "two levels": TWO_LEVELS,
            "two levels, bf16 between": {**TWO_LEVELS, **BF16},
            "FSDP full": fsdp("full"),
            "FSDP hybrid": fsdp("hybrid"),
        },
    ),
)


class Place:
    """A runner of one placement."""

    def __init__(self, workload: str, placement: Placement, folder: Path) -> None:
        """
        Args:
            workload: One of `WORKLOADS`.
        """
        self.placement = placement
        self.workload = f"{WORKLOADS[workload]}batch={BATCH * placement.num_ranks}"
        self.folder = folder
        self.runner = LocalRunner(workload=self.workload, directory=folder, num_ranks=placement.num_ranks, device="cpu")
        self.environment: Environment = msgspec.structs.replace(
            self.runner.describe(), num_ranks=placement.num_ranks, num_hosts=placement.num_hosts
        )
        self.facts: WorkloadFacts = self.runner.inspect()

    def topology(self) -> Topology | None:
        if self.placement.num_ranks == 1:
            return None
        return self.runner.measure_topology(self.environment.hardware, None, PROBE_S)

    def run(self, candidate: Candidate, settings: MeasureSettings, *, profile: bool = False) -> TrialResult:
        choices = complete_choices(candidate, self.facts)
        spec = TrialSpec(
            trial_id=new_id(),
            workload=self.workload,
            candidate=candidate,
            choices=choices,
            study_directory=str(self.folder),
            num_ranks=self.placement.num_ranks,
            guard=False,
            profile=profile,
            environment_variables=environment_variables(choices),
        )
        (result,) = self.runner.run([spec], [Purpose.EXPLORE], settings, new_id(), lambda progress: None)
        if result.failure is not None:
            raise SystemExit(f"{candidate.label} on {self.placement.num_ranks} ranks: {result.failure.message}")
        return result


@contextmanager
def at(workload: str, placement: Placement) -> Iterator[Place]:
    """Emulates the hosts of a placement: by networks where the command was given any, else by name only."""
    kept = {name: os.environ.get(name) for name in (HOSTS_VARIABLE, NETWORKS_VARIABLE)}
    if placement.num_hosts == 1 or not kept[NETWORKS_VARIABLE]:
        os.environ.pop(NETWORKS_VARIABLE, None)
        os.environ[HOSTS_VARIABLE] = str(placement.num_hosts)
    with tempfile.TemporaryDirectory(prefix="prediction-") as folder:
        place = Place(workload, placement, Path(folder))
        try:
            yield place
        finally:
            place.runner.close()
            for name, value in kept.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def step_ms(result: TrialResult) -> float:
    units = sum(w.num_units for w in result.clean_windows) / sum(w.num_steps for w in result.clean_windows)
    return units / units_per_s(result) * 1e3


def own_cost(method: str) -> OwnCost:
    """Time of a compression in a group of one rank, which sends nothing: a line through several sizes."""
    import torch
    import torch.distributed as dist

    from steptune.tuner.training.communication import build
    from steptune.tuner.training.compression.base import FlatCompression
    from steptune.tuner.training.compression.lane import Lane
    from steptune.tuner.training.plan import CompressionArguments

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a rank among several on few cores
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        parameter = torch.nn.Parameter(torch.zeros(1))
        arguments = CompressionArguments(method=method, rank=4, ratio=0.01, warm_up_steps=0)
        technique = build(torch.optim.SGD([parameter]), arguments, None, Lane(torch.device("cpu")))
        assert isinstance(technique, FlatCompression)
        times = []
        for size in OWN_COST_SIZES:
            flat = torch.randn(size)
            durations = []
            for _ in range(REPEATS):
                began = time.perf_counter_ns()
                technique.average(flat, dist.group.WORLD, size)
                durations.append(time.perf_counter_ns() - began)
            times.append(statistics.median(durations))
        dist.destroy_process_group()
    torch.set_num_threads(threads)
    line = statistics.linear_regression(OWN_COST_SIZES, times)
    return OwnCost(ns_per_element=max(0.0, line.slope), call_ns=max(0.0, line.intercept))


def measured_basis(
    workload: str, placement: Placement, candidate: Candidate, settings: MeasureSettings, starts: int
) -> tuple[Basis, TrialResult, Environment]:
    """A configuration, measured in several starts and profiled in the first, on ranks whose links are probed."""
    with at(workload, placement) as place:
        results = [place.run(candidate, settings, profile=not start) for start in range(starts)]
        environment = msgspec.structs.replace(place.environment, topology=place.topology())
        study = Study(
            study_id=new_id(),
            workload=place.workload,
            settings=StudySettings(),
            created_at="",
            directory="",
            facts=place.facts,
            environment=environment,
        )
        trials = [
            Trial(
                trial_id=result.trial_id,
                study_id=study.study_id,
                sequence=start + 1,
                candidate=candidate,
                purpose=Purpose.BASELINE,
                group="",
                replicate=start,
                state=TrialState.COMPLETED,
                started_at="",
                result=result,
            )
            for start, result in enumerate(results)
        ]
        own = {method: own_cost(method) for method in ("bf16", "int8")}
        return basis_of(study, trials, trials[0], own_costs=own), results[0], environment


def cluster_of(topology: Topology | None, placement: Placement) -> Cluster:
    return Cluster(
        num_hosts=placement.num_hosts,
        devices_per_host=placement.num_ranks // placement.num_hosts,
        inside=topology.inside if topology is not None else None,
        between=topology.between if topology is not None else None,
    )


def rows_of(
    workload: str, alone: Basis, sharded: Basis, placement: Placement, settings: MeasureSettings, starts: int
) -> Iterator[dict]:
    """Every configuration predicted, then measured: the mean of several starts, in turns."""
    bases = {name: sharded if takes_sharded(placement, name) else alone for name in placement.configurations}
    with at(workload, placement) as place:
        topology = place.topology()
        cluster = cluster_of(topology, placement)
        wanted = {name: Candidate(choices=choices) for name, choices in placement.configurations.items()}
        predicted = {
            name: bases[name].model.step_ns(complete_choices(candidate, place.facts), cluster) / 1e6
            for name, candidate in wanted.items()
        }
        measured: dict[str, list[float]] = {name: [] for name in wanted}
        for _, (name, candidate) in itertools.product(range(starts), wanted.items()):
            measured[name].append(step_ms(place.run(candidate, settings)))
    links = {"inside": topology.inside, "between": topology.between} if topology is not None else {}
    for name, times in measured.items():
        mean = math.exp(statistics.fmean(map(math.log, times)))
        yield {
            "workload": workload,
            "configuration": name,
            "ranks": placement.num_ranks,
            "hosts": placement.num_hosts,
            "measured_ms": round(mean, 2),
            "starts_ms": [round(value, 2) for value in times],
            "predicted_ms": round(predicted[name], 2),
            "alone_ms": round(alone.facts.step_time_ns / 1e6, 2),
            "from": f"{bases[name].facts.label} on {bases[name].facts.num_ranks}",
            "error": round(predicted[name] / mean - 1, 4),
            "links": {
                where: {
                    "bytes_per_s": round(link.bytes_per_s),
                    "latency_us": round(link.latency_ns / 1e3, 1),
                    "call_us": round(link.call_ns / 1e3, 1),
                    "residual": round(link.fit_residual, 3),
                }
                for where, link in links.items()
                if link is not None
            },
        }


def takes_sharded(placement: Placement, name: str) -> bool:
    return "FSDP" in name and (placement.num_ranks, placement.num_hosts) != (ONE_HOST.num_ranks, ONE_HOST.num_hosts)


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=3, help="of every configuration")
    parser.add_argument("--network", default="loopback", help="what links two hosts, for the record")
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=["sleeping"])
    parser.add_argument("--ranks", type=int, default=4, help="at most; on one host where a workload computes")
    parser.add_argument("--out", type=Path, default=RESULTS / "prediction.jsonl")
    arguments = parser.parse_args()
    rows = [row for workload in arguments.workload for row in written_rows(workload, arguments)]
    show(rows)


def written_rows(workload: str, arguments: argparse.Namespace) -> Iterator[dict]:
    """Every row of a workload, in the file as soon as it is measured."""
    settings = MeasureSettings(window_s=0.5, min_rounds=4, max_rounds=6, cap_s=4.0, foreign_cpu_share=1000.0)
    origin = stamp(" ".join(["python", "benchmarks/prediction.py", *sys.argv[1:]]))
    alone, result, environment = measured_basis(workload, ALONE, BASELINE, settings, arguments.starts)
    sharded, _, _ = measured_basis(workload, ONE_HOST, Candidate(choices=fsdp("full")), settings, arguments.starts)
    real_time = os.sched_getscheduler(0) in (os.SCHED_RR, os.SCHED_FIFO)
    share = statistics.median(window.foreign_cpu_share for window in result.clean_windows)
    more = {
        "network": arguments.network,
        "foreign_cpu_share": round(share, 2),
        "scheduling": "real time" if real_time else "ordinary",
        **origin,
        "hardware": hardware(environment),
    }
    most_hosts = 2 if workload == "sleeping" else 1
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("a", encoding="utf-8") as file:
        for placement in PLACEMENTS:
            if placement.num_ranks > arguments.ranks or placement.num_hosts > most_hosts:
                continue
            for row in rows_of(workload, alone, sharded, placement, settings, arguments.starts):
                print_row(row)
                file.write(json.dumps({**row, **more}) + "\n")
                file.flush()
                yield row


def print_row(row: dict) -> None:
    where = f"{row['ranks']} on {row['hosts']}"
    print(
        f"{row['workload']:9} {row['configuration']:26} {where:7} measured {row['measured_ms']:8.2f} ms  predicted "
        f"{row['predicted_ms']:8.2f} ms  {row['error']:+7.1%}",
        flush=True,
    )


def show(rows: list[dict]) -> None:
    errors = [abs(row["error"]) for row in rows if row["ranks"] > 1]
    median = statistics.median(errors)
    reached = "reached" if median <= WANTED and len(errors) >= 8 else "NOT reached"
    print(f"median error {median:.1%} of {len(errors)} configurations on several ranks, at most {max(errors):.1%}")
    print(f"wanted: at most {WANTED:.0%}: {reached}")


if __name__ == "__main__":
    main()

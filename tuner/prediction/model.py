"""Model of the step time for given choices on a given cluster, shared by all predictions of one workload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from steptune.tuner.prediction.cluster import Cluster
from steptune.tuner.prediction.data_parallel import data_parallel_tasks
from steptune.tuner.prediction.overheads import copies_ns
from steptune.tuner.prediction.sharded import sharded_tasks
from steptune.tuner.prediction.step import ComputeStep
from steptune.tuner.prediction.timeline import Lane, Task, Timeline, in_turn, simulate
from steptune.tuner.prediction.volumes import volumes_of
from steptune.tuner.records import Calibration, Choice, ModelFacts
from steptune.tuner.strategies.api import Settings
from steptune.tuner.strategies.sharding.choice import ShardingSetting
from steptune.tuner.training.compression.own_cost import OwnCost, own_costs


@dataclass(frozen=True, kw_only=True)
class Model:
    """Model of a workload's step time.

    Attributes:
        step: Work of a rank without any exchange, and without the copies that an exchange needs.
        facts: Facts about the user's model.
        contention: Share of its speed that compute loses while communication runs.
        unexplained_ns: Time that every step takes beyond the model.
        own_costs: Compute time of compressions, where measured.
        has_streams: Whether the device has streams on which FSDP communicates beside compute; on a CPU, compute waits
            for the communication.
    """

    step: ComputeStep
    facts: ModelFacts
    calibration: Calibration = field(default_factory=Calibration)
    contention: float = 0.0
    unexplained_ns: float = 0.0
    own_costs: Mapping[str, OwnCost] = field(default_factory=dict)
    has_streams: bool = True

    @property
    def alone_ns(self) -> float:
        """Time of a step without communication between ranks."""
        return self.step.total_ns + self.unexplained_ns

    def step_ns(self, choices: Mapping[str, Choice], cluster: Cluster) -> float:
        """Return the time of a step, given a choice for every strategy."""
        return self.timeline(choices, cluster).step_ns + self.unexplained_ns

    def timeline(self, choices: Mapping[str, Choice], cluster: Cluster) -> Timeline:
        if cluster.num_ranks == 1:
            return simulate([Task(lane=Lane.COMPUTE, work_ns=self.step.total_ns)])
        volumes = volumes_of(self.facts, choices, cluster.num_ranks)
        copies = copies_ns(choices, volumes, self.calibration)
        step = replace(self.step, backward_ns=self.step.backward_ns + copies)
        if Settings(choices)[ShardingSetting].is_fsdp:
            tasks = sharded_tasks(step, volumes, cluster, choices)
            return simulate(tasks if self.has_streams else in_turn(tasks), self.contention)
        costs = own_costs(self.calibration, self.own_costs)
        return simulate(data_parallel_tasks(step, volumes, cluster, choices, costs), self.contention)

"""Step time with given choices on a given cluster: what all predictions of one workload share."""

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
    """
    Attributes:
        step: What a rank does without any exchange, and without the copies that exchanging needs.
        facts: Of the user's model.
        contention: Share of its speed that compute loses while communication runs.
        unexplained_ns: What every step takes besides.
        own_costs: Of compressions, where they were measured.
        has_streams: The device has streams, by which FSDP gathers and scatters beside compute; a CPU waits for it.
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
        """Time of a step that exchanges nothing."""
        return self.step.total_ns + self.unexplained_ns

    def step_ns(self, choices: Mapping[str, Choice], cluster: Cluster) -> float:
        """Time of a step with complete choices."""
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

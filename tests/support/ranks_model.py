"""Training steps on several GPUs as a model: the modelled step of one, and the exchange as predictions simulate it.

Not a measurement. Links are those that were measured by hand on H200 (`predictions`); the tests of predictions say how
far they are to be believed. What is tested with it is what a search makes of such steps within minutes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import predictions
from gpu_model import C, Choices, Step
from msgspec.structs import replace

from steptune.tuner.costs.categories import Category
from steptune.tuner.prediction.cluster import Cluster
from steptune.tuner.prediction.model import Model
from steptune.tuner.prediction.step import UPDATE_BYTES, ComputeStep
from steptune.tuner.prediction.timeline import Timeline
from steptune.tuner.records import Choice, HardwareProfile, Link, ModelFacts, Topology, WorkloadFacts
from steptune.tuner.strategies import strategy_named

OFFLOAD_BYTES_PER_S = 25e9
MESH_FACTOR = 2.0
"""Factor by which tensor or pipeline degrees multiply a step that fits on one device."""


@dataclass(frozen=True, kw_only=True)
class RanksStep(Step):
    """
    Attributes:
        parameters: Of the model.
        current_choices: What is trained with today.
        num_ranks: One for each GPU.
        inside: Between the GPUs of a host.
        between, many_sockets: The network of a host, and with several sockets a channel.
    """

    parameters: ModelFacts
    current_choices: dict[str, Choice]
    inside: Link = predictions.NVLINK
    between: Link = predictions.SOCKETS
    many_sockets: Link = predictions.MANY_SOCKETS

    def current(self) -> dict[str, Choice]:
        return self.current_choices

    def facts(self) -> WorkloadFacts:
        facts = super().facts()
        counts = ("num_parameters", "parameter_bytes", "num_parameter_tensors")
        model = replace(facts.model, **{name: getattr(self.parameters, name) for name in counts})
        optimizer = replace(facts.optimizer, state_bytes=2 * self.parameters.parameter_bytes)
        return replace(facts, model=model, optimizer=optimizer)

    def topology(self, hardware: HardwareProfile) -> Topology:
        per_host = self.num_ranks // self.num_hosts
        return Topology(
            host_of_rank=tuple(rank // per_host for rank in range(self.num_ranks)),
            inside=self.inside if per_host > 1 else None,
            between=self.between if self.num_hosts > 1 else None,
            whole=self.between if self.num_hosts > 1 else self.inside,
            backend="nccl",
            hardware_fingerprint=hardware.fingerprint,
            measured_at="2026-11-23T10:00:00+00:00",
        )

    def times_ms(self, choices: Choices) -> dict[Category, float]:
        alone = super().times_ms(choices)
        factor = MESH_FACTOR if choices["parallel_mesh"] != strategy_named("parallel_mesh").defaults else 1.0
        alone = {category: factor * ms for category, ms in alone.items()}
        timeline = self._timeline(alone, choices)
        exposed_ms = (timeline.step_ns / 1e6 - sum(alone.values())) / choices["local_sgd"]["every"]
        if choices["sharding"]["cpu_offload"]:
            alone[C.OPTIMIZER_HOST] += 16 * self.parameters.num_parameters / OFFLOAD_BYTES_PER_S * 1e3 / self.num_ranks
        return {**alone, C.COMMUNICATION: max(0.0, exposed_ms)}

    def hidden_ms(self, choices: Choices) -> float:
        alone = super().times_ms(choices)
        timeline = self._timeline(alone, choices)
        return max(0.0, sum(timeline.work_ns.values()) - timeline.step_ns) / 1e6

    def _timeline(self, alone_ms: dict[Category, float], choices: Choices) -> Timeline:
        update_ms = alone_ms[C.OPTIMIZER] + alone_ms[C.OPTIMIZER_HOST]
        passes_ns = (sum(alone_ms.values()) - update_ms) * 1e6
        moved_ns = UPDATE_BYTES * self.parameters.num_parameters / predictions.H200.copy_bytes_per_s * 1e9
        step = ComputeStep(
            before_ns=0,
            forward_ns=passes_ns / 3,
            backward_ns=passes_ns * 2 / 3,
            optimizer_ns=update_ms * 1e6,
            divisible_ns=min(moved_ns, alone_ms[C.OPTIMIZER] * 1e6),
        )
        model = Model(step=step, facts=self.parameters, calibration=predictions.H200, contention=predictions.CONTENTION)
        return model.timeline(choices, self._cluster(choices))

    def _cluster(self, choices: Choices) -> Cluster:
        per_host = self.num_ranks // self.num_hosts
        between = self.many_sockets if choices["nccl_settings"]["sockets_per_thread"] else self.between
        return Cluster(
            num_hosts=self.num_hosts,
            devices_per_host=per_host,
            inside=self.inside if per_host > 1 else None,
            between=between if self.num_hosts > 1 else None,
        )


def on_ranks(
    step: Step, parameters: ModelFacts, *, batch: float, current: dict[str, Choice], num_ranks: int, num_hosts: int
) -> RanksStep:
    """A step of one GPU on each of several, with so many times its batch: all of its work but the update."""
    gpu_ms = {category: ms if category is C.OPTIMIZER else batch * ms for category, ms in step.gpu_ms.items()}
    same = {field.name: getattr(step, field.name) for field in fields(step)}
    changed = {"gpu_ms": gpu_ms, "num_ranks": num_ranks, "num_hosts": num_hosts}
    return RanksStep(**{**same, **changed}, parameters=parameters, current_choices=current)

"""Memory that each rank needs apart from activations, computed from how the training is sharded, not measured.

Memory can be at its peak at three moments of a step:

    at the loss            all activations, and the units that are gathered
    after the backward     all gradients, and what the last units need
    at the update          all gradients, and what the optimizer makes for a moment

beside what always stays: parameters, FP32 masters, the optimizer's states, and DDP's buckets, which hold all gradients
once more (but for `bucket_views`). ZeRO-1 has the states of its share only. FSDP2 has its share of parameters, states
and gradients, and gathers units: all of them until the backward pass, or the one that computes and those ahead of it.
While a unit is gathered it is there twice, in one buffer and as parameters; in the backward pass it has its gradients,
then those beside the buffer that is reduced, which lives until the next unit's. The root is gathered, and its gradients
are whole, to the end.

Activations do not depend on how parameters are laid out: those of one measured peak are those of every other layout
with the same micro-batch and otherwise the same choices. Copies in 16 bits that autocast keeps are among them.

Not counted: workspaces of NCCL and cuBLAS, fragmentation, buffers of the model, and which rank ZeRO-1 gives more.

Sources: Rajbhandari et al., "ZeRO" (2019), arXiv 1910.02054, section 3;
https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from steptune.tuner.records import Candidate, Choice, WorkloadFacts
from steptune.tuner.search.space import Space
from steptune.tuner.strategies.activation_checkpointing.choice import ActivationCheckpointingSetting
from steptune.tuner.strategies.activation_compression.choice import ActivationCompressionSetting
from steptune.tuner.strategies.allocator.choice import AllocatorSetting
from steptune.tuner.strategies.api import Settings
from steptune.tuner.strategies.attention_backend.choice import AttentionBackendSetting
from steptune.tuner.strategies.backend_flags.choice import BackendFlagsSetting
from steptune.tuner.strategies.compile.choice import CompileSetting
from steptune.tuner.strategies.cpu_threads.choice import CpuThreadsSetting
from steptune.tuner.strategies.data_loading.choice import DataLoadingSetting
from steptune.tuner.strategies.dataset_cache.choice import DatasetCacheSetting
from steptune.tuner.strategies.ddp_buckets.choice import DdpBucketsSetting
from steptune.tuner.strategies.device_prefetch.choice import DevicePrefetchSetting
from steptune.tuner.strategies.memory_format.choice import MemoryFormatSetting
from steptune.tuner.strategies.micro_batch.choice import MicroBatchSetting
from steptune.tuner.strategies.nccl_settings.choice import NcclSetting
from steptune.tuner.strategies.optimizer_implementation.choice import OptimizerImplementationSetting
from steptune.tuner.strategies.precision.choice import PrecisionSetting
from steptune.tuner.strategies.sharding.choice import ShardingSetting
from steptune.tuner.strategies.sharding.strategy import unit_key

LAYOUTS = frozenset(kind.strategy for kind in (ShardingSetting, DdpBucketsSetting, MicroBatchSetting))
"""Strategies that do not change the activations of a micro-batch."""
COUNTED = LAYOUTS | {
    kind.strategy
    for kind in (
        PrecisionSetting,
        OptimizerImplementationSetting,
        ActivationCheckpointingSetting,
        ActivationCompressionSetting,
        CompileSetting,
        DataLoadingSetting,
        DatasetCacheSetting,
        DevicePrefetchSetting,
        CpuThreadsSetting,
        BackendFlagsSetting,
        MemoryFormatSetting,
        AttentionBackendSetting,
        AllocatorSetting,
        NcclSetting,
    )
}
"""Strategies with a known effect on a rank's memory; candidates with any other strategy are not predicted."""
FP32, SIXTEEN_BIT = 4.0, 2.0


@dataclass(frozen=True, kw_only=True)
class Held:
    """Memory of one rank apart from activations, in bytes.

    Attributes:
        always: Bytes kept from one step to the next.
        at_loss: Additional bytes while all activations are kept.
        after_backward: Additional bytes after the backward pass has freed all activations.
        at_update: Additional bytes while the optimizer runs.
    """

    always: float
    at_loss: float
    after_backward: float
    at_update: float

    @property
    def least(self) -> float:
        """Bytes at the peak without any activations."""
        return self.always + max(self.at_loss, self.after_backward, self.at_update)

    def peak(self, activations: float) -> float:
        return max(self.least, self.always + self.at_loss + activations)

    def activations(self, peak: float) -> float | None:
        """Return the activation memory within a measured peak; None if the peak came after activations were freed."""
        return peak - self.always - self.at_loss if peak > self.least else None


@dataclass(frozen=True, kw_only=True)
class Formats:
    """Bytes per element of parameters, gradients, optimizer states and copies.

    Attributes:
        kept: Bytes of a parameter element between steps.
        computed: Bytes of a parameter element in the compute dtype.
        gradient: Bytes of a gradient element, as the backward pass makes it.
        reduced: Bytes of a gradient element, as FSDP reduces it.
        master: Bytes of an element of the FP32 master copy; 0 where the parameter itself is updated.
        states: Bytes of all optimizer states of an element together.
        copies: Bytes of an element of the 16-bit copy that autocast keeps.
    """

    kept: float
    computed: float
    gradient: float
    reduced: float
    master: float
    states: float
    copies: float = 0.0

    @property
    def updated(self) -> float:
        return self.master or self.kept


def formats_of(choices: Mapping[str, Choice], workload: WorkloadFacts) -> Formats:
    """Return the bytes per element at the precision level of these choices. Normalisation layers that stay in FP32 are
    counted like all other layers, because they are small.
    """
    elements = max(1, workload.model.num_parameters)
    own, states = workload.model.parameter_bytes / elements, workload.optimizer.state_bytes / elements
    half = SIXTEEN_BIT
    match Settings(choices)[PrecisionSetting].level:
        case "O3":
            return Formats(
                kept=half, computed=half, gradient=half, reduced=half, master=0.0, states=states * half / own
            )
        case "O2" if Settings(choices)[ShardingSetting].is_fsdp:
            return Formats(kept=own, computed=half, gradient=half, reduced=FP32, master=0.0, states=states)
        case "O2":
            return Formats(kept=half, computed=half, gradient=half, reduced=half, master=FP32, states=states)
        case level:
            copies = half if level == "O1" else 0.0
            return Formats(kept=own, computed=own, gradient=own, reduced=own, master=0.0, states=states, copies=copies)


def held(space: Space, candidate: Candidate, num_micro_batches: int = 1) -> Held | None:
    """Return the memory that a candidate needs on every rank apart from activations; None if any of its parts is
    unknown.
    """
    facts, choices = space.workload, space.complete(candidate)
    if (candidate.choices.keys() | facts.current.keys()) - COUNTED:
        return None
    if not facts.optimizer.state_bytes or Settings(choices)[OptimizerImplementationSetting].contiguous:
        return None
    if space.environment.num_ranks > 1 and Settings(choices)[ShardingSetting].is_fsdp:
        return _of_fsdp(space, choices, num_micro_batches)
    return _of_whole_parameters(space, choices, num_micro_batches)


def _of_whole_parameters(space: Space, choices: Mapping[str, Choice], num_micro_batches: int) -> Held:
    """Return the memory of layouts with whole parameters on every rank: one rank alone, DDP, and ZeRO-1."""
    formats, num_ranks = formats_of(choices, space.workload), space.environment.num_ranks
    share = 1 / num_ranks if Settings(choices)[ShardingSetting].mode == "zero1" else 1.0
    buckets = formats.gradient if num_ranks > 1 else 0.0
    gradients = 0.0 if num_ranks > 1 and Settings(choices)[DdpBucketsSetting].bucket_views else formats.gradient
    made = share * formats.updated * _made_by_update(space.workload, choices)
    # The masters' gradients are made from the model's own, which go when all are made.
    at_update = max(gradients + formats.master, formats.master + made) if formats.master else gradients + made
    elements, trained = space.workload.model.num_parameters, space.workload.model.num_trained
    return Held(
        always=elements * (formats.kept + share * formats.states) + trained * (formats.master + buckets),
        at_loss=trained * gradients if num_micro_batches > 1 else 0.0,
        after_backward=trained * gradients,
        at_update=trained * at_update,
    )


def _of_fsdp(space: Space, choices: Mapping[str, Choice], num_micro_batches: int) -> Held | None:
    choice, environment = choices[ShardingSetting.strategy], space.environment
    units = space.workload.model.shard_units.get(unit_key(choice))
    if units is None or not choice.get("reduce_each", True):
        return None
    f = formats_of(choices, space.workload)
    elements, unit, root = space.workload.model.num_parameters, units.largest, units.root
    hosts = environment.num_hosts if choice["mode"] == "hybrid" else 1
    share = hosts / environment.num_ranks
    if choice.get("cpu_offload"):
        share = 0.0  # the CPU has it, and updates it
    frees = Settings(choices)[ShardingSetting].frees
    if not unit:
        # The root alone: no unit comes after it that would free the buffer which it was gathered in.
        at_loss = 2 * root * f.computed
        last = root * max(f.computed + f.gradient, f.gradient + f.reduced)
    elif frees:
        ahead = int(choice.get("backward_prefetch") or choice["prefetch"] or 1)
        at_loss = (root + (1 + ahead) * unit) * f.computed
        last = _of_last_units(f, unit, root)
    else:
        at_loss = (elements + unit) * f.computed
        last = _of_last_units(f, unit, root)
    trained = share * space.workload.model.num_trained
    gradients = trained * f.kept
    return Held(
        always=share * elements * (f.kept + f.states),
        at_loss=at_loss + (gradients if num_micro_batches > 1 else 0.0),
        after_backward=gradients + last,
        at_update=gradients + trained * f.updated * _made_by_update(space.workload, choices),
    )


def _of_last_units(f: Formats, unit: float, root: float) -> float:
    """Return the bytes needed at the end of an FSDP backward pass: for the last unit while the root waits, or for the
    root's reduction, whichever is more.
    """
    waiting = root * (f.computed + f.gradient) + unit * (f.computed + f.gradient + f.reduced)
    return max(waiting, root * (f.gradient + f.reduced) + unit * f.reduced)


def _made_by_update(workload: WorkloadFacts, choices: Mapping[str, Choice]) -> float:
    """Return the number of temporary copies that the optimizer makes of the updated elements: one for multi-tensor
    operations, none for fused ones. A loop copies one tensor at a time, which counts as none.
    """
    implementation = (
        Settings(choices)[OptimizerImplementationSetting].implementation or workload.optimizer.implementation
    )
    return 1.0 if implementation == "foreach" else 0.0


class RankMemory:
    """Predictor of candidates' peak memory per rank, from measured peaks of candidates that distribute the training
    differently.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self._activations: dict[str, dict[float, float]] = {}
        """Largest measured activation memory, by the choices that affect activations, and by the number of samples in a
        micro-batch.
        """
        self._too_many: dict[str, dict[float, float]] = {}
        """Largest known lower bound of activation memory, from runs that ran out of memory; same keys as
        `_activations`.
        """

    def learn(self, candidate: Candidate, pieces: int, samples: float, peak_bytes: float) -> None:
        """Learn from the measured peak of a step that has `pieces` micro-batches with `samples` samples each."""
        found = held(self._space, candidate, pieces)
        activations = None if found is None else found.activations(peak_bytes)
        if activations is not None:
            self._note(candidate, samples, activations)

    def ran_out(self, candidate: Candidate, pieces: int, samples: float, capacity_bytes: float) -> None:
        """Record that `pieces` micro-batches with `samples` samples each needed more memory than the capacity."""
        found = held(self._space, candidate, pieces)
        if found is not None and found.least < capacity_bytes:
            points = self._too_many.setdefault(self._key(candidate), {})
            activations = capacity_bytes - found.always - found.at_loss
            points[samples] = max(activations, points.get(samples, 0.0))

    def look(self, samples: float, peak_bytes: float) -> None:
        """Learn from the peak of the inspection: one step of the plain model on one device, without an optimizer."""
        model = self._space.workload.model
        if peak_bytes > 2 * model.parameter_bytes:  # else it may be that of the gradients
            self._note(Candidate(), samples, peak_bytes - model.parameter_bytes)

    def least(self, candidate: Candidate, pieces: int, samples: float) -> float | None:
        """Return a lower bound of the peak memory, which includes activations only as far as they are known; None if
        nothing is known.
        """
        found = held(self._space, candidate, pieces)
        if found is None:
            return None
        fewer = [most for size, most in self._too_many.get(self._key(candidate), {}).items() if size <= samples]
        return found.peak(max(fewer, default=0.0))

    def without_activations(self, candidate: Candidate, pieces: int) -> float | None:
        """Return a candidate's peak memory without any activations; None where it is unknown."""
        found = held(self._space, candidate, pieces)
        return None if found is None else found.least

    def predict(self, candidate: Candidate, pieces: int, samples: float) -> float | None:
        """Return the predicted peak, or None while too little is known."""
        found = held(self._space, candidate, pieces)
        points = self._activations.get(self._key(candidate))
        if found is None or not points:
            return None
        copies = formats_of(self._space.complete(candidate), self._space.workload).copies
        return found.peak(_at(points, samples, copies * self._space.workload.model.num_trained))

    def _note(self, candidate: Candidate, samples: float, activations: float) -> None:
        points = self._activations.setdefault(self._key(candidate), {})
        points[samples] = max(activations, points.get(samples, 0.0))

    @staticmethod
    def _key(candidate: Candidate) -> str:
        rest = {name: choice for name, choice in candidate.choices.items() if name not in LAYOUTS}
        return Candidate(choices=rest).key


def _at(points: Mapping[float, float], samples: float, fixed: float) -> float:
    """Return the activation memory of a micro-batch of `samples` samples: as measured, or from the line through the two
    nearest measured sizes. With a single measured size, the line starts at `fixed` for zero samples.
    """
    if samples in points:
        return points[samples]
    near = sorted(points, key=lambda size: abs(size - samples))[:2]
    if len(near) == 1:
        (size,) = near
        return max(0.0, fixed + (points[size] - fixed) * samples / size)
    first, second = near
    slope = (points[second] - points[first]) / (second - first)
    return max(0.0, points[first] + slope * (samples - first))

"""Twin of a candidate: a job with the same settings, but in FP32, so that everything except the precision can be
compared in FP32.

Under 16 bits a penalty that is missing or a gradient that is 10 % too large may be no larger than rounding. Neither has
to do with the precision. So a few steps are run once more by a job of the same settings in FP32, whose gradients are
held to the reference's in FP32, at the limits of FP32. Faults that occur in 16 bits only are left to the comparison in
16 bits.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from steptune.tuner.guard.curves import Protocol
from steptune.tuner.records import Choice
from steptune.tuner.strategies.combine import make_plan
from steptune.tuner.strategies.gradient_compression.strategy import GradientCompression
from steptune.tuner.strategies.precision.choice import PrecisionSetting
from steptune.tuner.strategies.precision.strategy import Precision
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.fp32_products import without_tf32
from steptune.tuner.training.initial_state import build_initialised, named_state
from steptune.tuner.training.job import unwrapped
from steptune.tuner.training.sharding import laid_out_as
from steptune.tuner.training.tensor_file import map_tensors
from steptune.tuner.trials.disturbance import Disturbance
from steptune.tuner.trials.gradient_watch import GradientWatch, set_initial_state
from steptune.tuner.trials.guard_protocol import WatchedSteps, run_audits
from steptune.tuner.trials.study_files import StudyFiles
from steptune.tuner.trials.update_watch import sampled

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.job import TrainingJob


DISPLACEMENT = 0.02
"""Relative size of the noise that is added to copies of parameters."""
TWIN_DEVICES = ("cpu", "cuda")
TWIN_DEVICES_OF_RANKS = ("cpu",)
"""Devices on which a job of several ranks has a twin. GPUs are left out: if one rank lacked memory for its twin, the
others would wait for it.
"""


def is_in_fp32(choices: Mapping[str, Choice]) -> bool:
    return choices.get(PrecisionSetting.strategy, Precision.defaults)["level"] == Precision.defaults["level"]


def has_twin(device: torch.device, num_ranks: int) -> bool:
    """Say whether a candidate can have a twin on this device; only devices on which FP32 was tested can have one."""
    return device.type in (TWIN_DEVICES if num_ranks == 1 else TWIN_DEVICES_OF_RANKS)


def make_twin(
    job: TrainingJob, choices: Mapping[str, Choice], files: StudyFiles, *, rank: int = 0, num_ranks: int = 1
) -> TrainingJob:
    """Build a job with the same settings in FP32, without compilation or CUDA graphs. With several ranks, the job runs
    on all of them.

    Raises:
        SteptuneError: Other settings of the candidate need its precision.
    """
    compression = GradientCompression.setting.strategy  # it rounds as well
    in_full = {PrecisionSetting.strategy: Precision.defaults, compression: GradientCompression.defaults}
    plan = make_plan({**choices, **in_full})
    plan.block_compilation.clear()
    plan.whole_compilation.clear()
    plan.step.captured = False
    workload = copy.copy(job.workload)  # what it keeps of the model that it makes is the twin's
    return assemble(
        workload,
        plan,
        device=job.device,
        rank=rank,
        num_ranks=num_ranks,
        make_model=lambda: build_initialised(workload.model, files.initial_state),
        make_dataset=lambda: job.loader.dataset,
        batch_sampler=files.order(rank, num_ranks),
    )


def audit(
    twin: TrainingJob,
    files: StudyFiles,
    batches: Sequence[Any],
    protocol: Protocol,
    disturb: Disturbance | None = None,
) -> GradientWatch:
    """Run the audit steps of the guard's protocol, or one step on the first batch if it has none; each begins from the
    initial parameters. Disturb the parameters if requested, and add noise to untrained copies of parameters.
    """
    import torch

    watch = GradientWatch(twin)
    steps = WatchedSteps(twin, protocol.randomness, uncompiled=False)
    copies = _moved_copies(twin, files)

    def restart() -> None:
        set_initial_state(twin, files.initial_state, disturb)
        _set(twin, copies)

    with without_tf32(), _without_timing_convolutions():
        if protocol.num_audits:
            run_audits(steps, batches, protocol, restart, watch)
        else:
            restart()
            torch.manual_seed(protocol.seed)
            steps.step(batches[0], [watch])
    return watch


def _moved_copies(twin: TrainingJob, files: StudyFiles) -> dict[str, torch.Tensor]:
    """Return noisy values for untrained tensors that start as a copy of a parameter, such as an average of weights.

    A teacher that equals its student gives it no gradient, so that a fault in its use would not show.
    """
    import torch

    state, _ = map_tensors(files.initial_state)
    named = [(name, tensor) for name, tensor in named_state(unwrapped(twin.model)) if tensor.is_floating_point()]
    is_trained = {id(parameter) for parameter in twin.model.parameters() if parameter.requires_grad}
    looks = {name: sampled(state[name]) for name, _ in named}
    of_trained = {_content(looks[name]) for name, tensor in named if id(tensor) in is_trained}
    generator, moved = torch.Generator().manual_seed(0), {}
    for name, tensor in named:
        look = looks[name]
        is_constant = bool((look == look[:1]).all())
        if id(tensor) not in is_trained and not is_constant and _content(look) in of_trained:
            noise = torch.randn(state[name].shape, generator=generator)
            moved[name] = state[name] * (1 + DISPLACEMENT * noise).to(state[name].dtype)
    return moved


def _content(values: torch.Tensor) -> bytes:
    return values.numpy().tobytes()


def _set(twin: TrainingJob, values: Mapping[str, torch.Tensor]) -> None:
    """Set some tensors to the same values on all ranks."""
    import torch

    with torch.no_grad():
        for name, tensor in named_state(unwrapped(twin.model)):
            if name in values:
                tensor.copy_(laid_out_as(tensor, values[name]))
    twin.parameters_set()


@contextmanager
def _without_timing_convolutions() -> Iterator[None]:
    """Switch off the benchmarking of convolution algorithms while active, because it takes long if the algorithms are
    slow.
    """
    import torch

    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before

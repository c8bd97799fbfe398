"""Guard: the check that a candidate does not change the training.

Reference and candidate run one protocol from the shared initial state on stored batches, through the
same step function that is measured:

1. *Pointwise*, with dropout and stochastic depth off: the loss and the gradient norm of every step,
   and the first update (its size, and its direction on a sample of elements). Each update is replayed from the
   gradients before it (`guard/update_replay.py`).
2. *Audits*, with them off: steps that begin from the initial parameters once more. Gradients of these and of
   the pointwise steps are compared tensor by tensor (`guard/gradients.py`), and so is what a step changes beside them.
   Where precision changes, a *twin* of the candidate, in FP32, is audited as well (`trials/twin.py`), and in the first
   step every module's output is computed once more in FP32, from the inputs that it had (`trials/output_watch.py`).
3. *Draws*, with them on, for models that have any: steps from the initial parameters, on one batch. Other back ends
   draw other masks, so what is compared is how masks scatter gradients (`guard/masks.py`) and what modules set to zero
   (`guard/mask_rates.py`). On several ranks, where not every candidate can be reset, and on devices whose limits
   were not measured, a *curve* of steps that run on: its mean loss is compared as well, against the spread of reference
   runs over seeds and what rounding does to it.
4. *Horizon*, for lossy candidates: no pointwise check; the loss over a longer stretch must have
   fallen about as far as the reference's.

Tolerances are measured, not chosen (`guard/curves.py`): the reference is repeated with the same seed (which shows what
is not deterministic) and disturbed by one unit roundoff of the arithmetic that a candidate computes with (which shows
the effect of rounding on this model). A candidate may differ by `FACTOR` times that. A candidate whose update computes
its bias corrections in FP32, and no other, may also differ by the maximum effect of that. Equal bits are never
required: runs of the same settings may differ in the last bit from process to process, also on a CPU. Differences that
the reference's own settings show count as repetition, up to a bound. NaN never passes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from steptune.tuner.guard.curves import GuardReference, compared
from steptune.tuner.hardware import device_memory_bytes
from steptune.tuner.records import GuardVerdict, Scalar, TrialSpec
from steptune.tuner.strategies.compile.choice import CompileSetting
from steptune.tuner.strategies.knobs import PREFIX
from steptune.tuner.trials.coordination import Coordinator
from steptune.tuner.trials.guard_batches import check_samples, guard_batches
from steptune.tuner.trials.guard_judge import Judge
from steptune.tuner.trials.loader_check import check_loader
from steptune.tuner.trials.study_files import StudyFiles

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.job import TrainingJob


def run_guard(
    job: TrainingJob,
    files: StudyFiles,
    spec: TrialSpec,
    rank: int,
    coordinator: Coordinator,
    *,
    uncompiled: bool = False,
    on_twin: Callable[[int], None] = lambda twin_ns: None,
) -> GuardVerdict:
    """Run the protocol on a candidate's freshly built job and return the guard's verdict.

    Args:
        uncompiled: Whether the steps without dropout run compiled code uncompiled.
        on_twin: Function that is called with the nanoseconds that the candidate's twin took.
    """
    judge = Judge(_stored_reference(files), files, coordinator)
    batches = guard_batches(job, files, rank, spec.num_ranks)
    is_reference = spec.choices == judge.reference.choices
    judged = judge.judge(
        job,
        batches,
        unit_roundoff=spec.unit_roundoff,
        lossy=spec.lossy,
        is_reference=is_reference,
        uncompiled=uncompiled,
        choices=spec.choices,
    )
    on_twin(judged.twin_ns)
    reference, curve, checks = judge.reference, judged.curve, judged.checks
    if is_reference and rank == 0:
        _replace_file(files.reference, msgspec.json.encode(reference))
    if spec.checks_loader:
        checks += check_loader(job, files, spec.seed, _exact_knobs(job, reference))
    regrouped = check_samples(job)
    if regrouped is not None:
        checks.append(regrouped)
    num_audits = 0 if spec.lossy else reference.protocol.num_audits * (1 if judged.twin is None else 2)
    num_steps = len(curve.losses) + len(curve.curve_losses) + len(curve.horizon_losses) + num_audits
    return GuardVerdict(
        passed=all(check.passed for check in checks),
        num_steps=num_steps,
        checks=tuple(checks),
        losses=(*curve.losses, *curve.curve_losses, *curve.horizon_losses),
        reference_losses=(
            *reference.curve.losses,
            *reference.curve.curve_losses[: len(curve.curve_losses)],
            *(reference.curve.horizon_losses if spec.lossy else ()),
        ),
        skipped_steps=curve.skipped_steps,
        notes=judged.notes,
        compared=compared(checks, curve, max(spec.unit_roundoff, reference.own_roundoff)),
    )


def _exact_knobs(job: TrainingJob, reference: GuardReference) -> dict[str, Scalar]:
    """Return the reference's value of each workload knob that must leave the training unchanged."""
    exact = job.plan.knobs.keys() - job.workload.recipe_knobs.keys()
    return {name: reference.choices[PREFIX + name]["value"] for name in sorted(exact)}


def _stored_reference(files: StudyFiles) -> GuardReference:
    return msgspec.json.decode(files.reference.read_bytes(), type=GuardReference)


def needs_no_compilation(files: StudyFiles, spec: TrialSpec, device: torch.device) -> bool:
    """Say whether a compiled candidate may run its dropout-free steps without compilation while the check remains
    equally strict.

    With dropout off, a model is another graph, which is never measured but takes as long to compile. This is not needed
    if today's settings compile in the same way and the reference was made without compilation; the curve part runs
    compiled. With several ranks, one that runs out of memory ends all, so twice the reference's memory must be
    available.
    """
    reference = _stored_reference(files)
    ours, theirs = (choices.get(CompileSetting.strategy) for choices in (spec.choices, reference.choices))
    if not reference.eager or ours != theirs or reference.protocol.randomness != "switchable":
        return False
    return spec.num_ranks == 1 or device.type == "cpu" or 2 * reference.peak_bytes < device_memory_bytes(device)


def _replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically: another trial may read it at this moment."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_bytes(content)
    temporary.replace(path)

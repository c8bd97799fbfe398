"""The guard: is a candidate still the same training?

Reference and candidate run one protocol from the shared initial state on stored batches, through the
same step function that is measured:

1. *Pointwise*, with dropout and stochastic depth off: the loss and the gradient norm of every step,
   and the first update (its size, and its direction on a sample of elements). Each update is replayed from the
   gradients before it (`guard/update_replay.py`).
2. *Curve*, with them on, for models that have any: other back ends draw other masks, so only the mean
   loss of the following steps is compared, against the spread of reference runs over seeds and what
   rounding does to it.
3. *Audits*, with them off again: steps that begin from the initial parameters once more. Gradients of these and of
   the pointwise steps are compared tensor by tensor (`guard/gradients.py`), and so is what a step changes beside them.
4. *Horizon*, for lossy candidates: no pointwise check; the loss over a longer stretch must have
   fallen about as far as the reference's.

Tolerances are measured, not chosen (`guard/curves.py`): the reference is repeated with the same seed (what is not
deterministic shows itself) and disturbed by one unit roundoff of the arithmetic that a candidate computes with (what
rounding does to this model shows itself). A candidate may differ by `FACTOR` times that. A candidate whose update
computes its bias corrections in FP32, and no other, may also differ by what that does at most. Nobody is held to equal
bits: runs of the same settings may differ in the last one from process to process, on a CPU, too. What the reference's
own settings show is repetition, up to a bound. NaN never passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from steptune.tuner.guard.curves import Curve, GuardReference, Tolerance, compare, compared, deviations, widest
from steptune.tuner.guard.gradients import KINDS, Score, limits_of, scores, worst_of
from steptune.tuner.guard.masks import Scatter, excess_of
from steptune.tuner.guard.update_replay import LIMIT, Deviation, UpdateRule, worst_deviation
from steptune.tuner.hardware import device_memory_bytes
from steptune.tuner.records import GuardCheck, GuardVerdict, Scalar, TrialSpec
from steptune.tuner.strategies.knobs import PREFIX
from steptune.tuner.training.tensor_file import map_tensors
from steptune.tuner.trials.coordination import Coordinator
from steptune.tuner.trials.disturbance import rounds_bias_corrections
from steptune.tuner.trials.gradient_watch import (
    GradientReference,
    GradientWatch,
    set_initial_state,
    why_not_compared,
)
from steptune.tuner.trials.guard_batches import check_samples, guard_batches
from steptune.tuner.trials.guard_protocol import averaged, run_protocol
from steptune.tuner.trials.loader_check import check_loader
from steptune.tuner.trials.study_files import StudyFiles
from steptune.tuner.trials.update_watch import UpdateWatch, why_not_replayed

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.job import TrainingJob

UPDATE_DEVICES = ("cpu", "cuda")
"""Devices on which a replayed update rejects. Correct ones of `benchmarks/guard_power.py` and `guard_device.py` reach
less than half of the limit."""
GRADIENT_DEVICES = ("cpu",)
"""The same of gradients, state and masks. On an H100 gradients of correct changes reach 0.73 of their limit, and only
small trainings were measured."""


def check_update(rule: UpdateRule, watch: UpdateWatch, job: TrainingJob) -> GuardCheck:
    """Check that the candidate's parameters are where the reference's rule brings them from its gradients."""
    found = worst_deviation(rule, watch.steps, in_fp32=rounds_bias_corrections(job.optimizer))
    detail = _told(found) if found.name else ""
    return _gated("replayed update", "update", found.score, LIMIT, detail, job.device.type in UPDATE_DEVICES)


def check_gradients(
    reference: GradientReference, watch: GradientWatch, *, unit_roundoff: float, device: torch.device
) -> list[GuardCheck]:
    """Check that gradients, and what a step changes beside parameters, are the reference's to within rounding."""
    limits = limits_of(unit_roundoff)
    checks: list[GuardCheck] = []
    parts = (
        ("gradients", "gradient", reference.gradients, watch.gradients, KINDS),
        ("untrained state", "state", reference.changes, watch.changes, ("residual",)),
    )
    for name, kind, wanted, found, kinds in parts:
        if not any(wanted.steps) and not any(found):
            continue
        noise = wanted.noise_at(unit_roundoff)
        score = worst_of(scores(wanted.steps, noise, found, limits=limits, exact=reference.exact), kinds)
        gates = device.type in GRADIENT_DEVICES
        checks.append(_gated(name, kind, score.ratio, 1.0, _told_score(score, name), gates))
    return checks


def check_masks(scatter: Scatter, watch: GradientWatch, device: torch.device) -> GuardCheck:
    """Check that masks scatter gradients by as much as the reference's do."""
    excess = excess_of(scatter, watch.gradients)
    detail = (
        f"dropout and its kin scatter gradients {math.exp(excess):.2g} times as much as the reference's, allowed "
        f"{math.exp(-scatter.limit):.2g} to {math.exp(scatter.limit):.2g} times"
    )
    gates = device.type in GRADIENT_DEVICES
    return _gated("scatter of masks", "masks", abs(excess), scatter.limit, detail, gates)


def _gated(name: str, kind: str, observed: float, limit: float, detail: str, gates: bool) -> GuardCheck:
    """A check whose limit was measured on some devices, and is only shown on others."""
    note = (
        "" if gates or not detail else "; shown only, because this device's limit was not measured on large trainings"
    )
    passed = observed <= limit or not gates
    return GuardCheck(name=name, kind=kind, passed=passed, observed=observed, tolerance=limit, detail=detail + note)


def _told(found: Deviation) -> str:
    if math.isinf(found.score):
        return f"{found.name} has no finite gradient or update at step {found.step}"
    return (
        f"the update of {found.name} at step {found.step} differs from the optimizer's rule by {found.score:.2g} times "
        f"what rounding allows, allowed {LIMIT:g} (its rate by {found.rate:.2g}, its decay by {found.decay:.2g})"
    )


def _told_score(score: Score, part: str) -> str:
    if not score.step:
        return ""
    if math.isinf(score.ratio):
        return f"{score.name or part} is not finite at step {score.step}, or only one of the two trainings has it"
    what = {
        "residual": f"{score.name} differs",
        "slope": f"the size of {score.name} differs",
        "scale": "the size of all tensors together differs",
        "pooled": "all tensors together differ",
        "zeros": "elements that are zero and should not be differ",
    }[score.kind]
    return (
        f"{part}: {what} at step {score.step} by {score.ratio:.2g} of what rounding may do at most"
        f" ({score.excess:+.2g} along the reference)"
    )


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Curve and checks of one candidate.

    Attributes:
        notes: Why parts of it could not be judged.
        gradients: What was seen of them, where they were compared.
    """

    curve: Curve
    checks: list[GuardCheck]
    notes: tuple[str, ...]
    gradients: GradientWatch | None


class Judge:
    """Runs the protocol on candidates' freshly built jobs and compares them with a study's reference."""

    def __init__(self, reference: GuardReference, files: StudyFiles, coordinator: Coordinator) -> None:
        self.reference = reference
        self._files = files
        self._coordinator = coordinator
        self._update, _ = map_tensors(files.reference_update)
        self._gradients = GradientReference.load(files.reference_gradients)

    def judge(
        self,
        job: TrainingJob,
        batches: Sequence[Any],
        *,
        unit_roundoff: float,
        lossy: bool,
        is_reference: bool = False,
        uncompiled: bool = False,
    ) -> Judged:
        """
        Args:
            is_reference: The job has the reference's own settings: what it differs by is repetition.
            uncompiled: Steps without dropout run what is compiled as it is written.
        """
        protocol = self.reference.protocol
        no_replay = self.reference.why_no_rule or why_not_replayed(job)
        no_gradients = why_not_compared(job)
        if self._gradients is None:
            no_gradients = "the reference was made without them"
        update_watch = None if no_replay or lossy else UpdateWatch(job)
        gradient_watch = None if no_gradients or lossy else GradientWatch(job)
        mask_watch = GradientWatch(job) if gradient_watch is not None and protocol.num_curve else None
        curve, update = run_protocol(
            job,
            batches,
            protocol,
            seed=protocol.seed,
            horizon_seed=protocol.seed if lossy else None,
            update_watch=update_watch,
            gradient_watch=gradient_watch,
            mask_watch=mask_watch,
            restart=partial(set_initial_state, job, self._files.initial_state) if gradient_watch is not None else None,
            uncompiled=uncompiled,
        )
        curve = averaged(curve, self._coordinator)
        if is_reference and curve.finite:
            self.reference = _with_repetition(
                self.reference, deviations(curve, update, self.reference.curve, self._update)
            )
        checks = compare(
            self.reference,
            self._update,
            curve,
            update,
            unit_roundoff=unit_roundoff,
            lossy=lossy,
            rounds_bias_corrections=rounds_bias_corrections(job.optimizer),
        )
        if curve.finite and update_watch is not None and self.reference.rule is not None:
            checks.append(check_update(self.reference.rule, update_watch, job))
        if curve.finite and gradient_watch is not None and self._gradients is not None:
            checks += check_gradients(self._gradients, gradient_watch, unit_roundoff=unit_roundoff, device=job.device)
        scatter = self._gradients.scatter if self._gradients is not None else None
        if curve.finite and mask_watch is not None and scatter is not None:
            checks.append(check_masks(scatter, mask_watch, job.device))
        reasons = {"update not replayed": no_replay, "gradients not compared": no_gradients}
        notes = () if lossy else tuple(f"{part}: {reason}" for part, reason in reasons.items() if reason)
        return Judged(curve=curve, checks=checks, notes=notes, gradients=gradient_watch)


def run_guard(
    job: TrainingJob,
    files: StudyFiles,
    spec: TrialSpec,
    rank: int,
    coordinator: Coordinator,
    *,
    uncompiled: bool = False,
) -> GuardVerdict:
    """Runs the protocol on a candidate's freshly built job and compares.

    Args:
        uncompiled: Whether steps without dropout run what is compiled as it is written.
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
    )
    reference, curve, checks = judge.reference, judged.curve, judged.checks
    if is_reference and rank == 0:
        _replace_file(files.reference, msgspec.json.encode(reference))
    if spec.checks_loader:
        checks += check_loader(job, files, spec.seed, _exact_knobs(job, reference))
    regrouped = check_samples(job)
    if regrouped is not None:
        checks.append(regrouped)
    num_audits = 0 if spec.lossy else reference.protocol.num_audits
    return GuardVerdict(
        passed=all(check.passed for check in checks),
        num_steps=len(curve.losses) + len(curve.curve_losses) + len(curve.horizon_losses) + num_audits,
        checks=tuple(checks),
        losses=(*curve.losses, *curve.curve_losses, *curve.horizon_losses),
        reference_losses=(
            *reference.curve.losses,
            *reference.curve.curve_losses,
            *(reference.curve.horizon_losses if spec.lossy else ()),
        ),
        skipped_steps=curve.skipped_steps,
        notes=judged.notes,
        compared=compared(checks, curve, max(spec.unit_roundoff, reference.own_roundoff)),
    )


def _exact_knobs(job: TrainingJob, reference: GuardReference) -> dict[str, Scalar]:
    """The knobs that are to leave the training as it is, with the reference's values."""
    exact = job.plan.knobs.keys() - job.workload.recipe_knobs.keys()
    return {name: reference.choices[PREFIX + name]["value"] for name in sorted(exact)}


def _stored_reference(files: StudyFiles) -> GuardReference:
    return msgspec.json.decode(files.reference.read_bytes(), type=GuardReference)


def needs_no_compilation(files: StudyFiles, spec: TrialSpec, device: torch.device) -> bool:
    """True where the steps without dropout of a compiled candidate tell as much uncompiled.

    With its dropout off a model is another graph, which nobody measures, and compiling it takes as long as compiling
    the one that is. It is not needed where the user compiles in the same way and the reference was made without; the
    curve part runs what is compiled. Of several ranks one that runs out of memory ends all: there must be room for
    twice what the reference took.
    """
    reference = _stored_reference(files)
    ours, theirs = (choices.get("compile") for choices in (spec.choices, reference.choices))
    if not reference.eager or ours != theirs or reference.protocol.randomness != "switchable":
        return False
    return spec.num_ranks == 1 or device.type == "cpu" or 2 * reference.peak_bytes < device_memory_bytes(device)


def _with_repetition(reference: GuardReference, seen: Tolerance) -> GuardReference:
    """With what another run of the reference's own settings, in another process, differed by."""
    return msgspec.structs.replace(reference, repetition=widest([reference.repetition, seen]))


def _replace_file(path: Path, content: bytes) -> None:
    """At one stroke: another trial may read it at this moment."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_bytes(content)
    temporary.replace(path)

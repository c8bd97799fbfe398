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

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from steptune.tuner.errors import SteptuneError
from steptune.tuner.guard.averages import LIMIT as AVERAGE_LIMIT
from steptune.tuner.guard.averages import Average, worst_average
from steptune.tuner.guard.between import Moves, worst_between
from steptune.tuner.guard.curves import Curve, GuardReference, Tolerance, compare, compared, deviations, widest
from steptune.tuner.guard.gradients import KINDS, Score, limits_of, scores, worst_of
from steptune.tuner.guard.mask_rates import ModuleMasks, worst_module
from steptune.tuner.guard.masks import Scatter, excess_of, excess_of_draws, shift_of_draws
from steptune.tuner.guard.outputs import ModuleOutput, worst_output
from steptune.tuner.guard.update_replay import LIMIT, Deviation, UpdateRule, worst_deviation
from steptune.tuner.hardware import device_memory_bytes
from steptune.tuner.records import Choice, GuardCheck, GuardVerdict, Scalar, TrialSpec
from steptune.tuner.strategies.compile.choice import CompileSetting
from steptune.tuner.strategies.knobs import PREFIX
from steptune.tuner.training.tensor_file import map_tensors
from steptune.tuner.trials.coordination import Coordinator
from steptune.tuner.trials.disturbance import FP32_ROUNDOFF, rounds_bias_corrections
from steptune.tuner.trials.failures import is_out_of_memory
from steptune.tuner.trials.gradient_watch import (
    GradientReference,
    GradientWatch,
    set_initial_state,
    why_not_compared,
)
from steptune.tuner.trials.guard_batches import check_samples, guard_batches
from steptune.tuner.trials.guard_protocol import averaged, run_protocol, seeds_of_draws
from steptune.tuner.trials.loader_check import check_loader
from steptune.tuner.trials.mask_watch import MaskWatch, why_not_counted
from steptune.tuner.trials.output_watch import OutputWatch
from steptune.tuner.trials.study_files import StudyFiles
from steptune.tuner.trials.twin import audit, has_twin, is_in_fp32, make_twin
from steptune.tuner.trials.update_watch import UpdateWatch, watch_of_updates, why_not_replayed

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.job import TrainingJob

UPDATE_DEVICES = ("cpu", "cuda")
"""Devices on which the check of a replayed update may reject a candidate. Correct updates of
`benchmarks/guard_power.py` and `guard_device.py` reach less than half of the limit.
"""
OWN_UPDATE_DEVICES = ("cpu",)
"""Devices on which the check of a replayed update may reject a candidate, if the workload defines the step itself."""
COARSE_GRADIENT_DEVICES = ("cpu",)
"""Devices on which the check of 16-bit or TF32 gradients may reject a candidate. A difference that no rounding explains
(a gradient that is not finite, or that only one training has) may be rejected on all of `GUARDED_DEVICES`. On an H100,
correct changes of small trainings reach 0.73 of the limits, and correct changes of GPT-2 in bfloat16 reach three times
the limit on a tensor's size.
"""
OUTPUT_DEVICES = ("cpu",)
"""Devices on which the check of modules' 16-bit outputs may reject a candidate."""
GUARDED_DEVICES = ("cpu", "cuda")
"""Devices on which all other checks may reject a candidate: gradients in FP32, state, averages, and masks."""


def check_update(rules: Sequence[UpdateRule], watch: UpdateWatch, job: TrainingJob) -> GuardCheck:
    """Check that the candidate's updates follow the reference's rules, applied to the candidate's own gradients."""
    in_fp32 = rounds_bias_corrections(job.optimizer)
    tracks = [track.steps for track in watch.tracks]
    if len(tracks) != len(rules):
        found = Deviation(score=math.inf, step=1, name=f"one of {max(len(tracks), len(rules))} optimizers")
    else:
        deviations = [worst_deviation(rule, steps, in_fp32=in_fp32) for rule, steps in zip(rules, tracks, strict=True)]
        found = max(deviations, key=lambda deviation: deviation.score)
    detail = told_deviation(found) if found.name else ""
    devices = OWN_UPDATE_DEVICES if job.workload.has_custom_step else UPDATE_DEVICES
    return gated("replayed update", "update", found.score, LIMIT, detail, job.device.type in devices)


def check_between(moves: Moves, watch: UpdateWatch, device: torch.device) -> list[GuardCheck]:
    """Check that parameters change between updates exactly where they do so with today's settings. Return no check if
    today's settings change them and nothing differs, because the changes themselves are not compared.
    """
    found = worst_between(watch.around, moves)
    if moves.ever and not found.name:
        return []
    gates = device.type in OWN_UPDATE_DEVICES
    return [gated("weights between updates", "update", found.score, LIMIT, found.detail, gates)]


def check_gradients(
    reference: GradientReference,
    watch: GradientWatch,
    *,
    unit_roundoff: float,
    device: torch.device,
    has_twin: bool,
    has_right_updates: bool,
) -> list[GuardCheck]:
    """Check that gradients, and other changes that a step makes, equal the reference's to within rounding.

    Args:
        has_twin: Whether gradients are compared in FP32 as well.
        has_right_updates: Whether the replay showed that the updates follow from the gradients.
    """
    limits = limits_of(unit_roundoff)
    checks: list[GuardCheck] = []
    parts = (
        ("gradients", "gradient", reference.gradients, watch.gradients, KINDS, has_twin),
        ("untrained state", "state", reference.changes, watch.changes, ("residual",), False),
    )
    for name, kind, wanted, found, kinds, twinned in parts:
        if not any(wanted.steps) and not any(found):
            continue
        is_far = kind == "gradient" and has_right_updates
        noise = reference.noise_of(watch, unit_roundoff) if is_far else wanted.noise_at(unit_roundoff)
        seen = scores(
            wanted.steps,
            noise,
            found,
            limits=limits,
            exact=reference.exact,
            has_twin=twinned,
            may_turn=kind == "gradient",
        )
        score = worst_of(seen, kinds)
        gates = device.type in devices_of(kind, score, unit_roundoff)
        checks.append(gated(name, kind, score.ratio, 1.0, told_score(score, name), gates))
    return checks


def devices_of(kind: str, score: Score, unit_roundoff: float) -> tuple[str, ...]:
    """Return the devices on which a comparison of tensors may reject candidates."""
    is_coarse = kind == "gradient" and unit_roundoff > FP32_ROUNDOFF and math.isfinite(score.ratio)
    return COARSE_GRADIENT_DEVICES if is_coarse else GUARDED_DEVICES


def check_twin(reference: GradientReference, watch: GradientWatch, device: torch.device) -> GuardCheck:
    """Check that the gradients of a candidate's twin equal the reference's to within the rounding of FP32."""
    found = scores(
        reference.wide.steps,
        reference.wide.noise_at(FP32_ROUNDOFF),
        watch.gradients,
        limits=limits_of(FP32_ROUNDOFF),
        exact=range(len(reference.wide.steps)),
    )
    score, name = worst_of(found, KINDS), "gradients in FP32"
    return gated(name, "twin", score.ratio, 1.0, told_score(score, name), device.type in GUARDED_DEVICES)


def check_outputs(watch: OutputWatch, device: torch.device) -> list[GuardCheck]:
    """Check that modules' 16-bit outputs equal FP32 outputs for the same inputs; return no check without 16-bit
    outputs.
    """
    found = worst_output(output for output in watch.outputs.values() if output is not None)
    if found is None:
        return []
    return [output_check(found, gates=device.type in OUTPUT_DEVICES)]


def output_check(found: ModuleOutput, *, gates: bool) -> GuardCheck:
    """Return the check of the module output with the largest deviation."""
    detail = (
        f"the output of {found.name} differs from the FP32 output for the same inputs by {found.difference:.2g} "
        f"unit roundoffs, and in size by {found.size:+.2g} unit roundoffs"
    )
    return gated("outputs of modules", "output", found.ratio, 1.0, detail, gates)


def check_averages(averages: Sequence[Average], watch: GradientWatch, device: torch.device) -> list[GuardCheck]:
    """Check that buffers that average weights use the reference's shares; return no check without such averages."""
    if not averages:
        return []
    found = worst_average(averages, watch.states)
    detail = (
        f"the average {found.name} takes {found.share:.3g} of the new weight at step {found.step}, but the "
        f"reference's average takes {found.wanted:.3g}"
    )
    gates = device.type in GUARDED_DEVICES
    return [gated("averages", "average", found.score, AVERAGE_LIMIT, detail, gates)]


def check_draws(
    reference: GradientReference, scatter: Scatter, watch: GradientWatch, *, unit_roundoff: float, device: torch.device
) -> list[GuardCheck]:
    """Check that the masks spread the gradients as much as the reference's masks do, and around the same mean."""
    rounding = reference.gradients.noise_at(unit_roundoff)[0].residuals
    excess = excess_of_draws(scatter, watch.gradients, rounding)
    shift = shift_of_draws(scatter, watch.gradients, rounding)
    gates = device.type in GUARDED_DEVICES
    detail = (
        f"the mean gradient over {len(watch.gradients)} draws of masks is {shift:.2g} standard errors from the "
        f"reference's, allowed {scatter.shift_limit:.2g}"
    )
    return [
        gated("scatter of masks", "masks", abs(excess), scatter.limit, _told_excess(excess, scatter), gates),
        gated("mean over masks", "masks", shift, scatter.shift_limit, detail, gates),
    ]


def check_rates(masks: Mapping[str, ModuleMasks], watch: MaskWatch, device: torch.device) -> list[GuardCheck]:
    """Check that modules mask at the reference's rates; return no check if no module of the reference masks."""
    found = worst_module(masks, watch.modules)
    if found is None:
        return []
    return [gated("rate of masks", "mask rate", found.ratio, 1.0, found.detail, device.type in GUARDED_DEVICES)]


def check_masks(
    scatter: Scatter, watch: GradientWatch, rounding: Mapping[str, float], device: torch.device
) -> GuardCheck:
    """Check that the masks spread the gradients as much as the reference's masks do.

    Args:
        rounding: Norm of the rounding effect on each tensor at one step.
    """
    excess = excess_of(scatter, watch.gradients, rounding)
    gates = device.type in GUARDED_DEVICES
    return gated("scatter of masks", "masks", abs(excess), scatter.limit, _told_excess(excess, scatter), gates)


def _told_excess(excess: float, scatter: Scatter) -> str:
    return (
        f"dropout and similar operations scatter gradients {math.exp(excess):.2g} times as much as in the "
        f"reference, allowed {math.exp(-scatter.limit):.2g} to {math.exp(scatter.limit):.2g} times"
    )


def gated(name: str, kind: str, observed: float, limit: float, detail: str, gates: bool) -> GuardCheck:
    """Return a check that rejects only on devices for which its limit was measured; on other devices it is only
    reported.
    """
    note = "" if gates or not detail else "; not enforced, because the limit was not measured on this device"
    passed = observed <= limit or not gates
    return GuardCheck(name=name, kind=kind, passed=passed, observed=observed, tolerance=limit, detail=detail + note)


def told_deviation(found: Deviation) -> str:
    """Describe the deviation of an update from its rule."""
    if math.isinf(found.score):
        return (
            f"{found.name} has no finite update at step {found.step}, or is updated at different steps than in the "
            "reference"
        )
    return (
        f"the update of {found.name} at step {found.step} differs from the optimizer's rule by {found.score:.2g} "
        f"times the expected rounding error, allowed {LIMIT:g} times (its rate by {found.rate:.2g}, its decay by "
        f"{found.decay:.2g})"
    )


def told_score(score: Score, part: str) -> str:
    """Describe the deviation of tensors from the reference's."""
    if not score.step:
        return ""
    if math.isinf(score.ratio):
        return f"{score.name or part} is not finite at step {score.step}, or exists in only one of the two trainings"
    what = {
        "residual": f"{score.name} differs",
        "slope": f"the size of {score.name} differs",
        "scale": "the size of all tensors together differs",
        "pooled": "all tensors together differ",
        "zeros": "elements that must not be zero differ",
    }[score.kind]
    return (
        f"{part}: {what} at step {score.step} by {score.ratio:.2g} times the largest allowed rounding difference "
        f"(relative difference in size {score.excess:+.2g})"
    )


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Curve and checks of one candidate.

    Attributes:
        notes: Reasons for which parts of the candidate could not be judged.
        gradients: Recorded gradients; None where they were not compared.
        twin: Recorded gradients of the candidate's twin; None without a twin.
        twin_ns: Time that the twin took, which does not count as the candidate's.
    """

    curve: Curve
    checks: list[GuardCheck]
    notes: tuple[str, ...]
    gradients: GradientWatch | None
    twin: GradientWatch | None
    twin_ns: int


class Judge:
    """Comparison of candidates' freshly built jobs with a study's reference, by the guard's protocol."""

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
        choices: Mapping[str, Choice] | None = None,
    ) -> Judged:
        """Run the protocol on a candidate's job and return its curve and checks.

        Args:
            choices: The candidate's settings, of which its twin is made; without them there is none.
            unit_roundoff: Unit roundoff of the candidate's arithmetic; the reference's is used where that is coarser.
            is_reference: True if the job has the reference's own settings, so that differences count as repetition.
            uncompiled: True to run compiled code uncompiled in the steps without dropout.
        """
        unit_roundoff = max(unit_roundoff, self.reference.own_roundoff)
        protocol = self.reference.protocol
        no_replay = self.reference.why_no_rule or why_not_replayed(job)
        no_gradients = why_not_compared(job)
        if self._gradients is None:
            no_gradients = "the reference has no gradients to compare with"
        update_watch = None if no_replay or lossy else watch_of_updates(job)
        gradient_watch = None if no_gradients or lossy else GradientWatch(job)
        draws = seeds_of_draws(protocol, of_reference=False)
        mask_watch = GradientWatch(job) if gradient_watch is not None and (protocol.num_curve or draws) else None
        changes_precision = choices is not None and self._changes_precision(choices, unit_roundoff)
        no_outputs = why_not_counted(job) if changes_precision else None
        watches_outputs = gradient_watch is not None and changes_precision and not no_outputs
        output_watch = OutputWatch(job) if watches_outputs else None
        rate_watch = MaskWatch(job) if mask_watch is not None and draws and not why_not_counted(job) else None
        curve, update = run_protocol(
            job,
            batches,
            protocol,
            seed=protocol.seed,
            horizon_seed=protocol.seed if lossy else None,
            watches=[watch for watch in (update_watch, output_watch) if watch is not None],
            gradient_watch=gradient_watch,
            mask_watch=mask_watch,
            rate_watch=rate_watch,
            restart=partial(set_initial_state, job, self._files.initial_state) if gradient_watch is not None else None,
            draws=draws,
            uncompiled=uncompiled,
        )
        curve = averaged(curve, self._coordinator)
        if is_reference and curve.finite:
            repeated = msgspec.structs.replace(curve, curve_losses=()) if draws else curve  # other masks than its
            self.reference = _with_repetition(
                self.reference, deviations(repeated, update, self.reference.curve, self._update)
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
        update_checks = self._check_updates(update_watch, job) if curve.finite and update_watch is not None else []
        checks += update_checks
        twin, no_twin, twin_ns = None, "", 0
        if curve.finite and gradient_watch is not None and self._gradients is not None:
            if choices is not None and changes_precision:
                began = time.monotonic_ns()
                twin, no_twin = self._audited_twin(job, choices, batches)
                twin_ns = time.monotonic_ns() - began
            checks += check_gradients(
                self._gradients,
                gradient_watch,
                unit_roundoff=unit_roundoff,
                device=job.device,
                has_twin=twin is not None,
                has_right_updates=self._have_right_updates(update_checks),
            )
            checks += check_averages(self.reference.averages, gradient_watch, job.device)
            if twin is not None:
                checks.append(check_twin(self._gradients, twin, job.device))
            if mask_watch is not None:
                checks += self._check_masks(self._gradients, mask_watch, unit_roundoff, job.device)
            if output_watch is not None:
                checks += check_outputs(output_watch, job.device)
            if rate_watch is not None:
                checks += check_rates(self.reference.masks, rate_watch, job.device)
        reasons = {
            "update not replayed": no_replay,
            "gradients not compared": no_gradients,
            "gradients not compared in FP32": no_twin,
            "outputs not compared": no_outputs,
        }
        notes = () if lossy else tuple(f"{part}: {reason}" for part, reason in reasons.items() if reason)
        return Judged(curve=curve, checks=checks, notes=notes, gradients=gradient_watch, twin=twin, twin_ns=twin_ns)

    def _check_updates(self, watch: UpdateWatch, job: TrainingJob) -> list[GuardCheck]:
        reference = self.reference
        if reference.rule is None:
            return []
        between = [] if reference.moves is None else check_between(reference.moves, watch, job.device)
        return [check_update((reference.rule, *reference.further_rules), watch, job), *between]

    def _have_right_updates(self, checks: Sequence[GuardCheck]) -> bool:
        """Say whether only correct updates can have moved the candidate's weights away from the reference's."""
        are_moved = self.reference.moves is not None and bool(self.reference.moves.ever)
        return bool(checks) and not are_moved and all(check.observed <= check.tolerance for check in checks)

    def _check_masks(
        self, reference: GradientReference, watch: GradientWatch, unit_roundoff: float, device: torch.device
    ) -> list[GuardCheck]:
        scatter = reference.scatter
        if scatter is None:
            return []
        if self.reference.protocol.num_draws:
            return check_draws(reference, scatter, watch, unit_roundoff=unit_roundoff, device=device)
        before = reference.gradients.noise_at(unit_roundoff)[self.reference.protocol.num_pointwise - 1]
        return [check_masks(scatter, watch, before.residuals, device)]

    def _changes_precision(self, choices: Mapping[str, Choice], unit_roundoff: float) -> bool:
        """Say whether a twin adds information: if candidate and reference compute in FP32, FP32 gradients were already
        compared.
        """
        in_fp32 = is_in_fp32(choices) and is_in_fp32(self.reference.choices)
        return not in_fp32 or unit_roundoff > FP32_ROUNDOFF  # by TF32

    def _audited_twin(
        self, job: TrainingJob, choices: Mapping[str, Choice], batches: Sequence[Any]
    ) -> tuple[GradientWatch | None, str]:
        """Audit the twin. Return None and the reason if there is no twin, or if other settings need the candidate's
        precision.
        """
        rank, num_ranks = self._coordinator.rank, self._coordinator.num_ranks
        if not has_twin(job.device, num_ranks):
            return None, "on GPUs this comparison requires a single rank"
        if self._gradients is None or not self._gradients.wide.steps:
            return None, "the reference has no FP32 gradients, for lack of time or memory"
        try:
            twin = make_twin(job, choices, self._files, rank=rank, num_ranks=num_ranks)
            return audit(twin, self._files, batches, self.reference.protocol), ""
        except SteptuneError as error:
            return None, str(error)
        except (MemoryError, RuntimeError) as error:
            if num_ranks > 1 or not is_out_of_memory(error):
                raise  # the other ranks wait for this one
            return None, "memory is too small for a second training next to the candidate"


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
    """Return the knobs that must not change the training, with the reference's values."""
    exact = job.plan.knobs.keys() - job.workload.recipe_knobs.keys()
    return {name: reference.choices[PREFIX + name]["value"] for name in sorted(exact)}


def _stored_reference(files: StudyFiles) -> GuardReference:
    return msgspec.json.decode(files.reference.read_bytes(), type=GuardReference)


def needs_no_compilation(files: StudyFiles, spec: TrialSpec, device: torch.device) -> bool:
    """Say whether a compiled candidate's steps without dropout can run uncompiled without making the check weaker.

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


def _with_repetition(reference: GuardReference, seen: Tolerance) -> GuardReference:
    """Widen the reference's tolerance to the deviation of another process's run of the same settings, if that is
    larger.
    """
    return msgspec.structs.replace(reference, repetition=widest([reference.repetition, seen]))


def _replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically: another trial may read it at this moment."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_bytes(content)
    temporary.replace(path)

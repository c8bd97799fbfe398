"""Comparison of a candidate's job with the reference by the guard's protocol."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from steptune.tuner.errors import SteptuneError
from steptune.tuner.guard.curves import Curve, GuardReference, compare, deviations, widest
from steptune.tuner.records import Choice, GuardCheck
from steptune.tuner.training.tensor_file import map_tensors
from steptune.tuner.trials.coordination import Coordinator
from steptune.tuner.trials.disturbance import FP32_ROUNDOFF, rounds_bias_corrections
from steptune.tuner.trials.failures import is_out_of_memory
from steptune.tuner.trials.gradient_watch import GradientReference, GradientWatch, set_initial_state, why_not_compared
from steptune.tuner.trials.guard_checks import (
    check_averages,
    check_between,
    check_draws,
    check_gradients,
    check_masks,
    check_outputs,
    check_rates,
    check_twin,
    check_update,
)
from steptune.tuner.trials.guard_protocol import averaged, run_protocol, seeds_of_draws
from steptune.tuner.trials.mask_watch import MaskWatch, why_not_counted
from steptune.tuner.trials.output_watch import OutputWatch
from steptune.tuner.trials.study_files import StudyFiles
from steptune.tuner.trials.twin import audit, has_twin, is_in_fp32, make_twin
from steptune.tuner.trials.update_watch import UpdateWatch, watch_of_updates, why_not_replayed

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.job import TrainingJob


NO_TWIN = "gradients not compared in FP32"


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Loss curve and checks of one candidate.

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


@dataclass(frozen=True, kw_only=True)
class _Watches:
    """Recorders of one run of the protocol; None for parts that are not compared.

    Attributes:
        missing: Reasons for which parts are not compared, by part.
    """

    update: UpdateWatch | None
    gradients: GradientWatch | None
    masks: GradientWatch | None
    outputs: OutputWatch | None
    rates: MaskWatch | None
    missing: Mapping[str, str | None]


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
        """Run the protocol on a candidate's job, and return the loss curve and the checks.

        Args:
            choices: The candidate's settings, of which its twin is made; without them there is none.
            unit_roundoff: Unit roundoff of the candidate's arithmetic; the reference's is used where that is coarser.
            is_reference: True if the job has the reference's own settings, so that differences count as repetition.
            uncompiled: True to run compiled code uncompiled in the steps without dropout.
        """
        unit_roundoff = max(unit_roundoff, self.reference.own_roundoff)
        changes_precision = choices is not None and self._changes_precision(choices, unit_roundoff)
        watches = self._watches(job, lossy=lossy, changes_precision=changes_precision)
        curve, update = self._run(job, batches, watches, lossy=lossy, uncompiled=uncompiled)
        if is_reference and curve.finite:
            self._count_as_repetition(curve, update)
        checks = compare(
            self.reference,
            self._update,
            curve,
            update,
            unit_roundoff=unit_roundoff,
            lossy=lossy,
            rounds_bias_corrections=rounds_bias_corrections(job.optimizer),
        )
        update_checks = self._check_updates(watches.update, job) if curve.finite and watches.update is not None else []
        checks += update_checks
        twin, no_twin, twin_ns = None, "", 0
        if curve.finite and watches.gradients is not None and self._gradients is not None:
            if choices is not None and changes_precision:
                began = time.monotonic_ns()
                twin, no_twin = self._audited_twin(job, choices, batches)
                twin_ns = time.monotonic_ns() - began
            checks += check_gradients(
                self._gradients,
                watches.gradients,
                unit_roundoff=unit_roundoff,
                device=job.device,
                has_twin=twin is not None,
                has_right_updates=self._have_right_updates(update_checks),
            )
            checks += check_averages(self.reference.averages, watches.gradients, job.device)
            if twin is not None:
                checks.append(check_twin(self._gradients, twin, job.device))
            if watches.masks is not None:
                checks += self._check_masks(self._gradients, watches.masks, unit_roundoff, job.device)
            if watches.outputs is not None:
                checks += check_outputs(watches.outputs, job.device)
            if watches.rates is not None:
                checks += check_rates(self.reference.masks, watches.rates, job.device)
        reasons = {**watches.missing, NO_TWIN: no_twin}
        notes = () if lossy else tuple(f"{part}: {reason}" for part, reason in reasons.items() if reason)
        return Judged(curve=curve, checks=checks, notes=notes, gradients=watches.gradients, twin=twin, twin_ns=twin_ns)

    def _watches(self, job: TrainingJob, *, lossy: bool, changes_precision: bool) -> _Watches:
        """Return the recorders of everything that can be compared, and the reasons why the rest cannot be compared."""
        protocol = self.reference.protocol
        no_replay = self.reference.why_no_rule or why_not_replayed(job)
        no_gradients = "the reference has no gradients to compare with" if self._gradients is None else None
        no_gradients = no_gradients or why_not_compared(job)
        no_outputs = why_not_counted(job) if changes_precision else None
        update = None if no_replay or lossy else watch_of_updates(job)
        gradients = None if no_gradients or lossy else GradientWatch(job)
        draws = seeds_of_draws(protocol, of_reference=False)
        masks = GradientWatch(job) if gradients is not None and (protocol.num_curve or draws) else None
        return _Watches(
            update=update,
            gradients=gradients,
            masks=masks,
            outputs=OutputWatch(job) if gradients is not None and changes_precision and not no_outputs else None,
            rates=MaskWatch(job) if masks is not None and draws and not why_not_counted(job) else None,
            missing={
                "update not replayed": no_replay,
                "gradients not compared": no_gradients,
                NO_TWIN: None,
                "outputs not compared": no_outputs,
            },
        )

    def _run(
        self, job: TrainingJob, batches: Sequence[Any], watches: _Watches, *, lossy: bool, uncompiled: bool
    ) -> tuple[Curve, dict[str, torch.Tensor]]:
        protocol = self.reference.protocol
        curve, update = run_protocol(
            job,
            batches,
            protocol,
            seed=protocol.seed,
            horizon_seed=protocol.seed if lossy else None,
            watches=[watch for watch in (watches.update, watches.outputs) if watch is not None],
            gradient_watch=watches.gradients,
            mask_watch=watches.masks,
            rate_watch=watches.rates,
            restart=None if watches.gradients is None else partial(set_initial_state, job, self._files.initial_state),
            draws=seeds_of_draws(protocol, of_reference=False),
            uncompiled=uncompiled,
        )
        return averaged(curve, self._coordinator), update

    def _count_as_repetition(self, curve: Curve, update: dict[str, torch.Tensor]) -> None:
        """Widen the reference's tolerance if another run of the same settings deviates more."""
        if self.reference.protocol.num_draws:
            curve = msgspec.structs.replace(curve, curve_losses=())  # other masks than the reference's
        seen = deviations(curve, update, self.reference.curve, self._update)
        repetition = widest([self.reference.repetition, seen])
        self.reference = msgspec.structs.replace(self.reference, repetition=repetition)

    def _check_updates(self, watch: UpdateWatch, job: TrainingJob) -> list[GuardCheck]:
        reference = self.reference
        if reference.rule is None:
            return []
        between = [] if reference.moves is None else check_between(reference.moves, watch, job.device)
        return [check_update((reference.rule, *reference.further_rules), watch, job), *between]

    def _have_right_updates(self, checks: Sequence[GuardCheck]) -> bool:
        """Say whether the candidate's weights can differ from the reference's only as a result of correct updates."""
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
        """Say whether a twin (the same training in FP32) adds information: if candidate and reference both compute in
        FP32, their gradients in FP32 were already compared.
        """
        in_fp32 = is_in_fp32(choices) and is_in_fp32(self.reference.choices)
        return not in_fp32 or unit_roundoff > FP32_ROUNDOFF  # by TF32

    def _audited_twin(
        self, job: TrainingJob, choices: Mapping[str, Choice], batches: Sequence[Any]
    ) -> tuple[GradientWatch | None, str]:
        """Audit the twin (the candidate's training in FP32). Return None and the reason if there is no twin, or if one
        of the candidate's other settings requires the candidate's own precision.
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
            return None, "there is not enough memory for a second training next to the candidate's"

"""Creation of the guard's reference: the unchanged workload, run several times from its initial state.

It runs on as many ranks as the study has, each on its part of the guard's batches: statistics over a batch, and the
mean over a batch that ranks cannot share evenly, are not what one process would compute. Gradients are reduced by plain
DDP, however the current configuration shares or compresses them: that rounds, and candidates are held to what rounding
does.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from steptune.tuner.guard.averages import find_averages
from steptune.tuner.guard.between import Moves, joined, moves_of
from steptune.tuner.guard.curves import (
    Curve,
    GuardReference,
    Protocol,
    Tolerance,
    deviations,
    last_quarter,
    widened,
    widest,
)
from steptune.tuner.guard.gradients import measure_noise
from steptune.tuner.guard.mask_rates import ModuleMasks
from steptune.tuner.guard.masks import Scatter, measure_draws, measure_scatter
from steptune.tuner.guard.update_replay import LIMIT, UpdateRule, worst_deviation
from steptune.tuner.records import Choice, Record
from steptune.tuner.strategies.combine import make_plan
from steptune.tuner.strategies.compile.choice import CompileSetting
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.initial_state import build_initialised
from steptune.tuner.training.job import TrainingJob, unwrapped
from steptune.tuner.training.plan import Plan, WrapArguments
from steptune.tuner.training.sharding import holder_of_states
from steptune.tuner.training.tensor_file import save_tensors
from steptune.tuner.trials.coordination import Coordinator
from steptune.tuner.trials.disturbance import (
    FP32_ROUNDOFF,
    Disturbance,
    corrects_biases,
    of_bias_corrections,
    rounds_bias_corrections,
)
from steptune.tuner.trials.failures import is_out_of_memory
from steptune.tuner.trials.gradient_watch import (
    Compared,
    GradientReference,
    GradientWatch,
    set_initial_state,
    why_not_compared,
)
from steptune.tuner.trials.guard_protocol import averaged, run_protocol, seeds_of_draws
from steptune.tuner.trials.mask_watch import MaskWatch, why_not_counted
from steptune.tuner.trials.memory import limit_host_memory
from steptune.tuner.trials.messages import Channel, TaskProgress
from steptune.tuner.trials.rank_device import rank_device
from steptune.tuner.trials.study_files import StudyFiles
from steptune.tuner.trials.twin import audit, has_twin, is_in_fp32, make_twin
from steptune.tuner.trials.update_watch import OtherOptimizers, UpdateWatch, watch_of_updates, why_not_replayed
from steptune.tuner.workloads.loading import load_workload
from steptune.tuner.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

NUM_SEEDS = 4
NUM_DRAWS = 7
"""Number of steps that draw random masks (of dropout and similar modules), for a candidate that can be reset to the
initial parameters.
"""
NUM_HORIZON_RUNS = 3


class ReferenceRequest(Record):
    """Request of the parent to make the guard's reference."""

    workload: str
    study_directory: str
    choices: dict[str, Choice]
    device: str
    protocol: Protocol
    unit_roundoffs: tuple[float, ...]
    """Unit roundoffs of the arithmetics that the candidates may use."""
    bias_corrections: bool = False
    """True if candidates may compute the update's bias corrections in FP32."""
    eager: bool = False
    """True to run the reference uncompiled: the tolerances of candidates cover the different rounding of compiled code,
    and disturbed runs would otherwise compile the model again each time.
    """
    memory_limit_bytes: int | None = None
    environment_variables: dict[str, str] = {}  # noqa: RUF012 (a struct copies its defaults)
    own_roundoff: float = 0.0
    """Unit roundoff of the arithmetic of the reference's own configuration (`choices`)."""
    twin_s: float | None = None
    """Maximum seconds for all runs of the reference's twin (the same training in FP32) together; None without a limit.
    """
    run_id: str = ""
    """Name of the rendezvous folder of this run's ranks, if there are several; unique to the run."""


def make_reference(request: ReferenceRequest, rank: int, num_ranks: int, channel: Channel) -> GuardReference:
    """Run the protocol on the reference configuration and write the results that candidates are compared with.

    Runs: once, with draws of masks where the model is random; once more with the same seed; disturbed by each unit
    roundoff, and in the update's bias corrections where candidates may round them; the audits by its twin, where it
    does not compute in FP32 itself; on several ranks over further seeds, in place of the draws. Where lossy candidates
    are allowed, separate runs continue over the longer horizon, the first of them undisturbed. Every rank has the same
    result; rank 0 writes it.
    """
    files = StudyFiles(Path(request.study_directory))
    limit_host_memory(request.memory_limit_bytes, request.device)
    workload = load_workload(request.workload)
    workload.directory = files.data
    device = rank_device(request.device, rank, request.memory_limit_bytes)
    coordinator = Coordinator(rank, num_ranks, channel, files.trial_directory(request.run_id), device)
    plan = reference_plan(request.choices, eager=request.eager)
    job = _build(workload, plan, files, device, rank, num_ranks)
    if draws_masks(num_ranks):
        request = msgspec.structs.replace(request, protocol=with_draws(request.protocol))
    runs = _Runs(job, files, request, coordinator)
    no_rule = why_not_replayed(job) or ""
    watch = None if no_rule else watch_of_updates(job)
    first = runs.run(update_watch=watch, draws=True)
    reference = first.curve
    rules: tuple[UpdateRule, ...] = ()
    if watch is not None and reference.finite:
        no_rule = _why_no_rule(watch, in_fp32=rounds_bias_corrections(job.optimizer))
        rules = () if no_rule else watch.rules
    again = runs.run()
    repeated = again.deviations_from(first)
    disturbed = runs.disturbed()
    rounding = {
        roundoff.hex(): widest([run.deviations_from(first) for run in found]) for roundoff, found in disturbed.items()
    }
    corrections = runs.bias_corrections(first)
    if corrections is not None and rounds_bias_corrections(job.optimizer):  # then candidates that do not differ as well
        rounding = {key: widened(tolerance, corrections) for key, tolerance in rounding.items()}
    seeds = runs.over_seeds(first)
    horizons = runs.horizons(max(request.unit_roundoffs))
    if horizons:
        reference = msgspec.structs.replace(reference, horizon_losses=horizons[0])
    result = GuardReference(
        protocol=request.protocol,
        curve=reference,
        repetition=repeated,
        rounding=rounding,
        bias_corrections=corrections,
        seed_means=tuple(sum(run.curve.curve_losses) / len(run.curve.curve_losses) for run in seeds),
        horizon_ends=tuple(last_quarter(losses) for losses in horizons),
        choices=request.choices,
        rule=rules[0] if rules else None,
        further_rules=rules[1:],
        why_no_rule=no_rule,
        moves=runs.moves,
        own_roundoff=request.own_roundoff,
        eager=request.eager,
        averages=find_averages(first.gradients.states) if first.gradients is not None and reference.finite else (),
        masks={name: masks for name, masks in first.rates.items() if masks.is_mask},
        peak_bytes=int(coordinator.most([_peak_bytes(device)])[0]),
    )
    wide = runs.in_fp32() if first.gradients is not None else None  # on all ranks together
    if rank == 0:
        save_tensors(files.reference_update, first.update, {})
        _save_gradients(files, first, again, disturbed, _scatter(first, seeds), wide, runs)
        files.reference.write_bytes(msgspec.json.encode(result))
    return result


def _why_no_rule(watch: UpdateWatch, *, in_fp32: bool) -> str:
    """Return the reason why the replay disagrees with the reference's own updates; empty if it agrees."""
    if watch.why_no_rule or not watch.tracks:
        return watch.why_no_rule or "no optimizer stepped"
    own = max(worst_deviation(track.rule, track.steps, in_fp32=in_fp32).score for track in watch.tracks)
    return (
        (
            f"the replayed update differs from the reference's own update by {own:.2g} times the allowed rounding "
            "difference"
        )
        if own > LIMIT
        else ""
    )


def _save_gradients(
    files: StudyFiles,
    first: _Run,
    again: _Run,
    disturbed: dict[float, list[_Run]],
    scatter: Scatter | None,
    wide: Compared | None,
    runs: _Runs,
) -> None:
    """Save the reference's gradients for the comparison with candidates, if such a comparison is possible."""
    if first.gradients is None or again.gradients is None:
        files.reference_gradients.unlink(missing_ok=True)
        return
    watches = {
        roundoff: [run.gradients for run in found if run.gradients is not None] for roundoff, found in disturbed.items()
    }
    exact = runs.exact
    measured = GradientReference.measured(first.gradients, again.gradients, watches, exact, wide, scatter)
    if runs.are_in_fp32 and FP32_ROUNDOFF in disturbed:
        measured.wide = measured.gradients.at(exact[1:] or exact, FP32_ROUNDOFF)
    measured.save(files.reference_gradients)


def _scatter(first: _Run, seeds: Sequence[_Run]) -> Scatter | None:
    if first.masked is not None and not seeds:
        return measure_draws(first.masked.gradients)
    return measure_scatter([run.masked.gradients for run in seeds if run.masked is not None])


def draws_masks(num_ranks: int) -> bool:
    """Say whether masks are drawn in steps that each begin from the initial parameters. This requires a single rank:
    with several, a candidate cannot be reset to these parameters.
    """
    return num_ranks == 1


def with_draws(protocol: Protocol) -> Protocol:
    """Return the protocol with masks drawn in steps from the initial parameters instead of separate runs."""
    num_draws = min(NUM_DRAWS, protocol.num_curve)
    return msgspec.structs.replace(protocol, num_curve=0, num_draws=num_draws)


def compiles(choices: Mapping[str, Choice]) -> bool:
    """Say whether a configuration compiles its model."""
    return choices.get(CompileSetting.strategy, {}).get("mode") is not None


def reference_plan(choices: Mapping[str, Choice], *, eager: bool) -> Plan:
    """Return the plan of a configuration, except that gradients are reduced in full and uncompressed."""
    plan = make_plan(choices)
    # Sharding stays: a model that is in parts today may fit in no other way.
    plan.wrap = WrapArguments(ddp=plan.wrap.ddp, sharding=plan.wrap.sharding, param_dtype=plan.wrap.param_dtype)
    if eager:
        plan.block_compilation.clear()
        plan.whole_compilation.clear()
    return plan


def _build(
    workload: Workload,
    plan: Plan,
    files: StudyFiles,
    device: torch.device,
    rank: int,
    num_ranks: int,
) -> TrainingJob:
    """Build the reference configuration's job from the saved initial state; the process group must exist already."""
    return assemble(
        workload,
        plan,
        device=device,
        rank=rank,
        num_ranks=num_ranks,
        make_model=lambda: build_initialised(workload.model, files.initial_state),
        batch_sampler=files.order(rank, num_ranks),
    )


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Loss curve, first update and gradients of one run.

    Attributes:
        update: First update, sampled.
        gradients: Recorded gradients; None where they cannot be compared.
        masked: Gradients of the curve part, or of the draws.
        rates: Masks by module.
    """

    curve: Curve
    update: dict[str, torch.Tensor]
    gradients: GradientWatch | None
    masked: GradientWatch | None
    rates: dict[str, ModuleMasks]

    def deviations_from(self, other: _Run) -> Tolerance:
        return deviations(self.curve, self.update, other.curve, other.update)


def _peak_bytes(device: torch.device) -> int:
    import torch

    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


class _Runs:
    """Runner of one job, repeatedly from the saved initial state."""

    def __init__(
        self, job: TrainingJob, files: StudyFiles, request: ReferenceRequest, coordinator: Coordinator
    ) -> None:
        self._job = job
        self._files = files
        self._request = request
        self._coordinator = coordinator
        self._optimizer = holder_of_states(job.optimizer)
        self._optimizer_state = copy.deepcopy(self._optimizer.state_dict())
        self._scheduler_state = copy.deepcopy(job.scheduler.state_dict()) if job.scheduler else None
        self._others = OtherOptimizers(job)
        self._trained = [(parameter, parameter.requires_grad) for parameter in job.model.parameters()]
        self._batches = files.guard_batches(coordinator.rank, coordinator.num_ranks)
        self._watches_updates = job.workload.has_custom_step and not why_not_replayed(job)
        self._count = 0
        self.moves: Moves | None = None
        """Parameters that changed between updates, over all runs; recorded only if the workload defines its own step.
        """

    def run(
        self,
        *,
        seed: int | None = None,
        roundoff: float = 0.0,
        disturbance: int = 0,
        horizon_seed: int | None = None,
        update_watch: UpdateWatch | None = None,
        audits: bool = True,
        draws: bool = False,
    ) -> _Run:
        """Run the protocol once, with the longer horizon only if `horizon_seed` is given."""
        protocol = self._request.protocol
        seed = protocol.seed if seed is None else seed
        if update_watch is None and self._watches_updates:
            update_watch = watch_of_updates(self._job)
        self._count += 1
        self._coordinator.send(TaskProgress(text=f"reference run {self._count}"))
        disturb = Disturbance(roundoff, seed=1 + disturbance) if roundoff else None
        self._restore(disturb)
        rank = self._coordinator.rank
        disturbed = disturb.of_rank(rank).of_outputs(unwrapped(self._job.model)) if disturb else nullcontext()
        with disturbed, self._others.seen():
            comparable = not why_not_compared(self._job)
            gradient_watch = GradientWatch(self._job) if audits and comparable else None
            is_masked = draws if protocol.num_draws else not roundoff
            mask_watch = GradientWatch(self._job) if comparable and is_masked else None
            counted = draws and comparable and not why_not_counted(self._job)
            rate_watch = MaskWatch(self._job) if counted else None
            curve, update = run_protocol(
                self._job,
                self._batches,
                protocol,
                seed=seed,
                horizon_seed=horizon_seed,
                watches=[update_watch] if update_watch is not None else [],
                gradient_watch=gradient_watch,
                mask_watch=mask_watch,
                rate_watch=rate_watch,
                restart=partial(set_initial_state, self._job, self._files.initial_state, disturb) if audits else None,
                draws=seeds_of_draws(protocol, of_reference=True) if draws else (),
            )
        if update_watch is not None and self._watches_updates:
            moves = moves_of([update_watch.around])
            self.moves = moves if self.moves is None else joined(self.moves, moves)
        curve = averaged(curve, self._coordinator)
        rates = {} if rate_watch is None else rate_watch.modules
        return _Run(curve=curve, update=update, gradients=gradient_watch, masked=mask_watch, rates=rates)

    def disturbed(self) -> dict[float, list[_Run]]:
        """Run the protocol several times for each unit roundoff, with disturbances of that size."""
        return {
            roundoff: [
                self.run(roundoff=roundoff, disturbance=number)
                for number in range(self._request.protocol.num_disturbed)
            ]
            for roundoff in self._request.unit_roundoffs
        }

    def bias_corrections(self, first: _Run) -> Tolerance | None:
        """Measure the tolerance for rounding in the update's bias corrections; None if neither the candidates nor the
        reference round these corrections.
        """
        optimizer = self._optimizer
        wanted = self._request.bias_corrections or rounds_bias_corrections(optimizer)
        if not wanted or not corrects_biases(optimizer):
            return None
        with of_bias_corrections(optimizer):
            return widest([self.run().deviations_from(first)])

    def over_seeds(self, first: _Run) -> list[_Run]:
        """Return runs with several seeds for the curve part of the protocol; empty for a model without randomness."""
        if not self._request.protocol.num_curve:
            return []
        seed = self._request.protocol.seed
        return [first, *(self.run(seed=seed + number, audits=False) for number in range(1, NUM_SEEDS))]

    @property
    def exact(self) -> tuple[int, ...]:
        """Indices of the steps that begin from the initial parameters."""
        return self._request.protocol.exact

    @property
    def are_in_fp32(self) -> bool:
        """True if the reference's own gradients are computed in FP32."""
        if self._job.workload.has_custom_step:  # whose updates gradients may depend on
            return False
        return is_in_fp32(self._request.choices) and self._request.own_roundoff <= FP32_ROUNDOFF

    def in_fp32(self) -> Compared | None:
        """Return the audited gradients of the reference's twin (the same training in FP32). Return None if there is no
        twin or none is needed, if there is too little memory for both, or if the twin's runs would exceed their time
        limit.
        """
        num_ranks = self._coordinator.num_ranks
        if self.are_in_fp32 or not has_twin(self._job.device, num_ranks):
            return None
        try:
            return self._audits_of_twin()
        except (MemoryError, RuntimeError) as error:
            if num_ranks > 1 or not is_out_of_memory(error):
                raise  # the other ranks wait for this one
            return None

    def _audits_of_twin(self) -> Compared | None:
        """Audit the reference's twin (the same training in FP32) several times, without and with disturbances; return
        None if that would exceed the time limit.
        """
        protocol = self._request.protocol

        def run(disturb: Disturbance | None = None) -> GradientWatch:
            ranks = self._coordinator.rank, self._coordinator.num_ranks
            # Anew, as a candidate's is.
            twin = make_twin(self._job, self._request.choices, self._files, rank=ranks[0], num_ranks=ranks[1])
            of_rank = disturb.of_rank(ranks[0]) if disturb else None
            with of_rank.of_outputs(unwrapped(twin.model)) if of_rank else nullcontext():
                return audit(twin, self._files, self._batches, protocol, disturb)

        began = time.monotonic()
        reference = run()
        (run_s,) = self._coordinator.most([time.monotonic() - began])
        expected_s = (2 + protocol.num_disturbed) * run_s
        if self._request.twin_s is not None and expected_s > self._request.twin_s:
            return None
        again = run()
        disturbed = [run(Disturbance(FP32_ROUNDOFF, seed=1 + number)) for number in range(protocol.num_disturbed)]
        noise = measure_noise(
            reference.gradients,
            [watch.gradients for watch in disturbed],
            again.gradients,
            unit_roundoff=FP32_ROUNDOFF,
            exact=range(len(reference.gradients)),
        )
        return Compared(steps=reference.gradients, noise={FP32_ROUNDOFF.hex(): noise})

    def horizons(self, coarsest: float) -> list[tuple[float, ...]]:
        """Return the losses over the horizon, undisturbed and disturbed; empty unless lossy candidates are allowed.

        These runs have no audits, as lossy candidates have none: after a horizon, state that counts steps (such as the
        warm-up of an average) would differ from that of candidates without a horizon.
        """
        protocol = self._request.protocol
        if not protocol.num_horizon:
            return []
        runs = [
            self.run(
                roundoff=coarsest if number else 0.0,
                disturbance=max(0, number - 1),
                horizon_seed=protocol.seed + number,
                audits=False,
            )
            for number in range(NUM_HORIZON_RUNS)
        ]
        return [run.curve.horizon_losses for run in runs]

    def _restore(self, disturb: Disturbance | None) -> None:
        """Restore the initial state with a fresh optimizer, and disturb the parameters, if requested, in the same way
        on all ranks.
        """
        for parameter, is_trained in self._trained:
            parameter.requires_grad_(is_trained)  # which a forward may change
        self._job.optimizer.zero_grad(set_to_none=True)
        self._optimizer.state.clear()  # before anything is disturbed, which needs memory for a while
        self._others.restart()
        set_initial_state(self._job, self._files.initial_state, disturb)
        self._optimizer.load_state_dict(self._optimizer_state)
        for ours, restored in zip(self._job.optimizer.param_groups, self._optimizer.param_groups, strict=True):
            ours.update({name: value for name, value in restored.items() if name != "params"})
        if self._job.scheduler:
            self._job.scheduler.load_state_dict(self._scheduler_state)
        self._job.skipped_steps = 0

"""Process of one rank in a trial: it builds the job, runs the guard and the warm-up, takes windows on command, profiles
and reports.
"""

from __future__ import annotations

import gc
import time
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from steptune.tuner.profiling.analysis import (
    analyse_file,
    of_rank,
    profile_of,
    together,
)
from steptune.tuner.profiling.breakdown import with_epoch_restart
from steptune.tuner.profiling.details import DetailsFile
from steptune.tuner.profiling.lanes import FULL_CELLS
from steptune.tuner.profiling.tensor_memory import known_blocks
from steptune.tuner.records import Effect, GuardVerdict, Phase, Startup, TrialSpec
from steptune.tuner.strategies.combine import make_plan, strategies_of
from steptune.tuner.strategies.dataset_cache.strategy import CachedDataset
from steptune.tuner.strategies.nccl_settings.choice import NcclSetting
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.compilation import compilation, num_graphs
from steptune.tuner.training.initial_state import build_initialised
from steptune.tuner.training.job import TrainingJob
from steptune.tuner.training.loader import build_loader
from steptune.tuner.trials.analysis_files import keep_analysis
from steptune.tuner.trials.capture import num_profiled_steps, record_details, record_profile
from steptune.tuner.trials.coordination import Coordinator
from steptune.tuner.trials.device_watch import watch_device
from steptune.tuner.trials.guard import needs_no_compilation, run_guard
from steptune.tuner.trials.measure import Stepper, epoch_restart_ns, take_window
from steptune.tuner.trials.memory import forget_peak, limit_host_memory, measure_peak
from steptune.tuner.trials.messages import (
    Channel,
    Command,
    Finish,
    Guarded,
    MeasureRestart,
    PhaseBegan,
    Profile,
    Profiled,
    Ready,
    Reported,
    RestartMeasured,
    TakeWindow,
    WindowTaken,
    decoder_of,
)
from steptune.tuner.trials.processes import die_with_parent
from steptune.tuner.trials.rank_device import rank_device
from steptune.tuner.trials.study_files import MAX_FILLED_BATCHES, StudyFiles
from steptune.tuner.trials.warm_up import WarmUp, warm_up
from steptune.tuner.workloads.loading import load_workload
from steptune.tuner.workloads.workload import Workload

WORKER_DEATH_S = 1.0
"""Maximum seconds to wait for the exit status of a loader worker after the connection to it broke."""
TOP = 10
"""Maximum number of a profile's kernels, and of its idle gaps, that the trial's result includes."""
KEPT = 200
"""Maximum number of a profile's kernels, and of its idle gaps, that the file for result pages includes."""


class UserClock:
    """Clock that adds up the time spent in the user's own code."""

    def __init__(self) -> None:
        self.total_ns = 0

    def __call__(self) -> AbstractContextManager[None]:
        return self._timed()

    @contextmanager
    def _timed(self) -> Any:
        began = time.monotonic_ns()
        try:
            yield
        finally:
            self.total_ns += time.monotonic_ns() - began


class TrialRun:
    """Run of one rank through the phases of a trial."""

    def __init__(self, spec: TrialSpec, rank: int, channel: Channel) -> None:
        self.spec = spec
        self.rank = rank
        self.phase = Phase.BUILD
        self._channel = channel
        self._files = StudyFiles(Path(spec.study_directory))
        self._clock = UserClock()
        self._operators: tuple[str, ...] = ()
        self._restart_ns: int | None = None
        self._step_time_ns = 0
        self._first_step_ns = 0
        self._guard_ns = self._twin_ns = 0
        self._guard_steps = 0

    def run(self) -> None:
        self._enter(Phase.BUILD)
        self._build()
        if self.spec.guard:
            self._enter(Phase.GUARD)
            self._guard()
        self._enter(Phase.WARM_UP)
        self._stepper = Stepper(self._job, self._order)
        self._watch = watch_device(self._device)
        self._ready(warm_up(self._stepper, self._coordinator))
        self._enter(Phase.MEASURE)
        self._obey()
        self._enter(Phase.REPORT)
        self._report()

    def crashed_worker(self, error: BaseException) -> int | None:
        """Return the exit code of this rank's loader worker that died, if one did; negative for a signal.

        A broken connection is noticed before the exit status of the worker at its other end is known, so this waits for
        it.
        """
        iterator = getattr(getattr(self, "_stepper", None), "iterator", None)
        workers = list(getattr(iterator, "_workers", ()))
        deadline = time.monotonic() + WORKER_DEATH_S
        while True:
            codes = [worker.exitcode for worker in workers if worker.exitcode]
            if codes or not workers or not isinstance(error, OSError | EOFError) or time.monotonic() > deadline:
                return int(codes[0]) if codes else None
            time.sleep(0.01)

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self._channel.send(PhaseBegan(phase=phase, at_ns=time.monotonic_ns()))

    # --- build --------------------------------------------------------------------------------

    def _build(self) -> None:
        spec = self.spec
        limit_host_memory(spec.memory_limit_bytes, spec.device)
        self._workload = self._load()
        self._device = rank_device(spec.device, self.rank, spec.memory_limit_bytes)
        meeting = self._files.trial_directory(spec.trial_id) / spec.run_id
        self._coordinator = Coordinator(
            self.rank,
            spec.num_ranks,
            self._channel,
            meeting,
            self._device,
            keeps_nccl_log=NcclSetting.strategy in spec.candidate.choices,
        )
        self._assemble()
        with self._clock():
            fill_cache(self._job, self._files)
        self._built_ns = time.monotonic_ns()
        self._first_step_ns = self._built_ns

    def _assemble(self) -> None:
        import torch

        spec = self.spec
        torch.manual_seed(spec.seed)
        self._order = self._files.order(self.rank, spec.num_ranks)
        self._job = assemble(
            self._workload,
            make_plan(spec.choices),
            device=self._device,
            rank=self.rank,
            num_ranks=spec.num_ranks,
            make_model=self._make_model,
            make_dataset=self._make_dataset,
            batch_sampler=self._order,
            worker_init=loader_worker_init,
        )
        if self._order is not None:
            self._order = self._job.loader.batch_sampler  # in the batches of the plan

    def _load(self) -> Workload:
        with self._clock():
            workload = load_workload(self.spec.workload)
        workload.directory = self._files.data
        return workload

    def _make_model(self) -> Any:
        with self._clock():
            return build_initialised(self._workload.model, self._files.initial_state)

    def _make_dataset(self) -> Any:
        with self._clock():
            return self._workload.dataset()

    # --- guard and warm-up --------------------------------------------------------------------

    def _guard(self) -> None:
        began = self._first_step_ns = time.monotonic_ns()
        verdict = self._verdict()
        forget_peak(self._device)  # a twin of the candidate is no part of its training
        self._guard_ns = time.monotonic_ns() - began - self._twin_ns
        self._guard_steps = verdict.num_steps
        self._coordinator.send(Guarded(verdict=verdict))
        self._require(verdict)

    def _verdict(self) -> GuardVerdict:
        """Run the guard, uncompiled if that suffices. If the uncompiled guard runs out of memory, run it compiled in a
        new job.
        """
        from steptune.tuner.trials.failures import is_out_of_memory

        judged = self._files, self.spec, self.rank, self._coordinator
        if needs_no_compilation(self._files, self.spec, self._device):
            try:
                verdict = run_guard(self._job, *judged, uncompiled=True, on_twin=self._leave_out)
                forget_peak(self._device)
                return verdict
            except (MemoryError, RuntimeError) as error:
                if self.spec.num_ranks > 1 or not is_out_of_memory(error):
                    raise
            del self._job
            gc.collect()
            forget_peak(self._device)
            self._assemble()
            fill_cache(self._job, self._files)
        return run_guard(self._job, *judged, on_twin=self._leave_out)

    def _leave_out(self, twin_ns: int) -> None:
        self._twin_ns = twin_ns

    def _require(self, verdict: GuardVerdict) -> None:
        from steptune.tuner.trials.failures import NumericsError

        if not self._coordinator.agree(verdict.passed):
            raise NumericsError(f"the candidate's training differs from the reference: {verdict.reason}")

    def _ready(self, warmth: WarmUp) -> None:
        spec, now = self.spec, time.monotonic_ns()
        self._step_time_ns = warmth.steady_step_ns
        startup = Startup(
            build_ns=self._built_ns - spec.requested_at_ns,
            user_code_ns=self._clock.total_ns,
            first_step_ns=(self._first_step_ns if spec.guard else self._built_ns) - spec.requested_at_ns,
            warm_up_ns=now - self._built_ns,
            warm_up_steps=len(warmth.step_ns),
            steady=warmth.steady,
            compile_ns=self._compile_ns(warmth),
            compile_cold=self._files.is_cold(spec.candidate.key),
        )
        self._files.mark_warm(spec.candidate.key)
        self._stepper.pause()
        self._graphs_when_ready = num_graphs()
        self._coordinator.send(
            Ready(
                startup=startup,
                step_time_ns=warmth.steady_step_ns,
                loader_capacity=self._job.plan.loader.capacity,
                num_positions=self._order.num_positions if self._order else 0,
                steps_per_epoch=self._steps_per_epoch(),
            )
        )

    def _compile_ns(self, warmth: WarmUp) -> int:
        """Return the time that compilation and CUDA graph capture take: the excess of the first steps over steady ones.
        If the guard runs, its steps are the first ones.
        """
        plan = self._job.plan
        if not (plan.block_compilation or plan.whole_compilation or plan.step.captured):
            return 0
        guarded = self._guard_ns - self._guard_steps * warmth.steady_step_ns if self.spec.guard else 0
        return max(0, guarded) + warmth.excess_ns

    def _steps_per_epoch(self) -> int | None:
        dataset = self._job.loader.dataset
        if self._order is None or not hasattr(dataset, "__len__"):
            return None
        return max(1, len(dataset) // (self._workload.global_batch * self._job.plan.batches.factor))

    # --- commands -----------------------------------------------------------------------------

    def _obey(self) -> None:
        decoder = decoder_of(Command)
        while True:
            command = decoder.decode(self._coordinator.next_command())
            match command:
                case TakeWindow():
                    window = take_window(
                        self._stepper,
                        round_number=command.round,
                        position=command.position,
                        num_steps=command.num_steps,
                        foreign_limit=command.foreign_limit,
                        total=self._coordinator.total,
                        most=self._coordinator.most,
                        watch=self._watch,
                    )
                    self._require_finite()
                    self._coordinator.send(WindowTaken(window=window))
                case MeasureRestart():
                    self._stepper.resume()
                    self._restart_ns = self._measure_restart()
                    self._coordinator.send(RestartMeasured(epoch_restart_ns=self._restart_ns))
                case Profile():
                    self._enter(Phase.PROFILE)
                    self._profile(command.unprofiled_step_time_ns)
                case Finish():
                    return

    def _require_finite(self) -> None:
        from steptune.tuner.trials.failures import NumericsError

        loss = self._stepper.last_loss
        if loss is not None and not bool(loss.isfinite().all()):
            raise NumericsError(f"the loss became {float(loss):g} during the measurement")

    def _measure_restart(self) -> int | None:
        """Measure the time that a restart of the loader takes, with a short epoch of the first batches in the fixed
        order. Return None for a dataset without a fixed order of batches.
        """
        if self._order is None:
            return None
        count = max(2, self._job.plan.loader.num_workers)
        batches = [batch for batch, _ in zip(self._order, range(count), strict=False)]
        began = time.perf_counter_ns()
        for _ in range(3):
            self._stepper.next_batch()
        wait = (time.perf_counter_ns() - began) / 3

        def make_loader(epoch: list[list[int]]) -> Any:
            return build_loader(
                self._workload,
                self._job.loader.dataset,
                self._job.plan.loader,
                batch_sampler=epoch,
                worker_init=loader_worker_init,
            )

        return epoch_restart_ns(make_loader, batches, wait, self._step_time_ns)

    def _profile(self, unprofiled_ns: int) -> None:
        path = self._files.trace(self.spec.trial_id, self.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        rounds = -(-num_profiled_steps(unprofiled_ns) // self._job.steps_per_round)
        record_profile(self._stepper.step, rounds * self._job.steps_per_round, self._device, path)
        details = self._record_details()
        own = of_rank(analyse_file(path, unprofiled_ns, KEPT, details, FULL_CELLS), self.rank)
        details.path.unlink()
        if not self.spec.keep_trace:
            path.unlink()
        breakdowns = own.analysis.breakdowns
        steps = self._steps_per_epoch()
        if self._restart_ns and steps:
            breakdowns = tuple(with_epoch_restart(b, self._restart_ns // steps) for b in breakdowns)
        self._operators = breakdowns[0].operators
        ranks = self._coordinator.gather(own)
        if self.rank == 0:
            keep_analysis(self._files, self.spec.trial_id, together(ranks))
            trace = str(path) if self.spec.keep_trace else None
            profile = profile_of(own.analysis, TOP)
            self._channel.send(Profiled(breakdowns=breakdowns, profile=profile, trace=trace))

    def _record_details(self) -> DetailsFile:
        """Record stacks, shapes and allocations in further steps, because recording them would slow down the timed
        ones.
        """
        num_steps = self._job.steps_per_round
        path = self._files.trial_directory(self.spec.trial_id) / f"rank{self.rank}.details.json"
        job = self._job
        before = known_blocks(job.model, job.optimizer)
        record_details(self._stepper.step, num_steps, path)
        after = known_blocks(job.model, job.optimizer)
        return DetailsFile(path=path, num_steps=num_steps, blocks_before=before, blocks_after=after)

    # --- report -------------------------------------------------------------------------------

    def _report(self) -> None:
        late = num_graphs() - self._graphs_when_ready
        self._channel.send(
            Reported(
                memory=measure_peak(self.rank, self._device),
                effects=self._effects(),
                unmeasured=self._watch.unmeasured,
                compilation=compilation(late_graphs=late),
            )
        )

    def _effects(self) -> tuple[Effect, ...]:
        effects = []
        for strategy in strategies_of(self.spec.choices):
            evidence = {**strategy.evidence(self._job), "operators": self._operators}
            effects.append(strategy.took_effect(evidence, self.spec.choices[strategy.name]))
        return tuple(effects)


def fill_cache(job: TrainingJob, files: StudyFiles) -> None:
    """Fill a dataset cache with the samples of the windows, so that steps are measured as they run from the second
    epoch on.
    """
    dataset = getattr(job.loader, "dataset", None)
    if isinstance(dataset, CachedDataset):
        dataset.fill(files.first_indices(MAX_FILLED_BATCHES * job.plan.batches.factor))


def loader_worker_init(worker_id: int) -> None:
    """Make a loader worker end when its rank ends."""
    import os

    die_with_parent(os.getppid())

"""Training steps on a GPU as a model: what choices of the real strategies do to them, and what finding out costs.

Not a measurement: milliseconds by category as profiles of an H200 showed them for four workloads, and factors of the
right order. The search runs on it with its real space, so that what it tries, in which order, and what it spends
its time on can be tested without a GPU.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from builders import sample_environment, sample_facts
from msgspec.structs import replace

from steptune.tuner.costs.categories import Category
from steptune.tuner.memory_store import MemoryStudyStore
from steptune.tuner.records import (
    Breakdown,
    Calibration,
    Candidate,
    Choice,
    Environment,
    GuardVerdict,
    HardwareProfile,
    MeasureSettings,
    MemoryPeak,
    Numerics,
    Purpose,
    Recommendation,
    Startup,
    Study,
    StudySettings,
    Topology,
    TrialResult,
    TrialSpec,
    Window,
    WorkloadFacts,
    new_id,
)
from steptune.tuner.search.driver import StudyDriver
from steptune.tuner.trials.fake import known_breakdown, known_window

C = Category
Choices = Mapping[str, Choice]
WARM = 0.12
NUM_WINDOWS = 5
PROFILE_NOISE_SD = 0.03
MASKED = 1.8
"""Attention with a mask that says what a flag would, in attention by the flag."""
EAGER_NOISE_SD, CALM_NOISE_SD = 0.06, 0.004


@dataclass(frozen=True, kw_only=True)
class Step:
    """A training step in FP32, eager.

    Attributes:
        gpu_ms: Of the device's work, by category.
        host_ms: That the host takes to launch forward and backward.
        optimizer_host_ms: That it takes to launch the update.
        in_16_bits: What 16 bits multiply a category by.
        channels_last: What NHWC multiplies a category by; empty without convolutions.
        whole_s: What compiling the model takes, first.
        regional_s: What compiling its blocks takes.
        prepare_s: What looking at the workload takes.
        today: What is trained with today, beside the defaults.
    """

    name: str
    gpu_ms: Mapping[Category, float]
    host_ms: float
    optimizer_host_ms: float
    in_16_bits: Mapping[Category, float]
    channels_last: Mapping[Category, float] = field(default_factory=dict)
    whole_s: float
    regional_s: float
    prepare_s: float
    num_blocks: int
    num_block_kinds: int
    modules: Mapping[str, int]
    host_read: str = ""
    mask_refusal: str = "masks of its own"
    num_ranks: int = 1
    num_hosts: int = 1
    today: Mapping[str, Choice] = field(default_factory=dict)

    def topology(self, hardware: HardwareProfile) -> Topology | None:
        """The links between its ranks."""
        return None

    def current(self) -> dict[str, Choice]:
        """Choices that are trained with today, beside the defaults."""
        return dict(self.today)

    def facts(self) -> WorkloadFacts:
        facts = sample_facts(
            current=self.current(),
            custom_step=False,
            varying_shapes=False,
            host_read=self.host_read,
            byte_form=False,
            batch_splittable=True,
            steps_per_epoch=10_000,
            sample_step_ns=int(sum(self.gpu_ms.values()) * 1e6),
        )
        model = replace(
            facts.model,
            module_types=dict(self.modules),
            num_blocks=self.num_blocks,
            num_block_kinds=self.num_block_kinds,
            flops_per_step=None,
            can_be_batch_second=False,
            uses_attention=C.ATTENTION in self.gpu_ms,
            mask_refusal=self.mask_refusal,
        )
        return replace(facts, model=model)

    def times_ms(self, choices: Choices) -> dict[Category, float]:
        """Milliseconds of a step by category."""
        device = {**dict.fromkeys((C.ELEMENTWISE, C.NORMALISATION, C.REDUCTION, C.OPTIMIZER), 0.0), **self.gpu_ms}
        host = self.host_ms * self._apply_precision(device, choices["precision"])
        if choices["memory_format"]["layout"] == "channels_last":
            _scale(device, self.channels_last)
        update = self.optimizer_host_ms
        if choices["optimizer_implementation"]["implementation"] == "fused":
            device[C.OPTIMIZER] *= 0.5
            update *= 0.35
        elif choices["optimizer_implementation"]["implementation"] == "for_loop":
            update *= 8
        host, update = self._apply_compile(device, choices, host, update)
        busy = sum(device.values())
        gap = 0.02 * busy + 0.9 * max(0.0, host + update - 0.9 * busy)
        forward = host / max(1e-9, host + update)
        return {
            **device,
            C.HOST: 0.35 * gap * forward,
            C.LAUNCH_LATENCY: 0.65 * gap * forward,
            C.OPTIMIZER_HOST: gap * (1 - forward),
        }

    def _apply_precision(self, device: dict[Category, float], precision: Choice) -> float:
        level = precision["level"]
        if level == "tf32":
            device[C.MATMUL] *= 0.35
        if level in ("O1", "O2", "O3"):
            _scale(device, self.in_16_bits)
        if level == "O1":
            device[C.ELEMENTWISE] *= 1.15
            return 1.2
        if level == "O3":
            device[C.OPTIMIZER] *= 0.6
        return 1.0

    def _apply_compile(
        self, device: dict[Category, float], choices: Choices, host: float, update: float
    ) -> tuple[float, float]:
        compiled = choices["compile"]
        graphs = str(compiled["mode"]) in ("reduce-overhead", "max-autotune")
        masked = (
            compiled["mode"] is not None and compiled["scope"] == "whole" and not choices["attention_mask"]["is_causal"]
        )
        if masked and not self.mask_refusal:
            device[C.ATTENTION] *= MASKED
        if compiled["mode"] is not None:
            _scale(device, {C.ELEMENTWISE: 0.3, C.NORMALISATION: 0.75, C.REDUCTION: 0.5})
            host *= 0.1 if graphs else 0.4 if compiled["scope"] == "whole" else 0.8
        return (0.3, 0.0) if choices["cuda_graph"]["scope"] else (host, update)

    def hidden_ms(self, choices: Choices) -> float:
        """Communication beside compute."""
        return 0.0

    def step_ms(self, choices: Choices) -> float:
        return sum(self.times_ms(choices).values())

    def compile_s(self, choices: Choices) -> float:
        """Seconds of a first compilation."""
        compiled = choices["compile"]
        if compiled["mode"] is None:
            return 0.0
        seconds = self.regional_s if compiled["scope"] == "regional" else self.whole_s
        return seconds * (4 if str(compiled["mode"]).startswith("max") else 1)


def _scale(times: dict[Category, float], factors: Mapping[Category, float]) -> None:
    for category, factor in factors.items():
        times[category] *= factor


class GpuModel:
    """A `TrialRunner` over a modelled step: time passes as it would.

    Args:
        start_s: What every start of a process takes beyond the least.
    """

    def __init__(self, step: Step, seed: int = 0, start_s: float = 0.0) -> None:
        self.step = step
        self._start_s = start_s
        self.now_s = 0.0
        self.labels: list[str] = []
        self._random = random.Random(seed)
        self._compiled: set[str] = set()

    def clock(self) -> float:
        return self.now_s

    def describe(self) -> Environment:
        environment = sample_environment(
            "cuda",
            num_ranks=self.step.num_ranks,
            num_hosts=self.step.num_hosts,
            calibration=Calibration(
                matmul_flops_per_s={"float32": 5e13, "tf32": 3.6e14, "bfloat16": 7.3e14, "float16": 7.3e14},
                copy_bytes_per_s=3e12,
            ),
        )
        hardware = replace(environment.hardware, devices=environment.hardware.devices[: self.step.num_ranks])
        return replace(environment, hardware=hardware)

    def measure_topology(self, hardware: HardwareProfile, known: Topology | None, seconds: float) -> Topology | None:
        return self.step.topology(hardware)

    def inspect(self, longest_s: float | None = None) -> WorkloadFacts:
        self.now_s += self.step.prepare_s
        return self.step.facts()

    def begin_reference(self, request: Any, longest_s: float) -> None:
        pass

    def make_reference(self, request: Any, longest_s: float | None = None) -> None:
        return None

    def task(self, entry: str, request: Any) -> bytes:
        raise NotImplementedError(f"a modelled step has no {entry} task")

    def fits_together(self, peaks_bytes: Sequence[int]) -> bool:
        return True

    def close(self) -> None:
        return None

    def run(
        self,
        specs: Sequence[TrialSpec],
        purposes: Sequence[Purpose],
        settings: MeasureSettings,
        group: str,
        listener: Any,
    ) -> list[TrialResult]:
        return [self._trial(s, p, settings, group) for s, p in zip(specs, purposes, strict=True)]

    def _trial(self, spec: TrialSpec, purpose: Purpose, settings: MeasureSettings, group: str) -> TrialResult:
        choices = spec.choices
        times = self.step.times_ms(choices)
        step_ms = sum(times.values())
        key = str([choices[name] for name in ("precision", "compile", "memory_format", "backend_flags")])
        cold = key not in self._compiled
        self._compiled.add(key)
        compile_s = self.step.compile_s(choices) * (1.0 if cold else WARM)
        phases_s = {
            "build": self._start_s + (0.9 if choices["compile"]["mode"] is None else 3.0),
            "guard": (0.4 + 8 * step_ms / 1e3 + compile_s) if spec.guard else 0.0,
            "warm_up": 0.9 + (0.0 if spec.guard else compile_s),
            "measure": min(1.7, settings.cap_s),
            "profile": 0.8 if spec.profile else 0.0,
        }
        self.now_s += sum(phases_s.values())
        self.labels.append(spec.candidate.label)
        waits = times[C.HOST] + times[C.LAUNCH_LATENCY] > 0.2 * step_ms
        noise_sd = EAGER_NOISE_SD if waits else CALM_NOISE_SD
        noise = math.exp(self._random.gauss(0, noise_sd))
        return TrialResult(
            trial_id=spec.trial_id,
            candidate=spec.candidate,
            purpose=purpose,
            group=group,
            windows=tuple(self._window(n, step_ms * noise, noise_sd) for n in range(NUM_WINDOWS)),
            startup=Startup(
                build_ns=int(phases_s["build"] * 1e9),
                user_code_ns=0,
                first_step_ns=0,
                warm_up_ns=int((phases_s["guard"] + phases_s["warm_up"]) * 1e9),
                warm_up_steps=3,
                steady=True,
                compile_ns=int(compile_s * 1e9),
                compile_cold=cold,
            ),
            memory=(MemoryPeak(rank=0, resident_bytes=1 << 30, device_bytes=2 << 30),),
            breakdowns=(self._breakdown(times, noise, self.step.hidden_ms(choices)),) if spec.profile else (),
            guard=GuardVerdict(passed=True, num_steps=4) if spec.guard else None,
            phases_ns={name: int(s * 1e9) for name, s in phases_s.items() if s},
        )

    def _window(self, number: int, step_ms: float, noise_sd: float) -> Window:
        return known_window(number, step_ms * 1e6 * math.exp(self._random.gauss(0, noise_sd / 4)))

    def _breakdown(self, times_ms: Mapping[Category, float], noise: float, hidden_ms: float) -> Breakdown:
        categories = dict.fromkeys((category.value for category in Category), 0)
        for category, value in times_ms.items():
            own = math.exp(self._random.gauss(0, PROFILE_NOISE_SD))
            categories[category.value] = int(value * noise * own * 1e6)
        overlapped = {C.COMMUNICATION.value: int(hidden_ms * 1e6)} if hidden_ms else {}
        return replace(known_breakdown(categories, "cuda:0"), overlapped=overlapped)


def searched(
    step: Step,
    *,
    budget_s: float,
    seed: int = 0,
    start_s: float = 0.0,
    allow: tuple[Numerics, ...] = (),
) -> tuple[Recommendation, GpuModel, StudyDriver]:
    """A finished study."""
    runner = GpuModel(step, seed, start_s)
    answer, driver = studied(runner, StudySettings(budget_s=budget_s, allow=allow, num_ranks=step.num_ranks))
    return answer, runner, driver


def studied(
    runner: GpuModel, settings: StudySettings, store: MemoryStudyStore | None = None
) -> tuple[Recommendation, StudyDriver]:
    """Run a study in the runner's own time; return its answer and its driver.

    Args:
        store: With earlier studies, from which it learns; None is an empty one.
    """
    store = store or MemoryStudyStore()
    study = Study(
        study_id=new_id(),
        workload="model:step",
        settings=settings,
        created_at="2026-11-22T10:00:00+00:00",
        directory="",
    )
    store.create_study(study)
    driver = StudyDriver(study, store, runner, clock=runner.clock)
    return driver.run(), driver


def by_hand(step: Step, driver: StudyDriver, **choices: Choice) -> float:
    """Milliseconds of a step with these choices beside what is run today."""
    assert driver.prepared is not None
    return step.step_ms(driver.prepared.space.complete(Candidate(choices=choices)))

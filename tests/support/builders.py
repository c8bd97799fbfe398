"""Richly filled records for tests: every field differs from its default wherever it has one.

Each builder takes overrides by field name.
"""

from typing import Any

from msgspec.structs import replace

from steptune.tuner.records import (
    Alternative,
    Breakdown,
    Calibration,
    Candidate,
    CaptureQuality,
    Certificate,
    CollectiveStats,
    CollectiveTiming,
    Compilation,
    CompilationEvent,
    Cost,
    DatasetFacts,
    Decision,
    Device,
    DeviceReading,
    Effect,
    Environment,
    Failure,
    FailureKind,
    Finding,
    Gain,
    GapSite,
    GuardCheck,
    GuardVerdict,
    HardwareProfile,
    Interval,
    KernelStats,
    Link,
    MeasureSettings,
    MemoryPeak,
    ModelFacts,
    Move,
    Numerics,
    OptimizerFacts,
    Part,
    Phase,
    Purpose,
    Recommendation,
    SampleUnit,
    Startup,
    Study,
    StudySettings,
    StudyState,
    Topology,
    Trial,
    TrialProfile,
    TrialResult,
    TrialState,
    Verdict,
    Window,
    WorkloadFacts,
)

STUDY_ID = "06f1x8study00000000000one1"
TRIAL_ID = "06f1x8trial00000000000one1"
CANDIDATE = Candidate(
    choices={
        "precision": {"level": "O1", "dtype": "bfloat16"},
        "data_loading": {"num_workers": 2, "pin_memory": True, "prefetch_factor": None, "timeout": 0.5},
    }
)


TWO_CORES = HardwareProfile(
    devices=(Device(kind="cpu", name="Some Processor", memory_bytes=1 << 34),),
    num_cores=2,
    cpu_name="Some Processor",
    memory_bytes=1 << 34,
    versions={"torch": "2.13.0"},
)


def sample_hardware(device_kind: str = "cuda", **changes: Any) -> HardwareProfile:
    profile = HardwareProfile(
        devices=(
            Device(kind=device_kind, name="Some Device 80GB", memory_bytes=80 << 30, capability="9.0"),
            Device(kind=device_kind, name="Some Device 80GB", memory_bytes=80 << 30, capability="9.0"),
        ),
        num_cores=16,
        cpu_name="Some Processor",
        memory_bytes=128 << 30,
        links={"0-1": "NV18"},
        versions={"torch": "2.13.0", "python": "3.11.7", "cuda": "13.0"},
    )
    return replace(profile, **changes)


def sample_environment(device_kind: str = "cuda", **changes: Any) -> Environment:
    environment = Environment(
        hardware=sample_hardware(device_kind),
        calibration=Calibration(
            matmul_flops_per_s={"float32": 5.1e13, "bfloat16": 7.3e14}, copy_bytes_per_s=2.71828e12
        ),
        compiler="/usr/bin/g++",
        num_ranks=2,
        start_methods=("fork", "spawn"),
        free_disk_bytes=10**12,
        free_memory_bytes=10**11,
    )
    return replace(environment, **changes)


def sample_link(**changes: Any) -> Link:
    link = Link(
        kind="NV18",
        latency_ns=2718.28,
        bytes_per_s=1.41421e11,
        call_ns=12_345.6,
        fit_residual=0.0577,
        timings=tuple(
            CollectiveTiming(collective=name, num_ranks=2, message_bytes=size, duration_ns=duration_ns)
            for name in ("all_reduce", "all_gather", "reduce_scatter")
            for size, duration_ns in ((4096, 17_000), (1 << 20, 29_000), (64 << 20, 490_000))
        ),
    )
    return replace(link, **changes)


def sample_topology(**changes: Any) -> Topology:
    """Two hosts of two ranks each."""
    network = sample_link(kind="network", latency_ns=31_415.9, bytes_per_s=3.125e9, num_sharing=2)
    topology = Topology(
        host_of_rank=(0, 0, 1, 1),
        inside=sample_link(),
        between=network,
        whole=replace(network, kind="NV18 and network", num_sharing=1),
        backend="nccl",
        hardware_fingerprint=sample_hardware().fingerprint,
        measured_at="2026-11-22T12:00:00+00:00",
    )
    return replace(topology, **changes)


def sample_facts(**changes: Any) -> WorkloadFacts:
    facts = WorkloadFacts(
        reference="examples/char_gpt.py:CharGPT",
        name="CharGPT",
        signature="5f0c7d2e9a1b3c4d",
        global_batch=64,
        sample_unit=SampleUnit.TOKEN,
        dataset=DatasetFacts(
            kind="map",
            length=100_000,
            sample_bytes=1024,
            sample_ns=12_345,
            deterministic=True,
            splits=True,
            load_deterministic=True,
            seedable=False,
        ),
        model=ModelFacts(
            num_parameters=10_000_000,
            parameter_bytes=40_000_000,
            num_parameter_tensors=75,
            module_types={"Linear": 24, "LayerNorm": 13},
            num_blocks=6,
            uses_attention=True,
            has_batch_statistics=True,
            can_be_batch_second=True,
            flops_per_step=123_456_789_012,
        ),
        optimizer=OptimizerFacts(
            name="AdamW",
            module="torch.optim.adamw",
            implementation="foreach",
            implementations=("for_loop", "foreach", "fused"),
            state_bytes=80_000_000,
            capturable=True,
        ),
        current={"data_loading": {"num_workers": 1}},
        steps_per_epoch=1562,
        batch_bytes=65_536,
        batch_splittable=False,
        varying_shapes=True,
        units_per_batch=16_384.5,
        randomness="switchable",
        custom_step=True,
        host_read="aten::nonzero (/home/me/train.py, line 12: mask.nonzero())",
        byte_form=True,
        look_samples=64.0,
        look_peak_bytes=500_000_000,
        sample_loss=4.174387,
        prepare_ns=1_000_000_001,
        import_ns=2_000_000_002,
        model_ns=3_000_000_003,
    )
    return replace(facts, **changes)


def sample_study(**changes: Any) -> Study:
    study = Study(
        study_id=STUDY_ID,
        workload="examples/char_gpt.py:CharGPT",
        settings=StudySettings(
            budget_s=240.0,
            max_trials=40,
            allow=(Numerics.LOSSY,),
            only=("precision", "data_loading"),
            skip=("compile",),
            seed=7,
            measure=MeasureSettings(window_s=0.3, min_rounds=6),
            num_ranks=2,
            device="cuda:0",
            memory_limit_bytes=70 << 30,
            confirm_blocks=6,
            num_finalists=3,
        ),
        created_at="2026-11-21T10:20:30.123456+00:00",
        directory="/somewhere/studies/06f1x8",
        state=StudyState.INTERRUPTED,
        facts=sample_facts(),
        environment=sample_environment(),
        message="stopped by the user",
        steptune_version="0.1.0",
    )
    return replace(study, **changes)


def sample_trial(**changes: Any) -> Trial:
    """A trial that is about to run."""
    trial = Trial(
        trial_id=TRIAL_ID,
        study_id=STUDY_ID,
        sequence=3,
        candidate=CANDIDATE,
        purpose=Purpose.EXPLORE,
        group="group-2",
        replicate=1,
        state=TrialState.RUNNING,
        started_at="2026-11-21T10:21:00+00:00",
        attempts=2,
    )
    return replace(trial, **changes)


def sample_window(round: int = 0, **changes: Any) -> Window:
    window = Window(
        round=round,
        position=32 * round,
        num_steps=8,
        num_samples=512,
        num_units=131_072,
        duration_ns=203_456_789 + round,
        step_p20_ns=25_000_000,
        step_p50_ns=25_400_000,
        step_p80_ns=26_100_000,
        queue_depth_start=4,
        queue_depth_end=3,
        foreign_cpu_share=0.015625,
    )
    return replace(window, **changes)


def sample_reading() -> DeviceReading:
    return DeviceReading(
        sm_clock_mhz=1755,
        power_w=650.5,
        power_limit_w=700.0,
        temperature_c=61,
        limits=("power cap",),
        slowed_share=0.001,
        foreign_share=0.0,
    )


def sample_breakdown(**changes: Any) -> Breakdown:
    breakdown = Breakdown(
        rank=0,
        device="cuda:0",
        num_steps=4,
        step_time_ns=100_000_000,
        categories={"compute": 70_000_000, "launch_gap": 20_000_000, "data_wait": 10_000_000},
        quality=CaptureQuality(
            num_events=4321,
            num_steps=4,
            unlinked_share=0.01,
            missing_share=0.02,
            overhead_ratio=1.25,
            problems=("two launches without a kernel",),
        ),
        unprofiled_step_time_ns=20_000_000,
        rescaled={"compute": 17_500_000, "launch_gap": 1_500_000, "data_wait": 1_000_000},
        overlapped={"copy": 5_000_000},
        operators=("aten::mm", "aten::native_layer_norm"),
    )
    return replace(breakdown, **changes)


def sample_finding(**changes: Any) -> Finding:
    finding = Finding(
        rule="data_wait",
        severity="high",
        message="The device waits for data 10 % of the time.",
        advice="Use more workers.",
        strategies=("data_loading", "dataset_cache"),
        bound=0.1,
        evidence={"data_wait_share": 0.1, "loader": "one worker"},
    )
    return replace(finding, **changes)


def sample_guard(**changes: Any) -> GuardVerdict:
    guard = GuardVerdict(
        passed=True,
        num_steps=20,
        checks=(
            GuardCheck(name="loss", kind="pointwise", passed=True, observed=1e-6, tolerance=1e-5, detail="step 3"),
            GuardCheck(name="indices", kind="loader", passed=True, observed=0.0, tolerance=0.0),
        ),
        losses=(4.17, 4.05, 0.1 + 0.2),
        reference_losses=(4.17, 4.06, 0.3),
        skipped_steps=1,
    )
    return replace(guard, **changes)


def sample_profile() -> TrialProfile:
    return TrialProfile(
        kernels=(
            KernelStats(
                name="gemm",
                category="compute_matmul",
                count=3,
                total_ns=30,
                share=0.3,
                mean_ns=10,
                max_ns=12,
                tensor_cores=True,
                occupancy=0.5,
            ),
        ),
        gap_sites=(GapSite(category="host", kernel_after="gemm", count=2, total_ns=7),),
        collectives=(
            CollectiveStats(
                name="allreduce",
                group="0",
                group_size=2,
                message_bytes=1024,
                dtype="Float",
                count=1,
                total_ns=9,
                exposed_ns=4,
                bus_bytes_per_s=1e9,
            ),
        ),
    )


def sample_compilation(**changes: Any) -> Compilation:
    event = CompilationEvent(reason="L['self'].layer == 3", place="forward (/home/me/train.py, line 12)", count=7)
    compilation = Compilation(
        num_graphs=9,
        num_graph_breaks=2,
        graph_breaks=(replace(event, reason="call to print", count=2),),
        num_recompilations=7,
        recompilations=(event,),
        num_given_up=1,
        num_cudagraph_skips=3,
        cudagraph_skips=(replace(event, reason="mutated inputs", place="", count=3),),
        late_graphs=4,
        seconds=12.5,
        cache_hits=5,
        cache_misses=6,
    )
    return replace(compilation, **changes)


def sample_result(**changes: Any) -> TrialResult:
    result = TrialResult(
        trial_id=TRIAL_ID,
        candidate=CANDIDATE,
        purpose=Purpose.EXPLORE,
        group="group-2",
        windows=(
            sample_window(0, device=sample_reading()),
            sample_window(1, void="another process used the device"),
            sample_window(2),
        ),
        startup=Startup(
            build_ns=1_500_000_000,
            user_code_ns=700_000_000,
            first_step_ns=1_600_000_000,
            warm_up_ns=2_000_000_000,
            warm_up_steps=12,
            steady=True,
            compile_ns=900_000_000,
            compile_cold=True,
        ),
        epoch_restart_ns=45_000_000,
        steps_per_epoch=1562,
        memory=(
            MemoryPeak(rank=0, resident_bytes=1 << 30, allocated_bytes=3 << 30, reserved_bytes=4 << 30),
            MemoryPeak(rank=1, resident_bytes=2 << 30, device_bytes=5 << 30),
        ),
        breakdowns=(sample_breakdown(), sample_breakdown(rank=1, device="cuda:1", rescaled={})),
        profile=sample_profile(),
        findings=(sample_finding(), sample_finding(rule="launch_gap", severity="note", bound=0.05)),
        guard=sample_guard(),
        effects=(Effect(strategy="precision", took=True, detail="mm ran in bfloat16"),),
        compilation=sample_compilation(),
        contended=True,
        unmeasured=("energy of the device: Not Supported",),
        interpreter="fresh",
        isolation="rlimit",
        phases_ns={"build": 1_500_000_000, "measure": 3_000_000_000},
        trace_digest="ab" * 32,
    )
    return replace(result, **changes)


def failed_result(**changes: Any) -> TrialResult:
    """Result of a trial whose loss left the reference, and that then crashed."""
    check = GuardCheck(
        name="loss", kind="curve", passed=False, observed=float("inf"), tolerance=0.01, detail="not finite"
    )
    result = sample_result(
        guard=sample_guard(passed=False, checks=(check,), losses=(4.17, float("inf"), float("-inf"))),
        failure=Failure(
            kind=FailureKind.CRASH,
            phase=Phase.MEASURE,
            message="the rank was killed",
            rank=1,
            signal=11,
            traceback="Traceback: \x00 'caf\udce9' …",
        ),
    )
    return replace(result, **changes)


def sample_decision(sequence: int = 1, **changes: Any) -> Decision:
    decision = Decision(
        sequence=sequence,
        stage="moves",
        verdict="accepted",
        reason="The device waits for data 10 % of the time.",
        candidate=CANDIDATE,
        moves=(Move(strategy="data_loading", choice={"num_workers": 2}),),
        trial_ids=(TRIAL_ID,),
        predicted_bound=0.1,
        measured_gain=0.0625,
        measured_se=0.004,
    )
    return replace(decision, **changes)


def sample_recommendation(**changes: Any) -> Recommendation:
    facts, hardware = sample_facts(), sample_hardware()
    recommendation = Recommendation(
        study_id=STUDY_ID,
        created_at="2026-11-21T10:25:00+00:00",
        workload=facts.reference,
        workload_signature=facts.signature,
        global_batch=facts.global_batch,
        sample_unit=facts.sample_unit,
        verdict=Verdict.FASTER,
        candidate=CANDIDATE,
        choices={**CANDIDATE.choices, "compile": {"mode": "off"}},
        environment_variables={"OMP_NUM_THREADS": "2"},
        hardware=hardware,
        baseline_units_per_s=5120.5,
        units_per_s=7680.75,
        gain=Gain(
            ratio=1.5,
            interval=Interval(low=1.45, high=1.55),
            prediction=Interval(low=1.4, high=1.6, level=0.9),
            num_blocks=6,
            num_finalists=3,
        ),
        parts=(
            Part(
                strategy="data_loading",
                choice={"num_workers": 2},
                gain=1.1,
                interval=Interval(low=1.05, high=1.15),
                bound=0.1,
                reason="The device waited for data.",
                numerics=Numerics.SAMPLING,
            ),
        ),
        shares_before={"compute": 0.7, "data_wait": 0.3},
        shares_after={"compute": 0.95, "data_wait": 0.05},
        bottleneck_before="data_wait",
        bottleneck_after="compute",
        guard=sample_guard(),
        certificate=Certificate(
            remaining_bound=0.008,
            status="audited",
            noise=0.006,
            ended="no bound above noise",
            not_tried=(sample_decision(9, verdict="not_tried", measured_gain=None),),
            audits=4,
            audit_violations=1,
        ),
        cost=Cost(tuning_s=201.5, num_trials=31, compile_s=12.5, payback_steps=400.0, payback_tuning_steps=9000.0),
        alternatives=(
            Alternative(
                candidate=Candidate(choices={"precision": {"level": "O1"}}),
                gain=1.3,
                peak_memory_bytes=2 << 30,
                numerics=Numerics.ROUNDING,
                guard="same for 20 steps",
            ),
        ),
        peak_memory_bytes=4 << 30,
        baseline_peak_memory_bytes=5 << 30,
        steptune_version="0.1.0",
    )
    return replace(recommendation, **changes)

"""Every rule fires on the breakdown made for it, and not on its neighbour."""

import dataclasses
import re

import msgspec
import pytest
from profiled import STEP_NS, breakdown_of, situation

from steptune.tuner.costs.bounds import Situation
from steptune.tuner.costs.categories import Category
from steptune.tuner.profiling.diagnosis import RULES, diagnose
from steptune.tuner.profiling.evidence import Evidence, busiest
from steptune.tuner.profiling.quality import PROBLEMS
from steptune.tuner.profiling.rank_findings import diagnose_ranks
from steptune.tuner.profiling.rules.input import BUSY
from steptune.tuner.profiling.rules.rule import Rule
from steptune.tuner.profiling.what_if import what_ifs
from steptune.tuner.records import (
    Calibration,
    CaptureQuality,
    CollectiveStats,
    Finding,
    InputActivity,
    KernelStats,
    ModelFacts,
    Stall,
    Stalls,
    StepFacts,
)
from steptune.tuner.strategies import STRATEGIES, strategies_for
from steptune.tuner.trace_records import ExtraWork, Gap, GapStats, MemoryStats, ProcessGroup, RankAnalysis, RankWait
from steptune.tuner.wording import milliseconds

C = Category
FASTER_IN_BF16 = Calibration(matmul_flops_per_s={"float32": 1e9, "bfloat16": 4e9}, copy_bytes_per_s=0.0)
SAME_IN_BF16 = Calibration(matmul_flops_per_s={"float32": 1e9, "bfloat16": 1.2e9}, copy_bytes_per_s=0.0)
FP32 = {"precision": {"level": "fp32"}}


def small_model(flops: int) -> ModelFacts:
    return ModelFacts(num_parameters=10, parameter_bytes=40, num_parameter_tensors=1, flops_per_step=flops)


FACTS = {
    "idle_tensor_cores": lambda share: StepFacts(matmul_dtype="float32", faster_dtypes=("tf32", "bfloat16", "float16")),
    "layout_conversions": lambda share: StepFacts(layout_ns=share * STEP_NS),
}
"""Facts of a step that have to be known, beside its shares, for a rule to speak."""
OF_TRACES = ("idle_tensor_cores", "unsteady_steps")
"""Rules that look at what only the analysis of a trace has."""


def neutral_rest(rule: Rule) -> Category:
    """A category that no rule is about."""
    assert not any(C.UNKNOWN in other.categories for other in RULES)
    return C.UNKNOWN


def analysis(**changes) -> RankAnalysis:
    """Analysis of a trace without anything remarkable."""
    fields = {
        "file": "trace.json",
        "rank": 0,
        "num_ranks": 1,
        "framing": "chunked",
        "num_events": 100,
        "num_lost": 0,
        "device_names": {},
        "breakdowns": (),
        **changes,
    }
    return RankAnalysis(**fields)


def details(rule: Rule, share: float) -> RankAnalysis:
    """Analysis of a trace in which the rule's own measure is this, and its condition holds."""
    return analysis(
        tensor_core_share=0.0 if rule.name == "idle_tensor_cores" else None,
        step_time_cv=share if rule.name == "unsteady_steps" else 0.0,
        extra_work=ExtraWork(steps=(1,), time_ns=round(share * 10**6)) if rule.name == "extra_work" else None,
        memory=(
            MemoryStats(
                device="cuda:0",
                peak_allocated_bytes=0,
                peak_reserved_bytes=round(share * 10**9) if rule.name == "memory_nearly_full" else 0,
                total_memory_bytes=10**9,
                timeline=(),
            ),
        ),
    )


def made_for(rule: Rule, share: float, *, device_kind: str | None = None, category: Category | None = None) -> Evidence:
    """A step in which one of the rule's categories (its first) has this share and the rule's condition holds."""
    kind = device_kind or rule.devices[-1]
    category = category or next(iter(rule.categories), C.QUEUED)
    breakdown = breakdown_of({category: share if rule.categories else 0.0}, device=kind, rest=neutral_rest(rule))
    breakdown = msgspec.structs.replace(breakdown, facts=FACTS.get(rule.name, lambda share: StepFacts())(share))
    if rule.name in OF_TRACES:
        return Evidence(analysis=msgspec.structs.replace(details(rule, share), breakdowns=(breakdown,)))
    found = situation(
        breakdown,
        device_kind=kind,
        choices=FP32 if rule.name == "single_precision" else {"precision": {"level": "O1"}},
        calibration=FASTER_IN_BF16
        if rule.name == "single_precision"
        else Calibration(matmul_flops_per_s={"float32": 1e12}),
        model=small_model(1_000),
        batch_bytes=0,
    )
    return Evidence(situation=found, analysis=details(rule, share))


def findings_of(found: Evidence | Situation) -> tuple[Finding, ...]:
    return diagnose(found if isinstance(found, Evidence) else Evidence(situation=found))


def fired(found: Evidence | Situation) -> dict[str, str]:
    return {finding.rule: finding.severity for finding in findings_of(found)}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
class TestEveryRule:
    def test_is_silent_below_its_lowest_threshold(self, rule: Rule) -> None:
        assert rule.name not in fired(made_for(rule, rule.thresholds[0] - 0.001))

    @pytest.mark.parametrize(("level", "severity"), list(enumerate(["note", "warning", "high"])))
    def test_its_severity_grows_with_its_share(self, rule: Rule, level: int, severity: str) -> None:
        assert fired(made_for(rule, rule.thresholds[level] + 0.0001))[rule.name] == severity

    def test_its_bound_is_what_it_can_reach_of_the_share_it_speaks_of(self, rule: Rule) -> None:
        """A rule that speaks of no time of the step bounds nothing."""
        share = min(rule.thresholds[2] + 0.05, 0.99)
        finding = next(f for f in findings_of(made_for(rule, share)) if f.rule == rule.name)
        assert f"{share:.0%}" in finding.message
        if rule.categories:
            assert finding.bound == pytest.approx(rule.reach * share)
            assert finding.evidence[f"{rule.categories[0].value}_ms"] == pytest.approx(share), "of a step of 1 ms"
        else:
            assert finding.bound == 0.0

    def test_each_of_its_categories_counts(self, rule: Rule) -> None:
        for category in rule.categories:
            assert rule.name in fired(made_for(rule, rule.thresholds[0] + 0.001, category=category))

    def test_it_speaks_only_of_its_devices(self, rule: Rule) -> None:
        for kind in ("cpu", "cuda"):
            assert (rule.name in fired(made_for(rule, 0.9, device_kind=kind))) == (kind in rule.devices)

    def test_other_rules_do_not_fire_on_what_is_not_theirs(self, rule: Rule) -> None:
        """A rule that shares no category with this one finds nothing."""
        for name in fired(made_for(rule, 0.9)):
            other = next(r for r in RULES if r.name == name)
            assert other is rule or set(rule.categories) & set(other.categories)

    def test_its_strategies_exist(self, rule: Rule) -> None:
        assert set(rule.strategies) <= {strategy.name for strategy in STRATEGIES}
        advised = {cure for remedy in rule.remedies for cure in remedy.cures} | set(rule.of_causes)
        assert all(strategies_for(cure) for cure in advised)

    def test_its_thresholds_rise(self, rule: Rule) -> None:
        assert 0 < rule.thresholds[0] < rule.thresholds[1] < rule.thresholds[2] < 1


class TestConditions:
    @pytest.mark.parametrize(
        ("choices", "calibration", "expected"),
        [
            (FP32, FASTER_IN_BF16, True),
            (FP32, SAME_IN_BF16, False),
            (FP32, Calibration(), False),
            ({"precision": {"level": "O1"}}, FASTER_IN_BF16, False),
        ],
        ids=["fp32 on a device with fast bf16", "bf16 hardly faster", "nothing measured", "16-bit already"],
    )
    def test_fp32_is_named_only_where_another_format_is_faster(self, choices, calibration, expected: bool) -> None:
        found = situation(breakdown_of({C.MATMUL: 0.9}), choices=choices, calibration=calibration)
        assert ("single_precision" in fired(found)) == expected

    @pytest.mark.parametrize(("flops", "expected"), [(100_000, True), (320_000, False)])
    def test_compute_is_inefficient_only_far_from_its_roofline(self, flops: int, expected: bool) -> None:
        """0.9 ms of compute, of which the roofline explains 0.1 or 0.32 ms."""
        calibration = Calibration(matmul_flops_per_s={"float32": 1e9})
        found = situation(
            breakdown_of({C.MATMUL: 0.9}), calibration=calibration, model=small_model(flops), batch_bytes=0
        )
        assert ("inefficient_compute" in fired(found)) == expected

    def test_without_a_known_roofline_compute_is_not_called_inefficient(self) -> None:
        assert "inefficient_compute" not in fired(situation(breakdown_of({C.MATMUL: 0.9})))


class TestFindings:
    def test_the_largest_bound_comes_first(self) -> None:
        found = situation(breakdown_of({C.DATA_WAIT: 0.2, C.OPTIMIZER: 0.4, C.HOST: 0.3}))
        findings = findings_of(found)
        assert [f.rule for f in findings] == ["optimizer", "python_bound", "input_bound"]
        assert [f.bound for f in findings] == sorted((f.bound for f in findings), reverse=True)

    def test_a_balanced_step_has_none(self) -> None:
        assert findings_of(situation(breakdown_of({C.MATMUL: 1.0}))) == ()

    def test_a_bad_capture_says_why_and_claims_nothing_else(self) -> None:
        """An empty device in a bad capture is no idle device."""
        problems = ("98% of the launches have no recorded device work", "the profiler made the step 3.00 times as long")
        found = situation(breakdown_of({C.DATA_WAIT: 0.9}, problems=problems))
        findings = findings_of(found)
        assert {f.rule for f in findings} == {"bad_capture"}
        assert [f.message for f in findings] == [f"the profile cannot be trusted: {problem}" for problem in problems]
        assert all(f.bound == 0 and f.strategies == () for f in findings)

    def test_the_advice_is_for_the_problem_of_the_capture(self) -> None:
        """Whose file was cut needs another advice than whose step time was wrong."""
        breakdown = breakdown_of({C.DATA_WAIT: 0.9})
        for problem in PROBLEMS:
            quality = CaptureQuality(num_events=1, num_steps=1, problems=("it is bad",), problem_names=(problem.name,))
            traced = msgspec.structs.replace(breakdown, quality=quality)
            (finding,) = diagnose(Evidence(analysis=analysis(breakdowns=(traced,))))
            assert (finding.advice, finding.evidence) == (problem.advice, {"problem": problem.name})
        assert len({problem.advice for problem in PROBLEMS}) == len(PROBLEMS)

    @pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
    def test_nobody_is_told_how_to_record_what_steptune_recorded(self, problem) -> None:
        """Advice for a trial, and for its trace where that is analysed later."""
        quality = CaptureQuality(num_events=1, num_steps=1, problems=("it is bad",), problem_names=(problem.name,))
        breakdown = msgspec.structs.replace(breakdown_of({C.DATA_WAIT: 0.9}), quality=quality)
        kept = msgspec.structs.replace(breakdown, facts=StepFacts(own_capture=True))
        for evidence in (Evidence(situation=situation(breakdown)), Evidence(analysis=analysis(breakdowns=(kept,)))):
            (finding,) = diagnose(evidence)
            assert finding.advice == problem.own_advice
            assert not re.search(r"with_stack|record_shapes|ProfilerActivity|schedule|warm up", finding.advice)

    def test_rules_have_names_of_their_own(self) -> None:
        assert len({rule.name for rule in RULES}) == len(RULES)

    def test_the_rescaled_step_is_what_is_judged(self) -> None:
        """Host time that only the profiler spent is no finding."""
        profiled = breakdown_of({C.MATMUL: 0.5, C.HOST: 0.5})
        rescaled = msgspec.structs.replace(profiled, rescaled={"compute_matmul": 500_000, "host": 10_000})
        assert "python_bound" in fired(situation(profiled))
        assert "python_bound" not in fired(situation(rescaled))


class TestInputCauses:
    """More workers do not help a disk, and a cache does not help what is computed anew."""

    def finding(self, activity: InputActivity | None, **shares: float) -> Finding:
        shares = shares or {"data_wait": 0.5}
        found = situation(breakdown_of({C(name): share for name, share in shares.items()}))
        (finding,) = findings_of(dataclasses.replace(found, input=activity))
        assert finding.rule == "input_bound"
        return finding

    def activity(self, runnable: float, workers: int = 2) -> InputActivity:
        return InputActivity(num_workers=workers, wait_ns=10**9, runnable_share=runnable, read_bytes_per_s=20e6)

    def test_makers_that_compute_are_preprocessing(self) -> None:
        finding = self.finding(self.activity(BUSY + 0.01))
        assert finding.evidence["cause"] == "preprocessing"
        assert "num_workers=2: the worker processes are CPU-bound (81% of the time)" in finding.message

    def test_makers_that_sleep_wait_for_storage(self) -> None:
        finding = self.finding(self.activity(0.3, workers=0))
        assert finding.evidence["cause"] == "storage"
        assert "num_workers=0: loading runs in the main process and is idle for 70% of the time" in finding.message
        assert "20 MB/s" in finding.message
        assert "cpu_threads" not in finding.strategies

    def test_starting_epochs_is_a_cause_of_its_own_whatever_the_makers_do(self) -> None:
        finding = self.finding(self.activity(0.9), epoch_restart=0.3, data_wait=0.1)
        assert finding.evidence["cause"] == "restart"
        assert finding.strategies == ("data_loading",)

    def test_without_a_measurement_no_cause_is_claimed(self) -> None:
        assert "cause" not in self.finding(None).evidence
        assert "load with worker processes" in self.finding(None).advice

    def test_a_loader_with_workers_is_not_told_to_use_workers(self) -> None:
        breakdown = breakdown_of({C.DATA_WAIT: 0.5}, rest=C.UNKNOWN)
        breakdown = msgspec.structs.replace(breakdown, facts=StepFacts(loader="workers"))
        (finding,) = diagnose(Evidence(analysis=analysis(breakdowns=(breakdown,))))
        assert "worker processes already load batches, but do not keep up" in finding.message
        assert "load with worker processes" not in finding.advice


class TestPlaces:
    """A finding of a trace says where in the program it happens."""

    def gap(self, length_ns: int, category: Category, **changes: str) -> Gap:
        fields = {"kernel_before": "a", "kernel_after": "b", "operator_before": "", "operator_after": "", **changes}
        return Gap(start_ns=0, length_ns=length_ns, category=category.value, **fields)

    def test_the_longest_gaps_of_its_categories_are_named_with_operator_and_line(self) -> None:
        gaps = (
            self.gap(3_000_000, C.SYNCHRONISATION, operator_after="aten::item", source="train.py(12): step"),
            self.gap(2_000_000, C.HOST),
            self.gap(1_000_000, C.SYNCHRONISATION),
        )
        stats = GapStats(count=3, total_ns=6, median_ns=2, p99_ns=3, histogram={}, time_ns={}, longest=gaps)
        breakdown = breakdown_of({C.SYNCHRONISATION: 0.5}, device="cuda:0", rest=C.UNKNOWN)
        (finding,) = diagnose(Evidence(analysis=analysis(breakdowns=(breakdown,), gaps={"cuda:0": stats})))
        assert finding.evidence == {
            "synchronisation_ms": 0.5,
            "at_1": "3 ms before aten::item (train.py(12): step)",
            "at_2": "1 ms before b",
        }

    def test_the_longest_kernels_of_its_categories_are_named(self) -> None:
        kernel = KernelStats(
            name="layer_norm",
            category="compute_normalisation",
            count=7,
            total_ns=5_000_000,
            share=0.5,
            mean_ns=1,
            max_ns=1,
            tensor_cores=False,
        )
        breakdown = breakdown_of({C.NORMALISATION: 0.5}, device="cuda:0", rest=C.UNKNOWN)
        (finding,) = diagnose(Evidence(analysis=analysis(breakdowns=(breakdown,), kernels=(kernel,))))
        assert finding.rule == "unfused"
        assert finding.evidence["at_1"] == "layer_norm: 5 ms in 7 runs"


class TestWaitingLosses:
    """A host that waits in a loss for which there is a kernel."""

    def found(self, refusals: dict[str, str], **used: bool) -> Finding:
        model = msgspec.structs.replace(small_model(1_000), kernel_refusals=refusals)
        step = breakdown_of({C.SYNCHRONISATION: 0.2}, device="cuda:0")
        found = findings_of(situation(step, device_kind="cuda", model=model, choices={"fused_kernels": {**used}}))
        return next(finding for finding in found if finding.rule == "synchronisation")

    def test_the_kernel_is_named_and_offered(self) -> None:
        found = self.found(
            {"simota": "", "window_attention": "", "fcos3d": "the model contains no part that this kernel computes"}
        )
        assert found.strategies == ("fused_kernels",)
        assert found.message.endswith("; simota can assign the boxes of a batch without waiting")
        assert "avoid .item()" in found.advice

    def test_one_that_is_used_is_not_offered_again(self) -> None:
        assert self.found({"simota": ""}, simota=True).strategies == ()

    def test_one_that_removes_no_wait_is_not_offered_for_it(self) -> None:
        assert self.found({"window_attention": "", "lamb": ""}).strategies == ()


def test_a_launch_bound_step_names_the_kernel_that_its_loss_has_a_use_for() -> None:
    model = msgspec.structs.replace(small_model(1_000), kernel_refusals={"simota": "", "window_attention": ""})
    step = breakdown_of({C.LAUNCH_LATENCY: 0.5}, device="cuda:0")
    found = findings_of(situation(step, device_kind="cuda", model=model, choices={}))
    launches = next(finding for finding in found if finding.rule == "launch_bound")
    assert launches.message.endswith("; simota can assign the boxes of a batch in a few launches")
    assert launches.strategies[0] == "fused_kernels"
    assert "cuda_graph" in launches.strategies


class TestRanks:
    """Findings that only several ranks show."""

    def collective(self, *, latency_ns: int, skew_ns: int) -> CollectiveStats:
        return CollectiveStats(
            name="allreduce",
            group="0",
            group_size=2,
            message_bytes=8,
            dtype="Float",
            count=10,
            total_ns=0,
            exposed_ns=0,
            latency_ns=latency_ns,
            skew_ns=skew_ns,
        )

    def evidence(self, late_part: float, communication: float = 0.4, blocking: float = 1.0) -> Evidence:
        """A step of which this much communicates; of that the rank waits for a late one during `late_part`."""
        breakdown = breakdown_of({C.COMMUNICATION: communication}, device="cuda:0", rest=C.UNKNOWN)
        held = {C.COMMUNICATION.value: round(blocking * breakdown.categories[C.COMMUNICATION.value])}
        breakdown = msgspec.structs.replace(breakdown, blocking=held)
        return Evidence(analysis=analysis(breakdowns=(breakdown,)), late_part=late_part)

    def found(self, first: Evidence) -> list[Finding]:
        waits = (RankWait(rank=0, wait_ns=100, late_share=0.1), RankWait(rank=1, wait_ns=0, late_share=0.9))
        collectives = (self.collective(latency_ns=10, skew_ns=100),)
        return diagnose_ranks({0: first, 1: self.evidence(0.0)}, waits, collectives, 1)

    def test_a_rank_that_is_waited_for_is_named(self) -> None:
        (finding,) = self.found(self.evidence(0.25))
        assert finding.rule == "rank_skew"
        assert "for 10% of the step rank 0 waits for rank 1, which arrives last in 90% of the" in finding.message
        assert finding.bound == pytest.approx(0.1)

    @pytest.mark.parametrize(
        ("late_part", "rules"),
        [
            (0.0, {"exposed_communication": 0.4}),
            (0.5, {"exposed_communication": 0.2, "rank_skew": 0.2}),
            (1.0, {"rank_skew": 0.4}),
        ],
    )
    @pytest.mark.parametrize("blocking", [1.0, 0.5])
    def test_waiting_for_a_late_rank_is_no_exposed_communication(self, late_part, rules, blocking) -> None:
        """A wait is one finding's or the other's: their bounds sum to what communication holds up."""
        evidence = self.evidence(late_part, blocking=blocking)
        bounds = {finding.rule: finding.bound for finding in (*diagnose(evidence), *self.found(evidence))}
        assert bounds == pytest.approx({rule: bound * blocking for rule, bound in rules.items()})

    def test_the_networks_part_says_what_it_leaves_out(self) -> None:
        (finding,) = diagnose(self.evidence(0.25))
        assert finding.message.startswith("30% of the step is spent communicating")
        assert "waiting for a late rank takes another 10%, which is not included" in finding.message
        assert finding.evidence["communication_ms"] == pytest.approx(0.3), "of a step of 1 ms"

    @pytest.mark.parametrize(
        ("late", "named"),
        [
            ((2, 3), "(2 and 3 are late: all of process group shards within a host)"),
            ((1, 3), "(1 and 3 are late: all of process group replicas across 2 hosts)"),
            ((0, 3), "(0 and 3 are late)"),
        ],
    )
    def test_a_group_that_is_late_as_a_whole_is_named(self, late: tuple[int, ...], named: str) -> None:
        groups = (
            ProcessGroup(name="all", ranks=(0, 1, 2, 3, 4, 5), num_hosts=3),
            ProcessGroup(name="shards", ranks=(2, 3), num_hosts=1),
            ProcessGroup(name="replicas", ranks=(1, 3), num_hosts=2),
        )
        waiting = self.evidence(0.25)
        waiting = dataclasses.replace(waiting, analysis=msgspec.structs.replace(waiting.analysis, groups=groups))
        waits = [RankWait(rank=rank, wait_ns=0 if rank in late else 100, late_share=0.5) for rank in range(6)]
        (finding,) = diagnose_ranks(dict.fromkeys(range(6), waiting), waits, (), late[0])
        assert named in finding.message

    def test_a_short_wait_is_no_finding(self) -> None:
        assert self.found(self.evidence(0.04)) == []

    def test_one_rank_shows_no_skew(self) -> None:
        assert diagnose_ranks({0: self.evidence(0.0)}, (), (), None) == []


class TestCopies:
    """Pinning memory helps copies that do not come from pinned memory."""

    def finding(self, pinned: bool | None, prefetched: bool = False) -> Finding:
        breakdown = breakdown_of({C.COPY_H2D: 0.2}, device="cuda:0", rest=C.UNKNOWN)
        facts = StepFacts(pinned_memory=pinned, prefetched=prefetched)
        breakdown = msgspec.structs.replace(breakdown, facts=facts)
        (finding,) = diagnose(Evidence(analysis=analysis(breakdowns=(breakdown,))))
        assert finding.rule == "exposed_copies"
        return finding

    def test_copies_that_are_pinned_already_need_another_advice(self) -> None:
        finding = self.finding(True)
        assert finding.evidence["cause"] == "pinned"
        assert "another stream" in finding.advice
        assert "pin memory" not in finding.advice
        assert finding.strategies == ("device_prefetch",)

    def test_copies_beside_compute_are_not_told_to_go_there(self) -> None:
        finding = self.finding(True, prefetched=True)
        assert "another stream" not in finding.advice
        assert "send fewer bytes" in finding.advice

    @pytest.mark.parametrize("pinned", [False, None])
    def test_of_others_pinning_is_the_advice(self, pinned: bool | None) -> None:
        finding = self.finding(pinned)
        assert "pin memory" in finding.advice
        assert finding.strategies == ("data_loading", "device_prefetch")


class TestDevices:
    """All devices of a process share its steps: the one that computes most is judged."""

    def test_the_busiest_device_is_the_one_that_computes_most(self) -> None:
        """Not the one with the longest communication or copies, nor the first."""
        waits = breakdown_of({C.COMMUNICATION: 0.9, C.MATMUL: 0.1}, device="cuda:0")
        computes = breakdown_of({C.MATMUL: 0.3, C.OPTIMIZER: 0.2, C.HOST: 0.5}, device="cuda:1")
        computes = msgspec.structs.replace(computes, facts=StepFacts(optimizer="for_loop"))
        idles = breakdown_of({C.HOST: 1.0}, device="cuda:2")
        assert busiest((waits, computes, idles)) is computes
        findings = diagnose(Evidence(analysis=analysis(breakdowns=(waits, computes, idles))))
        assert {finding.rule for finding in findings} >= {"launch_bound", "optimizer"}
        assert "exposed_communication" not in {finding.rule for finding in findings}


class TestReach:
    """A bound is what the advice can reach, not the whole share."""

    def test_a_fused_optimizer_still_updates(self) -> None:
        (finding,) = diagnose(Evidence(situation=situation(breakdown_of({C.OPTIMIZER: 0.5}))))
        assert finding.bound == pytest.approx(0.4)

    def test_tensor_cores_still_multiply(self) -> None:
        breakdown = breakdown_of({C.MATMUL: 0.8}, device="cuda:0", rest=C.UNKNOWN)
        breakdown = msgspec.structs.replace(breakdown, facts=FACTS["idle_tensor_cores"](0.8))
        (finding,) = diagnose(Evidence(analysis=analysis(breakdowns=(breakdown,), tensor_core_share=0.0)))
        assert (finding.rule, finding.bound) == ("idle_tensor_cores", pytest.approx(0.7))


def test_memory_is_full_when_a_rank_s_part_of_a_shared_device_is() -> None:
    """The trace tells of the whole device, the hardware profile of the part."""
    [rule] = [rule for rule in RULES if rule.name == "memory_nearly_full"]
    whole = made_for(rule, 0.49, device_kind="cuda")
    assert whole.situation is not None
    assert rule.name not in fired(whole)
    environment = whole.situation.environment
    parts = tuple(msgspec.structs.replace(device, memory_bytes=5 * 10**8) for device in environment.hardware.devices)
    hardware = msgspec.structs.replace(environment.hardware, devices=parts)
    shared = dataclasses.replace(whole.situation, environment=msgspec.structs.replace(environment, hardware=hardware))
    assert fired(dataclasses.replace(whole, situation=shared))[rule.name] == "high"


class TestWhatIsAlreadyOn:
    """Nothing is advised that the step has already."""

    def findings(self, facts: StepFacts, shares: dict[Category, float], **fields) -> dict[str, Finding]:
        device = fields.pop("device", "cuda:0")
        breakdown = msgspec.structs.replace(breakdown_of(shares, device=device, rest=C.UNKNOWN), facts=facts)
        return {f.rule: f for f in diagnose(Evidence(analysis=analysis(breakdowns=(breakdown,), **fields)))}

    def test_a_compiled_step_is_not_told_to_compile(self) -> None:
        shares = {C.HOST: 0.4, C.ELEMENTWISE: 0.5}
        for compiled in (False, True):
            found = self.findings(StepFacts(compiled=compiled), shares)
            assert ("unfused" in found) == (not compiled)
            assert ("compile" in found["launch_bound"].advice) == (not compiled)
            assert ("compile" in found["launch_bound"].strategies) == (not compiled)
            assert "CUDA graph" in found["launch_bound"].advice

    def test_a_replayed_step_is_not_told_to_replay(self) -> None:
        found = self.findings(StepFacts(cuda_graphs=True), {C.HOST: 0.4})
        assert "CUDA graph" not in found["launch_bound"].advice
        assert "cuda_graph" not in found["launch_bound"].strategies

    @pytest.mark.parametrize(
        ("optimizer", "name", "advice"),
        [
            ("fused", "AdamW", None),
            ("", "AdamW", None),
            ("for_loop", "AdamW", "fused=True"),
            ("foreach", "SGD", "fused=True"),
            ("foreach", "RMSprop", None),
            ("for_loop", "RMSprop", "foreach=True"),
            ("foreach", "Shampoo", None),
        ],
    )
    def test_an_optimizer_is_told_what_it_can_do_and_does_not(self, optimizer, name, advice) -> None:
        found = self.findings(StepFacts(optimizer=optimizer, optimizer_name=name), {C.OPTIMIZER: 0.3, C.HOST: 0.4})
        assert ("optimizer" in found) == (advice is not None)
        assert (advice or "optimizer") in found["optimizer" if advice else "launch_bound"].advice or advice is None
        assert ("optimizer_implementation" in found["launch_bound"].strategies) == (advice is not None)

    @pytest.mark.parametrize(
        ("dtype", "faster", "said"),
        [
            ("float32", ("tf32", "bfloat16", "float16"), "TF32 or 16-bit"),
            ("float32", ("float16",), "FP16 matmuls"),
            ("float32", ("bfloat16", "float16"), "BF16 or FP16"),
            ("float32", (), None),
            ("float32", None, None),
            ("bfloat16", ("tf32", "bfloat16", "float16"), None),
            ("", ("tf32", "bfloat16", "float16"), None),
        ],
        ids=["A100", "V100", "MI210", "P100", "device unknown", "bf16", "arithmetic unknown"],
    )
    def test_a_precision_is_advised_only_where_the_device_has_it(self, dtype, faster, said) -> None:
        facts = StepFacts(matmul_dtype=dtype, faster_dtypes=faster)
        found = self.findings(facts, {C.MATMUL: 0.9}, tensor_core_share=0.0)
        assert ("idle_tensor_cores" in found) == (said is not None)
        if said is not None:
            assert said in found["idle_tensor_cores"].advice
            assert ("use TF32" in found["idle_tensor_cores"].advice) == ("tf32" in faster)

    def test_a_trial_s_choices_count_beside_its_trace(self) -> None:
        choices = {"compile": {"mode": "default"}, "optimizer_implementation": {"implementation": "fused"}}
        found = fired(situation(breakdown_of({C.ELEMENTWISE: 0.4, C.OPTIMIZER: 0.4}), choices=choices))
        assert not {"unfused", "optimizer"} & set(found)
        assert {"unfused", "optimizer"} <= set(fired(situation(breakdown_of({C.ELEMENTWISE: 0.4, C.OPTIMIZER: 0.4}))))

    def test_checkpointed_activations_are_not_advised_again(self) -> None:
        memory = MemoryStats(
            device="cuda:0", peak_allocated_bytes=0, peak_reserved_bytes=99, total_memory_bytes=100, timeline=()
        )
        for on in (False, True):
            found = self.findings(StepFacts(checkpointed=on), {C.MATMUL: 0.5}, memory=(memory,))["memory_nearly_full"]
            assert ("checkpoint activations" in found.advice) == (not on)

    def test_communication_that_overlaps_is_not_told_to(self) -> None:
        breakdown = breakdown_of({C.COMMUNICATION: 0.4}, device="cuda:0", rest=C.UNKNOWN)
        for hidden in (0, STEP_NS // 2):
            one = msgspec.structs.replace(breakdown, overlapped={C.COMMUNICATION.value: hidden})
            (finding,) = diagnose(Evidence(analysis=analysis(breakdowns=(one,))))
            assert ("overlap communication" in finding.advice) == (not hidden)


class TestStalls:
    """A host that stalls does not dispatch: launching less would not help it."""

    def findings(
        self, stalled: float, *, steps: int = 5, of: tuple[int, ...] = (1, 2, 3, 4, 5), name: str = "", **more
    ):
        device = more.pop("device", "cuda:0")
        one = breakdown_of({C.HOST: 0.8}, device=device, rest=C.UNKNOWN)
        idle_ns = round(stalled * STEP_NS * steps)
        breakdown = msgspec.structs.replace(
            one,
            num_steps=steps,
            step_time_ns=steps * STEP_NS,
            categories={n: steps * v for n, v in one.categories.items()},
            stalls=Stalls(
                limit_ns=10**6,
                idle_ns=idle_ns,
                steps=of,
                longest=(Stall(step=of[0], length_ns=20_000_000, idle_ns=idle_ns, name=name),),
            ),
            **more,
        )
        return {f.rule: f for f in diagnose(Evidence(analysis=analysis(breakdowns=(breakdown,))))}

    @pytest.mark.parametrize(("device", "rule"), [("cuda:0", "launch_bound"), ("cpu", "python_bound")])
    def test_what_is_stalled_is_not_launch_bound(self, device: str, rule: str) -> None:
        found = self.findings(0.5, device=device)
        assert found["host_stall"].bound == pytest.approx(0.5)
        assert found["host_stall"].strategies == ()
        assert found[rule].bound == pytest.approx(0.3)
        assert rule not in self.findings(0.8, device=device)

    def test_a_single_stall_costs_its_mean_share(self) -> None:
        """It may not come again: a note, of what it took of these steps."""
        found = self.findings(0.5, of=(3,))["host_stall"]
        assert (found.bound, found.severity) == (pytest.approx(0.5), "note")
        assert "stalls of up to 20 ms in step 3 of 5 only" in found.message
        assert (milliseconds(12_340_000), milliseconds(999_800_000), milliseconds(1_034e6)) == (
            "12.3 ms",
            "1 s",
            "1.03 s",
        )

    def test_it_says_what_was_recorded_there(self) -> None:
        assert "with no recorded activity" in self.findings(0.5)["host_stall"].message
        assert "with_stack=True" in self.findings(0.5)["host_stall"].advice
        named = self.findings(0.5, name="serialization.py(960): save")["host_stall"]
        assert "during serialization.py(960): save" in named.message
        assert "with_stack" not in named.advice

    def test_the_profiler_makes_dispatch_longer_and_not_a_stall(self) -> None:
        """A stall is 0.5 of 0.8 ms of host time; without the profiler 0.6 are left, of them the stall whole."""
        found = self.findings(0.5, rescaled={"host": 600_000, "unknown": 200_000})
        assert found["host_stall"].bound == pytest.approx(0.5 / 0.8)
        assert found["launch_bound"].bound == pytest.approx(0.1 / 0.8)

    def test_a_replayed_graph_does_not_remove_it(self) -> None:
        breakdown = breakdown_of({C.HOST: 0.8}, device="cuda:0", rest=C.UNKNOWN)
        stalls = Stalls(limit_ns=1, idle_ns=700_000, steps=(1,))
        (replayed,) = [w for w in what_ifs(msgspec.structs.replace(breakdown, stalls=stalls)) if "graph" in w.scenario]
        assert replayed.gain == pytest.approx(1 / 0.9)


def test_a_bound_above_the_share_of_its_category_is_refused() -> None:
    """Where what held compute up would be longer than the communication itself, the record is wrong."""
    breakdown = breakdown_of({C.COMMUNICATION: 0.4}, device="cuda:0", rest=C.UNKNOWN)
    wrong = msgspec.structs.replace(breakdown, blocking={C.COMMUNICATION.value: STEP_NS})
    with pytest.raises(AssertionError, match="exceeds the share of its categories"):
        diagnose(Evidence(analysis=analysis(breakdowns=(wrong,))))

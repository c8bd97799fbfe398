"""Every rule fires on the breakdown made for it, and not on its neighbour."""

import dataclasses

import msgspec
import pytest
from profiled import breakdown_of, situation

from tuner.profiling.bounds import Situation
from tuner.profiling.categories import Category
from tuner.profiling.diagnosis import RULES, Rule, diagnose
from tuner.records import Calibration, ModelFacts
from tuner.strategies import STRATEGIES

C = Category
FASTER_IN_BF16 = Calibration(matmul_flops_per_s={"float32": 1e9, "bfloat16": 4e9}, copy_bytes_per_s=0.0)
SAME_IN_BF16 = Calibration(matmul_flops_per_s={"float32": 1e9, "bfloat16": 1.2e9}, copy_bytes_per_s=0.0)
FP32 = {"precision": {"level": "fp32"}}


def small_model(flops: int) -> ModelFacts:
    return ModelFacts(num_parameters=10, parameter_bytes=40, num_parameter_tensors=1, flops_per_step=flops)


def neutral_rest(rule: Rule) -> Category:
    """A category that no rule is about."""
    assert not any(C.QUEUED in other.categories for other in RULES)
    return C.QUEUED


def made_for(rule: Rule, share: float, *, device_kind: str | None = None) -> Situation:
    """A step in which the rule's first category has this share and the rule's condition holds."""
    kind = device_kind or rule.devices[-1]
    return situation(
        breakdown_of({rule.categories[0]: share}, device=kind, rest=neutral_rest(rule)),
        device_kind=kind,
        choices=FP32 if rule.name == "single_precision" else {"precision": {"level": "O1"}},
        calibration=FASTER_IN_BF16
        if rule.name == "single_precision"
        else Calibration(matmul_flops_per_s={"float32": 1e12}),
        model=small_model(1_000),
        batch_bytes=0,
    )


def fired(found: Situation) -> dict[str, str]:
    return {finding.rule: finding.severity for finding in diagnose(found)}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
class TestEveryRule:
    def test_is_silent_below_its_lowest_threshold(self, rule: Rule) -> None:
        assert rule.name not in fired(made_for(rule, rule.thresholds[0] - 0.001))

    @pytest.mark.parametrize(("level", "severity"), list(enumerate(["note", "warning", "high"])))
    def test_its_severity_grows_with_its_share(self, rule: Rule, level: int, severity: str) -> None:
        assert fired(made_for(rule, rule.thresholds[level] + 0.0001))[rule.name] == severity

    def test_its_bound_is_the_share_it_speaks_of(self, rule: Rule) -> None:
        share = rule.thresholds[2] + 0.05
        finding = next(f for f in diagnose(made_for(rule, share)) if f.rule == rule.name)
        assert finding.bound == pytest.approx(share)
        assert f"{share:.0%}" in finding.message
        assert finding.evidence == {f"{rule.categories[0].value}_ms": pytest.approx(share)}, "of a step of 1 ms"

    def test_each_of_its_categories_counts(self, rule: Rule) -> None:
        for category in rule.categories:
            alone = dataclasses.replace(
                made_for(rule, 0.0),
                breakdown=breakdown_of({category: rule.thresholds[0] + 0.001}, rest=neutral_rest(rule)),
            )
            assert rule.name in fired(alone)

    def test_it_speaks_only_of_its_devices(self, rule: Rule) -> None:
        for kind in ("cpu", "cuda"):
            assert (rule.name in fired(made_for(rule, 0.9, device_kind=kind))) == (kind in rule.devices)

    def test_other_rules_do_not_fire_on_what_is_not_theirs(self, rule: Rule) -> None:
        """What shares no category with a rule gives it no finding."""
        for name in fired(made_for(rule, 0.9)):
            other = next(r for r in RULES if r.name == name)
            assert rule.categories[0] in other.categories

    def test_its_strategies_exist(self, rule: Rule) -> None:
        assert set(rule.strategies) <= {strategy.name for strategy in STRATEGIES}

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
        findings = diagnose(found)
        assert [f.rule for f in findings] == ["optimizer", "python_bound", "input_bound"]
        assert [f.bound for f in findings] == sorted((f.bound for f in findings), reverse=True)

    def test_a_balanced_step_has_none(self) -> None:
        assert diagnose(situation(breakdown_of({C.MATMUL: 1.0}))) == ()

    def test_a_bad_capture_says_why_and_claims_nothing_else(self) -> None:
        """An empty device in a bad capture is no idle device."""
        problems = ("98% of the launches have no recorded device work", "the profiler made the step 3.00 times as long")
        found = situation(breakdown_of({C.DATA_WAIT: 0.9}, problems=problems))
        findings = diagnose(found)
        assert {f.rule for f in findings} == {"bad_capture"}
        assert [f.message for f in findings] == [f"the profile cannot be trusted: {problem}" for problem in problems]
        assert all(f.bound == 0 and f.strategies == () for f in findings)

    def test_rules_have_names_of_their_own(self) -> None:
        assert len({rule.name for rule in RULES}) == len(RULES)

    def test_the_rescaled_step_is_what_is_judged(self) -> None:
        """Host time that only the profiler spent is no finding."""
        profiled = breakdown_of({C.MATMUL: 0.5, C.HOST: 0.5})
        rescaled = msgspec.structs.replace(profiled, rescaled={"compute_matmul": 500_000, "host": 10_000})
        assert "python_bound" in fired(situation(profiled))
        assert "python_bound" not in fired(situation(rescaled))

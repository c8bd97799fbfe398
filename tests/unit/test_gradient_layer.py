"""Gradients by tensor: what is the same training passes under 16 bits, and faults of forward and backward do not.

A short form of `benchmarks/guard_power.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from guarded import BF16, FP32, PROTOCOL, Study, WithInfinities, make_study, neutral_choices
from guarded_fresh import FRESH, Student, Transducer
from guarded_trainings import (
    FAULTS,
    Causal,
    Convolutional,
    Experts,
    Masked,
    Perceptron,
    Recurrent,
    Regression,
    Residual,
    Training,
)
from msgspec.structs import replace
from torch import nn

from steptune.tuner.guard.gradients import (
    COARSE,
    FINE,
    Score,
    at_distance,
    distances,
    limits_of,
    measure_distances,
    measure_noise,
    scores,
    worst_of,
)
from steptune.tuner.guard.mask_rates import ModuleMasks, worst_module
from steptune.tuner.guard.masks import (
    excess_of,
    excess_of_draws,
    measure_draws,
    measure_scatter,
    shift_of_draws,
)
from steptune.tuner.trials.gradient_watch import GradientReference
from steptune.tuner.trials.guard_checks import check_gradients
from steptune.tuner.trials.mask_watch import MaskWatch
from steptune.tuner.trials.twin import audit, make_twin

FP16 = 2.0**-11
O1: dict[str, Any] = {"precision": {"level": "O1", "dtype": "bfloat16"}}
PROTOCOL = replace(PROTOCOL, num_pointwise=4, num_curve=8, num_horizon=0)


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Study:
    short = replace(PROTOCOL, num_curve=0)
    return make_study(tmp_path_factory.mktemp("masked") / "study", Masked, protocol=short, unit_roundoffs=(BF16,))


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return make_study(tmp_path_factory.mktemp("causal") / "study", Causal, protocol=PROTOCOL, unit_roundoffs=(BF16,))


def planted(name: str, training: type[Training]) -> Training:
    fault = next(fault for fault in FAULTS if fault.name == name).plant(training)
    assert fault is not None
    return fault()


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"micro_batch": {"num_micro_batches": 2}},
        {"activation_checkpointing": {"every": 1}},
        {"optimizer_implementation": {"implementation": "fused", "contiguous": True}},
        {"precision": {"level": "O2", "dtype": "bfloat16"}},
    ],
)
def test_the_same_training_passes_under_16_bits(masked: Study, change: dict[str, Any]) -> None:
    assert masked.failed(masked.job(**{**O1, **change}), unit_roundoff=BF16) == []


@pytest.mark.parametrize("training", [Convolutional, Masked])
def test_a_finer_arithmetic_than_the_reference_s_is_held_to_what_the_reference_rounds(
    tmp_path: Path, training: type[Training]
) -> None:
    roundoffs = (FP32, FP16, BF16)
    study = make_study(tmp_path / "study", training, protocol=PROTOCOL, unit_roundoffs=roundoffs, choices=O1)
    half: dict[str, Any] = {"precision": {"level": "O1", "dtype": "float16"}}
    for choices, unit_roundoff in ((half, FP16), ({}, FP32)):
        assert study.failed(study.job(**choices), unit_roundoff=unit_roundoff) == []
        assert study.failed(study.job(planted("loss 5 % smaller", training), **choices), unit_roundoff=unit_roundoff)


@pytest.mark.parametrize(
    "fault",
    [
        "loss 5 % smaller",
        "halves weighted alike",
        "last sample left out",
        "labels shifted by one token",
        "causal though it is not",
        "attention not scaled",
        "first branch detached",
        "a layer frozen",
        "a quarter of a gradient lost",
        "batch of the step before",
    ],
)
def test_faults_of_the_gradient_do_not_hide_behind_16_bits(masked: Study, fault: str) -> None:
    checks = masked.checks(masked.job(planted(fault, Masked), **O1), unit_roundoff=BF16)
    assert not checks["gradients"].passed
    assert "gradients" in checks["gradients"].detail or "only one of the two" in checks["gradients"].detail


@pytest.mark.parametrize("fault", ["gradient of one tensor 10 % larger", "penalty left out"])
@pytest.mark.parametrize("own", [False, True], ids=["FP32 to bf16", "bf16"])
def test_a_fault_below_the_rounding_of_16_bits_is_seen_where_precision_is_taken_back(
    tmp_path: Path, fault: str, own: bool
) -> None:
    short = replace(PROTOCOL, num_curve=0)
    roundoffs = (BF16,) if own else (FP32, BF16)
    study = make_study(
        tmp_path / "study", Regression, protocol=short, unit_roundoffs=roundoffs, choices=O1 if own else {}
    )
    assert study.failed(study.job(**O1), unit_roundoff=BF16, choices=O1) == []
    failed = study.failed(study.job(planted(fault, Regression), **O1), unit_roundoff=BF16, choices=O1)
    assert "gradients in FP32" in failed


def test_a_teacher_s_part_of_the_loss_is_seen_though_it_begins_as_its_student(tmp_path: Path) -> None:
    short = replace(PROTOCOL, num_curve=0)
    study = make_study(tmp_path / "study", Student, protocol=short, unit_roundoffs=(BF16,), choices=O1)
    assert study.failed(study.job(**O1), unit_roundoff=BF16, choices=O1) == []
    fault = next(fault for fault in FRESH[Student] if fault.name == "teacher weighted by 0.45")
    faulty = fault.plant(Student)
    assert faulty is not None
    assert "gradients in FP32" in study.failed(study.job(faulty(), **O1), unit_roundoff=BF16, choices=O1)


def test_a_step_that_rounding_turns_over_brings_gradients_as_far_as_parameters(tmp_path: Path) -> None:
    """RMSprop's first update of one weight has the other sign in four micro-batches of float16."""
    short = replace(PROTOCOL, num_curve=0)
    study = make_study(tmp_path / "study", Recurrent, protocol=short, unit_roundoffs=(FP16,))
    choices: dict[str, Any] = {
        "precision": {"level": "O2", "dtype": "float16"},
        "micro_batch": {"num_micro_batches": 4},
    }
    assert study.failed(study.job(**choices), unit_roundoff=FP16, choices=choices) == []


def test_a_detached_output_that_updates_alone_show_is_seen_under_a_reference_of_16_bits(tmp_path: Path) -> None:
    short = replace(PROTOCOL, num_curve=0)
    study = make_study(tmp_path / "study", Residual, protocol=short, unit_roundoffs=(BF16,), choices=O1)
    job = study.job(planted("last output detached by a tenth", Residual), **O1)
    assert study.failed(job, unit_roundoff=BF16, choices=O1) == ["gradients"]


def test_units_that_16_bits_turn_over_at_two_steps_are_no_fault_where_a_twin_agrees(tmp_path: Path) -> None:
    """One unit crosses the kink of its ReLU at the first step with this seed, and another at the first audit."""
    short = replace(PROTOCOL, num_curve=0)
    study = make_study(tmp_path / "study", Experts, protocol=short, unit_roundoffs=(FP32, BF16), seed=2)
    assert study.failed(study.job(**O1), unit_roundoff=BF16) == ["gradients"]
    assert study.failed(study.job(**O1), unit_roundoff=BF16, choices=O1) == []
    failed = study.failed(study.job(planted("loss 5 % smaller", Experts), **O1), unit_roundoff=BF16, choices=O1)
    assert "gradients in FP32" in failed


@pytest.mark.parametrize("lacking", ["time", "memory"])
def test_a_verdict_says_that_the_reference_had_no_time_or_memory_for_a_twin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    def run_out(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    if lacking == "memory":
        monkeypatch.setattr("steptune.tuner.trials.reference.make_twin", run_out)
    short, longest_s = replace(PROTOCOL, num_curve=0), 0.0 if lacking == "time" else None
    study = make_study(
        tmp_path / "study", Regression, protocol=short, unit_roundoffs=(BF16,), choices=O1, twin_s=longest_s
    )
    judged = study.judged(study.job(**O1), unit_roundoff=BF16, choices=O1)
    assert [check.name for check in judged.checks if not check.passed] == []
    assert "gradients in FP32" not in {check.name for check in judged.checks}
    assert judged.notes == (
        "gradients not compared in FP32: the reference has no FP32 gradients, for lack of time or memory",
    )


@pytest.mark.parametrize("own", [False, True], ids=["FP32 to bf16", "bf16"])
def test_a_twin_makes_the_first_step_where_there_was_no_time_for_audits(tmp_path: Path, own: bool) -> None:
    brief = replace(PROTOCOL, num_curve=0, num_audits=0, num_pointwise=2, num_disturbed=1)
    roundoffs = (BF16,) if own else (FP32, BF16)
    study = make_study(
        tmp_path / "study", Regression, protocol=brief, unit_roundoffs=roundoffs, choices=O1 if own else {}
    )
    assert study.failed(study.job(**O1), unit_roundoff=BF16, choices=O1) == []
    larger = planted("gradient of one tensor 10 % larger", Regression)
    assert "gradients in FP32" in study.failed(study.job(larger, **O1), unit_roundoff=BF16, choices=O1)


def test_a_twin_computes_without_tf32_and_leaves_it_as_it_was(masked: Study) -> None:
    seen: list[str] = []

    class Looking(Masked):
        """Knows in which format products of FP32 are computed."""

        def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
            seen.append(torch.get_float32_matmul_precision())
            return super().loss(model, batch)

    twin = make_twin(masked.job(Looking(), **O1), neutral_choices(**O1), masked.files)
    torch.set_float32_matmul_precision("high")
    try:
        audit(twin, masked.files, masked.batches, masked.reference.protocol)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert set(seen) == {"highest"}


def test_a_twin_runs_in_fp32_and_leaves_the_candidate_s_workload_alone(masked: Study) -> None:
    class Keeping(Masked):
        """Knows the model that it made, and the dtypes of its products."""

        def __init__(self) -> None:
            self.seen: list[torch.dtype] = []

        def model(self) -> torch.nn.Module:
            self.made = super().model()
            return self.made

        def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
            assert model is self.made
            self.seen.append(model(batch[0]).dtype)
            return super().loss(model, batch)

    job = masked.job(Keeping(), **O1)
    twin = make_twin(job, neutral_choices(**O1), masked.files)
    workload: Any = twin.workload
    assert workload.made is not cast(Any, job.workload).made
    watch = audit(twin, masked.files, masked.batches, masked.reference.protocol)
    assert len(watch.gradients) == masked.reference.protocol.num_audits
    assert set(workload.seen) == {torch.float32}


def test_gradients_that_a_step_leaves_are_seen_though_a_loss_scaler_shrinks_them(masked: Study) -> None:
    """Under float16 they are scaled down again, and hardly move the next step's."""
    half = {"precision": {"level": "O1", "dtype": "float16"}}
    job = masked.job(planted("gradients not cleared", Masked), **half)
    assert "untrained state" in masked.failed(job, unit_roundoff=BF16)


@pytest.mark.parametrize("captured", [False, True])
def test_running_statistics_of_attempts_that_the_loss_scaler_skips_are_not_counted(
    tmp_path: Path, captured: bool
) -> None:
    short = replace(PROTOCOL, num_pointwise=2, num_audits=0)  # all that a large training has time for
    study = make_study(tmp_path / "study", Convolutional, protocol=short, unit_roundoffs=(FP16,))
    half: dict[str, Any] = {"precision": {"level": "O1", "dtype": "float16"}}
    job = study.job(**half, **({"cuda_graph": {"scope": "step"}} if captured else {}))
    job.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    assert study.failed(job, unit_roundoff=FP16) == []
    assert job.skipped_steps > 2


class Averaged(nn.Module):
    """Averages its inputs in a buffer that every forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * samples.detach().float().mean(0)
        return samples


class WithAverage(Perceptron):
    def model(self) -> nn.Module:
        return nn.Sequential(Averaged(), super().model())


def test_a_buffer_that_every_forward_replaces_is_not_counted_in_skipped_attempts_either(tmp_path: Path) -> None:
    short = replace(PROTOCOL, num_pointwise=2, num_curve=0, num_audits=0)
    study = make_study(tmp_path / "study", WithAverage, protocol=short, unit_roundoffs=(FP16,))
    job = study.job(precision={"level": "O1", "dtype": "float16"})
    job.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    assert study.failed(job, unit_roundoff=FP16) == []
    assert job.skipped_steps > 2


class Momentum(nn.Linear):
    """Averages its weights before each step: at the first one nothing moves."""

    def __init__(self, share: float) -> None:
        super().__init__(48, 48)
        self.share = share
        self.register_buffer("average", self.weight.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.average.lerp_(self.weight, self.share)
        return super().forward(x)


class WithMomentum(Perceptron):
    share = 0.1

    def model(self) -> nn.Module:
        model = super().model()
        model[3] = Momentum(self.share)  # type: ignore[operator]
        return model


class WithMomentumTwiceAsFast(WithMomentum):
    share = 0.2


@pytest.mark.parametrize("num_audits", [0, 1, 2])
@pytest.mark.parametrize("own", [{}, O1], ids=["FP32", "bf16"])
def test_an_average_that_moves_from_the_second_step_on_is_seen_though_two_steps_fit(
    tmp_path: Path, own: dict[str, Any], num_audits: int
) -> None:
    short = replace(PROTOCOL, num_pointwise=2, num_curve=0, num_audits=num_audits)
    study = make_study(tmp_path / "study", WithMomentum, protocol=short)
    roundoff = BF16 if own else FP32
    assert study.failed(study.job(**own), unit_roundoff=roundoff) == []
    assert study.failed(study.job(WithMomentumTwiceAsFast(), **own), unit_roundoff=roundoff) == ["untrained state"]


@pytest.mark.parametrize("fault", ["dropout off", "dropout of a half"])
def test_another_rate_of_dropout_scatters_gradients_otherwise(causal: Study, fault: str) -> None:
    assert causal.failed(causal.job(**O1), unit_roundoff=BF16) == []
    assert "scatter of masks" in causal.failed(causal.job(planted(fault, Causal), **O1), unit_roundoff=BF16)


@pytest.mark.parametrize("rate", [0.067, 0.133])
def test_a_rate_of_dropout_that_is_a_third_off_is_counted(causal: Study, rate: float) -> None:
    class Off(Causal):
        dropout = rate

    for choices in ({}, {"micro_batch": {"num_micro_batches": 2}}):
        assert causal.failed(causal.job(**choices), unit_roundoff=BF16) == []
        check = causal.checks(causal.job(Off(), **choices), unit_roundoff=BF16)["rate of masks"]
        assert not check.passed
        assert "dropout sets a fraction of 0.0" in check.detail or "dropout sets a fraction of 0.1" in check.detail


def test_only_modules_that_set_inputs_to_zero_at_random_shares_are_masks(causal: Study) -> None:
    names = set(causal.reference.masks)
    assert names == {"blocks.0.dropout", "blocks.1.dropout"}
    assert all(masks.scale == pytest.approx(1 / 0.9, rel=1e-3) for masks in causal.reference.masks.values())


def test_a_dropout_that_is_called_and_no_module_is_counted(tmp_path: Path) -> None:
    study = make_study(tmp_path / "study", Transducer, protocol=PROTOCOL, unit_roundoffs=(BF16,))
    assert set(study.reference.masks) == {"dropout 1 called in the model"}
    assert study.failed(study.job(**O1), unit_roundoff=BF16) == []
    fault = next(fault for fault in FRESH[Transducer] if fault.name == "dropout 0.15 in place of 0.2")
    faulty = fault.plant(Transducer)
    assert faulty is not None
    assert study.failed(study.job(faulty(), **O1), unit_roundoff=BF16) == ["rate of masks"]


class Wide(torch.nn.Module):
    """A rectifier behind biases by channel, and dropout behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.rectifier = torch.nn.ReLU()
        self.drop = torch.nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.rectifier(x))


def watched(*batches: torch.Tensor) -> dict[str, ModuleMasks]:
    """Masks of each batch's draw."""
    watch = MaskWatch(SimpleNamespace(model=Wide()))  # type: ignore[arg-type]
    for batch in batches:
        with watch.step():
            watch._model(batch)
    return watch.modules


def test_a_rectifier_is_no_mask_whatever_its_share_of_zeros() -> None:
    drawn = torch.Generator().manual_seed(0)
    whole = torch.randn(16, 64, 256, generator=drawn) + torch.randn(64, 1, generator=drawn)
    assert set(watched(*[whole] * 4)) == {"drop"}
    assert worst_module(watched(*[whole] * 16), watched(*[whole[:4]] * 7)).ratio < 1  # type: ignore[union-attr]


def test_a_draw_that_keeps_nothing_says_nothing_of_the_scale() -> None:
    whole = torch.rand(8, 64) + 0.1
    watch = MaskWatch(SimpleNamespace(model=torch.nn.Sequential(Coin())))  # type: ignore[arg-type]
    torch.manual_seed(1)
    for _ in range(16):
        with watch.step():
            watch._model(whole)
    (masks,) = watch.modules.values()
    assert masks.is_mask
    assert masks.scale == pytest.approx(2.0)


class Coin(torch.nn.Module):
    """Keeps all or nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2.0 * (torch.rand(()) < 0.5)


class TestMaskRates:
    REFERENCE: ClassVar = {"drop": ModuleMasks(rates=(0.1, 0.11, 0.09, 0.1), scale=1.11, count=1000)}

    def ratio(self, rates: tuple[float, ...], scale: float = 1.11) -> float:
        found = worst_module(self.REFERENCE, {"drop": ModuleMasks(rates=rates, scale=scale, count=1000)})
        assert found is not None
        return found.ratio

    def test_rates_within_the_spread_of_draws_pass_and_others_do_not(self) -> None:
        assert self.ratio((0.11, 0.1, 0.1)) < 1
        assert self.ratio((0.14, 0.15, 0.14)) > 1
        assert self.ratio((0.0, 0.0, 0.0)) > 1

    def test_a_scale_that_is_another_or_none_does_not_pass(self) -> None:
        assert self.ratio((0.1, 0.1), scale=1.0) > 1
        assert self.ratio((0.1, 0.1), scale=float("nan")) == float("inf")

    def test_a_module_that_the_candidate_has_replaced_is_left_out(self) -> None:
        assert worst_module(self.REFERENCE, {"fused": self.REFERENCE["drop"]}) is None


class TestScores:
    """Two tensors at four steps, of which the first, third and fourth begin from the reference's parameters."""

    EXACT = (0, 2, 3)

    def steps(
        self, scale: float = 1.0, seed: int = 0, noise: float = 0.0, count: int = 4
    ) -> list[dict[str, torch.Tensor]]:
        drawn = torch.Generator().manual_seed(seed)
        values = torch.linspace(1, 2, 64, dtype=torch.float64)
        names = ("first", "second")
        return [
            {n: scale * values * (1 + noise * torch.randn(64, generator=drawn, dtype=torch.float64)) for n in names}
            for _ in range(count)
        ]

    def score(
        self,
        found: list[dict[str, torch.Tensor]],
        *,
        has_twin: bool = False,
        exact: tuple[int, ...] = EXACT,
        distances: Sequence[float] = (),
    ) -> Score:
        count = max(4, len(found))
        reference, disturbed = self.steps(count=count), [self.steps(seed=k, noise=BF16, count=count) for k in (1, 2)]
        noise = measure_noise(reference, disturbed, reference, unit_roundoff=BF16, exact=exact)
        noise = at_distance(noise, distances, exact)
        return worst_of(scores(reference, noise, found, limits=limits_of(BF16), exact=exact, has_twin=has_twin))

    def turned(self) -> torch.Tensor:
        """Thirty times the noise, in no direction of the gradient."""
        signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(32)
        return 30 * BF16 * 1.5 * signs

    def test_what_differs_by_the_noise_passes(self) -> None:
        assert 0.1 < self.score(self.steps(seed=3, noise=BF16)).ratio < 1

    def test_a_wrong_scale_is_told(self) -> None:
        found = self.score(self.steps(scale=1.05))
        assert found.ratio > 1
        assert found.excess == pytest.approx(0.05)

    def test_a_factor_of_all_gradients_may_be_rounded(self) -> None:
        """One such is the loss's one over the number of tokens, in 16 bits, and its product with the loss scale."""
        assert 0.5 < self.score(self.steps(scale=1 + 2 * BF16)).ratio < 1

    def test_sizes_are_compared_where_steps_begin_from_the_reference_s_parameters(self) -> None:
        strayed, wrong = self.steps(), self.steps()
        for steps, places in ((strayed, (2, 3)), (wrong, (0, 1))):
            for place in places:
                steps[place] = {name: values * (1 + 3.2 * BF16) for name, values in steps[place].items()}
        assert self.score(strayed, exact=(0, 1)).ratio < 1
        assert self.score(wrong, exact=(0, 1)).ratio > 1

    @pytest.mark.parametrize(("places", "passes"), [((1, 2, 3), False), ((2, 3), False), ((2,), True)])
    def test_a_tensor_s_size_counts_in_two_of_three_steps_that_go_on(
        self, places: tuple[int, ...], passes: bool
    ) -> None:
        """Along the gradient, by less than residuals may differ."""
        found = self.steps(count=5)
        for place in places:
            found[place]["first"] *= 1 + 6 * BF16
        assert (self.score(found, exact=(0, 4)).ratio <= 1) is passes

    def test_gradients_may_differ_by_as_much_more_as_parameters_do(self) -> None:
        """An optimizer that normalises turns the rounding of one small gradient into a full step."""
        found = self.steps()
        for place in (2, 3):
            found[place]["second"] += self.turned()
        assert self.score(found, exact=(0, 1)).ratio > 1
        assert self.score(found, exact=(0, 1), distances=(1.0, 20.0, 20.0)).ratio < 1
        assert self.score(found, exact=(2, 3), distances=(20.0, 20.0, 20.0)).ratio > 1  # back at the reference's

    def test_distances_are_those_of_all_parameters_in_those_of_disturbed_runs(self) -> None:
        reference, disturbed = self.steps(), [self.steps(seed=k, noise=BF16) for k in (1, 2)]
        noise = measure_distances(reference, disturbed)
        assert distances(reference, noise, reference) == [0.0] * 4
        for found in distances(reference, noise, self.steps(seed=3, noise=10 * BF16)):
            assert found == pytest.approx(10, rel=0.3)

    def test_one_step_may_be_turned_over_by_rounding_and_two_may_not(self) -> None:
        once, twice = self.steps(), self.steps()
        for steps, places in ((once, (2,)), (twice, (2, 3))):
            for place in places:
                steps[place]["first"] = steps[place]["first"] * 2
        assert self.score(once).ratio < 0.01
        assert self.score(twice).ratio > 1

    def test_where_few_steps_fit_one_of_them_may_be_turned_over_and_all_may_not(self) -> None:
        for count, exact in ((2, (0,)), (3, (0, 2))):
            for turned in range(count):
                once, always = self.steps()[:count], self.steps(scale=1.05)[:count]
                once[turned]["first"] = once[turned]["first"] * 2
                assert self.score(once, exact=exact).ratio < 0.01
                assert self.score(always, exact=exact).ratio > 1

    def test_with_a_twin_one_step_without_a_turn_is_enough_for_a_residual(self) -> None:
        """Sizes are held to two steps as before."""
        one, larger, always = self.steps(), self.steps(), self.steps()
        for place in self.EXACT:
            always[place]["second"] += self.turned()
        for place in self.EXACT[:2]:
            one[place]["second"] += self.turned()
            larger[place]["second"] *= 1.02
        assert self.score(one).ratio > 1
        assert self.score(one, has_twin=True).ratio < 1
        assert self.score(larger, has_twin=True).ratio > 1
        assert self.score(always, has_twin=True).ratio > 1

    def test_a_tensor_without_a_gradient_is_named_unless_it_is_zero(self) -> None:
        found = self.steps()
        for step in found:
            del step["second"]
            step["other"] = torch.zeros(3, dtype=torch.float64)
        score = self.score(found)
        assert (score.ratio, score.name) == (float("inf"), "second")

    def test_limits_are_those_of_the_arithmetic(self) -> None:
        assert limits_of(2.0**-24) is FINE
        assert limits_of(2.0**-11) is limits_of(BF16) is COARSE

    def test_a_reference_that_does_not_repeat_itself_widens_noise_to_a_bound(self) -> None:
        reference, disturbed = self.steps(), [self.steps(seed=k, noise=BF16) for k in (1, 2)]
        near = measure_noise(reference, disturbed, reference, unit_roundoff=BF16, exact=self.EXACT)
        far = measure_noise(reference, disturbed, self.steps(scale=3.0), unit_roundoff=BF16, exact=self.EXACT)
        assert 1 < far[0].residuals["first"] / near[0].residuals["first"] < 11


class TestScatter:
    def runs(self, count: int, share: float, first: int = 0) -> list[list[dict[str, torch.Tensor]]]:
        def step(drawn: torch.Generator) -> dict[str, torch.Tensor]:
            return {"w": 1 + share * torch.randn(200, generator=drawn, dtype=torch.float64)}

        return [[step(torch.Generator().manual_seed(100 * (first + k) + n)) for n in range(6)] for k in range(count)]

    @pytest.mark.parametrize(("share", "passes"), [(0.3, True), (0.0, False), (0.9, False)])
    def test_as_much_passes_and_less_or_more_does_not(self, share: float, passes: bool) -> None:
        reference = measure_scatter(self.runs(4, 0.3))
        assert reference is not None
        (run,) = self.runs(1, share, first=9)
        assert (abs(excess_of(reference, run)) <= reference.limit) is passes

    def test_rounding_that_scatters_more_than_masks_do_is_no_excess(self) -> None:
        generator = torch.Generator().manual_seed(3)

        def run(scatter: float) -> list[dict[str, torch.Tensor]]:
            noise = torch.randn(2, 400, generator=generator, dtype=torch.float64)
            return [{"weight": 1 + scatter * part} for part in noise]

        reference = measure_scatter([run(0.02) for _ in range(5)])
        assert reference is not None
        rounded = run(0.06)
        assert excess_of(reference, rounded) > reference.limit
        assert abs(excess_of(reference, rounded, {"weight": 0.06 * 20})) <= reference.limit
        assert excess_of(reference, run(0.2), {"weight": 0.06 * 20}) > reference.limit

    def draws(self, count: int, share: float, *, scale: float = 1.0, seed: int = 0) -> list[dict[str, torch.Tensor]]:
        drawn = torch.Generator().manual_seed(seed)
        return [
            {"w": scale * (1 + share * torch.randn(200, generator=drawn, dtype=torch.float64))} for _ in range(count)
        ]

    @pytest.mark.parametrize(
        ("share", "scale", "passes"),
        [(0.3, 1.0, True), (0.0, 1.0, False), (0.9, 1.0, False), (0.3, 1.3, False)],
        ids=["the same", "no masks", "more masks", "not rescaled"],
    )
    def test_draws_that_scatter_otherwise_or_around_another_mean_are_told(
        self, share: float, scale: float, passes: bool
    ) -> None:
        reference = measure_draws(self.draws(16, 0.3))
        assert reference is not None
        draws = self.draws(7, share, scale=scale, seed=1)
        scatters = abs(excess_of_draws(reference, draws)) <= reference.limit
        assert (scatters and shift_of_draws(reference, draws) <= reference.shift_limit) is passes

    def test_rounding_may_scatter_draws_where_masks_hardly_do(self) -> None:
        reference = measure_draws(self.draws(16, 0.02))
        assert reference is not None
        draws = self.draws(7, 0.03, seed=1)
        assert excess_of_draws(reference, draws) > reference.limit
        assert abs(excess_of_draws(reference, draws, {"w": 0.03 * 200**0.5})) <= reference.limit

    def test_masks_that_hang_on_one_coin_may_lie_as_far_off_as_one_direction_lets_them(self) -> None:
        """Nine in a hundred are beyond 1.7 standard errors, as one normal number is."""
        drawn, beyond = torch.Generator().manual_seed(3), 0
        base = [torch.randn(30, generator=drawn) for _ in range(4)]

        def kept(count: int) -> list[dict[str, torch.Tensor]]:
            coins = (torch.rand(count, generator=drawn) < 0.5).double() * 2
            return [{str(n): float(coin) * tensor for n, tensor in enumerate(base)} for coin in coins]

        for _ in range(100):
            reference = measure_draws(kept(16))
            assert reference is not None
            assert reference.directions == pytest.approx(1.0)
            shift = shift_of_draws(reference, kept(7))
            beyond += shift > 1.7
            assert shift <= reference.shift_limit
        assert beyond > 0

    def test_nothing_is_measured_where_masks_do_nothing(self) -> None:
        assert measure_scatter(self.runs(4, 0.0)) is None
        assert measure_scatter(self.runs(2, 0.3)) is None


def test_an_infinity_that_stays_in_a_buffer_is_no_change(tmp_path: Path) -> None:
    study = make_study(tmp_path / "study", WithInfinities)
    assert study.failed(study.job()) == []


@pytest.mark.parametrize(("fault", "rejecting"), [("loss 5 % smaller", ("cpu",)), ("a layer frozen", ("cpu", "cuda"))])
def test_gradients_reject_where_their_limits_hold_and_missing_ones_on_gpus_too(
    masked: Study, fault: str, rejecting: tuple[str, ...]
) -> None:
    """Elsewhere they are shown, and the check says so."""
    judged = masked.judged(masked.job(planted(fault, Masked), **O1), unit_roundoff=BF16)
    reference = GradientReference.load(masked.files.reference_gradients)
    assert reference is not None
    assert judged.gradients is not None
    for device in ("cpu", "cuda", "xpu"):
        gradients, _ = check_gradients(
            reference,
            judged.gradients,
            unit_roundoff=BF16,
            device=torch.device(device),
            has_twin=False,
            has_right_updates=True,
        )
        assert gradients.observed > gradients.tolerance
        assert gradients.passed is (device not in rejecting)
        assert ("not enforced" in gradients.detail) is gradients.passed

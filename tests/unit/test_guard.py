"""The guard: what is the same training passes, what is another does not.

A real small training runs the real protocol from a stored initial state; a candidate has one thing
wrong. Both sides are asserted: a guard that passes all, or rejects all, fails here.
"""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from guarded import BF16, FP32, PROTOCOL, Guarded, Study, make_study, neutral_choices
from hypothesis import given
from hypothesis import strategies as st

from steptune.tuner.guard.curves import (
    FACTOR,
    FLOOR,
    Curve,
    GuardReference,
    Protocol,
    Tolerance,
    compare,
    deviations,
    last_quarter,
    widest,
)
from steptune.tuner.records import TrialSpec
from steptune.tuner.training.job import TrainingJob
from steptune.tuner.trials.coordination import Coordinator
from steptune.tuner.trials.guard import needs_no_compilation, run_guard
from steptune.tuner.trials.guard_protocol import randomness_off

LOSS, NORM = "loss", "gradient norm"
SIZE, DIRECTION = "size of the first update", "direction of the first update"
CURVE, HORIZON, UPDATE = "loss curve", "loss horizon", "replayed update"
GRADIENTS, STATE, MASKS = "gradients", "untrained state", "scatter of masks"
MEAN, RATE = "mean over masks", "rate of masks"


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return make_study(tmp_path_factory.mktemp("guard") / "study")


# --- what is the same training ----------------------------------------------------------------


class TestSame:
    def test_the_unchanged_workload_is_exactly_the_reference(self, study: Study) -> None:
        checks = study.checks(study.job())
        assert list(checks) == [LOSS, NORM, SIZE, DIRECTION, UPDATE, GRADIENTS, STATE, MASKS, MEAN, RATE]
        for name in (LOSS, NORM, SIZE, DIRECTION):
            assert (checks[name].observed, checks[name].passed) == (0.0, True)
            assert checks[name].tolerance > 0, "another process may round the last bit otherwise"
        assert checks[MASKS].passed
        assert checks[MEAN].passed

    def test_another_order_of_summation_passes_as_rounding(self, study: Study) -> None:
        """Two half batches give the gradient of the whole one, rounded differently."""
        halves = {"micro_batch": {"num_micro_batches": 2}}
        assert study.failed(study.job(**halves)) == []

    def test_float64_products_pass_as_rounding(self, study: Study) -> None:
        """FP32 figures of a computation that itself rounds much less."""
        assert study.failed(study.job(InFloat64())) == []

    def test_bfloat16_passes_at_its_own_roundoff_and_not_at_fp32_s(self, study: Study) -> None:
        autocast = {"precision": {"level": "O1", "dtype": "bfloat16"}}
        assert study.failed(study.job(**autocast), unit_roundoff=BF16) == []
        assert study.failed(study.job(**autocast), unit_roundoff=FP32) == [LOSS, NORM, SIZE, DIRECTION, GRADIENTS]

    def test_a_lossy_candidate_that_learns_as_far_passes_by_its_horizon(self, study: Study) -> None:
        half = {"precision": {"level": "O3", "dtype": "bfloat16"}}
        checks = study.checks(study.job(**half), lossy=True)
        assert list(checks) == [HORIZON]
        assert checks[HORIZON].passed

    def test_masks_drawn_by_another_generator_pass(self, study: Study) -> None:
        """Other back ends draw other masks: with dropout on, only how they scatter gradients is compared."""
        checks = study.checks(study.job(OtherMasks()))
        assert [name for name, check in checks.items() if not check.passed] == []
        assert checks[MASKS].observed > 0

    @pytest.mark.parametrize("workload", ["Thawing", "Freezing"])
    def test_a_layer_that_is_thawed_or_frozen_in_the_middle_is_compared_as_it_is(
        self, tmp_path: Path, workload: str
    ) -> None:
        own = make_study(tmp_path / "study", make_workload=globals()[workload])
        assert own.failed(own.job()) == []


class Thawing(Guarded):
    """One layer is trained from the third step on."""

    begins_frozen = True

    def model(self) -> torch.nn.Module:
        model = super().model()
        model.register_buffer("count", torch.tensor(0.0))
        return model

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        model.count += 1
        model[4].requires_grad_(bool(model.count > 2) == self.begins_frozen)
        return super().loss(model, batch)


class Freezing(Thawing):
    """One layer is trained until the third step."""

    begins_frozen = False


class InFloat64(Guarded):
    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        wide = copy.deepcopy(model).double()
        samples, labels = batch
        loss = torch.nn.functional.cross_entropy(wide(samples.double()), labels)
        gradients = torch.autograd.grad(loss, list(wide.parameters()))
        narrow = [gradient.float() for gradient in gradients]
        # A loss whose gradients are the wide ones, rounded once.
        linear = sum((p * g).sum() for p, g in zip(model.parameters(), narrow, strict=True))
        return linear + (loss.detach().float() - linear.detach())


class OtherMasks(Guarded):
    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        if model[2].training:
            torch.rand(17)
        return super().loss(model, batch)


# --- what is another training -----------------------------------------------------------------


class FasterLearning(Guarded):
    learning_rate = 0.101


class ClippedTwice(Guarded):
    max_grad_norm = 0.25


class Unclipped(Guarded):
    max_grad_norm = None


class NoDropout(Guarded):
    dropout = 0.0


class DroppedGradient(Guarded):
    """One bias never receives its gradient."""

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        model[-1].bias.requires_grad_(True)
        output = torch.nn.functional.linear(model[:-1](batch[0]), model[-1].weight, model[-1].bias.detach())
        return torch.nn.functional.cross_entropy(output, batch[1]) + 0.0 * model[-1].bias.sum()


class Frozen(Guarded):
    """One layer is not given to the optimizer."""

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return super().optimizer([(name, p) for name, p in named_parameters if not name.startswith("4.")])


class HalvedLoss(Guarded):
    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch) / 2


class Forgetful(Guarded):
    """The optimizer's state is lost at every step: the first update is right, the later ones are not."""

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named_parameters], lr=self.learning_rate)


class PartOfTheBatch(Guarded):
    def batch_transform(self, batch: Any) -> Any:
        return [leaf[:-1] for leaf in batch]


FAULTS: dict[str, tuple[Callable[[], Guarded], set[str]]] = {
    "learning rate 1 % too high": (FasterLearning, {SIZE, LOSS}),
    "clipped to half": (ClippedTwice, {SIZE, LOSS}),
    "not clipped": (Unclipped, {SIZE, LOSS}),
    "one bias without gradient": (DroppedGradient, {NORM, DIRECTION, LOSS}),
    "one layer not updated": (Frozen, {DIRECTION, SIZE, LOSS}),
    "loss halved": (HalvedLoss, {LOSS, NORM}),
    "momentum lost": (Forgetful, {LOSS}),
    "one sample of the batch left out": (PartOfTheBatch, {LOSS, NORM, DIRECTION}),
    "dropout removed": (NoDropout, {MASKS, RATE}),
}


class TestAnother:
    @pytest.mark.parametrize("fault", FAULTS)
    def test_is_rejected_by_the_checks_that_it_concerns(self, study: Study, fault: str) -> None:
        make, expected = FAULTS[fault]
        assert expected <= set(study.failed(study.job(make())))

    def test_removed_dropout_is_seen_where_it_is_on_alone(self, study: Study) -> None:
        """Pointwise checks run with dropout off."""
        failed = study.failed(study.job(NoDropout()))
        assert MASKS in failed
        assert set(failed) <= {MASKS, MEAN, RATE}

    @pytest.mark.parametrize("fault", ["clipped to half", "not clipped", "loss halved", "one layer not updated"])
    def test_gross_faults_do_not_hide_behind_16_bit_rounding(self, study: Study, fault: str) -> None:
        make, _ = FAULTS[fault]
        assert study.failed(study.job(make()), unit_roundoff=BF16) != []

    def test_other_batches_are_another_training(self, study: Study) -> None:
        assert LOSS in study.failed(study.job(), batches=study.batches[::-1])

    def test_a_lossy_candidate_that_stops_learning_is_rejected(self, study: Study) -> None:
        class Stuck(Guarded):
            learning_rate = 0.0

        check = study.checks(study.job(Stuck()), lossy=True)[HORIZON]
        assert not check.passed
        assert check.observed > 0.7, "most of the reference's fall in loss is missing"

    @pytest.mark.parametrize("options", [{}, {"lossy": True}, {"unit_roundoff": BF16}])
    def test_nan_never_passes(self, study: Study, options: dict[str, Any]) -> None:
        class Broken(Guarded):
            def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
                return super().loss(model, batch) * math.nan

        assert study.failed(study.job(Broken()), **options) == ["finite loss"]

    def test_a_loss_that_overflows_late_never_passes(self, study: Study) -> None:
        class Exploding(Guarded):
            max_grad_norm = None
            learning_rate = 1e30

        assert study.failed(study.job(Exploding()), lossy=True) == ["finite loss"]


# --- the protocol -----------------------------------------------------------------------------


class TestProtocol:
    def test_the_reference_repeats_itself(self, study: Study) -> None:
        """Two runs of one seed in one process."""
        repetition = study.reference.repetition
        assert set(repetition.loss) == set(repetition.gradient_norm) == {0.0}
        assert repetition.update_norm == repetition.update_direction == 0.0

    def test_coarser_arithmetic_was_seen_to_deviate_more(self, study: Study) -> None:
        fine, coarse = (study.reference.rounding[roundoff.hex()] for roundoff in (FP32, BF16))
        assert coarse.loss[-1] > 100 * fine.loss[-1] > 0
        assert coarse.gradient_norm[-1] > 100 * fine.gradient_norm[-1]
        assert coarse.update_direction > fine.update_direction

    def test_every_part_ran_its_number_of_steps(self, study: Study) -> None:
        curve, protocol = study.reference.curve, study.reference.protocol
        assert len(curve.losses) == len(curve.gradient_norms) == protocol.num_pointwise
        assert (protocol.num_curve, protocol.num_draws) == (0, 7)
        assert len(curve.curve_losses) == 16
        assert len(curve.horizon_losses) == protocol.num_horizon
        assert len(set(study.reference.horizon_ends)) == 3

    def test_a_horizon_that_is_no_multiple_of_the_batches_leaves_audits_their_own(self, tmp_path: Path) -> None:
        """Candidates that are not lossy run no horizon, and are audited on the reference's batches all the same."""
        own = make_study(tmp_path / "study", protocol=msgspec.structs.replace(PROTOCOL, num_curve=0, num_horizon=17))
        assert len(own.reference.curve.horizon_losses) == 17
        assert own.failed(own.job()) == []

    def test_a_reference_of_a_curve_that_runs_on_is_compared_as_before(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The case of several ranks, and of studies that are resumed."""
        monkeypatch.setattr("steptune.tuner.trials.reference.draws_masks", lambda num_ranks: False)
        own = make_study(tmp_path / "study")
        assert (own.reference.protocol.num_curve, own.reference.protocol.num_draws) == (24, 0)
        checks = own.checks(own.job())
        assert CURVE in checks
        assert MASKS in checks
        assert MEAN not in checks
        assert [name for name, check in checks.items() if not check.passed] == []
        assert CURVE in own.failed(own.job(NoDropout()))
        coarse, fine = (own.reference.rounding[roundoff.hex()].curve_loss for roundoff in (BF16, FP32))
        assert coarse > 10 * fine > 0
        assert own.reference.repetition.curve_loss == 0

    def test_the_gradient_norm_is_that_before_clipping(self, study: Study) -> None:
        assert min(study.reference.curve.gradient_norms) > Guarded.max_grad_norm

    def test_a_candidate_is_left_in_training_mode_without_a_hook(self, study: Study) -> None:
        job = study.job()
        study.checks(job)
        assert all(module.training for module in job.model.modules())
        assert job.on_gradients is None

    def test_batches_are_not_changed_by_steps_that_work_in_place(self, study: Study) -> None:
        class InPlace(Guarded):
            def batch_transform(self, batch: Any) -> Any:
                batch[0].mul_(1.0).zero_()
                return batch

        batches = study.batches
        before = batches[0][0].clone()
        study.checks(study.job(InPlace()), batches=batches)
        assert torch.equal(batches[0][0], before)

    def test_skipped_steps_are_repeated_so_that_curves_stay_aligned(self, study: Study) -> None:
        """A loss scaler skips steps while it looks for its scale."""
        job = SkippingJob(study.job(), skips={0: 2, 3: 1})
        checks = study.checks(job)  # type: ignore[arg-type]
        assert [name for name, check in checks.items() if not check.passed] == []
        assert job.skipped_steps == 3

    def test_a_scaler_that_never_finds_a_scale_ends_as_not_finite(self, study: Study) -> None:
        job = SkippingJob(study.job(), skips={1: 10**6})
        assert study.failed(job) == ["finite loss"]  # type: ignore[arg-type]


class SkippingJob:
    """A job whose n-th update is skipped some times, as by a loss scaler."""

    def __init__(self, job: TrainingJob, skips: dict[int, int]) -> None:
        self._job = job
        self._left = dict(skips)
        self._updates = 0
        self.skipped_steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._job, name)

    @property
    def on_gradients(self) -> Any:
        return self._job.on_gradients

    @on_gradients.setter
    def on_gradients(self, hook: Any) -> None:
        self._job.on_gradients = hook

    def step(self, batch: Any) -> torch.Tensor:
        if self._left.get(self._updates, 0):
            self._left[self._updates] -= 1
            self.skipped_steps += 1
            if self.on_gradients:
                self.on_gradients([torch.tensor([math.inf])])
            return torch.tensor(123.0)
        self._updates += 1
        return self._job.step(batch)


class TestRandomnessOff:
    def test_dropout_is_off_and_statistics_stay_in_training(self) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Dropout(0.5))
        with randomness_off(model, "switchable"):
            assert [m.training for m in model] == [False, True, False]
        assert all(m.training for m in model.modules())

    def test_recurrent_layers_lose_their_dropout_and_stay_in_training(self) -> None:
        """In evaluation mode cuDNN has no backward for them."""
        model = torch.nn.LSTM(4, 4, num_layers=2, dropout=0.5)
        inputs = torch.ones(3, 2, 4)
        with randomness_off(model, "switchable"):
            assert model.training
            first, again = model(inputs)[0], model(inputs)[0]
        assert torch.equal(first, again)
        assert (model.training, model.dropout) == (True, 0.5)

    @pytest.mark.parametrize("randomness", ["none", "always"])
    def test_models_without_a_switch_are_left_alone(self, randomness: str) -> None:
        model = torch.nn.Dropout(0.5)
        with randomness_off(model, randomness):
            assert model.training

    def test_what_the_user_froze_stays_in_evaluation(self) -> None:
        model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Dropout(0.5))
        model[0].eval()
        with randomness_off(model, "switchable"):
            pass
        assert [m.training for m in model] == [False, True]


class TestCurve:
    """Curve of a model whose dropout hardly changes the loss: a large language model in its first steps."""

    def verdict(self, unit_roundoff: float, change: float, rounding: float) -> bool:
        figures = {"losses": (11.0,), "gradient_norms": (2.0,), "update_norm": 1.0}
        nothing = {"loss": (0.0,), "gradient_norm": (0.0,), "update_norm": 0.0, "update_direction": 0.0}
        reference = GuardReference(
            protocol=Protocol(num_pointwise=1, num_curve=2, num_horizon=0, randomness="switchable"),
            curve=Curve(**figures, curve_losses=(11.0, 10.9)),
            repetition=Tolerance(**nothing),
            rounding={roundoff.hex(): Tolerance(**nothing, curve_loss=rounding) for roundoff in (FP32, BF16)},
            seed_means=(10.95, 10.9503, 10.9497, 10.9502),
        )
        curve = Curve(**figures, curve_losses=(11.0 + change, 10.9 + change))
        checks = compare(reference, {}, curve, {}, unit_roundoff=unit_roundoff, lossy=False)
        (found,) = [check for check in checks if check.name == CURVE]
        return found.passed

    def test_a_difference_that_rounding_makes_is_allowed_beside_that_of_seeds(self) -> None:
        assert self.verdict(BF16, 0.004, rounding=1e-4)
        assert self.verdict(FP32, 0.004, rounding=1e-4)
        assert not self.verdict(FP32, 0.004, rounding=0.0)

    def test_and_no_more_than_that(self) -> None:
        assert not self.verdict(BF16, 1.0, rounding=1e-4)
        assert not self.verdict(FP32, 0.05, rounding=1e-4)


# --- the tolerances ---------------------------------------------------------------------------

deviation = st.floats(0, 1, allow_nan=False)
tolerances = st.builds(
    Tolerance,
    loss=st.tuples(deviation, deviation, deviation),
    gradient_norm=st.tuples(deviation, deviation, deviation),
    update_norm=deviation,
    update_direction=deviation,
    curve_loss=deviation,
)


class TestTolerances:
    @given(rows=st.lists(tolerances, min_size=1, max_size=4))
    def test_the_widest_is_as_wide_as_each_and_grows_with_the_step(self, rows: list[Tolerance]) -> None:
        wide = widest(rows)
        for row in rows:
            assert all(w >= r for w, r in zip(wide.loss, row.loss, strict=True))
            assert wide.update_norm >= row.update_norm
            assert wide.curve_loss >= row.curve_loss
        assert list(wide.loss) == sorted(wide.loss)
        assert list(wide.gradient_norm) == sorted(wide.gradient_norm)

    def test_tolerances_grow_with_the_roundoff(self, study: Study) -> None:
        """The finest, one between two that were measured, and one coarser than all."""
        limits = [
            {name: check.tolerance for name, check in study.checks(study.job(), unit_roundoff=roundoff).items()}
            for roundoff in (FP32, 2.0**-11, BF16, 2.0**-4)
        ]
        for name in (LOSS, NORM, SIZE, DIRECTION):
            values = [limit[name] for limit in limits]
            assert values == sorted(values)
            assert values[1] > values[0]

    def test_a_deviation_just_inside_passes_and_just_outside_fails(self, study: Study) -> None:
        reference = study.reference
        update = {"w": torch.ones(4)}
        limit = FACTOR * reference.rounding[FP32.hex()].loss[2] + FLOOR
        for factor, passes in ((0.9, True), (1.1, False)):
            losses = list(reference.curve.losses)
            losses[2] *= 1 + factor * limit
            curve = msgspec.structs.replace(reference.curve, losses=tuple(losses))
            checks = compare(reference, update, curve, update, unit_roundoff=FP32, lossy=False)
            assert checks[0].passed == passes

    def test_deviations_are_relative_and_of_the_step(self) -> None:
        reference = Curve(losses=(2.0, 1.0), gradient_norms=(4.0, 4.0), update_norm=1.0)
        other = Curve(losses=(2.2, 1.0), gradient_norms=(4.0, 5.0), update_norm=0.5)
        found = deviations(other, {"w": torch.tensor([0.0, 1.0])}, reference, {"w": torch.tensor([1.0, 0.0])})
        assert found.loss == pytest.approx((0.1, 0.0))
        assert found.gradient_norm == pytest.approx((0.0, 0.25))
        assert found.update_norm == 0.5
        assert found.update_direction == 1.0

    @pytest.mark.parametrize(
        ("update", "turned"),
        [([3.0, 0.0], 0.0), ([-1.0, 0.0], 2.0), ([1.0, 1.0], 1 - math.sqrt(0.5)), ([0.0, 0.0], 1.0)],
    )
    def test_direction_is_one_less_the_cosine(self, update: list[float], turned: float) -> None:
        curve = Curve(losses=(1.0,), gradient_norms=(1.0,), update_norm=1.0)
        found = deviations(curve, {"w": torch.tensor(update)}, curve, {"w": torch.tensor([1.0, 0.0])})
        assert found.update_direction == pytest.approx(turned)

    def test_a_gradient_norm_that_is_not_finite_never_passes(self, study: Study) -> None:
        reference = study.reference
        norms = (math.nan, *reference.curve.gradient_norms[1:])
        curve = msgspec.structs.replace(reference.curve, gradient_norms=norms)
        update = {"w": torch.ones(4)}
        checks = compare(reference, update, curve, update, unit_roundoff=BF16, lossy=False)
        assert [check.name for check in checks if not check.passed] == [NORM]

    @pytest.mark.parametrize(("losses", "mean"), [([4.0], 4.0), ([9.0, 1.0], 1.0), ([9.0] * 6 + [1.0, 3.0], 2.0)])
    def test_the_end_of_a_horizon_is_its_last_quarter(self, losses: list[float], mean: float) -> None:
        assert last_quarter(losses) == mean


# --- in a trial -------------------------------------------------------------------------------


class TestVerdict:
    def spec(self, study: Study, **changes: Any) -> TrialSpec:
        from steptune.tuner.records import BASELINE

        fields = {
            "trial_id": "t",
            "workload": "w",
            "candidate": BASELINE,
            "choices": {},
            "study_directory": str(study.files.directory),
        }
        return TrialSpec(**{**fields, **changes})

    @pytest.fixture
    def coordinator(self, tmp_path: Path) -> Coordinator:
        return Coordinator(0, 1, None, tmp_path, torch.device("cpu"))  # type: ignore[arg-type]

    def test_says_for_how_many_steps_training_was_the_same(self, study: Study, coordinator: Coordinator) -> None:
        verdict = run_guard(study.job(), study.files, self.spec(study), 0, coordinator)
        assert verdict.passed
        assert verdict.reason == "same for 14 steps"
        assert verdict.losses[:5] == verdict.reference_losses[:5]
        assert len(verdict.losses) == len(verdict.reference_losses) == 12

    def test_says_how_long_a_twin_took_where_there_was_one(self, study: Study, coordinator: Coordinator) -> None:
        """It is no part of the time that the candidate took to compile."""
        took: list[int] = []
        o1 = neutral_choices(precision={"level": "O1", "dtype": "bfloat16"})
        for choices in (study.reference.choices, o1):
            job = study.job(precision=choices["precision"])
            spec = self.spec(study, choices=choices, unit_roundoff=BF16 if choices is o1 else FP32)
            run_guard(job, study.files, spec, 0, coordinator, on_twin=took.append)
        assert took[0] == 0
        assert took[1] > 0

    def off_by(self, share: float, directory: Path) -> tuple[Study, GuardReference, TrialSpec]:
        """A study in whose reference losses were another, and a candidate of other settings."""
        own = make_study(directory)
        losses = tuple(x * (1 + share) for x in own.reference.curve.losses)
        off = msgspec.structs.replace(own.reference, curve=msgspec.structs.replace(own.reference.curve, losses=losses))
        own.files.reference.write_bytes(msgspec.json.encode(off))
        return own, off, self.spec(own, choices={**off.choices, "cpu_threads": {"num_threads": 3}})

    def test_the_reference_s_own_settings_pass_and_widen_what_others_may(
        self, tmp_path: Path, coordinator: Coordinator
    ) -> None:
        """A training that differs from process to process by a few roundings."""
        own, off, other = self.off_by(6e-6, tmp_path / "study")
        assert not run_guard(own.job(), own.files, other, 0, coordinator).passed
        assert run_guard(own.job(), own.files, self.spec(own, choices=off.choices), 0, coordinator).passed
        assert run_guard(own.job(), own.files, other, 0, coordinator).passed

    def test_a_training_that_does_not_repeat_itself_is_told_so_and_widens_nothing_without_bound(
        self, tmp_path: Path, coordinator: Coordinator
    ) -> None:
        own, off, other = self.off_by(0.01, tmp_path / "study")
        for spec in (self.spec(own, choices=off.choices), other):
            verdict = run_guard(own.job(), own.files, spec, 0, coordinator)
            assert not verdict.passed
            assert verdict.reason.startswith("the training is not reproducible")
            assert "Seed every generator" in verdict.reason
        loss = next(check for check in verdict.checks if check.name == LOSS)
        assert loss.tolerance < 0.001

    def test_says_what_was_compared_and_what_could_not_be(self, study: Study, coordinator: Coordinator) -> None:
        verdict = run_guard(study.job(), study.files, self.spec(study), 0, coordinator)
        told = "; ".join(verdict.compared)
        assert told.startswith("updates equal within a relative tolerance of 1e-05 in 5 steps (")
        assert "gradients within the rounding of FP32 (" in told
        assert verdict.notes == ()

        class Own(Guarded):
            def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
                return type("Own", (torch.optim.SGD,), {})([p for _, p in named_parameters], lr=0.1, momentum=0.9)

        other = run_guard(study.job(Own()), study.files, self.spec(study), 0, coordinator)
        (note,) = other.notes
        assert note.startswith("update not replayed: Own is not one of torch's element-wise optimizers")

    @pytest.mark.parametrize(
        ("mode", "num_graphs"),
        [pytest.param("default", 1, id="as the user"), pytest.param("max-autotune", 2, id="another mode")],
    )
    def test_compiles_a_model_twice_only_where_compilation_itself_is_in_question(
        self, tmp_path: Path, coordinator: Coordinator, mode: str, num_graphs: int
    ) -> None:
        """With its dropout off it is another graph, which is compared uncompiled where the user compiles as well."""
        own = make_study(tmp_path / "study")
        compiled = {**own.reference.choices, "compile": {**own.reference.choices["compile"], "mode": "default"}}
        eager = msgspec.structs.replace(own.reference, choices=compiled, eager=True)
        own.files.reference.write_bytes(msgspec.json.encode(eager))
        job, graphs = own.job(), []

        def backend(graph: Any, inputs: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        forward = job.model.forward
        job.model.forward = lambda samples: forward(samples)  # TorchDynamo begins nothing in torch's own frames
        job.model.compile(backend=backend)
        spec = self.spec(own, choices={**compiled, "compile": {**compiled["compile"], "mode": mode}})
        uncompiled = needs_no_compilation(own.files, spec, job.device)
        assert run_guard(job, own.files, spec, 0, coordinator, uncompiled=uncompiled).passed
        assert len(graphs) == num_graphs

    def test_names_the_check_that_failed_and_by_how_much(self, study: Study, coordinator: Coordinator) -> None:
        verdict = run_guard(study.job(Unclipped()), study.files, self.spec(study), 0, coordinator)
        assert not verdict.passed
        assert "loss differs by" in verdict.reason
        assert "allowed" in verdict.reason

    def test_the_loader_is_checked_where_the_candidate_changes_it(self, study: Study, coordinator: Coordinator) -> None:
        plain, loading = (
            run_guard(study.job(), study.files, self.spec(study, checks_loader=checks), 0, coordinator)
            for checks in (False, True)
        )
        assert {c.kind for c in plain.checks} == {"pointwise", "update", "gradient", "state", "masks", "mask rate"}
        assert {c.kind for c in loading.checks} == {
            "pointwise",
            "update",
            "gradient",
            "state",
            "masks",
            "mask rate",
            "loader",
        }
        assert loading.passed

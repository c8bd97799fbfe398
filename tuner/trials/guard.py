"""The guard: is a candidate still the same training?

Reference and candidate run one protocol from the shared initial state on stored batches, through the
same step function that is measured:

1. *Pointwise*, with dropout and stochastic depth off: the loss and the gradient norm of every step,
   and the first update (its size, and its direction on a sample of elements). Each update is replayed from the
   gradients before it (`guard/update_replay.py`).
2. *Curve*, with them on, for models that have any: other back ends draw other masks, so only the mean
   loss of the following steps is compared, against the spread of reference runs over seeds and what
   rounding does to it.
3. *Audits*, with them off again: steps that begin from the initial parameters once more. Gradients of these and of
   the pointwise steps are compared tensor by tensor (`guard/gradients.py`), and so is what a step changes beside them.
4. *Horizon*, for lossy candidates: no pointwise check; the loss over a longer stretch must have
   fallen about as far as the reference's.

Tolerances are measured, not chosen: the reference is repeated with the same seed (what is not
deterministic shows itself) and disturbed by one unit roundoff of the arithmetic that a candidate
computes with (what rounding does to this model shows itself). A candidate may differ by `FACTOR` times
that. A candidate whose update computes its bias corrections in FP32, and no other, may also differ by what that
does at most. Nobody is held to equal bits: runs of the same settings may differ in the last one from process to
process, on a CPU, too. What the reference's own settings show is repetition, whatever it is. NaN never passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from steptune.tuner.guard.gradients import KINDS, REPETITIONS, Score, limits_of, scores, worst_of
from steptune.tuner.guard.masks import Scatter, excess_of
from steptune.tuner.guard.update_replay import LIMIT, RELATIVE, Deviation, UpdateRule, worst_deviation
from steptune.tuner.hardware import device_memory_bytes
from steptune.tuner.records import Choice, GuardCheck, GuardVerdict, Record, Scalar, TrialSpec
from steptune.tuner.strategies.knobs import PREFIX
from steptune.tuner.training.structure import map_structure
from steptune.tuner.training.tensor_file import map_tensors
from steptune.tuner.trials.coordination import Coordinator
from steptune.tuner.trials.disturbance import rounds_bias_corrections
from steptune.tuner.trials.gradient_watch import (
    GradientReference,
    GradientWatch,
    set_initial_state,
    why_not_compared,
)
from steptune.tuner.trials.guard_batches import check_samples, guard_batches
from steptune.tuner.trials.loader_check import check_loader
from steptune.tuner.trials.study_files import StudyFiles
from steptune.tuner.trials.update_watch import UpdateWatch, sampled, why_not_replayed

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.job import TrainingJob

FACTOR = 10.0
SEED_SPREADS = 5.0
UPDATE_DEVICES = ("cpu", "cuda")
"""Devices on which a replayed update rejects. Correct ones of `benchmarks/guard_power.py` and `guard_device.py` reach
less than half of the limit."""
GRADIENT_DEVICES = ("cpu",)
"""The same of gradients, state and masks. On an H100 gradients of correct changes reach 0.73 of their limit, and only
small trainings were measured."""
MAX_REPEATS = 20
"""Times that a step which the loss scaler skipped is repeated."""
FLOOR_ROUNDOFFS = 4.0
FLOOR = 1e-6
"""A few units in the last place of the FP32 figures that are compared."""
COSINE_ROUNDOFF = 1e-13
"""Below this, one less a cosine of equal vectors is the rounding of its own arithmetic."""
MIN_PROGRESS = 0.9
"""Share of the reference's fall in loss that a lossy candidate must reach."""


class Protocol(Record):
    """How many steps each part runs, and how randomness is switched off."""

    num_pointwise: int
    num_curve: int
    num_horizon: int
    randomness: str
    """As in `WorkloadFacts.randomness`."""
    seed: int = 0
    num_disturbed: int = 2
    """Runs that are disturbed by each unit roundoff."""
    num_audits: int = 0
    """Steps that begin from the initial parameters again."""

    @property
    def exact(self) -> tuple[int, ...]:
        """Places of the steps that begin from the initial parameters, among the pointwise ones and the audits."""
        return (0, *range(self.num_pointwise, self.num_pointwise + self.num_audits))


class Curve(Record):
    """What one run of the protocol showed."""

    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    update_norm: float
    curve_losses: tuple[float, ...] = ()
    horizon_losses: tuple[float, ...] = ()
    skipped_steps: int = 0

    @property
    def finite(self) -> bool:
        return all(math.isfinite(v) for v in (*self.losses, *self.curve_losses, *self.horizon_losses, self.update_norm))


class Tolerance(Record):
    """Relative deviations that rounding at one unit roundoff causes, by step."""

    loss: tuple[float, ...]
    gradient_norm: tuple[float, ...]
    update_norm: float
    update_direction: float
    curve_loss: float = 0.0
    """Of the mean loss of the curve part, with the same dropout."""


class GuardReference(Record):
    """The reference of a study."""

    protocol: Protocol
    curve: Curve
    repetition: Tolerance
    """Between runs of the same seed and settings, in one process and, once it was seen, from process to process."""
    rounding: dict[str, Tolerance]
    """By unit roundoff (as `float.hex`)."""
    bias_corrections: Tolerance | None = None
    """What rounding those of the update does at most, where candidates or the reference may do that."""
    seed_means: tuple[float, ...] = ()
    """Mean loss of the curve part for each seed."""
    horizon_ends: tuple[float, ...] = ()
    """Mean loss of the last quarter of the horizon for each reference run."""
    choices: dict[str, Choice] = {}  # noqa: RUF012 (a struct copies its defaults)
    """Settings of the reference."""
    rule: UpdateRule | None = None
    """How it updates parameters, where its own replay agrees with it."""
    why_no_rule: str = ""
    own_roundoff: float = 0.0
    """Of the arithmetic that it computes with itself; 0 of references from before it was noted."""
    eager: bool = False
    """Made without the compilation that its settings ask for."""
    peak_bytes: int = 0
    """Of device memory, of the hungriest rank; 0 on a CPU."""


# --- the protocol -----------------------------------------------------------------------------


def run_protocol(
    job: TrainingJob,
    batches: Sequence[Any],
    protocol: Protocol,
    *,
    seed: int,
    horizon_seed: int | None = None,
    update_watch: UpdateWatch | None = None,
    gradient_watch: GradientWatch | None = None,
    mask_watch: GradientWatch | None = None,
    restart: Callable[[], None] | None = None,
    uncompiled: bool = False,
) -> tuple[Curve, dict[str, torch.Tensor]]:
    """Runs the guarded steps on a freshly built job.

    Args:
        seed: Of the curve part.
        horizon_seed: Of the longer horizon; None for a run that does not go on over it.
        update_watch: Of the pointwise part.
        gradient_watch: Of the pointwise part and of the audits.
        mask_watch: Of the curve part.
        restart: Sets parameters and buffers to those of the beginning; without it there are no audits.
        uncompiled: Whether steps without dropout run what is compiled as it is written.

    Returns:
        The curve, and the first update sampled by parameter name.
    """
    import torch

    before = _sample(job)
    source = _endless(batches)
    torch.manual_seed(protocol.seed)
    steps = _WatchedSteps(job, protocol.randomness, uncompiled=uncompiled)
    watches: list[UpdateWatch | GradientWatch] = [w for w in (update_watch, gradient_watch) if w is not None]
    update: dict[str, torch.Tensor] = {}
    for number in range(protocol.num_pointwise):
        steps.step(next(source), watches)
        if number == 0:
            update = {name: after - before[name] for name, after in _sample(job).items()}
    update_norm = math.sqrt(sum(float(piece.double().pow(2).sum()) for piece in update.values()))
    losses, norms = list(steps.losses), list(steps.norms)
    torch.manual_seed(seed)
    drawing = _WatchedSteps(job, "none", uncompiled=False)
    for _ in range(protocol.num_curve):
        drawing.step(next(source), [mask_watch] if mask_watch is not None else [])
    curve = drawing.losses
    horizon: list[float] = []
    if horizon_seed is not None:
        torch.manual_seed(horizon_seed)
        horizon = [_loss_of(job, next(source)) for _ in range(protocol.num_horizon)]
    if restart is not None:
        torch.manual_seed(protocol.seed)
        for _ in range(protocol.num_audits):
            restart()
            steps.step(next(source), [gradient_watch] if gradient_watch is not None else [])
    return (
        Curve(
            losses=tuple(losses),
            gradient_norms=tuple(norms),
            update_norm=update_norm,
            curve_losses=tuple(curve),
            horizon_losses=tuple(horizon),
            skipped_steps=job.skipped_steps,
        ),
        update,
    )


class _WatchedSteps:
    """Steps with dropout and its kin off.

    Args:
        uncompiled: Whether what is compiled runs as it is written.

    Attributes:
        losses: Of each.
        norms: Of the gradients of each; of a step of the user's own that updates more than once, of the last.
    """

    def __init__(self, job: TrainingJob, randomness: str, *, uncompiled: bool) -> None:
        self._job = job
        self._randomness = randomness
        self._uncompiled = uncompiled
        self.losses: list[float] = []
        self.norms: list[float] = []

    def step(self, batch: Any, watches: Sequence[UpdateWatch | GradientWatch]) -> None:
        """One update; a step that the loss scaler skips is repeated on the same batch, so curves stay aligned."""
        import torch

        seen: list[float] = []

        def look(gradients: list[torch.Tensor]) -> None:
            seen.append(self._job.gradient_norm(gradients))
            for watch in watches:
                watch.on_gradients()

        self._job.on_gradients = look
        try:
            with ExitStack() as stack:
                if self._uncompiled:
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(randomness_off(self._job.model, self._randomness))
                for watch in watches:
                    stack.enter_context(watch.step())
                self.losses.append(self._loss(batch))
        finally:
            self._job.on_gradients = None
        self.norms += seen[-1:]

    def _loss(self, batch: Any) -> float:
        for _ in range(MAX_REPEATS):
            skipped = self._job.skipped_steps
            loss = _loss_of(self._job, batch)
            if self._job.skipped_steps == skipped:
                return loss
        return math.nan


def _loss_of(job: TrainingJob, batch: Any) -> float:
    return float(job.step(map_structure(lambda leaf: leaf.clone() if hasattr(leaf, "clone") else leaf, batch)))


def _endless(batches: Sequence[Any]) -> Iterator[Any]:
    while True:
        yield from batches


def _sample(job: TrainingJob) -> dict[str, torch.Tensor]:
    """Sample every parameter, in FP32."""
    return {name: sampled(parameter).float() for name, parameter in job.whole_parameters()}


@contextmanager
def randomness_off(model: torch.nn.Module, randomness: str) -> Iterator[None]:
    """Turns dropout and its kin off, where that is what makes the model random.

    All modules but those with running statistics go to evaluation mode, which functional dropout
    (`training=self.training`) obeys too.
    """
    if randomness != "switchable":
        yield
        return
    switched = [m for m in model.modules() if m.training and not hasattr(m, "running_mean")]
    for module in switched:
        module.training = False
    try:
        yield
    finally:
        for module in switched:
            module.training = True


# --- comparing --------------------------------------------------------------------------------


def deviations(
    curve: Curve, update: dict[str, torch.Tensor], reference: Curve, reference_update: dict[str, torch.Tensor]
) -> Tolerance:
    """Relative deviations of one run from the reference."""
    return Tolerance(
        loss=_relative(curve.losses, reference.losses),
        gradient_norm=_relative(curve.gradient_norms, reference.gradient_norms),
        update_norm=_relative((curve.update_norm,), (reference.update_norm,))[0],
        update_direction=_turned(update, reference_update),
        curve_loss=_relative((_mean(curve.curve_losses),), (_mean(reference.curve_losses),))[0],
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def _relative(values: Sequence[float], references: Sequence[float]) -> tuple[float, ...]:
    scale = max((abs(r) for r in references), default=0.0) * 1e-3
    return tuple(
        abs(v - r) / max(abs(r), scale, 1e-30) if math.isfinite(v) else math.inf
        for v, r in zip(values, references, strict=True)
    )


def _turned(update: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """One less the cosine between two updates; infinite where other parameters are updated."""
    if update.keys() != reference.keys():
        return math.inf
    dot = sum(float((update[name].double() * reference[name].double()).sum()) for name in reference)
    first = math.sqrt(sum(float(piece.double().pow(2).sum()) for piece in update.values()))
    second = math.sqrt(sum(float(piece.double().pow(2).sum()) for piece in reference.values()))
    if first == 0 or second == 0:
        return 0.0 if first == second else 1.0
    turned = 1.0 - dot / (first * second)
    return turned if turned > COSINE_ROUNDOFF else 0.0


def widest(tolerances: Sequence[Tolerance]) -> Tolerance:
    """The largest deviation of several runs, by step; later steps allow what earlier ones showed."""
    return Tolerance(
        loss=_running_max([t.loss for t in tolerances]),
        gradient_norm=_running_max([t.gradient_norm for t in tolerances]),
        update_norm=max(t.update_norm for t in tolerances),
        update_direction=max(t.update_direction for t in tolerances),
        curve_loss=max(t.curve_loss for t in tolerances),
    )


def widened(rounding: Tolerance, bound: Tolerance) -> Tolerance:
    """Such that `FACTOR` times the result allows what a bound does, which is no sample of it, just once more."""

    def plus(ours: tuple[float, ...], theirs: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(our + their / FACTOR for our, their in zip(ours, theirs, strict=True))

    return Tolerance(
        loss=plus(rounding.loss, bound.loss),
        gradient_norm=plus(rounding.gradient_norm, bound.gradient_norm),
        update_norm=rounding.update_norm + bound.update_norm / FACTOR,
        update_direction=rounding.update_direction + bound.update_direction / FACTOR,
        curve_loss=rounding.curve_loss + bound.curve_loss / FACTOR,
    )


def _running_max(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    result: list[float] = []
    for column in zip(*rows, strict=True):
        result.append(max([*column, *result[-1:]]))
    return tuple(result)


def compare(
    reference: GuardReference,
    reference_update: dict[str, torch.Tensor],
    curve: Curve,
    update: dict[str, torch.Tensor],
    *,
    unit_roundoff: float,
    lossy: bool,
    rounds_bias_corrections: bool = False,
) -> list[GuardCheck]:
    """The checks of one candidate's run against the reference."""
    if not curve.finite:
        return [
            GuardCheck(
                name="finite loss",
                kind="pointwise",
                passed=False,
                observed=math.inf,
                tolerance=0.0,
                detail="the loss or the update is not finite",
            )
        ]
    if lossy:
        return [_check_horizon(reference, curve)]
    repetition = check_repetition(reference)
    rounding = _rounding(reference, unit_roundoff)
    if rounds_bias_corrections and reference.bias_corrections is not None:
        rounding = widened(rounding, reference.bias_corrections)
    checks = _check_pointwise(reference, reference_update, curve, update, unit_roundoff, rounding)
    if reference.seed_means:
        checks.append(_check_curve(reference, curve, unit_roundoff, rounding))
    return checks if repetition is None else [repetition, *checks]


def _check_pointwise(
    reference: GuardReference,
    reference_update: dict[str, torch.Tensor],
    curve: Curve,
    update: dict[str, torch.Tensor],
    unit_roundoff: float,
    allowed: Tolerance,
) -> list[GuardCheck]:
    found = deviations(curve, update, reference.curve, reference_update)
    floor = max(FLOOR_ROUNDOFFS * unit_roundoff, FLOOR)
    pairs = {
        "loss": (found.loss, allowed.loss),
        "gradient norm": (found.gradient_norm, allowed.gradient_norm),
        "size of the first update": ((found.update_norm,), (allowed.update_norm,)),
        "direction of the first update": ((found.update_direction,), (allowed.update_direction,)),
    }
    checks = []
    for name, (observed, tolerances) in pairs.items():
        limits = [FACTOR * tolerance + floor for tolerance in tolerances]
        step = max(range(len(observed)), key=lambda k: observed[k] - limits[k], default=0)
        checks.append(
            GuardCheck(
                name=name,
                kind="pointwise",
                passed=all(o <= limit for o, limit in zip(observed, limits, strict=True)),
                observed=observed[step] if observed else 0.0,
                tolerance=limits[step] if limits else 0.0,
                detail=f"{name} differs by {observed[step]:.2g} at step {step + 1}, allowed {limits[step]:.2g}"
                if observed
                else "",
            )
        )
    return checks


def check_update(rule: UpdateRule, watch: UpdateWatch, job: TrainingJob) -> GuardCheck:
    """Whether the candidate's parameters are where the reference's rule brings them from its gradients."""
    found = worst_deviation(rule, watch.steps, in_fp32=rounds_bias_corrections(job.optimizer))
    detail = _told(found) if found.name else ""
    return _gated("replayed update", "update", found.score, LIMIT, detail, job.device.type in UPDATE_DEVICES)


def check_gradients(
    reference: GradientReference, watch: GradientWatch, *, unit_roundoff: float, device: torch.device
) -> list[GuardCheck]:
    """Whether gradients, and what a step changes beside the parameters, are the reference's to within rounding."""
    limits = limits_of(unit_roundoff)
    checks: list[GuardCheck] = []
    parts = (
        ("gradients", "gradient", reference.gradients, watch.gradients, KINDS),
        ("untrained state", "state", reference.changes, watch.changes, ("residual",)),
    )
    for name, kind, compared, found, kinds in parts:
        if not any(compared.steps) and not any(found):
            continue
        noise = compared.noise_at(unit_roundoff)
        score = worst_of(scores(compared.steps, noise, found, limits=limits, exact=reference.exact), kinds)
        gates = device.type in GRADIENT_DEVICES
        checks.append(_gated(name, kind, score.ratio, 1.0, _told_score(score, name), gates))
    return checks


def check_masks(scatter: Scatter, watch: GradientWatch, device: torch.device) -> GuardCheck:
    """Whether masks scatter gradients by as much as the reference's do."""
    excess = excess_of(scatter, watch.gradients)
    detail = (
        f"dropout and its kin scatter gradients {math.exp(excess):.2g} times as much as the reference's, allowed "
        f"{math.exp(-scatter.limit):.2g} to {math.exp(scatter.limit):.2g} times"
    )
    gates = device.type in GRADIENT_DEVICES
    return _gated("scatter of masks", "masks", abs(excess), scatter.limit, detail, gates)


def _gated(name: str, kind: str, observed: float, limit: float, detail: str, gates: bool) -> GuardCheck:
    """A check whose limit was measured on some devices, and is only shown on others."""
    note = (
        "" if gates or not detail else "; shown only, because this device's limit was not measured on large trainings"
    )
    passed = observed <= limit or not gates
    return GuardCheck(name=name, kind=kind, passed=passed, observed=observed, tolerance=limit, detail=detail + note)


def _told(found: Deviation) -> str:
    if math.isinf(found.score):
        return f"{found.name} has no finite gradient or update at step {found.step}"
    return (
        f"the update of {found.name} at step {found.step} differs from the optimizer's rule by {found.score:.2g} times "
        f"what rounding allows, allowed {LIMIT:g} (its rate by {found.rate:.2g}, its decay by {found.decay:.2g})"
    )


def _told_score(score: Score, part: str) -> str:
    if not score.step:
        return ""
    if math.isinf(score.ratio):
        return f"{score.name or part} is not finite at step {score.step}, or only one of the two trainings has it"
    what = {
        "residual": f"{score.name} differs",
        "slope": f"the size of {score.name} differs",
        "scale": "the size of all tensors together differs",
        "pooled": "all tensors together differ",
        "zeros": "elements that are zero and should not be differ",
    }[score.kind]
    return (
        f"{part}: {what} at step {score.step} by {score.ratio:.2g} of what rounding may do at most"
        f" ({score.excess:+.2g} along the reference)"
    )


def _rounding(reference: GuardReference, unit_roundoff: float) -> Tolerance:
    """The tolerance measured at this roundoff, or at the next coarser one that was measured; with what runs of the same
    settings differ by, as far as that may count.
    """
    rounding = _measured(reference, max(unit_roundoff, reference.own_roundoff))
    return widest([rounding, _at_most(reference.repetition, _repetition_bound(reference))])


def _measured(reference: GuardReference, unit_roundoff: float) -> Tolerance:
    measured = sorted((float.fromhex(key), value) for key, value in reference.rounding.items())
    return next((tolerance for roundoff, tolerance in measured if roundoff >= unit_roundoff), measured[-1][1])


def _repetition_bound(reference: GuardReference) -> Tolerance:
    """What runs of the same settings may differ by: some times what rounding does in their own arithmetic."""
    rounding = _measured(reference, reference.own_roundoff)

    def wide(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(REPETITIONS * (value + FLOOR) for value in values)

    return Tolerance(
        loss=wide(rounding.loss),
        gradient_norm=wide(rounding.gradient_norm),
        update_norm=REPETITIONS * (rounding.update_norm + FLOOR),
        update_direction=REPETITIONS**2 * (rounding.update_direction + FLOOR),  # one less a cosine goes with the square
        curve_loss=REPETITIONS * (rounding.curve_loss + FLOOR),
    )


def _at_most(tolerance: Tolerance, bound: Tolerance) -> Tolerance:
    def least(ours: tuple[float, ...], theirs: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(min(our, their) for our, their in zip(ours, theirs, strict=True))

    return Tolerance(
        loss=least(tolerance.loss, bound.loss),
        gradient_norm=least(tolerance.gradient_norm, bound.gradient_norm),
        update_norm=min(tolerance.update_norm, bound.update_norm),
        update_direction=min(tolerance.update_direction, bound.update_direction),
        curve_loss=min(tolerance.curve_loss, bound.curve_loss),
    )


def check_repetition(reference: GuardReference) -> GuardCheck | None:
    """Fails where runs of the reference's own settings differ by more than may count; None where they do not."""
    seen, bound = reference.repetition, _repetition_bound(reference)
    pairs = {
        "loss": [*zip(seen.loss, bound.loss, strict=True)],
        "gradient norm": [*zip(seen.gradient_norm, bound.gradient_norm, strict=True)],
        "first update's size": [(seen.update_norm, bound.update_norm)],
        "first update's direction": [(seen.update_direction, bound.update_direction)],
        "loss curve": [(seen.curve_loss, bound.curve_loss)],
    }
    ratio, what, by = max((found / allowed, name, found) for name, both in pairs.items() for found, allowed in both)
    if ratio <= 1:
        return None
    return GuardCheck(
        name="repetition",
        kind="pointwise",
        passed=False,
        observed=ratio,
        tolerance=1.0,
        detail=f"the training does not repeat itself: two runs of today's settings, with the same seed and batches, "
        f"differ by {by:.2g} in the {what}, {ratio:.2g} times what may count beside rounding, so no change can be "
        "told from chance. Seed every generator that data and loss draw from (worker_init, NumPy, Python), keep "
        "nothing from process to process, or allow lossy choices, which are compared over a longer horizon",
    )


def _check_curve(reference: GuardReference, curve: Curve, unit_roundoff: float, rounding: Tolerance) -> GuardCheck:
    """Other back ends draw other masks, and round: a model whose masks hardly matter differs by its rounding alone."""
    means = reference.seed_means
    centre = _mean(means)
    spread = math.sqrt(sum((m - centre) ** 2 for m in means) / max(1, len(means) - 1))
    floor = max(FLOOR_ROUNDOFFS * unit_roundoff, FLOOR)
    relative = FACTOR * rounding.curve_loss + floor
    observed = abs(_mean(curve.curve_losses) - centre)
    tolerance = SEED_SPREADS * spread + relative * abs(centre)
    return GuardCheck(
        name="loss curve",
        kind="curve",
        passed=observed <= tolerance,
        observed=observed,
        tolerance=tolerance,
        detail=f"mean loss over {len(curve.curve_losses)} steps differs by {observed:.3g}, allowed {tolerance:.3g} "
        f"(seeds spread {spread:.3g})",
    )


def _check_horizon(reference: GuardReference, curve: Curve) -> GuardCheck:
    """How much of the reference's fall in loss is missing, in units of that fall."""
    ends = reference.horizon_ends
    centre = sum(ends) / len(ends)
    spread = max(ends) - min(ends)
    start = (reference.curve.curve_losses or reference.curve.losses)[0]  # with dropout on, as the end
    fall = max(1e-12, start - centre)
    missing = (last_quarter(curve.horizon_losses) - centre) / fall
    tolerance = max(1 - MIN_PROGRESS, 3 * spread / fall)
    return GuardCheck(
        name="loss horizon",
        kind="curve",
        passed=missing <= tolerance,
        observed=missing,
        tolerance=tolerance,
        detail=f"after {len(curve.horizon_losses)} steps {missing:.1%} of the fall in loss is missing, "
        f"allowed {tolerance:.1%}",
    )


def last_quarter(losses: Sequence[float]) -> float:
    return _mean(losses[-max(1, len(losses) // 4) :])


# --- in a trial -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What one candidate showed.

    Attributes:
        notes: Why parts of it could not be judged.
        gradients: What was seen of them, where they were compared.
    """

    curve: Curve
    checks: list[GuardCheck]
    notes: tuple[str, ...]
    gradients: GradientWatch | None


class Judge:
    """Runs the protocol on candidates' freshly built jobs and compares them with a study's reference."""

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
    ) -> Judged:
        """
        Args:
            is_reference: The job has the reference's own settings: what it differs by is repetition.
            uncompiled: Steps without dropout run what is compiled as it is written.
        """
        protocol = self.reference.protocol
        no_replay = self.reference.why_no_rule or why_not_replayed(job)
        no_gradients = why_not_compared(job)
        if self._gradients is None:
            no_gradients = "the reference was made without them"
        update_watch = None if no_replay or lossy else UpdateWatch(job)
        gradient_watch = None if no_gradients or lossy else GradientWatch(job)
        mask_watch = GradientWatch(job) if gradient_watch is not None and protocol.num_curve else None
        curve, update = run_protocol(
            job,
            batches,
            protocol,
            seed=protocol.seed,
            horizon_seed=protocol.seed if lossy else None,
            update_watch=update_watch,
            gradient_watch=gradient_watch,
            mask_watch=mask_watch,
            restart=partial(set_initial_state, job, self._files.initial_state) if gradient_watch is not None else None,
            uncompiled=uncompiled,
        )
        curve = averaged(curve, self._coordinator)
        if is_reference and curve.finite:
            self.reference = _with_repetition(
                self.reference, deviations(curve, update, self.reference.curve, self._update)
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
        if curve.finite and update_watch is not None and self.reference.rule is not None:
            checks.append(check_update(self.reference.rule, update_watch, job))
        if curve.finite and gradient_watch is not None and self._gradients is not None:
            checks += check_gradients(self._gradients, gradient_watch, unit_roundoff=unit_roundoff, device=job.device)
        scatter = self._gradients.scatter if self._gradients is not None else None
        if curve.finite and mask_watch is not None and scatter is not None:
            checks.append(check_masks(scatter, mask_watch, job.device))
        reasons = {"update not replayed": no_replay, "gradients not compared": no_gradients}
        notes = () if lossy else tuple(f"{part}: {reason}" for part, reason in reasons.items() if reason)
        return Judged(curve=curve, checks=checks, notes=notes, gradients=gradient_watch)


def run_guard(
    job: TrainingJob,
    files: StudyFiles,
    spec: TrialSpec,
    rank: int,
    coordinator: Coordinator,
    *,
    uncompiled: bool = False,
) -> GuardVerdict:
    """Runs the protocol on a candidate's freshly built job and compares.

    Args:
        uncompiled: Whether steps without dropout run what is compiled as it is written.
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
    )
    reference, curve, checks = judge.reference, judged.curve, judged.checks
    if is_reference and rank == 0:
        _replace_file(files.reference, msgspec.json.encode(reference))
    if spec.checks_loader:
        checks += check_loader(job, files, spec.seed, _exact_knobs(job, reference))
    regrouped = check_samples(job)
    if regrouped is not None:
        checks.append(regrouped)
    num_audits = 0 if spec.lossy else reference.protocol.num_audits
    return GuardVerdict(
        passed=all(check.passed for check in checks),
        num_steps=len(curve.losses) + len(curve.curve_losses) + len(curve.horizon_losses) + num_audits,
        checks=tuple(checks),
        losses=(*curve.losses, *curve.curve_losses, *curve.horizon_losses),
        reference_losses=(
            *reference.curve.losses,
            *reference.curve.curve_losses,
            *(reference.curve.horizon_losses if spec.lossy else ()),
        ),
        skipped_steps=curve.skipped_steps,
        notes=judged.notes,
        compared=compared(checks, curve, max(spec.unit_roundoff, reference.own_roundoff)),
    )


def _exact_knobs(job: TrainingJob, reference: GuardReference) -> dict[str, Scalar]:
    """The knobs that are to leave the training as it is, with the reference's values."""
    exact = job.plan.knobs.keys() - job.workload.recipe_knobs.keys()
    return {name: reference.choices[PREFIX + name]["value"] for name in sorted(exact)}


ARITHMETICS = {2.0**-24: "FP32", 2.0**-11: "TF32 or float16", 2.0**-8: "bfloat16"}


def compared(checks: Sequence[GuardCheck], curve: Curve, unit_roundoff: float) -> tuple[str, ...]:
    """What a verdict rests on, part by part."""
    arithmetic = ARITHMETICS.get(unit_roundoff, f"{unit_roundoff:.2g}")
    steps = len(curve.losses)
    parts = {
        "update": f"update equal to {RELATIVE:g} in {steps} steps",
        "gradient": f"gradients within the rounding of {arithmetic}",
        "state": "statistics and other untrained state the same way",
        "pointwise": f"losses and their gradients' norm in {steps} steps",
        "masks": f"masks by how they scatter gradients in {len(curve.curve_losses)} steps",
        "curve": f"mean loss of {len(curve.curve_losses) or len(curve.horizon_losses)} steps with dropout on",
        "loader": "order and content of samples",
    }
    found = []
    for kind, text in parts.items():
        shares = [check.observed / check.tolerance for check in checks if check.kind == kind and check.tolerance]
        if any(check.kind == kind for check in checks):
            found.append(f"{text} ({max(shares):.1g} of the limit)" if shares else text)
    return tuple(found)


def _stored_reference(files: StudyFiles) -> GuardReference:
    return msgspec.json.decode(files.reference.read_bytes(), type=GuardReference)


def needs_no_compilation(files: StudyFiles, spec: TrialSpec, device: torch.device) -> bool:
    """Whether the steps without dropout of a compiled candidate tell as much uncompiled.

    With its dropout off a model is another graph, which nobody measures, and compiling it takes as long as compiling
    the one that is. It is not needed where the user compiles in the same way and the reference was made without; the
    curve part runs what is compiled. Of several ranks one that runs out of memory ends all: there must be room for
    twice what the reference took.
    """
    reference = _stored_reference(files)
    ours, theirs = (choices.get("compile") for choices in (spec.choices, reference.choices))
    if not reference.eager or ours != theirs or reference.protocol.randomness != "switchable":
        return False
    return spec.num_ranks == 1 or device.type == "cpu" or 2 * reference.peak_bytes < device_memory_bytes(device)


def _with_repetition(reference: GuardReference, seen: Tolerance) -> GuardReference:
    """With what another run of the reference's own settings, in another process, differed by."""
    return msgspec.structs.replace(reference, repetition=widest([reference.repetition, seen]))


def _replace_file(path: Path, content: bytes) -> None:
    """At one stroke: another trial may read it at this moment."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_bytes(content)
    temporary.replace(path)


def averaged(curve: Curve, coordinator: Coordinator) -> Curve:
    """Losses averaged over the ranks: each saw its part of the batch."""
    if coordinator.num_ranks == 1:
        return curve
    import torch
    import torch.distributed as dist

    def mean(values: tuple[float, ...]) -> tuple[float, ...]:
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=coordinator.group)
        return tuple((tensor / coordinator.num_ranks).tolist())

    return msgspec.structs.replace(
        curve,
        losses=mean(curve.losses),
        curve_losses=mean(curve.curve_losses),
        horizon_losses=mean(curve.horizon_losses),
    )

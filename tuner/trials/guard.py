"""The guard: is a candidate still the same training?

Reference and candidate run one protocol from the shared initial state on stored batches, through the
same step function that is measured:

1. *Pointwise*, with dropout and stochastic depth off: the loss and the gradient norm of every step,
   and the first update (its size, and its direction on a sample of elements).
2. *Curve*, with them on, for models that have any: other back ends draw other masks, so only the mean
   loss of the following steps is compared, against the spread of reference runs over seeds and what
   rounding does to it.
3. *Horizon*, for lossy candidates: no pointwise check; the loss over a longer stretch must have
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from steptune.tuner.guard.update_replay import LIMIT, Deviation, UpdateRule, worst_deviation
from steptune.tuner.records import Choice, GuardCheck, GuardVerdict, Record, Scalar, TrialSpec
from steptune.tuner.strategies.knobs import PREFIX
from steptune.tuner.training.structure import map_structure
from steptune.tuner.training.tensor_file import map_tensors
from steptune.tuner.trials.coordination import Coordinator
from steptune.tuner.trials.disturbance import rounds_bias_corrections
from steptune.tuner.trials.guard_batches import check_samples, guard_batches
from steptune.tuner.trials.loader_check import check_loader
from steptune.tuner.trials.study_files import StudyFiles
from steptune.tuner.trials.update_watch import UpdateWatch, sampled, why_not_replayed

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.job import TrainingJob

FACTOR = 10.0
SEED_SPREADS = 5.0
REPLAYED_DEVICES = ("cpu",)
"""Devices on which a replayed update gates: its limit was measured there."""
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


# --- the protocol -----------------------------------------------------------------------------


def run_protocol(
    job: TrainingJob,
    batches: Sequence[Any],
    protocol: Protocol,
    *,
    seed: int,
    horizon_seed: int | None = None,
    watch: UpdateWatch | None = None,
) -> tuple[Curve, dict[str, torch.Tensor]]:
    """Runs the guarded steps on a freshly built job.

    Args:
        seed: Of the curve part.
        horizon_seed: Of the longer horizon; None for a run that does not go on over it.
        watch: Of the pointwise part.

    Returns:
        The curve, and the first update sampled by parameter name.
    """
    import torch

    before = _sample(job)
    source = _endless(batches)
    torch.manual_seed(protocol.seed)
    norms: list[float] = []

    def look(gradients: list[torch.Tensor]) -> None:
        norms.append(job.gradient_norm(gradients))
        if watch is not None:
            watch.on_gradients()

    job.on_gradients = look
    losses: list[float] = []
    update: dict[str, torch.Tensor] = {}
    with randomness_off(job.model, protocol.randomness):
        for number in range(protocol.num_pointwise):
            with watch.step() if watch is not None else nullcontext():
                losses.append(_guarded_step(job, next(source), norms, number + 1))
            if number == 0:
                update = {name: after - before[name] for name, after in _sample(job).items()}
    update_norm = math.sqrt(sum(float(piece.double().pow(2).sum()) for piece in update.values()))
    job.on_gradients = None
    torch.manual_seed(seed)
    curve = [_loss_of(job, next(source)) for _ in range(protocol.num_curve)]
    horizon: list[float] = []
    if horizon_seed is not None:
        torch.manual_seed(horizon_seed)
        horizon = [_loss_of(job, next(source)) for _ in range(protocol.num_horizon)]
    return (
        Curve(
            losses=tuple(losses),
            gradient_norms=tuple(norms[: len(losses)]),
            update_norm=update_norm,
            curve_losses=tuple(curve),
            horizon_losses=tuple(horizon),
            skipped_steps=job.skipped_steps,
        ),
        update,
    )


def _guarded_step(job: TrainingJob, batch: Any, norms: list[float], wanted: int) -> float:
    """One update; a step that the loss scaler skips is repeated on the same batch, so curves stay aligned."""
    for _ in range(MAX_REPEATS):
        skipped = job.skipped_steps
        loss = _loss_of(job, batch)
        norms[wanted - 1 :] = norms[-1:]  # a step of the user's own may update more than once
        if job.skipped_steps == skipped:
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
    """One less the cosine between two updates."""
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
    rounding = _rounding(reference, unit_roundoff)
    if rounds_bias_corrections and reference.bias_corrections is not None:
        rounding = widened(rounding, reference.bias_corrections)
    checks = _check_pointwise(reference, reference_update, curve, update, unit_roundoff, rounding)
    if reference.seed_means:
        checks.append(_check_curve(reference, curve, unit_roundoff, rounding))
    return checks


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
    gates = job.device.type in REPLAYED_DEVICES
    note = "" if gates else f"; shown only, because the limit was not measured on {job.device.type}"
    return GuardCheck(
        name="replayed update",
        kind="update",
        passed=found.score <= LIMIT or not gates,
        observed=found.score,
        tolerance=LIMIT,
        detail=_told(found) + note if found.name else "",
    )


def _told(found: Deviation) -> str:
    if math.isinf(found.score):
        return f"{found.name} has no finite gradient or update at step {found.step}"
    return (
        f"the update of {found.name} at step {found.step} differs from the optimizer's rule by {found.score:.2g} times "
        f"what rounding allows, allowed {LIMIT:g} (its rate by {found.rate:.2g}, its decay by {found.decay:.2g})"
    )


def _rounding(reference: GuardReference, unit_roundoff: float) -> Tolerance:
    """The tolerance measured at this roundoff, or at the next coarser one that was measured."""
    measured = sorted((float.fromhex(key), value) for key, value in reference.rounding.items())
    for roundoff, tolerance in measured:
        if roundoff >= unit_roundoff:
            return widest([tolerance, reference.repetition])
    return widest([measured[-1][1], reference.repetition])


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


def run_guard(
    job: TrainingJob, files: StudyFiles, spec: TrialSpec, rank: int, coordinator: Coordinator
) -> GuardVerdict:
    """Runs the protocol on a candidate's freshly built job and compares."""
    reference = msgspec.json.decode(files.reference.read_bytes(), type=GuardReference)
    reference_update, _ = map_tensors(files.reference_update)
    batches = guard_batches(job, files, rank, spec.num_ranks)
    seed = reference.protocol.seed
    watch = UpdateWatch(job) if reference.rule is not None and not why_not_replayed(job) else None
    curve, update = run_protocol(
        job, batches, reference.protocol, seed=seed, horizon_seed=seed if spec.lossy else None, watch=watch
    )
    curve = averaged(curve, coordinator)
    if spec.choices == reference.choices and curve.finite:
        reference = _with_repetition(reference, deviations(curve, update, reference.curve, reference_update))
        if rank == 0:
            _replace_file(files.reference, msgspec.json.encode(reference))
    checks = compare(
        reference,
        reference_update,
        curve,
        update,
        unit_roundoff=spec.unit_roundoff,
        lossy=spec.lossy,
        rounds_bias_corrections=rounds_bias_corrections(job.optimizer),
    )
    if reference.rule is not None and watch is not None and curve.finite and not spec.lossy:
        checks.append(check_update(reference.rule, watch, job))
    if spec.checks_loader:
        checks += check_loader(job, files, spec.seed, _exact_knobs(job, reference))
    regrouped = check_samples(job)
    if regrouped is not None:
        checks.append(regrouped)
    return GuardVerdict(
        passed=all(check.passed for check in checks),
        num_steps=len(curve.losses) + len(curve.curve_losses) + len(curve.horizon_losses),
        checks=tuple(checks),
        losses=(*curve.losses, *curve.curve_losses, *curve.horizon_losses),
        reference_losses=(
            *reference.curve.losses,
            *reference.curve.curve_losses,
            *(reference.curve.horizon_losses if spec.lossy else ()),
        ),
        skipped_steps=curve.skipped_steps,
    )


def _exact_knobs(job: TrainingJob, reference: GuardReference) -> dict[str, Scalar]:
    """The knobs that are to leave the training as it is, with the reference's values."""
    exact = job.plan.knobs.keys() - job.workload.recipe_knobs.keys()
    return {name: reference.choices[PREFIX + name]["value"] for name in sorted(exact)}


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

"""Planted faults that the guard rejects, by precision, and what it rejects wrongly.

Twelve small trainings (`tests/support/guarded_trainings.py`) run the guard's protocol in FP32, under bfloat16 and
float16 autocast and with FP32 masters, held to a reference in FP32, and under bfloat16, held to one that is, too: with
one thing wrong, and with changes that leave the training what it is. Faults and trainings are in halves. Limits of
gradients are fitted on correct changes of the first half of the trainings; the second half serves no fitting.

A fault is material where it moves weights or statistics in ten steps by more than the precision does. One that changes
nothing (gradients that clipping never reaches, not clipped; outputs that are larger, before they are normalised) is
none: ten steps in FP64 end where those of the training end. Correct changes are tried with further seeds as well.

The third block has trainings and faults that are in neither half (`tests/support/guarded_unseen.py`); the latest faults
of its trainings were written after all limits were fixed. The fresh block (`tests/support/guarded_fresh.py`) has
trainings, faults and correct changes that were written after all rules, too; no fit has seen it.

    python benchmarks/guard_power.py --unseen --seeds 0 1 2 --rows rows.bin    # writes results/guard_power.json
    python benchmarks/guard_power.py --from rows.bin    # judges the same scores by the limits of today
    python benchmarks/guard_power.py --from rows.bin --only Causal Patches --rows rows.bin    # runs some anew

The whole takes 13 minutes of one core. Trainings and seeds run side by side (`--processes`), with the same results;
parts that were run apart (`--only`) are joined by `--from`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

import msgspec
import torch
from guard_effects import NO_EFFECT, effect_of, end_of, moves_of, rounding_of
from msgspec.structs import replace
from stamp import RESULTS, hardware, stamp

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from guarded import BF16, FP32, PROTOCOL, Study, make_study
from guarded_fresh import FRESH
from guarded_trainings import FAULTS, TRAININGS, Fault, Training
from guarded_unseen import LATEST, UNSEEN

from steptune.tuner.errors import SteptuneError
from steptune.tuner.guard.averages import LIMIT as AVERAGE_LIMIT
from steptune.tuner.guard.gradients import KINDS, Limits, Noise, limits_of, scores
from steptune.tuner.guard.masks import FALSE_SHIFTS, FLOOR_OF_DRAWS, SPREADS_OF_DRAWS
from steptune.tuner.guard.update_replay import LIMIT
from steptune.tuner.hardware import describe_environment
from steptune.tuner.records import GuardCheck, Record
from steptune.tuner.training.job import TrainingJob
from steptune.tuner.trials.gradient_watch import Compared, GradientReference

OUTPUT = RESULTS / "guard_power.json"
FP16 = 2.0**-11
MARGIN = 1.5
"""Factor over the largest score of correct changes, to which limits are fitted."""
UNITS = Limits(residual=1.0, slope=1.0, scale=1.0, pooled=1.0, zeros=1.0)
O1 = {"precision": {"level": "O1", "dtype": "bfloat16"}}
CONTEXTS: dict[str, tuple[str, dict[str, Any], float]] = {
    "FP32": ("FP32", {}, FP32),
    "FP32 to bf16 O1": ("FP32", O1, BF16),
    "FP32 to bf16 O2": ("FP32", {"precision": {"level": "O2", "dtype": "bfloat16"}}, BF16),
    "FP32 to fp16 O1": ("FP32", {"precision": {"level": "O1", "dtype": "float16"}}, FP16),
    "FP32 to fp16 O2": ("FP32", {"precision": {"level": "O2", "dtype": "float16"}}, FP16),
    "bf16 O1": ("bf16", O1, BF16),
}
"""The reference's precision, the candidate's, and the roundoff that is allowed."""
CHANGES: dict[str, dict[str, Any]] = {
    **{
        f"{implementation}{', contiguous' if contiguous else ''}": {
            "optimizer_implementation": {"implementation": implementation, "contiguous": contiguous}
        }
        for implementation, contiguous in itertools.product(("for_loop", "foreach", "fused"), (False, True))
    },
    "two micro-batches": {"micro_batch": {"num_micro_batches": 2}},
    "four micro-batches": {"micro_batch": {"num_micro_batches": 4}},
    "checkpointing": {"activation_checkpointing": {"every": 1}},
    "channels last": {"memory_format": {"layout": "channels_last"}},
}
COUPLED = ("Convolutional", "Contrastive", "Queued", "TwoTower")
"""Samples of a batch depend on one another: micro-batches are another training."""
RANDOM = ("Causal", "Patches", "Tied", "MaskedPatches", "Transducer")
BLOCKS = {**UNSEEN, **FRESH}
"""Trainings with faults of their own."""
SIXTEEN_BITS = "16 bits"
"""Part of faults that only a model in 16 bits has."""


class Run(Record):
    """One run of the guard.

    Attributes:
        name: Of the fault or of the change.
        part: Of the training that is wrong; empty for a correct change.
        others: Checks beside those of update and gradients that failed.
        update: Score of the replayed update.
        gradients: Scores by kind, in units of the measured noise.
        state: Residual of what is not trained.
        average: Of averages of weights, in roundings.
        twin: Scores of the twin's gradients, in units of the noise of FP32.
        excess: Logarithm of how much more masks scatter.
        spread: What that is off by for the reference's own masks.
        shift: Of the mean over masks, over its limit.
        rate: Of masks by module, of the limit.
        output: Of modules' outputs, of the limit.
        moves: By how much it moves weights or statistics in ten steps, in units of what the precision does.
        effect: The same in FP64, as a share of weights or statistics.
        steps: Of the candidate.
        seed: Of the training.
    """

    training: str
    context: str
    name: str
    part: str
    others: tuple[str, ...]
    update: float
    gradients: dict[str, float]
    state: float
    average: float
    twin: dict[str, float]
    excess: float
    spread: float
    shift: float
    rate: float
    output: float = 0.0
    moves: float = 0.0
    effect: float = 0.0
    steps: int = 0
    seed: int = 0

    @property
    def rejected(self) -> bool:
        return bool(self.reasons)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Parts of the guard that reject it."""
        limits, fine = limits_of(CONTEXTS[self.context][2]), limits_of(FP32)
        found = {
            "curves": bool(self.others),
            "update": self.update > LIMIT,
            "gradients": any(value > getattr(limits, kind) for kind, value in self.gradients.items()),
            "state": self.state > limits.residual,
            "averages": self.average > AVERAGE_LIMIT,
            "twin": any(value > getattr(fine, kind) for kind, value in self.twin.items()),
            "outputs": self.output > 1,
            "masks": self.excess > FLOOR_OF_DRAWS + SPREADS_OF_DRAWS * self.spread or self.shift > 1,
            "mask rates": self.rate > 1,
        }
        return tuple(part for part, failed in found.items() if failed)


class Bench:
    """One training in all contexts.

    Attributes:
        steps: Of the references, by arithmetic.
    """

    def __init__(self, training: type[Training], folder: Path, seed: int = 0) -> None:
        self._training = training
        self._seed = seed
        self._own_step = training().has_custom_step
        self._is_coupled = training.__name__ in COUPLED
        random = training.__name__ in RANDOM
        protocol = replace(PROTOCOL, num_pointwise=4, num_curve=8 if random else 0, num_horizon=0)
        self._studies: dict[str, tuple[Study, GradientReference]] = {}
        self.steps: dict[str, int] = {}
        for name, choices, roundoffs in (("FP32", {}, (FP32, FP16, BF16)), ("bf16", O1, (BF16,))):
            with counted() as count:
                study = make_study(
                    folder / name, training, protocol=protocol, choices=choices, unit_roundoffs=roundoffs, seed=seed
                )
            # A further arithmetic takes as many runs as the disturbed ones of the first.
            further = (len(roundoffs) - 1) * protocol.num_disturbed * (protocol.num_pointwise + protocol.num_audits)
            self.steps[name] = count[0] - further
            gradients = GradientReference.load(study.files.reference_gradients)
            assert gradients is not None
            self._studies[name] = study, gradients

    def runs(self, faults: Sequence[Fault]) -> Iterator[Run]:
        """Every correct change, and every fault that means something to the training."""
        for context, (reference, choices, roundoff) in CONTEXTS.items():
            if roundoff == FP16 and self._own_step:  # its own optimizer would step by scaled gradients
                continue
            try:
                ends = self._ends(reference, choices)
            except RuntimeError:  # no kernel of this arithmetic
                continue
            for name, change in CHANGES.items():
                if not (
                    (self._is_coupled and "micro" in name) or (self._own_step and ("micro" in name or "contig" in name))
                ):
                    yield from self._run(context, name, "", self._training, {**choices, **change}, ends)
            for fault in faults:
                planted = fault.plant(self._training)
                if planted is not None:
                    yield from self._run(context, fault.name, fault.part, planted, choices, ends)

    def _ends(self, reference: str, choices: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
        """Parameters after ten steps without a fault: in FP32, and in the candidate's precision."""
        study, _ = self._studies[reference]
        return [end_of(study, self._training(), options) for options in ({}, choices)]

    def _run(
        self,
        context: str,
        name: str,
        part: str,
        planted: type[Training],
        choices: dict[str, Any],
        ends: list[dict[str, torch.Tensor]],
    ) -> Iterator[Run]:
        reference, _, roundoff = CONTEXTS[context]
        study, known = self._studies[reference]
        try:
            with counted() as count:
                judged = study.judged(study.job(planted(), **choices), unit_roundoff=roundoff, choices=choices)
        except (SteptuneError, RuntimeError, TypeError, KeyError):  # no such form, no such kernel, a state that is gone
            return
        checks = {check.name: check for check in judged.checks}
        gradients, twin, state = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0.0), 0.0
        if judged.gradients is not None and "finite loss" not in checks:
            has_twin = judged.twin is not None
            noise = known.noise_of(judged.gradients, roundoff) if _replays(checks) else None
            gradients = _scores(known.gradients, roundoff, judged.gradients.gradients, known.exact, has_twin, noise)
            state = _scores(known.changes, roundoff, judged.gradients.changes, known.exact)["residual"]
        if judged.twin is not None:
            twin = _scores(known.wide, FP32, judged.twin.gradients, range(len(known.wide.steps)))
        own = (
            "replayed update",
            "gradients",
            "untrained state",
            "averages",
            "gradients in FP32",
            "outputs of modules",
            *MASKS,
        )
        masks = [checks[mask].observed if mask in checks else 0.0 for mask in MASKS]
        yield Run(
            training=self._training.__name__,
            context=context,
            name=name,
            part=part,
            others=tuple(check.name for check in judged.checks if not check.passed and check.name not in own),
            update=checks["replayed update"].observed if "replayed update" in checks else 0.0,
            gradients=gradients,
            state=state,
            average=checks["averages"].observed if "averages" in checks else 0.0,
            twin=twin,
            excess=masks[0],
            spread=known.scatter.spread if known.scatter is not None else 0.0,
            shift=masks[1] / known.scatter.shift_limit if known.scatter is not None else 0.0,
            rate=masks[2],
            output=checks["outputs of modules"].observed if "outputs of modules" in checks else 0.0,
            moves=moves_of(end_of(study, planted(), choices), ends[1], rounding_of(ends[1], ends[0])) if part else 0.0,
            effect=effect_of(study, self._training, planted) if part and context == "FP32" else 0.0,
            steps=count[0],
            seed=self._seed,
        )


MASKS = ("scatter of masks", "mean over masks", "rate of masks")


@contextmanager
def counted() -> Iterator[list[int]]:
    """Counts the steps of all jobs, in the list's one element."""
    count, step = [0], TrainingJob.step

    def counting(job: TrainingJob, batch: Any) -> torch.Tensor:
        count[0] += 1
        return step(job, batch)

    TrainingJob.step = counting  # type: ignore[method-assign]
    try:
        yield count
    finally:
        TrainingJob.step = step  # type: ignore[method-assign]


def _replays(checks: Mapping[str, GuardCheck]) -> bool:
    return "replayed update" in checks and checks["replayed update"].observed <= LIMIT


def _scores(
    known: Compared,
    roundoff: float,
    found: Sequence[Any],
    exact: Sequence[int],
    has_twin: bool = False,
    noise: Sequence[Noise] | None = None,
) -> dict[str, float]:
    noise = known.noise_at(roundoff) if noise is None else noise
    by_kind = scores(known.steps, noise, found, limits=UNITS, exact=exact, has_twin=has_twin)
    return {kind: score.ratio for kind, score in by_kind.items()}


# --- tables -----------------------------------------------------------------------------------


def half_of(run: Run) -> str:
    trainings = [training.__name__ for training in TRAININGS]
    names = [fault.name for fault in FAULTS]
    places = [trainings.index(run.training) % 2, *([names.index(run.name) % 2] if run.part else [])]
    return "first" if not any(places) else "second" if all(places) else "mixed"


def real_faults(runs: Iterable[Run]) -> list[Run]:
    """Those that change anything: in FP64 a fault without effect ends where the training ends; one of 16 bits has an
    effect in these alone.
    """
    runs = list(runs)
    none = {
        (run.training, run.name)
        for run in runs
        if run.part and run.context == "FP32" and run.effect < NO_EFFECT and run.part != SIXTEEN_BITS
    }
    return [
        run
        for run in runs
        if run.part
        and (run.training, run.name) not in none
        and not (run.part == SIXTEEN_BITS and run.context == "FP32")
    ]


def _counts(faults: Sequence[Run]) -> dict[str, int]:
    material = [run for run in faults if run.moves > 1]
    return {
        "faults": len(faults),
        "caught": sum(run.rejected for run in faults),
        "material": len(material),
        "material_caught": sum(run.rejected for run in material),
    }


def table(runs: list[Run]) -> list[dict[str, Any]]:
    rows = []
    faults = real_faults(runs)
    for context in CONTEXTS:
        own = [run for run in faults if run.context == context]
        correct = [run for run in runs if run.context == context and not run.part]
        seeds = sorted({run.seed for run in correct})
        rows.append(
            {
                "context": context,
                "halves": {
                    half: _counts([r for r in own if half_of(r) == half]) for half in ("first", "mixed", "second")
                },
                "parts": {part: _counts([r for r in own if r.part == part]) for part in sorted({r.part for r in own})},
                "caught_by": dict(Counter(reason for run in own for reason in run.reasons)),
                "caught_alone": dict(Counter(run.reasons[0] for run in own if len(run.reasons) == 1)),
                "correct": {half: sum(half_of(r) == half for r in correct) for half in ("first", "second")},
                "seeds_of_correct": len(seeds),
                "correct_rejected": [
                    f"{r.training}, seed {r.seed}: {r.name} by {r.reasons}" for r in correct if r.rejected
                ],
            }
        )
    return rows


def largest_of_correct(runs: list[Run], half: str) -> dict[str, dict[str, float]]:
    """Scores by arithmetic that limits are fitted to."""
    result = {}
    for label, fine in (("fine", True), ("coarse", False)):
        own = [
            run for run in runs if not run.part and (CONTEXTS[run.context][2] == FP32) is fine and half_of(run) == half
        ]
        if not own:
            continue
        result[label] = {kind: max(run.gradients[kind] for run in own) for kind in KINDS}
        result[label] |= {"state": max(run.state for run in own), "update": max(run.update for run in own)}
        result[label]["twin"] = max(run.twin[kind] / getattr(limits_of(FP32), kind) for run in own for kind in KINDS)
        result[label]["excess"] = max(run.excess / (FLOOR_OF_DRAWS + SPREADS_OF_DRAWS * run.spread) for run in own)
        result[label] |= {"shift": max(run.shift for run in own), "rate": max(run.rate for run in own)}
        result[label]["output"] = max(run.output for run in own)
        result[label]["average"] = max(run.average for run in own)
    return result


def result_of(runs: list[Run], steps: Mapping[str, int]) -> dict[str, Any]:
    known = {training.__name__ for training in TRAININGS}
    new = {training.__name__ for training in FRESH}
    seen, fresh = [r for r in runs if r.training in known], [r for r in runs if r.training in new]
    unseen = [r for r in runs if r.training not in known | new]
    latest = {fault.name for faults in LATEST.values() for fault in faults}
    faults = real_faults(seen)
    missed = Counter((run.name, run.context) for run in faults if run.moves > 1 and not run.rejected)
    return {
        "trainings": len(TRAININGS),
        "faults": len({run.name for run in faults}),
        "correct_changes": len({(run.name, run.context) for run in seen if not run.part}),
        "limits": {
            "update": LIMIT,
            "fine": msgspec.to_builtins(limits_of(FP32)),
            "coarse": msgspec.to_builtins(limits_of(BF16)),
            "masks": {"floor": FLOOR_OF_DRAWS, "spreads": SPREADS_OF_DRAWS, "false_shifts": FALSE_SHIFTS},
        },
        "margin": MARGIN,
        "steps": {**steps_of(runs), "reference": dict(steps)},
        "largest_of_correct": {half: largest_of_correct(seen, half) for half in ("first", "second")},
        "rows": table(seen),
        "material_missed": [f"{name} ({context}): {count}" for (name, context), count in missed.items()],
        "unseen": unseen_of([run for run in unseen if run.name not in latest]),
        "latest": unseen_of([run for run in unseen if run.name in latest]),
        "fresh": unseen_of(fresh),
    }


def steps_of(runs: Iterable[Run]) -> dict[str, int]:
    """Most of a correct candidate, with masks and without; a loss scaler repeats some, which is left out."""
    counts = [(r.steps, r.training in RANDOM) for r in runs if not r.part and CONTEXTS[r.context][2] != FP16]
    return {
        "candidate": max((count for count, _ in counts), default=0),
        "candidate_without_masks": max((count for count, masks in counts if not masks), default=0),
    }


def unseen_of(runs: list[Run]) -> dict[str, Any]:
    """Counts of a block that no limit was fitted on and nobody saw before limits were fixed."""
    faults = real_faults(runs)
    correct = [run for run in runs if not run.part]
    return {
        "trainings": sorted({run.training for run in runs}),
        "faults": len({(run.training, run.name) for run in faults}),
        "rows": [{"context": context, **_counts([r for r in faults if r.context == context])} for context in CONTEXTS],
        "missed": [
            f"{r.training}, {r.context}: {r.name}{'' if r.moves > 1 else ' (immaterial)'}"
            for r in faults
            if not r.rejected
        ],
        "correct": len(correct),
        "correct_rejected": [f"{r.training}, {r.context}: {r.name} by {r.reasons}" for r in correct if r.rejected],
    }


class Kept(Record):
    """Contents of a file of rows.

    Attributes:
        steps: Largest number of a reference, by its arithmetic.
    """

    runs: list[Run]
    steps: dict[str, int]


def run_all(parts: Sequence[tuple[str, int]], num_processes: int) -> Iterator[tuple[int, Kept]]:
    """Runs of each part, a training and its seed, with the part's place, as they come."""
    numbered = list(enumerate(parts))
    if num_processes == 1:
        yield from map(_run_part, numbered)
        return
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        yield from pool.imap_unordered(_run_part, sorted(numbered, key=lambda part: part[1][1]))  # faults first


def _run_part(part: tuple[int, tuple[str, int]]) -> tuple[int, Kept]:
    place, (name, seed) = part
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    training = next(training for training in (*TRAININGS, *BLOCKS) if training.__name__ == name)
    faults = (*BLOCKS[training], *LATEST.get(training, ())) if training in BLOCKS else FAULTS
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(training, Path(folder), seed)
        runs = list(bench.runs(faults if seed == 0 else ()))
    print(name, seed, bench.steps, flush=True)
    return place, Kept(runs=runs, steps=bench.steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--rows", type=Path, help="keep every run's scores there")
    parser.add_argument("--from", dest="source", type=Path, nargs="*", default=[], help="scores of earlier runs")
    parser.add_argument(
        "--only", nargs="*", default=None, help="trainings that are run; default all, or none beside --from"
    )
    parser.add_argument("--unseen", action="store_true", help="run the third block and the fresh one")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0], help="above 0 correct changes alone are run")
    parser.add_argument("--processes", type=int, default=1, help="side by side")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    wanted = (
        arguments.only if arguments.only is not None else [] if arguments.source else [t.__name__ for t in TRAININGS]
    )
    chosen = [t.__name__ for t in TRAININGS if t.__name__ in wanted]
    blocks = {t.__name__ for t in BLOCKS if arguments.unseen or t.__name__ in wanted}
    parts = [*itertools.product(chosen, arguments.seeds), *((t.__name__, 0) for t in BLOCKS if t.__name__ in blocks)]
    source = Kept(runs=[], steps={})
    for path in arguments.source:
        source = _joined(source, msgspec.msgpack.decode(path.read_bytes(), type=Kept))
    kept, come = source, {}
    for place, found in run_all(parts, arguments.processes):
        come[place] = found
        kept = reduce(_joined, (come[place] for place in sorted(come)), source)
        if arguments.rows:
            arguments.rows.write_bytes(msgspec.msgpack.encode(kept))
    seeds = " ".join(str(seed) for seed in sorted({run.seed for run in kept.runs}))
    result = {
        **stamp(f"python benchmarks/guard_power.py --unseen --seeds {seeds}", ("tuner", "tests", "benchmarks")),
        "hardware": hardware(describe_environment("cpu", Path(tempfile.gettempdir()), 1)),
        **result_of(kept.runs, kept.steps),
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    for row in result["rows"]:
        print(row)
    print(result["steps"], result["material_missed"], result["unseen"], result["fresh"], sep="\n")


def _joined(first: Kept, second: Kept) -> Kept:
    """Runs of both: those of the second replace the first's of the same training and seed."""
    anew = {(run.training, run.seed, run.context) for run in second.runs}
    own = [run for run in first.runs if (run.training, run.seed, run.context) not in anew]
    names = {*first.steps, *second.steps}
    steps = {name: max(first.steps.get(name, 0), second.steps.get(name, 0)) for name in sorted(names)}
    return Kept(runs=own + second.runs, steps=steps)


if __name__ == "__main__":
    main()

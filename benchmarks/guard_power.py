"""Planted faults that the guard rejects, by precision, and what it rejects wrongly.

Twelve small trainings (`tests/guarded_trainings.py`) run the guard's protocol in FP32, under bfloat16 and float16
autocast and with FP32 masters, held to a reference in FP32, and under bfloat16, held to one that is, too: with one
thing wrong, and with changes that leave the training what it is. Faults and trainings are in halves. Limits of
gradients are fitted on correct changes of the first half of the trainings; the second half serves no fitting.

A fault is material where it moves weights or statistics in ten steps by more than the precision does. One that changes
nothing at all (gradients that clipping never reaches, not clipped) is none.

    python benchmarks/guard_power.py --rows rows.bin    # writes results/guard_power.json; 20 minutes on two cores
    python benchmarks/guard_power.py --from rows.bin    # judges the same scores by the limits of today
    python benchmarks/guard_power.py --from rows.bin --only Causal Patches --rows rows.bin    # runs some anew
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import replace
from stamp import RESULTS, hardware, stamp

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from guarded import BF16, FP32, PROTOCOL, Study, make_study
from guarded_trainings import FAULTS, TRAININGS, Training

from steptune.tuner.errors import SteptuneError
from steptune.tuner.guard.gradients import KINDS, Limits, limits_of, scores
from steptune.tuner.guard.update_replay import LIMIT
from steptune.tuner.hardware import describe_environment
from steptune.tuner.records import Record
from steptune.tuner.training.structure import map_structure
from steptune.tuner.trials.gradient_watch import GradientReference, set_initial_state

OUTPUT = RESULTS / "guard_power.json"
FP16 = 2.0**-11
STEPS = 10
"""In which a material fault moves weights by more than the precision does."""
MARGIN = 1.5
"""Factor over the largest score of correct changes, to which limits are fitted."""
UNITS = Limits(residual=1.0, slope=1.0, scale=1.0, pooled=1.0, zeros=1.0)
O1 = {"precision": {"level": "O1", "dtype": "bfloat16"}}
CONTEXTS: dict[str, tuple[str, dict[str, Any], float]] = {
    "FP32": ("FP32", {}, FP32),
    "FP32 to bf16 O1": ("FP32", O1, BF16),
    "FP32 to bf16 O2": ("FP32", {"precision": {"level": "O2", "dtype": "bfloat16"}}, BF16),
    "FP32 to fp16 O1": ("FP32", {"precision": {"level": "O1", "dtype": "float16"}}, FP16),
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
COUPLED = ("Convolutional", "Contrastive")
"""Samples of a batch depend on one another: micro-batches are another training."""


class Run(Record):
    """One run of the guard.

    Attributes:
        name: Of the fault or of the change.
        part: Of the training that is wrong; empty for a correct change.
        others: Checks beside those of update and gradients that failed.
        update: Score of the replayed update.
        gradients: Scores by kind, in units of the measured noise.
        state: Residual of what is not trained.
        moves: By how much it moves weights or statistics in ten steps, in units of what the precision does.
    """

    training: str
    context: str
    name: str
    part: str
    others: tuple[str, ...]
    update: float
    gradients: dict[str, float]
    state: float
    moves: float = 0.0

    @property
    def rejected(self) -> bool:
        limits = limits_of(CONTEXTS[self.context][2])
        beyond = any(value > getattr(limits, kind) for kind, value in self.gradients.items())
        return bool(self.others) or self.update > LIMIT or beyond or self.state > limits.residual


class Bench:
    """One training in all contexts."""

    def __init__(self, training: type[Training], folder: Path) -> None:
        self._training = training
        random = training.__name__ in ("Causal", "Patches")
        protocol = replace(PROTOCOL, num_pointwise=4, num_curve=8 if random else 0, num_horizon=0)
        self._studies: dict[str, tuple[Study, GradientReference]] = {}
        for name, choices, roundoffs in (("FP32", {}, (FP32, FP16, BF16)), ("bf16", O1, (BF16,))):
            study = make_study(folder / name, training, protocol=protocol, choices=choices, unit_roundoffs=roundoffs)
            gradients = GradientReference.load(study.files.reference_gradients)
            assert gradients is not None
            self._studies[name] = study, gradients

    def runs(self) -> Iterator[Run]:
        for context, (reference, choices, _) in CONTEXTS.items():
            try:
                ends = self._ends(reference, choices)
            except RuntimeError:  # no kernel of this arithmetic
                continue
            for name, change in CHANGES.items():
                if not ("micro" in name and self._training.__name__ in COUPLED):
                    yield from self._run(context, name, "", self._training, {**choices, **change}, ends)
            for fault in FAULTS:
                planted = fault.plant(self._training)
                if planted is not None:
                    yield from self._run(context, fault.name, fault.part, planted, choices, ends)

    def _ends(self, reference: str, choices: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
        """Parameters after ten steps: of the reference, and in the candidate's precision without a fault."""
        study, _ = self._studies[reference]
        own = O1 if reference == "bf16" else {}
        wider = [_end(study, self._training(), options) for options in ({}, own, choices)]
        return wider

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
            judged = study.judged(study.job(planted(), **choices), unit_roundoff=roundoff)
        except (SteptuneError, RuntimeError, TypeError):  # the optimizer has no such form, the CPU no such kernel
            return
        checks = {check.name: check for check in judged.checks}
        gradients, state = dict.fromkeys(KINDS, 0.0), 0.0
        if judged.gradients is not None and "finite loss" not in checks:
            seen = judged.gradients
            gradients = _scores(known, roundoff, seen.gradients, changes=False)
            state = _scores(known, roundoff, seen.changes, changes=True)["residual"]
        own = ("replayed update", "gradients", "untrained state")
        yield Run(
            training=self._training.__name__,
            context=context,
            name=name,
            part=part,
            others=tuple(check.name for check in judged.checks if not check.passed and check.name not in own),
            update=checks["replayed update"].observed if "replayed update" in checks else 0.0,
            gradients=gradients,
            state=state,
            moves=_moves(_end(study, planted(), choices), ends) if part else 0.0,
        )


def _scores(known: GradientReference, roundoff: float, found: Sequence[Any], *, changes: bool) -> dict[str, float]:
    compared = known.changes if changes else known.gradients
    by_kind = scores(compared.steps, compared.noise_at(roundoff), found, limits=UNITS, exact=known.exact)
    return {kind: score.ratio for kind, score in by_kind.items()}


def _end(study: Study, workload: Training, choices: dict[str, Any]) -> dict[str, torch.Tensor]:
    job = study.job(workload, **choices)
    set_initial_state(job, study.files.initial_state)
    torch.manual_seed(1)
    for batch in study.batches[:STEPS]:
        job.step(map_structure(lambda leaf: leaf.clone(), batch))
    return {name: tensor.detach().double().clone() for name, tensor in job.state_dict().items()}


def _moves(end: dict[str, torch.Tensor], ends: list[dict[str, torch.Tensor]]) -> float:
    """Largest over the tensors: what the fault moves it by, in units of what the precision does."""
    exact, _, correct = ends
    moved = 0.0
    for name, value in correct.items():
        precision = float((value - exact[name]).norm()) + 2.0**-23 * float(value.norm())
        fault = float((end[name] - value).norm()) if name in end else float("inf")
        moved = max(moved, fault / precision if precision else float("inf") if fault else 0.0)
    return moved


# --- tables -----------------------------------------------------------------------------------


def half_of(run: Run) -> str:
    trainings = [training.__name__ for training in TRAININGS]
    names = [fault.name for fault in FAULTS]
    places = [trainings.index(run.training) % 2, *([names.index(run.name) % 2] if run.part else [])]
    return "first" if not any(places) else "second" if all(places) else "mixed"


def real_faults(runs: Iterable[Run]) -> list[Run]:
    """Those that change anything: in FP32 a fault without effect ends where the training ends, to the last bit."""
    runs = list(runs)
    none = {(run.training, run.name) for run in runs if run.part and run.context == "FP32" and run.moves == 0.0}
    return [run for run in runs if run.part and (run.training, run.name) not in none]


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
        rows.append(
            {
                "context": context,
                "halves": {
                    half: _counts([r for r in own if half_of(r) == half]) for half in ("first", "mixed", "second")
                },
                "parts": {part: _counts([r for r in own if r.part == part]) for part in sorted({r.part for r in own})},
                "caught_before": sum(bool(run.others) or run.update > LIMIT for run in own),
                "correct": {half: sum(half_of(r) == half for r in correct) for half in ("first", "second")},
                "correct_rejected": [f"{r.training}: {r.name}" for r in correct if r.rejected],
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
        result[label] = {kind: max(run.gradients[kind] for run in own) for kind in KINDS}
        result[label] |= {"state": max(run.state for run in own), "update": max(run.update for run in own)}
    return result


def result_of(runs: list[Run]) -> dict[str, Any]:
    faults = real_faults(runs)
    missed = Counter((run.name, run.context) for run in faults if run.moves > 1 and not run.rejected)
    return {
        "trainings": len(TRAININGS),
        "faults": len({run.name for run in faults}),
        "correct_changes": len({(run.name, run.context) for run in runs if not run.part}),
        "limits": {
            "update": LIMIT,
            "fine": msgspec.to_builtins(limits_of(FP32)),
            "coarse": msgspec.to_builtins(limits_of(BF16)),
        },
        "margin": MARGIN,
        "largest_of_correct": {half: largest_of_correct(runs, half) for half in ("first", "second")},
        "rows": table(runs),
        "material_missed": [f"{name} ({context}): {count}" for (name, context), count in missed.items()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--rows", type=Path, help="keep every run's scores there")
    parser.add_argument("--from", dest="source", type=Path, help="scores of an earlier run")
    parser.add_argument("--only", nargs="*", default=[], help="trainings that are run beside it")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    runs: list[Run] = []
    chosen = [t for t in TRAININGS if t.__name__ in arguments.only or not (arguments.only or arguments.source)]
    if arguments.source:
        known = msgspec.msgpack.decode(arguments.source.read_bytes(), type=list[Run])
        runs = [run for run in known if run.training not in {training.__name__ for training in chosen}]
    with tempfile.TemporaryDirectory() as folder:
        for training in chosen:
            runs += Bench(training, Path(folder) / training.__name__).runs()
            print(training.__name__, len(runs), flush=True)
            if arguments.rows:
                arguments.rows.write_bytes(msgspec.msgpack.encode(runs))
    result = {
        **stamp("python benchmarks/guard_power.py", ("tuner", "tests", "benchmarks")),
        "hardware": hardware(describe_environment("cpu", Path(tempfile.gettempdir()), 1)),
        **result_of(runs),
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    for row in result["rows"]:
        print(row)


if __name__ == "__main__":
    main()

"""Judgement of whether a candidate's training is the same as the reference's, from the guarded steps of both.

It runs in a process of its own, because the files hold tensors. Rules and limits are those of workloads
(`tuner/guard/`); what a foreign loop does not show is listed among the verdict's notes. Where two runs of today's
settings differ by more than rounding, losses and gradients tell nothing, and only each update by itself is judged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import msgspec
import torch

from steptune.tuner.errors import RunnerError
from steptune.tuner.guard.between import moves_of, worst_between
from steptune.tuner.guard.curves import (
    Curve,
    GuardReference,
    Protocol,
    check_repetition,
    compare,
    compared,
    deviations,
    widest,
)
from steptune.tuner.guard.gradients import KINDS, at_distance, limits_of, measure_noise, scores, worst_of
from steptune.tuner.guard.update_replay import LIMIT, RuleGroup, SeenStep, UpdateRule, worst_deviation
from steptune.tuner.records import GuardCheck, GuardVerdict
from steptune.tuner.scripts.guard_files import JudgeRequest
from steptune.tuner.scripts.own_process import answer
from steptune.tuner.scripts.seen_averages import check_averages
from steptune.tuner.scripts.seen_calls import calls_of, differing_call
from steptune.tuner.scripts.seen_outputs import check_outputs
from steptune.tuner.scripts.seen_weights import distances_from, weights_around
from steptune.tuner.training.flat_parameters import ELEMENT_WISE
from steptune.tuner.trials.disturbance import FP32_ROUNDOFF
from steptune.tuner.trials.guard_checks import (
    devices_of,
    gated,
    told_deviation,
    told_score,
)

Seen = dict[str, Any]
"""Content of the file in which `agent/guard_watch.py` saved one run."""


def judge(request: JudgeRequest) -> GuardVerdict:
    """Judge the candidate of a request."""
    reference, repeated, candidate = (_load(path) for path in (request.reference, request.repeated, request.candidate))
    disturbed = {float(unit): [_load(path) for path in paths] for unit, paths in request.disturbed.items()}
    return _Judgement(request, reference, repeated, disturbed, candidate).verdict()


def _load(path: str) -> Seen:
    seen: Seen = torch.load(path, weights_only=True)
    return seen


class _Judgement:
    def __init__(
        self,
        request: JudgeRequest,
        reference: Seen,
        repeated: Seen,
        disturbed: dict[float, list[Seen]],
        candidate: Seen,
    ) -> None:
        self._request = request
        self._reference = reference
        self._repeated = repeated
        self._disturbed = disturbed
        self._candidate = candidate
        self._unit = max(request.unit_roundoff, request.own_roundoff)
        self._checks: list[GuardCheck] = []
        self._notes: list[str] = list(reference["notes"])
        self._are_updates_shown = False

    def verdict(self) -> GuardVerdict:
        wanted, found = self._reference["steps"], self._candidate["steps"]
        if _shape(wanted) != _shape(found):
            self._checks.append(_failed("steps", "the steps' losses or updates differ from the reference's"))
        else:
            self._compare()
        self._check_data()
        losses, reference_losses = ([v for step in steps for v in step["losses"]] for steps in (found, wanted))
        curve = Curve(losses=tuple(losses[: self._request.num_steps]), gradient_norms=(), update_norm=0.0)
        checks = tuple(self._checks)
        return GuardVerdict(
            passed=all(check.passed for check in checks),
            num_steps=len(found) if checks else 0,
            checks=checks,
            losses=tuple(losses),
            reference_losses=tuple(reference_losses),
            compared=compared(checks, curve, self._unit),
            notes=tuple(self._notes),
        )

    def _compare(self) -> None:
        reference = self._guard_reference()
        repetition = check_repetition(reference)
        if not any(step["losses"] for step in self._reference["steps"]):
            self._notes.append("losses: no backward pass was observed")
        elif repetition is None:
            self._checks += compare(
                reference,
                _first_update(self._reference),
                _curve(self._candidate, self._request.num_steps),
                _first_update(self._candidate),
                unit_roundoff=self._unit,
                lossy=False,
            )
        else:
            self._notes.append(f"losses and gradients: {repetition.detail.partition(': ')[2]}")
        self._check_updates()
        self._check_calls()
        checks, notes = check_averages(
            self._reference, self._repeated, self._candidate, self._request.num_steps, self._request.device
        )
        self._checks += checks
        self._notes += notes
        self._checks += check_outputs(self._candidate["outputs"], self._request.device)
        if repetition is None:
            has_twin = self._check_in_fp32()
            self._check_tensors("gradients", "gradient", _gradients, KINDS, has_twin=has_twin)
            self._check_tensors("untrained state", "state", lambda step: step["buffers"], ("residual",))
        if not any(step["updates"] for step in self._reference["steps"]):
            self._notes.append("gradients and updates: the loop uses no torch optimizer")
        if self._reference["dropout"]:
            self._notes.append("dropout: Steptune switches it off in the guarded steps")
        if not self._candidate["same_initial"]:
            self._notes.append(
                "initial weights: each run of the script draws different ones, so the candidate was given the "
                "reference's"
            )

    def _guard_reference(self) -> GuardReference:
        curve, update = _curve(self._reference, self._request.num_steps), _first_update(self._reference)

        def apart(seen: Seen) -> Any:
            if _shape(seen["steps"]) != _shape(self._reference["steps"]):
                raise RunnerError("runs of today's settings make steps of different kinds, so they cannot be compared")
            return deviations(_curve(seen, self._request.num_steps), _first_update(seen), curve, update)

        return GuardReference(
            protocol=Protocol(
                num_pointwise=self._request.num_steps,
                num_curve=0,
                num_horizon=0,
                randomness="none",
                num_audits=self._request.num_audits,
            ),
            curve=curve,
            repetition=apart(self._repeated),
            rounding={unit.hex(): widest([apart(run) for run in runs]) for unit, runs in self._disturbed.items()},
            own_roundoff=self._request.own_roundoff,
        )

    def _check_updates(self) -> None:
        """Replay the user's optimizers on the candidate's own gradients, in the steps before weights are reset."""
        number = self._request.num_steps
        wanted, found = (_by_optimizer(seen["steps"][:number]) for seen in (self._reference, self._candidate))
        worst, num_replayed = None, 0
        for key, updates in wanted.items():
            kind, module = updates[0]["kind"], updates[0]["module"]
            if not module.startswith("torch.optim") or kind not in ELEMENT_WISE:
                self._notes.append(f"update not replayed: {kind} is not one of torch's element-wise optimizers")
                continue
            rule = _rule(updates)
            if worst_deviation(rule, [_seen_step(update) for update in updates]).score > LIMIT:
                self._notes.append(
                    f"update not replayed: {kind} does not follow its update rule (perhaps its state was loaded)"
                )
                continue
            deviation = worst_deviation(rule, [_seen_step(update) for update in found[key]])
            num_replayed += 1
            if worst is None or deviation.score > worst.score:
                worst = deviation
        self._are_updates_shown = self._check_between() and 0 < num_replayed == len(wanted)
        if worst is not None:
            detail = told_deviation(worst) if worst.name else ""
            self._checks.append(gated("replayed update", "update", worst.score, LIMIT, detail, True))

    def _check_between(self) -> bool:
        """Check that only updates change weights; return False, without a check, if today's settings change weights
        between updates as well.
        """
        number = self._request.num_steps
        known = [self._reference, self._repeated, *(run for runs in self._disturbed.values() for run in runs)]
        moves = moves_of(weights_around(run["steps"][:number]) for run in known)
        found = worst_between(weights_around(self._candidate["steps"][:number]), moves)
        if moves.ever and not found.name:
            self._notes.append("weights between updates: the loop changes them itself")
            return False
        self._checks.append(gated("weights between updates", "update", found.score, LIMIT, found.detail, True))
        return True

    @property
    def _has_right_updates(self) -> bool:
        """Say whether only correct updates can have moved the candidate's weights away from the reference's."""
        return self._are_updates_shown and all(check.passed for check in self._checks if check.kind == "update")

    def _check_calls(self) -> None:
        """Check that a step calls dropout, clipping and schedulers as today's settings do, if two runs of today's
        settings agree in them.
        """
        wanted, found = self._reference["steps"], self._candidate["steps"]
        is_compiled = self._request.is_compiled
        if not any(calls_of(step, is_compiled=is_compiled) for step in (*wanted, *found)):
            return
        if differing_call(wanted, self._repeated["steps"], is_compiled=is_compiled):
            self._notes.append("calls of dropout, clipping and schedulers: two runs of today's settings differ")
            return
        detail = differing_call(wanted, found, is_compiled=is_compiled)
        observed = math.inf if detail else 0.0
        self._checks.append(gated("calls", "calls", observed, 1.0, detail, True))

    def _check_in_fp32(self) -> bool:
        """Compare gradients of the steps in FP32; say whether a comparison was possible."""
        wanted, found = ([_gradients(step) for step in run["wide"]] for run in (self._reference, self._candidate))
        disturbed = [run for runs in self._disturbed.values() for run in runs if run["wide"]]
        if not found or not wanted or not disturbed:
            if self._unit > FP32_ROUNDOFF:
                self._notes.append(
                    "gradients not compared in FP32: this comparison requires a CPU and a script without autocast"
                )
            return False
        if any(run["wide_has_16_bits"] for run in disturbed):
            self._notes.append("gradients not compared in FP32: the script computes in 16 bits without autocast")
            return False
        if _shape(self._reference["wide"]) != _shape(self._candidate["wide"]):
            self._checks.append(
                _failed(
                    "gradients in FP32",
                    "the steps in FP32 differ from the reference's in their losses or updates",
                    kind="twin",
                )
            )
            return True
        exact = range(len(wanted))
        runs = [[_gradients(step) for step in run["wide"]] for run in disturbed]
        again = [_gradients(step) for step in self._repeated["wide"]]
        noise = measure_noise(wanted, runs, again, unit_roundoff=FP32_ROUNDOFF, exact=exact)
        score = worst_of(scores(wanted, noise, found, limits=limits_of(FP32_ROUNDOFF), exact=exact), KINDS)
        name = "gradients in FP32"
        self._checks.append(gated(name, "twin", score.ratio, 1.0, told_score(score, name), True))
        return True

    def _check_tensors(
        self, name: str, kind: str, of_step: Any, kinds: Sequence[str], *, has_twin: bool = False
    ) -> None:
        wanted = [of_step(step) for step in self._reference["steps"]]
        if not any(wanted):
            return
        unit = min((u for u in self._disturbed if u >= self._unit), default=max(self._disturbed))
        runs = [[of_step(step) for step in run["steps"]] for run in self._disturbed[unit]]
        again = [of_step(step) for step in self._repeated["steps"]]
        exact = (0, *range(self._request.num_steps, len(wanted)))
        noise = measure_noise(wanted, runs, again, unit_roundoff=self._unit, exact=exact)
        if kind == "gradient" and self._has_right_updates:
            steps = [run["steps"] for run in self._disturbed[unit]]
            far = distances_from(self._reference["steps"], steps, self._candidate["steps"])
            noise = at_distance(noise, far, exact)
        found = [of_step(step) for step in self._candidate["steps"]]
        limits = limits_of(self._unit)
        seen = scores(wanted, noise, found, limits=limits, exact=exact, has_twin=has_twin, may_turn=kind == "gradient")
        score = worst_of(seen, kinds)
        gates = self._request.device in devices_of(kind, score, self._unit)
        self._checks.append(gated(name, kind, score.ratio, 1.0, told_score(score, name), gates))

    def _check_data(self) -> None:
        """Compare the batches by hashes of their content, or by the order of the sampler if samples are random."""
        wanted, found = self._reference["hashes"], self._candidate["hashes"]
        if not wanted:
            self._notes.append("data: the loop makes its batches itself")
            return
        if len(self._candidate["wide"]) != len(self._reference["wide"]):  # a run without steps in FP32 takes fewer
            common = min(len(wanted), len(found))
            wanted, found = wanted[:common], found[:common]
        if found == wanted:
            self._checks.append(GuardCheck(name="batches", kind="loader", passed=True, observed=0.0, tolerance=0.0))
            return
        if self._repeated["hashes"][: len(wanted)] != wanted and self._reference["repeats"] is not False:
            self._notes.append("data: two runs of today's settings draw different batches")
            return
        if self._reference["repeats"] is False:
            order, own = self._reference["indices"], self._candidate["indices"]
            common = min(len(order), len(own))
            if common and order[:common] == own[:common]:
                self._checks.append(GuardCheck(name="order", kind="loader", passed=True, observed=0.0, tolerance=0.0))
                self._notes.append("content of samples: random, so only the order was compared; the order is the same")
                return
        self._checks.append(
            _failed("batches", "the loader's batches differ from those of today's settings", kind="loader")
        )


def _failed(name: str, detail: str, kind: str = "pointwise") -> GuardCheck:
    return GuardCheck(name=name, kind=kind, passed=False, observed=math.inf, tolerance=0.0, detail=detail)


def _shape(steps: Sequence[Seen]) -> list[tuple[int, list[int]]]:
    """Return, for each step, how many losses it computes and which optimizers step, by number."""
    return [(len(step["losses"]), [update["number"] for update in step["updates"]]) for step in steps]


def _curve(seen: Seen, num_steps: int) -> Curve:
    steps = seen["steps"][:num_steps]
    update = _first_update(seen)
    return Curve(
        losses=tuple(loss for step in steps for loss in step["losses"]),
        gradient_norms=tuple(update["norm"] for step in steps for update in step["updates"]),
        update_norm=math.sqrt(sum(float(piece.square().sum()) for piece in update.values())),
    )


def _first_update(seen: Seen) -> dict[str, torch.Tensor]:
    first = seen["steps"][0]["updates"]
    return {
        f"{update['number']}.{place}.{name}": after - update["before"][name]
        for place, update in enumerate(first)
        for name, after in update["after"].items()
    }


def _gradients(step: Seen) -> dict[str, torch.Tensor]:
    return {
        f"{name} of {update['kind']} {update['number']}, update {place}": gradient
        for place, update in enumerate(step["updates"], start=1)
        for name, gradient in update["gradients"].items()
    }


def _by_optimizer(steps: Sequence[Seen]) -> dict[int, list[Seen]]:
    found: dict[int, list[Seen]] = {}
    for step in steps:
        for update in step["updates"]:
            found.setdefault(update["number"], []).append(update)
    return found


def _rule(updates: Sequence[Seen]) -> UpdateRule:
    """Return the update rule with the options of each step; it has no clipping, because the recorded gradients are
    already clipped.
    """
    steps = tuple(
        tuple(
            RuleGroup(
                names=tuple(name for name in group["names"] if name in update["gradients"]), options=group["options"]
            )
            for group in update["groups"]
        )
        for update in updates
    )
    return UpdateRule(optimizer=updates[0]["kind"], max_grad_norm=None, steps=steps)


def _seen_step(update: Seen) -> SeenStep:
    return SeenStep(
        before=update["before"],
        gradients=update["gradients"],
        norm=update["norm"],
        after=update["after"],
        states=update["states"],
        roundoff=update["roundoff"],
    )


def main() -> None:
    """Judge requests one after another."""
    import_module("torch._dynamo")  # the optimizers of a replay do it, and it takes seconds
    decoder = msgspec.msgpack.Decoder(JudgeRequest)
    answer(lambda given: msgspec.msgpack.encode(judge(decoder.decode(given))))

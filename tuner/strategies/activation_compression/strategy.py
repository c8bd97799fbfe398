"""activation_compression: keep activations in fewer bytes until the backward pass.

Mechanism: `relu_mask` keeps one bit for each element of a ReLU and one byte for each window of a max pooling, which is
all that their backward pass needs. `relu_sparse` also keeps what convolutions and linear layers save of their outputs
without the zeros. `bfloat16` and `int8` (with a scale for each block of 256 values) keep every saved activation in 16
or 8 bits.

Helps: memory, where recomputing would cost more. Hurts: time, for encoding and decoding; `relu_sparse` makes the host
wait for the device once for each tensor, to know how much is left.

Numerics: `exact` for the ReLU forms; `lossy` for `bfloat16` and `int8`.

Sources: Jain et al., "Gist: Efficient Data Encoding for Deep Neural Network Training" (ISCA 2018); Chen et al.,
"ActNN" (2021), arXiv 2104.14129; https://docs.pytorch.org/docs/stable/autograd.html (saved_tensors_hooks)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from steptune.tuner.costs.bounds import Savings, Situation, without
from steptune.tuner.costs.categories import Category
from steptune.tuner.records import Choice, Effect, Environment, Numerics, WorkloadFacts
from steptune.tuner.strategies.activation_compression.choice import ActivationCompressionSetting
from steptune.tuner.strategies.activation_compression.conflicts import CONFLICTS
from steptune.tuner.strategies.api import Strategy, Support, Supported, Unsupported
from steptune.tuner.strategies.cures import Cure
from steptune.tuner.training.saved_activations import FORMS, LOSSLESS, SavedActivations

if TYPE_CHECKING:
    from steptune.tuner.training.job import TrainingJob
    from steptune.tuner.training.plan import Plan


class ActivationCompression(Strategy):
    setting = ActivationCompressionSetting
    conflicts = CONFLICTS
    summary = "saved activations stored as ReLU masks, without zeros, or in 16 or 8 bits"
    needs_workload = "saved-tensor hooks must wrap the forward pass, which requires Steptune's own training step"
    attacks = ()
    cures = (Cure.HOLD_LESS,)
    recompiles = True
    usual_realisation = 0.3
    memory = True

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        return tuple({"kept_as": form} for form in (*FORMS, None))

    def supports(self, choice: Choice, environment: Environment, workload: WorkloadFacts) -> Support:
        if choice["kept_as"] in LOSSLESS and not workload.model.module_types.get("ReLU"):
            return Unsupported("requires a ReLU module; the model has none")
        return Supported()

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.EXACT if choice["kept_as"] in (None, *LOSSLESS) else Numerics.LOSSY

    def contribute(self, plan: Plan, choice: Choice) -> None:
        if choice["kept_as"] is None:
            return
        saved = SavedActivations(str(choice["kept_as"]))
        plan.checkpointing.append(saved.attach)
        plan.batch.append(saved.note_batch)
        plan.step.contexts.append(saved.hooks)

    def savings(self, situation: Situation, choice: Choice) -> Savings:
        # Only leaving a form can save time: what encoding and decoding take.
        current = situation.choices[self.name]["kept_as"]
        if current is None or current == choice["kept_as"]:
            return {}
        return without(situation, Category.ELEMENTWISE, Category.REDUCTION, Category.OTHER_COMPUTE, Category.HOST)

    def evidence(self, job: TrainingJob) -> dict[str, Any]:
        owners = (getattr(context, "__self__", None) for context in job.plan.step.contexts)
        saved = next((owner for owner in owners if isinstance(owner, SavedActivations)), None)
        if saved is None:
            return {"kept_as": None}
        return {"kept_as": saved.kept_as, "bytes_in": saved.last.bytes_in, "bytes_kept": saved.last.bytes_kept}

    def took_effect(self, evidence: Mapping[str, Any], choice: Choice) -> Effect:
        found = super().took_effect(evidence, choice)
        if not found.took or choice["kept_as"] is None:
            return found
        before, after = evidence.get("bytes_in", 0), evidence.get("bytes_kept", 0)
        detail = (
            f"{after / 1e6:.1f} MB kept of {before / 1e6:.1f} MB"
            if before
            else "no saved activation was worth encoding"
        )
        return Effect(strategy=self.name, took=before > 0, detail=detail)

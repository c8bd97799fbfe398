"""precision: the dtypes of a step, which this strategy alone sets.

Levels, as apex amp defined them (O2 keeps all normalisation layers in FP32, not batch normalisation
only):

    fp32   everything in FP32
    tf32   FP32 with tensor-core matmuls of 10-bit mantissas (CUDA)
    O1     autocast: 16-bit matmuls, FP32 where precision matters and in routers; fp16 scales the loss
    O2     16-bit weights with FP32 masters; normalisation layers, their statistics and routers in FP32; fp16
           scales the loss
    O3     16-bit everywhere, no masters, no scaling

Helps: 16-bit matmuls run at several times the FP32 rate on devices built for them, and move half the
bytes. Hurts: on CPUs without bf16 instructions they are emulated and far slower (the measured peak of
each dtype bounds the gain, so such choices are not tried); on a launch-bound step the casts of O1
cost more than they save.

Numerics: tf32, O1, O2 `rounding`; O3 `lossy`.

Sources: Micikevicius et al., "Mixed Precision Training" (2018), arXiv 1710.03740;
https://docs.pytorch.org/docs/stable/amp.html ; NVIDIA apex amp documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from steptune.tuner.costs.bounds import (
    Savings,
    Situation,
    arithmetic,
    at_roofline,
    jointly,
    part_of,
    removable,
    total,
    without,
)
from steptune.tuner.costs.categories import COMPUTE, Category
from steptune.tuner.costs.reduction import Reduction, most_saved, reduction, saved
from steptune.tuner.errors import ChoiceError
from steptune.tuner.records import Choice, Effect, Environment, Numerics, Scalar, ScriptFacts, WorkloadFacts
from steptune.tuner.strategies.api import (
    BF16_ROUNDOFF,
    FP16_ROUNDOFF,
    HARDLY,
    TF32_ROUNDOFF,
    NeedsWorkload,
    Outside,
    Strategy,
    Support,
    Supported,
    Unsupported,
    Way,
    needs_cuda,
)
from steptune.tuner.strategies.cures import Cure
from steptune.tuner.strategies.precision.choice import PrecisionSetting
from steptune.tuner.training.fp32_products import fp32_products

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.job import TrainingJob
    from steptune.tuner.training.plan import Plan
    from steptune.tuner.workloads.workload import Workload


SIXTEEN_BITS = ("bfloat16", "float16")
TF32_CAPABILITY = 8.0
CASTS_PART, UPDATE_PART = 0.3, 0.4
"""Expected savings: the share of element-wise time that is saved, because it contains casts, and the share of the
update's time that is saved, because the update reads and writes FP32.
"""


class Precision(Strategy):
    setting = PrecisionSetting
    summary = "FP32, TF32, O1 (autocast), O2 (FP32 masters and norms), O3 (pure 16-bit)"
    attacks = COMPUTE
    cures = (Cure.LOWER_PRECISION,)
    recompiles = True
    usual_realisation = 0.4
    exchange_realisation = 0.1

    def completed(self, current: Mapping[str, Scalar]) -> Choice:
        """Use bfloat16, autocast's default on CPUs and newer GPUs, for a 16-bit level without a dtype.

        Raises:
            ChoiceError: The choice names a dtype, but its level has none.
        """
        complete = super().completed(current)
        if complete["level"] in ("O1", "O2", "O3"):
            return {**complete, "dtype": complete["dtype"] or "bfloat16"}
        if complete["dtype"] is not None:
            raise ChoiceError(
                f"precision level {complete['level']!r} has no dtype, got dtype {complete['dtype']!r}: choose a "
                f"16-bit level, such as {{'level': 'O1', 'dtype': 'bfloat16'}}"
            )
        return complete

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        sixteen_bit: tuple[Choice, ...] = tuple(
            {"level": level, "dtype": dtype} for level in ("O1", "O2", "O3") for dtype in ("bfloat16", "float16")
        )
        return (*sixteen_bit, {"level": "tf32", "dtype": None}, {"level": "fp32", "dtype": None})

    def supports(self, choice: Choice, environment: Environment, workload: WorkloadFacts) -> Support:
        if choice["level"] == "tf32" or choice["dtype"] == "float16":
            found = needs_cuda(environment)
            if isinstance(found, Unsupported):
                return found
        device = environment.hardware.devices[0]
        if choice["level"] == "tf32" and device.capability and float(device.capability) < TF32_CAPABILITY:
            return Unsupported(
                f"TF32 needs compute capability {TF32_CAPABILITY}; {device.name} has {device.capability}"
            )
        if (choice["dtype"] is None) != (choice["level"] in ("fp32", "tf32")):
            return Unsupported(f"level {choice['level']} cannot be combined with dtype {choice['dtype']}")
        return Supported()

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.LOSSY if choice["level"] == "O3" else Numerics.ROUNDING

    def unit_roundoff(self, choice: Choice) -> float:
        if choice["dtype"] == "bfloat16":
            return BF16_ROUNDOFF
        if choice["dtype"] == "float16":
            return FP16_ROUNDOFF
        return TF32_ROUNDOFF if choice["level"] == "tf32" else super().unit_roundoff(choice)

    def contribute(self, plan: Plan, choice: Choice) -> None:
        level, dtype = choice["level"], choice["dtype"]
        if level == "tf32":
            plan.environment.append(_allow_tf32)
        elif level == "O1":
            from steptune.tuner.training.casting import compute_routers_in_fp32

            def keep_routers_in_fp32(model: torch.nn.Module, workload: Workload) -> torch.nn.Module:
                return compute_routers_in_fp32(model)

            plan.cast.append(keep_routers_in_fp32)
            plan.step.autocast_dtype = str(dtype)
            plan.step.loss_scaler = dtype == "float16"
        elif level in ("O2", "O3"):
            from steptune.tuner.training.casting import cast_model

            def cast(model: torch.nn.Module, workload: Workload) -> torch.nn.Module:
                gathered = level == "O2" and plan.wrap.shards_parameters  # in 16 bits from parts in FP32, the masters
                return cast_model(model, str(dtype), keep_fp32=level == "O2", cast_parameters=not gathered)

            plan.cast.append(cast)
            plan.optimizer.master_weights = level == "O2"
            plan.wrap.param_dtype = str(dtype) if level == "O2" else None
            plan.step.loss_scaler = level == "O2" and dtype == "float16"

    def expected(self, situation: Situation, choice: Choice) -> float | None:
        """Return the expected saving of changing from one 16-bit level to another: weights need no casts, and the
        update moves fewer bytes. Both 16-bit dtypes are equally fast.
        """
        levels = ("O1", "O2", "O3")
        current = situation.choices[self.name]["level"]
        if current not in levels:
            return None
        if choice["level"] not in levels or levels.index(str(choice["level"])) <= levels.index(str(current)):
            return HARDLY
        casts = CASTS_PART * removable(situation, Category.ELEMENTWISE, Category.COPY_D2D)
        update = UPDATE_PART * removable(situation, Category.OPTIMIZER) if choice["level"] == "O3" else 0.0
        return casts + update + _saved_communication(situation, choice, saved)

    def outside(self, choice: Choice, script: ScriptFacts) -> Outside | NeedsWorkload:
        level = choice["level"]
        if level in ("O2", "O3"):
            return NeedsWorkload("16-bit weights with FP32 master weights require Steptune's own optimizer update")
        if script.autocast:
            return NeedsWorkload(f"the script sets its own precision (autocast to {script.autocast})")
        if level == "O1" and choice["dtype"] == "float16":
            return NeedsWorkload(
                "float16 needs a loss scaler around the backward pass and the optimizer step, "
                "but the script's own loop runs both"
            )
        if level == "O1" and not script.models:
            return NeedsWorkload(
                "the script's loop never calls a trained module as a whole, only its methods or submodules"
            )
        if level == "tf32":
            words = 'torch.set_float32_matmul_precision("high"); torch.backends.cudnn.allow_tf32 = True'
            return Outside(way=Way.LIVE, changes={"matmul_precision": "high", "cudnn_tf32": True}, words=words)
        if level == "fp32":
            return Outside(way=Way.LIVE, changes={"matmul_precision": "highest"}, words="PyTorch's default precision")
        words = f'with torch.autocast("{script.device}", dtype=torch.{choice["dtype"]}) around the model\'s call'
        return Outside(way=Way.LIVE, changes={"autocast": choice["dtype"]}, words=words, at="model")

    def exchange(self, choice: Choice) -> Mapping[str, Any]:
        return {"level": choice["level"], "dtype": choice["dtype"]}

    def computation(self, choice: Choice) -> Mapping[str, Any]:
        return {"dtype": choice["dtype"], "tf32": choice["level"] == "tf32"}

    def savings(self, situation: Situation, choice: Choice) -> Savings:
        """Return the maximum savings: matmuls run at the dtype's measured peak; with a 16-bit dtype, all other compute
        counts as saved entirely, because it may take half the time or less.
        """
        dtype = arithmetic(situation, **self.computation(choice))
        products = at_roofline(situation, Category.MATMUL, Category.ATTENTION, dtype=dtype)
        if choice["level"] == "tf32":
            return products
        peaks = situation.environment.calibration.matmul_flops_per_s
        slower = 0 < peaks.get(dtype, 0.0) < 0.5 * peaks.get("float32", 0.0)
        if slower:
            # Emulated arithmetic: products alone take longer than today's whole step can give back.
            extra = situation.time_ns((Category.MATMUL, Category.ATTENTION)) / situation.step_ns
            return part_of(products, max(0.0, 1 - extra / max(total(products), 1e-12)))
        rest = [c for c in COMPUTE if c not in (Category.MATMUL, Category.ATTENTION)]
        others = without(situation, *rest, Category.OPTIMIZER, Category.COPY_H2D)
        communication = {Category.COMMUNICATION: _saved_communication(situation, choice, most_saved)}
        return jointly(products, others, communication)

    def evidence(self, job: TrainingJob) -> dict[str, Any]:
        from steptune.tuner.training.casting import fp32_modules, is_complex
        from steptune.tuner.training.communication import reduced_widely
        from steptune.tuner.training.master_weights import MasterWeights
        from steptune.tuner.training.sharding import gathered_dtypes

        kept = {id(t): t for _, m in fp32_modules(job.model) for t in (*m.parameters(), *m.buffers())}
        complex_modules = (m for m in job.model.modules() if is_complex(m))
        apart = {id(t) for m in complex_modules for t in m.parameters()}
        cast = [p for p in job.model.parameters() if id(p) not in kept]
        gathered = gathered_dtypes(job.model) if job.plan.wrap.shards_parameters else {}
        return {
            "kept_dtypes": _dtypes((t for t in kept.values() if id(t) not in apart), gathered),
            "parameter_dtypes": _dtypes(cast, gathered),
            "looked": job.formats.looked,
            "autocast": job.formats.autocast,
            "products": dict(job.formats.products),
            "hidden": job.formats.hidden,
            "fp32_products": fp32_products(),
            "masters": job.hook_of(MasterWeights) is not None,
            "loss_scale": job.loss_scale,
            "skipped_steps": job.skipped_steps,
            "reduced_widely": reduced_widely(job.model),
        }

    def took_effect(self, evidence: Mapping[str, Any], choice: Choice) -> Effect:
        """Judge by the dtypes of weights and of the observed matmuls; if no matmul was observed, the detail says so."""
        level, dtype = choice["level"], str(choice["dtype"])
        weights, kept = evidence.get("parameter_dtypes", []), evidence.get("kept_dtypes", [])
        products = evidence.get("products") or {}
        autocast = evidence.get("autocast")
        if level == "O1":
            took = dtype in products if products else autocast == dtype
        elif level == "O2":
            took = weights == [dtype] and set(kept) <= {"float32"} and bool(evidence.get("masters"))
        elif level == "O3":
            took = weights == [dtype] and set(kept) <= {dtype} and not evidence.get("masters")
        else:
            took = autocast is None and not products.keys() & set(SIXTEEN_BITS) and not evidence.get("masters")
        if level in ("O2", "O3") and products:
            took = took and dtype in products
        found = f"{_products_seen(evidence)}, parameters {weights}, norms {kept}"
        if evidence.get("loss_scale") is not None:
            found += f", loss scaled by {evidence['loss_scale']:g}, {evidence.get('skipped_steps')} steps skipped"
        if evidence.get("reduced_widely"):
            found += ", gradients summed in FP32"
        if level == "tf32":
            kernel = next((name for name in evidence.get("operators", ()) if "tf32" in name.lower()), None)
            found += f", ran {kernel}" if kernel else ", no TF32 kernel was among the longest kernels"
            if evidence.get("fp32_products") == "highest":
                took, found = False, "FP32 matmuls do not use TF32"
        return Effect(strategy=self.name, took=took, detail=found)


def _saved_communication(
    situation: Situation, choice: Choice, share: Callable[[Situation, Reduction, Reduction], float]
) -> float:
    """Return the share of the step saved by sending weights or gradients in 16 bits; 0 if the choice sends them as
    today, however slow the links are.

    Args:
        share: Computes the saved share of the step from the costs of communication today and with the choice.
    """
    now, then = reduction(situation), reduction(situation, level=choice["level"], dtype=choice["dtype"])
    if now is None or then is None or saved(situation, now, then) <= HARDLY:
        return 0.0
    return share(situation, now, then)


def _products_seen(evidence: Mapping[str, Any]) -> str:
    if not evidence.get("looked"):
        return "no matmul was observed: the job computed no loss"
    products = evidence.get("products") or {}
    counts = ", ".join(f"{count} in {name}" for name, count in sorted(products.items()))
    hidden = "matmuls of compiled or recomputed code cannot be observed" if evidence.get("hidden") else ""
    autocast = f", autocast to {evidence['autocast']}" if evidence.get("autocast") else ""
    seen = f"matmuls observed: {counts}" if counts else "no matmul was observed"
    return f"{seen}{f' ({hidden})' if hidden else ''}{autocast}"


def _dtypes(tensors: Iterable[torch.Tensor], gathered: Mapping[int, torch.dtype]) -> list[str]:
    """Return the dtypes of floating-point tensors. Complex tensors are left out, because no 16-bit dtype exists for
    them.

    Args:
        gathered: Compute dtypes, by identity, of tensors that are kept in another dtype.
    """
    dtypes = {gathered.get(id(t), t.dtype) for t in tensors if t.is_floating_point()}
    return sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _allow_tf32() -> None:
    import torch

    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True

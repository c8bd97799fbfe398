"""cpu_threads: how many threads one operator uses, and whether they are bound to cores.

Mechanism: `torch.set_num_threads` sizes the pool that a CPU operator is split over;
`OMP_PROC_BIND` pins its threads, so that they keep their caches.

Helps: small operators, where starting and joining threads costs more than it saves; and next to
loader workers, which want the same cores (tried together with data_loading). Hurts: large operators
with fewer threads.

Each of several ranks begins with one thread, as torchrun starts them unless OMP_NUM_THREADS is set; each may have its
share of the cores.

Numerics: `rounding`. A reduction split over other threads adds in another order.

Source: https://docs.pytorch.org/docs/stable/notes/cpu_threading_torchscript_inference.html
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from steptune.tuner.costs.bounds import Savings, Situation, at_roofline, jointly, without
from steptune.tuner.costs.categories import COMPUTE, Category
from steptune.tuner.records import Choice, Effect, Environment, Numerics, Scalar, ScriptFacts, WorkloadFacts
from steptune.tuner.strategies.api import NeedsWorkload, Outside, Strategy, Support, Supported, Unsupported, Way
from steptune.tuner.strategies.cpu_threads.choice import CpuThreadsSetting
from steptune.tuner.strategies.cures import Cure

if TYPE_CHECKING:
    from steptune.tuner.training.job import TrainingJob
    from steptune.tuner.training.plan import Plan


class CpuThreads(Strategy):
    setting = CpuThreadsSetting
    summary = "number of intra-operator threads, and their binding to cores"
    attacks = (*COMPUTE, Category.OPTIMIZER, Category.DATA_WAIT)
    cures = (
        Cure.MAKE_BATCHES_SOONER,
        Cure.TUNE_COMPUTE,
    )
    usual_realisation = 0.1

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        cores = environment.hardware.num_cores
        if environment.num_ranks > 1:
            share = cores // environment.num_ranks
            return tuple({"num_threads": n, "bind": None} for n in (share, share // 2) if n > 1)
        fewer = [n for n in (cores - 1, cores // 2, 1) if 1 <= n < cores]
        counts: list[Choice] = [{"num_threads": n, "bind": None} for n in dict.fromkeys(fewer)]
        bound: list[Choice] = [{"num_threads": None, "bind": "close"}] if cores > 1 else []
        return (*counts, *bound)

    def supports(self, choice: Choice, environment: Environment, workload: WorkloadFacts) -> Support:
        if environment.hardware.device_kind != "cpu" and choice["bind"]:
            return Unsupported("requires training on the CPU")
        return Supported()

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.ROUNDING

    def environment_variables(self, choice: Choice) -> dict[str, str]:
        if not choice["bind"]:
            return {}
        return {"OMP_PROC_BIND": str(choice["bind"]), "OMP_PLACES": "cores"}

    def contribute(self, plan: Plan, choice: Choice) -> None:
        count = choice["num_threads"]
        if count is not None:

            def set_threads() -> None:
                import torch

                torch.set_num_threads(int(count))

            plan.environment.append(set_threads)

    def outside(self, choice: Choice, script: ScriptFacts) -> Outside | NeedsWorkload:
        variables = [f"{name}={value}" for name, value in self.environment_variables(choice).items()]
        count = choice["num_threads"]
        calls = [] if count is None else [f"torch.set_num_threads({count})"]
        changes: dict[str, Scalar] = {} if count is None else {"num_threads": count}
        way = Way.START if variables else Way.FORK
        return Outside(way=way, changes=changes, words=" ".join((*variables, *calls)))

    def savings(self, situation: Situation, choice: Choice) -> Savings:
        if situation.environment.hardware.device_kind == "cuda":
            return without(situation, Category.DATA_WAIT, Category.HOST, Category.OPTIMIZER_HOST)
        waits = without(situation, Category.DATA_WAIT, Category.OPTIMIZER, Category.HOST)
        return jointly(at_roofline(situation), waits)

    def evidence(self, job: TrainingJob) -> dict[str, Any]:
        """Return the threads that an operator runs on, and their cores; empty where the system does not report them."""
        import os

        from steptune.tuner.training.worker_threads import are_bound, threads_of_an_operator

        threads = threads_of_an_operator()
        if not threads:
            return {}
        way = os.environ.get("OMP_PROC_BIND")
        places = sorted({thread.allowed for thread in threads})
        return {"threads": len(threads), "bind": way if are_bound(threads) else None, "places": len(places)}

    def took_effect(self, evidence: Mapping[str, Any], choice: Choice) -> Effect:
        wanted: Choice = {}
        if choice["num_threads"] is not None:
            wanted["threads"] = choice["num_threads"]
        if choice["bind"] is not None:
            wanted["bind"] = choice["bind"]
        effect = super().took_effect(evidence, wanted)
        if not effect.took or not wanted or "threads" not in evidence:
            return effect
        bound = f" bound to {evidence['places']} separate cores" if choice["bind"] is not None else ""
        return Effect(strategy=self.name, took=True, detail=f"operators ran on {evidence['threads']} threads{bound}")

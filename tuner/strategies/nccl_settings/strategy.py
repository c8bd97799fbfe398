"""nccl_settings: NCCL's algorithm, protocol, channels, and the sockets and threads that serve a network.

Mechanism: NCCL chooses by a model of the topology and by the size of a message; its variables overrule it. More
channels use more of a link's bandwidth and take multiprocessors from the model. Over TCP one connection does not fill a
fast network: each channel can use several threads with several sockets each.

Helps: exposed communication, where NCCL's own choice is wrong for the network. Hurts: what is good for one message size
can be bad for another. With 4 threads of 4 sockets the bus bandwidth to an emulated second host rose from 7 to 9 GB/s
to 23 GB/s, and messages of 1 MiB became four times slower.

Numerics: `rounding`. Another algorithm, or other chunks of a message, add in another order.

Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steptune.tuner.costs.bounds import Savings, Situation, without
from steptune.tuner.costs.categories import Category
from steptune.tuner.costs.reduction import reduction, saved
from steptune.tuner.network.exchange import USUAL_SOCKETS
from steptune.tuner.records import Choice, Effect, Environment, Numerics, Scalar, WorkloadFacts
from steptune.tuner.strategies.api import Strategy, Support, Supported, Unsupported, each_once, needs_cuda, needs_ranks
from steptune.tuner.strategies.cures import Cure
from steptune.tuner.strategies.nccl_settings.choice import NcclSetting
from steptune.tuner.strategies.nccl_settings.conflicts import DROPPED, TOGETHER

if TYPE_CHECKING:
    from steptune.tuner.training.job import TrainingJob
    from steptune.tuner.training.plan import Plan

OWN = "own"
"""Value that stands for the user's own setting, if that is not one of the strategy's values."""
VARIABLES = {
    "algorithm": "NCCL_ALGO",
    "protocol": "NCCL_PROTO",
    "min_channels": "NCCL_MIN_NCHANNELS",
    "max_channels": "NCCL_MAX_NCHANNELS",
    "socket_threads": "NCCL_SOCKET_NTHREADS",
    "sockets_per_thread": "NCCL_NSOCKS_PERTHREAD",
}
"""NCCL's environment variable for each parameter."""
TEXTS: Mapping[str, Mapping[str, str]] = {
    "algorithm": {"ring": "allreduce:ring", "tree": "allreduce:tree"},
    "protocol": {"simple": "Simple", "ll": "LL"},
}
"""Values as NCCL's variables spell them, where the spelling differs. The algorithm is set for all-reduces only: no
other collective has a tree, and NCCL fails if a collective has none of the named algorithms. LL128 is left to NCCL,
which knows where it is safe.
"""
SOCKETS = ("socket_threads", "sockets_per_thread")
MAX_CHANNELS, MAX_PER_CHANNEL, MAX_SOCKETS = 64, 16, 64
"""NCCL's limits: on channels; on threads, and likewise on sockets per thread; and on sockets per connection (threads
times sockets per thread).
"""
TCP_LIKELY = 0.5
"""Probability that NCCL uses sockets on a network of known speed but unknown kind. On InfiniBand and RoCE, NCCL uses no
sockets.
"""


class NcclSettings(Strategy):
    setting = NcclSetting
    dropped = DROPPED
    together = TOGETHER
    summary = "NCCL's algorithm, protocol, channels, sockets and threads"
    needs_workload = "Steptune must start its own processes to measure the links between ranks"
    attacks = (Category.COMMUNICATION,)
    cures = (Cure.COMMUNICATE_LESS,)
    usual_realisation = 0.15
    trial_cost_s = 5.0

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        """Return the choices worth trying. Fewer channels are not among them: they would save compute, but the maximum
        saving of this strategy covers only communication.
        """
        today = self.neutral(workload)
        changes: list[Choice] = [
            {"socket_threads": 4, "sockets_per_thread": 4},
            {"socket_threads": 8, "sockets_per_thread": 4},
            {"socket_threads": 2, "sockets_per_thread": 2},
            {"algorithm": "tree"},
            {"algorithm": "ring"},
            {"min_channels": 16},
            {"min_channels": 32},
            {"protocol": "simple"},
            {},
        ]
        return each_once(today, changes)

    def supports(self, choice: Choice, environment: Environment, workload: WorkloadFacts) -> Support:
        today = self.neutral(workload)
        if choice == today:
            return Supported()
        for needed in (needs_ranks(environment), needs_cuda(environment)):
            if isinstance(needed, Unsupported):
                return needed
        changed = [name for name in self.defaults if choice[name] != today[name]]
        for name in changed:
            if choice[name] in (None, OWN):
                return _unchosen(name, choice[name])
        if environment.num_hosts == 1 and set(changed) & set(SOCKETS):
            return Unsupported(
                "socket settings require at least 2 hosts, got 1: ranks on one host do not communicate through sockets"
            )
        return _within_limits(choice)

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.ROUNDING

    def environment_variables(self, choice: Choice) -> dict[str, str]:
        return {
            variable: TEXTS.get(name, {}).get(str(choice[name]), str(choice[name]))
            for name, variable in VARIABLES.items()
            if choice[name] not in (None, OWN)
        }

    def contribute(self, plan: Plan, choice: Choice) -> None:
        """Add nothing to the plan: the environment variables are the whole effect."""

    def exchange(self, choice: Choice) -> Mapping[str, Any]:
        return {"sockets": num_sockets(choice)}

    def savings(self, situation: Situation, choice: Choice) -> Savings:
        return {} if choice == situation.choices[self.name] else without(situation, Category.COMMUNICATION)

    def expected(self, situation: Situation, choice: Choice) -> float | None:
        """Return the expected saving if the number of sockets changes, from the bandwidth between hosts with the new
        number; None if only other parameters change.
        """
        topology = situation.environment.topology
        now, then = reduction(situation), reduction(situation, **self.exchange(choice))
        same = num_sockets(choice) == situation.exchange.sockets
        if topology is None or now is None or then is None or same:
            return None
        return saved(situation, now, then) * (1.0 if topology.is_emulated else TCP_LIKELY)

    def evidence(self, job: TrainingJob) -> dict[str, Any]:
        """Return evidence: NCCL's environment variables in this process, the emulation of hosts, and NCCL's version. In
        trials of these settings, which keep NCCL's log, also return the settings in the log.
        """
        import os

        import msgspec
        import torch
        import torch.distributed as dist

        from steptune.tuner.network.choices_log import read_choices
        from steptune.tuner.training.hosts import emulation_of

        if job.device.type != "cuda" or not dist.is_initialized():
            return {}
        version = ".".join(str(part) for part in torch.cuda.nccl.version())
        found = {**settings_of(os.environ), "version": version, "emulation": emulation_of(os.environ)}
        log = Path(os.environ.get("NCCL_DEBUG_FILE", ""))
        if log.is_file():
            with log.open(errors="replace") as lines:
                found["used"] = msgspec.to_builtins(read_choices(lines))
        return found

    def took_effect(self, evidence: Mapping[str, Any], choice: Choice) -> Effect:
        if "version" not in evidence:
            plain = choice == self.defaults
            return Effect(strategy=self.name, took=plain, detail="no NCCL" if plain else "the job does not use NCCL")
        effect = super().took_effect(evidence, choice)
        if not effect.took:
            return effect
        wanted = {name: value for name, value in choice.items() if value not in (None, OWN)}
        seen = [_use_of(name, value, evidence.get("used") or {}) for name, value in wanted.items()]
        refuted = [text for took, text in seen if not took]
        if refuted:
            return Effect(strategy=self.name, took=False, detail=f"NCCL {evidence['version']}: {', '.join(refuted)}")
        own = [(n, v) for n, v in VARIABLES.items() if evidence[n] is not None and n not in wanted]
        found = [*(text for _, text in seen), *(f"{variable}={evidence[name]}" for name, variable in own)]
        found += [f"{variable}={value}" for variable, value in evidence["emulation"].items()]
        detail = f"NCCL {evidence['version']}: {', '.join(found) or 'nothing is set'}"
        return Effect(strategy=self.name, took=True, detail=detail)


def _use_of(name: str, wanted: Scalar, used: Mapping[str, Any]) -> tuple[bool, str]:
    """Return whether NCCL's log shows that NCCL used a parameter's value, and describe the log's evidence."""
    if name in ("algorithm", "protocol"):
        ran = list(used.get(f"{name}s") or ())
        what = "all-reduces" if name == "algorithm" else "collectives"
        return ran == [wanted], f"{what} ran with {' and '.join(ran)}" if ran else f"NCCL's log shows no {what}"
    if name in SOCKETS:
        seen = sorted({pair[SOCKETS.index(name)] for pair in used.get("sockets") or ()})
        what = "threads" if name == "socket_threads" else "sockets per thread"
        return seen == [wanted], f"{' and '.join(map(str, seen)) or 'no'} {what}"
    least, most = used.get("channels") or (0, 0)
    assert isinstance(wanted, int)
    took = least >= wanted if name == "min_channels" else 0 < most <= wanted
    return took, f"{least} to {most} channels" if least < most else f"{most or 'no'} channels"


def settings_of(variables: Mapping[str, str]) -> Choice:
    """Return the complete choice that an environment's variables stand for; an empty variable is treated as not set."""
    return {name: _value(name, variables.get(variable, "").strip()) for name, variable in VARIABLES.items()}


def _value(name: str, text: str) -> Scalar:
    if not text:
        return None
    if name in TEXTS:
        said = {ours.lower(): value for value, ours in TEXTS[name].items()}
        return said.get(text.lower(), OWN)
    allowed = (str(number) for values in NcclSettings.values[name] if isinstance(values, range) for number in values)
    return int(text) if text in allowed else OWN


def _unchosen(name: str, value: Scalar) -> Unsupported:
    variable = VARIABLES[name]
    if value == OWN:
        return Unsupported(f"{variable} is not set, so there is no value to keep")
    return Unsupported(f"{variable} is already set; unset it before starting Steptune")


def _within_limits(choice: Choice) -> Support:
    """Check a choice against NCCL's known limits, except for values that are left to NCCL or were set by the user."""
    least, most = choice["min_channels"], choice["max_channels"]
    if isinstance(least, int) and isinstance(most, int) and least > most:
        return Unsupported(f"min_channels ({least}) exceeds max_channels ({most})")
    threads, sockets = (choice[name] for name in SOCKETS)
    if isinstance(threads, int) and isinstance(sockets, int) and threads * sockets > MAX_SOCKETS:
        return Unsupported(
            f"{threads} threads with {sockets} sockets each exceed NCCL's limit of {MAX_SOCKETS} sockets per connection"
        )
    return Supported()


def num_sockets(choice: Choice) -> int:
    """Return the number of sockets per connection between two hosts."""
    chosen = [choice.get(name) for name in ("socket_threads", "sockets_per_thread")]
    return math.prod(number if isinstance(number, int) else USUAL_SOCKETS for number in chosen)

"""Counts of `rank_memory` against the bytes of live tensors on two ranks; and peaks of other layouts."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from builders import sample_environment, sample_facts
from counted import count_steps
from msgspec.structs import replace
from ranks import Ranks

from steptune.tuner.records import Candidate, Choice, StudySettings
from steptune.tuner.search.rank_memory import Held, RankMemory, held
from steptune.tuner.search.space import Space
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.plan import Plan
from steptune.tuner.trials.model_look import look_at_model, look_at_optimizer
from steptune.tuner.workloads.loading import load_workload

pytestmark = [
    pytest.mark.xdist_group("ranks"),
    pytest.mark.skipif(not pytest.importorskip("transformers"), reason="needs transformers"),
]

MODEL = "n_layer=6&n_embd=64&n_head=2&vocab_size=400&n_positions=32&bos_token_id=0&eos_token_id=0"
"""1.3 MB of parameters, an eighth of them outside of blocks, tied to the output layer as in every GPT-2."""
BLOCK = {"wrap": "block"}
LAYOUTS: dict[str, dict[str, Choice]] = {
    "ddp": {},
    "bucket_views": {"ddp_buckets": {"bucket_views": True}},
    "zero1": {"sharding": {"mode": "zero1"}},
    "grad_op": {"sharding": {"mode": "grad_op", **BLOCK}},
    "full": {"sharding": {"mode": "full", **BLOCK}},
    "two_ahead": {"sharding": {"mode": "full", "prefetch": 2, **BLOCK}},
    "by_size": {"sharding": {"mode": "full", "wrap": "size", "min_num_params": 10_000}},
    "full_root": {"sharding": {"mode": "full"}},
    "grad_op_root": {"sharding": {"mode": "grad_op"}},
}
PRECISIONS: dict[str, dict[str, Choice]] = {
    "fp32": {},
    "O1": {"precision": {"level": "O1", "dtype": "bfloat16"}},
    "O2": {"precision": {"level": "O2", "dtype": "bfloat16"}},
    "O3": {"precision": {"level": "O3", "dtype": "bfloat16"}},
}
FOREACH: dict[str, Choice] = {"optimizer_implementation": {"implementation": "foreach"}}
SHORT, LONG = "batch=2&sequence=2", "batch=16&sequence=32"
"""Hardly an activation, and mostly activations."""


@cache
def space() -> Space:
    workload = load_workload(f"zoo:gpt2?{LONG}&{MODEL}")
    workload.current = {"sharding": {"min_num_params": 10_000}}
    job = assemble(workload, Plan(), device=torch.device("cpu"))
    look = look_at_model(job, next(iter(job)))
    facts = replace(
        sample_facts(),
        model=look.facts,
        optimizer=look_at_optimizer(job),
        current={},
        global_batch=16,
        look_peak_bytes=0,
    )
    return Space(sample_environment("cpu", num_ranks=2), facts, StudySettings())


def counted(choices: dict[str, Choice]) -> Held:
    found = held(space(), Candidate(choices=choices))
    assert found is not None
    return found


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", ["ddp", "zero1", "full"])
def test_what_stays_is_counted_to_the_byte_but_for_step_counts(ranks: Ranks, layout: str, precision: str) -> None:
    """After a step every tensor that lives is a parameter, a master, a state or a bucket; normalisation layers in FP32
    and the larger half of an uneven parameter are less than a hundredth.
    """
    choices = {**LAYOUTS[layout], **PRECISIONS[precision]}
    for rank in ranks.run(2, count_steps, f"zoo:gpt2?{SHORT}&{MODEL}", choices):
        assert counted(choices).always == pytest.approx(rank.after, rel=0.01)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_activations_the_peak_is_the_least(ranks: Ranks, layout: str) -> None:
    """A sequence of two tokens leaves some: they are what a tenth is for."""
    choices = {**LAYOUTS[layout], **FOREACH}
    for rank in ranks.run(2, count_steps, f"zoo:gpt2?{SHORT}&{MODEL}", choices):
        assert counted(choices).least == pytest.approx(rank.peak, rel=0.1)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("O1", marks=pytest.mark.soak)])
def test_peaks_of_all_layouts_follow_from_ddps(ranks: Ranks, precision: str) -> None:
    workload = f"zoo:gpt2?{LONG}&{MODEL}"
    memory = RankMemory(space())
    ddp = ranks.run(2, count_steps, workload, PRECISIONS[precision])
    memory.learn(Candidate(choices=PRECISIONS[precision]), 1, 8, max(rank.peak for rank in ddp))
    for name, layout in LAYOUTS.items():
        choices = {**layout, **PRECISIONS[precision]}
        measured = max(rank.peak for rank in ranks.run(2, count_steps, workload, choices))
        assert memory.predict(Candidate(choices=choices), 1, 8) == pytest.approx(measured, rel=0.1), name

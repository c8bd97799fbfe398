"""sharding: laid over ranks, a model trains as in one process, and its checkpoints are whole."""

import copy
import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from builders import sample_environment, sample_facts
from rank_jobs import Trained, build, emulated, train, train_alone
from ranks import RankFailed, Ranks
from tiny_workloads import AttentionBlock, Everything, TinyViT
from torch import nn
from torch.distributed.tensor import DTensor

from steptune.tuner.errors import UnsupportedError
from steptune.tuner.hardware import find_compiler
from steptune.tuner.records import Candidate
from steptune.tuner.strategies import Unsupported, strategy_named
from steptune.tuner.strategies.combine import conflict, normalise
from steptune.tuner.training.job import TrainingJob
from steptune.tuner.training.plan import ShardingArguments
from steptune.tuner.training.sharding import _check_reduces_on_cpu, description_of, gathered_dtypes, units_of

pytestmark = pytest.mark.xdist_group("ranks")

FULL = {"mode": "full", "wrap": "block"}
MODES = [
    {"mode": "zero1"},
    {"mode": "grad_op"},
    {"mode": "grad_op", "wrap": "block"},
    {"mode": "full"},
    FULL,
    {"mode": "full", "wrap": "size", "min_num_params": 1000},
    {**FULL, "prefetch": 2},
    {**FULL, "backward_prefetch": 3},
    {**FULL, "cpu_offload": True},
    {**FULL, "ignored": "norms"},
    {"mode": "grad_op", "wrap": "block", "ignored": "norms"},
]
each_mode = pytest.mark.parametrize(
    "choice", MODES, ids=lambda choice: "-".join(str(value) for value in choice.values())
)
rounding = pytest.mark.parametrize("mode", ["zero1", "grad_op", "full"])


class Deep(Everything):
    """Four blocks."""

    def model(self) -> nn.Module:
        model = TinyViT(width=32)
        model.blocks = nn.ModuleList(AttentionBlock(32, 2) for _ in range(4))
        return model


class Clipped(Deep):
    max_grad_norm = 0.01


class Partly(Deep):
    """A layer that no loss sees, and one that is not trained."""

    def model(self) -> nn.Module:
        model = super().model()
        model.unused = nn.Linear(4, 4)
        model.blocks[1].requires_grad_(False)
        return model


class Tied(Everything):
    """Two names for one weight."""

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Flatten(), nn.Linear(192, 192), nn.Linear(192, 192), nn.Linear(192, 4))
        model[2].weight = model[1].weight
        return model


def sharding(**choice: Any) -> dict[str, Any]:
    return {"sharding": choice}


class TestTraining:
    @each_mode
    def test_is_that_of_one_process(self, ranks: Ranks, choice: dict[str, Any]) -> None:
        alone = train_alone(Deep)
        for trained in ranks.run(2, train, Deep, sharding(**choice)):
            assert trained.losses == pytest.approx(alone.losses, rel=2e-5)
            assert trained.effects["sharding"][0], trained.effects["sharding"][1]
            assert trained.state.keys() == alone.state.keys()
            for name, value in alone.state.items():
                assert type(trained.state[name]) is torch.Tensor
                torch.testing.assert_close(trained.state[name], value, rtol=1e-3, atol=1e-3)

    @rounding
    def test_clips_by_the_norm_of_all_parts(self, ranks: Ranks, mode: str) -> None:
        trained: Trained = ranks.run(2, train, Clipped, sharding(mode=mode))[0]
        assert trained.losses == pytest.approx(train_alone(Clipped).losses, rel=2e-5)

    @rounding
    def test_of_micro_batches_is_that_of_the_whole(self, ranks: Ranks, mode: str) -> None:
        choices = {**sharding(mode=mode), "micro_batch": {"num_micro_batches": 2}}
        trained: Trained = ranks.run(2, train, Deep, choices)[0]
        assert trained.losses == pytest.approx(train_alone(Deep).losses, rel=2e-5)

    @pytest.mark.parametrize("mode", ["grad_op", "full"])
    def test_of_micro_batches_that_are_reduced_at_once_is_that_of_the_whole(self, ranks: Ranks, mode: str) -> None:
        choices = {**sharding(mode=mode, wrap="block", reduce_each=False), "micro_batch": {"num_micro_batches": 4}}
        trained: Trained = ranks.run(2, train, Deep, choices)[0]
        assert trained.losses == pytest.approx(train_alone(Deep).losses, rel=2e-5)
        assert trained.effects["sharding"][0], trained.effects["sharding"][1]

    def test_reduces_once_a_unit_and_step_where_it_is_asked_to(self, ranks: Ranks) -> None:
        """Four blocks and the root; of four micro-batches each."""
        assert ranks.run(2, scatters, True) == [4 * 5] * 2
        assert ranks.run(2, scatters, False) == [5] * 2

    def test_clips_parts_and_what_is_left_out_by_one_norm(self, ranks: Ranks) -> None:
        trained: Trained = ranks.run(2, train, Clipped, sharding(**FULL, ignored="norms"))[0]
        assert trained.losses == pytest.approx(train_alone(Clipped).losses, rel=2e-5)

    @pytest.mark.parametrize("workload", [Partly, Tied])
    @rounding
    def test_with_unused_frozen_or_tied_parameters(self, ranks: Ranks, workload: type, mode: str) -> None:
        choices = {**sharding(mode=mode), "ddp_buckets": {"find_unused": True}}
        trained: Trained = ranks.run(2, train, workload, choices)[0]
        alone = train_alone(workload)
        assert trained.losses == pytest.approx(alone.losses, rel=2e-5)
        for name in ("unused.weight", "blocks.1.norm.weight"):
            assert name not in alone.state or torch.equal(trained.state[name], alone.state[name])

    @pytest.mark.parametrize("every", [1, 2])
    def test_recomputes_blocks_whose_parameters_were_freed(self, ranks: Ranks, every: int) -> None:
        choices = {**sharding(**FULL), "activation_checkpointing": {"every": every}}
        trained: Trained = ranks.run(2, train, Deep, choices)[0]
        assert trained.losses == pytest.approx(train_alone(Deep).losses, rel=2e-5)

    @pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
    @pytest.mark.parametrize("scope", ["whole", "regional"])
    def test_of_a_compiled_model(self, ranks: Ranks, scope: str) -> None:
        choices = {**sharding(**FULL), "compile": {"mode": "default", "scope": scope}}
        trained: Trained = ranks.run(2, train, Deep, choices, 5)[0]
        assert trained.losses == pytest.approx(train_alone(Deep, num_steps=5).losses, rel=2e-5)
        for name in choices:
            assert trained.effects[name][0], trained.effects[name][1]

    @pytest.mark.parametrize("reshard", [False, True])
    def test_hybrid_shards_inside_hosts_and_reduces_between_them(self, ranks: Ranks, reshard: bool) -> None:
        choices = sharding(mode="hybrid", wrap="block", reshard=reshard)
        trained: Trained
        for trained in ranks.run(4, emulated, 2, train, Deep, choices):
            assert trained.losses == pytest.approx(train_alone(Deep).losses, rel=2e-5)
            assert trained.effects["sharding"] == (
                True,
                "5 FSDP units, sharded so that each rank holds 50% of the parameters; 1 units prefetched",
            )

    def test_hybrid_needs_hosts_of_one_size(self, ranks: Ranks) -> None:
        with pytest.raises(RankFailed, match="the same number of ranks on every host, got 2, 1"):
            ranks.run(3, emulated, 2, train, Threes, sharding(mode="hybrid"))


def scatters(rank: int, reduce_each: bool) -> int:
    """Reduce-scatters of one step of four micro-batches."""
    choices = {**sharding(**FULL, reduce_each=reduce_each), "micro_batch": {"num_micro_batches": 4}}
    job = build(rank, Sixteen(), choices)
    with torch.profiler.profile() as profile:
        job.step(next(iter(job.loader)))
    return sum(event.count for event in profile.key_averages() if "reduce_scatter" in event.key and "c10d" in event.key)


class Sixteen(Deep):
    global_batch = 16


class Threes(Deep):
    global_batch = 6


class TestPrecision:
    @pytest.mark.parametrize("level", ["O1", "O2"])
    @pytest.mark.parametrize("ignored", [None, "norms"])
    def test_float16_with_a_loss_scaler_trains_as_in_one_process(
        self, ranks: Ranks, level: str, ignored: str | None
    ) -> None:
        choices = {"precision": {"level": level, "dtype": "float16"}}
        alone = train_alone(Deep, choices, 5)
        trained: Trained = ranks.run(2, train, Deep, {**choices, **sharding(**FULL, ignored=ignored)}, 5)[0]
        assert trained.losses == pytest.approx(alone.losses, rel=5 * 2.0**-11)
        assert trained.effects["precision"][0], trained.effects["precision"][1]

    @pytest.mark.parametrize("level", ["O1", "O2"])
    def test_an_overflow_on_one_rank_skips_the_step_on_all(self, ranks: Ranks, level: str) -> None:
        for skipped, scales, unchanged in ranks.run(2, overflow, level):
            assert skipped == 1
            assert scales[1] == scales[0] / 2
            assert unchanged == [True, False]

    @pytest.mark.parametrize("level", ["O1", "O2", "O3"])
    def test_keeps_its_levels(self, ranks: Ranks, level: str) -> None:
        """Against the same level in one process, within some roundings of bfloat16."""
        choices = {"precision": {"level": level, "dtype": "bfloat16"}}
        alone = train_alone(Deep, choices, 5)
        trained: Trained = ranks.run(2, train, Deep, {**choices, **sharding(**FULL)}, 5)[0]
        assert trained.losses == pytest.approx(alone.losses, rel=5 * 2.0**-8)
        for name in ("precision", "sharding"):
            assert trained.effects[name][0], trained.effects[name][1]

    def test_at_o2_fp32_parts_are_gathered_in_16_bits_but_for_norms(self, ranks: Ranks) -> None:
        found = ranks.run(2, formats)[0]
        assert found["parts"] == {torch.float32}
        assert found["norms"] == {torch.float32}
        assert found["others"] == {torch.bfloat16}
        assert found["state"] == {torch.float32}

    def test_norms_that_are_left_out_are_whole_and_the_same_on_all_ranks(self, ranks: Ranks) -> None:
        """And no unit of their own: four blocks and the root."""
        (units, left_out), (_, others) = ranks.run(2, norms_left_out)
        assert units == 5
        assert left_out.keys() == {name for name, _ in Deep().model().named_parameters() if "norm" in name}
        for name, value in left_out.items():
            assert value.dtype == torch.float32
            assert torch.equal(value, others[name])
            assert not torch.equal(value, Deep().model().state_dict()[name]), "it was trained"


def overflow(rank: int, level: str) -> tuple[int, list[float], list[bool]]:
    """Skipped steps, loss scales before and after, and whether parameters stayed, in a step whose gradients are
    infinite in one part only, and in the next.
    """
    job = build(rank, Deep(), {**sharding(**FULL), "precision": {"level": level, "dtype": "float16"}})
    batches = iter(job.loader)
    job.step(next(batches))
    scales, unchanged = [job.loss_scale], []
    for spoils in (True, False):
        before = {name: value.clone() for name, value in job.state_dict().items()}
        runner: Any = job.runner
        loss = runner.forward_backward(*runner.pieces(job.to_device(next(batches))))
        if spoils and rank == 1:
            gradients: list[Any] = job.gradients()
            gradients[-1].to_local().fill_(math.inf)
        job.update()
        assert loss.isfinite()
        unchanged.append(all(torch.equal(before[name], value) for name, value in job.state_dict().items()))
        scales.append(job.loss_scale)
    return job.skipped_steps, scales, unchanged


def norms_left_out(rank: int) -> tuple[int, dict[str, torch.Tensor]]:
    choices = {**sharding(**FULL, ignored="norms"), "precision": {"level": "O2", "dtype": "bfloat16"}}
    job = build(rank, Deep(), choices)
    train_on(job, 3)
    whole = {name: p.detach() for name, p in job.model.named_parameters() if not isinstance(p, DTensor)}
    return description_of(job.model)["units"], whole


def formats(rank: int) -> dict[str, set[torch.dtype]]:
    job = build(rank, Deep(), {**sharding(**FULL), "precision": {"level": "O2", "dtype": "bfloat16"}})
    job.step(next(iter(job.loader)))
    gathered = gathered_dtypes(job.model)
    named = list(job.model.named_parameters())
    assert {id(parameter) for _, parameter in named} == set(gathered)
    return {
        "parts": {parameter.dtype for _, parameter in named},
        "norms": {gathered[id(parameter)] for name, parameter in named if "norm" in name},
        "others": {gathered[id(parameter)] for name, parameter in named if "norm" not in name},
        "state": {value.dtype for value in job.state_dict().values()},
    }


def train_on(job: TrainingJob, num_steps: int) -> list[float]:
    losses = torch.stack([job.step(batch) for batch in itertools.islice(job.loader, num_steps)]).double()
    if dist.is_initialized():
        dist.all_reduce(losses)
        losses /= dist.get_world_size()
    return losses.tolist()


def saved(rank: int, choice: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint after three steps."""
    job = build(rank, Deep(), {"sharding": choice})
    train_on(job, 3)
    return {"model": job.state_dict(), "optimizer": job.optimizer_state_dict()}


def continued(
    rank: int, choice: dict[str, Any], checkpoint: dict[str, Any], **others: Any
) -> tuple[list[float], dict[str, Any]]:
    """From a checkpoint of the model alone into a fresh model, and of the optimizer into its job."""

    class Restored(Deep):
        def model(self) -> nn.Module:
            model = super().model()
            model.load_state_dict(checkpoint["model"])
            return model

    job = build(rank, Restored(), {"sharding": choice, **others})
    job.load_optimizer_state_dict(copy.deepcopy(checkpoint["optimizer"]))  # torch goes on in the tensors it is given
    again = copy.deepcopy(job.optimizer_state_dict())
    return train_on(job, 3), again


class TestCheckpoints:
    @each_mode
    def test_move_from_and_to_one_process(self, ranks: Ranks, choice: dict[str, Any]) -> None:
        of_one = saved(0, {})
        of_ranks = ranks.run(2, saved, choice)
        for other in of_ranks:
            same(other, of_one)
        expected, _ = continued(0, {}, of_one)
        assert continued(0, {}, of_ranks[0])[0] == pytest.approx(expected, rel=2e-5)
        for losses, again in ranks.run(2, continued, choice, of_one):
            assert losses == pytest.approx(expected, rel=2e-5)
            same({"optimizer": again}, {"optimizer": of_one["optimizer"]})

    def test_states_on_their_ranks_have_the_layout_of_their_parameters(self, ranks: Ranks) -> None:
        """A fused update checks nothing."""
        of_one = saved(0, {})
        expected, _ = continued(0, {}, of_one)
        for losses, again in ranks.run(2, continued_in_channels_last, of_one):
            assert losses == pytest.approx(expected, rel=2e-5)
            same({"optimizer": again}, {"optimizer": of_one["optimizer"]})


def continued_in_channels_last(rank: int, checkpoint: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    fused = {"implementation": "fused"}
    layout = {"layout": "channels_last"}
    return continued(rank, {"mode": "zero1"}, checkpoint, optimizer_implementation=fused, memory_format=layout)


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Whole tensors of the same values, by the same names."""
    if "model" in wanted:
        assert found["model"].keys() == wanted["model"].keys()
    states, others = found["optimizer"]["state"], wanted["optimizer"]["state"]
    assert states.keys() == others.keys()
    for number, state in others.items():
        assert states[number].keys() == state.keys()
        for name, value in state.items():
            assert type(states[number][name]) is type(value)
            torch.testing.assert_close(states[number][name], value, rtol=1e-3, atol=1e-4)


def held(rank: int, mode: str) -> tuple[int, int]:
    """Elements of the optimizer's states on this rank, and of parameters in all."""
    job = build(rank, Deep(), {"sharding": {"mode": mode}})
    job.step(next(iter(job.loader)))
    size = 0
    for state in getattr(job.optimizer, "optim", job.optimizer).state.values():
        moment = state.get("exp_avg")
        if moment is not None:
            size += (moment.to_local() if hasattr(moment, "to_local") else moment).numel()
    return size, sum(p.numel() for p in Deep().model().parameters())


class TestMemory:
    def test_a_rank_holds_its_part_of_the_optimizers_states(self, ranks: Ranks) -> None:
        for mode in ("zero1", "full"):
            parts = ranks.run(2, held, mode)
            assert sum(size for size, _ in parts) == pytest.approx(parts[0][1], rel=0.02)
            assert all(size < 0.6 * total for size, total in parts)
        assert all(size == total for size, total in ranks.run(2, held, "ddp"))


def differing(rank: int) -> torch.Tensor:
    """Models that were initialised otherwise on every rank."""

    class Own(Deep):
        def model(self) -> nn.Module:
            torch.manual_seed(rank)
            return super().model()

    return build(rank, Own(), sharding(**FULL)).state_dict()["head.weight"]


def test_all_ranks_start_as_the_first(ranks: Ranks) -> None:
    """DDP does the same; parts of different models would make none that was initialised."""
    torch.manual_seed(0)
    wanted = Deep().model().head.weight
    for value in ranks.run(2, differing):
        assert torch.equal(value, wanted)


class TestUnits:
    def units(self, model: nn.Module, minimum: int) -> list[str]:
        names = {module: name for name, module in model.named_modules()}
        arguments = ShardingArguments(mode="full", wrap="size", min_num_params=minimum, reshard=True, prefetch=1)
        return [names[unit] for unit in units_of(model, Deep(), arguments)]

    def test_by_size_take_what_is_in_no_inner_one(self) -> None:
        """The first projection has 3,168 of a block's 4,256 parameters: with that apart, the block is too small."""
        model = Deep().model()
        assert self.units(model, 4000) == [f"blocks.{number}" for number in range(4)]
        assert self.units(model, 2000) == [f"blocks.{number}.qkv" for number in range(4)]
        assert self.units(model, 10**6) == []

    def test_never_share_a_tied_weight(self) -> None:
        """FSDP refuses units that do; the third layer of 16,512 parameters has neither weight of the second's."""
        model = nn.Sequential(nn.Linear(128, 128), nn.Sequential(nn.Linear(128, 128)), nn.Linear(128, 128))
        model[2].weight = model[0].weight
        assert self.units(model, 1000) == ["1.0"]
        model[2].weight = model[1][0].weight
        assert self.units(model, 1000) == ["0"]

    def test_never_part_an_attention_from_its_projection(self) -> None:
        """Which it uses without calling it; nor is a list of modules one, which is never called."""
        model = nn.Sequential(nn.ModuleList([nn.MultiheadAttention(32, 2)]))
        assert self.units(model, 1000) == ["0.0"]


@pytest.mark.parametrize(
    ("mode", "other", "reason"),
    [
        ("full", {"precision": {"level": "O1", "dtype": "float16"}}, None),
        ("full", {"memory_format": {"layout": "channels_last"}}, "contiguous memory format"),
        ("zero1", {"optimizer_implementation": {"contiguous": True}}, "flattens all parameters"),
        ("zero1", {"optimizer_algorithm": {"algorithm": "lamb"}}, "whole parameters"),
        ("full", {"gradient_compression": {"method": "int8"}}, "no hook for this compression"),
        ("full", {"gradient_compression": {"method": "bf16"}}, None),
        ("zero1", {"gradient_compression": {"method": "dgc"}}, "holds only a part of the parameters"),
        ("grad_op", {"hierarchical_allreduce": {"levels": 2}}, "sharding mode hybrid"),
        ("zero1", {"gradient_compression": {"method": "bf16"}, "hierarchical_allreduce": {"levels": 2}}, None),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_go_together_is_refused(mode: str, other: dict[str, Any], reason: str | None) -> None:
    candidate = Candidate(choices={"sharding": {"mode": mode}, **other})
    found = conflict(candidate, sample_environment(), sample_facts(current={}))
    assert (found is None) == (reason is None)
    assert reason is None or reason in str(found)


def test_offloaded_parts_do_not_go_with_a_loss_scaler() -> None:
    sharded = sharding(mode="full", cpu_offload=True)
    facts, environment = sample_facts(current={}), sample_environment()
    for level, refused in (("O1", True), ("O2", True), ("O3", False)):
        precision = {"precision": {"level": level, "dtype": "float16"}}
        found = conflict(Candidate(choices={**sharded, **precision}), environment, facts)
        assert ("use bfloat16" in str(found)) == refused


def test_offloaded_parts_need_a_group_that_reduces_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of `init_process_group("nccl")` makes none."""
    monkeypatch.setattr("torch.distributed.distributed_c10d.get_backend_config", lambda: "cuda:nccl")
    with pytest.raises(UnsupportedError, match=r"cuda:nccl: initialise it with .*cpu:gloo,cuda:nccl"):
        _check_reduces_on_cpu()


@pytest.mark.parametrize("precision", [{}, {"precision": {"level": "O2", "dtype": "bfloat16"}}], ids=["fp32", "O2"])
def test_parts_can_be_reduced_in_bfloat16(precision: dict[str, Any], ranks: Ranks) -> None:
    """Inside hosts and between them; at O2 normalisation layers keep FP32, and so do their gradients."""
    choices = {**sharding(mode="hybrid", wrap="block"), "gradient_compression": {"method": "bf16"}, **precision}
    trained: Trained = ranks.run(4, emulated, 2, train, Deep, choices)[0]
    plain: Trained = ranks.run(4, emulated, 2, train, Deep, {**choices, "gradient_compression": {}})[0]
    assert trained.effects["gradient_compression"][0], trained.effects["gradient_compression"][1]
    assert 1.8 < trained.evidence["gradient_compression"]["factor"] <= 2
    assert plain.evidence["gradient_compression"] == {"method": None}
    assert trained.losses == pytest.approx(plain.losses, rel=0.05)
    assert trained.losses != plain.losses


def test_zero1_goes_with_buckets_and_compression(ranks: Ranks) -> None:
    choices = {
        **sharding(mode="zero1"),
        "ddp_buckets": {"bucket_views": True},
        "gradient_compression": {"method": "int8"},
    }
    trained: Trained = ranks.run(2, train, Deep, choices)[0]
    assert sum(trained.losses[-4:]) < sum(trained.losses[:4])
    for name in choices:
        assert trained.effects[name][0], trained.effects[name][1]


@pytest.mark.parametrize(
    ("choice", "others", "kept"),
    [
        ({"mode": "grad_op", "wrap": "block", "backward_prefetch": 2}, {}, {"mode", "wrap"}),
        ({"mode": "full", "reduce_each": False}, {}, {"mode"}),
        (
            {"mode": "full", "reduce_each": False},
            {"micro_batch": {"num_micro_batches": 2}},
            {"mode", "reduce_each"},
        ),
        ({"mode": "zero1", "cpu_offload": True, "ignored": "norms"}, {}, {"mode"}),
    ],
)
def test_what_has_no_meaning_is_dropped(choice: dict[str, Any], others: dict[str, Any], kept: set[str]) -> None:
    candidate = Candidate(choices={"sharding": choice, **others})
    assert normalise(candidate, sample_facts(current={})).choices["sharding"].keys() == kept


def test_buckets_mean_nothing_without_ddp() -> None:
    facts = sample_facts(current={})
    for mode, kept in (("zero1", True), ("full", False)):
        candidate = Candidate(choices={"sharding": {"mode": mode}, "ddp_buckets": {"bucket_cap_mb": 50}})
        assert ("ddp_buckets" in normalise(candidate, facts).choices) == kept


@pytest.mark.parametrize(
    ("choice", "environment", "facts", "reason"),
    [
        ({"mode": "zero1"}, {"num_ranks": 1}, {}, "requires more than one rank"),
        ({"mode": "full"}, {}, {"custom_step": True}, "training_step"),
        ({"mode": "full", "reshard": False}, {}, {}, "use mode grad_op"),
        ({"mode": "full", "prefetch": 2}, {}, {}, "the order of other units is unknown"),
        ({"mode": "full", "wrap": "block", "prefetch": 16}, {}, {}, "16 blocks ahead requires at least 17"),
        ({"mode": "full", "wrap": "block", "backward_prefetch": 16}, {}, {}, "16 blocks ahead requires at least 17"),
        ({"mode": "full", "cpu_offload": True}, {"device_kind": "cpu"}, {}, "already in CPU memory"),
        ({"mode": "full", "cpu_offload": True, "ignored": "norms"}, {}, {}, "stay on the device"),
        ({"mode": "hybrid"}, {}, {}, "the same as full sharding"),
        ({"mode": "hybrid"}, {"num_ranks": 4, "num_hosts": 4}, {}, "4 ranks on 4 hosts"),
    ],
)
def test_what_cannot_be_tried_gives_the_reason(
    choice: dict[str, Any], environment: dict[str, Any], facts: dict[str, Any], reason: str
) -> None:
    strategy = strategy_named("sharding")
    support = strategy.supports(
        {**strategy.defaults, **choice},
        sample_environment(**environment),
        sample_facts(**{"current": {}, "custom_step": False, **facts}),
    )
    assert isinstance(support, Unsupported)
    assert reason in support.reason

"""gradient_compression: what is sent, what is kept, and that training converges with it."""

import copy
import itertools
import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from builders import sample_environment, sample_facts
from rank_jobs import Trained, build, emulated, train, train_alone
from ranks import RankFailed, Ranks
from tiny_workloads import Everything, TinyViT
from torch import nn

from steptune.tuner.errors import WorkloadRejectedError
from steptune.tuner.records import Candidate
from steptune.tuner.strategies import strategy_named
from steptune.tuner.strategies.combine import conflict
from steptune.tuner.training.communication import compression_of
from steptune.tuner.training.compression.deep_gradient import DeepGradient
from steptune.tuner.training.compression.int8 import Int8
from steptune.tuner.training.compression.lane import Lane
from steptune.tuner.training.compression.one_bit import OneBit
from steptune.tuner.training.job import TrainingJob

pytestmark = pytest.mark.xdist_group("ranks")

CPU = torch.device("cpu")
NUM_STEPS = 20


class Momentum(Everything):
    """SGD with everything that deep gradient compression takes over."""

    momentum, nesterov, weight_decay = 0.9, False, 0.01

    def model(self) -> nn.Module:
        return TinyViT(width=32)

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [parameter for _, parameter in named_parameters],
            lr=0.02,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
        )


class Nesterov(Momentum):
    nesterov = True


class Clipped(Momentum):
    max_grad_norm, weight_decay = 0.05, 0.0


class Partly(Momentum):
    """A layer that no loss sees, and one that is not trained."""

    def model(self) -> nn.Module:
        model = super().model()
        model.unused = nn.Linear(4, 4)
        model.patchify.requires_grad_(False)
        return model


class Cycling(Momentum):
    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=50)


class Adam(Momentum):
    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam([parameter for _, parameter in named_parameters])


class Teacher(Momentum):
    """Regression on a linear teacher: its loss can fall to zero."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.Linear(64, 16))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        images, _ = batch
        return F.mse_loss(model(images), images.flatten(1)[:, :16])


def compressed(**choice: Any) -> dict[str, Any]:
    return {"gradient_compression": choice}


class TestConvergence:
    """On a task whose loss falls by nine tenths: with compression it falls nearly as far."""

    @pytest.mark.parametrize(
        "choice",
        [
            {"method": "bf16"},
            {"method": "fp16"},
            {"method": "int8"},
            {"method": "one_bit"},
            {"method": "powersgd", "rank": 2},
            {"method": "dgc", "ratio": 0.1, "warm_up_steps": 20},
        ],
        ids=lambda choice: choice["method"],
    )
    def test_the_loss_falls_as_far(self, ranks: Ranks, choice: dict[str, Any]) -> None:
        plain = train_alone(Teacher, num_steps=150).losses
        trained: Trained = ranks.run(2, train, Teacher, compressed(**choice), 150)[0]
        assert plain[-1] < 0.3 * plain[0]
        assert plain[0] - trained.losses[-1] > 0.9 * (plain[0] - plain[-1])
        assert trained.effects["gradient_compression"][0], trained.effects["gradient_compression"][1]


def averages(rank: int, method: str, num_steps: int) -> dict[str, torch.Tensor]:
    """Averages of one gradient in every step: their sum, what is still to come, and what it should be."""
    torch.manual_seed(rank)
    gradient = torch.randn(5000)
    compression = {"one_bit": OneBit, "int8": Int8}[method](Lane(CPU))
    compression.num_steps = 2  # from the third step on it compresses
    total = torch.zeros(5000)
    for _ in range(num_steps):
        total += compression.average(gradient.clone(), dist.group.WORLD, 0)
    exact = gradient.clone()
    dist.all_reduce(exact)
    lost = {place: tensor.flatten() for (_, place), tensor in compression._lost.items()}
    return {"total": total, "exact": exact / dist.get_world_size(), **lost}


class TestFewBits:
    @pytest.mark.parametrize("num_ranks", [2, 3])
    def test_of_one_bit_what_is_not_sent_arrives_later(self, ranks: Ranks, num_ranks: int) -> None:
        """Values that came and that are kept, by senders and by those who average, are all there was."""
        answers = ranks.run(num_ranks, averages, "one_bit", 50)
        kept = torch.stack([a["sent"] for a in answers]).mean(0) + torch.cat([a["averaged"] for a in answers])
        for answer in answers:
            assert torch.equal(answer["total"], answers[0]["total"]), "all ranks have the same"
            torch.testing.assert_close(answer["total"] + kept[:5000], 50 * answer["exact"], atol=1e-3, rtol=1e-4)

    def test_of_one_bit_what_is_kept_does_not_grow(self, ranks: Ranks) -> None:
        """Or not as fast as what came: with time the mean of that is the gradient."""
        errors = []
        for num_steps in (50, 1000):
            answer = ranks.run(2, averages, "one_bit", num_steps)[0]
            errors.append(float((answer["total"] / num_steps - answer["exact"]).norm()))
        assert errors[1] < 0.5 * errors[0]

    def test_an_int8_average_is_within_a_127th_of_the_largest_of_a_block(self, ranks: Ranks) -> None:
        """Which is below five here."""
        for answer in ranks.run(2, averages, "int8", 1):
            assert (answer["total"] - answer["exact"]).abs().max() <= 5 / 127

    @pytest.mark.parametrize(("codec", "factor"), [(Int8, 3.9), (OneBit, 31)])
    def test_bits_come_back_as_they_were_sent(self, codec: type, factor: float) -> None:
        torch.manual_seed(0)
        compression = codec(Lane(CPU))
        blocks = torch.randn(3, compression.block)
        payload, scales = compression.encode(blocks)
        decoded = compression.decode(payload, scales)
        assert torch.equal(decoded.sign(), blocks.sign()) or codec is Int8
        again = compression.decode(*compression.encode(decoded))
        torch.testing.assert_close(again, decoded)
        assert blocks.nbytes / (payload.nbytes + scales.nbytes) > factor

    def test_what_is_not_finite_stays_so(self) -> None:
        """Or a loss scaler would take an overflow for a gradient."""
        for broken in (float("inf"), float("nan")):
            blocks = torch.ones(1, 256)
            blocks[0, 7] = broken
            codec = Int8(Lane(CPU))
            assert not codec.decode(*codec.encode(blocks)).isfinite().all()


def one_step_of_dgc(rank: int, ratio: float) -> dict[str, list[torch.Tensor]]:
    """Per matrix: what was accumulated before, what is sent, and what is kept."""
    job = build(rank, Momentum(), compressed(method="dgc", ratio=ratio, warm_up_steps=0))
    state = compression_of(job.model)
    assert isinstance(state, DeepGradient)
    seen: dict[str, list[torch.Tensor]] = {}
    take = state._take

    def watched(parameter: nn.Parameter, places: torch.Tensor) -> torch.Tensor:
        before = state.unsent[parameter].flatten().clone()
        values = take(parameter, places)
        sent = torch.zeros_like(before).index_add(0, places, values)
        after, momentum = (kept[parameter].flatten().clone() for kept in (state.unsent, state.momenta))
        seen[str(len(seen))] = [before, sent, after, momentum]
        return values

    state._take = watched  # type: ignore[method-assign]
    for batch in itertools.islice(job.loader, 3):
        job.step(batch)
    return seen


def norms_when_clipped(rank: int) -> list[tuple[float, float]]:
    """Norms in every step: of the gradient that the optimizer gets, and of what it makes of it, over its rate."""
    job = build(rank, Clipped(), compressed(method="dgc", ratio=1.0, warm_up_steps=0))
    seen: list[float] = []
    job.on_gradients = lambda gradients: seen.append(float(torch.nn.utils.get_total_norm(gradients)))
    steps = []
    for batch in itertools.islice(job.loader, 10):
        before = [parameter.detach().clone() for parameter in job.model.parameters()]
        job.step(batch)
        moved = [old - new.detach() for old, new in zip(before, job.model.parameters(), strict=True)]
        steps.append((seen[-1], float(torch.nn.utils.get_total_norm(moved)) / 0.02))
    return steps


class TestDeepGradient:
    @pytest.mark.parametrize("workload", [Momentum, Nesterov])
    def test_with_ratio_1_is_sgd_bit_for_bit(self, ranks: Ranks, workload: type[Momentum]) -> None:
        dense: Trained = ranks.run(2, train, workload, {}, NUM_STEPS)[0]
        whole: Trained = ranks.run(2, train, workload, compressed(method="dgc", ratio=1.0, warm_up_steps=0))[0]
        assert whole.losses == dense.losses
        assert all(torch.equal(whole.state[name], value) for name, value in dense.state.items())

    @pytest.mark.parametrize("ratio", [1.0, 0.1])
    def test_leaves_parameters_alone_that_get_no_gradient(self, ranks: Ranks, ratio: float) -> None:
        """Weight decay would shrink those that no loss sees."""
        choices = {
            **compressed(method="dgc", ratio=ratio, warm_up_steps=0),
            "ddp_buckets": {"find_unused": True},
        }
        dense: Trained = ranks.run(2, train, Partly, {"ddp_buckets": {"find_unused": True}}, NUM_STEPS)[0]
        found: Trained = ranks.run(2, train, Partly, choices, NUM_STEPS)[0]
        if ratio == 1.0:
            assert found.losses == dense.losses
        for name in ("unused.weight", "patchify.weight"):
            assert torch.equal(found.state[name], dense.state[name])

    def test_with_ratio_1_on_four_ranks_is_sgd_within_rounding(self, ranks: Ranks) -> None:
        dense = train_alone(Momentum)
        whole: Trained = ranks.run(4, train, Momentum, compressed(method="dgc", ratio=1.0, warm_up_steps=0))[0]
        assert whole.losses == pytest.approx(dense.losses, rel=2e-5)

    def test_keeps_what_it_does_not_send_and_masks_the_momentum_of_what_it_does(self, ranks: Ranks) -> None:
        for seen in ranks.run(2, one_step_of_dgc, 0.1):
            assert seen
            for before, sent, after, momentum in seen.values():
                assert torch.equal(before, sent + after)
                places = sent != 0
                assert 0 < places.sum() <= -(-before.numel() // 10)
                assert sent[places].abs().min() >= after.abs().max()
                assert not momentum[places].any()

    def test_clips_each_rank_before_it_keeps_anything_and_not_again_what_momentum_makes_of_it(
        self, ranks: Ranks
    ) -> None:
        """The mean of two gradients that were clipped to a norm is no longer than that; what momentum adds up is."""
        limit = Clipped.max_grad_norm / math.sqrt(2)
        for steps in ranks.run(2, norms_when_clipped):
            (first, _), *_, (last, moved) = steps
            assert 0.5 * limit < first <= 1.01 * limit
            assert last > 1.2 * Clipped.max_grad_norm
            assert moved == pytest.approx(last, rel=1e-3)

    def test_sends_more_in_the_warm_up(self) -> None:
        parameter = nn.Parameter(torch.zeros(2, 2))
        state = DeepGradient(Lane(CPU), torch.optim.SGD([parameter], lr=0.1, momentum=0.9), 0.001, 8)
        ratios = []
        for step in range(10):
            state.num_steps = step
            ratios.append(round(state.ratio, 6))
        assert ratios == sorted(ratios, reverse=True)
        assert ratios[0] == pytest.approx(0.25, rel=0.01)  # as in the paper, then 6.3 %, 1.6 %, 0.4 %
        assert ratios[2] == pytest.approx(0.063, rel=0.01)
        assert ratios[8:] == [0.001, 0.001]

    @pytest.mark.parametrize(
        ("workload", "reason"), [(Cycling, "cycle_momentum=False"), (Adam, "requires torch.optim.SGD, got Adam")]
    )
    def test_refuses_what_it_is_not_defined_for(self, ranks: Ranks, workload: type, reason: str) -> None:
        with pytest.raises(RankFailed, match=reason):
            ranks.run(2, train, workload, compressed(method="dgc"))


KEEPING = [
    {"method": "one_bit"},
    {"method": "powersgd", "rank": 2},
    {"method": "dgc", "ratio": 0.1, "warm_up_steps": 20},
]
each_that_keeps = pytest.mark.parametrize("choice", KEEPING, ids=lambda choice: choice["method"])


def steps(job: TrainingJob, batches: list[Any]) -> list[float]:
    losses = torch.stack([job.step(batch) for batch in batches]).double()
    dist.all_reduce(losses)
    return (losses / dist.get_world_size()).tolist()


def restored(rank: int, choice: dict[str, Any], checkpoint: dict[str, Any]) -> TrainingJob:
    class Restored(Teacher):
        def model(self) -> nn.Module:
            model = super().model()
            model.load_state_dict(checkpoint["model"])
            return model

    job = build(rank, Restored(), choice)
    job.load_optimizer_state_dict(checkpoint["optimizer"])
    job.load_rank_state_dict(checkpoint["rank"])
    return job


def interrupted(rank: int, choices: dict[str, Any], before: int, after: int) -> dict[str, Any]:
    """Losses of a job that goes on, and of one that is built anew from its checkpoint; what both keep at each end."""
    job = build(rank, Teacher(), choices)
    batches = list(itertools.islice(job.loader, before + after))
    steps(job, batches[:before])
    checkpoint = copy.deepcopy(
        {"model": job.state_dict(), "optimizer": job.optimizer_state_dict(), "rank": job.rank_state_dict()}
    )
    straight = steps(job, batches[before:])
    again = restored(rank, choices, checkpoint)
    loaded = copy.deepcopy(again.rank_state_dict())
    return {
        "straight": straight,
        "again": steps(again, batches[before:]),
        "saved": checkpoint["rank"],
        "loaded": loaded,
        "ends": [job.rank_state_dict(), again.rank_state_dict()],
    }


def tensors_of(state: Any) -> dict[str, torch.Tensor]:
    """Tensors by their place in a structure."""
    if isinstance(state, torch.Tensor):
        return {"": state}
    pairs = state.items() if isinstance(state, dict) else ()
    return {f"{key}/{place}": t for key, value in pairs for place, t in tensors_of(value).items()}


def one_late_step(rank: int, choices: dict[str, Any]) -> tuple[float, float]:
    """From a checkpoint, the third step: how far the average and what is kept are from the gradients and what was
    kept; and how large that was.
    """
    job = build(rank, Teacher(), choices)
    batches = list(itertools.islice(job.loader, 8))
    steps(job, batches[:5])
    kept = job.rank_state_dict()
    job = build(rank, Teacher(), choices)
    job.load_rank_state_dict(kept)
    steps(job, batches[:2])
    before = torch.cat([tensors["tensors"]["error"] for tensors in job.rank_state_dict()["kept"]["buckets"].values()])
    with job.model.no_sync():  # type: ignore[operator]
        job.backward(job.loss(job.to_device(batches[2])))
    gradients = torch.cat([p.grad.flatten() for p in reversed(list(job.model.parameters())) if p.grad is not None])
    job.optimizer.zero_grad()
    job.backward(job.loss(job.to_device(batches[2])))
    averaged = torch.cat([p.grad.flatten() for p in reversed(list(job.model.parameters())) if p.grad is not None])
    after = torch.cat([tensors["tensors"]["error"] for tensors in job.rank_state_dict()["kept"]["buckets"].values()])
    wanted, found = gradients + before, averaged + after
    for values in (wanted, found):
        dist.all_reduce(values)
    return float((wanted - found).norm()), float(before.norm())


def rejected(rank: int, choices: dict[str, Any], others: dict[str, Any], swaps: bool) -> str:
    """Message to a rank that is given what others kept."""
    job = build(rank, Teacher(), choices)
    batches = list(itertools.islice(job.loader, 8))
    steps(job, batches[:4])
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, job.rank_state_dict())
    other = build(rank, Teacher(), others)
    try:
        other.load_rank_state_dict(states[1 - rank if swaps else rank])
        steps(other, batches[:4])
    except (WorkloadRejectedError, RuntimeError) as error:
        return str(error)
    return ""


class TestCheckpoints:
    @each_that_keeps
    def test_what_is_kept_is_saved_and_loaded_bit_for_bit(self, ranks: Ranks, choice: dict[str, Any]) -> None:
        for found in ranks.run(2, interrupted, compressed(**choice), 5, 1):
            saved, loaded = tensors_of(found["saved"]), tensors_of(found["loaded"])
            assert saved
            assert any(tensor.any() for tensor in saved.values())
            assert saved.keys() == loaded.keys()
            assert all(torch.equal(saved[place], loaded[place]) for place in saved)

    def test_dgc_goes_on_bit_for_bit(self, ranks: Ranks) -> None:
        """In its warm-up: the count of steps is part of it."""
        for found in ranks.run(2, interrupted, compressed(**KEEPING[2]), 6, 6):
            assert found["again"] == found["straight"]
            first, second = (tensors_of(end) for end in found["ends"])
            assert all(torch.equal(first[place], second[place]) for place in first)

    def test_what_powersgd_kept_is_sent_later(self, ranks: Ranks) -> None:
        """Values that came and that are kept after the first step that compresses again are all there was."""
        for missing, size in ranks.run(2, one_late_step, compressed(**KEEPING[1])):
            assert missing < 1e-4 * size

    def test_of_parts_between_hosts_too(self, ranks: Ranks) -> None:
        choices = {**compressed(method="one_bit"), "hierarchical_allreduce": {"levels": 2}}
        for found in ranks.run(4, emulated, 2, interrupted, choices, 5, 4):
            saved, loaded = tensors_of(found["saved"]), tensors_of(found["loaded"])
            assert saved
            assert all(torch.equal(saved[place], loaded[place]) for place in saved)
            assert found["again"] == pytest.approx(found["straight"], rel=0.05)

    @pytest.mark.parametrize(
        ("choice", "others", "swaps", "reason"),
        [
            (KEEPING[0], {"method": "powersgd", "rank": 2}, False, "has method 'one_bit', but this job has 'powersgd'"),
            (KEEPING[1], {**KEEPING[1], "rank": 1}, False, "has settings {'rank': 2}"),
            (KEEPING[0], KEEPING[0], True, "has rank 1, but this job has 0"),
        ],
        ids=["another method", "another rank of matrices", "another rank of the group"],
    )
    def test_another_ones_are_refused(
        self, ranks: Ranks, choice: dict[str, Any], others: dict[str, Any], swaps: bool, reason: str
    ) -> None:
        assert reason in ranks.run(2, rejected, compressed(**choice), compressed(**others), swaps)[0]

    def test_those_of_other_buckets_are_refused(self, ranks: Ranks) -> None:
        for said in ranks.run(2, rejected_buckets):
            assert "belongs to other gradient buckets" in said

    def test_nothing_is_kept_without_feedback(self, ranks: Ranks) -> None:
        assert ranks.run(2, kept_after, compressed(method="int8")) == [{}, {}]

    @pytest.mark.parametrize("ratio", [0.1, 1.0])
    def test_the_optimizers_state_of_dgc_is_that_of_sgd(self, ranks: Ranks, ratio: float) -> None:
        """Its options and, where everything was sent, its momentum; so it moves to training without compression."""
        found, plain, moved = ranks.run(2, optimizer_states, ratio)[0]
        options = ("momentum", "nesterov", "weight_decay", "lr")
        for group, other, third in zip(*(s["param_groups"] for s in (found, plain, moved)), strict=True):
            assert all(group[name] == other[name] == third[name] for name in options)
        for number, values in plain["state"].items():
            buffer, same = found["state"][number]["momentum_buffer"], moved["state"][number]["momentum_buffer"]
            assert torch.equal(buffer, same)
            if ratio == 1.0:
                torch.testing.assert_close(buffer, values["momentum_buffer"])


def rejected_buckets(rank: int) -> str:
    """Message to a rank that is given buckets of other parameters."""
    job = build(rank, Teacher(), compressed(method="one_bit"))
    batches = list(itertools.islice(job.loader, 8))
    steps(job, batches[:4])
    state = job.rank_state_dict()
    (bucket,) = state["kept"]["buckets"].values()
    bucket["parameters"] = bucket["parameters"][1:]
    job.load_rank_state_dict(state)
    try:
        steps(job, batches[4:])
    except (WorkloadRejectedError, RuntimeError) as error:
        return str(error)
    return ""


def kept_after(rank: int, choices: dict[str, Any]) -> dict[str, Any]:
    job = build(rank, Teacher(), choices)
    steps(job, list(itertools.islice(job.loader, 4)))
    return job.rank_state_dict()


def optimizer_states(rank: int, ratio: float) -> list[dict[str, Any]]:
    """After four steps of dgc, of plain DDP, and of the first one's in a job of dgc that loaded it."""
    choices = compressed(method="dgc", ratio=ratio, warm_up_steps=0)
    states = []
    for chosen in (choices, {}):
        job = build(rank, Momentum(), chosen)
        steps(job, list(itertools.islice(job.loader, 4)))
        states.append(copy.deepcopy(job.optimizer_state_dict()))
    other = build(rank, Momentum(), choices)
    other.load_optimizer_state_dict(copy.deepcopy(states[0]))
    assert all(group["momentum"] == 0 for group in other.optimizer.param_groups), "or it would be applied twice"
    return [*states, other.optimizer_state_dict()]


def fail_in_lane(rank: int) -> str:
    def fails() -> torch.Tensor:
        raise ValueError("lost")

    lane = Lane(CPU)
    futures = [lane.submit(fails), lane.submit(lambda: torch.ones(1))]
    try:
        futures[0].wait()
    except Exception as error:
        return f"{error} {futures[1].wait().item()}"
    return "nothing was raised"


def test_a_reduction_that_fails_is_told_to_whoever_waits_for_it(ranks: Ranks) -> None:
    assert "lost 1.0" in ranks.run(1, fail_in_lane)[0]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"precision": {"level": "O2", "dtype": "bfloat16"}}, "16-bit gradients are too coarse"),
        ({"precision": {"level": "O1", "dtype": "float16"}}, "another loss scale"),
        ({"optimizer_algorithm": {"algorithm": "lamb"}}, "defined for SGD"),
        ({"optimizer_implementation": {"contiguous": True}}, "per parameter tensor"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_go_together_is_refused(other: dict[str, Any], reason: str) -> None:
    candidate = Candidate(choices={"gradient_compression": {"method": "dgc"}, **other})
    facts = sample_facts(current={}, custom_step=False)
    assert reason in str(conflict(candidate, sample_environment(), facts))


def test_micro_batches_are_compressed_once(ranks: Ranks) -> None:
    """Each rank's whole gradient is, not those of its micro-batches."""
    choices = {**compressed(method="int8"), "micro_batch": {"num_micro_batches": 2}}
    whole: Trained = ranks.run(2, train, Momentum, compressed(method="int8"), 5)[0]
    pieces: Trained = ranks.run(2, train, Momentum, choices, 5)[0]
    assert pieces.losses == pytest.approx(whole.losses, rel=1e-3)
    factors = [r.evidence["gradient_compression"]["factor"] for r in (whole, pieces)]
    assert factors[0] == factors[1] > 3


def test_matrices_that_are_too_small_to_compress_are_told() -> None:
    strategy = strategy_named("gradient_compression")
    choice = {**strategy.defaults, "method": "powersgd", "rank": 64}
    effect = strategy.took_effect({"method": "powersgd", "rank": 64, "factor": 1.0}, choice)
    assert (effect.took, effect.detail) == (False, "1.0 times fewer bytes were sent")


class FeedsBack(Momentum):
    current: ClassVar = {"gradient_compression": {"method": "powersgd"}}


def test_todays_settings_cannot_be_ones_that_keep_something_for_later(tmp_path: Path) -> None:
    from steptune.tuner.trials.inspection import InspectRequest, inspect_workload

    class Ignored:
        def send(self, message: Any) -> None:
            pass

    request = InspectRequest(workload=f"{__name__}:FeedsBack", study_directory=str(tmp_path), num_ranks=2)
    with pytest.raises(WorkloadRejectedError, match="by powersgd, so its steps cannot be compared"):
        inspect_workload(request, 0, 1, Ignored())  # type: ignore[arg-type]

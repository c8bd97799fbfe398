"""O2 on several ranks: gradients of 16 bits are averaged in FP32, by DDP and in two levels, where that matters."""

import pytest
import torch
import torch.distributed as dist
from builders import sample_environment, sample_facts
from rank_jobs import build, emulated, train
from ranks import Ranks
from tiny_workloads import Everything

from steptune.tuner.records import Candidate, Choice
from steptune.tuner.strategies.combine import conflict
from steptune.tuner.training.communication import reduced_widely

pytestmark = pytest.mark.xdist_group("ranks")

BF16: dict[str, Choice] = {"precision": {"level": "O2", "dtype": "bfloat16"}}
FP16: dict[str, Choice] = {"precision": {"level": "O2", "dtype": "float16"}}
TWO_LEVELS: dict[str, Choice] = {"hierarchical_allreduce": {"levels": 2}}
COMPRESSED: dict[str, Choice] = {"gradient_compression": {"method": "bf16"}}


def averaged(rank: int, choices: dict[str, Choice]) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """Gradients of 16 bits as DDP averages them; the mean of all ranks' own in FP32, rounded once; buckets widened."""
    job = build(rank, Everything(), choices)
    parameters = [p for p in job.model.parameters() if p.dtype == torch.bfloat16]
    generator = torch.Generator().manual_seed(rank)
    own = [torch.randn(p.shape, generator=generator).to(torch.bfloat16) for p in parameters]
    for parameter, gradient in zip(parameters, own, strict=True):
        parameter.register_hook(lambda _, gradient=gradient: gradient)
    images, labels = next(iter(job.loader))
    torch.nn.functional.cross_entropy(job.model(images.to(torch.bfloat16)).float(), labels).backward()
    means = [gradient.float() / dist.get_world_size() for gradient in own]
    for mean in means:
        dist.all_reduce(mean)
    found = [p.grad.clone() for p in parameters if p.grad is not None]
    return found, [mean.to(torch.bfloat16) for mean in means], reduced_widely(job.model)


def num_widened(rank: int, choices: dict[str, Choice]) -> tuple[int, str]:
    """Buckets, and what the trial says of it."""
    trained = train(rank, Everything, choices, 2)
    return trained.evidence["precision"]["reduced_widely"], trained.effects["precision"][1]


def compressed_effect(rank: int, choices: dict[str, Choice]) -> tuple[bool, str]:
    return train(rank, Everything, choices, 3).effects["gradient_compression"]


@pytest.mark.parametrize("more", [{}, TWO_LEVELS, {"sharding": {"mode": "zero1"}}], ids=["ddp", "two levels", "zero1"])
def test_an_average_over_four_ranks_is_rounded_once(ranks: Ranks, more: dict[str, Choice]) -> None:
    for found, means, widened in ranks.run(4, emulated, 2, averaged, {**BF16, **more}):
        assert widened > 0
        assert len(found) == len(means) > 0
        for ours, mean in zip(found, means, strict=True):
            assert torch.equal(ours, mean)


def test_over_two_ranks_it_is_rounded_once_anyway(ranks: Ranks) -> None:
    """So nothing is widened, and half as much is sent."""
    for found, means, widened in ranks.run(2, averaged, BF16):
        assert widened == 0
        for ours, mean in zip(found, means, strict=True):
            assert torch.equal(ours, mean)


@pytest.mark.parametrize(
    ("choices", "is_widened"),
    [
        (FP16, True),
        ({"precision": {"level": "O1", "dtype": "bfloat16"}}, False),
        ({"precision": {"level": "O3", "dtype": "bfloat16"}}, False),
        ({**BF16, **COMPRESSED}, False),
        ({**BF16, **COMPRESSED, **TWO_LEVELS}, False),
        ({**BF16, "sharding": {"mode": "grad_op", "wrap": "block"}}, False),
    ],
    ids=["float16", "autocast", "pure", "compressed", "compressed between hosts", "sharded"],
)
def test_only_o2_is_widened_and_only_what_is_not_compressed(
    ranks: Ranks, choices: dict[str, Choice], is_widened: bool
) -> None:
    """O3 and compressions have the user's consent to drop information, and FSDP reduces FP32 by itself."""
    for number, said in ranks.run(4, emulated, 2, num_widened, choices):
        assert (number > 0) == is_widened
        assert ("gradients summed in FP32" in said) == is_widened


@pytest.mark.parametrize("more", [{}, TWO_LEVELS], ids=["ddp", "two levels"])
def test_with_consent_the_16_bits_are_sent_as_they_are(ranks: Ranks, more: dict[str, Choice]) -> None:
    for took, detail in ranks.run(4, emulated, 2, compressed_effect, {**BF16, **COMPRESSED, **more}):
        assert took
        assert detail == "2.0 times fewer bytes were sent"


@pytest.mark.parametrize(
    ("num_ranks", "precision", "method", "is_legal"),
    [
        (4, BF16, "bf16", True),
        (4, FP16, "fp16", True),
        (2, FP16, "fp16", True),
        (2, BF16, "bf16", False),
        (4, BF16, "fp16", False),
        (4, BF16, "int8", False),
        (4, {"precision": {"level": "O3", "dtype": "bfloat16"}}, "bf16", False),
    ],
)
def test_nothing_but_their_own_format_goes_with_weights_of_16_bits(
    num_ranks: int, precision: dict[str, Choice], method: str, is_legal: bool
) -> None:
    """Over two ranks bfloat16 is sent as it is without asking."""
    candidate = Candidate(choices={**precision, "gradient_compression": {"method": method}})
    reason = conflict(candidate, sample_environment(num_ranks=num_ranks), sample_facts(current={}))
    assert (reason is None) == is_legal, reason

"""Disturbing what rounding disturbs: by whom noise is shared, and by whom not."""

import torch

from steptune.tuner.trials.disturbance import Disturbance

ONES = torch.ones(64)


def test_parameters_are_disturbed_alike_on_all_ranks_and_outputs_on_each_by_noise_of_its_own() -> None:
    ranks = [Disturbance(2.0**-8, seed=1) for _ in range(2)]
    parameters = [disturb(ONES) for disturb in ranks]
    assert torch.equal(*parameters)
    assert not torch.equal(parameters[0], ONES)
    outputs = [disturb.of_rank(rank)(ONES) for rank, disturb in enumerate(ranks)]
    assert not torch.equal(*outputs)


def test_the_noise_of_a_rank_repeats_itself() -> None:
    first, second = (Disturbance(2.0**-8, seed=1).of_rank(1)(ONES) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, Disturbance(2.0**-8, seed=2).of_rank(1)(ONES))

"""Groups of choices in which every pair meets, in far fewer trials than there are pairs."""

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st
from search_builders import move

from steptune.tuner.records import Candidate
from steptune.tuner.search.groups import covering_group

levels = st.lists(st.integers(1, 3), min_size=2, max_size=6)


def options_of(counts):
    return [move(f"s{number}", level + 1) for number, count in enumerate(counts) for level in range(count)]


def as_candidate(group):
    return Candidate(choices={m.strategy: m.choice for m in group})


def pairs_of(moves):
    pairs = itertools.combinations(moves, 2)
    return {frozenset((a.label, b.label)) for a, b in pairs if a.strategy != b.strategy}


def all_groups(options, seed):
    """Groups until none is left."""
    generator, run, groups = random.Random(seed), [], []
    while group := covering_group(options, run, generator):
        groups.append(group)
        run.append(as_candidate(group))
    return groups


@settings(max_examples=40, deadline=None)
@given(counts=levels, seed=st.integers(0, 1000))
def test_every_pair_of_choices_meets(counts, seed):
    options = options_of(counts)
    groups = all_groups(options, seed)
    met = set().union(*(pairs_of(group) for group in groups))
    assert met == pairs_of(options)


@settings(max_examples=40, deadline=None)
@given(counts=levels, seed=st.integers(0, 1000))
def test_a_group_has_one_choice_of_every_strategy_and_lets_a_new_pair_meet(counts, seed):
    met = set()
    for group in all_groups(options_of(counts), seed):
        assert len({m.strategy for m in group}) == len(group) == len(counts)
        assert pairs_of(group) - met
        met |= pairs_of(group)


def test_few_groups_are_needed():
    """Eight strategies of two choices have 112 pairs; each group lets 28 meet."""
    options = options_of([2] * 8)
    assert len(pairs_of(options)) == 112
    assert len(all_groups(options, seed=0)) <= 10


def test_pairs_that_met_in_any_candidate_need_not_meet_again():
    options = options_of([1, 1, 1])
    assert covering_group(options, [as_candidate(options)], random.Random(0)) == []


def test_without_a_second_strategy_there_is_no_group():
    assert covering_group(options_of([3]), [], random.Random(0)) == []
    assert covering_group([], [], random.Random(0)) == []

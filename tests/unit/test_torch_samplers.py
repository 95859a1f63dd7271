"""Each rank's part of the rows, in a new order every epoch, the same permutation on all ranks."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler, WeightedRandomSampler

from ray_lite.train.torch.samplers import EpochCounter, PartOfSampler, RankSampler


def rank_samplers(num_rows, world_size, *, shuffle=True, remainder="wrap", seed=0):
    return [
        RankSampler(range(num_rows), rank=rank, world_size=world_size, shuffle=shuffle, seed=seed, remainder=remainder)
        for rank in range(world_size)
    ]


@given(st.integers(0, 60), st.integers(1, 5), st.booleans(), st.sampled_from(["wrap", "drop", "uneven"]))
def test_ranks_cover_the_rows_in_every_epoch(num_rows, world_size, shuffle, remainder):
    samplers = rank_samplers(num_rows, world_size, shuffle=shuffle, remainder=remainder)
    for _ in range(2):
        parts = [list(sampler) for sampler in samplers]
        assert [len(part) for part in parts] == [len(sampler) for sampler in samplers]
        rows = list(itertools.chain(*parts))
        if remainder == "uneven":
            assert sorted(rows) == list(range(num_rows))
        elif remainder == "wrap":
            assert set(rows) == set(range(num_rows))
            assert len({len(part) for part in parts}) == 1
        else:
            assert len(set(rows)) == len(rows) == num_rows // world_size * world_size


@pytest.mark.parametrize("remainder", ["wrap", "drop"])
def test_the_order_of_an_epoch_is_torchs(remainder):
    for rank, ours in enumerate(rank_samplers(25, 2, remainder=remainder, seed=3)):
        theirs = DistributedSampler(range(25), 2, rank, seed=3, drop_last=remainder == "drop")
        for epoch in range(3):
            theirs.set_epoch(epoch)
            assert list(ours) == list(theirs)


def test_every_pass_has_another_order():
    sampler = rank_samplers(100, 2)[0]
    orders = [tuple(sampler) for _ in range(4)]
    assert len(set(orders)) == 4
    assert sampler.epoch == 3


def test_whoever_sets_the_epoch_gets_that_epoch():
    """The habit of calling ``set_epoch`` stays right, and so does calling it once, on resuming."""
    counted, told = rank_samplers(50, 2)[1], rank_samplers(50, 2)[1]
    orders = [tuple(counted) for _ in range(6)]
    for epoch in range(6):
        told.set_epoch(epoch)
        assert tuple(told) == orders[epoch]
    told.set_epoch(3)
    assert [tuple(told), tuple(told)] == orders[3:5]
    told.set_epoch(3)
    told.set_epoch(3)
    assert tuple(told) == orders[3]


def test_epochs_are_counted_from_zero():
    counter = EpochCounter()
    assert [counter.start_pass() for _ in range(3)] == [0, 1, 2]
    counter.set(7)
    assert [counter.epoch, counter.start_pass(), counter.start_pass()] == [7, 7, 8]


def test_it_is_a_distributed_sampler_for_those_who_ask():
    sampler = rank_samplers(10, 2)[1]
    assert isinstance(sampler, DistributedSampler)
    assert (sampler.rank, sampler.num_replicas, sampler.num_samples, sampler.total_size) == (1, 2, 5, 10)


class Shuffled:
    """A sampler of a user's own, that draws from whichever generator it was written for."""

    def __init__(self, num_rows, draw):
        self.num_rows, self.draw = num_rows, draw

    def __len__(self):
        return self.num_rows

    def __iter__(self):
        return iter(self.draw(self.num_rows))


def _python(num_rows):
    rows = list(range(num_rows))
    random.shuffle(rows)
    return rows


DRAWS = {
    "torch": lambda n: torch.randperm(n).tolist(),
    "random": _python,
    "numpy": lambda n: np.random.permutation(n).tolist(),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_ranks_divide_one_order_of_a_random_sampler(draw):
    """The ranks' own generators differ, and yet no row may be read twice."""
    inner = Shuffled(20, DRAWS[draw])
    parts = [PartOfSampler(inner, rank=rank, world_size=2, seed=0, remainder="wrap") for rank in range(2)]
    orders = []
    for _ in range(2):
        rows = []
        for rank, part in enumerate(parts):
            torch.manual_seed(rank)
            random.seed(rank)
            np.random.seed(rank)
            rows.append(list(part))
        assert sorted(rows[0] + rows[1]) == list(range(20))
        orders.append(rows[0])
    assert orders[0] != orders[1]


def test_drawing_leaves_the_generators_alone():
    part = PartOfSampler(Shuffled(20, DRAWS["torch"]), rank=0, world_size=2, seed=0, remainder="wrap")

    def numbers(draw):
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        if draw:
            list(part)
        return (float(torch.rand(())), random.random(), float(np.random.rand()))

    assert numbers(draw=True) == numbers(draw=False)


def test_a_weighted_sampler_keeps_its_weights():
    inner = WeightedRandomSampler([0.0, 1.0, 1.0, 0.0], num_samples=200)
    part = PartOfSampler(inner, rank=1, world_size=2, seed=0, remainder="wrap")
    assert len(part) == 100
    assert set(part) == {1, 2}


def test_an_endless_sampler_is_read_as_it_goes():
    class Endless:
        def __iter__(self):
            return itertools.count()

    part = PartOfSampler(Endless(), rank=1, world_size=3, seed=0, remainder="wrap")
    assert list(itertools.islice(part, 3)) == [1, 4, 7]
    with pytest.raises(TypeError):
        len(part)


def test_what_the_inner_sampler_offers_stays_in_reach():
    class Buckets:
        batch_size = 8

        def __init__(self):
            self.epochs = []

        def set_epoch(self, epoch):
            self.epochs.append(epoch)

        def __len__(self):
            return 4

        def __iter__(self):
            return iter([[0], [1], [2], [3]])

    inner = Buckets()
    part = PartOfSampler(inner, rank=0, world_size=2, seed=0, remainder="wrap")
    assert part.batch_size == 8
    assert [list(part), list(part)] == [[[0], [2]]] * 2
    assert inner.epochs == [0, 1]
    with pytest.raises(AttributeError):
        _ = part.nothing

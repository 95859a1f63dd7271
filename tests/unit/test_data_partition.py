"""Which rows belong to which rank: a partition with a documented rule for what is left over."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_lite.train.data.partition import describe_remainder, shard_indices, shard_stream

rows_and_workers = st.tuples(st.integers(0, 200), st.integers(1, 16))


def all_shards(num_rows: int, world_size: int, remainder: str) -> list[list[int]]:
    return [
        list(shard_indices(num_rows, world_rank=rank, world_size=world_size, remainder=remainder))
        for rank in range(world_size)
    ]


@given(rows_and_workers)
def test_wrap_covers_every_row_in_equal_parts(size):
    num_rows, world_size = size
    shards = all_shards(num_rows, world_size, "wrap")
    assert {len(shard) for shard in shards} == {-(-num_rows // world_size)}
    assert set(itertools.chain(*shards)) == set(range(num_rows))


@given(rows_and_workers)
def test_wrap_repeats_only_rows_from_the_front(size):
    num_rows, world_size = size
    counts = Counter(itertools.chain(*all_shards(num_rows, world_size, "wrap")))
    extra = -num_rows % world_size
    if num_rows >= world_size:
        assert [row for row, count in sorted(counts.items()) if count == 2] == list(range(extra))
    assert sum(counts.values()) == (num_rows + extra if num_rows else 0)


@given(rows_and_workers)
def test_drop_reads_no_row_twice_in_equal_parts(size):
    num_rows, world_size = size
    shards = all_shards(num_rows, world_size, "drop")
    assert {len(shard) for shard in shards} == {num_rows // world_size}
    assert sorted(itertools.chain(*shards)) == list(range(num_rows // world_size * world_size))


@given(rows_and_workers)
def test_uneven_reads_every_row_exactly_once(size):
    num_rows, world_size = size
    shards = all_shards(num_rows, world_size, "uneven")
    assert sorted(itertools.chain(*shards)) == list(range(num_rows))
    lengths = [len(shard) for shard in shards]
    assert max(lengths) - min(lengths) <= 1


@given(rows_and_workers, st.sampled_from(["wrap", "drop"]))
def test_rows_are_those_of_torchs_distributed_sampler(size, remainder):
    """The rule is borrowed, so that a user who knows torch's knows ours."""
    torch_data = pytest.importorskip("torch.utils.data")
    num_rows, world_size = size
    if num_rows < world_size:
        return  # torch repeats all rows there with "wrap", and raises with drop_last=True
    for rank, shard in enumerate(all_shards(num_rows, world_size, remainder)):
        theirs = torch_data.DistributedSampler(
            range(num_rows), num_replicas=world_size, rank=rank, shuffle=False, drop_last=remainder == "drop"
        )
        assert shard == list(theirs)


@given(rows_and_workers, st.sampled_from(["wrap", "drop", "uneven"]))
def test_a_stream_is_shared_out_like_rows(size, remainder):
    """A stream without a length follows the same rule as a list of the same items."""
    num_rows, world_size = size
    for rank, shard in enumerate(all_shards(num_rows, world_size, remainder)):
        stream = shard_stream(iter(range(num_rows)), world_rank=rank, world_size=world_size, remainder=remainder)
        assert list(stream) == shard


def test_an_endless_stream_is_read_only_as_far_as_needed():
    items = itertools.count()
    own = shard_stream(items, world_rank=1, world_size=3)
    assert list(itertools.islice(own, 4)) == [1, 4, 7, 10]
    assert next(items) == 12


@given(rows_and_workers, st.sampled_from(["wrap", "drop", "uneven"]))
def test_row_numbers_behave_like_the_list_of_them(size, remainder):
    num_rows, world_size = size
    rows = shard_indices(num_rows, world_rank=world_size - 1, world_size=world_size, remainder=remainder)
    as_list = list(rows)
    assert [rows[i] for i in range(len(rows))] == as_list
    assert [rows[i] for i in range(-len(rows), 0)] == as_list
    assert rows[::-2] == as_list[::-2]
    for outside in (len(rows), -len(rows) - 1):
        with pytest.raises(IndexError):
            rows[outside]


def test_a_billion_rows_cost_no_memory():
    """Row numbers are a range, not a list of ints."""
    rows = shard_indices(10**9 + 1, world_rank=7, world_size=8)
    assert len(rows) == 125_000_001
    assert rows[-1] == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_rank": 2, "world_size": 2}, r"world_rank must be in \[0, 2\), got 2"),
        ({"world_rank": -1, "world_size": 2}, r"world_rank must be in \[0, 2\), got -1"),
        ({"world_rank": 0, "world_size": 0}, "world_size must be >= 1, got 0"),
        ({"world_rank": 0, "world_size": 1, "remainder": "pad"}, "'wrap', 'drop', 'uneven', got 'pad'"),
    ],
)
def test_impossible_ranks_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        shard_indices(4, **arguments)
    with pytest.raises(ValueError, match=message):
        shard_stream([1, 2], **arguments)


def test_negative_rows_are_refused():
    with pytest.raises(ValueError, match="num_rows must be >= 0, got -1"):
        shard_indices(-1, world_rank=0, world_size=1)


def test_what_happens_to_the_left_over_rows_is_said():
    """Never a silently duplicated row."""
    assert describe_remainder("train", 24, 2, "wrap") is None
    assert describe_remainder("train", 25, 2, "uneven") is None
    assert describe_remainder("train", 25, 2, "wrap") == (
        "dataset 'train': 25 rows over 2 workers: 1 rows from the front are read once more, so that each shard has 13 "
        "(remainder='wrap'; 'uneven' reads each row once, 'drop' leaves the tail out)"
    )
    assert "the last 1 are read by no worker" in (describe_remainder("train", 25, 2, "drop") or "")
    assert "has no rows" in (describe_remainder("train", 0, 2, "uneven") or "")

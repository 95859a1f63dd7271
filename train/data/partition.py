"""Which rows belong to which rank: pure, the same rule for arrays, lists, samplers and streams."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar, overload

import attrs

__all__ = ["REMAINDERS", "RowNumbers", "describe_remainder", "shard_indices", "shard_stream"]

T = TypeVar("T")

REMAINDERS = ("wrap", "drop", "uneven")


@attrs.frozen(repr=False)
class RowNumbers(Sequence[int]):
    """The row numbers of one shard, in O(1) memory whatever their number.

    Attributes:
        rows: Every ``world_size``-th row, from the rank's own number on.
        wrapped: One row more, from the front of the dataset, that makes this shard as long
            as the others; None where it is not needed.
    """

    rows: range
    wrapped: int | None = None

    def __len__(self) -> int:
        return len(self.rows) + (self.wrapped is not None)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"row {index} of a shard of {len(self)} rows")
        if position == len(self.rows):
            assert self.wrapped is not None
            return self.wrapped
        return self.rows[position]

    def __iter__(self) -> Iterator[int]:
        # Sequence's own iteration would go through __getitem__ for every row.
        yield from self.rows
        if self.wrapped is not None:
            yield self.wrapped

    def __repr__(self) -> str:
        return f"RowNumbers({self.rows}{'' if self.wrapped is None else f' + row {self.wrapped}'})"


def _check(world_rank: int, world_size: int, remainder: str) -> None:
    if world_size < 1:
        raise ValueError(f"world_size must be >= 1, got {world_size}")
    if not 0 <= world_rank < world_size:
        raise ValueError(f"world_rank must be in [0, {world_size}), got {world_rank}")
    if remainder not in REMAINDERS:
        raise ValueError(f"remainder must be one of {', '.join(map(repr, REMAINDERS))}, got {remainder!r}")


def shard_indices(num_rows: int, *, world_rank: int, world_size: int, remainder: str = "wrap") -> RowNumbers:
    """Row numbers that one worker reads in an epoch.

    Rank ``r`` gets rows ``r``, ``r + world_size``, ``r + 2 * world_size`` and so on, so a dataset that
    is sorted by class still gives every rank all classes. ``remainder`` says what becomes of
    the last ``num_rows % world_size`` rows:

    * ``"wrap"``: all ranks get ``ceil(num_rows / world_size)`` rows, so none waits alone at a
      collective. The tail wraps round to the first rows, which are read twice.
    * ``"drop"``: all ranks get ``floor(num_rows / world_size)`` rows; the tail is read by none.
    * ``"uneven"``: every row is read exactly once, and some ranks have one row more than others.

    No rows at all, or ``"drop"`` with fewer rows than workers, gives empty shards on all ranks.

    Args:
        num_rows: Rows in the whole dataset, >= 0.
        world_rank: This worker, in ``[0, world_size)``.
        world_size: Workers in the group, >= 1.
        remainder: ``"wrap"``, ``"drop"`` or ``"uneven"``.

    Returns:
        A sequence of ints in ``[0, num_rows)``.

    Raises:
        ValueError: An argument is outside its range.

    Source:
        ``"wrap"`` and ``"drop"`` give the rows of ``torch.utils.data.DistributedSampler`` with
        ``shuffle=False`` and ``drop_last`` False and True.
    """
    _check(world_rank, world_size, remainder)
    if num_rows < 0:
        raise ValueError(f"num_rows must be >= 0, got {num_rows}")
    if remainder == "drop":
        return RowNumbers(range(world_rank, num_rows // world_size * world_size, world_size))
    own = range(world_rank, num_rows, world_size)
    rows_per_rank = -(-num_rows // world_size)
    if remainder == "uneven" or len(own) == rows_per_rank:
        return RowNumbers(own)
    # At most one row is missing, the one that would be the shard's last.
    return RowNumbers(own, (world_rank + len(own) * world_size) % num_rows)


def shard_stream(items: Iterable[T], *, world_rank: int, world_size: int, remainder: str = "wrap") -> Iterator[T]:
    """The items of a stream that one worker reads: the rule of :func:`shard_indices`, for an unknown length.

    Every rank must go through the whole stream to find its own items, and all must see the
    same stream. Memory holds at most ``2 * world_size`` items.

    Args:
        items: The whole stream, the same on all ranks.
        world_rank: This worker, in ``[0, world_size)``.
        world_size: Workers in the group, >= 1.
        remainder: ``"wrap"``, ``"drop"`` or ``"uneven"``, as in :func:`shard_indices`.

    Raises:
        ValueError: An argument is outside its range.
    """
    _check(world_rank, world_size, remainder)
    return _sharded(iter(items), world_rank, world_size, remainder)


def _sharded(items: Iterator[T], world_rank: int, world_size: int, remainder: str) -> Iterator[T]:
    first: list[T] | None = None
    while group := list(itertools.islice(items, world_size)):
        if first is None:
            first = group
        if len(group) == world_size:
            yield group[world_rank]
        elif remainder == "drop":
            return
        elif world_rank < len(group):
            yield group[world_rank]
        elif remainder == "wrap":
            yield first[(world_rank - len(group)) % len(first)]


def describe_remainder(name: str, num_rows: int, world_size: int, remainder: str) -> str | None:
    """One sentence about rows that are read twice or not at all; None when every row is read once."""
    left_over = num_rows % world_size
    if num_rows == 0:
        return f"dataset {name!r} has no rows: the shard of every worker is empty"
    if left_over == 0 or remainder == "uneven":
        return None
    rows = f"dataset {name!r}: {num_rows} rows over {world_size} workers"
    if remainder == "drop":
        return f"{rows}: the last {left_over} are read by no worker (remainder='drop')"
    return (
        f"{rows}: {world_size - left_over} rows from the front are read once more, so that each shard has "
        f"{-(-num_rows // world_size)} (remainder='wrap'; 'uneven' reads each row once, 'drop' leaves the tail out)"
    )

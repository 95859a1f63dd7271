"""The part of a dataset that one worker reads."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from .kinds import Kind, classify, count_rows, is_torch_dataset, is_torch_tensor
from .marker import Shard
from .partition import RowNumbers, describe_remainder, shard_indices, shard_stream

if TYPE_CHECKING:
    import numpy as np

__all__ = ["ListShard", "RowsShard", "StreamShard", "make_shard"]

logger = logging.getLogger(__name__)


class ListShard(list[Any], Shard):
    """A list that is a shard: a list in every other way."""

    __slots__ = ()


class _Rows(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@attrs.frozen(eq=False)
class RowsShard(Sequence[Any], Shard):
    """Some rows of a map-style dataset, read from it when they are asked for.

    Attributes:
        dataset: The whole dataset.
        indices: Which of its rows belong to this shard.
    """

    dataset: _Rows
    indices: RowNumbers

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.dataset[row] for row in self.indices[index]]
        return self.dataset[self.indices[index]]

    def __iter__(self) -> Iterator[Any]:
        return (self.dataset[row] for row in self.indices)

    def __repr__(self) -> str:
        return f"<{len(self)} rows of a {type(self.dataset).__name__}: {self.indices}>"


@attrs.frozen(eq=False)
class StreamShard(Shard):
    """One worker's items of a dataset that can only be iterated over.

    Each iteration goes through the whole dataset and leaves out the other workers' items.
    """

    dataset: Iterable[Any]
    world_rank: int
    world_size: int
    remainder: str

    def __iter__(self) -> Iterator[Any]:
        return shard_stream(
            self.dataset, world_rank=self.world_rank, world_size=self.world_size, remainder=self.remainder
        )


def make_shard(
    payload: Any,
    *,
    is_split: bool,
    remainder: str,
    world_rank: int,
    world_size: int,
    name: str = "train",
) -> Any:
    """What ``train.get_dataset_shard(name)`` gives on one worker.

    Which rows, see :func:`shard_indices`. A split dataset comes as

    * a list, for a list or a tuple;
    * an array, tensor, DataFrame or Table of the same type, for one of those: this worker's own
      copy, contiguous and writable (a whole dataset is shared and may be read-only);
    * a dict of such, for a dict of columns;
    * a ``torch.utils.data.Subset``, for a torch map-style dataset;
    * a sequence that reads from the dataset, for anything else with ``len()`` and ``[i]``;
    * an iterable that leaves out the other workers' items, for one that can only be iterated over.

    Args:
        payload: ``DataSource.payload()``, as it arrived on this worker. Not a part from
            ``DataSource.parts()``: that is a shard already.
        is_split: ``DataSource.is_split``; if False, the whole dataset comes back.
        remainder: ``DataConfig.remainder``.
        world_rank: This worker, in ``[0, world_size)``.
        world_size: Workers in the group, >= 1.
        name: The dataset's name, for the log.

    Raises:
        ValueError: A rank or the remainder is outside its range.
        NotADatasetError: ``payload`` is no dataset; ``check_datasets`` refuses it earlier.
    """
    kind = classify(payload)
    if not is_split:
        # Ray Data gives a whole dataset as an iterator too, so that splitting or not changes no line of the loop.
        return payload.iterator() if hasattr(payload, "streaming_split") and hasattr(payload, "iterator") else payload
    if kind is Kind.STREAM:
        return _stream_shard(payload, world_rank, world_size, remainder)
    num_rows = count_rows(payload, kind)
    if num_rows is None:
        raise TypeError(f"dataset {name!r} splits itself: hand its part to the worker instead")
    rows = shard_indices(num_rows, world_rank=world_rank, world_size=world_size, remainder=remainder)
    if world_rank == 0 and (note := describe_remainder(name, num_rows, world_size, remainder)) is not None:
        # Fewer rows than workers is hardly what anybody meant.
        logger.log(logging.WARNING if num_rows < world_size else logging.INFO, note)
    return _take(payload, kind, rows)


def _stream_shard(dataset: Any, world_rank: int, world_size: int, remainder: str) -> Any:
    if is_torch_dataset(dataset, "IterableDataset"):
        from .torch_shards import TorchStreamShard

        return TorchStreamShard(dataset, world_rank=world_rank, world_size=world_size, remainder=remainder)
    return StreamShard(dataset, world_rank, world_size, remainder)


def _take(dataset: Any, kind: Kind, rows: RowNumbers) -> Any:
    if kind is Kind.COLUMNS:
        columns: Mapping[Any, Any] = dataset
        return {name: _take(column, classify(column), rows) for name, column in columns.items()}
    if kind is Kind.ARRAY:
        return _take_from_array(dataset, rows)
    if kind is Kind.FRAME:
        return dataset.iloc[_as_numpy(rows)]
    if kind is Kind.TABLE:
        return dataset.take(_as_numpy(rows))
    if kind is Kind.SELECTABLE:
        return dataset.select(list(rows))
    if kind is Kind.LIST:
        return ListShard(dataset[row] for row in rows)
    if is_torch_dataset(dataset, "Dataset"):
        from .torch_shards import TorchShard

        return TorchShard(dataset, rows)
    return RowsShard(dataset, rows)


def _take_from_array(array: Any, rows: RowNumbers) -> Any:
    if is_torch_tensor(array):
        import torch

        return array.index_select(0, torch.from_numpy(_as_numpy(rows)).to(array.device))
    return array[_as_numpy(rows)]


def _as_numpy(rows: RowNumbers) -> np.ndarray[Any, np.dtype[np.int64]]:
    # What asks for this is an array library, and all of those bring numpy.
    import numpy as np

    index = np.arange(rows.rows.start, rows.rows.stop, rows.rows.step, dtype=np.int64)
    return index if rows.wrapped is None else np.append(index, rows.wrapped)

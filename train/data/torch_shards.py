"""Shards of torch datasets, in torch's own types; imported only where a torch dataset has been met."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, Subset, get_worker_info

from .marker import Shard
from .partition import shard_indices, shard_stream

__all__ = ["TorchShard", "TorchStreamShard"]


class TorchShard(Subset[Any], Shard):
    """A ``torch.utils.data.Subset`` that is a worker's part."""


class TorchStreamShard(IterableDataset[Any], Shard):
    """One worker's items of an ``IterableDataset``, divided once more among the workers of its DataLoader.

    Every process goes through the whole stream and keeps its own items, so the dataset must
    give the same stream in each process: one that looks at ``get_worker_info()`` or at the
    rank divides itself, and must not be wrapped in this.

    Args:
        dataset: The whole stream.
        world_rank: This worker, in ``[0, world_size)``.
        world_size: Workers in the group, >= 1.
        remainder: As in ``shard_indices``; with ``"wrap"`` and ``"drop"`` all ranks get the
            same number of items, and so the same number of batches.
    """

    def __init__(self, dataset: IterableDataset[Any], *, world_rank: int, world_size: int, remainder: str) -> None:
        self.dataset, self.world_rank, self.world_size, self.remainder = dataset, world_rank, world_size, remainder

    def __iter__(self) -> Iterator[Any]:
        own = shard_stream(
            self.dataset, world_rank=self.world_rank, world_size=self.world_size, remainder=self.remainder
        )
        loader_worker = get_worker_info()
        if loader_worker is None:
            return own
        # The rank's items first, then the loader's workers: so the numbers of items, and of
        # batches, are the same on all ranks whatever the number of loader workers.
        return itertools.islice(own, loader_worker.id, None, loader_worker.num_workers)

    def __len__(self) -> int:
        # A TypeError for a stream without a length, as torch's own datasets give.
        num_items = len(self.dataset)  # type: ignore[arg-type]
        return len(
            shard_indices(num_items, world_rank=self.world_rank, world_size=self.world_size, remainder=self.remainder)
        )

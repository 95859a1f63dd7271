"""Samplers that give each rank its part, in a new order every epoch."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DistributedSampler, Sampler

from ..data.partition import shard_indices, shard_stream

__all__ = ["EpochCounter", "PartOfSampler", "RankSampler"]


class EpochCounter:
    """Counts passes over the data, unless somebody else counts.

    The first pass is epoch 0, each further one the next. After ``set(e)`` the next pass is
    ``e``, and counting goes on from there.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._is_next = True

    def set(self, epoch: int) -> None:
        """The next pass is ``epoch``."""
        self.epoch, self._is_next = epoch, True

    def start_pass(self) -> int:
        """The number of the pass that begins now."""
        if not self._is_next:
            self.epoch += 1
        self._is_next = False
        return self.epoch


class RankSampler(DistributedSampler[Any]):
    """torch's ``DistributedSampler`` that counts epochs itself and knows what to do with the last rows.

    A subclass, because user code and libraries ask ``isinstance(loader.sampler,
    DistributedSampler)`` before they call ``set_epoch``, which works here as well.

    Args:
        dataset: Anything with a length.
        rank: This worker, in ``[0, world_size)``.
        world_size: Workers in the group.
        shuffle: Whether each epoch has an order of its own, the same on all ranks.
        seed: The same on all ranks.
        remainder: As in ``shard_indices``.

    Source:
        The order of an epoch is that of ``DistributedSampler`` with the same seed and epoch.
    """

    def __init__(self, dataset: Sized, *, rank: int, world_size: int, shuffle: bool, seed: int, remainder: str) -> None:
        # Not super().__init__(): it computes lengths by its own rule, which knows no "uneven".
        self._num_rows = len(dataset)
        self._remainder = remainder
        self._counter = EpochCounter()
        self.dataset = dataset  # type: ignore[assignment]  # only its length is used
        self.num_replicas, self.rank = world_size, rank
        self.shuffle, self.seed, self.drop_last = shuffle, seed, remainder == "drop"
        self.num_samples = len(self._own(self._num_rows))
        self.total_size = self.num_samples * world_size

    def _own(self, num_rows: int) -> Any:
        return shard_indices(num_rows, world_rank=self.rank, world_size=self.num_replicas, remainder=self._remainder)

    @property
    def epoch(self) -> int:  # type: ignore[override]  # a plain attribute there
        """The epoch of the pass that is going on, or of the next one after ``set_epoch``."""
        return self._counter.epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass the one of ``epoch``; not needed, passes are counted."""
        self._counter.set(epoch)

    def __iter__(self) -> Iterator[Any]:
        # Not a generator, so that a pass counts from the moment it is asked for.
        epoch = self._counter.start_pass()
        rows = self._own(self._num_rows)
        if not self.shuffle:
            return iter(rows)
        generator = torch.Generator()
        generator.manual_seed(self.seed + epoch)
        order = torch.randperm(self._num_rows, generator=generator)
        return iter(order[list(rows)].tolist())


class PartOfSampler(Sampler[Any]):
    """One rank's part of what another sampler gives: rows, or whole batches.

    The other sampler may be random: its order is drawn with the seed of the epoch, the same on
    all ranks, so they divide one order among them. (A sampler with a generator of its own must
    be given the same one on all ranks.) Outside, the state of the random generators is as if
    nothing had been drawn.

    Args:
        sampler: The user's sampler or batch sampler.
        rank: This worker, in ``[0, world_size)``.
        world_size: Workers in the group.
        seed: The same on all ranks.
        remainder: As in ``shard_indices``.
    """

    def __init__(self, sampler: Iterable[Any], *, rank: int, world_size: int, seed: int, remainder: str) -> None:
        self.sampler = sampler
        self.rank, self.num_replicas, self.seed = rank, world_size, seed
        self._remainder = remainder
        self._counter = EpochCounter()

    def __getattr__(self, name: str) -> Any:
        # What the user's sampler offers besides (batch_size, drop_last ...) stays in reach.
        if name.startswith("__") or "sampler" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.sampler, name)

    @property
    def epoch(self) -> int:
        """The epoch of the pass that is going on, or of the next one after ``set_epoch``."""
        return self._counter.epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass the one of ``epoch``; not needed, passes are counted."""
        self._counter.set(epoch)

    def __len__(self) -> int:
        return len(
            shard_indices(
                len(self.sampler),  # type: ignore[arg-type]  # a TypeError where it has none
                world_rank=self.rank,
                world_size=self.num_replicas,
                remainder=self._remainder,
            )
        )

    def __iter__(self) -> Iterator[Any]:
        epoch = self._counter.start_pass()
        if callable(set_epoch := getattr(self.sampler, "set_epoch", None)):
            set_epoch(epoch)
        if not hasattr(self.sampler, "__len__"):
            # Perhaps endless, so it is read as it goes, and draws its own random numbers.
            return shard_stream(
                self.sampler, world_rank=self.rank, world_size=self.num_replicas, remainder=self._remainder
            )
        with _seeded(self.seed + epoch):
            everything = list(self.sampler)
        own = shard_indices(
            len(everything), world_rank=self.rank, world_size=self.num_replicas, remainder=self._remainder
        )
        return iter([everything[row] for row in own])


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Global generators with a known seed, put back afterwards."""
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)
